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
# # Warp shuffles: how 32 threads agree on a number
#
# A score is a dot product, and a dot product that is shared by threads ends in a sum
# over them. The threads of a warp can hand each other registers, by a shuffle, without
# memory and without a barrier. You will write the sums and maxima of attention with it,
# count the shuffles of two designs, and see which one the kernels here use, and why.
#
# **What you will do**
#
# - write the exchange of registers of a warp, and a sum over 32 threads in 5 steps;
# - count the shuffles per token when a warp shares every dot product;
# - turn the work round: a token per thread, and shuffles for the softmax only;
# - keep a running maximum and a running sum while tiles of tokens come by;
# - compare the counts with those of the compiled kernel.
#
# **What you need**: NumPy, attention and the softmax, threads and warps.

# %%
import numpy as np

from kvq import KVCache, Policy, Scheme, checks
from kvq.kernels import teach
from kvq.samples import real_kv

lane = np.arange(32)

# %% [markdown]
# ## Exchange
#
# In `__shfl_xor_sync(mask, x, m)` each lane (a thread's place in its warp) gives its
# `x` and gets the `x` of the lane whose number differs from its own in the bits of $m$:
#
# $$\text{from}(i) = i \oplus m .$$
#
# With $m = 1$ neighbours swap, with $m = 16$ the two halves of the warp do. A warp's
# register is an array of 32 numbers here.
#
# **Exercise 1.** Write the exchange.


# %%
def shuffle_xor(x, m):
    """What each of the 32 lanes gets; x (32,)."""
    # BEGIN SOLUTION (1 line)
    return x[np.arange(32) ^ m]
    # END SOLUTION


checks.check_shuffle_xor(shuffle_xor)

# %% [markdown]
# If every lane adds what it gets to what it has, pairs share their sum. Then pairs of
# pairs do, with the next power of two, and so on:
#
# $$x \leftarrow x + \text{shuffle}(x, m), \qquad m = 16, 8, 4, 2, 1 .$$
#
# **Predict.** After the five steps, which lanes have the sum of all 32: lane 0, or all?
#
# **Exercise 2.** Write the sum of a warp.


# %%
def warp_sum(x):
    """Every lane gets the sum over all lanes; x (32,)."""
    # BEGIN SOLUTION (3 lines)
    for m in (16, 8, 4, 2, 1):
        x = x + shuffle_xor(x, m)
    return x
    # END SOLUTION


checks.check_warp_sum(warp_sum)
print(warp_sum(lane.astype(float)))

# %% [markdown]
# All of them, because every step is symmetric. With a maximum in place of the sum the
# same five steps give the largest number, and that is how the packing kernels find the
# extremes of a group:

# %%
print(
    teach.excerpt("pack/v2_one_pass.cu", "for (int other = LANES / 2").split("}")[0]
    + "}"
)

# %% [markdown]
# ## A score by a warp
#
# The straightforward way to share a dot product: lane $i$ multiplies the channels $i, i
# + 32, i + 64, \dots$ of the query and of the key, adds its products, and the warp adds
# the sums:
#
# $$q \cdot k = \sum_{i=0}^{31} \; \sum_{j} q_{i + 32 j}\, k_{i + 32 j} .$$
#
# **Exercise 3.** Write it for $D$ a multiple of 32.


# %%
def score_by_warp(q, k):
    """q . k, as every lane has it in the end: (32,). q, k (D,)."""
    # BEGIN SOLUTION (2 lines)
    part = (q * k).reshape(-1, 32).sum(axis=0)
    return warp_sum(part)
    # END SOLUTION


checks.check_score_by_warp(score_by_warp)

# %% [markdown]
# **Predict.** $D = 128$. How many multiplications does a lane do per token, and how
# many shuffles?

# %%
D = 128
print(f"per token: {D // 32} multiply-adds per lane, and 5 shuffles with 5 additions")

# %% [markdown]
# More shuffles than arithmetic. And a shuffle is no cheaper than a read of shared
# memory. This is one of the reasons why simple attention kernels for small codes are
# slower than the memory would allow.
#
# ## A token per lane
#
# Turn it round. A warp takes a *tile* of 32 tokens, and lane $t$ computes the whole
# score of token $t$: no sum over lanes at all. The rows come through shared memory, so
# that they are read side by side from global memory, and each lane then walks along its
# own row. What remains for the shuffles is the softmax of the tile. With the state $(m,
# l)$ of the tokens before it,
#
# $$m' = \max\left(m, \max_t S_t\right), \qquad
# l' = l\, e^{m - m'} + \sum_t e^{S_t - m'} .$$
#
# The maximum takes 5 shuffles per tile. For the sum, each lane keeps its own part of
# $l$, and the lanes add up once, after the last tile.
#
# **Exercise 4.** Write the step of a tile: the new $m$, the shares of $l$ that the
# lanes hold, and the numbers $e^{S_t - m'}$ that become weights. Start from $m =
# -\infty$ and $l = 0$; `np.exp(-np.inf)` is 0.


# %%
def softmax_step(m, l, S):  # noqa: E741
    """(m', l', p): m a number, l and S (32,), p = exp(S - m')."""
    # BEGIN SOLUTION (4 lines)
    new = max(m, S.max())
    p = np.exp(S - new)
    l = l * np.exp(m - new) + p  # noqa: E741
    return new, l, p
    # END SOLUTION


checks.check_softmax_step(softmax_step)

# %%
s = real_kv(15)
q, k = s.q[0, -1].astype(float), s.k[0].astype(float)
S = k @ q / np.sqrt(len(q))
m, l = -np.inf, np.zeros(32)  # noqa: E741
for tile in S.reshape(-1, 32):
    m, l, p = softmax_step(m, l, tile)  # noqa: E741
total = warp_sum(l)[0]
print(f"m = {m:.4f}, l = {total:.4f}, after {len(S) // 32} tiles")
assert np.isclose(m, S.max())
assert np.isclose(total, np.exp(S - S.max()).sum())

# %% [markdown]
# ## The weights travel
#
# For the output the work turns again: $o_c = \sum_t p_t v_{tc}$ is a sum over tokens
# for each channel, so now a lane owns channels. Lane $t$ has $p_t$, and all lanes need
# it: a shuffle that reads from a given lane, `__shfl_sync(mask, p, t)`. In our kernel a
# lane owns 8 neighbouring channels, so $D = 128$ takes 16 lanes, and the two halves of
# the warp work on two tokens at a time:
#
# $$\text{shuffles per tile} = 5 + \frac{32}{32 \cdot 8 / D} .$$
#
# **Predict.** How many per token, with $D = 128$? Against 5 when a warp shares the dot
# product?


# %%
def shuffles_per_token(D):
    return (5 + 32 / (32 * 8 / D)) / 32


for D in (64, 128, 256):
    print(f"D = {D:3}: {shuffles_per_token(D):.2f} shuffles per token, instead of 5")

# %% [markdown]
# ## Counted
#
# The second decode kernel does all this. It runs on the PTX machine of this project,
# compiled from CUDA C and from Python, on a cache of 4-bit keys and values. We compare
# the result with the reference, and its shuffles with the prediction. A warp also adds
# up its part of $l$ once, 5 shuffles more.

# %%
D, H_q, T = 128, 2, 512
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 1, T, D)).astype(np.float16)
q = rng.standard_normal((H_q, 1, D)).astype(np.float16)
cache = KVCache(
    Policy(Scheme(4, "channel", 32, "asymmetric"), Scheme(4, "token", 32, "asymmetric"))
)
cache.append(k, v)

for language in teach.LANGUAGES:
    out, (report,) = teach.run("decode", "v2", q, cache, language=language)
    error = np.abs(out - cache.attend(q)).max()
    print(f"{language:6}: {report.mix['shfl']} shuffles, largest error {error:.1e}")
    assert error < 1e-6

# %%
tiles = H_q * T / 32
predicted = tiles * 32 * shuffles_per_token(D) + 5 * report.warps
print(f"predicted: {predicted:.0f} shuffles")
per_token = report.mix["shfl"] / (H_q * T)
print(f"per token and query head: {per_token:.2f}")
assert abs(report.mix["shfl"] / predicted - 1) < 0.1
assert round(per_token, 1) == 0.7

# %% [markdown]
# Find the exchange in the source: twice five steps, and one line that fetches a weight.

# %%
print(teach.excerpt("decode/tile.cuh", "inline float largest_of_warp"))
print()
print(teach.excerpt("decode/tile.cuh", "inline void rescale"))
print()
print(teach.excerpt("decode/tile.cuh", "inline void add_values"))

# %% [markdown]
# ## Takeaway
#
# > **A warp that shares each dot product needs 5 shuffles per token. With a token per
# > lane the kernel needs 0.7, for the softmax and the weights together (D = 128, tiles
# > of 32 tokens). Give a thread a whole sum, and let threads meet as rarely as
# > possible.**
#
# ## One more exercise
#
# **Exercise 5.** A shuffle waits for all the lanes that its mask names. If some have
# left the function, a real GPU may wait for ever or read nonsense. Which lanes must
# take part in a sum over the first $n$ lanes only, when the others have no token? Write
# the number that they contribute to a sum, and to a maximum, so that all 32 can stay.


# %%
def neutral():
    """(what an idle lane gives to a sum, what it gives to a maximum)."""
    # BEGIN SOLUTION (1 line)
    return 0.0, -np.inf
    # END SOLUTION


checks.check_neutral(neutral)

# %% [markdown]
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*, "Warp Shuffle Functions".
# - Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018, arXiv
#   1805.02867: the running maximum and sum.
# - `kernels/decode/tile.cuh`: all of it, in one file.
