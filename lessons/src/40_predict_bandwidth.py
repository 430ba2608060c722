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
# # Predict the bandwidth: which limit binds, before anything is timed
#
# Fewer bits are fewer bytes. Are they also less time? You will predict it for real
# kernels and real cards from counts alone: from which context on does a smaller cache
# pay, how much at most, and where does more compression stop helping?
#
# **What you will do**
#
# - write a kernel's time from its bytes, its instructions and its start;
# - predict the speed-up of two kernels on three cards, and find one that is 1.0;
# - find the limit that binds, for bits, query heads, group sizes and devices;
# - compute how much a launch must read to come near the full bandwidth;
# - find the context length at which half of the gain is there.
#
# **What you need**: the lessons *Decode attention* and *Tensor cores*. Everything here
# is *predicted*: instructions are counted in machine code, devices come from
# datasheets, and no GPU has been timed by this project yet.

# %%
import matplotlib.pyplot as plt
import numpy as np

from kvq import checks, plots
from kvq.hardware import device
from kvq.kernels import budgets, predict

plt.style.use(plots.STYLE)
CARDS = ("H200", "A100-80GB", "RTX-4090")

# %% [markdown]
# ## Three limits and a start
#
# A kernel moves $n$ bytes, starts $i$ instructions for each of them, and takes a while
# $t_0$ to start and to end. Memory delivers $B$ bytes per second, the schedulers start
# $J$ instructions per second. If loads and arithmetic overlap, the slower one decides:
#
# $$t = t_0 + \max\left(\frac{n}{B}, \frac{i \, n}{J}\right) .$$
#
# (Tensor cores are a third limit. In a decode step they have time to spare, and the
# model below counts them as well.)
#
# **Exercise 1.** Write it.


# %%
def kernel_seconds(n, i, B, J, t0):
    """Seconds of a kernel that moves n bytes at i instructions per byte."""
    # BEGIN SOLUTION (1 line)
    return t0 + max(n / B, i * n / J)
    # END SOLUTION


checks.check_kernel_seconds(kernel_seconds)

# %% [markdown]
# The two limits are equal at $i = J / B$: that many instructions fit into the time of a
# byte. It is a number of the device alone.
#
# **Predict.** An H200 has nearly five times the bandwidth of an RTX 4090. On which of
# the two may a kernel spend more instructions per byte, and how many times more?

# %%
print("              TB/s     instructions per byte")
for name in CARDS:
    card = device(name)
    B = card.copy_bandwidth or card.bandwidth
    print(f"{name:12} {B / 1e12:6.2f} {card.issue_rate / B:14.1f}")

# %% [markdown]
# The card with the fastest memory is the hardest one to keep busy: memory has grown
# faster than the number of schedulers. A kernel that is at the memory limit on a card
# for games says nothing about one for servers.
#
# ## A long context
#
# Let $t_0$ be small against the rest. Of $b$ bits with a 16-bit scale and zero for $G$
# numbers, a number has
#
# $$n_1 = \frac{b + 32 / G}{8} \;\text{bytes},$$
#
# and a 16-bit cache has 2, which fp16 kernels do read at the memory's speed.
#
# **Exercise 2.** How many times faster than a 16-bit cache at full bandwidth is a
# kernel over $b$ bits, with $i$ instructions per byte? Both limits count.


# %%
def long_speedup(b, G, i, B, J):
    """Time of 2 bytes at bandwidth B, over the time of a number of b bits."""
    # BEGIN SOLUTION (2 lines)
    n = (b + 32 / G) / 8
    return 2 / B / kernel_seconds(n, i, B, J, 0)
    # END SOLUTION


checks.check_long_speedup(long_speedup)

# %% [markdown]
# Two kernels of this project: `v3`, without tensor cores, multiplies and adds in
# float32; `v5` multiplies by tensor cores and folds the scales. At 4 bits they need
# about 27 and 3.4 instructions per byte.
#
# **Predict.** Four bits with G = 64 are 3.6 times fewer bytes than 16. How many times
# faster is each kernel, on each card?


# %%
def cost(version, bits):
    """Instructions per byte, in the machine code for sm_90 (within 3 % for sm_80)."""
    if version == "v3":
        return budgets.budgets(90)[0]["decode_v3", bits]["instructions_per_byte"]
    return predict.loop_cost("H200", version, bits)["instructions_per_byte"]


def speedup(name, version, bits):
    """Over a long 16-bit cache, on a card. G = 64."""
    card = device(name)
    B = card.copy_bandwidth or card.bandwidth
    return long_speedup(bits, 64, cost(version, bits), B, card.issue_rate)


print(f"4 bits, G = 64   v3, i = {cost('v3', 4):.1f}    v5, i = {cost('v5', 4):.1f}")
for name in CARDS:
    row = [speedup(name, version, 4) for version in ("v3", "v5")]
    print(f"{name:12}", *(f"{x:10.2f} times" for x in row))

# %% [markdown]
# On the RTX 4090 both kernels get everything that the bytes allow, and nobody would
# see a difference. On the H200, v3 reads 3.6 times fewer bytes and is no faster than a
# 16-bit kernel. It is a good kernel: every byte once, no conflicts, no spills. It saves
# memory and no time.
#
# ## Where more compression stops helping
#
# Now every bit width.

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
for ax, name in zip(axes, CARDS, strict=True):
    bits = (8, 4, 2)
    stored = [b + 32 / 64 for b in bits]
    x = np.linspace(2.3, 9, 60)
    ax.plot(x, 16 / x, color="0.5", ls="--", label="bytes alone")
    for version, look in (("v3", "s"), ("v5", "o")):
        y = [speedup(name, version, b) for b in bits]
        color = {"v3": "#D55E00", "v5": "#0072B2"}[version]
        ax.plot(stored, y, look, ms=9, mfc="none", mew=2, color=color, label=version)
    ax.set(xscale="log", title=name, xlim=(9.5, 2.2), xlabel="stored bits per number")
    ax.set_xticks(stored, [f"{b:g}" for b in stored])
    ax.minorticks_off()
axes[0].set(ylabel="predicted speed-up over 16 bits", ylim=(0, 7))
axes[0].legend(loc="upper left")
plt.show()

# %% [markdown]
# On the H200, v3 is slower than a 16-bit kernel at 8 bits, and little faster at 2. It
# does the same work for a number of 2 bits as for one of 8. Where instructions bind,
# each byte that is saved is one that nobody waited for. At 2 bits it meets its limit
# even on the RTX 4090. v5 goes on to 2 bits on all three cards, but look at how much
# room is left:
#
# **Predict.** At 2 bits, v5 needs about 4.5 instructions per byte. What part of the
# H200's instructions is that? And if 32 query heads shared a KV head instead of 4?

# %%
LONG = 2**20  # tokens: t0 does not matter
SHAPE = {"kv_heads": 8, "ratio": 4}  # a layer of Llama-3.1-8B
print("H200: part of the instructions that fit into the time of the bytes, v5")
print("heads of a group      8 bits   4 bits   2 bits   limit at 2 bits")
share = {}
for ratio in (1, 4, 8, 16, 32):
    rows = [predict.decode("H200", bits=b, tokens=LONG, ratio=ratio) for b in (8, 4, 2)]
    share[ratio] = [row["issue_share"] for row in rows]
    print(f"{ratio:16}", *(f"{x:8.0%}" for x in share[ratio]), "  ", rows[-1]["limit"])

# %% [markdown]
# From 1 to 8 heads nothing changes: they are 8 columns of the same product. 16 heads
# are two tiles of columns. Codes are turned into numbers once for both, so they cost
# less than twice. 32 heads read each page a second time, from a cache of the GPU if
# they are lucky, and at 2 bits the instructions bind.
#
# The other way to spend fewer bits is a larger group:

# %%
print("v5, keys per channel, 2 bits   bits   most   instructions   part of H200's")
for G, value_G in ((32, 64), (64, 64), (128, 128)):
    row = predict.decode("H200", bits=2, tokens=LONG, G=G, value_G=value_G)
    print(
        f"G = {G:3} (keys), {value_G:3} (values) {row['effective_bits']:11.2f}", end=""
    )
    print(f" {row['ceiling']:6.2f} {row['instructions_per_byte']:10.2f}", end="")
    print(f" {row['issue_share']:16.0%}")

# %% [markdown]
# Larger groups leave fewer bytes, and the same codes have to be decoded: instructions
# per byte go up. The numbers are those of a perfect overlap. A GPU whose schedulers are
# busy for 70 percent of the time has little left for the moments when they are not.
#
# ## A short context
#
# Now $t_0$. A launch that starts, fetches its first bytes and merges its last results
# takes some microseconds, whatever it reads. This project assumes 5 (it is the one
# number here that is not counted; `make bench-gpu` on a GPU measures it).
#
# **Exercise 3.** At full speed, reading $n$ bytes takes $n / B$ of a total of $t_0 + n
# / B$. How many bytes must a launch read to reach a share $x$ of the bandwidth?


# %%
def bytes_for_share(x, B, t0):
    """Bytes n with (n / B) / (t0 + n / B) = x, 0 <= x < 1."""
    # BEGIN SOLUTION (1 line)
    return x / (1 - x) * t0 * B
    # END SOLUTION


checks.check_bytes_for_share(bytes_for_share)

# %% [markdown]
# **Predict.** One user, one layer of Llama-3.1-8B, 4 bits. How many tokens does it take
# to read at 90 percent of the bandwidth of an H200?

# %%
t0 = predict.OVERHEAD
token_bytes = predict.decode("H200", tokens=LONG, **SHAPE)["bytes"] / LONG
for name in CARDS:
    B = device(name).copy_bandwidth or device(name).bandwidth
    need = {x: bytes_for_share(x, B, t0) for x in (0.5, 0.9)}
    print(f"{name:12}", end="")
    for x, n in need.items():
        T = 64 * -(-int(n / token_bytes) // 64)  # whole pages
        at = predict.decode(name, tokens=T, **SHAPE)["copy_percent"]
        print(f"  {x:.0%}: {n / 1e6:6.1f} MB, {T:8,} tokens ({at:.0f} %)", end="")
    print()

# %% [markdown]
# A smaller cache makes it *harder* to reach the full bandwidth: the same context is
# fewer bytes. That is no loss. Time counts, not the percentage, and the time only gets
# shorter. But it says that a benchmark at 4,096 tokens and one user measures launches.
#
# **Exercise 4.** Both kernels, 16 bits and $b$ bits, start in $t_0$ and read at the
# same bandwidth. A token takes $a$ seconds to read at 16 bits and $a / r$ at $b$ bits.
# At which $T$ is *half of the gain* there, that is
#
# $$\frac{t_0 + a T}{t_0 + a T / r} = 1 + \frac{r - 1}{2} \; ?$$
#
# Solve for $T$. The result is short.


# %%
def half_gain_tokens(a, r, t0):
    """T at which a cache r times smaller is 1 + (r - 1) / 2 times faster."""
    # BEGIN SOLUTION (1 line)
    return r * t0 / a
    # END SOLUTION


checks.check_half_gain_tokens(half_gain_tokens)

# %% [markdown]
# In words: $a T / r = t_0$. Half of the gain is there when reading the *small* cache
# takes as long as starting. The better the compression, the longer the context that it
# needs.

# %%
print(f"half of the gain at, tokens   {'8 bits':>8} {'4 bits':>8} {'2 bits':>8}")
crossover = {}
for name in CARDS:
    B = device(name).copy_bandwidth or device(name).bandwidth
    a = 2 * 2 * 8 * 128 / B  # seconds of a token at 16 bits: K and V of 8 heads
    for batch in (1, 16):
        r = [predict.decode(name, bits=b)["ceiling"] for b in (8, 4, 2)]
        mine = [half_gain_tokens(batch * a, x, t0) for x in r]
        crossover[name, batch] = mine
        print(f"{name:12} {batch:2} users     ", *(f"{x:8,.0f}" for x in mine))
        for bits, x, T in zip((8, 4, 2), r, mine, strict=True):  # in steps of 64
            half = 1 + (x - 1) / 2
            found = predict.first_tokens(name, bits, half, batch=batch, **SHAPE)
            assert 0 <= found - T <= 64

# %%
tokens = 2 ** np.arange(7, 21)
fig, axes = plt.subplots(1, 2, figsize=(11.5, 4.3))
for bits in (16, 8, 4, 2):
    rows = [predict.decode("H200", bits=bits, tokens=int(T), **SHAPE) for T in tokens]
    key = "fp16" if bits == 16 else bits
    look = {"color": plots.COLORS[key], "ls": (0, (4, 2)), "lw": 1.8}
    axes[0].plot(
        tokens, [r["copy_percent"] for r in rows], label=f"{bits} bits", **look
    )
    if bits == 16:
        continue
    y = [predict.speedup("H200", bits, int(T), **SHAPE) for T in tokens]
    axes[1].plot(tokens, y, label=f"{bits} bits", **look)
    axes[1].axhline(rows[0]["ceiling"], color=plots.COLORS[key], lw=0.7)
    half = crossover["H200", 1][(8, 4, 2).index(bits)]
    axes[1].plot(half, (rows[0]["ceiling"] + 1) / 2, "o", color=plots.COLORS[key])
for ax in axes:
    ax.set_xscale("log", base=2)
    ax.set_xticks(2 ** np.arange(7, 21, 3), ("128", "1k", "8k", "64k", "512k"))
    ax.minorticks_off()
    ax.set(xlabel="tokens of one user")
axes[0].set(ylabel="percent of the bandwidth of a copy", ylim=(0, 100))
axes[1].set(ylabel="speed-up over 16 bits", ylim=(0, 7))
axes[0].set_title("Predicted, H200, one layer of Llama-3.1-8B")
axes[1].set_title("Dots: half of the gain. Thin lines: 16 / stored bits")
axes[0].legend(loc="upper left")
plt.show()

# %% [markdown]
# ## What the model leaves out
#
# The maximum is for a kernel in which everything overlaps, always. In the worst case
# nothing does, and the times add up. What is measured should lie between the two:

# %%
print("H200, 131,072 tokens, 8 KV heads: predicted percent of a copy's bandwidth")
for bits in (16, 8, 4, 2):
    row = predict.decode("H200", bits=bits, tokens=131_072, **SHAPE)
    print(f"{bits:2} bits: {row['bytes'] / 1e6:6.1f} MB", end="")
    print(f"  {row['copy_percent_apart']:4.0f} to {row['copy_percent']:.0f} %")

# %% [markdown]
# That is wide for 2 bits and narrow for 8: where instructions are few, it does not
# matter how well they hide. Also left out: a clock that sinks under load, a last round
# of blocks that fills half of the card, the lookup of pages, a cache that is still
# warm. So a measurement above the upper number is a mistake of the measurement, and one
# below the lower number is a fault of the kernel worth finding. A claimed speed-up
# above $16 / \text{stored bits}$ is one over a slow 16-bit kernel.

# %%
flat = speedup("H200", "v3", 4)
good, games = speedup("H200", "v5", 4), speedup("RTX-4090", "v3", 4)
half = crossover["H200", 1][1]
print(
    f"4 bits on an H200: v3 {flat:.1f} times, v5 {good:.1f}; RTX 4090: v3 {games:.1f}"
)
print(f"half of the gain at {half:,.0f} tokens")
assert (round(flat, 1), round(good, 1), round(games, 1)) == (1.0, 3.6, 3.6)
assert round(half, -2) == 18_700
assert (round(cost("v3", 4)), round(cost("v5", 4), 1)) == (27, 3.4)

# %% [markdown]
# ## Takeaway
#
# > **Bytes bound the speed-up, instructions decide it. Predicted for 4 bits (G = 64, D
# > = 128, 4 query heads per KV head) and a long context: on an H200, a kernel with 27
# > instructions per byte is 1.0 times as fast as a 16-bit one, and a kernel with 3.4 is
# > 3.6 times as fast; on an RTX 4090 both are. With 5 microseconds per launch, one user
# > needs 18,700 tokens on the H200 for half of the gain.**
#
# ## What to read next
#
# The next lesson, *Measure the bandwidth*, holds predictions against clocks.
#
# - Williams et al., *Roofline*, Communications of the ACM 52(4), 2009.
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022, arXiv 2211.05102:
#   decode steps as reading.
# - `kernels/predict.py` and `kvq/hardware.py`: the model and its numbers.
