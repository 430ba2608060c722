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
# # A first kernel: dequantization, one thread per number
#
# A kernel is a function that is called once for every thread, thousands of times at
# once, and each call must find out which piece of the work is its own. You will write
# one, run it as a loop, and then run the compiled kernels of this project on a machine
# that counts what they do. No GPU is needed.
#
# **What you will do**
#
# - lay a grid of threads over an array of any size;
# - write the body of a dequantization kernel, and run it thread by thread;
# - read the same kernel in CUDA C and in Numba, and hold all three against NumPy;
# - take away its guard, and see how the machine reports what happens;
# - find the cache size at which a 32-bit index breaks;
# - predict the memory traffic of the kernel, and measure it.
#
# **What you need**: NumPy, scales and groups, and how codes are packed into words.

# %%
import numpy as np

import kvq
from kvq import Scheme, checks
from kvq.kernels import layouts, ptxsim, teach
from kvq.kernels.launch.ptxsim import ptx_text
from kvq.samples import real_kv

# %% [markdown]
# ## Threads, blocks, a grid
#
# Threads come in *blocks*, up to 1024 of them, and blocks in a *grid*. Each thread
# knows three numbers: its place in the block, the number of its block, and the size of
# a block. Together they give every thread its own index:
#
# $$i = \text{blockIdx} \cdot \text{blockDim} + \text{threadIdx} .$$
#
# Only whole blocks can be launched. For $n$ numbers that means
#
# $$\text{grid} = \left\lceil \frac{n}{\text{blockDim}} \right\rceil$$
#
# blocks, and in the last one some threads may have nothing to do.
#
# **Exercise 1.** Write the number of blocks, and how many threads are idle.


# %%
def grid_of(n, block):
    """(blocks, idle threads) for n numbers, one thread each."""
    # BEGIN SOLUTION (2 lines)
    blocks = -(-n // block)
    return blocks, blocks * block - n
    # END SOLUTION


checks.check_grid_of(grid_of)

# %% [markdown]
# ## From an index to a number
#
# Thread $i$ computes the number at place $i$ of the output, an array $(N, T, D)$ in C
# order: $N$ heads, $T$ tokens, $D$ channels. So the thread's head, token and channel
# are
#
# $$c = i \bmod D, \qquad t = \left\lfloor \frac{i}{D} \right\rfloor \bmod T, \qquad
# n = \left\lfloor \frac{i}{D\,T} \right\rfloor .$$
#
# A group of numbers that share a scale is $g_t$ tokens by $g_c$ channels. Per token,
# $g_t = 1$ and $g_c = G$; per channel, $g_t = G$ and $g_c = 1$. The scale of the
# thread's number is at
#
# $$\left( n,\; \left\lfloor \frac{t}{g_t} \right\rfloor,\;
# \left\lfloor \frac{c}{g_c} \right\rfloor \right)$$
#
# of an array $(N, \lceil T/g_t \rceil, \lceil D/g_c \rceil)$. And then the equation:
#
# $$\hat{x} = s\,(\text{code} - \text{offset}) + z .$$
#
# **Exercise 2.** Write the body of the kernel for asymmetric codes (the offset is 0).
# All arrays are flat, as a kernel sees them. `code_of(i)` gives thread $i$ its code.
# A thread with $i \ge N T D$ must not touch anything.


# %%
def dequant_thread(i, code_of, scale, zero, y, N, T, D, gt, gc):
    """Thread i: y[i] = scale[group] * code + zero[group]."""
    # BEGIN SOLUTION (6 lines)
    if i >= N * T * D:
        return
    c, t, n = i % D, i // D % T, i // (D * T)
    across, along = -(-D // gc), -(-T // gt)
    group = (n * along + t // gt) * across + c // gc
    y[i] = scale[group] * code_of(i) + zero[group]
    # END SOLUTION


checks.check_dequant_thread(dequant_thread)

# %% [markdown]
# Now launch it: a call for every thread of every block. A GPU runs these calls in any
# order and many at a time, and since no thread uses what another one writes, a loop in
# any order gives the same.


# %%
def launch(stored, gt, gc, block=128):
    """Run `dequant_thread` for every thread; return y as an array."""
    N, T, D = stored.shape
    y = np.full(stored.codes.shape[0] * T * D, np.nan, np.float32)
    codes = stored.unpack().reshape(-1)
    scale, zero = (
        a.astype(np.float32).reshape(-1) for a in (stored.scale, stored.zero)
    )
    blocks, _ = grid_of(len(y), block)
    for i in np.random.default_rng(0).permutation(blocks * block).tolist():
        args = (lambda i: codes[i]), scale, zero, y, N, T, D, gt, gc
        dequant_thread(i, *args)
    return y.reshape(N, T, D)


keys = real_kv(15).k[:, :37]
per_token = kvq.quantize(keys, Scheme(4, "token", 32, "asymmetric"))
per_channel = kvq.quantize(keys, Scheme(4, "channel", 16, "asymmetric"))
for name, stored, group in (
    ("per token", per_token, (1, 32)),
    ("per channel", per_channel, (16, 1)),
):
    np.testing.assert_array_max_ulp(launch(stored, *group), stored.dequantize(), 1)
    print(f"{name}: {keys.size} threads in a random order agree with the reference")

# %% [markdown]
# ## The same in CUDA C and in Numba

# %%
print(teach.excerpt("dequant/v1_value_per_thread.cu", 'extern "C"'))
print()
print(teach.excerpt("dequant/v1_value_per_thread.py", "def dequant_v1"))

# %% [markdown]
# The lines are yours, with three additions. The code is read from packed words. `i64`
# is an integer of 64 bits (more of that below). And `affine` is the multiplication and
# the addition, with the roundings that NumPy makes.
#
# Both were compiled to PTX, and the machine of this project runs PTX on NumPy.

# %%
for name, stored in (("per token", per_token), ("per channel", per_channel)):
    for language in teach.LANGUAGES:
        y, (report,) = teach.run("dequant", "v1", stored, language=language)
        np.testing.assert_array_max_ulp(y, stored.dequantize(), 1)
    print(f"{name}: CUDA C and Numba agree, {report.warps} warps of 32 threads")

# %% [markdown]
# ## Without the guard
#
# The last block has idle threads. What if they did not return? We cannot edit compiled
# code, but we can lie to it: tell the kernel that there is one token more than the
# buffers hold.
#
# **Predict.** On a GPU, what does a thread that writes behind its buffer do? An error
# message, a crash, or nothing that you would notice?

# %%
N, T, D = per_token.shape
words = layouts.to_words(per_token.unpack(), 4).reshape(-1)
scale, zero = per_token.scale.reshape(-1), per_token.zero.reshape(-1)
y = np.zeros(N * T * D, np.float32)
text = ptx_text("dequant/v1_value_per_thread", "dequant_v1", {"S": "__half"})
kernel = ptxsim.Module(text).kernel("dequant_v1")
names = ("codes", "scale", "zero", "y", "N", "T", "D", "gt", "gc", "bits", "asymmetric")


def dequantize(tokens):
    """Launch the compiled kernel for so many tokens of one head."""
    numbers = (np.int32(v) for v in (1, tokens, D, 1, 32, 4, 1))
    blocks, _ = grid_of(tokens * D, 128)
    head = words[: T * D // 8], scale[: T * D // 32], zero[: T * D // 32], y[: T * D]
    arrays = [np.ascontiguousarray(a) for a in head]
    return kernel.launch(blocks, 128, (*arrays, *numbers), names=names)


dequantize(T)
print(f"{T} tokens: fine")
try:
    dequantize(T + 1)
except ptxsim.KernelFault as fault:
    message = str(fault)
    print(f"{T + 1} tokens: {message}")
assert "codes" in message
assert "thread" in message

# %% [markdown]
# The machine names the buffer, the thread and the line of the source. A GPU would most
# likely have said nothing: behind one buffer there usually is another one, and the
# thread reads or overwrites that. Such faults show up later and elsewhere.
#
# ## How large may an index be?
#
# An `int` has 32 bits: the largest is $2^{31} - 1$. The index of a number in a cache of
# $N$ heads (of all sequences of a batch), $T$ tokens and $D$ channels reaches
# $N\,T\,D - 1$.
#
# **Predict.** 8 KV heads, $D = 128$, one sequence. At how many tokens does an `int`
# overflow: at 2 million, 20 million, or never in practice? And with 32 sequences?
#
# **Exercise 3.** Write the largest $T$ for which every index fits.


# %%
def longest_for_int32(N, D):
    """The largest T with N * T * D - 1 <= 2^31 - 1."""
    # BEGIN SOLUTION (1 line)
    return 2**31 // (N * D)
    # END SOLUTION


checks.check_longest_for_int32(longest_for_int32)

# %%
for sequences in (1, 32):
    T_max = longest_for_int32(8 * sequences, 128)
    print(f"{sequences:2} sequences: {T_max:,} tokens each")
last = np.array(8 * 32 * 65_537 * 128 - 1)
print(f"one token more, as an int of 32 bits: {last.astype(np.int32):,}")
assert last.astype(np.int32) < 0

# %% [markdown]
# A negative index. For a server with 32 sequences of 64 thousand tokens this is not
# exotic, and a kernel that was tested on small arrays will pass all of its tests. Every
# kernel here computes offsets in 64 bits.
#
# ## What moves
#
# A kernel like this one does almost no arithmetic. Its time is the time to move bytes.
# Per number, with $b$ bits and groups of $G$ with a scale and a zero of 16 bits, it
# reads and writes
#
# $$\frac{b}{8} + \frac{2 \cdot 2}{G} + 4 \quad \text{bytes,}$$
#
# the last 4 for the float32 that it writes.
#
# **Exercise 4.** Write it. Then compare with what the machine counts. Memory moves in
# *sectors* of 32 bytes.


# %%
def bytes_per_number(b, G):
    """Bytes read and written per number."""
    # BEGIN SOLUTION (1 line)
    return b / 8 + 4 / G + 4
    # END SOLUTION


checks.check_bytes_per_number(bytes_per_number)

# %%
x = np.random.default_rng(0).standard_normal((2, 64, 128)).astype(np.float16)
print("bits   predicted   sectors * 32 / numbers   sectors / ideal")
measured = {}
for b in (8, 4, 2):
    stored = kvq.quantize(x, Scheme(b, "token", 64, "asymmetric", "float16"))
    _, (report,) = teach.run("dequant", "v1", stored)
    measured[b] = 32 * report.sectors / x.size, report.sectors / report.ideal_sectors
    row = b, bytes_per_number(b, 64), *measured[b]
    print("{:4} {:11.2f} {:23.2f} {:17.2f}".format(*row))

# %% [markdown]
# Seven bytes, whatever $b$ is. Count what a warp asks for: its 32 threads have 32
# neighbouring numbers of one group, so 16 bytes of codes (at 4 bits), one scale and one
# zero of 2 bytes. But memory moves whole sectors: 1 for the codes, 1 for the scale, 1
# for the zero, and 4 for the 128 bytes that it writes.
#
# $$\frac{(1 + 1 + 1 + 4) \cdot 32 \text{ bytes}}{32 \text{ numbers}} = 7 .$$
#
# No sector is fetched twice in one request (the last column), and yet the smaller code
# saves nothing: its request is too small. In a real GPU a cache serves the rest of a
# sector to the next warp. The machine does not model caches, it counts what the kernel
# asks for. The remedy is the same for both: let each thread ask for more.

# %%
asked, needed = measured[4][0], bytes_per_number(4, 64)
print(f"4 bits: {asked:.1f} bytes asked per number, {needed:.1f} needed")
assert (round(asked, 1), round(needed, 1)) == (7.0, 4.6)

# %% [markdown]
# ## Takeaway
#
# > **One thread per number, an index in 64 bits, a guard: that is a correct kernel, and
# > the same one in NumPy, Numba and CUDA C. At 4 bits it asks memory for 7.0
# > bytes per number where 4.6 would do (groups of 64, D = 128), and the fault that
# > it would make without its guard has a name, a thread and a line.**
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*, "Programming Model": threads, blocks, grids.
# - The Numba CUDA documentation, "Writing CUDA Kernels".
# - `kernels/ptxsim/README.md`: what the machine models, and what it does not.
