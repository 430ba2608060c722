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
# # Codebooks: where should sixteen levels stand?
#
# Four bits choose one of sixteen values. Equal steps are one choice of the sixteen;
# NF4, E2M1 and Lloyd–Max are others. You will build the levels that are best for given
# numbers, see why the best levels on paper are the worst on real keys, and find out how
# much of the difference is the levels and how much is the scale.
#
# **What you will do**
#
# - write a quantizer for any table of levels, and Lloyd's algorithm to improve one;
# - hold seven 4-bit codes against real keys and values, and against attention;
# - take the levels of one code and the scale of another, to see which of them counts;
# - fit levels to the cache itself, and test them on tokens that they have not seen.
#
# **What you need**: NumPy, scales and groups, and the squared error of a uniform
# quantizer.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import Scheme, bounds, checks, codebooks, metrics, plots
from kvq.samples import LAYERS, real_kv

plt.style.use(plots.STYLE)
samples = {layer: real_kv(layer) for layer in LAYERS}
H_kv, T, D = samples[15].k.shape
print(f"layers {LAYERS} of SmolLM2-135M; {H_kv} KV heads, {T} tokens, D = {D}")

# %% [markdown]
# ## A code is an index
#
# Let the levels be $c_0 < c_1 < \dots < c_{n-1}$ with $n = 2^b$. A number $y$ is stored
# as the index of the nearest one:
#
# $$\text{code}(y) = \operatorname{argmin}_i |y - c_i|, \qquad
# \hat{y} = c_{\text{code}(y)} .$$
#
# The nearest level changes halfway between two neighbours, at the thresholds
# $t_i = (c_{i-1} + c_i)/2$. So no search over all levels is needed: count the
# thresholds below $y$.
#
# **Exercise 1.** Write it for sorted levels. `np.searchsorted` counts.


# %%
def nearest_code(y, levels):
    """The index of the level nearest to each number of y. levels (n,), increasing."""
    # BEGIN SOLUTION (2 lines)
    thresholds = (levels[:-1] + levels[1:]) / 2
    return np.searchsorted(thresholds, y)
    # END SOLUTION


checks.check_nearest_code(nearest_code)

# %% [markdown]
# ## The best levels for given numbers
#
# Which levels make the mean squared error $\text{E}\,(y - \hat{y})^2$ smallest? Two
# conditions must hold. Each threshold lies halfway between its levels, or some number
# would be nearer to another one. And each level is the *mean* of the numbers that are
# stored as it, because the mean is the constant with the smallest squared error:
#
# $$t_i = \frac{c_{i-1} + c_i}{2}, \qquad
# c_i = \text{E}\,[\, y \mid t_i < y \le t_{i+1} \,] .$$
#
# Lloyd's algorithm applies one after the other until nothing moves. In one dimension
# this is k-means.
#
# **Predict.** Start with sixteen equal steps from $-3$ to $3$ and give it normal random
# numbers. Do the levels near zero move together or apart?
#
# **Exercise 2.** Write one round. Leave a level that no number chooses where it is.


# %%
def lloyd_round(y, levels):
    """The mean of the numbers nearest to each level. y (N,), levels (n,)."""
    # BEGIN SOLUTION (5 lines)
    code = nearest_code(y, levels)
    count = np.bincount(code, minlength=len(levels))
    total = np.bincount(code, weights=y, minlength=len(levels))
    mean = total / np.maximum(count, 1)
    return np.where(count > 0, mean, levels)
    # END SOLUTION


checks.check_lloyd_round(lloyd_round)


# %%
def mean_squared_error(y, levels):
    return np.mean((levels[nearest_code(y, levels)] - y) ** 2)


gaussian = np.random.default_rng(0).standard_normal(200_000)
levels = np.linspace(-3, 3, 16)
history = []
for _ in range(200):
    history.append(mean_squared_error(gaussian, levels))
    levels = lloyd_round(gaussian, levels)

best = bounds.lloyd_max_mse(4)
print(
    f"squared error: equal steps {history[0]:.5f}, after 200 rounds {history[-1]:.5f}"
)
print(f"the exact optimum for the normal distribution: {best:.5f}")
steps = np.diff(levels)
print(f"step in the middle {steps[7]:.2f}, at the ends {steps[0]:.2f} {steps[-1]:.2f}")
assert np.all(np.diff(history) <= 0)
assert abs(history[-1] / best - 1) < 0.02

# %% [markdown]
# They move together: most numbers are near zero, and a short step there saves more than
# a long one at the ends costs. No round made the error larger, and none can, because
# each of the two halves of a round can only lower it.
#
# What is it worth? A bit less is four times the error, so a factor $f$ between two
# errors is worth $\log_4 f$ bits.

# %%
print("bits   best equal steps   Lloyd-Max   worth in bits")
for row in bounds.gaussian_table((2, 3, 4, 8)):
    uniform, lloyd = row["uniform_mse"], row["lloyd_max_mse"]
    worth = np.log(uniform / lloyd) / np.log(4)
    print(f"{row['bits']:4} {uniform:18.5f} {lloyd:11.5f} {worth:15.2f}")

# %% [markdown]
# For normal numbers it is a tenth of a bit at four bits. That is all the shape of the
# levels can give *if the best scale is known*. In a cache it is not: the scale of a
# group is computed from the group.
#
# ## Seven codes at 4 bits
#
# | code | levels | scale of a group |
# |---|---|---|
# | symmetric | $-7 \dots 7$, equal steps | largest absolute value |
# | asymmetric | $0 \dots 15$, equal steps | range, and a zero |
# | nf4 | normal quantiles and 0 (QLoRA) | largest absolute value |
# | iq4_nl | a table of integers (llama.cpp) | the same, with its sign |
# | e2m1 | a float: $0, .5, 1, 1.5, 2, 3, 4, 6$, negative ones | as nf4 |
# | mxfp4 | the same float | a power of two near the largest absolute value |
# | lloyd-max | the levels from above | root mean square |
#
# One picture of the levels, each set scaled to end at 1:

# %%
sets = {
    "symmetric": np.arange(-7, 8) / 7,
    "nf4": codebooks.levels("nf4", 4),
    "iq4_nl": codebooks.levels("iq4_nl", 4) / 127,
    "e2m1": np.unique(codebooks.levels("e2m1", 4)) / 6,
    "lloyd-max": codebooks.lloyd_max(4) / codebooks.lloyd_max(4).max(),
}
fig, ax = plt.subplots(figsize=(7, 2.8))
for i, c in enumerate(sets.values()):
    ax.plot(c, np.full(len(c), -i), "|", ms=15, mew=2, color="black")
ax.set_yticks([-i for i in range(len(sets))], sets)
ax.set(ylim=(-4.6, 0.6), xlabel="level / largest level", title="sixteen levels, or 15")
ax.grid(False)
plt.show()
for name, c in sets.items():
    print(f"{name:10} {len(np.unique(c))} different levels")

# %% [markdown]
# The symmetric integers leave a code unused, and a float counts zero twice. Groups of
# 32, a scale of 16 bits: 4.5 bits per number. The asymmetric code needs a zero as well,
# so it gets groups of 64. mxfp4 has a scale of 8 bits.
#
# **Predict.** Lloyd–Max has the best levels. Where does it come in on the keys of layer
# 15, and where on the values?

# %%
CODES = {
    "symmetric": Scheme(4, "token", 32, "symmetric"),
    "asymmetric": Scheme(4, "token", 64, "asymmetric"),
    "nf4": Scheme(4, "token", 32, "nf4"),
    "iq4_nl": Scheme(4, "token", 32, "iq4_nl"),
    "e2m1": Scheme(4, "token", 32, "e2m1"),
    "mxfp4": Scheme(4, "token", 32, "e2m1", "e8m0"),
    "lloyd-max": Scheme(4, "token", 32, "lloyd-max"),
}


def store(x, scheme):
    return kvq.quantize(x, scheme).dequantize()


def nmse_table(name):
    """{code: [NMSE in each layer]} of the keys ("k") or the values ("v")."""
    return {
        code: [
            metrics.nmse(x, store(x, scheme))
            for x in (getattr(s, name) for s in samples.values())
        ]
        for code, scheme in CODES.items()
    }


nmse = {name: nmse_table(name) for name in "kv"}
print("NMSE, layers          keys" + " " * 27 + "values")
print("code        bits" + "".join(f"{n:8}" for n in 2 * LAYERS))
for code, scheme in CODES.items():
    row = nmse["k"][code] + nmse["v"][code]
    bits = scheme.bits_per_element(T, D)
    print(f"{code:11} {bits:4}" + "".join(f"{e:8.4f}" for e in row))

# %% [markdown]
# The code with the best levels on paper is the worst on every layer of the keys, and by
# far the worst on the values of layer 0. NF4 and iq4_nl halve the error of the
# symmetric integers on the keys, at the same bits. And mxfp4 pays for its short scale:
# a power of two is up to a factor of two away from the scale that fits.

# %%
k_index = LAYERS.index(15)
for code in ("nf4", "iq4_nl", "e2m1", "lloyd-max"):
    factor = nmse["k"]["symmetric"][k_index] / nmse["k"][code][k_index]
    print(
        f"keys of layer 15: {code:10} has {factor:4.2f} times less error than integers"
    )
assert all(
    nmse["k"]["lloyd-max"][i] == max(t[i] for t in nmse["k"].values()) for i in range(4)
)
assert nmse["k"]["symmetric"][k_index] > 1.9 * nmse["k"]["nf4"][k_index]

# %% [markdown]
# ## The levels or the scale?
#
# Lloyd–Max differs from the others in two things. Its levels are closer together near
# zero, and its scale is the root mean square of the group (RMS), not the largest
# absolute value. Its last level stands at 2.7 RMS. What lies beyond comes back as 2.7
# RMS, whatever it was: *overload*.

# %%
GROUP = 32


def groups(x):
    """x as rows of GROUP numbers, float64."""
    return np.asarray(x, np.float64).reshape(-1, GROUP)


def quantized(g, s, levels):
    """Rows g with a scale each, s (rows, 1), back from their codes."""
    return levels[nearest_code(g / s, levels)] * s


def nmse_of(g, g_hat):
    return np.sum((g_hat - g) ** 2) / np.sum(g**2)


lloyd = codebooks.lloyd_max(4)
print("layer 15         beyond the last level   their share of the error")
for name in "kv":
    g = groups(getattr(samples[15], name))
    rms = np.sqrt((g**2).mean(axis=1, keepdims=True))
    outside = np.abs(g / rms) > lloyd.max()
    error = (quantized(g, rms, lloyd) - g) ** 2
    share = error[outside].sum() / error.sum()
    print(f"{name}            {outside.mean():14.1%} {share:26.0%}")

# %% [markdown]
# A few numbers in a hundred make most of the error: the outlier channels. Now we cross
# the two choices, each set of levels with each scale.
#
# **Predict.** Lloyd–Max levels with the scale of the others: still the worst?


# %%
def absmax(g, levels):
    return np.abs(g).max(axis=1, keepdims=True) / levels.max()


def rms_scale(g, levels):
    """The scale that puts the last level where Lloyd-Max has it, at 2.7 RMS."""
    rms = np.sqrt((g**2).mean(axis=1, keepdims=True))
    return rms * lloyd.max() / levels.max()


crossed = {}
print("layer 15, keys    largest |x|    RMS")
g = groups(samples[15].k)
for name in ("symmetric", "nf4", "e2m1", "lloyd-max"):
    c = sets[name]
    crossed[name] = [nmse_of(g, quantized(g, f(g, c), c)) for f in (absmax, rms_scale)]
    print("{:14} {:14.4f} {:6.4f}".format(name, *crossed[name]))
assert crossed["lloyd-max"][0] < crossed["symmetric"][0]
assert min(rms for _, rms in crossed.values()) > max(top for top, _ in crossed.values())

# %% [markdown]
# It was the scale. With the largest absolute value as their end, the Lloyd–Max levels
# are as good as NF4's. And every set is bad with the RMS.
#
# ## Search for the scale
#
# The scale is free: whatever it is, it takes 16 bits. So the encoder may try several
# and keep the one with the smallest error. For a group $x$ and candidates
# $s_f = f \max|x| / c_{n-1}$,
#
# $$s = \operatorname{argmin}_{s_f}
# \sum_i \left(s_f\, c_{\text{code}(x_i/s_f)} - x_i\right)^2 .$$
#
# A factor $f < 1$ clips the largest numbers to serve the others.
#
# **Predict.** By how much does the best factor lower the error of the keys: 1 %, 10 %
# or 50 %?
#
# **Exercise 3.** Write the search for one group.


# %%
def best_scale(x, levels, factors):
    """The s_f with the smallest squared error. x (G,), levels and factors sorted."""
    # BEGIN SOLUTION (4 lines)
    s = factors * np.abs(x).max() / levels.max()
    x_hat = s[:, None] * levels[nearest_code(x / s[:, None], levels)]
    error = ((x_hat - x) ** 2).sum(axis=1)
    return s[np.argmin(error)]
    # END SOLUTION


checks.check_best_scale(best_scale)

# %%
factors = np.linspace(0.6, 1.1, 26)
print("layer 15, head 0  largest |x|  searched   less error")
gains = {}
for name in "kv":
    g = groups(getattr(samples[15], name)[0])
    for code in ("symmetric", "nf4", "lloyd-max"):
        c = sets[code]
        s = np.array([[best_scale(x, c, factors)] for x in g])
        before = nmse_of(g, quantized(g, absmax(g, c), c))
        after = nmse_of(g, quantized(g, s, c))
        gains[name, code] = 1 - after / before
        print(f"{name} {code:15} {before:11.4f} {after:9.4f} {gains[name, code]:12.0%}")
assert min(gains.values()) > 0.05
assert max(gains.values()) < 0.2

# %% [markdown]
# About a tenth, for 26 times the work of encoding. Offline quantizers of weights do
# this. A cache is written while the user waits, so most systems do not.
#
# ## Levels fitted to the cache
#
# The numbers of a cache are not normal. Lloyd's rounds work on any numbers, so let us
# fit sixteen levels to the keys themselves: normalize each group by its largest
# absolute value, and weight each number by the square of it, since an error is scaled
# back by it. KVQuant does this per channel, with the sensitivity of the loss as a
# weight.
#
# Levels that are fitted and tested on the same numbers flatter themselves. We fit on
# the first 256 tokens and test on the others.


# %%
def fitted_levels(x, start, rounds=100):
    """Lloyd's rounds on the groups of x, each number weighted by its scale squared."""
    g = groups(x)
    top = np.abs(g).max(axis=1, keepdims=True)
    y, w = (g / top).ravel(), np.broadcast_to(top**2, g.shape).ravel()
    levels = start
    for _ in range(rounds):
        code = nearest_code(y, levels)
        weight = np.bincount(code, w, len(levels))
        mean = np.bincount(code, w * y, len(levels)) / np.maximum(weight, 1e-30)
        levels = np.where(weight > 0, mean, levels)
    return levels


print("NMSE of tokens 256..511     nf4   fitted   less error")
fit_gain = {}
for name in "kv":
    for layer, sample in samples.items():
        x = getattr(sample, name)
        mine = fitted_levels(x[:, :256], sets["nf4"])
        test = groups(x[:, 256:])
        s = np.abs(test).max(axis=1, keepdims=True)
        errors = [nmse_of(test, quantized(test, s, c)) for c in (sets["nf4"], mine)]
        fit_gain[name, layer] = 1 - errors[1] / errors[0]
        row = (name, layer, *errors, fit_gain[name, layer])
        print("{}, layer {:2} {:20.4f} {:8.4f} {:12.0%}".format(*row))
k_gain = [fit_gain["k", n] for n in LAYERS]
assert min(k_gain) > 0

# %% [markdown]
# Fitting helps everywhere it was measured on keys, by a sixth in layer 15. It also has
# a price that no table shows: the levels belong to a model and a layer, and someone has
# to calibrate them, store them and trust them on other text.
#
# ## What attention sees
#
# NMSE counts all numbers alike. The output of attention does not. Keys by a code and
# values exact, and the reverse; $\lVert \hat{o} - o \rVert / \lVert o \rVert$:

# %%
PER_CHANNEL = Scheme(4, "channel", 64, "asymmetric")


def output_errors(sample, scheme):
    """Error of the output with the keys stored by `scheme`, and with the values."""
    o = kvq.attention(sample.q, sample.k, sample.v, causal=True)
    pairs = (store(sample.k, scheme), sample.v), (sample.k, store(sample.v, scheme))
    return [
        metrics.output_error(o, kvq.attention(sample.q, k, v, causal=True))
        for k, v in pairs
    ]


outputs = {}
print("layer 15                    bits   keys   values")
for code, scheme in {**CODES, "asymmetric, per channel": PER_CHANNEL}.items():
    outputs[code] = output_errors(samples[15], scheme)
    bits = scheme.bits_per_element(T, D)
    print(f"{code:26} {bits:5} {outputs[code][0]:6.1%} {outputs[code][1]:8.1%}")

# %% [markdown]
# Among the codes with a scale per token, the choice of levels moves the error of the
# keys by a factor of about five. The last row has plain integers. It only has its scale
# *per channel*, and it is better for keys than every table of levels. For values it is
# not: there the tables win. Choose the axis first, then the levels.

# %%
token_codes = [outputs[c][0] for c in CODES]
channel = outputs["asymmetric, per channel"][0]
print(f"keys: best of {len(CODES)} codes per token {min(token_codes):.1%}, ", end="")
print(f"integers per channel {channel:.1%}")
assert outputs["asymmetric, per channel"][1] > outputs["nf4"][1]
assert channel < min(token_codes)

# %% [markdown]
# ## What a table costs to read
#
# An integer code becomes a number by one multiplication and one addition, and a kernel
# can pull the scale out of a whole dot product: $\sum_i q_i\, s\, \text{code}_i = s
# \sum_i q_i\, \text{code}_i$. A table code must be looked up, number by number. Sixteen
# entries fit in the registers of a warp or in shared memory, but a lookup per number is
# more instructions than a multiply-add, and at long contexts instructions are what a
# 4-bit cache runs out of first. E2M1 is the exception: it is a float, and newer tensor
# cores read it directly.

# %%
factor = nmse["k"]["symmetric"][k_index] / nmse["k"]["nf4"][k_index]
print(f"keys of layer 15: symmetric {nmse['k']['symmetric'][k_index]:.4f}, ", end="")
print(f"nf4 {nmse['k']['nf4'][k_index]:.4f}: {factor:.1f} times less squared error")
assert round(factor, 1) == 2.0

# %% [markdown]
# ## Takeaway
#
# > **At 4.5 bits and a scale per token, NF4 levels store the keys of layer 15 of
# > SmolLM2-135M with half the squared error of symmetric integers (groups of 32, 512
# > tokens). Lloyd–Max levels, optimal for normal numbers, do twice as badly as the
# > integers, because their scale, the root mean square, leaves the outlier channels
# > outside.**
#
# Levels are worth a factor of two here, the scale rule another, the direction of the
# group more than either.
#
# ## One more exercise
#
# **Exercise 4.** A power of two as a scale takes 8 bits instead of 16. Which one? The
# Microscaling standard takes the exponent of the largest number minus that of the
# largest level:
#
# $$s = 2^{\left\lfloor \log_2 \max|x| \right\rfloor
# - \left\lfloor \log_2 c_{n-1} \right\rfloor} .$$
#
# For E2M1 the second exponent is $\lfloor \log_2 6 \rfloor = 2$. Write it.


# %%
def shared_scale(x, largest_level):
    """The power of two that the numbers x (G,) share."""
    # BEGIN SOLUTION (2 lines)
    exponent = np.floor(np.log2(np.abs(x).max())) - np.floor(np.log2(largest_level))
    return 2.0**exponent
    # END SOLUTION


checks.check_shared_scale(shared_scale)

# %% [markdown]
# The largest number then lies between 4 and 8 scales, and what is beyond 6 saturates.
# **Predict.** Twice that scale never saturates, but has steps twice as long. Better or
# worse?

# %%
c = sets["e2m1"] * 6
g = groups(samples[15].k)
shared = np.array([[shared_scale(x, 6)] for x in g])
for name, s in (
    ("16 bits", absmax(g, c)),
    ("shared", shared),
    ("twice that", 2 * shared),
    ("never beyond 6", np.where(absmax(g, c) > shared, 2 * shared, shared)),
):
    print(f"{name:15} NMSE {nmse_of(g, quantized(g, s, c)):.4f}")

# %% [markdown]
# ## Further reading
#
# - Lloyd, *Least Squares Quantization in PCM*, and Max, *Quantizing for Minimum
#   Distortion*: the two conditions.
# - Dettmers et al., *QLoRA*, 2023, arXiv 2305.14314: NF4.
# - Hooper et al., *KVQuant*, 2024, arXiv 2401.18079: levels fitted per channel, by
#   sensitivity.
# - Open Compute Project, *Microscaling Formats (MX)*, version 1.0, 2023: E2M1 and its
#   power-of-two scales.
# - llama.cpp, `ggml-common.h`: the table of iq4_nl.
