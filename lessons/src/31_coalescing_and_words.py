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
# # Coalescing: the same bytes, asked for in another order
#
# A cache kernel does little arithmetic; what it costs is memory. Memory does not move
# bytes, it moves sectors of 32 bytes, and how many depends on which thread asks for
# what. You will count sectors and bank conflicts by hand, predict them for real
# kernels, and find the line of a kernel that wastes seven eighths of its traffic.
#
# **What you will do**
#
# - count the sectors of a warp's request, for threads side by side and far apart;
# - see what a thread that reads 16 bytes at once changes;
# - count the wavefronts of shared memory, and remove a conflict by one wasted column;
# - predict the traffic of two packing kernels and compare with what is counted;
# - read the counters beside the source, worst line first.
#
# **What you need**: NumPy, threads and blocks, and packed words.

# %%
import matplotlib.pyplot as plt
import numpy as np

from kvq import Scheme, checks, plots
from kvq.kernels import teach

plt.style.use(plots.STYLE)

# %% [markdown]
# ## A request of a warp
#
# The 32 threads of a *warp* execute an instruction together. When it is a load, the
# warp hands 32 addresses to the memory at once. The memory finds the sectors that they
# touch, and moves each of them once. With byte addresses $a_i$ and a size of $w$ bytes
# (a power of two, and $a_i$ a multiple of it),
#
# $$\text{sectors} = \left|\left\{
# \left\lfloor \frac{a_i}{32} \right\rfloor \right\}\right|, \qquad
# \text{ideal} = \left\lceil \frac{\text{bytes asked for}}{32} \right\rceil ,$$
#
# where bytes that several threads ask for count once.
#
# **Predict.** Each thread loads a number of 4 bytes. How many sectors if thread $i$
# asks for number $i$? For number $2i$? For number $128\,i$? All for number 0?
#
# **Exercise 1.** Count the sectors of one request.


# %%
def sectors(addresses, width):
    """(sectors, ideal) of a request; byte addresses (32,), multiples of width."""
    # BEGIN SOLUTION (3 lines)
    touched = np.unique(addresses // 32)
    ideal = -(-len(np.unique(addresses)) * width // 32)
    return len(touched), ideal
    # END SOLUTION


checks.check_sectors(sectors)

# %%
i = np.arange(32)
print("thread i asks for     sectors   ideal")
for name, number in {"i": i, "2 i": 2 * i, "128 i": 128 * i, "0": 0 * i}.items():
    print("number {:14} {:7} {:7}".format(name, *sectors(4 * number, 4)))

# %% [markdown]
# Side by side is ideal: 128 bytes, 4 sectors. That is called *coalesced*. With a stride
# of 128 numbers, which is what a warp does when its threads walk down a column of keys
# with $D = 128$, each thread pulls in a sector of its own and uses an eighth of it.
#
# Now let each thread load 16 bytes with one instruction, four float32 or eight float16.
# If neighbouring threads have neighbouring pieces, a request asks for 512 bytes.

# %%
for width in (2, 4, 8, 16):
    asked = 32 * width
    print(
        f"{width:2} bytes a thread: {asked:3} bytes asked, {sectors(width * i, width)}"
    )
assert sectors(16 * i, 16) == (16, 16)

# %% [markdown]
# The sectors per byte are the same for 4, 8 and 16. What falls is the number of
# instructions per byte, and with it the number of addresses to compute.
#
# ## A kernel with a thread per word
#
# The first packing kernel has a thread per word of codes. At 4 bits a word has 8 codes,
# so thread $i$ reads the numbers $8i, \dots, 8i + 7$, one after the other, each a
# float16 of 2 bytes.
#
# **Predict.** In each of those 8 loads: how many sectors for 32 threads? And the ideal?
#
# **Exercise 2.** Write the addresses of load $j$ for all 32 threads.


# %%
def word_addresses(j, b):
    """Byte addresses (32,) of the j-th float16 that thread i reads for word i."""
    # BEGIN SOLUTION (2 lines)
    per_word = 32 // b
    return 2 * (per_word * np.arange(32) + j)
    # END SOLUTION


checks.check_word_addresses(word_addresses)

# %%
for b in (8, 4, 2):
    total = np.sum([sectors(word_addresses(j, b), 2) for j in range(32 // b)], axis=0)
    print(f"{b} bits: {32 // b:2} loads, {total[0]:3} sectors, ideal {total[1]}")

# %% [markdown]
# Every load touches all of the sectors, and uses one number in each. At 4 bits, eight
# times the traffic that would do. The fewer the bits, the worse.
#
# Does the real kernel do this? It has other loads besides (scales, zeros, and x a
# second time, for the extremes). We run it on the PTX machine and count. The second
# version reads 16 bytes per thread, keeps what it has read in registers, and writes
# words that neighbouring threads make together.
#
# **Predict.** By which factor does the traffic fall from v1 to v2 at 4 bits?

# %%
x = np.random.default_rng(0).standard_normal((2, 64, 128)).astype(np.float16)
traffic = {}


def moved(op, version, *inputs):
    """(bytes moved per number, sectors / ideal) of all kernels of an operation."""
    _, reports = teach.run(op, version, *inputs)
    counted = sum(r.sectors for r in reports)
    ideal = sum(r.ideal_sectors for r in reports)
    return 32 * counted / x.size, counted / ideal


print("pack, per token, groups of 64     v1: bytes, ratio    v2: bytes, ratio")
for b in (8, 4, 3, 2):
    scheme = Scheme(b, "token", 64, "asymmetric")
    for version in ("v1", "v2"):
        traffic[b, version] = moved("pack", version, x, scheme)
    row = b, *traffic[b, "v1"], *traffic[b, "v2"]
    print("{} bits {:38.1f} {:6.2f} {:12.2f} {:6.2f}".format(*row))

# %%
bits = (8, 4, 3, 2)
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for version, marker, color in (("v1", "o", "#D55E00"), ("v2", "s", "#0072B2")):
    y = [traffic[b, version][0] for b in bits]
    name = {"v1": "v1, a thread per word", "v2": "v2, 16 bytes per thread"}[version]
    ax.plot(range(4), y, marker + "-", color=color, label=name)
needed = [2 + b / 8 + 4 / 64 for b in bits]
ax.plot(range(4), needed, "^:", color=plots.COLORS["predicted"], label="needed")
ax.set(yscale="log", xlabel="bits per code", ylabel="bytes moved per number")
ax.set_xticks(range(4), bits)
ax.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
ax.minorticks_off()
ax.legend(loc="center left")
ax.set_title("packing float16 keys: asked of memory, counted per number")
plt.show()

# %% [markdown]
# v2 moves what must be moved, plus the scales and zeros that several requests share. v1
# asks for twenty times as much. On a GPU a cache would catch a part of that, which is
# why such kernels are slow and not hopeless; the machine here counts what is asked for.
#
# ## Which line?
#
# The counters belong to instructions, and instructions to lines of the source. So the
# machine can say which line wastes the most: `kvq kernels explain pack/v1` prints the
# whole source that way. Here are the worst lines only.


# %%
def worst_lines(reports, n=3):
    """(excess sectors, file, line) of the n lines that waste most."""
    found = [
        (counts.sectors - counts.ideal_sectors, *place)
        for report in reports
        for place, counts in report.places.items()
    ]
    return sorted(found, reverse=True)[:n]


_, reports = teach.run("pack", "v1", x, Scheme(4, "token", 64, "asymmetric"))
for excess, file, line in worst_lines(reports):
    source = (teach.KERNELS / file).read_text().splitlines()[line - 1].strip()
    print(f"{excess:6} sectors too many: {file}:{line}\n        {source}")
excess, file, line = worst_lines(reports)[0]
assert excess > 0

# %% [markdown]
# ## Shared memory has banks
#
# Threads of a block exchange numbers through shared memory. It is fast, and it has its
# own rule: 32 *banks*, each 4 bytes wide, and a bank delivers one word at a time. Word
# $w$ is in bank $w \bmod 32$. If threads of a warp ask for different words of the same
# bank, the request takes several passes, called *wavefronts*:
#
# $$\text{wavefronts} = \max_{\text{bank}}
# \left|\left\{ w_i : w_i \bmod 32 = \text{bank} \right\}\right| .$$
#
# **Exercise 3.** Count them. Threads that ask for the same word share it.


# %%
def wavefronts(words):
    """Passes of a warp's request for words (32,) of 4 bytes in shared memory."""
    # BEGIN SOLUTION (2 lines)
    bank = np.unique(words) % 32
    return np.bincount(bank).max()
    # END SOLUTION


checks.check_wavefronts(wavefronts)

# %% [markdown]
# Typical: a block keeps a tile of 32 by 32 numbers. One warp writes it row by row,
# another reads it column by column.
#
# **Predict.** How many wavefronts does the column take? And if every row is one word
# longer than it need be?

# %%
for width in (32, 33, 36):
    row, column = wavefronts(i), wavefronts(width * i)
    print(f"rows of {width} words: {row} wavefront for a row, {column:2} for a column")
assert wavefronts(32 * i) == 32
assert wavefronts(33 * i) == 1

# %% [markdown]
# One wasted word per row, and 32 passes become 1. The packing kernel for keys per
# channel pads its tables of scales for this reason:

# %%
padded = teach.excerpt("pack/v2_one_pass.cu", "// A row of these is longer")
print("\n".join(padded.splitlines()[:2]))
for b in (8, 4, 3, 2):
    _, (report,) = teach.run("pack", "v2", x, Scheme(b, "channel", 32, "asymmetric"))
    print(f"{b} bits per channel: {report.wavefronts} wavefronts, ", end="")
    print(f"ideal {report.ideal_wavefronts}")
    assert report.wavefronts <= 1.1 * report.ideal_wavefronts

# %% [markdown]
# ## Ragged rows
#
# Sectors are 32 bytes long and begin at multiples of 32. What if a row of codes is not?
#
# **Exercise 4.** A row of $D = 80$ codes of 4 bits is 40 bytes. A warp reads row $r$,
# one word per thread, so 10 threads work. How many sectors does it touch for $r = 0, 1,
# 2, 3$? Write the count for any row.


# %%
def sectors_of_row(r, row_bytes):
    """Sectors that row r touches; rows lie one after the other from address 0."""
    # BEGIN SOLUTION (2 lines)
    first, last = r * row_bytes, (r + 1) * row_bytes - 1
    return last // 32 - first // 32 + 1
    # END SOLUTION


checks.check_sectors_of_row(sectors_of_row)

# %%
for D in (64, 80, 96, 128):
    count = [sectors_of_row(r, D // 2) for r in range(8)]
    ratio = sum(count) * 32 / (8 * D // 2)
    print(f"D = {D:3}: rows of {D // 2} bytes, {count} sectors, {ratio:.2f} x ideal")

# %% [markdown]
# A warp that reads one row at a time wastes a part of its sectors when the rows are not
# whole sectors. The remedy is the same again: let the warp read the rows as one long
# piece. That is why the second version of each kernel gives a warp consecutive words,
# wherever the rows begin and end.

# %%
v1, v2 = traffic[4, "v1"], traffic[4, "v2"]
print(f"4 bits: {v1[0]:.0f} -> {v2[0]:.2f} bytes per number, ", end="")
print(f"sectors / ideal {v1[1]:.1f} -> {v2[1]:.2f}")
assert (round(v1[0]), round(v2[0], 2), round(v2[1], 2)) == (51, 2.75, 1.0)

# %% [markdown]
# ## Takeaway
#
# > **Packing float16 keys to 4 bits asks memory for 51 bytes per number with a thread
# > per word, and for 2.75 with 16 bytes per thread, at the same arithmetic (per token,
# > groups of 64, D = 128). Threads that stand side by side must ask for what lies side
# > by side.**
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Best Practices Guide*, "Coalesced Access to Global Memory" and
#   "Shared Memory and Memory Banks".
# - NVIDIA, *Nsight Compute documentation*, "Memory Tables": sectors and wavefronts as
#   the hardware counts them.
# - `kernels/ptxsim/count.py`: the model that counts here, in thirty lines.
