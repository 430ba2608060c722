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
# # Formats in the wild
#
# Two systems that both say "4 bits" may agree on nothing else: where the scale is, what
# the zero means, which half of a byte comes first. You will store the same keys and
# values in the bytes of llama.cpp, vLLM, TensorRT-LLM and Hugging Face Transformers,
# measure what each format loses, and see what happens when bytes are read in the wrong
# way.
#
# **What you will do**
#
# - read a block of llama.cpp by hand, and a scale of vLLM that hides a zero in itself;
# - see six orders of half-bytes, and what one wrong order does;
# - measure every format on the same numbers;
# - correct a popular table of who supports what;
# - watch a frozen scale turn real values into NaN;
# - go from one system's format to the next, and count what each step adds.
#
# **What you need**: the lessons *The uniform quantizer* and *Groups and scales*. No
# system has to be installed: `kvq.formats` reads and writes their bytes. The command
# `kvq formats --json` says what each format was compared with.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import checks, metrics, plots
from kvq.formats import (
    all_formats,
    convert,
    find_format,
    ggml,
    huggingface,
    llama_state,
    research,
    tensorrt_llm,
)
from kvq.formats.base import Format
from kvq.formats.grouped import pack_rows
from kvq.formats.minifloat import calibrated_scale
from kvq.formats.vllm_rotated import octave_pack
from kvq.samples import real_kv

plt.style.use(plots.STYLE)
sample = real_kv(layer=15)
K, V = sample.k.astype(np.float32), sample.v.astype(np.float32)
H_kv, T, D = K.shape
print(f"{sample.name}: keys and values ({H_kv}, {T}, {D})")

# %% [markdown]
# ## One key, eight layouts
#
# Here is one key, 64 numbers, as eight formats store it.
#
# **Predict.** How many bytes does each take? "8 bits" would be 64, "4 bits" 32.


# %%
def encode_keys(name, k):
    """The bytes of k alone (..., T, D). vLLM stores K and V of a token together."""
    kind = find_format(name)
    if isinstance(kind, Format):
        return kind.encode(k)
    D = k.shape[-1]
    codes, scales = kind.key.encode(k.reshape(-1, D))
    return np.concatenate([codes, scales], axis=-1).tobytes()


key = K[:1, 100:101]
for name in ("ggml:q8_0", "ggml:q4_0", "ggml:q4_1", "vllm:int8_per_token_head",
             "vllm:int4_per_token_head", "vllm:turboquant_4bit_nc",
             "tensorrt_llm:fp8", "tensorrt_llm:nvfp4"):  # fmt: skip
    data = encode_keys(name, key)
    print(f"{name:25}{len(data):3} bytes  {data[:18].hex(' ')} ...")

# %% [markdown]
# No two begin alike. The next figure shows what the bytes are. In llama.cpp a scale
# stands before each block of 32 codes. vLLM puts it behind the codes of a token and
# head. TensorRT-LLM's FP8 has one scale for a whole layer and keeps it outside the
# cache, and so has its NVFP4, beside the scales of 16 numbers in a pool of their own.
# quanto keeps three arrays.

# %%
LAYOUTS = {  # what the bytes of one key are, in order
    "ggml:q8_0": 2 * [("scale", 2), ("codes", 32)],
    "ggml:q4_0": 2 * [("scale", 2), ("codes", 16)],
    "ggml:q4_1": 2 * [("scale", 2), ("zero", 2), ("codes", 16)],
    "ggml:q5_1": 2 * [("scale", 2), ("zero", 2), ("fifth bits", 4), ("codes", 16)],
    "vllm:int8_per_token_head": [("codes", 64), ("scale", 4)],
    "vllm:int4_per_token_head": [("codes", 32), ("scale and zero", 4)],
    "vllm:turboquant_4bit_nc": [("codes", 32), ("scale", 2)],
    "tensorrt_llm:fp8": [("codes", 64)],
    "tensorrt_llm:nvfp4": [("codes", 32), ("scale", 4)],
    "hf:quanto-int4-axis0": [("codes", 32), ("scale", 2), ("zero", 2)],
}
LOOKS = {"codes": ("white", ""), "scale": ("0.35", ""), "zero": ("0.7", "///"),
         "fifth bits": ("0.9", "..."), "scale and zero": ("0.5", "///")}  # fmt: skip
two = K[:1, 100:102]  # quanto shares bytes between two rows
fig, ax = plt.subplots(figsize=(10, 4.4))
for y, (name, parts) in enumerate(LAYOUTS.items()):
    left = 0
    for role, width in parts:
        color, hatch = LOOKS[role]
        ax.barh(
            y, width, left=left, color=color, hatch=hatch, edgecolor="black", lw=0.8
        )
        left += width
    assert 2 * left == len(encode_keys(name, two))
    ax.text(left + 0.7, y, f"{left} bytes, {left * 8 / D:g} bits", va="center", size=9)
for role, (color, hatch) in LOOKS.items():
    ax.bar(0, 0, color=color, hatch=hatch, edgecolor="black", label=role)
ax.set_yticks(range(len(LAYOUTS)), LAYOUTS)
ax.invert_yaxis()
ax.grid(False)
ax.set(xlim=(0, 105), xlabel="byte", title="One key of 64 numbers")
ax.legend(loc="center right")
plt.show()

# %% [markdown]
# ## Open a block
#
# `q4_0` is the simplest 4-bit type of llama.cpp. Its 18 bytes hold 32 numbers:
#
# - a scale $d$, a little-endian 16-bit float;
# - 16 bytes of two codes each: code $j$ in the low half of byte $j$, code $j + 16$ in
#   its high half.
#
# $$\hat{x}_j = d \, (\text{code}_j - 8), \qquad
# d = \frac{m}{-8}, \quad m = \text{the } x \text{ of largest } |x| .$$
#
# The minus sign makes the extreme number land on code 0, which is $-8$: the codes
# $-8 \ldots 7$ are used up to their end. The symmetric quantizer of the earlier lessons
# divides by 7 and never uses $-8$.
#
# **Exercise 1.** Read a block. `np.frombuffer(block[:2], "<f2")` gives the scale.


# %%
def read_q4_0(block):
    """32 numbers from the 18 bytes of a q4_0 block."""
    # BEGIN SOLUTION (4 lines)
    d = np.frombuffer(block[:2], "<f2").astype(np.float32)
    packed = np.frombuffer(block[2:], np.uint8)
    codes = np.concatenate([packed & 15, packed >> 4])
    return d * (codes.astype(np.float32) - 8)
    # END SOLUTION


checks.check_read_q4_0(read_q4_0)

# %%
block = find_format("ggml:q4_0").encode(K[0, 100, :32])
x_hat = read_q4_0(block)
largest = np.abs(K[0, 100, :32]).argmax()
print("written", K[0, 100, :6].round(2), f"largest: {K[0, 100, largest]:.3f}")
print("read   ", x_hat[:6].round(2), f"largest: {x_hat[largest]:.3f}")

# %% [markdown]
# ## Which half comes first?
#
# Two codes share a byte, and there are many ways to choose the two. To see an order,
# pack 32 codes that are all zero but one, and look where that one lands.

# %%
ORDERS = {
    "llama.cpp q4_0": lambda codes: ggml.pack_nibbles(codes[None])[0],
    "llama.cpp nvfp4": lambda codes: ggml.pack_nibbles(codes.reshape(2, 16)).ravel(),
    "vLLM int4, KIVI": lambda codes: kvq.pack(codes, 4),
    "FlexGen": lambda codes: research.FORMATS["flexgen:int4"].pack(codes[None], (32,))[
        0
    ],
    "vLLM Octave": lambda codes: octave_pack(codes[None], 4)[0],
    "HQQ (of rows)": lambda codes: pack_rows(codes[:, None], (4, 0))[:, 0],
}


def where(pack):
    """(2, 16): the number of the code in the low and in the high half of each byte."""
    order = np.zeros((2, 16), int)
    for j in range(32):
        packed = pack(np.eye(32, dtype=np.uint8)[j])
        byte = packed.argmax()
        order[int(packed[byte] == 16), byte] = j
    return order


fig, axes = plt.subplots(3, 2, figsize=(11, 4.6), sharex=True)
orders = {name: where(pack) for name, pack in ORDERS.items()}
for ax, (name, order) in zip(axes.flat, orders.items(), strict=True):
    ax.imshow(order, cmap="cividis", aspect="auto", alpha=0.5)
    for (half, byte), j in np.ndenumerate(order):
        ax.text(byte, half, j, ha="center", va="center", size=9)
    ax.set_yticks((0, 1), ("low", "high"))
    ax.set_title(name)
    ax.grid(False)
for ax in axes[-1]:
    ax.set(xlabel="byte", xticks=range(0, 16, 5))
plt.show()
assert len({order.tobytes() for order in orders.values()}) == len(orders)

# %% [markdown]
# Six orders, all different; quanto's is that of q4_0, but down the rows of a matrix.
# None of them is written in the bytes.
#
# **Predict.** A reader takes the bytes of q4_0 keys in vLLM's order. What is the mean
# and the spread of what it reads, compared with the right numbers? And the error?

# %%
kind = find_format("ggml:q4_0")
blocks = np.frombuffer(kind.encode(K), np.uint8).reshape(-1, 18)
right = kind.decode(blocks.tobytes(), K.shape)
d = blocks[:, :2].copy().view("<f2").astype(np.float32)
wrong_codes = kvq.unpack(blocks[:, 2:].copy(), 4, 32).astype(np.float32)
wrong = (d * (wrong_codes - 8)).reshape(K.shape)

o = kvq.attention(sample.q, K, V, causal=True)
for text, k in (("right order", right), ("wrong order", wrong)):
    o_hat = kvq.attention(sample.q, k, V, causal=True)
    print(f"{text}: mean {k.mean():6.3f}, spread {k.std():.3f}", end="")
    print(f", squared error {metrics.nmse(K, k):6.3f} of the signal", end="")
    print(f", attention output off by {metrics.output_error(o, o_hat):.0%}")
assert np.isclose(right.mean(), wrong.mean(), atol=1e-6)
assert np.isclose(right.std(), wrong.std(), rtol=1e-6)
assert metrics.nmse(K, wrong) > 50 * metrics.nmse(K, right)

# %% [markdown]
# Mean and spread, even the histogram, are the same: the numbers are right and in the
# wrong places. Nothing crashes, and no range check finds it. Only a comparison with
# known bytes does.
#
# **Exercise 2.** Bring the 16 code bytes of a q4_0 block into vLLM's order: byte $i$
# holds code $2i$ in its low and code $2i + 1$ in its high half.


# %%
def repack(packed):
    """(16,) uint8 in q4_0's order -> (16,) uint8 in vLLM's order."""
    # BEGIN SOLUTION (2 lines)
    codes = np.concatenate([packed & 15, packed >> 4])
    return codes[0::2] | codes[1::2] << 4
    # END SOLUTION


checks.check_repack(repack)

# %% [markdown]
# ## A zero that hides in a scale
#
# vLLM's `int4_per_token_head` rotates a key, takes $s = (\max - \min)/15$ and an
# *integer* zero $z$ from 0 to 15, and stores codes and one 32-bit word:
#
# $$\text{word} = \text{bits of } s \text{ as float32, the lowest 4 replaced by } z,
# \qquad \hat{y} = s \, (\text{code} - z) .$$
#
# Four bits at the end of a float32 change $s$ by less than two parts in a million, so
# this costs nothing. But no field says "zero".
#
# **Exercise 3.** Take a word apart. `.view(np.float32)` reads the bits of an array of
# `uint32` as floats; subtracting $z$ clears its four bits.


# %%
def open_word(word):
    """(s, z) of an array of uint32 words: float32 with its low 4 bits 0, integers."""
    # BEGIN SOLUTION (2 lines)
    z = word & 15
    return (word - z).view(np.float32), z
    # END SOLUTION


checks.check_open_word(open_word)

# %% [markdown]
# Suppose some tool copies the cache and keeps scales in bfloat16, as it may for any
# other format. The 16 low bits become zero, and $z$ with them.

# %%
side = find_format("vllm:int4_per_token_head").key
codes, scales = side.encode(K.reshape(-1, D))
words = scales.copy().view("<u4")
s, z = open_word(words)
print(f"zeros from {z.min()} to {z.max()}, mean {z.mean():.2f}")
hidden = {}
for text, changed in (
    ("as stored", words),
    ("through bfloat16", words & 0xFFFF0000),
    ("every zero 8", words - z + 8),
):
    k = side.decode(codes, changed.astype("<u4").view(np.uint8), D).reshape(K.shape)
    hidden[text] = metrics.nmse(K, k)
    change = np.abs(changed.view(np.float32) / words.view(np.float32) - 1).max()
    print(f"{text:17} scales differ by {change:.1e}", end="")
    print(f", squared error {hidden[text]:.4f} of the signal")
assert hidden["through bfloat16"] > 100 * hidden["as stored"]

# %% [markdown]
# Scales that are right to within 1 percent, and a cache that is lost.
#
# ## Scales outside the cache
#
# TensorRT-LLM's INT8 and FP8, and vLLM's `fp8`, take one scale per layer for keys and
# one for values. It comes from a calibration and is stored with the weights. If the
# checkpoint has none, it is 1.
#
# **Predict.** INT8 and FP8 with a scale of 1, and with the largest $|x|$ of the data:
# which of the two needs the calibration?

# %%
print("squared error of the signal       scale 1   calibrated")
outside = {}
for name, make, top in (
    ("int8", tensorrt_llm.int8, 127),
    ("fp8", tensorrt_llm.fp8, 448),
):
    for tensor, x in (("keys", K), ("values", V)):
        row = []
        for scale in (1.0, np.abs(x).max() / top):
            kind = make(scale)
            row.append(metrics.nmse(x, kind.decode(kind.encode(x), x.shape)))
        outside[name, tensor] = row
        print(f"tensorrt_llm:{name:5} {tensor:8} {row[0]:13.5f} {row[1]:12.5f}")
assert outside["int8", "values"][0] > 100 * outside["int8", "values"][1]
assert outside["fp8", "values"][0] < 1.1 * outside["fp8", "values"][1]
assert all(outside["int8", x][1] < outside["fp8", x][1] for x in ("keys", "values"))

# %% [markdown]
# A float brings its own exponent, so the scale of FP8 hardly matters until numbers
# exceed 448. Integers with a scale of 1 are values rounded to whole numbers. Calibrated
# INT8 beats FP8 here, on both tensors: 8 bits of steps against 3 bits of mantissa.
#
# NVFP4 has two levels of scales: an 8-bit one per 16 numbers in the cache, and a
# float32 outside. TensorRT-LLM and vLLM put the 8-bit scales of the *values* into
# another order, in which the kernel reads four tokens at once. With $S$ scales per
# token, scale $s$ of token $t$ stands at byte
#
# $$\left\lfloor \frac{t}{4} \right\rfloor 4 S + 4 s + (t \bmod 4) .$$
#
# **Exercise 4.** Write it, for integers and arrays alike.


# %%
def scale_offset(t, s, S):
    """Where scale s of token t stands. S scales per token."""
    # BEGIN SOLUTION (1 line)
    return t // 4 * 4 * S + 4 * s + t % 4
    # END SOLUTION


checks.check_scale_offset(scale_offset)

# %%
kind = tensorrt_llm.nvfp4(calibrated_scale(np.abs(V).max()), swizzled=True)
in_order = tensorrt_llm.nvfp4(kind.scale)
data = kind.encode(V)
for text, reader in (("as written", kind), ("scales taken in order", in_order)):
    v = reader.decode(data, V.shape)
    print(f"values, {text:22} squared error {metrics.nmse(V, v):.4f} of the signal")

# %% [markdown]
# ## Every format on the same numbers
#
# Now all formats, on one layer of real keys and values. "Bits" counts everything that
# is stored per number. The last column is the relative error of the attention output
# when keys and values are both stored. Formats that need a scale from outside have 1
# here, as without calibration.


# %%
def stored(name, k, v):
    """(bytes, k_hat, v_hat), or None where a format can only be read."""
    kind = find_format(name)
    if not isinstance(kind, Format):
        data = kind.encode(k, v)
        return len(data), *kind.decode(data, k.shape)
    try:
        pair = kind.encode(k), kind.encode(v)
    except ValueError:
        return None
    return sum(map(len, pair)), *(kind.decode(data, k.shape) for data in pair)


table, read_only = {}, []
for name in all_formats():
    found = stored(name, K, V)
    if found is None:
        read_only.append(name)
        continue
    size, k, v = found
    o_hat = kvq.attention(sample.q, k, v, causal=True)
    table[name] = {
        "bits": 8 * size / (2 * K.size),
        "K": metrics.nmse(K, k),
        "V": metrics.nmse(V, v),
        "output": metrics.output_error(o, o_hat),
    }
print(f"{'':28} bits   keys     values   output")
for name, r in sorted(table.items(), key=lambda item: (-item[1]["bits"], item[1]["K"])):
    print(f"{name:28} {r['bits']:5.2f}  {r['K']:.1e}  {r['V']:.1e} {r['output']:7.1%}")
print("\nto be read only:", ", ".join(read_only))

# %%
MARKS = {"ggml": "o", "vllm": "s", "tensorrt_llm": "^", "hf": "D"}
TEXTS = {"ggml": "llama.cpp", "hf": "Hugging Face", "tensorrt_llm": "TensorRT-LLM",
         "vllm": "vLLM"}  # fmt: skip
LABELS = {
    "K": ("ggml:q4_0", "ggml:q8_0", "hf:quanto-int4-axis-1",
          "hf:quanto-int2-axis0", "tensorrt_llm:int8", "vllm:turboquant_3bit_nc",
          "vllm:fp8_e4m3"),
    "V": ("ggml:q8_0", "ggml:q5_1", "hf:quanto-int2-axis0", "tensorrt_llm:int8",
          "vllm:turboquant_3bit_nc", "vllm:turboquant_k8v4", "vllm:fp8_e4m3"),
}  # fmt: skip
fig, axes = plt.subplots(1, 2, sharey=True, figsize=(13, 5.4))
for ax, tensor, x in zip(axes, "KV", (K, V), strict=True):
    for name, r in table.items():
        system, _, short = name.partition(":")
        if system in MARKS and r["bits"] < 10:
            ax.plot(r["bits"], r[tensor], MARKS[system], color=plots.COLORS[tensor],
                    mfc="white", ms=7)  # fmt: skip
        if name in LABELS[tensor]:
            short += ", scale 1" * (name == "tensorrt_llm:int8")
            ax.annotate(short, (r["bits"], r[tensor]), (6, 4), size=8,
                        textcoords="offset points")  # fmt: skip
    for per in ("token", "channel"):
        line = []
        for b in range(2, 9):
            qt = kvq.quantize(x, kvq.Scheme(b, per, 32, "asymmetric"))
            line.append((qt.bits_per_element, metrics.nmse(x, qt.dequantize())))
        ax.plot(*zip(*line, strict=True), "--", lw=1.2, color=plots.COLORS[per],
                label=f"kvq, asymmetric, G = 32, {plots.AXES[per]}")  # fmt: skip
    for system, marker in MARKS.items():
        ax.plot([], [], marker, color=plots.COLORS[tensor], mfc="white",
                label=TEXTS[system])  # fmt: skip
    ax.set(xlabel="stored bits per number", yscale="log", title=plots.NAMES[tensor])
    ax.legend(loc="lower left")
axes[0].set_ylabel(plots.NMSE)
plt.show()

# %% [markdown]
# The bits order the formats only roughly. These are the formats of the four systems
# that store 4.5 bits per number here. All are sold as "4-bit":

# %%
at_4_5 = {
    name: r["K"]
    for name, r in table.items()
    if r["bits"] == 4.5 and name.partition(":")[0] in MARKS
}
for name, error in sorted(at_4_5.items(), key=lambda item: item[1]):
    print(f"{name:28} keys: squared error {error:.4f}")
spread = max(at_4_5.values()) / min(at_4_5.values())
print(f"worst / best: {spread:.1f}")

# %% [markdown]
# What separates them is not the arithmetic but the *group*. quanto's axis $-1$ groups
# 64 tokens of one channel, so the outlier channels of the keys have scales of their
# own. HQQ's axis 0 takes every $N/64$-th number of the whole tensor. Here that happens
# to be one channel as well, of all heads, because 64 channels divide the stride; with
# another shape it is not. The formats in the middle rotate, have groups of 16, or
# choose their levels better. Those at the end share a scale between 32 or 64 channels
# as they come.
#
# The docstring of Hugging Face's cache calls its groups "per channel". Its default,
# axis 0 with quanto, is 64 neighbouring channels of one token:

# %%
kind = find_format("hf:quanto-int4-axis0")
probe = np.zeros((1, 2, 64), np.float32)
probe[0, 0] = np.linspace(-1, 1, 64)  # one token with numbers, one with zeros
size = kind.packed_bytes(probe.shape)
scales = np.frombuffer(kind.encode(probe)[size:], "<f2")[:2]
print(f"scales of axis 0: {scales}: one per token")
assert scales[0] > 0
assert scales[1] == 0

# %% [markdown]
# ## Methods of papers
#
# Not everything has bytes in a system. `kvq.formats.research` holds methods of papers:
# some are settings of a scheme, some short classes. The same layer again, all tokens
# quantized, without the windows that some of the papers add.

# %%
rows = research.measure(sample)
print(f"{'':24} bits K   bits V   keys      values    output")
for r in sorted(rows, key=lambda r: r["bits_key"] + r["bits_value"]):
    print(f"{r['method']:24} {r['bits_key']:6.2f} {r['bits_value']:8.2f}", end="")
    print(f"   {r['nmse_key']:.1e} {r['nmse_value']:9.1e} {r['output_error']:8.1%}")
papers = {r["method"]: r for r in rows}
assert papers["kvquant-nuq4"]["nmse_key"] < at_4_5["ggml:q4_0"]
assert (
    papers["turboquant-4 product"]["nmse_key"] > papers["turboquant-4 mse"]["nmse_key"]
)

# %% [markdown]
# Two results go against expectation and stay. QJL and TurboQuant's product form
# estimate scores *without bias*, and pay with variance: at equal bits their squared
# error is much larger than that of the plain forms, and so is the error of the output.
# vLLM left that part out of its TurboQuant. And a low-rank part with outliers (GEAR)
# costs more bits here than it saves error.
#
# ## llama.cpp rotates
#
# Since spring 2026, llama.cpp multiplies keys, queries and values by a Hadamard matrix
# when the cache type is quantized and the head dimension is a multiple of 64, unless
# `LLAMA_ATTN_ROT_DISABLE=1` is set. (The lesson *Outliers* shows what a rotation does.)
#
# **Predict.** By what factor does it lower the squared error of q4_0 keys?

# %%
for name in ("q4_0", "q8_0"):
    kind = find_format(f"ggml:{name}")
    for tensor, x in (("keys", K), ("values", V)):
        turned = ggml.rotate(x, 64)
        e = [metrics.nmse(y, kind.decode(kind.encode(y), y.shape)) for y in (x, turned)]
        print(f"{name} {tensor:7} plain {e[0]:.2e}, rotated {e[1]:.2e}", end="")
        print(f": {e[0] / e[1]:.1f} times less")
        if (name, tensor) == ("q4_0", "keys"):
            assert e[0] > 2 * e[1]

# %% [markdown]
# A file that llama.cpp saves does not say whether its cache was rotated. `llama_state`
# reads such files; whether to turn the numbers back is for the reader to know:

# %%
stream = llama_state.Stream(positions=list(range(T)), seq_ids=[(0,)] * T)
stream.keys = [llama_state.encode_rows("q4_0", ggml.rotate(K, 64))]
stream.values = [llama_state.encode_rows("q4_0", ggml.rotate(V, 64))]
file = llama_state.write(llama_state.State(list(range(T)), [stream]))
state = llama_state.read(file)
k = llama_state.decode_rows(state.streams[0].keys[0], H_kv)
print(f"file of {len(file):,} bytes, {len(state.tokens)} tokens, magic {file[:4]}")
for text, found in (("as read", k), ("turned back", ggml.rotate(k, 64))):
    print(f"{text:12} squared error {metrics.nmse(K, found):.4f} of the signal")

# %% [markdown]
# ## Who supports what
#
# A list met often names four systems. Here is what each of them really offers, in the
# versions whose bytes this project reproduces.
#
# - **vLLM**, often said: INT8. Version 0.33.0 has no plain `int8`. It has
#   `int8_per_token_head` with a float32 scale per token and head, `fp8`, and others
#   down to 3 bits. (`vllm/config/cache.py`, `CacheDType`)
# - **TensorRT-LLM**, often said: INT4 and INT8. It has FP8, INT8 and NVFP4, and no INT4
#   cache. INT8 is reached through engines; the PyTorch flow documents fp8 and nvfp4.
#   (`tensorrt_llm/quantization/mode.py`, `KV_CACHE_QUANT_ALGO_LIST`)
# - **llama.cpp**, often said: various formats. They are f32, f16, bf16, q8_0, q5_1,
#   q5_0, q4_1, q4_0 and iq4_nl, for keys and values apart; its mxfp4 and nvfp4 are
#   types of weights. Quantized values need flash attention. (`common/arg.cpp`,
#   `kv_cache_types`)
# - **Transformers**, often said: through BetterTransformer. It is `QuantizedCache`,
#   with quanto, HQQ or fp8 behind it. BetterTransformer called faster attention kernels
#   and stored nothing differently. (`transformers/cache_utils.py`; the documentation of
#   Optimum)
#
# The parts around a format differ as well. vLLM and TensorRT-LLM share quantized blocks
# between requests and keep tenants apart by a salt in the block's hash; llama.cpp can
# put one cell into several sequences, without a salt. Hugging Face keeps a window of up
# to 127 tokens in full precision and quantizes the whole history again whenever it is
# full (*The streaming cache* shows what that can do); vLLM and llama.cpp keep none. And
# none of the first three has a scale per channel for keys. Here is everything this
# project reads or writes, with versions, from the code:

# %%
by_system = {}
for name, kind in all_formats().items():
    system, _, short = name.partition(":")
    by_system.setdefault((system, kind.version), []).append(short)
for (system, version), shorts in by_system.items():
    print(f"{system} ({version})\n   {', '.join(shorts)}")
assert "vllm:int8" not in all_formats()
assert not any("int4" in n for n in all_formats() if n.startswith("tensorrt_llm:"))

# %% [markdown]
# ## A frozen scale
#
# The fp8 backend of Hugging Face's cache takes its scale from the first update, the
# prompt, and keeps it: $s = \max|x| / 448$. Later numbers are divided by $s$ and cast
# without a limit. The cast of PyTorch turns what is beyond 464 into NaN.
#
# **Predict.** How much larger than the prompt's largest number may a later one be?

# %%
kind = huggingface.FORMATS["hf:fp8"]
late, prompt = real_kv(layer=29), 64
x = late.v.astype(np.float32)
first, later = x[:, :prompt], x[:, prompt:]
data = kind.encode(first)
scale = np.frombuffer(data[:4], "<f4")
print(f"largest |x|: prompt {np.abs(first).max():.2f}, later {np.abs(later).max():.2f}")
exact = kvq.attention(late.q, late.k, late.v, causal=True)
for clamp in (False, True):
    reader = replace(kind, clamp=clamp)
    new = reader.decode(data[:4] + reader.encode_next(later, scale), later.shape)
    v = np.concatenate([kind.decode(data, first.shape), new], axis=1)
    lost = np.isnan(v)
    o_hat = kvq.attention(late.q, late.k, v, causal=True)
    text = "with a limit" if clamp else "as it is"
    print(f"{text:12} {lost.sum():3} of {v.size:,} values are NaN", end="")
    print(f", and {np.isnan(o_hat).mean():.0%} of the attention output", end="")
    if clamp:
        print(f"; error of the output {metrics.output_error(exact, o_hat):.1%}")
    else:
        spoiled = lost.sum(), np.isnan(o_hat).mean()
        print()
assert spoiled[0] > 50
assert spoiled[1] > 0.1

# %% [markdown]
# The limit is $464/448 = 1.036$: not even 4 percent. These are real values of a small
# model, of one text, with a prompt of 64 tokens. One NaN is enough to spoil its channel
# for every later query, since weight times NaN is NaN, however small the weight. With a
# limit (`clamp`) the same numbers are merely too small.
#
# ## From one system to another
#
# Bytes of one system can become those of another: decode, encode. Each step rounds what
# the step before has rounded. Errors of different steps have little to do with each
# other, so their squares add:
#
# $$\frac{\lVert \hat{x}_n - x \rVert^2}{\lVert x \rVert^2} \approx \sum_i
# \frac{\lVert \hat{x}_i - \hat{x}_{i-1} \rVert^2}{\lVert \hat{x}_{i-1} \rVert^2} .$$
#
# **Predict.** 8 bits, 8 bits, 4 bits, 4 bits: which steps matter?


# %%
names = ("ggml:q8_0", "vllm:fp8_per_token_head", "tensorrt_llm:nvfp4", "ggml:q4_0")
rows, _ = convert.convert(K, V, names)
added = 0
print(f"{'keys':26} this step   so far   sum of steps")
for r in rows:
    added += r["k_step"]
    print(f"{r['format']:26} {r['k_step']:9.5f} {r['k_total']:8.5f} {added:10.5f}")
    assert np.isclose(r["k_total"], added, rtol=0.02)

# %% [markdown]
# The order does not help: a fine format after a coarse one keeps the coarse one's
# error. `kvq convert ggml:q8_0 ggml:q4_0` prints such a table for your own data.
#
# Going back and forth is different. The second time, numbers are already levels of the
# other format, and errors are no longer independent:

# %%
fig, ax = plt.subplots(figsize=(8, 4.2))
trips = {
    "q8_0 and q4_0": ("ggml:q8_0", "ggml:q4_0"),
    "q4_1 and nvfp4": ("ggml:q4_1", "tensorrt_llm:nvfp4"),
    "int4_per_token_head and q4_0": ("vllm:int4_per_token_head", "ggml:q4_0"),
}
for (text, pair), look in zip(trips.items(), ("o-", "^-.", "s--"), strict=True):
    error = plots.column(convert.convert(K, V, 6 * pair)[0], "k_total")
    ax.plot(range(1, 13), error, look, color=plots.COLORS["K"], mfc="white")
    ax.text(12.3, error[-1], text, va="center", size=9)
    print(f"{text:29} after 2 steps {error[1]:.4f}, after 12 {error[-1]:.4f}")
ax.set(xlabel="conversions", ylabel=f"{plots.NMSE}, keys", ylim=(0, 0.042))
ax.set_xlim(0.5, 18)
ax.set_xticks(range(2, 13, 2))
plt.show()

# %% [markdown]
# Levels of q4_0 survive q8_0, which is finer and has the same groups. Two 4-bit formats
# with different groups move each other's levels, until most numbers have found a place
# that is a level of both; a rotation in one of them keeps mixing, and the error keeps
# growing. A cache should be quantized once.
#
# ## What "the same bytes" can mean
#
# A format's decoder is exact everywhere. An encoder may differ by a code where a value
# lies between two levels, because processors and compilers divide and round in their
# own ways. So each format says what its bytes are equal to:

# %%
contracts = {}
for name, kind in all_formats().items():
    contracts.setdefault(kind.facts.exact, []).append(name)
for contract, members in contracts.items():
    print(f"{contract}\n   {', '.join(members[:3])}{' ...' * (len(members) > 3)}")

# %% [markdown]
# ## Takeaway

# %%
best, worst = (f(at_4_5, key=at_4_5.get) for f in (min, max))
print(f"at 4.5 bits: {best} {at_4_5[best]:.4f}, {worst} {at_4_5[worst]:.4f}")
print(f"at 4.5 bits, keys: {spread:.1f} times between best and worst format")
print(
    f"wrong half first: error {metrics.nmse(K, wrong):.1f} of the signal, same spread"
)
assert round(spread, 1) == 7.7
assert len(at_4_5) >= 9

# %% [markdown]
# > **A number of bits is not a format. At the same 4.5 stored bits per number, the
# > squared error of real keys (one layer of SmolLM2-135M, 512 tokens) differs 7.7 times
# > between the formats of four systems, and the bytes are worth nothing without the
# > order of the halves, the place of the scale, the zero, the rotation and the version.
# > None of these five is written in the bytes.**
#
# ## Further reading
#
# The formats are those of fixed versions, which `kvq formats --json` lists with files.
# They change: look again before you rely on one.
#
# - llama.cpp: `ggml/src/ggml-quants.c`, `ggml-common.h`, `src/llama-kv-cache.cpp`; pull
#   request 21038, the rotation.
# - vLLM 0.33.0: `vllm/config/cache.py`, `vllm/v1/attention/ops/`.
# - TensorRT-LLM: `tensorrt_llm/quantization/mode.py`, `cpp/tensorrt_llm/kernels/`,
#   `docs/source/features/kvcache.md`.
# - Transformers 5.24.0: `transformers/cache_utils.py`; optimum-quanto 0.2.7; HQQ 0.2.8.
# - Optimum, *BetterTransformer*: `huggingface.co/docs/optimum/bettertransformer`.
# - Zandieh et al., *TurboQuant*, 2025, arXiv 2504.19874: vLLM's type of that name.
# - *OCP Microscaling Formats (MX) Specification* v1.0, 2023.
