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
# # Decode attention: three kernels, and what each reads
#
# To produce one token, a model reads its whole cache once, at best. You will follow
# three kernels that attend over packed codes, from the equation to one that reads every
# code once, predict how much each of them reads, and see the prediction come true on a
# machine that counts.
#
# **What you will do**
#
# - write down what a decode step must read, and what a literal kernel reads;
# - give each query head its KV head, and see what the usual mistake does;
# - cut a long sequence into splits, and merge their results exactly;
# - predict the traffic of three kernels on the same cache, then count it;
# - hold the instructions per byte against what a GPU can issue.
#
# **What you need**: attention, online softmax, warps and sectors.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import KVCache, Policy, Scheme, checks, hardware, plots
from kvq.kernels import teach

plt.style.use(plots.STYLE)

H_kv, ratio, T, D = 2, 4, 512, 128
H_q = H_kv * ratio
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, H_kv, T, D)).astype(np.float16)
q = rng.standard_normal((H_q, 1, D)).astype(np.float16)
policy = Policy(
    Scheme(4, "channel", 32, "asymmetric"), Scheme(4, "token", 32, "asymmetric")
)
cache = KVCache(policy)
cache.append(k, v)
packed = cache.nbytes
print(f"{H_q} query heads on {H_kv} KV heads, {T} tokens, D = {D}")
print(f"the packed cache: {packed:,} bytes, float16 would be {k.nbytes + v.nbytes:,}")

# %% [markdown]
# ## The step
#
# For each query head, with its keys and values,
#
# $$S_t = \frac{q \cdot k_t}{\sqrt{D}}, \qquad m = \max_t S_t, \qquad
# l = \sum_t e^{S_t - m}, \qquad o = \frac{1}{l} \sum_t e^{S_t - m}\, v_t .$$
#
# Query heads share KV heads in groups (grouped-query attention). Head $h$ reads
#
# $$g(h) = \left\lfloor \frac{h}{H_q / H_{kv}} \right\rfloor .$$
#
# **Exercise 1.** Write it.


# %%
def kv_head(h, H_q, H_kv):
    """The KV head that query head h reads."""
    # BEGIN SOLUTION (1 line)
    return h // (H_q // H_kv)
    # END SOLUTION


checks.check_kv_head(kv_head)

# %% [markdown]
# A popular mistake is `h % H_kv`. It gives every query head *some* KV head, all shapes
# fit, the output is finite and smooth, and wrong:

# %%
right = kvq.attention(q, k, v)
wrong_heads = [h % H_kv for h in range(H_q)]
wrong = np.stack(
    [kvq.attention(q[[h]], k[[g]], v[[g]])[0] for h, g in enumerate(wrong_heads)]
)
same = np.isclose(right, wrong).all(axis=(1, 2))
print(f"heads that are right by luck: {np.flatnonzero(same).tolist()} of {H_q}")
assert 0 < same.sum() < H_q

# %% [markdown]
# ## First kernel: the equation, literally
#
# One block per query head. A thread per token computes a score, two passes over the
# scores give $m$ and $l$, then a thread per channel sums the values. Each number of the
# cache is fetched when it is needed: its code, its scale, its zero.

# %%
print(teach.excerpt("decode/v1_two_pass.cu", "inline float number"))
print()
print(teach.excerpt("decode/v1_two_pass.cu", "inline float score"))

# %% [markdown]
# **Predict.** A thread per token reads the codes of *its* token, while its neighbour
# reads those of the next token, a row further on. How many times the packed bytes will
# the kernel ask memory for: about 1, 4, 20 or more than 100?

# %%
counted = {}


def count(version):
    """Run a version; keep (bytes asked, instructions), both per packed byte."""
    out, reports = teach.run("decode", version, q, cache)
    asked = 32 * sum(report.sectors for report in reports)
    work = 32 * sum(report.instructions for report in reports)
    counted[version] = asked / packed, work / packed
    error = np.abs(out - cache.attend(q)).max()
    print(f"{version}: asks for {asked / packed:.2f} times the packed bytes, ", end="")
    print(f"{work / packed:.0f} instructions per packed byte, error {error:.0e}")
    assert error < 1e-6


count("v1")
assert counted["v1"][0] > 100

# %% [markdown]
# Right, and hopeless. Each thread fetches a word for each code in it, a scale and a
# zero for each number, all of them far from what its neighbours fetch. And all four
# query heads of a group fetch the same again.
#
# ## Second kernel: once per query head
#
# A warp takes a tile of 32 tokens. Whole rows are copied to shared memory, side by
# side, and turned into numbers from there, two codes at a time. The softmax is kept
# online, so keys and values are read once, together.
#
# **Predict.** Now each row is read once by each query head that needs it. How many
# times the packed bytes?
#
# **Exercise 2.** Write the prediction, for a kernel that reads the cache once per query
# head and for one that reads it once per KV head. (The queries and the output are
# small.)


# %%
def times_read(H_q, H_kv, per):
    """How often each packed byte is read; per is "query head" or "KV head"."""
    # BEGIN SOLUTION (1 line)
    return H_q // H_kv if per == "query head" else 1
    # END SOLUTION


checks.check_times_read(times_read)

# %%
count("v2")
predicted = times_read(H_q, H_kv, "query head")
print(f"predicted: {predicted} times")
assert abs(counted["v2"][0] / predicted - 1) < 0.05

# %% [markdown]
# ## Third kernel: once per KV head, by many blocks
#
# Two ideas. A block serves *all* the query heads of a group, so a word is fetched and
# converted once for all of them. But then a batch of one sequence has only $H_{kv}$
# blocks, and a large GPU with more than a hundred processors would stand idle. So the
# sequence is cut into *splits* of tokens, one block for each, and each block leaves an
# unfinished result $(m_i, l_i, o_i)$, with $o_i$ not divided yet. A second kernel
# merges:
#
# $$M = \max_i m_i, \qquad l = \sum_i l_i\, e^{m_i - M}, \qquad
# o = \frac{1}{l} \sum_i o_i\, e^{m_i - M} .$$
#
# **Exercise 3.** Write the merge. A split may be empty: then $m_i = -\infty$ and $l_i =
# 0$. At least one is not.


# %%
def merge_splits(m, l, o):  # noqa: E741
    """The output (D,) of splits with m, l (n,) and o (n, D)."""
    # BEGIN SOLUTION (3 lines)
    weight = np.exp(m - m.max())
    total = (l * weight).sum()
    return (o * weight[:, None]).sum(axis=0) / total
    # END SOLUTION


checks.check_merge_splits(merge_splits)

# %%
one_k, one_v, one_q = (x.astype(float) for x in (k[0], v[0], q[0, 0]))
S = one_k @ one_q / np.sqrt(D)
whole = np.exp(S - S.max()) @ one_v / np.exp(S - S.max()).sum()
for n in (1, 2, 7):
    m, l, o = [], [], []  # noqa: E741
    for part in np.array_split(np.arange(T), n):
        p = np.exp(S[part] - S[part].max())
        m.append(S[part].max())
        l.append(p.sum())
        o.append(p @ one_v[part])
    merged = merge_splits(*map(np.array, (m, l, o)))
    print(f"{n} splits: largest difference {np.abs(merged - whole).max():.0e}")
    assert np.allclose(merged, whole, atol=1e-12)

# %% [markdown]
# The merge is exact, up to rounding. Rounding depends on the order of a sum, so the
# kernel merges its splits in a fixed order: the same input gives the same bits, every
# time.
#
# How many splits? Enough to fill the GPU, but each at least a few tiles long, or the
# merge costs more than it brings.
#
# **Exercise 4.** Write the number of splits: enough for `wanted` blocks in all, and at
# least `shortest` tokens each, but one split at least.


# %%
def splits_for(T, groups, wanted, shortest):
    """Splits of T tokens; `groups`, sequences x KV heads, have a block per split."""
    # BEGIN SOLUTION (2 lines)
    enough = -(-wanted // groups)
    return max(1, min(enough, T // shortest))
    # END SOLUTION


checks.check_splits_for(splits_for)

# %%
for T_now, B in ((512, 1), (8192, 1), (131_072, 1), (8192, 64)):
    splits = splits_for(T_now, 8 * B, wanted=528, shortest=128)
    print(f"{B:2} sequences of {T_now:7,} tokens: {splits:3} splits, ", end="")
    print(f"{splits * 8 * B:4} blocks")

# %% [markdown]
# **Predict.** What will the third kernel ask for, in packed bytes? It also writes and
# reads the unfinished results: $D + 2$ numbers of 4 bytes per split and query head.

# %%
count("v3")

# %%
names = ("v1\nliteral", "v2\nonline, tiles", "v3\nsplit, grouped")
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.2))
titles = ("bytes asked / packed bytes", "instructions / packed byte")
for ax, j, title in zip(axes, (0, 1), titles, strict=True):
    y = [counted[version][j] for version in ("v1", "v2", "v3")]
    ax.bar(names, y, color="#0072B2", width=0.6)
    for x, value in enumerate(y):
        ax.text(x, value, f"{value:.3g}", ha="center", va="bottom")
    ax.set(yscale="log", title=title, ylim=(1, 3 * max(y)))
    ax.grid(axis="x", visible=False)
plt.show()

# %% [markdown]
# ## Fast enough?
#
# A kernel is at the limit of the memory when everything else keeps up with it. The
# processors of a GPU start a certain number of instructions per second, and the memory
# delivers a certain number of bytes. Their ratio is a budget: instructions per byte.
# The planner of this project has it for every device that it knows.

# %%
h200 = hardware.device("H200")
budget = h200.instructions_per_byte
print(f"H200: {budget:.1f} instructions per byte")
for version, (_, work) in counted.items():
    print(f"{version}: {work:5.0f} PTX instructions per byte, ", end="")
    print(f"{work / budget:4.1f} x budget")
assert counted["v3"][1] > budget

# %% [markdown]
# PTX instructions are not the GPU's own, but the order of magnitude stands: the third
# kernel reads what it must and still is *not* at the limit of the memory. It is at the
# limit of its instructions. This is why 4-bit caches are rarely four times faster in
# practice: fewer bytes, but more work for each. What helps next is to let tensor cores
# do the multiplications, and to move the scales out of the inner loop: the lesson
# *Tensor cores* does both.

# %%
v1, v2, v3 = (counted[version][0] for version in ("v1", "v2", "v3"))
print(f"{v1:.0f} -> {v2:.1f} -> {v3:.1f} times the packed bytes")
assert (round(v1), round(v2, 1), round(v3, 1)) == (125, 4.0, 1.4)

# %% [markdown]
# ## Takeaway
#
# > **On the same 4-bit cache, the literal kernel asks for 125 times the packed bytes, a
# > kernel with tiles and online softmax for 4.0 times (once per query head, 4 of which
# > share a KV head), and a kernel that serves the whole group for 1.4 times (512
# > tokens, D = 128; the rest is unfinished results). All three agree with the
# > reference.**
#
# ## Further reading
#
# - Milakov and Gimelshein, 2018, arXiv 1805.02867: online softmax.
# - Dao et al., *FlashAttention*, 2022, arXiv 2205.14135; *Flash-Decoding*, 2023: splits
#   along the sequence.
# - Ainslie et al., *GQA*, 2023, arXiv 2305.13245: query heads that share keys and
#   values.
# - `kernels/README.md`: the ladder with registers, shared memory and counts.
