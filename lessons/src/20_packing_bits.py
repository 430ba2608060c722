# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Packing bits: codes in words, in three languages
#
# A code of 3 or 4 bits saves nothing until it stops taking a byte. You will put codes
# into 32-bit words and read them back, find the same lines in NumPy, in Numba and in
# CUDA C, run all three on this machine, and see why a kernel wants the bits in another
# order than a file does.
#
# **What you will do**
#
# - read a code out of words, also where it straddles two of them;
# - write a row of words the way a GPU thread does, one thread per word;
# - run the real kernels of this project, compiled, without a GPU, and compare every
#   bit;
# - turn a code into a number by writing an exponent in front of it;
# - count the instructions that the order of the bits saves.
#
# **What you need**: NumPy, the bit operations `<<`, `>>`, `&`, `|`, and the uniform
# quantizer.

# %%
import numpy as np

import kvq
from kvq import Scheme, checks, packing
from kvq.kernels import layouts, teach
from kvq.samples import real_kv

# %% [markdown]
# ## Where is code $i$?
#
# Take a row of codes of $b$ bits as one long string of bits, the lowest bit first. Code
# $i$ then has the bits $b\,i$ to $b\,i + b - 1$. Cut the string into words of 32 bits:
#
# $$\text{word} = \left\lfloor \frac{b\,i}{32} \right\rfloor, \qquad
# \text{shift} = b\,i \bmod 32 .$$
#
# With 4 bits a word has 8 codes and no code is cut. With 3 bits some are.
#
# **Predict.** Which codes of 3 bits begin in one word and end in the next one?

# %%
b = 3
for i in range(64):
    first, last = b * i // 32, (b * i + b - 1) // 32
    if first != last:
        print(f"code {i} of {b} bits: bits {b * i} to {b * i + b - 1}, two words")

# %% [markdown]
# **Exercise 1.** Read code $i$. Shift its word down; if the code is cut, the rest is in
# the low bits of the next word; keep $b$ bits. `words` is a list of Python integers.


# %%
def read_code(words, i, b):
    """Code i of b bits."""
    # BEGIN SOLUTION (5 lines)
    word, shift = divmod(b * i, 32)
    code = words[word] >> shift
    if shift + b > 32:
        code |= words[word + 1] << (32 - shift)
    return code & (2**b - 1)
    # END SOLUTION


checks.check_read_code(read_code)

# %% [markdown]
# These lines exist three times in this project. Here they are as the CUDA C kernels
# have them, and as the Numba kernels have them. (`i * bits >> 5` is a division by 32,
# and `& 31` is its remainder.)

# %%
print(teach.excerpt("kvq.cuh", "inline u32 read_code"))
print()
print(teach.excerpt("device.py", "def read_code"))

# %% [markdown]
# ## One thread per word
#
# To write, a sequential program appends one code after the other. A GPU runs thousands
# of threads at once, and no two of them may write the same word: each would read the
# old word, put its code in, and write back a word without the other's code. So we turn
# the question round. Not *where does my code go*, but *which codes are in my word*:
# those with
#
# $$\left\lfloor \frac{32\,w}{b} \right\rfloor \le i, \qquad b\,i < 32\,(w + 1) .$$
#
# The first of them may have begun in the word before.
#
# **Exercise 2.** Write word $w$ of a row of codes, as thread $w$ would.


# %%
def write_word(codes, w, b):
    """The 32 bits of word w, an integer. codes: a list of integers below 2^b."""
    # BEGIN SOLUTION (7 lines)
    word, i = 0, 32 * w // b
    while i < len(codes) and b * i < 32 * (w + 1):
        shift = b * i - 32 * w
        cut = codes[i] >> -shift if shift < 0 else codes[i] << shift
        word |= cut & 0xFFFFFFFF
        i += 1
    return word
    # END SOLUTION


checks.check_write_word(write_word)

# %% [markdown]
# The reference has a third way. It packs eight codes into $b$ bytes, as arrays. All
# three must give the same bits, since the order of the bits is a format that files and
# other programs rely on.

# %%
rng = np.random.default_rng(0)
for b in (2, 3, 4, 8):
    codes = rng.integers(0, 2**b, 64).astype(np.uint8)
    by_thread = [write_word(codes.tolist(), w, b) for w in range(64 * b // 32)]
    by_bytes = packing.pack(codes, b).view("<u4")
    assert by_thread == by_bytes.tolist()
    assert [read_code(by_thread, i, b) for i in range(64)] == codes.tolist()
    print(
        f"{b} bits: {len(codes)} codes in {4 * len(by_thread)} bytes, three ways alike"
    )

# %% [markdown]
# ## The kernel, run here
#
# This is the first kernel of the ladder, with one thread per word. Find your loop in
# it.

# %%
print(teach.excerpt("pack/v1_word_per_thread.cu", "void pack_v1(const X*"))

# %% [markdown]
# NVIDIA's compiler turns it into PTX, the assembly language of NVIDIA's GPUs. The PTX
# comes with this project, and so does a machine that runs PTX on NumPy, instruction by
# instruction, for all threads of many blocks at once. It is slow, it knows no time, and
# it needs no GPU. We give the kernel real keys and compare with the reference: codes,
# scales and zeros, bit for bit. Then the same for the Numba kernel, whose PTX was made
# from Python.
#
# **Predict.** How many of the bits will differ?

# %%
keys = real_kv(15).k[:, :40]
for b in (2, 3, 4, 8):
    scheme = Scheme(b, "token", 32, "asymmetric")
    expected = kvq.quantize(keys, scheme)
    for language in teach.LANGUAGES:
        packed, reports = teach.run("pack", "v1", keys, scheme, language=language)
        for mine, theirs in zip(packed.arrays, expected.arrays, strict=True):
            assert mine.tobytes() == theirs.tobytes()
    print(f"{b} bits: CUDA C and Numba give the reference's {expected.nbytes} bytes")

# %% [markdown]
# None. Packing has one right answer, so the tests of this project do not allow a
# tolerance for it.
#
# ## A number without a conversion
#
# To attend over codes, a kernel turns each code into a floating-point number. GPUs have
# an instruction for it, but it runs at a quarter of the speed of an addition or less.
# There is a cheaper way. A binary16 number has a sign, 5 bits of exponent and 10 bits
# of fraction:
#
# $$x = 2^{e - 15} \left(1 + \frac{f}{1024}\right) .$$
#
# With the exponent field $e = 25$ this is $1024 + f$. So write the exponent in front of
# the code, and the bits *are* the number $1024 + \text{code}$. One OR, one subtraction.
#
# **Exercise 3.** Which 16 bits have $e = 25$ and everything else 0? Then convert.


# %%
def by_magic(codes):
    """float16 numbers of codes below 1024 (uint16), without a conversion."""
    # BEGIN SOLUTION (2 lines)
    magic = np.uint16(25 << 10)
    return (codes | magic).view(np.float16) - np.float16(1024)
    # END SOLUTION


checks.check_by_magic(by_magic)
print(f"25 << 10 = {25 << 10:#06x}")

# %% [markdown]
# A register has 32 bits, so it holds two such numbers, and GPUs subtract them in pairs.
# For that, two codes must stand 16 bits apart, each in the low bits of a half. In the
# canonical order neighbours stand $b$ bits apart. So the faster kernels use another
# order, in which one shift and one mask bring out a pair:
#
# $$\text{code } 2p + h \;\rightarrow\; \text{bit } 16\,h + b\,p, \qquad
# h \in \{0, 1\} .$$
#
# **Exercise 4.** Write a word of 4-bit codes in this *paired* order.


# %%
def paired_word(codes):
    """The word of eight codes of 4 bits, a Python integer."""
    # BEGIN SOLUTION (5 lines)
    word = 0
    for e, code in enumerate(codes):
        p, h = divmod(e, 2)
        word |= code << (16 * h + 4 * p)
    return word
    # END SOLUTION


checks.check_paired_word(paired_word)

# %%
codes = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.uint8)
print(f"canonical {layouts.to_words(codes, 4)[0]:#010x}")
paired = int(layouts.to_words(codes, 4, "paired")[0])
print(f"paired    {paired:#010x}")
assert paired == paired_word(codes.tolist())
for p in range(4):
    pair = paired >> (4 * p) & 0x000F000F
    numbers = np.array([pair | 0x64006400], np.uint32).view(np.float16) - 1024
    print(f"pair {p}: {pair:#010x} -> {numbers.tolist()}")

# %% [markdown]
# Both orders hold the same bits in different places: a permutation, with an inverse.
# The cache need not care. Whoever packs and whoever reads must agree.
#
# ## What it saves
#
# The ladder has two kernels that turn a tensor back into numbers. v1 has a thread per
# number, reads canonical words and converts. v2 has a thread per word, reads paired
# words and uses the magic number. The machine counts instructions: each of a warp of 32
# threads counts as one.
#
# **Predict.** How many instructions per number does v1 take, and how many v2?

# %%
D = 128
x = rng.standard_normal((2, 64, D)).astype(np.float16)
per_number = {}
for b in (8, 4, 3, 2):
    stored = kvq.quantize(x, Scheme(b, "token", 64, "asymmetric"))
    for version in ("v1", "v2"):
        back, (report,) = teach.run("dequant", version, stored)
        np.testing.assert_array_max_ulp(back, stored.dequantize(), maxulp=1)
        per_number[b, version] = 32 * report.instructions / x.size
    v1, v2 = per_number[b, "v1"], per_number[b, "v2"]
    print(f"{b} bits: v1 {v1:5.1f} instructions per number, v2 {v2:4.1f}")

# %% [markdown]
# These are PTX instructions. The GPU's own are fewer or more, and it runs several at a
# time; `kvq kernels report` shows both. But the direction is plain. Most of what v1
# does is no conversion: each thread finds out, with 64-bit divisions, to which head,
# token and group its number belongs. A thread that owns a word does this once for all
# of its numbers, and loads once.

# %%
v1, v2 = per_number[4, "v1"], per_number[4, "v2"]
print(f"4 bits: {v1:.0f} -> {v2:.0f} instructions per number, {v1 / v2:.1f} times less")
assert (round(v1), round(v2)) == (131, 19)

# %% [markdown]
# ## Takeaway
#
# > **The order of the bits in a word is free, and it decides what a code costs to read:
# > from one thread per number in the canonical order to one thread per word in the
# > paired order, the PTX instructions per number fall from 131 to 19
# > (4 bits, groups of 64, D = 128).**
#
# ## One more exercise
#
# **Exercise 5.** 3 does not divide 32. The canonical order cuts codes. The paired order
# splits each code in two instead: the 2 low bits of 32 codes fill two words, the high
# bits a third. Put a code together again.


# %%
def join_planes(low, high):
    """Codes of 3 bits from their 2 low bits and their high bit; uint8 arrays."""
    # BEGIN SOLUTION (1 line)
    return low | high << 2
    # END SOLUTION


checks.check_join_planes(join_planes)

# %%
codes = rng.integers(0, 8, 32).astype(np.uint8)
words = layouts.to_words(codes, 3, "paired")
print(
    f"32 codes of 3 bits: {len(words)} words, {32 * len(words) / 32:.0f} bits per code"
)

# %% [markdown]
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*, "Arithmetic Instructions": how many
#   conversions, additions and logic operations a processor starts per clock.
# - Kim et al., *Who Says Elephants Can't Run*, 2022, arXiv 2211.10017: the magic-number
#   conversion in weight-only kernels.
# - `kernels/layouts.py`: both orders as permutations, for every number of bits.
