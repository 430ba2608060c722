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
# # Plan a deployment
#
# A model, a GPU, and so many users with so many tokens each: does it fit, how fast can
# it be at best, and does a smaller cache change the answer? You will work it out from
# the `config.json` of real models, and find for which of them a quantized cache buys
# much, little or nothing.
#
# **What you will do**
#
# - read the shape of a cache out of a config, sliding windows and latents included;
# - count weights, cache and headroom, and turn the count round: how many users, how
#   many tokens?
# - answer "which GPU for 32 users?" for eight models instead of one;
# - add prefix sharing and tensor parallelism;
# - find which limit binds, memory, bandwidth or instructions, and where fewer bits no
#   longer help;
# - choose, and say what the choice does not know.
#
# **What you need**: the lesson *Bytes in the cache*. No GPU: everything here is counted
# or bounded, nothing is timed.

# %%
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import checks, memory, metrics, plots, roofline
from kvq.formats.plan import format_cache_bytes
from kvq.hardware import GIB, device
from kvq.samples import real_kv

plt.style.use(plots.STYLE)
KIB = 1024

# %% [markdown]
# ## From a config to a shape
#
# A `config.json` says everything that decides the size of a cache. Here are those of
# eight models, and what `ModelShape.from_config` makes of them. KiB per token are for
# 16-bit numbers and one more token of a long context.
#
# **Predict.** DeepSeek-V3 has 671 billion parameters, Llama 2 has 7. Which of them
# caches more bytes per token?

# %%
NAMES = ("llama-2-7b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-4b", "qwen3-30b-a3b",
         "gemma-3-27b", "gpt-oss-120b", "deepseek-v3")  # fmt: skip
CONFIGS = files("kvq") / "data" / "configs"
shapes = {n: memory.ModelShape.from_config(CONFIGS / f"{n}.json") for n in NAMES}

print(f"{'model':14} layers (sliding)  heads x width   KiB/token   32,768 tokens")
for name, s in shapes.items():
    heads = f"{s.kv_heads} x {s.head_dim}" if not s.latent else f"latent {s.head_dim}"
    slope = memory.bytes_per_token("fp16", s) / KIB
    long = kvq.cache_bytes("fp16", s, tokens=32768) / GIB
    print(f"{name:14} {s.layers:4} ({s.sliding_layers:2}) {heads:>21}", end="")
    print(f" {slope:11.1f} {long:11.2f} GiB")

# %% [markdown]
# The cache does not follow the number of parameters. Llama 2 gives every query head its
# own KV head. The others share KV heads (GQA), let most layers forget (sliding
# windows), or store one *latent* vector per token for all heads (MLA). These models had
# their caches made smaller before anyone quantized them.
#
# Three shortcuts that look right and are not:

# %%
config = {"hidden_size": 2560, "num_attention_heads": 32}  # of Qwen3-4B
divided = config["hidden_size"] // config["num_attention_heads"]
print(f"qwen3-4b: head_dim is {shapes['qwen3-4b'].head_dim}, hidden / heads {divided}")
s = shapes["llama-3.1-8b"]
print(f"llama-3.1-8b: {s.q_heads} query heads, {s.kv_heads} KV heads: counting query")
print(f"  heads makes the cache {s.q_heads // s.kv_heads} times too large")
s = shapes["gpt-oss-120b"]
first, later = (memory.bytes_per_token("fp16", s, tokens=T) for T in (0, None))
print(
    f"gpt-oss-120b: {first:,.0f} bytes for a first token, {later:,.0f} for a late one"
)

# %% [markdown]
# The last line is a kink, not a constant. A sliding layer keeps the newest $W$ tokens.
# With $L_g$ layers that grow and $L_s$ that slide, the tokens held in all layers are
#
# $$n(T) = L_g \, T + L_s \min(T, W) .$$
#
# **Exercise 1.** Write it.


# %%
def tokens_held(T, growing, sliding, W):
    """Tokens held in all layers together, for one sequence of T tokens."""
    # BEGIN SOLUTION (1 line)
    return growing * T + sliding * min(T, W)
    # END SOLUTION


checks.check_tokens_held(tokens_held)

# %%
fig, ax = plt.subplots(figsize=(8, 4.6))
tokens = 2 ** np.arange(4, 18)
looks = ("-", "--", "-.", ":", (0, (6, 2)))
for name, look in zip(
    ("llama-2-7b", "llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "gpt-oss-120b"),
    looks,
    strict=True,
):
    s = shapes[name]
    T = tokens[tokens <= s.max_positions]
    y = [kvq.cache_bytes("fp16", s, tokens=int(t)) / GIB for t in T]
    (line,) = ax.plot(T, y, ls=look, color="black" if not s.sliding_layers else "0.5")
    va = {"llama-3.1-8b": "bottom", "deepseek-v3": "top"}.get(name, "center")
    ax.text(T[-1] * 1.1, y[-1], name, va=va, size=9)
    if s.sliding_layers:
        held = tokens_held(T[-1], s.growing_layers, s.sliding_layers, s.sliding_window)
        assert held * s.kv_heads * 2 * s.head_dim * 2 / GIB == y[-1]
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set_xlim(16, 2**19.5)
ax.set(xlabel="tokens T of one user", ylabel="GiB, 16-bit cache")
ax.set_title("Gray: models with sliding layers. Each line ends at its model's limit")
plt.show()

# %% [markdown]
# On logarithmic axes a plain cache is a straight line. Gemma's bends at 1,024 tokens,
# gpt-oss's at 128: from there only the other layers grow.
#
# ## What has to fit
#
# Weights, caches and *headroom* share the memory: activations, workspaces, and what the
# runtime itself needs. How much that is depends on the server. We keep a tenth free and
# say so. With memory $M$, headroom $h$ and weights $W$, the caches get
#
# $$M_{KV} = \max\bigl(0,\ (1 - h) M - W\bigr) .$$
#
# The weights of the Llama models follow from their configs. For the others we take what
# their authors publish.

# %%
HEADROOM = 0.1


def bf16(parameters):
    return 2 * parameters


weights = {name: bf16(shapes[name].weight_params) for name in NAMES[:3]}
weights |= {
    "qwen3-4b": bf16(4.0e9),  # arXiv 2505.09388
    "qwen3-30b-a3b": bf16(30.5e9),  # arXiv 2505.09388
    "gemma-3-27b": bf16(27.0e9),  # arXiv 2503.19786, without the vision encoder
    "gpt-oss-120b": 60.8 * GIB,  # arXiv 2508.10925: the checkpoint, experts in MXFP4
    "deepseek-v3": 671e9,  # arXiv 2412.19437: FP8, a byte per parameter
}


def budget(card, weight_bytes, headroom=HEADROOM):
    """Bytes that the caches get."""
    return max(0, (1 - headroom) * device(card).usable - weight_bytes)


for name in NAMES[:2]:
    free = budget("A100-40GB", weights[name])
    print(f"{name} on an A100-40GB: weights {weights[name] / GIB:.2f} GiB", end="")
    print(f", caches {free / GIB:.2f} GiB")

# %% [markdown]
# Now turn it round. The bytes of a cache are known exactly, windows and ragged groups
# included, so the largest number of tokens or users is exact as well: one more does not
# fit.

# %%
POLICIES = ("fp16", "int8-token", "int4-token-g64", "kivi-2")
name, users = "llama-3.1-8b", 32
s, free = shapes[name], budget("A100-40GB", weights[name])
print(f"{name}, A100-40GB   {users} users, tokens each   8,192 tokens, users")
for policy in POLICIES:
    T = memory.max_tokens(policy, free, s, batch=users)
    n = memory.max_batch(policy, free, s, tokens=8192)
    print(f"{policy:26} {T:17,} {n:19}")
    peak = [memory.peak_bytes(policy, s, t, users) for t in (T, T + 1)]
    assert peak[0] <= free < peak[1]

# %% [markdown]
# `peak_bytes` and not `cache_bytes`: a cache with a full-precision window is largest
# just before its window is emptied, and it must fit on its way, not only at the end.
#
# ## Which GPU for 32 users?
#
# A popular table answers this for a 7B model: 80 GB at 16 bits, 40 at 8, 24 at 4. The
# lesson *Bytes in the cache* counted it again with the weights. Here are eight models
# and the same question: the first box of the list below that holds weights, 32 caches
# and headroom. With several GPUs, weights are split evenly and KV heads by tensor
# parallelism, which we come to below.
#
# **Predict.** For how many of the eight models does a 4-bit cache lead to a smaller
# box, with 2,048 tokens per user? And with 32,768?

# %%
BOXES = (("RTX-4090", 1), ("A100-40GB", 1), ("A6000", 1), ("A100-80GB", 1),
         ("H200", 1), ("H200", 2), ("H200", 4), ("H200", 8))  # fmt: skip


def smallest_box(name, policy, tokens, users=32):
    """The first of BOXES that holds the users, as text; "-" if none does."""
    for card, ranks in BOXES:
        rank = shapes[name].shard(ranks)
        need = memory.peak_bytes(policy, rank, tokens, users)
        if need <= budget(card, weights[name] / ranks):
            return f"{ranks} x {card}" if ranks > 1 else card
    return "-"


def print_boxes(tokens):
    """The table, and the models whose box a 4-bit cache makes smaller."""
    smaller = []
    print(f"32 users, {tokens:,} tokens each")
    print(f"{'':14} {'16 bits':11} {'8 bits':11} {'4 bits':11} weights")
    for name, s in shapes.items():
        if tokens > s.max_positions:
            print(f"{name:14} made for {s.max_positions:,} tokens")
            continue
        row = [smallest_box(name, p, tokens) for p in POLICIES[:3]]
        print(f"{name:14}", *(f"{box:11}" for box in row), end="")
        print(f"{weights[name] / GIB:8.1f} GiB")
        smaller += [name] if row[0] != row[2] else []
    return smaller


short = print_boxes(2048)

# %%
long = print_boxes(32768)
print(f"\n2,048 tokens: smaller box for {len(short)} of {len(NAMES)}: {short}")
print(f"32,768 tokens: for {len(long)} of {len(NAMES) - 1}")
assert short == ["llama-2-7b", "llama-3.1-8b"]
assert len(long) == 7

# %% [markdown]
# At 2,048 tokens the weights decide, and the bits of the cache change the box for the
# two oldest models only. At 32,768 the cache decides, and they change it for every
# model. "4 bits fit on a 24 GB card" is true of one model at one length. The next
# figure shows why: weights are a floor, and fewer bits move the point where the cache
# lifts off it.

# %%
fig, axes = plt.subplots(1, 4, sharey=True, figsize=(13, 4.2))
tokens = 2 ** np.arange(8, 18)
for ax, name in zip(
    axes, ("llama-3.1-8b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3"), strict=True
):
    ranks = 8 if name == "deepseek-v3" else 1
    rank, floor = shapes[name].shard(ranks), weights[name] / ranks
    for policy, bits in zip(POLICIES, ("fp16", 8, 4, 2), strict=True):
        need = [floor + memory.peak_bytes(policy, rank, int(t), 32) for t in tokens]
        label = "16 bits" if bits == "fp16" else policy
        marker = plots.MARKERS.get(bits, "D")
        ax.plot(tokens, np.array(need) / GIB, color=plots.COLORS[bits], marker=marker,
                ms=4, label=label)  # fmt: skip
    for card in ("RTX-4090", "A100-80GB", "H200"):
        room = (1 - HEADROOM) * device(card).usable / GIB
        ax.axhline(room, ls="--", lw=1, color="0.5")
        if ax is axes[-1]:
            ax.text(2**17.4, room, card, size=9, color="0.4", va="center")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="tokens per user", title=f"{name}" + " (1 of 8 ranks)" * (ranks > 1))
axes[0].set(ylabel="GiB on one GPU: weights + 32 caches", ylim=(10, 700))
axes[0].legend(loc="upper left", bbox_to_anchor=(0, 0.9))
plt.show()

# %% [markdown]
# ## Where quantization buys little
#
# Compare the caches with the weights. At how many tokens, of all users together, is a
# 16-bit cache as large as the weights? Below that, the most that a perfect compression
# to zero bytes could do is to halve the memory. A user has 8,192 tokens here.

# %%
print(f"{'':14} weights     cache of a user   users until   saved by 4 bits")
print(f"{'':14} in GiB     16 bits    4 bits   as large      per user, GiB")
equal = {}
for name, s in shapes.items():
    T = min(8192, s.max_positions)
    full, small = (kvq.cache_bytes(p, s, tokens=T) / GIB for p in POLICIES[::2])
    equal[name] = weights[name] / GIB / full
    print(f"{name:14} {weights[name] / GIB:7.1f} {full:11.2f} {small:9.2f}", end="")
    print(f" {equal[name]:10.0f} {full - small:18.2f}" + " (*)" * (T < 8192))
print("(*) 4,096 tokens, which this model was made for")
assert equal["deepseek-v3"] > 50 * equal["llama-3.1-8b"]

# %% [markdown]
# Llama-3.1-8B has as many bytes of cache as of weights at 15 users. gpt-oss gets there
# with about 200, DeepSeek-V3 with more than a thousand. The factor of 3.76 is the same
# for all of them; the bytes that it saves per user are not. A model that slides or
# stores latents has taken the larger step already.
#
# ## In a system's own bytes
#
# What a server really allocates has that server's scales and that server's padding:
# llama.cpp rounds the context up to 256 tokens, vLLM and TensorRT-LLM to whole blocks
# of 16 and 32, Hugging Face keeps up to 127 tokens in 16 bits, and vLLM's TurboQuant
# leaves the first two and the last two layers unquantized. Here are 5,000 tokens of
# Llama-3.1-8B. (The lesson *Formats in the wild* opens the bytes.)

# %%
s, T = shapes["llama-3.1-8b"], 5000
sizes = {
    name: format_cache_bytes(name, s, tokens=T)
    for name in ("ggml:q8_0", "ggml:q4_0", "vllm:int8_per_token_head",
                 "vllm:int4_per_token_head", "tensorrt_llm:fp8", "tensorrt_llm:nvfp4",
                 "hf:quanto-int4-axis0", "vllm:turboquant_4bit_nc")
}  # fmt: skip
for name, size in sizes.items():
    print(f"{name:26} {size / 2**20:7.1f} MiB, {8 * size / s.numbers(T):6.3f}", end="")
    print(f" bits per number, {kvq.cache_bytes('fp16', s, tokens=T) / size:.2f} times")

# %% [markdown]
# "4 bits" is anything from 4.26 to 5.67 bits here. And a number of bits can hide what
# it leaves out: vLLM's FP8 cache for MLA stores the latent in 8 bits, but its 64 rotary
# numbers in 16, and a scale per 128 numbers.

# %%
s = shapes["deepseek-v3"]
full, record = (
    format_cache_bytes(name, s, tokens=4096) / (4096 * s.layers)
    for name in ("ggml:f16", "vllm:fp8_ds_mla")
)
print(
    f"deepseek-v3: {record:.0f} bytes per token and layer instead of {full:.0f}", end=""
)
print(f", {full / record:.2f} times smaller, not 2")
assert (full, record) == (1152, 656)

# %% [markdown]
# ## Sharing a prefix
#
# Users who begin with the same text can share its blocks. With a prefix of $P$ tokens,
# stored once, $o$ tokens of each user's own and $c$ bytes per token,
#
# $$N = \left\lfloor \frac{M_{KV} - P c}{o \, c} \right\rfloor$$
#
# users fit. (Whole blocks only; what does not fill one is each user's own.)
#
# **Exercise 2.** Write it. A prefix that does not fit leaves room for nobody.


# %%
def users_sharing(free, token_bytes, prefix, own):
    """Users with `own` tokens each beside one shared prefix, within `free` bytes."""
    # BEGIN SOLUTION (2 lines)
    left = max(free - prefix * token_bytes, 0)
    return left // (own * token_bytes)
    # END SOLUTION


checks.check_users_sharing(users_sharing)

# %% [markdown]
# **Predict.** Llama-3.1-8B on an A100-40GB, a prefix of 6,000 tokens, 2,000 of each
# user's own. By what factor does sharing raise the number of users, by what factor does
# a 4-bit cache, and what do both give?

# %%
name, page, prefix, own = "llama-3.1-8b", 16, 6000, 2000  # tokens: whole blocks of 16
s, free = shapes[name], budget("A100-40GB", weights[name])
count = {}
for policy in ("fp16", "int4-token-g64"):
    c = memory.bytes_per_token(policy, s)
    count[policy, "own copies"] = users_sharing(free, c, 0, prefix + own)
    count[policy, "shared"] = users_sharing(free, c, prefix, own)
base = count["fp16", "own copies"]
for (policy, how), n in count.items():
    print(f"{policy:15} {how:11} {n:4.0f} users, {n / base:5.2f} times")
    common = prefix if how == "shared" else 0
    planned = memory.max_batch(policy, free, s, prefix + own, common, page=page)
    assert n == planned

# %% [markdown]
# The two multiply, and a little more than that: the one copy of the prefix weighs less
# against the budget when it is small. (Whole users blur the factors: 4.25 bits are 3.76
# times fewer.) The planner's `max_batch` counts the same. Sharing asks for the same
# model, the same format and the same owner; it changes no number. Quantization changes
# numbers.
#
# ## Several GPUs
#
# Tensor parallelism gives each of $n$ ranks a part of the heads. KV heads split as long
# as there are enough of them. After that they are copied.
#
# **Predict.** Qwen3-30B has 4 KV heads. How much cache does each of 8 ranks hold,
# compared with each of 4? And DeepSeek-V3, with its one latent per token?

# %%
ranks = (1, 2, 4, 8)
print("KiB per token on each rank, 16 bits")
print(f"{'ranks':16}", *(f"{n:7}" for n in ranks), "   copies of the cache on 8")
for name in ("llama-3.3-70b", "qwen3-30b-a3b", "deepseek-v3"):
    row = [memory.bytes_per_token("fp16", shapes[name].shard(n)) for n in ranks]
    copies = 8 * row[-1] / row[0]
    print(f"{name:16}", *(f"{b / KIB:7.1f}" for b in row), f"{copies:12.0f}")
qwen = memory.ModelShape.from_config(CONFIGS / "qwen2.5-7b.json")
try:
    qwen.shard(8)
except ValueError as error:
    print(f"\nqwen2.5-7b on 8 ranks: {error}")

# %% [markdown]
# DeepSeek-V3 on eight GPUs holds eight copies of every latent, so for its cache a box
# of eight is no larger than one GPU. Servers avoid that by giving each GPU users of its
# own (data-parallel attention). A plan that divides the cache by the number of GPUs is
# wrong for both of the lower lines.
#
# ## The second limit: bandwidth
#
# To produce one token per user, a GPU reads the weights once and every user's cache
# once. With bandwidth $B$, weights $W$ and all caches $C$ the step takes at least
#
# $$t \ge \frac{W + C}{B}, \qquad
# \text{speed-up of a cache } r \text{ times smaller} = \frac{W + C}{W + C / r} .$$
#
# **Exercise 3.** Write the speed-up.


# %%
def step_speedup(W, C, r):
    """How much faster a step can be with a cache r times smaller."""
    # BEGIN SOLUTION (1 line)
    return (W + C) / (W + C / r)
    # END SOLUTION


checks.check_step_speedup(step_speedup)

# %% [markdown]
# **Predict.** Llama-3.1-8B, a 4-bit cache: how much faster can a step be for one user
# with 2,048 tokens, and how much for 64 users with 8,192?

# %%
name = "llama-3.1-8b"
s, W = shapes[name], weights[name]
for users, T in ((1, 2048), (16, 8192), (64, 8192)):
    C = kvq.cache_bytes("fp16", s, tokens=T, batch=users)
    r = roofline.max_speedup("int4-token-g64", s)
    attention = [
        roofline.decode_time(p, s, "H200", T, users)["seconds"] for p in POLICIES[::2]
    ]
    print(f"{users:2} users, {T:,} tokens: cache / weights {C / W:5.2f}", end="")
    print(f"  attention {attention[0] / attention[1]:.2f} times faster at best", end="")
    print(f", the step {step_speedup(W, C, r):.2f}")

# %%
fig, ax = plt.subplots(figsize=(8, 4.4))
totals = np.logspace(3, 7, 81)
for policy, bits in zip(POLICIES[1:], (8, 4, 2), strict=True):
    r = roofline.max_speedup(policy, s)
    C = totals * memory.bytes_per_token("fp16", s)
    y = step_speedup(W, C, r)
    ax.plot(totals, y, ls=("--", "-.", ":")[bits // 3], color=plots.COLORS[bits])
    ax.axhline(r, lw=0.7, color=plots.COLORS[bits])
    ax.text(1.05e7, y[-1], f"{policy}\nat most {r:.2f}", va="center", size=9)
lift = W / memory.bytes_per_token("fp16", s)
ax.axvline(lift, lw=1, color="0.5")
ax.text(lift * 0.93, 4.6, "cache = weights", ha="right", color="0.4")
ax.set(xscale="log", xlim=(1e3, 1e7), xlabel="tokens in the caches of all users")
ax.set(ylabel="bound on the speed-up of a step", title=f"Predicted, {name}")
plt.show()
print(f"the cache is as large as the weights at {lift:,.0f} tokens")

# %% [markdown]
# Two numbers are quoted as "the speed-up". The one of attention alone is the ratio of
# the bytes. The one that users see has the weights in it, and where the cache is much
# smaller than the weights, it is 1, at any number of bits. (In a mixture of experts, a
# step with few users reads only some of the experts, so there the lift-off is earlier.)
#
# ## The third limit: instructions
#
# Reading fewer bytes does not make the arithmetic less. Every stored number costs $c$
# instructions to unpack, scale and multiply, at 8 bits as at 2. A device starts $J$
# instructions per second and reads $B$ bytes per second, so a number of $b$ bits takes
#
# $$t = \max\left(\frac{b / 8}{B},\ \frac{c}{J}\right), \qquad
# \text{and the two are equal at} \qquad b^* = \frac{8 \, c \, B}{J} .$$
#
# Below $b^*$ bits, fewer bits save memory but no time.
#
# **Exercise 4.** Write $b^*$.


# %%
def binding_bits(c, B, J):
    """The bits per number below which instructions bind. c per number, B, J per s."""
    # BEGIN SOLUTION (1 line)
    return 8 * c * B / J
    # END SOLUTION


checks.check_binding_bits(binding_bits)

# %% [markdown]
# How large is $c$? `roofline.INSTRUCTIONS` holds three values, counted in the machine
# code of compiled kernels (never timed; the lesson *Predict the bandwidth* has those of
# this project's own). A kernel without tensor cores that gives each query head to a
# warp needs about 24 per byte and query head; with four query heads per KV head, at
# 4.25 bits, that is 51 per number.
#
# **Predict.** On which of these cards do 2 bits stop helping a good kernel: one with
# much bandwidth per instruction, or one with little?

# %%
kernels = {**roofline.INSTRUCTIONS, "one head per warp": 24 * 4 * 4.25 / 8}
print("bits below which instructions bind")
print(f"{'':10}", *(f"{name:>18}" for name in kernels))
for card in map(device, ("T4", "RTX-4090", "A100-80GB", "H100-SXM", "H200")):
    row = [binding_bits(c, card.bandwidth, card.issue_rate) for c in kernels.values()]
    print(f"{card.name:10}", *(f"{b:18.2f}" for b in row))

# %%
fig, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 4.2))
bits = np.array([1.0, 16.0])
for ax, card in zip(axes, map(device, ("RTX-4090", "H200")), strict=True):
    ax.plot(bits, bits / 8 / card.bandwidth * 1e12, color="black")
    for (kernel, c), ls in zip(kernels.items(), ("--", "-.", ":", (0, (1, 3))),
                               strict=True):  # fmt: skip
        t = c / card.issue_rate * 1e12
        ax.axhline(t, ls=ls, color="0.4")
        place = {"x": 1, "ha": "left"} if t > 0.5 else {"x": 16, "ha": "right"}
        ax.text(y=t * 1.04, s=kernel, size=9, color="0.3", **place)
        cross = binding_bits(c, card.bandwidth, card.issue_rate)
        if 1 <= cross <= 16:
            ax.plot(cross, t, "o", color="black")
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="stored bits per number", title=card.name)
    ax.set_xticks((1, 2, 4, 8, 16), (1, 2, 4, 8, 16))
axes[0].set(ylabel="picoseconds per cached number, at least")
axes[0].text(2, 0.3, "memory", ha="right")
plt.show()

# %% [markdown]
# The dots are where more compression stops helping. On an H200, the card with the most
# bandwidth for its instructions, good kernels reach that point between 1.7 and 2.8
# stored bits; on an RTX 4090 they never do. The simple kernel reaches it at 10 bits on
# the RTX 4090, and on the H200 it is limited by instructions even at 16 bits: there it
# saves memory and no time.
#
# A third reason is the products themselves. In DeepSeek-V3, 128 query heads read one
# latent, so every byte is used many times:

# %%
for ranks in (1, 8):
    rank = shapes["deepseek-v3"].shard(ranks)
    for policy in POLICIES[::2]:
        at = roofline.decode_time(policy, rank, "H200", 32768)
        print(
            f"deepseek-v3, {rank.q_heads:3} query heads on a rank, {policy:15}", end=""
        )
        print(f" {at['seconds'] * 1e6:6.1f} µs at least, limit: {at['limit']}")

# %% [markdown]
# With all heads on one GPU the tensor cores bind already at 16 bits, and a smaller
# latent cannot make attention faster at all (with 16-bit products). With an eighth of
# the heads per rank the memory binds again, and every rank reads every latent.
#
# ## Short contexts
#
# A quantized step also has costs that do not shrink: one more launch, one more merge.
# Say these cost $t_0$ per layer. It pays from the number of tokens at which the saved
# bytes take longer to read than $t_0$; `crossover_tokens` finds it.

# %%
one_layer = memory.ModelShape(layers=1, kv_heads=8, head_dim=128, q_heads=32)
print("tokens from which a 4-bit layer of Llama-3.1-8B beats a 16-bit one, at best")
for overhead in (2e-6, 5e-6, 20e-6):
    row = [
        roofline.crossover_tokens(
            "int4-token-g64", one_layer, card, overhead, batch=users
        )
        for card in ("RTX-4090", "H200")
        for users in (1, 32)
    ]
    print(f"{overhead * 1e6:4.0f} µs more per layer:", end="")
    print(f"  RTX-4090 {row[0]:6,} (32 users: {row[1]:5,})", end="")
    print(f"   H200 {row[2]:7,} (32 users: {row[3]:5,})")

# %% [markdown]
# The overheads are assumptions, to be replaced by your own measurements. The faster the
# memory, the longer the context has to be. A batch shortens it.
#
# ## The choice
#
# Put the limits together: the users must fit with all their tokens, and a step must be
# fast enough. Of the policies that do both, which one? Fewer bits never help quality,
# so take the *least* compression that meets the target.


# %%
def choose(name, card, users, tokens, seconds, policies=POLICIES):
    """(policy, rows): the first policy that fits and is fast enough, or None."""
    card = device(card)
    reserve = HEADROOM * card.usable
    rows = roofline.plan(
        shapes[name], card, policies, tokens, users, weights[name], reserve
    )
    good = [r["policy"] for r in rows if r["fits"] and r["step_seconds"] <= seconds]
    return (good or [None])[0], rows


workloads = (("A100-40GB", 16, 4096, 0.050), ("A100-40GB", 32, 8192, 0.050),
             ("A100-40GB", 64, 8192, 0.050), ("A100-40GB", 100, 8192, 0.050),
             ("H200", 100, 8192, 0.020))  # fmt: skip
answers = []
for card, users, T, seconds in workloads:
    answer, rows = choose("llama-3.1-8b", card, users, T, seconds)
    answers.append(answer)
    print(f"{card}, {users} users, {T:,} tokens, {seconds * 1e3:.0f} ms: {answer}")
    for r in rows:
        fit = "fits" if r["fits"] else "does not fit"
        print(
            f"   {r['policy']:15} {r['total_bytes'] / GIB:7.2f} GiB, {fit:12}", end=""
        )
        print(f"  step >= {r['step_seconds'] * 1e3:5.1f} ms", end="")
        print(f"  (attention: {r['limit']})  up to {r['max_users']:3} users")

# %% [markdown]
# One model on one card, four numbers of users, four answers. On the H200 memory is not
# what decides: 100 users fit at 16 bits, and reading their caches takes too long. The
# times are lower bounds, of a perfect kernel at the full bandwidth of the datasheet. A
# target below the bound cannot be met; one above it may be missed all the same.
#
# ## What the plan does not know
#
# Nothing above looked at a single key. Bytes and bounds are exact for any model with
# this shape; quality is not a function of the shape. What this course measures is one
# small model: here is the relative error of the attention output, over 512 tokens of
# four layers of SmolLM2-135M.

# %%
print(f"{'':18} bits per number   error of the output, layers 0, 7, 15, 29")
small = memory.ModelShape(layers=1, kv_heads=3, head_dim=64)
errors = {}
for policy in (*POLICIES[1:], "kivi-4"):
    row = []
    for layer in (0, 7, 15, 29):
        x = real_kv(layer)
        cache = kvq.KVCache(policy)
        cache.append(x.k, x.v)
        o = kvq.attention(x.q, x.k, x.v, causal=True)
        o_hat = kvq.attention(x.q, cache.keys(), cache.values(), causal=True)
        row.append(metrics.output_error(o, o_hat))
    errors[policy] = row
    b = memory.bits_per_element(policy, small)
    print(f"{policy:18} {b:15.2f}   ", "  ".join(f"{e:7.1%}" for e in row))

# %% [markdown]
# Even this says more than the number of bits: `kivi-4` and `int4-token-g64` are both
# "4 bits". Not measured here: perplexity, answers to questions, contexts longer than
# 512 tokens, and any of the eight models of this lesson. Published results differ by
# model and task, and two claims met often, "larger models are more robust" and "4 bits
# cost 1 to 3 percent", are statements about particular models and schemes. So plan with
# bytes, pick the candidates that fit, and measure them on your own model and task
# before you deploy one.
#
# ## Takeaway

# %%
lift_users = equal["llama-3.1-8b"]
print(f"a 4-bit cache changes the box for {len(short)} of 8 models at 2,048 tokens")
print(f"and for {len(long)} of 7 at 32,768, 32 users each")
print(f"llama-3.1-8b: cache = weights at {lift:,.0f} tokens = {lift_users:.0f} users")
assert len(short) == 2
assert len(long) == 7
assert round(lift, -3) == 123_000
assert answers[:4] == list(POLICIES)
assert answers[4] == "int8-token"

# %% [markdown]
# > **Compare the cache with the weights first. With 32 users and a tenth of the memory
# > kept free, a 4-bit cache leads to a smaller box for 2 of these 8 models at 2,048
# > tokens each, and for all 7 that go so far at 32,768. It speeds up a whole step as
# > far as the cache outweighs the weights: for Llama-3.1-8B, they are equal at about
# > 123,000 tokens of all users. None of this says anything about quality.**
#
# ## More to try
#
# The command line has the same planner: `kvq plan --config gemma-3-27b --weights 54GB
# --device H200 --tokens 32768 --batch 32`. Give it the `config.json` of your own model.
#
# ## Further reading
#
# - Pope et al., *Efficiently Scaling Transformer Inference*, 2022, arXiv 2211.05102:
#   the cache against the weights.
# - Williams et al., *Roofline*, Communications of the ACM 52(4), 2009: which limit
#   binds.
# - DeepSeek-AI, *DeepSeek-V2*, 2024, arXiv 2405.04434: latents in place of KV heads.
# - Gemma team, *Gemma 3*, 2025, arXiv 2503.19786: five sliding layers to one global.
# - Kwon et al., *PagedAttention*, 2023, arXiv 2309.06180: blocks and shared prefixes.
# - Cards: NVIDIA's datasheets, as listed with sources in `kvq/hardware.py`.
