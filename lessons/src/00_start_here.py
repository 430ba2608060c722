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
# # Start here: the whole idea in ten minutes
#
# A language model remembers what it has read as two vectors per token, a key and a
# value, in each of its layers. This memory is the KV cache. You will store it in
# fewer bits, by hand first and on real numbers then, and measure what that costs.
#
# **What you will do**
#
# - compute attention over the real cache of a small model, and count its bytes;
# - turn five numbers into 4-bit codes and back with one scale, and see what a single
#   large number does to its neighbours;
# - pack two codes into one byte and unpack them;
# - store the real cache in 2, 4 and 8 bits, attend over it, and draw error against
#   bytes.
#
# **What you need**: basic NumPy, and a rough idea of attention (a weighted mean of
# value vectors, with weights from a softmax). No GPU, no network.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import checks, metrics, plots
from kvq.samples import real_kv

# %% [markdown]
# ## What a KV cache is
#
# To write its next token, a model compares one query vector $q$ with the key $k_t$ of
# every earlier token $t$. The scores become weights, and the weights mix the values:
#
# $$S_t = \frac{q \cdot k_t}{\sqrt{D}}, \qquad
# p_t = \frac{e^{S_t}}{\sum_j e^{S_j}}, \qquad
# o = \sum_t p_t\, v_t .$$
#
# The keys and values of earlier tokens never change, so they are computed once and
# kept. Here are those of one layer of a real model, SmolLM2-135M, after it has read
# 512 tokens of Jane Austen's *Persuasion*. The shape is (KV heads, tokens, head
# dimension); $D$ is the last one.

# %%
sample = real_kv(layer=15)
K, V = sample.k, sample.v
print("keys", K.shape, K.dtype, " values", V.shape, V.dtype)


def attend(q, K, V):
    """o = sum_t p_t v_t for one query q (D,), keys K and values V (T, D)."""
    S = K @ q / np.sqrt(len(q))
    p = np.exp(S - S.max())
    p = p / p.sum()
    return p @ V


q = sample.q[0, -1].astype(np.float64)  # query head 0, newest token
o = attend(q, K[0].astype(np.float64), V[0].astype(np.float64))
assert np.allclose(o, kvq.attention(sample.q, K, V, causal=True)[0, -1])
print("attention output of one head:", o[:4].round(4), "...")

# %% [markdown]
# **Predict.** Each number is a 16-bit float. How many bytes do the keys and values of
# this one layer take? Write your number down, then run the next cell.

# %%
H_kv, T, D = K.shape
layer_bytes = 2 * H_kv * T * D * 2  # keys and values, two bytes each
assert layer_bytes == K.nbytes + V.nbytes
print(f"2 x {H_kv} x {T} x {D} x 2 = {layer_bytes:,} bytes")
print(f"30 layers: {30 * layer_bytes:,} bytes for {T} tokens of one reader")

# %% [markdown]
# A key and a value for every token, head and layer: the cache grows with every token
# and every reader, while the weights of the model stay as large as they are. Three of
# the factors count numbers. This course is about the last one: bytes per number.
#
# ## Four bits, by hand
#
# Four bits can name $2^4 = 16$ things. We let them name the integers $-7 \ldots 7$ and
# store one real number, the scale $s$, which says how large a step is:
#
# $$Q = 2^{b-1} - 1, \qquad s = \frac{\max_i |x_i|}{Q}, \qquad
# \text{code}_i = \operatorname{round}\!\left(\frac{x_i}{s}\right), \qquad
# \hat{x}_i = s \cdot \text{code}_i .$$
#
# Dividing by the largest $|x|$ makes sure that every code lies between $-Q$ and $Q$.
# `np.rint` rounds to the nearest integer, and halfway cases to the even one.


# %%
def quantize(x, b):
    """Integer codes and the scale of one group of numbers x."""
    Q = 2 ** (b - 1) - 1
    s = np.abs(x).max() / Q
    code = np.rint(x / s).astype(int)
    return code, s


def dequantize(code, s):
    return s * code


# %% [markdown]
# Five numbers share one scale: four small ones and a large one.
#
# **Predict.** With $b = 4$, which of the five come back as something other than zero?

# %%
x = np.array([0.03, -0.07, 0.12, 0.09, 6.4])
code, s = quantize(x, b=4)
x_hat = dequantize(code, s)
print(f"scale s = {s:.4f}")
for row in zip(x, code, x_hat, strict=True):
    print("x = {:5.2f}   code = {:2d}   x_hat = {:6.4f}".format(*row))
assert code.tolist() == [0, 0, 0, 0, 7]

# %% [markdown]
# The large number sets the step. The small ones are less than half a step away from
# zero, so zero is what they become. Now give the small numbers a scale of their own,
# and the large one another.

# %%
for group in (x[:4], x[4:]):
    code, s = quantize(group, b=4)
    print(f"s = {s:.4f}  codes {code}  x_hat {dequantize(code, s).round(3)}")
small_code, small_s = quantize(x[:4], b=4)
assert np.all(small_code != 0)
assert np.all(np.abs(dequantize(small_code, small_s) - x[:4]) <= small_s / 2)

# %% [markdown]
# The four small numbers survive, each within half a step. The price is a second scale
# to store. This is the trade that all of KV-cache quantization is about: **smaller
# groups mean smaller steps and more scales.**
#
# ## Two codes in one byte
#
# A computer addresses bytes, and a byte has eight bits. So two 4-bit codes go into one
# byte. Codes are stored without a sign: we add $2^{b-1} = 8$ first. The first code
# takes the low half of the byte, the second one the high half:
#
# $$\text{byte} = \text{lo} + 16\,\text{hi} .$$


# %%
def pack_pairs(code):
    """Two unsigned 4-bit codes per byte; the number of codes is even."""
    lo, hi = code[0::2], code[1::2]
    return (lo | hi << 4).astype(np.uint8)


stored = (np.append(small_code, [0, 7]) + 8).astype(np.uint8)
packed = pack_pairs(stored)
print("codes + 8:", stored, " bytes:", [f"{byte:02x}" for byte in packed])
assert np.array_equal(packed, kvq.pack(stored, bits=4))

# %% [markdown]
# Each byte, written in base 16, shows its two codes as two digits, high half first.
#
# ## The same on the real cache
#
# `kvq.quantize` does all of this: scales, codes, bytes. A `Scheme` says how: 4 bits,
# and one scale for every 64 consecutive numbers of a token. Scales are 16-bit floats.

# %%
scheme = kvq.Scheme(bits=4, per="token", group=64)
stored_k = kvq.quantize(K, scheme)
stored_v = kvq.quantize(V, scheme)
stored_bytes = stored_k.nbytes + stored_v.nbytes
ratio = layer_bytes / stored_bytes
print("codes", stored_k.codes.shape, stored_k.codes.dtype)
print("scales", stored_k.scale.shape, stored_k.scale.dtype)
print(f"{layer_bytes:,} -> {stored_bytes:,} bytes, {ratio:.2f}x fewer")
print(f"bits per number, scales counted: {stored_k.bits_per_element}")

# %% [markdown]
# Attention reads the numbers back, $\hat{x} = s \cdot \text{code}$, and goes on as
# before. What counts is how far the output moves. We measure it relative to the
# output's own length, over all 9 query heads and the newest 64 tokens:
#
# $$\text{error} = \frac{\lVert \hat{o} - o \rVert}{\lVert o \rVert} .$$
#
# **Predict.** Four bits per number, a scale per 64 of them, a real layer: is the error
# nearer to 0.1 %, 1 %, 5 % or 25 %?

# %%
exact = kvq.attention(sample.q, K, V, causal=True)
from_codes = kvq.attention(
    sample.q, stored_k.dequantize(), stored_v.dequantize(), causal=True
)
print(f"output error: {metrics.output_error(exact, from_codes):.1%}")

# %% [markdown]
# That is a lot. Something in the real numbers does to their neighbours
# what 6.4 did to the other four. Is it in the keys or in the values? Quantize one of
# them at a time.

# %%
K_hat, V_hat = stored_k.dequantize(), stored_v.dequantize()
for name, k, v in (("keys only", K_hat, V), ("values only", K, V_hat)):
    out = kvq.attention(sample.q, k, v, causal=True)
    print(f"{name:12} {metrics.output_error(exact, out):6.1%}")
top = np.abs(K).max(axis=(0, 1)).argsort()[::-1][:2]
largest = np.abs(K[..., top]).max()
print(f"channels {top} of the keys reach {largest:.0f}; ", end="")
print(f"the median |k| is {np.median(np.abs(K)):.1f}")

# %% [markdown]
# It is the keys. A few channels of theirs are large at every token, and a scale per
# token always covers one of them. So let each *channel* have its own scales, one per
# 32 consecutive tokens: then a large channel spoils nobody but itself.
#
# ## Error against bytes
#
# A `KVCache` stores keys and values by a `Policy`, a scheme for each, and attends over
# them. We store the same layer with 2, 3, 4 and 8 bits, twice: with key scales per
# token and with key scales per channel. Groups have 32 numbers, and each one stores
# its smallest number beside its scale (`"asymmetric"`), so that codes need not be
# centred on zero. Both ways cost the same bytes.


# %%
def measure(key, value):
    """Bits per number and relative output error of this layer, stored so."""
    cache = kvq.KVCache(kvq.Policy(key, value))
    cache.append(K, V)
    bits = 8 * cache.nbytes / (K.size + V.size)
    return bits, metrics.output_error(exact, cache.attend(sample.q))


def per_token(b):
    return kvq.Scheme(b, "token", 32, "asymmetric")


def per_channel(b):
    return kvq.Scheme(b, "channel", 32, "asymmetric")


worked = measure(scheme, scheme)
by_token = {b: measure(per_token(b), per_token(b)) for b in (2, 3, 4, 8)}
by_channel = {b: measure(per_channel(b), per_token(b)) for b in (2, 3, 4, 8)}

print("codes of   bits per number   keys per token   keys per channel")
for b, (bits, error) in by_token.items():
    assert bits == by_channel[b][0]
    print(f"{b} bits     {bits:15.2f} {error:16.1%} {by_channel[b][1]:18.1%}")

# %%
plt.style.use(plots.STYLE)
fig, ax = plt.subplots()
for per, points, dash in (("token", by_token, "-"), ("channel", by_channel, "--")):
    bits, error = zip(*points.values(), strict=True)
    look = {"color": plots.COLORS[per], "marker": plots.MARKERS[per], "ls": dash}
    ax.plot(bits, error, **look, label=f"key scales per {per}")
ax.plot(*worked, "*", ms=12, color="black", label="4 bits, one scale per 64")
ax.set(
    xlabel=plots.BITS_PER_ELEMENT,
    ylabel=plots.OUTPUT_ERROR,
    title="One layer of SmolLM2-135M, 512 tokens",
    yscale="log",
)
ax.legend()
plt.show()

# %% [markdown]
# Read the picture twice. From right to left: fewer bits, more error. From top to
# bottom, at the same bits: *where* the scales are matters as much as how many bits
# there are.
#
# ## Takeaway

# %%
two_token, two_channel = by_token[2][1], by_channel[2][1]
print(f"4 bits, one scale per 64: {ratio:.2f}x fewer bytes, error {worked[1]:.0%}")
print(
    f"2 bits, scale and smallest number per 32: {16 / by_token[2][0]:.2f}x fewer",
    end="",
)
print(f", error {two_token:.0%} per token, {two_channel:.0%} per channel")
assert round(ratio, 2) == 3.76
assert np.allclose([worked[1], two_token, two_channel], [0.26, 0.84, 0.40], atol=0.01)

# %% [markdown]
# > **Four bits and one 16-bit scale per 64 numbers store a 16-bit cache in 3.76 times
# > fewer bytes, and move the attention output of one real layer (SmolLM2-135M, 512
# > tokens) by 26 %. At equal bytes, where the scales are counts as much as bits: with
# > 2-bit codes the error is 84 % with key scales per token and 40 % with key scales per
# > channel.**
#
# ## Exercises
#
# Each ends in a check that says what is wrong, if something is.
#
# **1. Unpack.** Undo `pack_pairs`: from bytes back to codes, in their order.


# %%
def unpack_pairs(packed):
    """Unsigned 4-bit codes (2n,) of the bytes packed (n,)."""
    # BEGIN SOLUTION (4 lines)
    code = np.empty(2 * len(packed), np.uint8)
    code[0::2] = packed & 15
    code[1::2] = packed >> 4
    return code
    # END SOLUTION


checks.check_unpack_pairs(unpack_pairs)

# %% [markdown]
# **2. The price of a scale.** $G$ numbers of $b$ bits share one 16-bit scale. How many
# bits does a number take, with its share of the scale?


# %%
def bits_per_number(b, G):
    # BEGIN SOLUTION (1 line)
    return b + 16 / G
    # END SOLUTION


checks.check_bits_per_number(bits_per_number)

# %% [markdown]
# ## Where to go next
#
# | lesson | question |
# |---|---|
# | Bytes in the cache | How much memory does a model's cache need, and what fits? |
# | The uniform quantizer | How large is the error of $b$ bits, and why? |
# | Groups and scales | How many numbers should share a scale? |
# | Outliers | Which channels are large, and how do they hurt? |
# | Keys versus values | Why does the same error cost more in keys? |
# | The streaming cache | How does a cache grow token by token, and what hides in it? |
#
# The package `kvq` is short enough to read. In this order: `scheme.py` (the
# vocabulary), `quantizer.py` (the equations), `packing.py` (bits and bytes),
# `tensor.py` (what is stored of one tensor), `attention.py`, `cache.py` (a cache that
# grows), then `metrics.py` and `bounds.py` (error, measured and predicted), `memory.py`
# (bytes of a whole model) and `study.py` (the sweeps behind the figures).
#
# ## Further reading
#
# - Vaswani et al., *Attention Is All You Need*, 2017, arXiv 1706.03762.
# - Liu et al., *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*, 2024,
#   arXiv 2402.02750: key scales per channel, value scales per token.
# - Hooper et al., *KVQuant*, 2024, arXiv 2401.18079: the same observation, and more.
# - Ben Allal et al., *SmolLM2*, 2025, arXiv 2502.02737: the model whose cache this is.
