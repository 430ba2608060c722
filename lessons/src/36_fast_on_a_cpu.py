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
# # Fast on a CPU: where the codes lie, and what multiplies them
#
# A CPU multiplies 4, 8 or 16 numbers by one instruction, if they lie side by side. You
# will store codes so that they do, find out how fast a decode step can be at most on
# your machine, in float32 and in bytes, and climb from a loop that mirrors the equation
# to one that multiplies the codes as they are.
#
# **What you will do**
#
# - find a code in a block, and see what its place does to a compiled loop;
# - bound the speed of a decode step by its multiply-adds and by its bytes;
# - fold a scale into a query, round the query to bytes, and pay back what that took;
# - time four versions, with their errors beside the times;
# - decide where bytes are good enough: at 8, 4 and 2 bits;
# - let a cache grow in this layout.
#
# **What you need**: the lesson *Packing bits*, and Numba. The times are those of your
# machine: no two runs print the same, and nothing that was timed is checked.

# %%
import os

for library in ("OPENBLAS", "OMP", "MKL"):  # before NumPy starts: one thread for all
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import platform
import re
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from numba import njit

import kvq
from kvq import KVCache, Policy, Scheme, checks, plots
from kvq.kernels import backend
from kvq.kernels.cpu import blocks, fast
from kvq.samples import real_kv
from kvq.tables import read_table

plt.style.use(plots.STYLE)
here = Path.cwd()
DATA = next(p for p in (here, *here.parents) if (p / "figures/data").is_dir())
DATA /= "figures/data"
G = 64  # numbers that share a scale and a zero
without_v4 = fast.unavailable("v4")


def measure(candidates, rounds=9):
    """{name: median seconds of a call} of functions that take turns."""
    seconds = {name: [] for name in candidates}
    for f in candidates.values():
        f()  # compiles, and fills the caches of the processor
    for _ in range(rounds):
        for name, f in candidates.items():
            start = time.perf_counter()
            f()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.median(times) for name, times in seconds.items()}


# %% [markdown]
# ## Side by side
#
# A vector instruction does the same to all numbers of a register, its *lanes*. The
# scores of a block of keys are $S_t = \sum_d x_d\, u_{td}$, $u$ being the codes. Along
# which index should the lanes go?
#
# - Along the **channels** $d$, as a token is stored: then the lanes hold parts of *one*
#   sum, and must be added in the end. Two codes share a byte, so neighbouring channels
#   have to be taken apart first.
# - Along the **tokens** $t$: then each lane has a sum of its own. All lanes multiply by
#   the same $x_d$, and nothing has to be taken apart, if the codes of a channel lie
#   side by side for many tokens.
#
# Here is a layout for the second way. A *word* of 32 bits holds $4p$ codes of one
# token, $p = 8 / \text{bits}$ of them in each byte. A *panel* is a matrix of words with
# 32 lanes, one for each of 32 tokens. A *block* is a few panels, one after the other.
# A *plane* $c$ is the field of bits from bit $\text{bits} \cdot c$ of a byte on, and
#
# > word (row $j$, lane $t$) holds in byte $i$, plane $c$, channel $4 p j + 4 c + i$.
#
# So a shift and a mask of a whole row of words give one channel of 32 tokens.
#
# **Exercise 1.** Turn it round: where is channel $d$ of token $t$ of a block?


# %%
def place(t, d, bits):
    """(panel, row, lane, byte, plane) of channel d of token t in a block of keys."""
    # BEGIN SOLUTION (4 lines)
    panel, lane = divmod(t, 32)
    row, rest = divmod(d, 32 // bits)
    plane, byte = divmod(rest, 4)
    return panel, row, lane, byte, plane
    # END SOLUTION


checks.check_block_place(place)

# %% [markdown]
# Now store a block by your function, byte after byte, and hold it beside what a cache
# stores. (The bytes of a word are in memory with the lowest one first.)

# %%
D, UNIT = 128, blocks.UNIT  # UNIT: tokens of a block
rng = np.random.default_rng(0)
codes = rng.integers(0, 16, (UNIT, D)).astype(np.uint8)
mine = np.zeros((UNIT // 32, D // 8, 32, 4), np.uint8)  # panels, rows, lanes, bytes
for t, d in np.ndindex(codes.shape):
    panel, row, lane, byte, plane = place(t, d, 4)
    mine[panel, row, lane, byte] |= codes[t, d] << 4 * plane
words = blocks.key_words(codes[None], 4).reshape(-1, D // 8, 32)
assert np.array_equal(mine.reshape(-1, D // 8, 128).view("<u4"), words)
print(f"a block: {UNIT} tokens; {codes.size:,} codes in {mine.nbytes:,} bytes")

# %% [markdown]
# Three loops for the same scores. `nibbles` reads a token as it is usually stored, two
# channels in a byte. `pairs` takes both codes of a byte at once. `panels` reads the
# block. Numba compiles each; a *fast* one may also add in any order, which by the rules
# of floating point changes the result, so a compiler does not do it unasked.
#
# **Predict.** How many times faster is `panels` than `nibbles`? And does the permission
# to add in any order make `nibbles` as fast?


# %%
def nibbles(x, packed, S):
    for t in range(packed.shape[0]):
        total = np.float32(0)
        for d in range(x.size):
            code = packed[t, d // 2] >> 4 * (d % 2) & 15
            total += x[d] * np.float32(code)
        S[t] = total


def pairs(x, packed, S):
    for t in range(packed.shape[0]):
        total = np.float32(0)
        for i in range(packed.shape[1]):
            total += x[2 * i] * np.float32(packed[t, i] & 15)
            total += x[2 * i + 1] * np.float32(packed[t, i] >> 4)
        S[t] = total


def panels(x, words, S):
    S[:] = np.float32(0)
    for panel in range(words.shape[0]):
        for j in range(words.shape[1]):
            for r in range(8):  # byte r % 4, plane r // 4
                shift = 8 * (r % 4) + 4 * (r // 4)
                for t in range(words.shape[2]):
                    code = words[panel, j, t] >> shift & 15
                    S[32 * panel + t] += x[8 * j + r] * np.float32(code)


many = rng.integers(0, 16, (1024, D)).astype(np.uint8)  # several blocks
packed = many[:, ::2] | many[:, 1::2] << 4
words = blocks.key_words(many[None], 4).reshape(32, D // 8, 32)
x = rng.standard_normal(D).astype(np.float32)
loops = {}
for loop in (nibbles, pairs, panels):
    stored = words if loop is panels else packed
    for how in ("in order", "fast"):
        f, S = njit(fastmath=how == "fast")(loop), np.empty(1024, np.float32)
        loops[loop.__name__, how] = f, partial(f, x, stored, S)
        f(x, stored, S)
        assert np.allclose(S, many @ x, rtol=1e-4, atol=1e-3)

# %% [markdown]
# What did the compiler make of them? `inspect_asm` gives the machine code as text. A
# multiplication of float32 is there under two sorts of names: for one number
# (`mulss`, `vfmadd231ss`; on ARM `fmul s0`) and for a vector (`mulps`, `vfmadd231ps`;
# on ARM `fmla v0.4s`).

# %%
PACKED = r"\bv?f?n?m(?:ul|add|sub)\w*ps\b|\bf(?:mul|mla|mad)(?:\.4s|\s+[vz]\d)"
SCALAR = r"\bv?f?n?m(?:ul|add|sub)\w*ss\b|\bf(?:mul|madd)\s+s\d"


def multiplications(f):
    """(of vectors, of single numbers): multiplications in the machine code of f."""
    text = f.inspect_asm(f.signatures[0])
    return len(re.findall(PACKED, text)), len(re.findall(SCALAR, text))


times = measure({key: call for key, (_, call) in loops.items()}, 49)
print(f"{'':18} ns per code   vector   single")
for key, (f, _) in loops.items():
    per_code = 1e9 * times[key] / many.size
    vector, single = multiplications(f)
    print(f"{key[0]:8} {key[1]:9} {per_code:11.2f} {vector:8} {single:8}")
if not any(map(any, (multiplications(f) for f, _ in loops.values()))):
    print(f"this cell does not know the instructions of a {platform.machine()}")
ratio = times["nibbles", "in order"] / times["panels", "in order"]
print(f"\npanels, in order: {ratio:.1f} times as fast as nibbles, in order")

# %% [markdown]
# Look at the rows *in order*. Along the channels there is one sum, in one order: no
# vector instruction at all. Along the tokens, each lane adds in its own order, so the
# compiler needs no permission. (It keeps a loop for single numbers as well, for what is
# left over. A count of instructions in the text is not a count of executions.)
#
# With permission, `nibbles` becomes a loop of vectors, and may be no faster: to take
# neighbouring channels out of one byte can cost as much as it saves. `pairs` says the
# same sum in another way, and may come near `panels`. So a layout along the channels is
# not hopeless. It needs permission, and a loop written as the compiler likes it. The
# layout along the tokens needs neither, and no sum over lanes.
#
# ## How fast can it be at most?
#
# Two limits, as on a GPU. Every cached number meets every query head of its group, one
# multiply-add each. And its bits must arrive.
#
# **Exercise 2.** A core does $J$ multiply-adds per second and reads $B$ bytes per
# second. How many cached numbers per second does each limit allow, with $h$ query heads
# per KV head and $\beta$ stored bits per number (scales and zeros included)?


# %%
def bounds(h, beta, J, B):
    """(by multiply-adds, by bytes): cached numbers per second, each at most."""
    # BEGIN SOLUTION (1 line)
    return J / h, 8 * B / beta
    # END SOLUTION


checks.check_bounds(bounds)

# %% [markdown]
# $J$ is the clock times the lanes of a register times the units that multiply, usually
# two: $3 \cdot 10^9 \cdot 16 \cdot 2$ for a core with AVX-512 at 3 GHz, half of it with
# AVX2, a quarter and often four units with NEON.
#
# **Predict.** Write down the clock, lanes and units of a core of yours, and the $J$
# that follows.
#
# Two ways to measure it: a loop whose numbers stay in registers, and a product of
# matrices, which a good library runs near the peak. The loop is as wide as the
# compiler likes; some do not use the widest registers unless told to (`simd.py` tells).


# %%
@njit(fastmath={"contract"})
def sixteen_each(x, y, a, b):
    """y_i = the 16th iterate of z -> z a + b from x_i."""
    for i in range(x.size):
        z = x[i]
        for _ in range(16):
            z = z * a + b
        y[i] = z


x, y = np.ones((2, 4096), np.float32)
A = rng.standard_normal((2, 256, 256), np.float32)
C = np.empty((256, 256), np.float32)
half, quarter = np.float32(0.5), np.float32(0.25)
times = measure(
    {
        "loop": lambda: sixteen_each(x, y, half, quarter),
        "product": lambda: np.matmul(A[0], A[1], out=C),
    },
    49,
)
rates = {"loop": 16 * x.size / times["loop"], "product": 256**3 / times["product"]}
for name, rate in rates.items():
    print(f"{name:8} {rate / 1e9:6.1f} times 10^9 multiply-adds per second")
# On ARM, a product may run on a matrix unit that a decode step does not use.
on_arm = platform.machine().lower() in ("arm64", "aarch64")
J = rates["loop"] if on_arm else max(rates.values())

# %% [markdown]
# And the memory: an array that lies in no cache of the processor, and one of the size
# of the cache that you will time, which may lie in one.

# %%
H_kv, ratio, T = 8, 4, 4096
STORED = {16: 16, **{b: b + 32 / G for b in (8, 4, 2)}}  # bits: stored bits
near_bytes = 2 * H_kv * T * D * STORED[4] / 8
far = np.ones(256 * 2**20 // 4, np.float32)
near = far[: int(near_bytes) // 4]
# One after the other: in turns, the large array would push out the small one.
B, B_near = (
    array.nbytes / measure({0: partial(np.dot, array, array)})[0]
    for array in (far, near)
)
print(f"from memory: {B / 1e9:.1f} GB/s; {near.nbytes / 1e6:.1f} MB ", end="")
print(f"again and again: {B_near / 1e9:.1f} GB/s")
del far, near

# %% [markdown]
# **Predict.** Which limit binds on your machine, reading from memory, at 16, 8, 4 and 2
# bits: with 1 query head per KV head? With 4?

# %%
print("10^9 numbers per second, at most, and what binds")
print(f"{'':15} {'bytes':>7} {'1 head':>16} {'4 heads':>16}")
for b, beta in STORED.items():
    row = f"{b:2} bits ({beta:4.1f})  {bounds(1, beta, J, B)[1] / 1e9:7.1f}"
    for h in (1, 4):
        work, memory = bounds(h, beta, J, B)
        row += f"{work / 1e9:10.1f} {'bytes' if memory < work else 'work':>6}"
    print(row)

# %% [markdown]
# Fewer bits move the bound of the bytes, and leave that of the work where it is. How
# many multiply-adds must a core do in the time of a byte, to wait for memory at all?
# That depends on the format alone:

# %%
print("multiply-adds per byte")
per_byte = {(b, h): 8 * h / STORED[b] for b in STORED for h in (1, 4)}
for b in STORED:
    print(f"{b:2} bits: {per_byte[b, 1]:5.1f} for 1 head, {per_byte[b, 4]:5.1f} for 4")
print(f"this core: {J / B:.1f} in the time of a byte from memory")
assert (round(per_byte[16, 1], 1), round(per_byte[4, 4], 1)) == (0.5, 7.1)

# %% [markdown]
# And that is not all of the work. A code in a field is no float32 yet. It takes a
# shift, a mask and a conversion, each a vector instruction, before it meets $h$
# queries. If those are as fast as a multiply-add and wait for the same units, the bound
# is not $J / h$ but $J / (3 + h)$.
#
# Integers do better. The instruction `vpdpbusd` of AVX-512 VNNI multiplies 64 bytes by
# 64 bytes and adds the products in fours to 16 sums: *four* numbers in each lane of 32
# bits, where float32 has one. There is no conversion, only a shift and a mask for all
# four: $4 J / (2 + h)$. The price: the query must be bytes, too.

# %%
most = {"v3": {h: J / (3 + h) for h in (1, 4)}}  # v3: float32, v4: bytes
most["v4"] = {h: 4 * J / (2 + h) for h in (1, 4)}
print("10^9 numbers of 4 bits per second, estimated, one core")
print(f"the memory delivers {8 * B / STORED[4] / 1e9:.1f}")
for h in (1, 4):
    for name, what in (("v3", "float32"), ("v4", "bytes")):
        print(f"query heads: {h}, {what:7} {most[name][h] / 1e9:6.1f}")

# %% [markdown]
# That is one core. With all of them, $J$ grows by their number and $B$ by less: a few
# cores read all that the memory delivers. So the more cores share the work, the nearer
# they come to the memory's limit, and the more the bytes count.
#
# ## Scales out of the sum
#
# Both ways need sums over codes alone. A key is $\hat k_{td} = s_d\, u_{td} + z_d$,
# with a scale and a zero for each channel and a group of tokens. Hence
#
# $$q \cdot \hat k_t = \sum_d x_d\, u_{td} + y, \qquad x_d = q_d\, s_d, \qquad
# y = \sum_d q_d\, z_d .$$
#
# **Exercise 3.** Fold the scales of a group into a query. One line each.


# %%
def fold(q, s, z):
    """x (D,) and y, from q, s, z (D,)."""
    # BEGIN SOLUTION (1 line)
    return q * s, q @ z
    # END SOLUTION


checks.check_fold(fold)

# %%
sample = real_kv(layer=15)  # k, v (3, 512, 64): real keys and values
K = kvq.quantize(sample.k, Scheme(4, "channel", G, "asymmetric"))
u, k_hat = K.unpack()[0, :G].astype(float), K.dequantize()[0, :G]
q = sample.q[0, -1].astype(float)
s, z = (a[0, 0].astype(float) for a in (K.scale, K.zero))
x, y = fold(q, s, z)
assert np.allclose(u @ x + y, k_hat @ q, rtol=1e-4, atol=1e-3)
print(f"{x.size} multiplications for {G} tokens, instead of {u.size:,}")

# %% [markdown]
# ## A query in bytes, and what it owes
#
# A row $x$ becomes bytes $Q$ by the largest of its numbers. With 127 levels on each
# side,
#
# $$a = \max_d |x_d| / 127, \qquad Q_d = \mathrm{round}(x_d / a), \qquad
# \rho_d = x_d - a\, Q_d ,$$
#
# and the sum becomes $a \sum_d Q_d u_{td}$, all integers but for $a$. What is left out,
# $\sum_d \rho_d u_{td}$, is the error. But codes are never negative: on average they
# are near the middle one, $m = (2^b - 1)/2$. So split it,
#
# $$\sum_d \rho_d u_{td} = m \sum_d \rho_d + \sum_d \rho_d (u_{td} - m) .$$
#
# The first part is the same for all tokens, and costs one sum for each query. Pay it
# back: add it to $y$. Only the second, smaller part remains an error.
#
# **Exercise 4.** Round a row, and say what must be paid back.


# %%
def round_row(x, levels, bits):
    """a, Q (whole numbers, |Q| <= levels) and the pay-back; bits: of a code."""
    # BEGIN SOLUTION (3 lines)
    a = np.abs(x).max() / levels
    Q = np.rint(x / a)
    return a, Q, (2**bits - 1) / 2 * (x - a * Q).sum()
    # END SOLUTION


checks.check_round_row(round_row)

# %% [markdown]
# **Predict.** For 4 bits, codes of all sizes equally often: how many times smaller is
# the error with the pay-back? (The mean square of a code is $m^2 + \sigma^2$, and
# $\sigma^2 = (4^b - 1)/12$.)

# %%
owed, left = [], []
for q in sample.q[:3].reshape(-1, 64).astype(float):  # all that meet KV head 0
    x, _ = fold(q, s, z)
    a, Q, constant = round_row(x, 127, 4)
    owed.append(u @ x - a * (u @ Q))
    left.append(owed[-1] - constant)
without, with_it = (np.sqrt(np.mean(np.square(e))) for e in (owed, left))
m, sigma = u.mean(), u.std()
print(f"error of the scores: {without:.4f}, with the pay-back {with_it:.4f}")
print(f"{without / with_it:.2f} times smaller; codes equally often", end="")
print(f": {np.sqrt(1 + 7.5**2 / ((4**4 - 1) / 12)):.2f}")
print(f"these codes: mean {m:.1f}, standard deviation {sigma:.1f}")
assert with_it < without

# %% [markdown]
# The weights are rounded likewise: they are not negative, so 255 levels fit a byte. And
# where 8 bits are too few, the rest gets 8 bits of its own: a second *term*, of the
# query and of the weights, at the price of the products once more. The rest of a weight
# must not be negative either, so the first of its two terms is rounded down.
#
# Here is all of it for one KV head, as equations in float64. It runs on any machine.
# The kernel does the same with one instruction for 64 products.


# %%
def in_bytes(X, u, bits, levels, terms):
    """X (R, n) times codes u (n, m), X rounded to bytes; 255 levels: X >= 0."""
    out = np.zeros((len(X), u.shape[1]))
    for row, x in zip(out, X, strict=True):
        for term in range(terms):
            a, Q, constant = round_row(x, levels, bits)
            if levels == 255 and term < terms - 1:
                Q = np.floor(x / a)  # leaves no rest below 0
            row += a * (Q @ u)
            x = x - a * Q  # the rest
        row += constant  # of the last term
    return out


def attend_in_bytes(q, keys, values, bits, terms):
    """(R, D): q (R, D) over one KV head. keys, values: (codes, scale, zero)."""
    S = []
    for g, (s, z) in enumerate(zip(*keys[1:], strict=True)):  # a group of G tokens
        u = keys[0][G * g : G * g + G]
        S.append(in_bytes(q * s, u.T, bits, 127, terms) + (q @ z)[:, None])
    S = np.concatenate(S, axis=1) / np.sqrt(q.shape[1])
    p = np.exp(S - S.max(axis=1, keepdims=True))
    o = np.zeros_like(q)
    for t in range(0, p.shape[1], UNIT):  # a block
        w, u = p[:, t : t + UNIT], values[0][t : t + UNIT]
        s, z = (a[t : t + UNIT, 0] for a in values[1:])
        o += in_bytes(w * s, u, bits, 255, terms) + (w @ z)[:, None]
    return o / p.sum(axis=1, keepdims=True)


# %% [markdown]
# ## The ladder
#
# `kernels/cpu/` has four versions of `decode`.
#
# | | the idea |
# |---|---|
# | v1 | the equation as a loop: a tile becomes float32, then a query head at a time |
# | v2 | all query heads of a group over each row of the tile; sums in float32 |
# | v3 | blocks: a field of 32 words becomes float32; scales in query and weights |
# | v4 | blocks: bytes times bytes |
#
# v1 and v2 are loops, in which the compiler looks for vectors. A loop such as `panels`
# would leave one thing to gain: its sums lie in memory, and are read and written for
# every code. So v3 has its products as vectors of 16 numbers in LLVM's intermediate
# representation, the language into which Numba translates Python (`simd.py`). Their
# sums stay in registers from the first row of words to the last, and a row is asked for
# well before it is needed. LLVM cuts the vectors into what the processor has, so v3
# runs everywhere. v4 is the same with `vpdpbusd`, four products in each lane.
#
# **Predict.** Which step brings most?


# %%
def policy_of(bits):
    return Policy(
        Scheme(bits, "channel", G, "asymmetric"),
        Scheme(bits, "token", G, "asymmetric"),
    )


numba_cpu = backend("numba-cpu")
k, v = rng.standard_normal((2, H_kv, T, D), np.float32)
q = rng.standard_normal((H_kv * ratio, 1, D), np.float32)
rows_of_codes = KVCache(policy_of(4))
rows_of_codes.append(k, v)
in_blocks = {b: KVCache(policy_of(b), layout="blocks") for b in (8, 4, 2)}
for cache in in_blocks.values():
    cache.append(k, v)


def version(name, b=4, heads=ratio):
    """A function without arguments: v3 or v4 on one thread, `heads` per KV head."""
    some = q.reshape(H_kv, ratio, 1, D)[:, :heads].reshape(-1, 1, D)
    return lambda: fast.decode(some, in_blocks[b], version=name, threads=1)


ladder = {
    "v1": lambda: numba_cpu.decode(q, rows_of_codes, version="v1"),
    "v2": lambda: numba_cpu.decode(q, rows_of_codes, version="v2"),
    "v3": version("v3"),
    "v4": version("v4"),
}
if without_v4:
    print(f"v4 cannot run here: {without_v4}. The rest goes on without it.")
    del ladder["v4"]


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


same_codes = rows_of_codes.attend(q)  # the reference, float64
exact = kvq.attention(q, k, v)  # nobody has quantized anything
print(f"the 4 bits themselves: relative error {distance(same_codes, exact):.3f}")
seconds = measure(ladder)
before = None
print("      ms   times the one before   error against the same codes in float64")
for name, f in ladder.items():
    step = f"{before / seconds[name]:22.1f}" if before else " " * 22
    error = distance(f(), same_codes)
    print(f"{name} {1e3 * seconds[name]:6.2f} {step}   {error:.0e}")
    before = seconds[name]

# %% [markdown]
# v3 rounds as float32 does. v4 owes its error to the bytes of the query and of the
# weights, and it is small beside that of the 4 bits.
#
# ## Your prediction, checked
#
# Numbers per second with 1 and with 4 query heads per KV head. In brackets: percent of
# what the estimates allow, the smaller of the work's and of the bytes' at the rate at
# which a few megabytes come, again and again. Read down a column: where bytes are the
# limit, fewer bits are faster. Read along a row: where the work is, 4 heads take longer
# than 1, up to $(3 + 4) / (3 + 1) = 1.75$ times in float32.

# %%
ran = ["v3"] if without_v4 else ["v3", "v4"]
runs = {
    (name, h, b): version(name, b, h) for name in ran for h in (1, 4) for b in (8, 4, 2)
}
times = measure(runs)
speed = {key: 2 * H_kv * T * D / t for key, t in times.items()}
print("10^9 numbers per second, one core")
for name in ran:
    for b in (8, 4, 2):
        print(f"{name}, {b} bits", end="")
        for h in (1, 4):
            limit = min(most[name][h], 8 * B_near / STORED[b])
            reached = speed[name, h, b]
            print(f"   {h} head{'s' if h > 1 else ' '} {reached / 1e9:5.1f}", end="")
            print(f" ({reached / limit:4.0%})", end="")
        slower = times[name, 4, b] / times[name, 1, b]
        print(f"   4 heads take {slower:.2f} times as long")

# %%
fig, ax = plt.subplots(figsize=(9.5, 4.8))
bits = [8, 4, 2]
stored = [STORED[b] for b in bits]
for rate, text, ls in ((B, "memory", "--"), (B_near, "again and again", ":")):
    y = [8 * rate / beta / 1e9 for beta in stored]
    ax.plot(stored, y, color="0.45", ls=ls, lw=1.6, label=f"bytes, {text}")
LOOKS = {("v3", 1): ("#56B4E9", "s"), ("v3", 4): ("#0072B2", "o")}
LOOKS |= {("v4", 1): ("#E69F00", "^"), ("v4", 4): ("#D55E00", "D")}
for (name, h), (color, marker) in LOOKS.items():
    heads = f"{h} head{'s' if h > 1 else ''}"
    if h == 4:
        look = {"color": color, "ls": (0, (5, 2)), "lw": 1.6}
        ax.axhline(most[name][h] / 1e9, label=f"work of {name}, {heads}", **look)
    if name in ran:
        y = [speed[name, h, b] / 1e9 for b in bits]
        ax.plot(stored, y, color=color, marker=marker, label=f"{name}, {heads}")
ax.set(xscale="log", ylabel="$10^9$ numbers per second")
ax.set_yscale("log", base=2)
ax.yaxis.set_major_formatter("{x:g}")
names = [f"{b} ({beta})" for b, beta in zip(bits, stored, strict=True)]
ax.set_xticks(stored, names)
ax.minorticks_off()
ax.invert_xaxis()
ax.set_xlabel("bits of a code (stored)")
ax.set_title("This machine, one core. Dashed and dotted: at most")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# The estimates count the products, and what makes a code ready for them. What else is
# there to do for a block and one query head? The query is folded and rounded for each
# group of tokens, the weights for each group of channels, and every token needs a power
# for the softmax. Say that each of these numbers is worth ten operations.

# %%
products = 2 * UNIT * D  # with keys and with values
others = UNIT // G * D + D // G * UNIT + UNIT  # of the query, of the weights, powers
print(f"{products:,} products: {products // 16:,} instructions in float32, ", end="")
print(f"{products // 64} with bytes")
print(f"{others} other numbers: {10 * others // 16} instructions, 16 numbers each")
assert 10 * others // 16 > 0.75 * products // 64

# %% [markdown]
# So what was little beside the products in float32 is nearly as much as the products of
# bytes: one reason, not the only one, why v4 stays below its estimate. An instruction
# four times as strong makes nobody four times as fast who has something else to do.
#
# ## What bytes cost
#
# On real keys and values: SmolLM2-135M, layer 15, 512 tokens, D = 64. For each width,
# the error of the codes themselves, and on top of it that of v4, against attention in
# float64 over the same codes. `equations` are your functions; `v4` is the kernel.
#
# **Predict.** One term: at which width is its error as large as that of the codes?

# %%
q16 = sample.q[:, -16:].astype(float)  # the 16 newest queries of 9 heads
ours = q16.reshape(3, -1, 64)  # rows for each KV head
exact = kvq.attention(q16, sample.k, sample.v, causal=False)
cost = {}
print("relative error      codes       one term     two terms")
for b in (8, 4, 2):
    policy = policy_of(b)
    quantized = [
        kvq.quantize(sample.k, policy.key),
        kvq.quantize(sample.v, policy.value),
    ]
    hat = kvq.attention(q16, *(x.dequantize() for x in quantized), causal=False)
    cost[b, 0] = distance(hat, exact)
    sides = [[x.unpack(), x.scale, x.zero] for x in quantized]
    by_hand = {}
    for terms in (1, 2):
        out = [
            attend_in_bytes(
                ours[n],
                *([a[n].astype(float) for a in side] for side in sides),
                b,
                terms,
            )
            for n in range(3)
        ]
        by_hand[terms] = np.reshape(out, hat.shape)
        cost[b, terms] = distance(by_hand[terms], hat)
    print(
        f"{b} bits, equations {cost[b, 0]:9.5f} {cost[b, 1]:13.5f} {cost[b, 2]:13.5f}"
    )
    if without_v4:
        continue
    cache = KVCache(policy, layout="blocks")
    cache.append(sample.k, sample.v)
    found = []
    for terms in (1, 2):
        out = [
            fast.decode(q16[:, i : i + 1], cache, version="v4", terms=terms)
            for i in range(q16.shape[1])
        ]
        found.append(distance(np.concatenate(out, axis=1), hat))
        assert distance(np.concatenate(out, axis=1), by_hand[terms]) < 1e-3
    print(f"        v4 {found[0]:30.5f} {found[1]:13.5f}")

# %% [markdown]
# The equations and the kernel agree, so the error is that of the method, not of its
# code. (With two terms they differ by about as much as they err. The kernel does not
# look for the largest rest, but takes what it can be: half a step of the query, a whole
# one of the weights.) At 4 and 2 bits a byte is good enough. At 8 bits, one term adds
# more than the codes themselves cost: what was paid for 8 bits of cache is lost in the
# query and the weights. So `version_for` takes v4 by itself only below 8 bits. With a
# second term bytes add next to nothing, at any width. But then v4 has twice the
# products to do. A record at the end of this lesson has it beside v3.

# %%
for name in ("int8-token", "kivi-4", "kivi-2"):
    print(f"{name:12} {fast.version_for(kvq.PRESETS[name])}")

# %% [markdown]
# ## A cache that grows in blocks
#
# All of this would be lost if history had to be sorted into blocks at every step. A
# cache with `layout="blocks"` writes a token's codes into their fields when they leave
# the residual window, once.
#
# **Predict.** A block is stored whole, even if it has one token. How many bytes more
# than packed rows can that be, at most, for 3 KV heads, D = 64, 4 bits, K and V?

# %%
grows, packed_rows = KVCache("kivi-4", layout="blocks"), KVCache("kivi-4")
largest = 0
for t in range(sample.k.shape[1]):
    for cache in (grows, packed_rows):
        cache.append(sample.k[:, t : t + 1], sample.v[:, t : t + 1])
    largest = max(largest, grows.nbytes - packed_rows.nbytes)
exact_bytes = sample.k.nbytes + sample.v.nbytes
print(f"{len(grows)} tokens one by one: {grows.nbytes:,} bytes of {exact_bytes:,}")
print(f"packed rows: {packed_rows.nbytes:,}; the largest difference was {largest:,}")
bound = 2 * 3 * (UNIT - 1) * 64 * 4 // 8  # a block with one token, of K and of V
print(f"it can be {bound:,}")
assert largest <= bound

# %%
newest = sample.q[:, -1:]
out = grows.attend(newest, backend="auto")
reference = grows.attend(newest)
exact = kvq.attention(newest, sample.k, sample.v)
print(f"fast beside the reference: {distance(out, reference):.1e}", end="")
print(f"; what kivi-4 costs: {distance(reference, exact):.1e}")
assert distance(out, reference) < distance(reference, exact)

# %% [markdown]
# (`backend="auto"` takes a GPU where there is one.) Threads share the work by heads and
# by splits of 4,096 tokens or more. How it is cut depends on the cache alone, so their
# number changes the time and not a bit of the result:

# %%
alone = fast.decode(q, in_blocks[4], threads=1)
assert np.array_equal(alone, fast.decode(q, in_blocks[4], threads=3))
assert fast.SPLIT * UNIT == 4096
print("1 thread and 3 threads: the same bits")

# %% [markdown]
# ## Beside recorded numbers
#
# `kvq bench cpu` times a longer context, cold: before each call other memory is read,
# so that nothing of the cache lies in the processor.


# %%
def print_recorded(path):
    """v3, v4 and the fastest form of torch, cold."""
    rows, head = read_table(path)
    print(f"recorded: {head['cpu']}, threads: {head['threads']}, {head['date']}")
    if "--quick" in head["command"]:
        print("by a quick run: short contexts, few rounds; so take it as a sketch")
    for scene, heads in (("main", 4), ("one head", 1)):
        found = [r for r in plots.pick(rows, scene=scene, op="decode") if r["seconds"]]
        torch = sorted(plots.pick(found, system="torch"), key=lambda r: r["seconds"])
        for r in plots.pick(found, system="kvq") + torch[:1]:
            print(f"{r['T']:7,} tokens, {heads} per KV head, {r['system']:5}", end="")
            print(f" {r['version']:12} {r['storage']:8}", end="")
            print(
                f" {1e3 * r['seconds']:8.2f} ms, {r['dram_percent']:3.0f} % of a read"
            )


path = DATA / "bench_cpu.csv"
if path.exists():
    print_recorded(path)
else:
    print(f"no CPU has been recorded yet: figures/data/{path.name} is absent.")
    print("`kvq bench cpu` writes it. The numbers above are this machine's alone.")

# %%
share = {b: cost[b, 1] / cost[b, 0] for b in (8, 4, 2)}
print(f"4 bits, 4 heads: {per_byte[4, 4]:.1f} multiply-adds per byte", end="")
print(f", 16 bits and 1 head: {per_byte[16, 1]:.1f}")
for b in (8, 4, 2):
    print(f"{b} bits: bytes add {share[b]:.3f} of the codes' error", end="")
    print(f", two terms {cost[b, 2] / cost[b, 0]:.4f}")
assert share[4] < 0.2
assert round(share[8]) == 3
assert all(cost[b, 2] < cost[b, 0] / 50 for b in share)

# %% [markdown]
# ## Takeaway
#
# > **At 4 bits (G = 64) and 4 query heads per KV head, a decode step needs 7.1
# > multiply-adds per byte, and 16 bits with one head need 0.5. A core that does fewer
# > than that in the time of a byte is held up by float32 arithmetic, and smaller codes
# > do not help it. A layout along the tokens lets it take 8 or 16 numbers at a time,
# > dot products of bytes 64. The bytes add less than a fifth of the error of 4-bit
# > codes, and about three times that of 8-bit codes. With a second term it is less than
# > a fiftieth of either (SmolLM2-135M, layer 15, 512 tokens).**
#
# ## What to read next
#
# The next lesson, *Predict the bandwidth*, makes the same two limits a model of a GPU.
#
# - Williams et al., *Roofline*, Communications of the ACM 52(4), 2009.
# - Intel, *Intrinsics Guide*, `_mm512_dpbusd_epi32`: the instruction.
# - `kernels/cpu/blocks.py` is the layout, `attend.py` the loops, `simd.py` the products
#   and what else Numba has no function for, `fast.py` the tasks and their merge,
#   `threads.py` the threads.
