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
# # Bytes in the cache
#
# The cache of a model grows with every token and every user. You will compute its size
# to the byte, see what fewer bits save once scales are counted, and find out which
# graphics cards hold a model together with its users.
#
# **What you will do**
#
# - turn one formula into code and check it against the bytes of a real cache;
# - count what codes, scales, windows and padding take;
# - test a popular claim about four graphics cards, with the weights counted;
# - plan: how many tokens, or users, fit into the same memory?
#
# **What you need**: the lesson *Start here*. A *KiB* is 1,024 bytes, a *MiB* 1,024 KiB
# and a *GiB* 1,024 MiB; a *kB* is 1,000 bytes and a *GB* 1,000,000,000.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import checks, memory, plots
from kvq.hardware import GIB, MIB, device
from kvq.samples import real_kv

plt.style.use(plots.STYLE)
KIB = 1024

# %% [markdown]
# ## The formula
#
# Each layer keeps a key and a value for each token and each KV head. With $L$ layers,
# $T$ tokens, $H_{kv}$ KV heads, head dimension $D$ and $b$ bytes per number,
#
# $$M = 2 \, L \, T \, H_{kv} \, D \, b .$$
#
# The 2 is for keys and values.
#
# **Predict.** A model with 32 layers, 8 KV heads and head dimension 128 has read 8,192
# tokens, and stores 16-bit numbers. Is its cache nearer to 1 MiB, 100 MiB or 1 GiB?


# %%
def formula(L, T, H_kv, D, b):
    """M = 2 L T H_kv D b, in bytes."""
    return 2 * L * T * H_kv * D * b


M = formula(L=32, T=8192, H_kv=8, D=128, b=2)
print(f"{M:,} bytes = {M / GIB:g} GiB")
assert M == 1_073_741_824 == GIB

# %% [markdown]
# That is one user. What do fewer bits save? Only $b$ changes, so the ratio is that of
# the bits:

# %%
for bits in (16, 8, 4, 2):
    ideal = formula(32, 8192, 8, 128, bits / 8)
    print(f"{bits:2} bits: {ideal / MIB:6.0f} MiB, {M / ideal:g} times smaller")
assert formula(32, 8192, 8, 128, 4 / 8) == 256 * MIB

# %% [markdown]
# ## Scales take room
#
# A code means nothing without its scale. With one 16-bit scale for every $G$ numbers,
# and codes of $b_q$ bits, a number takes
#
# $$b = \frac{b_q}{8} + \frac{2}{G} \ \text{bytes} .$$
#
# **Predict.** With $b_q = 4$ and $G = 64$: how much of the 256 MiB becomes more?

# %%
b = 4 / 8 + 2 / 64
with_scales = formula(32, 8192, 8, 128, b)
print(f"{b} bytes per number, {with_scales / MIB:g} MiB", end="")
print(f", {M / with_scales:.2f} times smaller than 16 bits")
assert b == 0.53125
assert with_scales == 272 * MIB

# %% [markdown]
# The planner of this project counts the same, from a scheme: codes, scales, zeros and
# what else is stored.

# %%
shape = memory.ModelShape(layers=32, kv_heads=8, head_dim=128)
parts = memory.cache_parts("int4-token-g64", shape, tokens=8192)
print({name: f"{size / MIB:g} MiB" for name, size in parts.items()})
assert parts["total"] == with_scales
assert kvq.cache_bytes("fp16", shape, tokens=8192) == M

# %% [markdown]
# A formula can be wrong together with its test. So look at a cache that exists: fill
# one layer with 8,192 tokens and count the bytes of its arrays.

# %%
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 8, 8192, 128), dtype=np.float32).astype(np.float16)
cache = kvq.KVCache("int4-token-g64")
cache.append(k, v)
print(f"one layer: {cache.nbytes:,} bytes; 32 layers: {32 * cache.nbytes / MIB:g} MiB")
assert 32 * cache.nbytes == parts["total"]

# %% [markdown]
# And for 100 users with 8,192 tokens each:

# %%
before = kvq.cache_bytes("fp16", shape, tokens=8192, batch=100)
after = kvq.cache_bytes("int4-token-g64", shape, tokens=8192, batch=100)
print(f"{before / GIB:.0f} GiB -> {after / GIB:.1f} GiB")
assert before == 100 * GIB
assert round(after / GIB, 1) == 26.6

# %% [markdown]
# ## A cache that grows, measured
#
# Now real keys and values: one layer of SmolLM2-135M, fed eight tokens at a time. Dots
# are the bytes of the arrays that are stored, lines are the planner's. `kivi-2` has
# 2-bit codes and keeps the newest 128 tokens, and what does not fill a group of 32, in
# 16 bits.

# %%
sample = real_kv(layer=15)
H_kv, T, D = sample.k.shape
layer = memory.ModelShape(layers=1, kv_heads=H_kv, head_dim=D)
names = ("fp16", "int8-token", "int4-token-g64", "kivi-2")
measured = {}
for name in names:
    cache = kvq.KVCache(name)
    sizes = []
    for start in range(0, T, 8):
        stop = start + 8
        cache.append(sample.k[:, start:stop], sample.v[:, start:stop])
        sizes.append(cache.nbytes)
        assert cache.nbytes == kvq.cache_bytes(name, layer, tokens=stop)
    measured[name] = np.array(sizes)
    print(f"{name:15} {sizes[-1]:7,} bytes", end="")
    print(f", {measured['fp16'][-1] / sizes[-1]:.2f} times smaller")

# %%
fig, ax = plt.subplots()
tokens = np.arange(1, T + 1)
for name, look in zip(names, ("fp16", 8, 4, 2), strict=True):
    line = [kvq.cache_bytes(name, layer, tokens=int(t)) / KIB for t in tokens]
    color, marker = plots.COLORS[look], plots.MARKERS.get(look, "D")
    ax.plot(tokens, line, lw=1, color=color)
    dots = measured[name][::5] / KIB
    ax.plot(tokens[7::40], dots, marker, color=color, label=name)
ax.set(xlabel="tokens T", ylabel="KiB", title="One layer of SmolLM2-135M")
ax.legend(title="dots: measured, lines: planned")
plt.show()

# %% [markdown]
# The first 128 tokens of `kivi-2` cost as much as without quantization. Its window
# makes it larger than the 4-bit cache here; over thousands of tokens the window no
# longer counts.
#
# ## A popular example, checked
#
# LLaMA-7B has 32 layers and a hidden size of 4,096, which is 32 KV heads of dimension
# 128: each query head has a KV head of its own. We give the planner the fields of its
# `config.json`, and it counts the weights as well.

# %%
llama = memory.ModelShape.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
)
per_token = kvq.cache_bytes("fp16", llama, tokens=1)
print(f"per token: {per_token:,} bytes = {per_token / 1000} kB = {per_token / KIB} KiB")
for batch in (1, 32):
    size = kvq.cache_bytes("fp16", llama, tokens=2048, batch=batch)
    print(f"{batch:2} x 2,048 tokens: {size / GIB:g} GiB")
assert per_token == 524_288
assert size == 32 * GIB
for bits in (8, 4):
    print(f"{bits} bits: {memory.ideal_bytes(llama, bits, 2048, 32) / GIB:g} GiB")

# %% [markdown]
# You will find this written as "524 KB per token". It is 524 kB, or 512 KiB: with
# "524 KiB" the totals would not be 1 GiB and 32 GiB.
#
# The example goes on: 32 users need 32 GB of cache, so an A100 with 80 GB; with 8 bits
# 16 GB, so an A100 with 40 GB or an A6000 with 48 GB; with 4 bits 8 GB, so an RTX 4090
# with 24 GB. These figures are the cache alone. The weights must be on the card as
# well.
#
# **Predict.** The weights have 16 bits too. How many GiB are they, and which of the
# four cards hold weights and cache at 16, at 8 and at 4 bits?

# %%
weights = 2 * llama.weight_params
cards = [device(name) for name in ("A100-80GB", "A6000", "A100-40GB", "RTX-4090")]
print(f"{llama.weight_params:,} parameters: {weights / GIB:.2f} GiB\n")
print("cache       cache  +weights   ", "  ".join(f"{c.name:9}" for c in cards))
needs = {}
for name in ("fp16", "int8-token", "int4-token-g64"):
    size = kvq.cache_bytes(name, llama, tokens=2048, batch=32)
    needs[name] = size
    verdicts = []
    for card in cards:
        alone = memory.fits(card, 0, size)
        both = memory.fits(card, weights, size)
        verdicts.append("yes" if both else "NO (*)" if alone else "no")
    print(f"{name:10} {size / GIB:6.2f}", f"{(size + weights) / GIB:9.2f}   ", end=" ")
    print("  ".join(f"{verdict:9}" for verdict in verdicts))
print("\n(*) the cache alone would fit; with the weights it does not")

# %%
fig, ax = plt.subplots()
labels = ["16 bits", "8 bits", "4 bits"]
sizes = np.array(list(needs.values())) / GIB
ax.bar(labels, weights / GIB, width=0.5, color="0.75", label="weights, 16 bits")
ax.bar(labels, sizes, width=0.5, bottom=weights / GIB, hatch="//",
       color="white", edgecolor="black", label="cache of 32 users")  # fmt: skip
for card in cards:
    ax.axhline(card.usable / GIB, ls="--", lw=1, color="0.4")
    ax.text(2.95, card.usable / GIB + 0.8, card.name, ha="right")
ax.set(ylabel="GiB", xlim=(-0.5, 3), ylim=(0, 90), xlabel="bits of a cached number")
ax.set_title("LLaMA-7B, 32 users with 2,048 tokens each")
ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.85))
plt.show()

# %% [markdown]
# With the weights counted, the cards of the example turn out large enough, with little
# room. But its reason is incomplete, in both directions:
#
# - The cache alone does not decide. 32 GiB of cache would fit into 40 GB, and 16 GiB
#   into 24 GB: the weights, 12.55 GiB, push both out (the starred cells).
# - 80 GB are not required at 16 bits. Weights and cache fit into 48 GB, with the room
#   for activations that the next line prints. A server that needs more than that will
#   not run there.
# - At 4 bits, the weights are the larger part. Fewer bits for the cache can no longer
#   save much.

# %%
assert memory.fits("A6000", weights, needs["fp16"])
assert not memory.fits("A100-40GB", weights, needs["fp16"])
assert not memory.fits("RTX-4090", weights, needs["int8-token"])
assert round(weights / GIB, 2) == 12.55
for name, card in (("fp16", "A6000"), ("int8-token", "A100-40GB"),
                   ("int4-token-g64", "RTX-4090")):  # fmt: skip
    room = device(card).usable - weights - needs[name]
    print(f"{name:15} on {card:10} leaves {room / GIB:.2f} GiB")

# %% [markdown]
# ## Weights stay, the cache grows
#
# Quantizing weights and quantizing the cache are different tasks. Weights are known
# beforehand and there is one copy, whoever asks. The cache is written while the model
# runs, and once per user. At how many tokens, all users together, is it as large as the
# weights?

# %%
equal = weights / per_token
print(f"{equal:,.0f} tokens, or {equal / 2048:.1f} users with 2,048 tokens")

# %% [markdown]
# ## The same memory, more of it
#
# Turn the formula round: give the RTX 4090 what the weights leave, and ask how many
# users with 2,048 tokens fit, or how long a context one user may have.
#
# **Predict.** "Two to four times" is often said for 8 and 4 bits. Is it exact?

# %%
budget = device("RTX-4090").usable - weights
print(f"{budget / GIB:.2f} GiB beside the weights")
users, longest = {}, {}
for name in ("fp16", "int8-token", "int4-token-g64"):
    users[name] = memory.max_batch(name, budget, llama, tokens=2048)
    longest[name] = memory.max_tokens(name, budget, llama)
    print(f"{name:15} {users[name]:3} users", end="")
    print(f"   or one context of {longest[name]:6,} tokens", end="")
    print(f"   ({longest[name] / longest['fp16']:.2f} times)")

# %% [markdown]
# It is a little less than two and four, by the share of the scales. Whether the users
# see longer contexts, or more of them share a card, or a cheaper card will do, is then
# your choice: the saved bytes can be spent once. And a long context that fits is not
# yet one that works: LLaMA-7B was made for 2,048 tokens.
#
# ## What else changes the number
#
# Real models save cache in their design, and real servers lose some of it again.

# %%
T = 32768
plain = memory.ModelShape(layers=32, kv_heads=32, head_dim=128)
grouped = memory.ModelShape(layers=32, kv_heads=8, head_dim=128)
sliding = memory.ModelShape(
    layers=32, kv_heads=8, head_dim=128, sliding_window=4096, sliding_layers=24
)
for text, model in (
    ("32 KV heads", plain),
    ("8 KV heads, shared (GQA)", grouped),
    ("and 24 of 32 layers see 4,096 tokens", sliding),
):
    row = [kvq.cache_bytes(n, model, tokens=T) / GIB for n in ("fp16", "kivi-4")]
    print(f"{text:38} 16 bits {row[0]:6.2f} GiB   kivi-4 {row[1]:5.2f} GiB")

# %% [markdown]
# Losses come from what is not codes. Below are the parts of a cache with a
# full-precision window, and of one whose tokens are stored in pages of 256; and what a
# head dimension does that the group does not divide.

# %%
for text, options in (("kivi-2", {}), ("kivi-2, pages of 256", {"page": 256})):
    parts = memory.cache_parts("kivi-2", grouped, 1000, **options)
    print(f"{text:20}", {n: f"{x / MIB:.2f}" for n, x in parts.items() if x}, "MiB")
for D in (128, 96):
    bits = kvq.Scheme(4, "token", 64).bits_per_element(T=1, D=D)
    print(f"head dimension {D:3}, groups of 64: {bits:.3f} bits per number")

# %% [markdown]
# ## Three ways to save, and what each saves
#
# Think of a luggage room. Reserving a whole shelf per guest wastes the part that stays
# empty: give out lockers of one size as they are needed. That is **paging**. A travel
# group that brings thirty copies of one guidebook can leave one: **prefix sharing**.
# And clothes in vacuum bags take a quarter of the room, with creases: **quantization**.
# The first saves empty room, the second saves copies, the third makes what is left
# smaller, and only the third changes what comes out.
#
# They multiply. Take 100 users whose model allows 8,192 tokens, who use 2,000 on
# average, and whose first 1,500 tokens are the same instructions:


# %%
def total(name, tokens, batch):
    return kvq.cache_bytes(name, shape, tokens=tokens, batch=batch)


used = -(-2000 // 16) * 16  # whole pages of 16 tokens
shared = 1500 // 16 * 16  # only whole pages are shared
steps = {"a full-size shelf per user": total("fp16", 8192, 100)}
steps["+ paging"] = total("fp16", used, 100)
for text, name in (("+ prefix sharing", "fp16"), ("+ 4 bits", "int4-token-g64")):
    steps[text] = total(name, shared, 1) + total(name, used - shared, 100)
for text, size in steps.items():
    print(f"{text:27} {size / GIB:6.2f} GiB")
sizes = list(steps.values())
assert sizes == sorted(sizes, reverse=True)

# %% [markdown]
# They also share duties. A page is read by those who did not write it, so the reader
# must know its bits, groups and scales, and must be allowed to see it: the same model,
# the same format, the same owner.
#
# ## Takeaway

# %%
ratio = M / kvq.cache_bytes("int4-token-g64", shape, tokens=8192)
share = needs["int4-token-g64"] / (needs["int4-token-g64"] + weights)
print(f"4 bits, one 16-bit scale per 64: {ratio:.2f} times fewer bytes")
print(
    f"LLaMA-7B, 32 users: {(needs['int4-token-g64'] + weights) / GIB:.1f} GiB", end=""
)
print(f" with the weights, the cache is {share:.0%} of it")
assert round(ratio, 2) == 3.76
assert round((needs["int4-token-g64"] + weights) / GIB, 1) == 21.1

# %% [markdown]
# > **Four bits with one 16-bit scale per 64 numbers make a 16-bit cache 3.76 times
# > smaller, not 4. For LLaMA-7B with 32 users of 2,048 tokens that is 21.1 GiB with the
# > 16-bit weights counted: an RTX 4090 holds it before activations, and the weights are
# > then the larger part.**
#
# ## Exercises
#
# **1. Bytes with scales.** Codes of $b$ *bits*, one 16-bit scale per $G$ numbers, where
# $G$ divides $D$.


# %%
def cache_size(L, T, H_kv, D, b, G):
    """Bytes of keys and values, scales included."""
    # BEGIN SOLUTION (2 lines)
    numbers = 2 * L * T * H_kv * D
    return numbers * (b / 8 + 2 / G)
    # END SOLUTION


checks.check_cache_bytes(cache_size)

# %% [markdown]
# **2. Users on a card.** How many whole users fit beside the weights? All three
# arguments are in bytes; the weights may not fit at all.


# %%
def users_on(memory_bytes, weight_bytes, user_bytes):
    # BEGIN SOLUTION (2 lines)
    free = max(memory_bytes - weight_bytes, 0)
    return free // user_bytes
    # END SOLUTION


checks.check_users(users_on)

# %% [markdown]
# **3. Whole blocks.** A server stores tokens in blocks and reserves whole blocks only.
# How many tokens can one user have within a budget?


# %%
def longest_context(budget, token_bytes, block):
    """The most tokens, a multiple of `block`, that fit into `budget` bytes."""
    # BEGIN SOLUTION (2 lines)
    blocks = budget // (token_bytes * block)
    return blocks * block
    # END SOLUTION


checks.check_longest_context(longest_context)

# %% [markdown]
# ## Further reading
#
# - Kwon et al., *Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*, 2023, arXiv 2309.06180.
# - Ainslie et al., *GQA*, 2023, arXiv 2305.13245: query heads that share KV heads.
# - Touvron et al., *LLaMA*, 2023, arXiv 2302.13971: the model of the example.
# - Zheng et al., *SGLang*, 2023, arXiv 2312.07104: sharing prefixes.
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022, arXiv 2211.05102:
#   when the cache is larger than the weights.
# - Cards: NVIDIA's datasheets, as listed with sources in `kvq/hardware.py`.
