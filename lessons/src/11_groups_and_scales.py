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
# # Groups and scales
#
# Numbers that share a scale share its step, and the largest of them sets it. Small
# groups have small steps and many scales. You will measure error against group size
# on real keys and values, beside what theory predicts, and find out what a scale costs.
#
# **What you will do**
#
# - write a quantizer with one scale per group, ragged last group included;
# - count what scales and zeros cost in bits per number;
# - see how the largest of $G$ numbers grows with $G$, and predict the error from it;
# - measure error against group size, per token and per channel, and weigh it against
#   the bits;
# - compare number formats for the scales.
#
# **What you need**: NumPy, and the lesson *The uniform quantizer*.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import bounds, checks, metrics, plots, study
from kvq.samples import real_kv

plt.style.use(plots.STYLE)
sample = real_kv(layer=15)

# %% [markdown]
# ## One scale per group
#
# A row of $D$ numbers is cut into groups of $G$ consecutive ones. Each group $g$ has
# its own scale:
#
# $$s_g = \frac{\max_{i \in g} |x_i|}{Q}, \qquad
# \text{code}_i = \operatorname{round}\!\left(\frac{x_i}{s_{g(i)}}\right), \qquad
# \hat{x}_i = s_{g(i)} \cdot \text{code}_i .$$
#
# Where $G$ does not divide $D$, the last group is smaller and has a scale like the
# others. It is tempting to fill it up with zeros, or to forget it.


# %%
def grouped(x, b, G):
    """x_hat (T, D): rows of x stored with one b-bit symmetric scale per G numbers."""
    Q = 2 ** (b - 1) - 1
    x_hat = np.empty_like(x)
    for start in range(0, x.shape[1], G):
        group = x[:, start : start + G]
        s = np.abs(group).max(axis=1, keepdims=True) / Q
        s = np.where(s == 0, 1, s)
        x_hat[:, start : start + G] = s * np.rint(group / s)
    return x_hat


checks.check_grouped(grouped)
x = np.array([[0.03, -0.07, 0.12, 0.09, 6.4]])
for G in (5, 4):
    print(f"groups of {G}: {grouped(x, b=4, G=G).round(3)}")

# %% [markdown]
# The second line has two groups: four small numbers, and a last group of one.
#
# ## What a scale costs
#
# A scale is a 16-bit float and serves $G$ numbers. A zero costs as much again. So a
# number takes
#
# $$b + \frac{16}{G} \ \text{bits (symmetric)}, \qquad
# b + \frac{32}{G} \ \text{bits (asymmetric)} .$$
#
# **Predict.** Four-bit codes, groups of 64, symmetric: how many *bytes* per number?

# %%
for G in (16, 32, 64, 128):
    symmetric = kvq.Scheme(4, "token", G)
    asymmetric = kvq.Scheme(4, "token", G, "asymmetric")
    bits = [s.bits_per_element(T=512, D=128) for s in (symmetric, asymmetric)]
    assert bits == [4 + 16 / G, 4 + 32 / G]
    print(f"G = {G:3}: {bits[0]} bits symmetric, {bits[1]} asymmetric", end="")
    print(f"  ({bits[0] / 8} bytes symmetric)")

# %% [markdown]
# Groups of 64 cost 0.53125 bytes per number, 3.76 times less than 16 bits. These are
# not estimates: what `quantize` stores has exactly this size, and where groups are
# ragged, the formula rounds the number of scales up.

# %%
for D, G in ((128, 64), (96, 64), (80, 32)):
    x = np.random.default_rng(D).standard_normal((3, 100, D))
    scheme = kvq.Scheme(4, "token", G)
    stored = kvq.quantize(x, scheme)
    scales = -(-D // G)  # D / G, rounded up
    assert 8 * stored.nbytes == x.size * 4 + 3 * 100 * scales * 16
    print(f"D = {D:3}, G = {G}: {scales} scales per row", end="")
    print(f", {stored.bits_per_element} bits per number")

# %% [markdown]
# ## The largest of G numbers
#
# The step follows the largest $|x|$ of the group. How does that grow with $G$? A normal
# number exceeds $m$ standard deviations with a chance that falls like $e^{-m^2/2}$.
# Among $G$ numbers we expect about one beyond $m$ when $G\,e^{-m^2/2} \approx 1$, so
#
# $$\max_{i \le G} |x_i| \approx \sigma \sqrt{2 \ln G} .$$
#
# It grows, but very slowly. The exact mean follows from
# $P(\max \le m) = P(|x| \le m)^G$; `bounds.expected_group_max` integrates it.
#
# **Predict.** From groups of 16 to groups of 1024, 64 times as many numbers: by what
# factor does the largest one grow?

# %%
rng = np.random.default_rng(0)
sizes = np.array([4, 8, 16, 32, 64, 128, 256, 512, 1024])
measured = [
    np.abs(rng.standard_normal((200_000 // G, G))).max(axis=1).mean() for G in sizes
]
exact = np.array([bounds.expected_group_max(int(G)) for G in sizes])
rule = np.sqrt(2 * np.log(sizes))
print("G       ", *(f"{G:6}" for G in sizes))
for name, values in (("measured", measured), ("exact", exact), ("rule", rule)):
    print(f"{name:8}", *(f"{v:6.3f}" for v in values))
growth = exact[-1] / exact[2]
print(f"from G = 16 to G = 1024: {growth:.2f} times")
assert np.allclose(measured, exact, rtol=0.02)

# %%
fig, ax = plt.subplots()
gray = plots.COLORS["Gaussian"]
ax.plot(sizes, measured, "^", color=gray, label="measured, Gaussian numbers")
ax.plot(sizes, exact, "--", color=gray, label="exact mean")
ax.plot(sizes, rule, ":", color="black", label=r"$\sqrt{2\,\ln G}$")
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, sizes)
ax.set(xlabel="group size G", ylabel="largest |x| of the group / σ")
ax.legend()
plt.show()

# %% [markdown]
# The rule has the right slope and lies too high at the sizes that matter here; the
# exact mean is what we use. With it, $s^2/12$ becomes a prediction that needs no data.
# Of the $G$ numbers, the largest is stored exactly, which leaves $G - 1$:
#
# $$\text{MSE} \approx \frac{G - 1}{G} \cdot \frac{E[s^2]}{12}, \qquad
# s = \frac{\max_i |x_i|}{Q} .$$


# %%
def predicted_nmse(b, G):
    """Mean squared error over mean square of independent normal numbers."""
    Q = 2 ** (b - 1) - 1
    s2 = bounds.expected_group_max(G, power=2) / Q**2  # E[s^2]
    return (G - 1) / G * s2 / 12


assert predicted_nmse(4, 64) == bounds.group_mse(4, 64)

# %% [markdown]
# ## Error against group size, on real numbers
#
# Two ways to lay a group. *Per token*: $G$ consecutive channels of one token. *Per
# channel*: $G$ consecutive tokens of one channel. The study `group-size` measures both,
# on the keys and the values of one layer. We compare the mean squared error to the
# mean square of the numbers (NMSE).
#
# **Predict.** Keys, 4 bits, per token: how many times smaller is the error with groups
# of 16 than with groups of 64? For normal numbers, the formula above says:

# %%
gaussian_gain = predicted_nmse(4, 64) / predicted_nmse(4, 16)
print(f"predicted for normal numbers: {gaussian_gain:.2f} times smaller")

# %%
rows = study.group_size(sample, bits=range(2, 9), levels="symmetric")
nmse = {(r["tensor"], r["per"], r["bits"], r["group"]): r["nmse"] for r in rows}
for tensor, per in (("K", "token"), ("K", "channel"), ("V", "token"), ("V", "channel")):
    gain = nmse[tensor, per, 4, 64] / nmse[tensor, per, 4, 16]
    print(f"{tensor} per {per:8} measured: {gain:.2f} times smaller")

# %%
fig, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4.4))
for ax, tensor in zip(axes, "KV", strict=True):
    for per in ("token", "channel"):
        line = plots.pick(rows, tensor=tensor, per=per, bits=4)
        G, measured = plots.column(line, "group"), plots.column(line, "nmse")
        look = {"color": plots.COLORS[per], "marker": plots.MARKERS[per]}
        ax.plot(G, measured, **look, label=f"measured, per {per}")
    predicted = plots.column(line, "predicted_gaussian")
    ax.plot(G, predicted, "--", color=gray, label="predicted, normal numbers")
    ax.set_xscale("log", base=2)
    ax.set_xticks(G, G)
    ax.set(xlabel="group size G", yscale="log", title=plots.NAMES[tensor])
axes[0].set_ylabel(plots.NMSE)
axes[1].legend()
plt.show()

# %% [markdown]
# Read it against the dashed line, which is what the same numbers would give if they
# were normal and independent.
#
# - *Values* follow it from a small distance, on either axis.
# - *Keys per token* rise much faster: the larger the group, the surer it holds one of
#   the few large channels.
# - *Keys per channel* lie below it: a large channel has its own scale, and the numbers
#   of one channel resemble each other.
#
# Theory needs the scales only. Given the scales that were really stored, $s^2/12$ is
# right for the keys as well; it was the normal distribution that was wrong.

# %%
for r in rows:
    if (r["tensor"], r["per"], r["bits"]) == ("K", "token", 4) and r["group"] >= 16:
        print(f"keys per token, G = {r['group']:2}: measured {r['nmse']:.4f}", end="")
        print(f"  s^2/12 {r['predicted_scales']:.4f}", end="")
        print(f"  normal numbers {r['predicted_gaussian']:.4f}")

# %% [markdown]
# ## The same against bits
#
# A smaller group costs bits, and so does a longer code. To compare them, plot the error
# against *stored bits per number*: codes and scales together. Each line is one code
# length, and each of its points one group size.

# %%
fig, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4.4))
for ax, tensor, per in zip(axes, "KV", ("channel", "token"), strict=True):
    for b in (2, 3, 4, 5, 8):
        line = plots.pick(rows, tensor=tensor, per=per, bits=b)
        x, y = plots.column(line, "bits_per_element"), plots.column(line, "nmse")
        look = {"color": plots.COLORS[b], "marker": plots.MARKERS[b]}
        ax.plot(x, y, **look, label=f"{b} bits")
    title = f"{plots.NAMES[tensor]} {plots.AXES[per]}"
    ax.set(xlabel=plots.BITS_PER_ELEMENT, yscale="log", title=title)
axes[0].set_ylabel(plots.NMSE)
axes[1].legend(title="code length")
plt.show()

# %% [markdown]
# At the right end of each line the groups are tiny, and one more code bit would have
# been a better use of the bits: the next line is below. At its left end the groups are
# large, and the last bits saved cost error. Points that no other point beats in both
# bits and error are the ones to choose from. They are called the Pareto front.


# %%
def pareto(rows):
    """The rows that no row with as few bits beats, from few bits to many."""
    front = []
    for row in sorted(rows, key=lambda r: (r["bits_per_element"], r["nmse"])):
        if not front or row["nmse"] < front[-1]["nmse"]:
            front.append(row)
    return front


for tensor, per in (("K", "channel"), ("V", "token")):
    front = pareto([r for r in rows if (r["tensor"], r["per"]) == (tensor, per)])
    below_8 = [r["group"] for r in front if r["bits"] < 8]
    print(f"{tensor} per {per}: codes of 2 to 7 bits, groups on the front:", end=" ")
    print(sorted(set(below_8)))
    assert min(below_8) >= 16

# %% [markdown]
# Groups of 4 and 8 are never worth their scales, as long as a longer code is possible.
# Where is the best group? One more bit divides the squared error by about 4, so $16/G$
# bits of scale would, spent on codes, divide it by $4^{16/G}$. Charge each group size
# for that, and look for the smallest
#
# $$\text{cost}(G) = \text{NMSE}(G) \cdot 4^{16/G} .$$
#
# **Predict.** With normal numbers, is the smallest cost at $G = 16$, 64 or 512?

# %%
curves = {
    "normal numbers, predicted": {int(G): predicted_nmse(4, int(G)) for G in sizes}
}
for tensor, per in (("K", "token"), ("K", "channel"), ("V", "token"), ("V", "channel")):
    curve = {
        G: nmse[t, p, b, G] for t, p, b, G in nmse if (t, p, b) == (tensor, per, 4)
    }
    curves[f"{tensor} per {per}"] = curve
best = {}
for name, curve in curves.items():
    cost = {G: error * 4 ** (16 / G) for G, error in curve.items()}
    best[name] = min(cost, key=cost.get)
    shown = ", ".join(f"{G}: {c / min(cost.values()):.2f}" for G, c in cost.items())
    print(f"{name:26} best G = {best[name]:3}   ({shown})")
assert set(best.values()) <= {32, 64, 128}

# %% [markdown]
# In brackets is the cost of each size against the best one. (A token has no more than
# 64 channels here.) The best group has 32 to 128 numbers, whatever the tensor and the
# axis, and twice or half as many cost little more. That is why these sizes are met in
# practice. The optimum is flat because the largest of $G$ numbers grows so slowly.
#
# ## Where the axis can run
#
# A scale can also serve a whole head or the whole tensor; then it costs next to
# nothing. Names differ: some texts and programs say *per-channel* for one scale per
# attention head. Here that is `per="head"`, and `per="channel"` means one scale for one
# channel of one head. Compare them with 4-bit asymmetric levels.

# %%
axis = study.axis(sample, bits=(4,), group=64)
for r in axis:
    print(f"{r['tensor']} per {r['per']:8}{r['numbers_per_scale']:7} numbers", end="")
    print(f" per scale  {r['bits_per_element']:.3f} bits  {r['sqnr_db']:5.1f} dB")

# %% [markdown]
# Per channel has one more price, which this table does not show. The next $G$ tokens of
# a channel must all have come before their scale is known. The lesson *The streaming
# cache* is about that. A scale per token is known as soon as its token is there.
#
# ## How precise must a scale be?
#
# A scale that is wrong by a fraction $\varepsilon$ moves $\hat{x}$ by the same
# fraction. Half precision has 11 significant bits, so $\varepsilon \le 2^{-11}$, far
# below the error of a 4-bit code. Shorter scales save bits in small groups:

# %%
print("keys per channel, 4 bits, symmetric, G = 16")
by_dtype = {}
for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "e8m0"):
    scheme = kvq.Scheme(4, "channel", 16, "symmetric", dtype)
    stored = kvq.quantize(sample.k, scheme)
    by_dtype[dtype] = metrics.sqnr_db(sample.k, stored.dequantize())
    print(f"{dtype:14} {stored.bits_per_element} bits  {by_dtype[dtype]:.2f} dB")

# %% [markdown]
# Sixteen-bit scales lose nothing that could be seen. Eight bits (`float8_e4m3fn`) lose
# a little and save half a bit per number, which is worth about 3 dB. A power of two
# (`e8m0`) is off by up to a factor of two; it loses most of what it saves.
#
# ## Takeaway

# %%
key_loss = nmse["K", "token", 4, 64] / nmse["K", "channel", 4, 64]
token_gain = nmse["K", "token", 4, 64] / nmse["K", "token", 4, 16]
print(f"keys, 4 bits, G = 64: per token {key_loss:.1f} times the error of per channel")
print(
    f"keys per token, G = 16 instead of 64: {token_gain:.1f} times less error", end=""
)
print(" for 0.75 bits more")
assert np.isclose(key_loss, 6.1, atol=0.1)
assert np.isclose(token_gain, 3.0, atol=0.1)

# %% [markdown]
# > **A 16-bit scale per 64 numbers costs 0.25 bits per number. At that price (4-bit
# > symmetric codes, one layer of SmolLM2-135M, 512 tokens) the keys' squared error is
# > 6.1 times smaller with groups along a channel than along a token, which is more than
# > the factor 3.0 that groups of 16 buy for 0.75 bits more.**
#
# ## Exercises
#
# **1. Groups along a channel.** Store each column of `x` in groups of $G$ consecutive
# rows. `grouped` above can do the work.


# %%
def grouped_per_channel(x, b, G):
    """x_hat (T, D): columns of x stored with one scale per G numbers."""
    # BEGIN SOLUTION (1 line)
    return grouped(x.T, b, G).T
    # END SOLUTION


checks.check_grouped_per_channel(grouped_per_channel)

# %% [markdown]
# **2. Ragged bits.** A row of $D$ numbers has $b$-bit codes and, per group of $G$, a
# scale and a zero of 16 bits each. The last group may be smaller but costs as much
# metadata. How many bits does a number take on average?


# %%
def bits_per_number(b, G, D):
    # BEGIN SOLUTION (2 lines)
    groups = -(-D // G)  # D / G, rounded up
    return b + 32 * groups / D
    # END SOLUTION


checks.check_ragged_bits(bits_per_number)

# %% [markdown]
# **3. Choose.** Given arrays of group sizes, of bits per number and of errors, return
# the group size with the least error among those within a budget of bits.


# %%
def best_group(groups, bits, errors, budget):
    # BEGIN SOLUTION (2 lines)
    allowed = np.where(bits <= budget, errors, np.inf)
    return groups[np.argmin(allowed)]
    # END SOLUTION


checks.check_best_group(best_group)

# %% [markdown]
# ## Further reading
#
# - Liu et al., *KIVI*, 2024, arXiv 2402.02750: keys per channel, values per token,
#   groups of 32.
# - Hooper et al., *KVQuant*, 2024, arXiv 2401.18079: keys per channel before RoPE.
# - Sheng et al., *FlexGen*, 2023, arXiv 2303.06865: group-wise 4-bit weights and cache.
# - *OCP Microscaling Formats (MX) Specification* v1.0, 2023: 32 numbers share one power
#   of two.
# - Cramér, *Mathematical Methods of Statistics*, 1946, chapter 28: the largest of $n$
#   normal numbers.
