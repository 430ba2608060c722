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
# # Tensor cores: store the cache in the order of the product
#
# A tensor core multiplies 16 x 16 numbers by 16 x 8 in one instruction, if each lane of
# a warp holds the right ones. You will find out which lane must hold which number,
# store the codes of a cache in exactly that order, take the scales out of the inner
# loop, and count what is left: eight times fewer instructions per byte than the best
# kernel so far.
#
# ![which lane of a warp loads which codes of a page](../figures/page.png)
#
# **What you will do**
#
# - decide which matrix the cache is, and which the queries are;
# - write down which lane holds which element, and multiply with lanes alone;
# - read the 16 bytes of a lane out of a page, and turn codes into numbers;
# - multiply the scales into queries and weights instead of into codes;
# - keep a large scale from overflowing, with a power of two;
# - run the kernel and hold its instructions against the one before it.
#
# **What you need**: the lessons *Decode attention* and *Packing bits*.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvq
from kvq import KVCache, Policy, Scheme, checks, hardware, plots
from kvq.kernels import decode, pages, teach
from kvq.kernels.budgets import budgets, tensor_cores
from kvq.kernels.launch import ptxsim

plt.style.use(plots.STYLE)

H_kv, ratio, T, D, G = 2, 4, 512, 128, 64
H_q = H_kv * ratio
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, H_kv, T, D)).astype(np.float16)
k[:, :, 5] *= 20  # an outlier channel
q = rng.standard_normal((H_q, 1, D)).astype(np.float16)
policy = Policy(
    Scheme(4, "channel", G, "asymmetric"), Scheme(4, "token", G, "asymmetric")
)
cache = KVCache(policy)
cache.append(k, v)
packed = cache.nbytes
print(f"{H_q} query heads on {H_kv} KV heads, {T} tokens, D = {D}: {packed:,} bytes")

# %% [markdown]
# ## One instruction
#
# `mma.m16n8k16` is an instruction of a whole warp:
#
# $$C_{16 \times 8} \mathrel{+}= A_{16 \times 16} \, B_{16 \times 8} .$$
#
# $A$ and $B$ are in binary16, $C$ in float32. A decode step has two products, $S = q
# K^\top$ and $O = P V$. The usual way makes the queries the rows of $A$. The other way
# swaps the two:
#
# $$S^\top = K q^\top, \qquad O^\top = V^\top P^\top ,$$
#
# and now the cache is $A$, 16 tokens at a time, and the query heads of a group are the
# 8 columns of $B$.
#
# **Predict.** Four query heads share a KV head. What part of each product is of use if
# they are rows of $A$, and what part if they are columns of $B$?
#
# **Exercise 1.** Count the instructions for the scores of one KV head: all $T$ tokens,
# all $D$ channels, $h$ query heads. A side that is not filled costs as much as a full
# one.


# %%
def products(T, D, h, cache_is):
    """mma instructions for S; cache_is: "A" or "B", the part that the keys play."""
    # BEGIN SOLUTION (3 lines)
    tokens, heads = (16, 8) if cache_is == "A" else (8, 16)
    blocks = -(-T // tokens) * -(-h // heads)
    return blocks * -(-D // 16)
    # END SOLUTION


checks.check_products(products)

# %%
print("query heads   instructions for 64 tokens       of use")
print("of a group    keys are B    keys are A    keys are B   keys are A")
for h in (1, 3, 4, 8, 9, 16):
    count = [products(64, D, h, part) for part in "BA"]
    useful = [64 * D * h / (16 * 8 * 16 * n) for n in count]
    print(f"{h:10} {count[0]:13} {count[1]:13}", end="")
    print(f"{useful[0]:14.0%} {useful[1]:12.0%}")

# %% [markdown]
# Up to 8 query heads, the swap halves the instructions. Most models have 4 to 8 query
# heads in a group; one with a KV head for each query head wastes seven of eight columns
# and still needs half of the instructions. From 9 to 16 heads the two are equal.
#
# ## Who holds what
#
# No lane holds a whole matrix. With $g = \left\lfloor \text{lane} / 4 \right\rfloor$
# and $t = \text{lane} \bmod 4$, a lane holds of $A$ four registers of two binary16
# numbers each, its *fragment*:
#
# | register | row | columns (low half, high half) |
# |---|---|---|
# | 0 | $g$ | $2t$, $2t + 1$ |
# | 1 | $g + 8$ | $2t$, $2t + 1$ |
# | 2 | $g$ | $2t + 8$, $2t + 9$ |
# | 3 | $g + 8$ | $2t + 8$, $2t + 9$ |
#
# **Exercise 2.** Turn the table round: which lane holds the element in row $r$ and
# column $c$, in which register, in which half?


# %%
def place(r, c):
    """(lane, register, half) of element (r, c) of A, 0 <= r, c < 16."""
    # BEGIN SOLUTION (3 lines)
    lane = 4 * (r % 8) + c % 8 // 2
    register = r // 8 + 2 * (c // 8)
    return lane, register, c % 2
    # END SOLUTION


checks.check_fragment_place(place)

# %% [markdown]
# $B$ is the same for a matrix of 8 rows, turned: the lane of element $(c, n)$ is the
# one that would hold row $n$, column $c$ of $A$. $C$ has rows $g$ and $g + 8$, columns
# $2t$ and $2t + 1$. Now a warp can multiply: the instruction is a function of what 32
# lanes hold, and leaves what 32 lanes hold.

# %%
square = [(r, c) for r in range(16) for c in range(16)]


def fragments(A):
    """(32 lanes, 4 registers, 2 halves) of A (16, 16)."""
    held = np.empty((32, 4, 2), A.dtype)
    for r, c in square:
        held[place(r, c)] = A[r, c]
    return held


def mma(a, b):
    """(32, 4): what each lane holds of C = A B. a (32, 4, 2), b (32, 2, 2)."""
    A = np.array([a[place(r, c)] for r, c in square], float).reshape(16, 16)
    B = np.empty((16, 8))
    for c, n in np.ndindex(16, 8):
        lane, register, half = place(n, c)
        B[c, n] = b[lane, register // 2, half]
    C = A @ B
    g, t = np.divmod(np.arange(32), 4)
    return np.stack([C[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)], axis=1)


K = k[0, :16, :16]  # 16 tokens, 16 channels
Q = np.zeros((16, 16), np.float16)
Q[:ratio] = q[:ratio, 0, :16]  # 4 query heads, 4 empty columns
held = mma(fragments(K), fragments(Q)[:, ::2])  # of 8 rows: registers 0 and 2
S = K.astype(float) @ Q[:8].astype(float).T  # (16 tokens, 8 heads)
g, t = np.divmod(np.arange(32), 4)
assert np.allclose(held[:, 0], S[g, 2 * t])
assert np.allclose(held[:, 3], S[g + 8, 2 * t + 1])
print("scores of 16 tokens and 8 heads, in the lanes where the hardware leaves them")

# %% [markdown]
# ## A page
#
# In the usual layout, a token's channels lie side by side. A lane needs two tokens, and
# of each of them channels 2t, 2t + 1, 2t + 8, 2t + 9: bits from all over the place,
# which kernels gather through shared memory or exchange by shuffles, for every byte
# of the cache and every step.
#
# But nobody else reads the cache. So store it the way it will be held. A *page* is 64
# tokens of one KV head: `code_places` says where each code is.
#
# **Predict.** A fragment of 4-bit codes has 8 codes, 4 bytes. How many fragments can a
# lane fetch with one load of 16 bytes, and how many bytes does the warp then read side
# by side?

# %%
where = pages.code_places(64, D, 4)  # the lowest bit of each code, (tokens, channels)
lane = where // 128 % 32  # 16 bytes, 128 bits, for each of 32 lanes
mine = np.argwhere((lane == 9) & (where < 128 * 32))
print(f"lane 9, first load: {len(mine)} codes, {len(mine) * 4 // 8} bytes")
print(f"tokens {np.unique(mine[:, 0]).tolist()}")
print(f"channels {np.unique(mine[:, 1]).tolist()}")
for r, c in square:
    assert lane[r, c] == place(r, c)[0]

# %% [markdown]
# That is the figure above: a load gives each lane its part of four products. The 32
# loads of a warp are 512 neighbouring bytes, which is as good as a request to memory
# can be. Within a word, register $i$ has its low half in bits $4i$ to $4i + 3$ and its
# high half 16 bits further on. One instruction, `LOP3`, computes
#
#     w & 0x000f000f | 0x64006400
#
# It keeps the two codes of register 0 and writes the exponent in front of both: the
# word is two binary16 numbers $1024 + \text{code}$. For register 1, the mask
# `0x00f000f0` leaves the codes four bits higher, where they count 16 times: $1024 +
# 16\,\text{code}$. To shift them down first would be one more instruction. But the 1024
# is taken off by a multiply-add anyway, and that can have another factor.
#
# **Exercise 3.** Which factor and which constant turn $1024 + 2^n\,\text{code}$ into
# the code?


# %%
def undo_magic(n):
    """(factor, constant): factor * (1024 + 2^n code) + constant = code."""
    # BEGIN SOLUTION (1 line)
    return 2.0**-n, -(2.0 ** (10 - n))
    # END SOLUTION


checks.check_undo_magic(undo_magic)


# %%
def registers(w):
    """(4, 2) numbers of a fragment from its 32-bit word of 4-bit codes."""
    out = []
    for i in range(4):
        shifted = w >> 8 * (i // 2)  # registers 2 and 3: one shift for both
        n = 4 * (i % 2)
        magic = np.array([shifted & (0x000F000F << n) | 0x64006400], np.uint32)
        factor, constant = undo_magic(n)
        out.append(magic.view(np.float16) * np.float16(factor) + np.float16(constant))
    return np.array(out)


# %% [markdown]
# Now everything at once. Quantize, write pages, and let each lane turn its first 16
# bytes into four fragments. No lane needs anything from another one.

# %%
K, V = kvq.quantize(k, policy.key), kvq.quantize(v, policy.value)
layout = pages.PageLayout(policy.key, policy.value, D)
sides = [(x.unpack(), x.scale, x.zero) for x in (K, V)]
page = layout.to_pages(*sides)[0, 0]  # KV head 0, its first 64 tokens
codes = page[sum(layout.head) :]  # behind the scales and zeros of the keys

held = np.empty((4, 32, 4, 2))  # of four squares of 16 x 16 numbers
for lane in range(32):
    for j, w in enumerate(codes[4 * lane : 4 * lane + 4].tolist()):
        held[j, lane] = registers(w)
for j in range(4):
    assert np.array_equal(held[j], fragments(K.unpack()[0, :16, 16 * j : 16 * j + 16]))
print(f"a page: {4 * layout.words:,} bytes; its first 512 bytes of codes are 4 squares")

# %% [markdown]
# ## Scales: not one multiplication per element
#
# The products run over levels, and the cache is $\hat k_{tc} = s_c\, \ell_{tc} + z_c$,
# with a scale for each channel and $G$ tokens. To dequantize every element would be one
# multiply-add for each two of them. But
#
# $$\sum_c q_c\, (s_c\, \ell_{tc} + z_c) = \sum_c (q_c s_c)\, \ell_{tc}
# + \sum_c q_c z_c ,$$
#
# so the scales go into the *query*, once for the $G$ tokens of a group, and the zeros
# are one number for all of them. The values have a scale for each token and group of
# channels, and the same trick goes into the *weights*:
#
# $$o_c = \sum_t p_t\, (s_{tj}\, \ell_{tc} + z_{tj}) = \sum_t (p_t s_{tj})\, \ell_{tc}
# + \sum_t p_t z_{tj} , \qquad j = \left\lfloor c / G \right\rfloor .$$
#
# **Exercise 4.** Write the second form for the values.


# %%
def folded_output(p, levels, s, z):
    """o (D,) from weights p (T,), levels (T, D), and s, z (T, n groups of channels)."""
    # BEGIN SOLUTION (3 lines)
    levels = levels.reshape(len(p), s.shape[1], -1)
    o = np.einsum("tj,tjc->jc", p[:, None] * s, levels)
    return (o + (p @ z)[:, None]).ravel()
    # END SOLUTION


checks.check_folded_output(folded_output)

# %% [markdown]
# **Predict.** In a page of 64 tokens with D = 128, how many instructions does a lane
# spend on the scales of the keys, if they are multiplied into the codes, and if they
# are multiplied into the queries? (An instruction multiplies two binary16 numbers. The
# queries are 8 columns, $B$.)

# %%
into_codes = 64 * D // 32 // 2
into_queries = 8 * D // 32 // 2
print(f"into the codes: {into_codes} instructions, into the queries: {into_queries}")
assert into_codes == 8 * into_queries

# %% [markdown]
# ## The price: a product that overflows
#
# binary16 ends at 65,504. Keys with an outlier channel have a large scale there, and
# $q_c s_c$ may be too large where neither $q_c$ nor $s_c$ is. An infinity meets a code
# of 0, and one NaN spoils the whole output:

# %%
q_c, s_c = np.float16(90), np.float16(1200)
with np.errstate(over="ignore", invalid="ignore"):
    folded = q_c * s_c
    print(f"{q_c} * {s_c} = {folded}, times a code of 0: {folded * np.float16(0)}")

# %% [markdown]
# A power of two costs nothing: multiplying by it changes the exponent alone, so nothing
# is rounded within the range of binary16. The kernel multiplies the queries by the
# power of two that brings the largest product $\max|q| \cdot \max s$ into $[2^{13},
# 2^{14})$, and divides the scores by it, in float32, where the softmax scale is
# multiplied in anyway.
#
# **Exercise 5.** Find the power of two.


# %%
def power_for(x, n):
    """The power of two that takes x > 0 into [2^(n-1), 2^n)."""
    # BEGIN SOLUTION (2 lines)
    _, exponent = np.frexp(x)  # x = m * 2^exponent, 1/2 <= m < 1
    return 2.0 ** (n - exponent)
    # END SOLUTION


checks.check_power_for(power_for)

# %%
factor = power_for(float(q_c) * float(s_c), 14)
folded = np.float16(q_c * factor) * s_c
print(f"factor {factor}: {folded}, times a code of 0: {folded * np.float16(0)}")
print(f"back in float32: {np.float32(folded) / factor:,.0f}")
assert np.isfinite(folded)

# %% [markdown]
# (Its small end is a limit as well: products more than $2^{28}$ times smaller than the
# largest one lose digits.) What is left is the rounding of $q_c s_c$ itself to 11 bits,
# and of $p_t s_t$. The earlier kernels computed in float32. This one agrees with the
# reference as products of binary16 do.
#
# ## The kernel
#
# Here is the loop over channels of `scores`, and how it turns 4 bits into a fragment.
# It is all that happens to a key: a load for 32 codes, a shift for 8, an `LOP3` and a
# multiply-add for two, a product for 256.

# %%
branch = teach.excerpt("decode/fragments.cuh", "} else if constexpr (bits == 4) {")
print("\n".join(branch.splitlines()[:6]))
print()
print(teach.excerpt("decode/attend.cuh", "inline void scores"))

# %%
exact = kvq.attention(q, k, v)
full = np.abs(exact - cache.attend(q)).max()
print(f"largest error of the 4-bit cache itself: {full:.3f}")
for version in ("v3", "v4"):
    todo, _ = decode.launches(q, cache, version)
    if reason := ptxsim.missing(todo):
        print(f"{version} does not run here: {reason}")
        continue
    out, reports = teach.run("decode", version, q, cache)
    work = 32 * sum(report.instructions for report in reports) / packed
    mma_count = sum(report.mix["mma"] for report in reports)
    error = np.abs(out - cache.attend(q)).max()
    print(f"{version}: {work:4.1f} PTX instructions per packed byte, ", end="")
    print(f"{mma_count} mma, {error:.0e} from the reference")
    assert error < full / 20

# %% [markdown]
# The products you counted, once for $K$ and once for $V$, and 25 % more: the sums of
# the weights and the products with the zeros are `mma`, too.

# %%
two = 2 * H_kv * products(T, D, ratio, "A")
print(f"for q K and P V: {two}, all: {two * 5 // 4}")

# %% [markdown]
# ## In machine code
#
# PTX is not what runs. The next numbers are from the machine code for `sm_90` (H100,
# H200), as this project records it: counted, not timed. For v4 they are the main loop,
# which takes 64 tokens; for the older kernel, everything that a warp executes on a
# short context.
#
# **Predict.** v3 needs about 27 instructions per byte at 4 bits. What will v4 need? And
# is it more or fewer at 2 bits than at 8?

# %%
before = {b: budgets(90)[0]["decode_v3", b]["instructions_per_byte"] for b in (8, 4, 2)}
setting = dict(zip(tensor_cores.KEY[2:7], tensor_cores.SETTINGS[0], strict=True))
rows = plots.pick(tensor_cores.recorded()[0], kernel="decode_v4", arch=90, **setting)
after = {row["bits"]: row["instructions_per_byte"] for row in rows}
print("instructions per byte   v3     v4")
for b in (8, 4, 2):
    print(f"{b} bits {before[b]:20.1f} {after[b]:6.2f}")
for row in rows:
    per_number = 32 * row["loop_instructions"] / (2 * 64 * D)
    print(f"{row['bits']} bits: {per_number:.2f} instructions per number", end="")
    print(f", {row['loop_barriers']} barriers, {row['spills']} spills")

# %%
fig, ax = plt.subplots(figsize=(8.5, 4.2))
place_of = {8: 0, 4: 1, 2: 2}
looks = {"v3": (before, "0.75", -0.2), "v4": (after, "#0072B2", 0.2)}
for name, (cost, color, shift) in looks.items():
    x = [place_of[b] + shift for b in cost]
    ax.bar(x, cost.values(), 0.36, color=color, label=f"decode {name}")
    for at, value in zip(x, cost.values(), strict=True):
        ax.text(at, value * 1.04, f"{value:.1f}", ha="center")
for card in ("H200", "A100-80GB", "RTX-4090"):
    most = hardware.device(card).instructions_per_byte
    ax.axhline(most, ls="--", lw=1, color="0.4")
    ax.text(2.55, most, f"{card}: {most:.1f}", va="center", size=9)
ax.set(yscale="log", ylim=(1, 90), xlim=(-0.5, 2.5), ylabel="instructions per byte")
ax.set_xticks(list(place_of.values()), [f"{b} bits" for b in place_of])
ax.legend(loc="upper left")
ax.grid(axis="x", visible=False)
plt.show()

# %% [markdown]
# Below a dashed line, that card can start the instructions in the time that its memory
# takes to deliver the bytes. v3 is below that of the RTX 4090 alone, and not at 2 bits.
# v4 is below all three at every bit width, so memory should be its limit. *Should*: no
# GPU has run this kernel yet, and instructions are not the only thing that can be late.
# A warp that waits for its load starts nothing. The next version, v5, copies the pages
# to come into shared memory while it works on the present one, for a few instructions
# more.
#
# Fewer bits need *more* instructions per byte: an element costs about the same at any
# width, and a byte holds more of them. (At 2 bits it costs less, because the kernel
# leaves the 1 in $1 + \text{code} / 4^k$ and takes it off the sums at the end.)

# %%
print(f"4 bits: {before[4]:.0f} -> {after[4]:.1f} instructions per byte")
assert (round(before[4]), round(after[4], 1)) == (27, 3.3)
assert all(after[b] < hardware.device("H200").instructions_per_byte for b in after)

# %% [markdown]
# ## Takeaway
#
# > **With the cache as the left matrix, stored in the order in which lanes hold it, and
# > with scales folded into queries and weights, a decode step over 4 bits needs 3.3
# > machine instructions per byte, where the kernel before it needs 27 (sm_90, D = 128,
# > G = 64, 4 query heads per KV head; counted, not timed). An H200 can start 7.8 in the
# > time of a byte.**
#
# ## What to read next
#
# The next lesson, *Fast on a CPU*, plays the same game on the machine in front of you.
# *Predict the bandwidth*, after it, makes a model of the numbers above: which limit
# binds, for which bits, heads, device and context.
#
# - NVIDIA, *PTX ISA*, "Matrix Fragments for mma.m16n8k16": the table above.
# - Kim et al., *Who Says Elephants Can't Run*, 2022, arXiv 2211.10017: numbers by
#   writing an exponent.
# - Frantar et al., *MARLIN*, 2024, arXiv 2408.11743: weights of 4 bits stored in the
#   order of fragments.
# - `kernels/pages.py`, `kernels/decode/fragments.cuh`, `kernels/decode/attend.cuh`: all
#   of it.
