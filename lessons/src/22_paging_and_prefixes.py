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
# # Paging and prefixes: blocks that many sequences share
#
# A server holds the caches of many requests at once, of lengths it does not know in
# advance, and many of them begin alike. It cuts the cache into blocks, finds them
# through a table, and lets requests share them. You will measure what each of these
# saves, and find out what can go wrong when a shared block is quantized.
#
# **What you will do**
#
# - measure the room that stays empty, with one long reservation and with blocks;
# - find a token through a block table, and attend over blocks without joining them;
# - share the beginning of a real text among requests, and count the bytes;
# - read a block with the wrong format, and watch nothing complain;
# - write a key that tells two different blocks apart;
# - share a block until somebody writes, and decide what a hit may return at the edge of
#   the full-precision window;
# - put paging, sharing and 4 bits together on one workload.
#
# **What you need**: NumPy, attention, and a cache with groups and a residual window, as
# in *The streaming cache*.

# %%
import hashlib
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import KVCache, Policy, Scheme, checks, metrics, plots
from kvq.attention import decode
from kvq.dtypes import numpy_dtype
from kvq.hardware import GIB
from kvq.paging import BlockPool, BlockTable, PrefixIndex, encode_key, open_sequence
from kvq.samples import real_kv

plt.style.use(plots.STYLE)
sample = real_kv(layer=15)
K, V, Q = sample.k, sample.v, sample.q
H_kv, T, D = K.shape
print(f"{H_kv} KV heads, {T} tokens, D = {D}, {K.dtype}")

# %% [markdown]
# ## Rooms that stay empty
#
# Nobody knows how long an answer will be. A server that keeps each cache in one piece
# must reserve room for the longest one it allows. Here are 64 requests of up to 4,096
# tokens, most of them much shorter.
#
# **Predict.** Which share of the reserved room is in use?

# %%
LONGEST = 4096
rng = np.random.default_rng(0)
lengths = np.minimum(rng.lognormal(mean=6.2, sigma=0.9, size=64), LONGEST).astype(int)
used = lengths.sum() / (len(lengths) * LONGEST)
print(f"mean length {lengths.mean():.0f}, median {np.median(lengths):.0f}: ", end="")
print(f"{used:.0%} of the reserved room is in use")

# %% [markdown]
# Paging gives out small blocks of $B$ tokens, as they are needed (Kwon et al. 2023).
# Only the last block of a sequence has empty places:
#
# $$\text{blocks} = \left\lceil \frac{T}{B} \right\rceil, \qquad
# \text{empty} = B \left\lceil \frac{T}{B} \right\rceil - T ,$$
#
# which is $(B - 1)/2$ on average if the lengths are spread evenly. Smaller blocks waste
# less room and need longer tables.

# %%
waste = {}
for B in (8, 16, 32, 64, 128, 256):
    blocks = -(-lengths // B)
    empty = blocks * B - lengths
    waste[B] = empty.sum() / lengths.sum()
    print(f"B = {B:3}: {empty.mean():6.1f} empty places per sequence", end="")
    print(f" ((B - 1) / 2 = {(B - 1) / 2:5.1f}), {waste[B]:5.1%} of the used", end="")
    print(f", {blocks.mean():5.1f} table entries")
assert waste[32] < 0.03

# %% [markdown]
# ## A token behind a table
#
# A *block table* lists, in order, the blocks of one sequence. They may lie anywhere in
# the pool.
#
# **Exercise 1.** In which block is token $t$, and at which place in it?


# %%
def locate(t, table, B):
    """(block id, place in the block) of token t."""
    # BEGIN SOLUTION (1 line)
    return table[t // B], t % B
    # END SOLUTION


checks.check_locate(locate)

# %% [markdown]
# Attention does not care where its keys lie. It needs them tile by tile, and a block is
# a tile. Here 512 tokens of a real layer lie in 16 of 40 blocks, in random order.

# %%
B = 32
pool_k, pool_v = (np.full((40, H_kv, B, D), np.nan, np.float16) for _ in "kv")
table = rng.permutation(40)[: T // B].tolist()
for t in range(T):
    block, place = locate(t, table, B)
    pool_k[block, :, place], pool_v[block, :, place] = K[:, t], V[:, t]
tiles = ((pool_k[block], pool_v[block]) for block in table)
paged = decode(Q, tiles, T, D).out
exact = kvq.attention(Q, K, V, causal=True)
print("largest difference to attention over one piece:", np.abs(paged - exact).max())
assert np.allclose(paged, exact, rtol=1e-10)

# %% [markdown]
# ## Blocks of quantized numbers
#
# Quantization makes a demand: a block must hold whole groups. KIVI's keys have one
# scale per channel and 32 tokens, so a block has 32 tokens, or 64, or 96. A group that
# spans two blocks could not be read with one of them, and a neighbour of another owner
# would set its step.

# %%
KEY = Scheme(4, "channel", 32, "asymmetric")
VALUE = Scheme(4, "token", 32, "asymmetric")
KIVI = Policy(KEY, VALUE, residual=64)
shape = {"kv_heads": H_kv, "head_dim": D}
try:
    BlockPool(KIVI, 40, block=16, **shape)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# And it raises a question: where do scales and zeros go? Hardware reads in units, say
# of 16 bytes, and what is read together should start at one. If each token keeps its
# scales behind its codes, every token is rounded up. If a block keeps its codes in one
# array and its scales in another, only the block is.
#
# **Predict.** $D = 64$, 4 bits, one 16-bit scale per token: how many bytes does a token
# take, and how many if each token is rounded up to 16?


# %%
def rounded(n, unit=16):
    """n bytes, rounded up to whole units."""
    return -(-n // unit) * unit


print("bytes of 32 tokens              net   per token   per block")
for D_, G, zeros in ((64, 64, 0), (64, 32, 1), (128, 64, 0), (80, 80, 0)):
    codes, scales = D_ // 2, D_ // G * 2 * (1 + zeros)
    net = 32 * (codes + scales)
    per_token = 32 * rounded(codes + scales)
    per_block = rounded(32 * codes) + rounded(32 * scales)
    name = f"D = {D_:3}, G = {G:2}, {'zeros' if zeros else 'no zeros'}"
    print(f"{name:25} {net:9}", end="")
    print(f"{per_token:6} (+{per_token / net - 1:3.0%}) {per_block:5}", end="")
    print(f" (+{per_block / net - 1:.0%})")

# %% [markdown]
# A token of 34 bytes takes 48. So `kvq.paging.BlockPool` keeps one array of codes, one
# of scales and one of zeros, for keys and for values. A sequence is then
#
# ```
# [ block | block | ... | block ][ window: the newest R .. R+G-1 tokens ]
#   in the pool, quantized          its own, full precision
# ```
#
# Attention over it must not differ from attention over `KVCache`, by a single bit.

# %%
index = PrefixIndex(BlockPool(KIVI, 40, block=B, **shape), model="SmolLM2-135M")
pool = index.pool
text = list(range(1000, 1000 + T))  # stand-ins for the ids of the 512 tokens


def serve(tokens, k, v, tenant, index=index):
    """A new sequence that uses what the index has; and how many tokens that were."""
    table, matched = open_sequence(index, tokens, tenant)
    table.append(tokens[matched:], k[None, :, matched:], v[None, :, matched:])
    return table, matched


first, matched = serve(text, K, V, "tenant a")
cache = KVCache(KIVI)
cache.append(K, V)
print(f"found: {matched} tokens; blocks: {first.blocks}; ", end="")
print(f"in the window: {first.window[0].shape[2]} tokens")
assert np.array_equal(first.attend(0, Q), cache.attend(Q))
print("attention over the blocks and over the contiguous cache: the same bits")

# %% [markdown]
# ## A beginning that many share
#
# Eight requests begin with the same instructions: the first 384 tokens of our text.
# Each goes on with 80 tokens of its own (other rows of the same layer, as stand-ins).
# The key of a token depends on every token *before* it and on none after, so the blocks
# of the common beginning are equal in all eight.
#
# **Predict.** One request fills 12 blocks, and its window holds the rest. How many
# blocks do eight of them take if they share?


# %%
def request(n):
    """Tokens, keys and values of request n: 384 tokens in common, 80 of its own."""
    tokens = text[:384] + [5000 + 100 * n + i for i in range(80)]
    rows = np.r_[0:384, (np.arange(80) * 3 + 40 * n) % T]
    return tokens, K[:, rows], V[:, rows]


counted = {}
for name, tenants in (("everyone alone", "abcdefgh"), ("one tenant", "a" * 8)):
    index_8 = PrefixIndex(BlockPool(KIVI, 120, block=B, **shape))
    runs = [serve(*request(n), tenant, index_8) for n, tenant in enumerate(tenants)]
    counted[name] = index_8.pool.used, sum(m for _, m in runs)
    nbytes = counted[name][0] * index_8.pool.block_bytes
    print(f"{name:15} {counted[name][0]:3} blocks, {nbytes / 1024:6.1f} KiB;", end="")
    print(f" {counted[name][1]:,} of {8 * 464:,} tokens were not computed again")
for (table, _), n in zip(runs, range(8), strict=True):
    alone = KVCache(KIVI)
    alone.append(*request(n)[1:])
    assert np.array_equal(table.attend(0, Q), alone.attend(Q))
print("every output is, bit for bit, the one without sharing")
assert counted == {"everyone alone": (96, 0), "one tenant": (12, 7 * 384)}

# %% [markdown]
# Seven eighths of the blocks are gone, and so is the work of computing them. That
# factor is the same at 16 bits and at 2: a block that is not there takes no bytes.
#
# ## Fluent nonsense
#
# Sharing has a price. Somebody reads a block that somebody else wrote, perhaps days
# before, with other options. A block is bytes, and bytes do not say what they are. Take
# the third block of the keys, one of sixteen, and read it under a few wrong
# assumptions. Each of them fits the number of bytes.
#
# **Predict.** How many of them give an error, an infinity or a NaN?


# %%
def reread(block, scheme):
    """The bytes of `block`, read as if `scheme` had written them."""
    shape = scheme.metadata_shape(*block.shape)
    scale, zero = (
        None if a is None else a.reshape(shape) for a in (block.scale, block.zero)
    )
    return replace(block, scheme=scheme, scale=scale, zero=zero).dequantize()


third = K[:, 64:96]
block = kvq.quantize(third, KEY)
integers = Scheme(4, "channel", 32)
readings = {
    "as written": block.dequantize(),
    "scales per token, not per channel": reread(block, VALUE),
    "as if it were rotated": reread(block, replace(KEY, transform="hadamard")),
    "integer codes as nf4 codes": reread(
        kvq.quantize(third, integers), replace(integers, levels="nf4")
    ),
    "bfloat16 numbers as float16": third.astype(numpy_dtype("bfloat16")).view("f2"),
    "the next head's block": block.dequantize()[[1, 2, 0]],
    "another layer's block": real_kv(layer=7).k[:, 64:96],
}
nonsense = {}
print("third block of the keys, read        its error   error of the output   finite")
for name, k_hat in readings.items():
    keys = np.concatenate([K[:, :64], k_hat.astype(np.float32), K[:, 96:]], axis=1)
    out = kvq.attention(Q, keys, V, causal=True)
    nonsense[name] = metrics.output_error(exact, out)
    print(f"{name:37} {np.sqrt(metrics.nmse(third, k_hat)):8.2f}", end="")
    print(f" {nonsense[name]:18.1%} {np.isfinite(out).all()!s:>12}")
    assert np.isfinite(out).all()

# %%
fig, ax = plt.subplots(figsize=(7, 3))
names = list(nonsense)[::-1]
ax.barh(names, [100 * nonsense[n] for n in names], color=plots.COLORS["K"])
ax.set(xlabel="error of the output, %", title="one block of sixteen, read wrongly")
plt.show()
assert nonsense["as written"] < 0.01
assert all(e > 0.2 for name, e in nonsense.items() if name != "as written")

# %% [markdown]
# None. All numbers are finite and of a usual size, and the attention weights sum to
# one. People who met this report fluent text without sense, or a first request that is
# right while every later one, which finds the block, is not. One wrong block of sixteen
# is enough.
#
# Nothing downstream can notice. So whether two requests mean the same block must be
# decided before it is read, from everything that decides its bytes:
#
# | what | because |
# |---|---|
# | all tokens up to here, in order | a key depends on every token before it |
# | model, adapter | other weights make other keys |
# | scheme: bits, levels, group, axis, scales, rotation | the table above |
# | sinks, window | where blocks begin, and what later tokens were computed from |
# | layers, heads, $D$, tokens per block, dtype | which byte is which number |
# | tenant | who may know that the block is there |
#
# ## A key for a block
#
# A key is a digest of all that, chained: the digest of the block before it goes into
# the next. Two things can go wrong here. Python's `hash` is not made for this:

# %%
print("hash((-1,)) == hash((-2,)):", hash((-1,)) == hash((-2,)))
print("hash((5,)) == hash((5 + 2**61 - 1,)):", hash((5,)) == hash((5 + 2**61 - 1,)))

# %% [markdown]
# Who knows the rule can make a prompt with the key of somebody else's. Use sha256, for
# which nobody knows how. And before there is a digest, there are bytes, which must
# differ whenever the fields do:

# %%
naive = {
    "tenant, adapter": [("ab", "c"), ("a", "bc")],
    "a tenant or an adapter": [("a", None), ("aNone",)],
    "tokens": [(1, 23), (12, 3)],
    "a number or a text": [(1,), ("1",)],
}
for what, (a, b) in naive.items():
    same = "".join(map(str, a)) == "".join(map(str, b))
    print(f"{what:23} {a} and {b}: {'the same bytes' if same else 'differ'}")

# %% [markdown]
# **Exercise 2.** Encode fields (None, bool, int or str) so that two different tuples
# never meet. *Hint*: what a reader needs to cut the text apart again is, before each
# field, its type and its length.


# %%
def encode(*fields):
    """A str that differs for any two different tuples of fields."""
    # BEGIN SOLUTION (2 lines)
    parts = [f"{type(x).__name__}:{len(str(x))}:{x}" for x in fields]
    return "".join(parts)
    # END SOLUTION


checks.check_encode(encode)

# %% [markdown]
# With it, a chain of keys. The second block of two prompts holds the same tokens, but
# comes after another beginning: it must have another key.


# %%
def block_keys(tokens, *identity):
    """The key of each block of 32 tokens, each made from the one before."""
    keys, parent = [], None
    for start in range(0, len(tokens), 32):
        data = encode(parent, *identity, *tokens[start : start + 32])
        parent = hashlib.sha256(data.encode()).hexdigest()
        keys.append(parent)
    return keys


one = block_keys(list(range(64)), "tenant a", "SmolLM2", repr(KIVI))
other = block_keys([7, *range(1, 64)], "tenant a", "SmolLM2", repr(KIVI))
print("first block: ", one[0][:12], other[0][:12])
print("second block:", one[1][:12], other[1][:12])
assert one[1] != other[1]
assert encode_key("ab", "c") != encode_key("a", "bc")  # the library's own

# %% [markdown]
# `PrefixIndex` does this, and on a hit it compares the fields themselves as well. Even
# if two digests met, no block would change hands.
#
# ## What an index tells others
#
# The tenant belongs in the key for a second reason. A hit saves work, so it is faster,
# and its speed can be measured from outside. Here is a guesser who shares an index with
# a victim. The secret is one of a thousand numbers in the victim's first block.


# %%
def guess(index, tenant):
    """Numbers whose first block the index already holds, as this tenant sees it."""
    return [
        n
        for n in range(1000)
        if open_sequence(index, [*text[:16], n, *text[17:40]], tenant)[1]
    ]


secret = [*text[:16], 345, *text[17:100]]
for victim, guesser in (("everyone", "everyone"), ("tenant a", "tenant b")):
    shared = PrefixIndex(BlockPool(replace(KIVI, residual=0), 40, block=B, **shape))
    serve(secret, K[:, :100], V[:, :100], victim, shared)
    print(f"{victim} and {guesser}: faster answers for {guess(shared, guesser)}")

# %% [markdown]
# The guesser never saw a byte of the block. The time to the first token would have been
# enough. Such attacks have been carried out on serving systems and on public interfaces
# (Song et al. 2024; Gu et al. 2025), and for vLLM this is CVE-2025-46570. Its remedy is
# the one above: a *cache salt* per tenant in the key of the first block, from where the
# chain carries it on. The salt must come from whoever checked the login, not from the
# request, which could name another tenant's. The price is that each tenant keeps a copy
# of a prompt that all tenants have in common.
#
# ## Shared until somebody writes
#
# Forks of one sequence (beams, several answers to one prompt) share all blocks, the
# last and partly filled one included. A *reference count* per block says how many
# holders it has. Whoever wants to write to a block with more than one first takes a
# copy of it: *copy on write*.

# %%
SIMPLE = Policy(Scheme(4, "token", 64), Scheme(4, "token", 64))  # groups of one token
beams = PrefixIndex(BlockPool(SIMPLE, 100, block=B, **shape))
root = BlockTable(beams, "tenant a")
root.append(text[:400], K[None, :, :400], V[None, :, :400])
four = [root, *(root.fork() for _ in range(3))]
last = root.blocks[-1]
print(f"400 tokens: {len(root.blocks)} blocks, the last one with {400 % B} tokens")
print(f"four beams: {beams.pool.used} blocks; block {last} has", end="")
print(f" {beams.pool.refs[last]} holders")
for n, table in enumerate(four):
    rows = [n]  # each beam goes on with another token
    table.append([9000 + n], K[None, :, rows], V[None, :, rows])
print(f"one token later: {beams.pool.used} blocks; the last ones are", end=" ")
print([table.blocks[-1] for table in four])
assert beams.pool.used == 12 + 4

# %% [markdown]
# Three more blocks, instead of three times 13. The fourth beam found itself alone with
# the old block and wrote to it. A copy must take along everything: codes, scales and
# zeros, of keys and of values, in all layers. A scale left behind is one more way to
# nonsense.
#
# ## Which precision does a shared block have?
#
# A block in the index is quantized. But the newest $R$ tokens of a sequence are in its
# window, in full precision. Now let a long chat have stored 640 tokens, and let a new
# request come with the first 512 of them. The chat has left blocks for nearly all of
# these. Had the request been alone, its newest 128 tokens would be in full precision.
#
# **Predict.** It may take all blocks that are there, which saves the most work. What
# does that do to its answer?

# %%
TWO_BITS = Policy(
    Scheme(2, "channel", 32, "asymmetric"),
    Scheme(2, "token", 32, "asymmetric"),
    residual=128,
    sinks=4,
)
chat = PrefixIndex(BlockPool(TWO_BITS, 40, block=B, **shape))
rows = np.r_[0:T, 0:128]
serve(text + list(range(128)), K[:, rows], V[:, rows], "tenant a", chat)

alone = KVCache(TWO_BITS)
alone.append(K, V)
hit, matched = serve(text, K, V, "tenant a", chat)
# Taking all 15 blocks leaves 28 tokens for the window.
greedy = KVCache(replace(TWO_BITS, residual=28))
greedy.append(K, V)

answers = {
    "alone": (4 + 352, alone.attend(Q)),
    "with what the index gives": (matched, hit.attend(0, Q)),
    "with all blocks there are": (4 + 480, greedy.attend(Q)),
}
errors = {name: metrics.output_error(exact, out) for name, (_, out) in answers.items()}
for name, (tokens, out) in answers.items():
    same = np.array_equal(out, answers["alone"][1])
    print(f"{name:26} {tokens} tokens before the window, ", end="")
    print(f"error {errors[name]:5.1%}", end="")
    print(f", {'the same bits' if same else 'another answer'}")
assert matched == 4 + 352
assert np.array_equal(hit.attend(0, Q), alone.attend(Q))

# %% [markdown]
# With all blocks, the answer depends on what was asked before: the same request gets a
# worse answer after the long chat than without it. So a hit returns only what the
# request would have quantized by itself, in whole blocks, and never all tokens, since
# the last one must be computed to get an answer. Then a hit changes no bit. Fewer than
# $R + B$ tokens that are in the index are computed again. That is the price of the
# window: work, not memory.
#
# The same holds one level up. Later tokens were computed *from* the cached ones. If the
# first request saw them in full precision, and a second one, with another window, sees
# them quantized, their later keys differ. So the window belongs in the key as well,
# and so does the way a prompt is cut into pieces if each piece reads what was quantized
# before.
#
# **Exercise 3.** A request of $T$ tokens has a window of at least $R$ and blocks of $B$
# tokens, which are its quantization groups too. The index holds the first `stored`
# blocks of its tokens. How many of them may it use? (Without sinks.)


# %%
def usable_blocks(T, R, B, stored):
    # BEGIN SOLUTION (2 lines)
    quantized = min(max(T - R, 0), T - 1)  # the last token is always computed
    return min(quantized // B, stored)
    # END SOLUTION


checks.check_usable_blocks(usable_blocks)
blocks_of_hit = usable_blocks(T - 4, R=128, B=32, stored=15)  # 4 tokens are sinks
print(f"the request above: {blocks_of_hit} of 15 blocks, {32 * blocks_of_hit} tokens")
assert 4 + 32 * blocks_of_hit == matched

# %% [markdown]
# ## Three ways to save, together
#
# Paging removes empty room, sharing removes copies, quantization makes smaller what is
# left. Here are all three on one workload: 32 requests of one tenant to a model of 32
# layers with 8 KV heads of 128 channels. Each begins with the same 1,536 tokens and
# goes on with its own; the limit is 8,192 tokens. "4 bits" is symmetric with a 16-bit
# scale per 64 channels, which makes 16 bits 3.76 times smaller. We store it without a
# window and with one of at least 128 tokens in 16 bits.
#
# Tables, blocks and references below are the real ones. Only their contents are those
# of a tiny model, which does not change how many there are.
#
# **Predict.** If paging saves a factor of 4, sharing 3.5 and 4 bits 3.76, how much do
# all three save together?

# %%
MODEL = {"layers": 32, "kv_heads": 8, "head_dim": 128}
TINY = {"layers": 1, "kv_heads": 1, "head_dim": 2}
FP16, INT4 = kvq.PRESETS["fp16"], kvq.PRESETS["int4-token-g64"]
stores = {
    "16 bits": FP16,
    "4 bits": INT4,
    "4 bits, R = 128": replace(INT4, residual=128),
}
own = np.minimum(rng.lognormal(6.0, 0.8, size=32), 8192 - 1536).astype(int)
print(f"{len(own)} requests, 1,536 tokens in common, {own.mean():.0f} own ones (mean)")


def total(policy, paged=True, shared=True):
    """Bytes of the 32 caches: blocks of the pool and windows."""
    if not paged:
        return len(own) * kvq.cache_bytes(policy, **MODEL, tokens=8192)
    index = PrefixIndex(BlockPool(policy, 4000, block=B, **TINY))
    window = 0
    for n, length in enumerate(own):
        tokens = [*range(1536), *range(10_000 * (n + 1), 10_000 * (n + 1) + length)]
        x = np.zeros((1, len(tokens), 2), np.float16)
        table, _ = serve(tokens, x, x, "all" if shared else f"request {n}", index)
        window += table.window[0].shape[2]
    block_bytes = BlockPool(policy, 1, block=B, **MODEL).block_bytes
    per_token = kvq.cache_bytes(FP16, **MODEL, tokens=1)
    return index.pool.used * block_bytes + window * per_token


totals = {
    "one piece each": [total(p, paged=False) for p in stores.values()],
    "blocks": [total(p, shared=False) for p in stores.values()],
    "shared blocks": [total(p) for p in stores.values()],
}
print("GiB" + " " * 14 + "".join(f"{name:>17}" for name in stores))
for name, row in totals.items():
    print(f"{name:17}" + "".join(f"{size / GIB:17.2f}" for size in row))

# %%
fig, ax = plt.subplots(figsize=(7, 3.4))
looks = (("fp16", "", "16 bits"), (4, "//", "4 bits"), (4, "", "4 bits, R = 128"))
for column, (key, hatch, label) in enumerate(looks):
    values = [row[column] / GIB for row in totals.values()]
    look = {"color": plots.COLORS[key], "hatch": hatch, "edgecolor": "white"}
    bars = ax.barh(
        np.arange(3) + 0.27 * (column - 1), values, 0.25, label=label, **look
    )
    ax.bar_label(bars, [f"{v:.2g}" for v in values], padding=3)
ax.set(xscale="log", xlabel="GiB", xlim=(0.3, 80))
ax.set_xticks([0.5, 1, 2, 5, 10, 20], [0.5, 1, 2, 5, 10, 20])
ax.minorticks_off()
ax.set_yticks(range(3), list(totals))
ax.invert_yaxis()
ax.legend(loc="lower right")
plt.show()

# %%
whole, in_blocks, shared = totals.values()
factors = whole[0] / in_blocks[0], in_blocks[0] / shared[0]
print(f"paging {factors[0]:.2f}, sharing {factors[1]:.2f}")
for column, name in ((1, "4 bits"), (2, "4 bits, R = 128")):
    saved = [row[0] / row[column] for row in totals.values()]
    together, product = whole[0] / shared[column], np.prod(factors) * saved[0]
    print(f"{name:15} saves {saved[0]:.2f} in one piece, ", end="")
    print(f"{saved[1]:.2f} in blocks, {saved[2]:.2f} in shared blocks; ", end="")
    print(f"all three {together:.1f}, the product is {product:.1f}")
    if column == 1:
        assert np.isclose(together, product)

# %% [markdown]
# They save different things, so their factors multiply: without a window, exactly. With
# a window they do not. The window is full precision, and each request has its own.
# Sharing cannot merge it, and 4 bits cannot shrink it. The more the other two save, the
# larger is its part of what remains.
#
# They differ in what they cost, too. Paging costs a table, and half a block per
# sequence. Sharing costs a key that must not be wrong. Quantization is the only one
# that changes what comes out.
#
# ## Takeaway

# %%
windowed = whole[0] / shared[2]
three = *factors, whole[0] / whole[1]
print("paging x{:.1f}, sharing x{:.1f}, 4 bits x{:.2f}".format(*three), end="")
print(f": together x{whole[0] / shared[1]:.0f}, with the window x{windowed:.0f}")
misread = [100 * e for name, e in nonsense.items() if name != "as written"]
print(f"one block of 16 misread: error {min(misread):.0f} to {max(misread):.0f} %")
assert [round(float(f), 2) for f in three] == [3.92, 3.48, 3.76]
assert (round(whole[0] / shared[1]), round(windowed)) == (51, 32)
assert (round(min(misread)), round(max(misread))) == (22, 189)

# %% [markdown]
# > **For 32 requests that share 1,536 of about 2,100 tokens, blocks save a factor of
# > 3.9 over reserving 8,192 tokens each, sharing 3.5 more, and 4 bits 3.76 more: 51
# > together, but 32 with a full-precision window of 128 tokens, which is never shared.
# > A block read with the wrong format gives no error: one of sixteen key blocks puts
# > the output of layer 15 of SmolLM2-135M 22 % to 189 % off, in finite numbers.**
#
# ## Further reading
#
# - Kwon et al., *Efficient Memory Management for Large Language Model Serving with
#   PagedAttention*, 2023, arXiv 2309.06180: blocks, tables, copy on write.
# - Zheng et al., *SGLang: Efficient Execution of Structured Language Model Programs*,
#   2023, arXiv 2312.07104: prefixes in a tree, least recently used leaves go first.
# - Song et al., *The Early Bird Catches the Leak: Unveiling Timing Side Channels in LLM
#   Serving Systems*, 2024, arXiv 2409.20002.
# - Gu et al., *Auditing Prompt Caching in Language Model APIs*, 2025, arXiv 2502.07776.
# - vLLM: CVE-2025-46570, the timing of hits, and
#   [pull request 17045](https://github.com/vllm-project/vllm/pull/17045), the salt.
# - The traps, where they were found:
#   [vLLM issue 54338](https://github.com/vllm-project/vllm/issues/54338), bfloat16 read
#   as float16;
#   [SGLang pull request 24198](https://github.com/sgl-project/sglang/pull/24198), hits
#   without their scales;
#   [vLLM issue 44701](https://github.com/vllm-project/vllm/issues/44701), a salt and an
#   adapter with one name.
