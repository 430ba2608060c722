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
# # The uniform quantizer
#
# A uniform quantizer replaces a real number by the nearest of $2^b$ equally spaced
# levels. You will derive its two forms, predict its error from the step alone, and
# compare the prediction with real keys and values.
#
# **What you will do**
#
# - derive the symmetric quantizer, and write it in four lines;
# - see what rounding, clipping and the sign of a code have to do with it;
# - show that the error is at most half a step and about $s^2/12$ in the mean square,
#   and that one more bit is worth 6.02 dB;
# - find a real channel that needs a zero-point;
# - meet levels that are not equally spaced;
# - pack 8-, 4-, 3- and 2-bit codes into bytes.
#
# **What you need**: NumPy, and the lesson *Start here*.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import bounds, checks, codebooks, metrics, plots, study
from kvq.samples import real_kv, synthetic_kv

plt.style.use(plots.STYLE)
sample = real_kv(layer=15)

# %% [markdown]
# ## Symmetric levels
#
# We want levels at $0, \pm s, \pm 2s, \ldots, \pm Qs$. With $b$ bits there are $2^b$
# codes. Zero takes one of them, and as many levels lie above it as below, so one code
# is left over and $Q = 2^{b-1} - 1$. The outermost level should reach the largest
# $|x|$ of the group and no further: $Qs = \max_i |x_i|$. This gives
#
# $$Q = 2^{b-1} - 1, \qquad s = \frac{\max_i |x_i|}{Q}, \qquad
# \text{code}_i = \operatorname{clip}\!\left(\operatorname{round}\!\left(\frac{x_i}{s}
# \right), -Q, Q\right), \qquad \hat{x}_i = s \cdot \text{code}_i .$$
#
# A group of zeros has $s = 0$. Any other step would do as well for it, so the code
# divides by 1 there.


# %%
def symmetric(x, b):
    """Integer codes (-Q..Q) of the group x, and its scale s."""
    Q = 2 ** (b - 1) - 1
    s = np.abs(x).max() / Q
    code = np.clip(np.rint(x / (s or 1)), -Q, Q).astype(int)
    return code, s


checks.check_symmetric(symmetric)

# %% [markdown]
# This is the quantizer as a picture, for 3 bits and a group whose largest number is 3:
# a staircase, and below it the error, which is a saw-tooth.

# %%
x = np.linspace(-3, 3, 601)
code, s = symmetric(x, b=3)
x_hat = s * code

fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(6.4, 5.2))
top.plot(x, x_hat, color="black")
top.plot(x, x, ":", color="gray")
top.set(ylabel=r"stored number $\hat{x}$", title="3 bits: seven levels, s = 1")
bottom.plot(x, x_hat - x, color="black")
for edge in (-s / 2, s / 2):
    bottom.axhline(edge, ls="--", color="gray", lw=1)
bottom.set(xlabel="x", ylabel=r"error $\hat{x} - x$", yticks=[-s / 2, 0, s / 2])
plt.show()
assert np.abs(x_hat - x).max() <= s / 2 + 1e-12

# %% [markdown]
# ## Rounding, clipping, sign
#
# **Rounding.** A number exactly halfway between two levels can go either way. Up, as
# `floor(y + 0.5)` does, moves all of them in one direction. `np.rint` takes the even
# neighbour, which moves half of them up and half down. Compare the mean error.

# %%
y = np.arange(-4, 4) + 0.5
for name, rounded in (("np.rint", np.rint(y)), ("floor(y + 0.5)", np.floor(y + 0.5))):
    print(f"{name:15} {rounded.astype(int)}  mean error {np.mean(rounded - y):+.2f}")

# %% [markdown]
# Every part of this project rounds half to even. That is one rule for NumPy, for C
# (`rintf`) and for a GPU, so that all of them give the same codes.
#
# **Clipping.** Here $|x_i| / s$ is never above $Q$, so `clip` seems idle. It has work
# to do as soon as $s$ is not exactly $\max|x| / Q$: when it was chosen before these
# numbers were seen, or when it does not fit its stored format.
#
# **Sign.** Bytes hold codes without a sign, so the stored code is the integer plus
# $2^{b-1}$: with 4 bits, $-7 \ldots 7$ becomes $1 \ldots 15$, and 0 is never used.

# %%
code, s = symmetric(np.array([-7.0, -1.0, 0.0, 3.0, 7.0]), b=4)
print("integers", code, "  stored", code + 8)

# %% [markdown]
# ## How large is the error?
#
# **At most half a step.** The nearest of the levels $s$ apart is never further away
# than $s/2$.
#
# **About $s^2/12$ in the mean square.** If the numbers spread evenly over a step, the
# error $e$ is anywhere between $-s/2$ and $s/2$ with the same chance, so its mean
# square is
#
# $$\frac{1}{s} \int_{-s/2}^{s/2} e^2\, de
# = \frac{1}{s} \cdot \frac{2}{3} \left(\frac{s}{2}\right)^3 = \frac{s^2}{12} .$$
#
# The integral is the area under a parabola. The assumption is good while the step is
# small against the spread of the numbers.
#
# **Predict.** 64 numbers from a normal distribution with variance 1 share one scale of
# $b = 4$ bits. Their largest $|x|$ is about 2.6. How large is the mean squared error?
# Compute $s$, then $s^2/12$, in your head or on paper.

# %%
gaussian = np.random.default_rng(0).standard_normal((4096, 64))
largest = np.abs(gaussian).max(axis=1)
print(f"mean of max|x| over {len(gaussian)} groups: {largest.mean():.2f}")
for b in (2, 3, 4, 8):
    coded = [symmetric(group, b) for group in gaussian]
    s = np.array([s for _, s in coded])[:, None]
    error = s * np.array([code for code, _ in coded]) - gaussian
    assert np.all(np.abs(error) <= s / 2 + 1e-12)
    measured, predicted = np.mean(error**2), np.mean(bounds.granular_mse(s))
    print(f"{b} bits: measured {measured:.2e}  s^2/12 {predicted:.2e}", end="")
    print(f"  ratio {measured / predicted:.2f}")

# %% [markdown]
# With 4 bits and more the model is right to a few percent. What is missing is mostly
# the one number in 64 that sets the scale, which is stored exactly. With 2 bits the
# only levels are $-s$, 0 and $s$, the step is as wide as the whole distribution, and
# the model fails: most numbers lie closer to zero than half a step.
#
# ## One bit is worth 6.02 dB
#
# Errors are compared with the numbers they belong to, on a logarithmic scale:
#
# $$\text{SQNR} = 10 \log_{10} \frac{\text{mean}\, x^2}{\text{mean}\, (\hat{x} - x)^2}
# \quad \text{in dB} .$$
#
# One more bit halves the step, and so divides $s^2/12$ by four:
# $10 \log_{10} 4 = 6.02$ dB. Symmetric levels gain a little more at first, because
# $Q$ goes from 1 to 3 to 7: it more than doubles.
#
# **Predict.** How many dB does a step from 4 to 8 bits buy? And from 2 to 3 bits, with
# $Q$ going from 1 to 3?
#
# The study `bits` stores the real keys and values, and Gaussian numbers of the same
# shape, per token with one scale per 64 numbers.

# %%
rows = study.bits(sample, bits=range(2, 9), levels=("symmetric",))
sqnr = {(row["tensor"], row["bits"]): row["sqnr_db"] for row in rows}
for name in ("Gaussian", "V", "K"):
    values = [sqnr[name, b] for b in range(2, 9)]
    print(f"{name:8}", "  ".join(f"{v:5.1f}" for v in values), "dB at 2..8 bits")
four_bits = {n: sqnr[n, 8] - sqnr[n, 4] for n in ("Gaussian", "V", "K")}
print("from 4 to 8 bits:", {n: f"{v:.1f} dB" for n, v in four_bits.items()})
q_gain = 20 * np.log10(127 / 7)
print(f"predicted: 4 x 6.02 = {4 * 6.02:.1f}; with Q from 7 to 127: {q_gain:.1f} dB")

# %%
fig, ax = plt.subplots()
bits = range(2, 9)
predicted = [-10 * np.log10(bounds.group_mse(b, 64)) for b in bits]
ax.plot(
    bits, predicted, "--", color=plots.COLORS["predicted"], label="predicted, Gaussian"
)
for name in "VK":
    look = {"color": plots.COLORS[name], "marker": plots.MARKERS[name]}
    ax.plot(bits, [sqnr[name, b] for b in bits], **look, label=plots.NAMES[name])
ax.set(xlabel="bits b", ylabel="SQNR in dB", title="Real numbers, per token, G = 64")
ax.legend()
plt.show()

# %% [markdown]
# The slope is the same for all, about 6 dB per bit: it is a property of the quantizer.
# The height is a property of the numbers: a group whose largest number is far above
# the others has a large step for its size. The keys lose most of a bit that way, as
# the distance to the dashed line shows.
#
# ## Asymmetric levels: the zero-point
#
# Symmetric levels waste codes on numbers that lie to one side of zero. Let the levels
# begin at the smallest number instead and end at the largest one:
#
# $$z = \min_i x_i, \qquad s = \frac{\max_i x_i - \min_i x_i}{2^b - 1}, \qquad
# \text{code}_i = \operatorname{round}\!\left(\frac{x_i - z}{s}\right), \qquad
# \hat{x}_i = s \cdot \text{code}_i + z .$$
#
# There are $2^b$ levels, so $2^b - 1$ steps between them, and no code is left over. The
# zero $z$ is stored as a real number. Other systems store it as an integer code,
# which fails where 0 lies far outside the range of the group.
#
# Do real tensors need this? Look for the key channel whose mean is largest against its
# spread, and quantize groups of 64 tokens of it.

# %%
keys = sample.k.astype(np.float64)
ratio = np.abs(keys.mean(axis=1)) / keys.std(axis=1)
head, channel = np.unravel_index(ratio.argmax(), ratio.shape)
biased = keys[head, :, channel]
print(f"head {head}, channel {channel}: from {biased.min():.1f} to {biased.max():.1f}")
gain = {}
for levels in ("symmetric", "asymmetric"):
    scheme = kvq.Scheme(4, "channel", 64, levels)
    stored = kvq.quantize(keys, scheme)
    step = stored.scale[head, :, channel].astype(np.float64).mean()
    gain[levels] = metrics.mse(biased, stored.dequantize()[head, :, channel])
    print(f"{levels:10} mean step {step:.3f}  mse {gain[levels]:.4f}", end="")
    print(f"  {stored.bits_per_element} bits per number")
bias_ratio = gain["symmetric"] / gain["asymmetric"]
print(f"asymmetric: {bias_ratio:.0f} times smaller mean squared error")

# %% [markdown]
# The price is a second number per group, here a quarter of a bit per stored number.
# For numbers centred on zero the gain is much smaller. It comes from the one code more
# and from a range that fits both ends.

# %%
centred = synthetic_kv(outlier_channels=0).v
for levels in ("symmetric", "asymmetric"):
    stored = kvq.quantize(centred, kvq.Scheme(4, "token", 64, levels))
    db = metrics.sqnr_db(centred, stored.dequantize())
    print(f"Gaussian, {levels:10} {db:.1f} dB, {stored.bits_per_element} bits")

# %% [markdown]
# ## Levels that are not equally spaced
#
# Most numbers of a bell-shaped distribution lie near zero, and few levels are needed
# far out. If we know the distribution, we can place each level where it serves best:
# every threshold halfway between two levels, every level at the mean of the numbers
# between its thresholds. These are the Lloyd–Max levels. NF4, of QLoRA, takes
# quantiles of the normal distribution instead. Both store a code of 4 bits that is an
# index into a table.

# %%
b = 4
step, uniform_mse = bounds.optimal_uniform(b)
tables = {
    "best uniform": (np.arange(2**b) - (2**b - 1) / 2) * step,
    "Lloyd–Max": codebooks.levels("lloyd-max", b),
    "NF4 (its end at 2.6)": 2.6 * codebooks.levels("nf4", b),
}
fig, ax = plt.subplots(figsize=(6.4, 3.0))
grid = np.linspace(-3.2, 3.2, 400)
ax.fill_between(grid, 3 * codebooks.normal_pdf(grid), color="0.9")
for i, (name, levels) in enumerate(tables.items()):
    ax.plot(levels, np.full(2**b, 1.5 + i), "|", ms=16, mew=2, color="black")
    ax.text(-5.6, 1.5 + i, name, va="center")
ax.set(xlabel="level, in standard deviations", yticks=[], xticks=range(-3, 4))
ax.set(xlim=(-5.7, 3.3), ylim=(0, 4))
plt.show()
assert np.isclose(bounds.lloyd_max_mse(4), 0.009501, rtol=1e-4)
print(f"Gaussian MSE: best uniform {uniform_mse:.5f}", end="")
print(f"  Lloyd-Max {bounds.lloyd_max_mse(b):.5f}", end="")
print(f"  no code can be below {bounds.rate_distortion(b):.5f}")

# %% [markdown]
# On paper, Lloyd–Max wins. Now the same on real values, where no distribution is
# exactly normal, everything at 4 bits with a scale per 64 numbers.

# %%
for name, x in (("V", sample.v), ("K", sample.k)):
    for levels in ("symmetric", "nf4", "lloyd-max"):
        stored = kvq.quantize(x, kvq.Scheme(4, "token", 64, levels))
        db = metrics.sqnr_db(x, stored.dequantize())
        print(f"{name}  {levels:10} {db:5.1f} dB  {stored.bits_per_element} bits")

# %% [markdown]
# Lloyd–Max gains little on the values and loses on the keys: its scale is the root mean
# square of the group, its levels end at 2.7 of them, and the large channels of the keys
# lie beyond. NF4 is scaled by the largest $|x|$, so nothing lies beyond its ends, and
# its levels are close together near zero, where most numbers are: it gains on both.
# Levels made for a distribution are as good as the assumption that the numbers follow
# it, and their ends matter as much as their middle.
#
# ## Codes into bytes
#
# Code $i$ of a row takes the bits $b\,i$ to $b\,i + b - 1$ of that row, lowest first.
# Eight bits give one code, four bits two codes, two bits four codes per byte. Three
# bits do not divide eight, so eight codes share three bytes, and some codes lie across
# two of them.

# %%
codes = np.array([5, 1, 7, 0, 2, 6, 3, 4], np.uint8)
packed = kvq.pack(codes, bits=3)
bits = "".join(f"{byte:08b}"[::-1] for byte in packed)  # lowest bit first
print("codes", codes, "->", len(packed), "bytes")
print("bit string:", " ".join(bits[i : i + 3] for i in range(0, 24, 3)))
assert np.array_equal(kvq.unpack(packed, bits=3, n=8), codes)
for b in (8, 4, 3, 2):
    codes = np.random.default_rng(b).integers(0, 2**b, 64).astype(np.uint8)
    packed = kvq.pack(codes, b)
    assert np.array_equal(kvq.unpack(packed, b, 64), codes)
    print(f"64 codes of {b} bits: {len(packed)} bytes")

# %% [markdown]
# ## Takeaway

# %%
print(f"Gaussian numbers: {four_bits['Gaussian'] / 4:.2f} dB per bit from 4 to 8 bits")
print(f"real keys {four_bits['K'] / 4:.2f}, real values {four_bits['V'] / 4:.2f}")
per_bit = np.array(list(four_bits.values())) / 4
assert np.allclose(per_bit, 6.3, atol=0.05)

# %% [markdown]
# > **From 4 to 8 bits, each bit of a symmetric quantizer is worth 6.3 dB on Gaussian
# > numbers, on real keys and on real values alike (per token, 64 numbers per scale);
# > the error itself is half a step at most and about $s^2/12$ in the mean square.**
#
# ## Exercises
#
# **1. Asymmetric.** Write the asymmetric quantizer. A constant group has $s = 0$;
# divide by 1 there, as above.


# %%
def asymmetric(x, b):
    """Codes (0..2^b - 1), scale s and zero z of the group x."""
    # BEGIN SOLUTION (4 lines)
    z = x.min()
    s = (x.max() - z) / (2**b - 1)
    code = np.rint((x - z) / (s or 1)).astype(int)
    return code, s, z
    # END SOLUTION


checks.check_asymmetric(asymmetric)

# %% [markdown]
# **2. Predict.** Numbers of standard deviation `sigma` lie within `[-xmax, xmax]`, and
# $2^b$ levels divide that range into steps $s = 2\,x_\text{max} / 2^b$. Predict the
# SQNR in dB from $s^2/12$.


# %%
def predicted_sqnr(b, xmax, sigma):
    # BEGIN SOLUTION (2 lines)
    s = 2 * xmax / 2**b
    return 10 * np.log10(sigma**2 / (s**2 / 12))
    # END SOLUTION


checks.check_sqnr(predicted_sqnr)

# %% [markdown]
# **3. Four codes per byte.** Pack 2-bit codes, the first one in the lowest bits. The
# number of codes is a multiple of four.


# %%
def pack_quads(codes):
    """Bytes (n,) of the unsigned 2-bit codes (4n,)."""
    # BEGIN SOLUTION (2 lines)
    a, b, c, d = codes.reshape(-1, 4).T
    return a | b << 2 | c << 4 | d << 6
    # END SOLUTION


checks.check_pack_quads(pack_quads)

# %% [markdown]
# ## Further reading
#
# - Bennett, *Spectra of Quantized Signals*, Bell System Technical Journal 27, 1948:
#   the origin of $s^2/12$.
# - Max, *Quantizing for Minimum Distortion*, IRE Transactions on Information Theory 6,
#   1960, and Lloyd, *Least Squares Quantization in PCM*, IEEE Transactions on
#   Information Theory 28, 1982: the best levels.
# - Gray and Neuhoff, *Quantization*, IEEE Transactions on Information Theory 44, 1998:
#   a survey of fifty years.
# - Widrow and Kollár, *Quantization Noise*, 2008: when the error is uniform.
# - Dettmers et al., *QLoRA*, 2023, arXiv 2305.14314: the NF4 levels.
