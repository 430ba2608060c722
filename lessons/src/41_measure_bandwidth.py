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
# # Measure the bandwidth: your prediction, your machine
#
# A prediction is worth what a clock says about it. You will predict how long a decode
# step takes on the machine in front of you, from the bytes that it moves, measure five
# ways to take it, and find the context length from which a 4-bit cache is faster than
# float32, if there is one.
#
# **What you will do**
#
# - sum up timings so that one bad round does not matter;
# - measure what your memory delivers;
# - count the bytes that five ways to attend move, and predict their times;
# - measure them, side by side, and see which of them wait for memory at all;
# - find the crossover, and hold it beside your guess;
# - put your numbers beside recorded ones, of CPUs and of GPUs.
#
# **What you need**: the lesson *Predict the bandwidth*, Numba, and a machine that does
# little else for a minute. The times below are yours, so no two runs print the same,
# and nothing that was timed is checked.

# %%
import os

for library in ("OPENBLAS", "OMP", "MKL"):  # before NumPy starts: one thread for all
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from kvq import KVCache, Policy, Scheme, checks, hardware, plots
from kvq.kernels import backend, predict
from kvq.kernels.cpu import fast
from kvq.tables import read_table

plt.style.use(plots.STYLE)
here = Path.cwd()
DATA = next(p for p in (here, *here.parents) if (p / "figures/data").is_dir())
DATA /= "figures/data"

# %% [markdown]
# ## A clock
#
# One timing says little. Another program wakes up, the clock of the core rises or
# falls, the first run fills caches and compiles. So run once without looking, then
# several times, and take the median. Say as well how far the runs lie apart: with the
# quartiles $x_{25}$ and $x_{75}$, the spread is
#
# $$\frac{x_{75} - x_{25}}{x_{50}} .$$
#
# **Exercise 1.** Write both.


# %%
def summary(seconds):
    """(median, spread) of a list of times."""
    # BEGIN SOLUTION (2 lines)
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return middle, (high - low) / middle
    # END SOLUTION


checks.check_summary(summary)

# %% [markdown]
# And take turns. If one candidate runs ten times, then the next one ten times, a change
# of the machine between the two looks like a difference of the candidates. In turns it
# hits all of them.


# %%
def measure(candidates, rounds=7):
    """{name: (median seconds, spread)} of functions that take turns."""
    seconds = {name: [] for name in candidates}
    for f in candidates.values():
        f()
    for _ in range(rounds):
        for name, f in candidates.items():
            start = time.perf_counter()
            f()
            seconds[name].append(time.perf_counter() - start)
    return {name: summary(times) for name, times in seconds.items()}


# %% [markdown]
# ## What your memory delivers
#
# A dot product of an array with itself reads it once, and does little else. A small
# array lies in a cache of the processor after the first run. A large one does not.
#
# **Predict.** How many GB/s does one core of your machine read from memory, and how
# many times more from a cache: 1.5, 3, 10?

# %%
sizes = {f"{m:3} MiB": m * 2**20 for m in (1, 4, 16, 64, 256)}
memory = np.ones(256 * 2**20 // 4, np.float32)
reads = {
    name: (lambda x=memory[: size // 4]: np.dot(x, x)) for name, size in sizes.items()
}
rate = {}
for name, (middle, spread) in measure(reads).items():
    rate[name] = sizes[name] / middle
    print(f"{name}: {rate[name] / 1e9:6.1f} GB/s, spread {spread:.0%}")
B = rate["256 MiB"]
print(f"\none core reads {B / 1e9:.1f} GB/s from memory")
del memory, reads

# %% [markdown]
# That is the $B$ of every prediction below. The datasheet of a memory module is not: it
# is what all cores together might get, on a good day. (If your processor has a cache of
# several hundred megabytes, as some servers do, even 256 MiB may lie in it. Then take a
# larger array.)
#
# ## Five ways
#
# A layer with 8 KV heads, 4 query heads each, D = 128. One query token attends
#
# - in **float32**: two matrix products per head, in NumPy;
# - by **dequantizing first**: the packed cache becomes float32, and then as above;
# - by **tiles** (`numba-cpu` v1): 128 tokens at a time become float32, are used, and
#   are never written to memory;
# - by **fields** (v3): codes are stored so that a vector instruction takes the same
#   bits of many words, and scales are folded into the query, as on a GPU;
# - by **integers** (v4): codes are multiplied as they are, 64 products of bytes by one
#   instruction, with a query and weights of 8 bits. Not every processor has it.
#
# **Exercise 2.** How many bytes go between memory and processor for $n$ cached numbers:
# in float32, dequantized first (packed in; float32 out, and in again), and packed? A
# number has $b$ bits, and 32 more are shared by $G$ numbers.


# %%
def bytes_moved(n, b, G):
    """(float32, dequantized first, packed), in bytes."""
    # BEGIN SOLUTION (3 lines)
    full = 4 * n
    packed = n * (b + 32 / G) / 8
    return full, packed + 2 * full, packed
    # END SOLUTION


checks.check_bytes_moved(bytes_moved)

# %%
H_kv, ratio, D, G = 8, 4, 128, 64
TOKENS = (128, 512, 2048, 8192)
WAYS = ("float32", "dequantize first", "tiles (v1)", "fields (v3)", "integers (v4)")
moved = {}
for T in TOKENS:
    full, twice, packed = bytes_moved(2 * H_kv * T * D, 4, G)
    moved[T] = dict(zip(WAYS, (full, twice, packed, packed, packed), strict=True))
print("predicted from bytes alone, milliseconds")
print(f"{'tokens':>6}", *(f"{way:>16}" for way in WAYS))
for T in TOKENS:
    print(f"{T:6}", *(f"{moved[T][way] / B * 1e3:16.3f}" for way in WAYS))

# %% [markdown]
# By bytes, the packed cache is 7 times faster than float32, at every length: a CPU has
# no launch. But bytes are one limit of several.
#
# **Predict.** From which context length on will the fastest of the quantized ways be
# faster than float32? Write a number of tokens, or `None` for never.

# %%
# BEGIN SOLUTION (1 line)
guess = 1000
# END SOLUTION

# %% [markdown]
# ## Measure
#
# First whether they are right. The quantized ways must agree with each other; how far
# they are from float32 is the price of 4 bits, and v4 pays a little more for its 8-bit
# query and weights.


# %%
def attend(q, k, v):
    """Attention in float32: q (H_kv, ratio, D), k and v (H_kv, T, D)."""
    S = q @ k.swapaxes(1, 2) * np.float32(D**-0.5)
    p = np.exp(S - S.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


policy = Policy(
    Scheme(4, "channel", G, "asymmetric"), Scheme(4, "token", G, "asymmetric")
)
numba_cpu = backend("numba-cpu")
without_v4 = fast.unavailable("v4")
if without_v4:
    print(f"v4 cannot run here: {without_v4}")


def ways(T, seed=0):
    """{name: a function without arguments} for T tokens, and the packed bytes."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, H_kv, T, D), np.float32)
    q = rng.standard_normal((H_kv, ratio, D), np.float32)
    rows = q.reshape(H_kv * ratio, 1, D)
    K, V = numba_cpu.pack(k, policy.key), numba_cpu.pack(v, policy.value)
    rows_of_codes, blocks = KVCache(policy), KVCache(policy, layout="blocks")
    rows_of_codes.append(k, v)
    blocks.append(k, v)
    found = {
        "float32": lambda: attend(q, k, v),
        "dequantize first": lambda: attend(
            q, numba_cpu.dequant(K), numba_cpu.dequant(V)
        ),
        "tiles (v1)": lambda: numba_cpu.decode(rows, rows_of_codes, version="v1"),
        "fields (v3)": lambda: fast.decode(rows, blocks, version="v3", threads=1),
        "integers (v4)": lambda: fast.decode(rows, blocks, version="v4", threads=1),
    }
    if without_v4:
        del found["integers (v4)"]
    return found, blocks.nbytes


candidates, nbytes = ways(512)
assert nbytes == moved[512]["tiles (v1)"]
results = {name: f().ravel() for name, f in candidates.items()}
exact, by_hand = results["float32"], results["dequantize first"]
print("relative distance from    float32   dequantized")
for name, out in results.items():
    far = [np.linalg.norm(out - x) / np.linalg.norm(x) for x in (exact, by_hand)]
    print(f"{name:22} {far[0]:10.4f} {far[1]:13.6f}")

# %% [markdown]
# Now the clock.

# %%
measured = {}
for T in TOKENS:
    measured[T] = measure(ways(T)[0])
names = list(measured[TOKENS[0]])
print("milliseconds, median (spread)")
print(f"{'tokens':>6}", *(f"{name:>16}" for name in names))
for T in TOKENS:
    cells = [f"{1e3 * t:8.3f} ({spread:4.0%})" for t, spread in measured[T].values()]
    print(f"{T:6}", *(f"{cell:>16}" for cell in cells))

# %%
T = TOKENS[-1]
print(f"{T:,} tokens: part of the memory's rate that each way reaches")
for name in names:
    t = measured[T][name][0]
    reached, per_number = moved[T][name] / t, 1e9 * t / (2 * H_kv * T * D)
    print(
        f"{name:18} {reached / 1e9:6.2f} GB/s, {reached / B:5.0%} of {B / 1e9:.1f}",
        end="",
    )
    print(f"; {per_number:.2f} ns for each cached number")
print(f"4 bytes arrive in {4e9 / B:.2f} ns")

# %% [markdown]
# A way at 100 percent waits for memory, and fewer bytes would make it faster. One at 5
# percent waits for arithmetic, and fewer bytes change nothing. (More than 100 is no
# miracle: a few megabytes of packed codes stay in a cache of the processor, which the
# first measurement showed to be faster.) Look which of yours are which: the way with
# the fewest bytes and the way with the most may be equally slow, if both turn every
# code into a float32 number first.

# %%
fig, ax = plt.subplots(figsize=(9.5, 4.4))
colors = dict(
    zip(WAYS, ("black", "#CC79A7", "#D55E00", "#009E73", "#0072B2"), strict=True)
)
markers = dict(zip(WAYS, "Dsv^o", strict=True))
for name in names:
    y = [1e3 * measured[T][name][0] for T in TOKENS]
    ax.plot(TOKENS, y, marker=markers[name], color=colors[name], label=name)
for name, text, ls in (("float32", "float32", "--"), ("tiles (v1)", "packed", ":")):
    y = [1e3 * moved[T][name] / B for T in TOKENS]
    ax.plot(TOKENS, y, ls=ls, color="0.5", label=f"predicted, {text}")
ax.set_xscale("log", base=2)
ax.set_xticks(TOKENS, [f"{T:,}" for T in TOKENS])
ax.set(yscale="log", xlabel="tokens", ylabel="milliseconds")
ax.set_title("This machine, one core. Predicted: bytes / bandwidth")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## The crossover
#
# Near the crossover the two are equally fast, so noise decides who is ahead. A length
# from which on one is *always* faster says more than the first one at which it is.
#
# **Exercise 3.** `tokens` is in rising order, `a` and `b` are the times of two ways.
# Find the first length from which on `b` is faster at *all* lengths that were measured;
# `None` if there is none.


# %%
def crossover(tokens, a, b):
    """The smallest of tokens from which on b < a throughout, or None."""
    # BEGIN SOLUTION (4 lines)
    slower = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if y >= x]
    first = slower[-1] + 1 if slower else 0
    later = list(tokens)[first:]
    return later[0] if later else None
    # END SOLUTION


checks.check_crossover(crossover)

# %%
base = [measured[T]["float32"][0] for T in TOKENS]
for name in names[1:]:
    times = [measured[T][name][0] for T in TOKENS]
    at = crossover(TOKENS, base, times)
    text = f"from {at:,} tokens on" if at else f"not up to {TOKENS[-1]:,} tokens"
    print(f"{name:18} is faster than float32 {text}", end="")
    print(f"; at {TOKENS[-1]:,}: {base[-1] / times[-1]:.2f} times")
print(f"your guess: {guess}")

# %% [markdown]
# A cache with a seventh of the bytes need not be seven times faster. Where float32
# attention runs at the memory's rate, a number takes it the time in which 4 bytes
# arrive: a clock or two of a core. To break even, a quantized way must take a code out
# of its byte, make it a number, scale it and multiply it for 4 heads in the same time.
# One number after the other, that is hopeless, even if nothing is written to memory.
# v3 does it for 4, 8 or 16 numbers with each instruction, as the processor has it, and
# keeps the scales outside. v4 multiplies 64 bytes by one. It is the story of the GPU's
# kernels with other numbers: instructions per byte.
#
# ## Beside recorded numbers
#
# `kvq bench cpu` measures this at length, with other systems beside it, and records
# where. Its sweep over context lengths has the shape of this lesson. Look at the number
# of threads before you compare: yours is 1.

# %%
SWEEP = {
    "float32": {"system": "numpy", "storage": "float32"},
    "fields (v3)": {"system": "kvq", "storage": "int4", "version": "v3"},
    "integers (v4)": {"system": "kvq", "storage": "int4", "version": "v4"},
}


def print_sweep(path):
    """The recorded sweep over T, each time beside this machine's where there is one."""
    rows, head = read_table(path)
    print(f"recorded: {head['cpu']}, threads: {head['threads']}, {head['date']}")
    print("milliseconds, recorded / yours")
    print(f"{'tokens':>7}", *(f"{name:>18}" for name in SWEEP))
    rows = [row for row in plots.pick(rows, scene="sweep") if row["seconds"]]
    for T in plots.distinct(rows, "T"):
        cells = []
        for name, wanted in SWEEP.items():
            found = plots.pick(rows, T=T, **wanted)
            theirs = f"{1e3 * found[0]['seconds']:.3f}" if found else "-"
            mine = measured.get(T, {}).get(name)
            cells.append(f"{theirs} / {1e3 * mine[0]:.3f}" if mine else theirs)
        print(f"{T:7,}", *(f"{cell:>18}" for cell in cells))


path = DATA / "bench_cpu.csv"
if path.exists():
    print_sweep(path)
else:
    print(f"no CPU has been recorded yet: figures/data/{path.name} is absent.")
    print("`kvq bench cpu` writes it. The numbers above are this machine's alone.")

# %% [markdown]
# And for GPUs, `make bench-gpu`.

# %%
files = sorted(DATA.glob("decode_*.csv"))
for path in files:
    rows, head = read_table(path)
    print(f"measured: {path.name}, {head.get('device', '')}, {head.get('date', '')}")
    for row in plots.pick(rows, op="decode", B=1, kernel="v5"):
        if row["seconds"] is None:  # the note says why
            continue
        print(f"   {row['bits']:2} bits, {row['T']:9,} tokens:", end="")
        print(
            f" {1e6 * row['seconds']:8.1f} us, {row['copy_percent']:3.0f} % of a copy"
        )
if not files:
    print("no GPU has been measured; these rows are predicted, 131,072 tokens")
    for name in ("H200", "A100-80GB", "RTX-4090"):
        for bits in (16, 4):
            row = predict.decode(name, bits=bits, tokens=131_072)
            print(f"   {name:10} {bits:2} bits: {1e6 * row['seconds']:7.1f} us", end="")
            print(f", at most {row['copy_percent']:.0f} % of a copy")

# %% [markdown]
# Your own machine beside the largest card, by bandwidth alone:

# %%
h200 = hardware.device("H200").copy_bandwidth
print(f"an H200 moves bytes {h200 / B:,.0f} times as fast as one core here reads them")
full, twice, packed = bytes_moved(1, 4, G)
print(f"4 bits, G = {G}: {full / packed:.1f} times fewer bytes than float32")
print(f"dequantized first: {twice / full:.1f} times as many")
assert (round(full / packed, 1), round(twice / full, 1)) == (7.1, 2.1)

# %% [markdown]
# ## Takeaway
#
# > **4 bits with G = 64 are 7.1 times fewer bytes than float32, and 2.1 times as many
# > if they are dequantized first. How much of that becomes time is decided by the work
# > per byte, and by nothing that can be read off the format. So predict from bytes,
# > measure in turns with medians and spread, put the rate of the memory from the same
# > run beside it, and believe neither number alone.**
#
# ## More to try
#
# Other bits, groups and heads: change `policy`, `ratio` and `TOKENS`. With all cores:
# `fast.decode(rows, blocks)` without `threads=1`, and `OPENBLAS_NUM_THREADS` set to
# the number of your cores before the kernel starts. Compare like with like.
#
# ## What to read next
#
# The lesson *Does it hurt?* turns from time to quality.
#
# - McCalpin, *Memory bandwidth and machine balance*, 1995: the STREAM benchmark.
# - Williams et al., *Roofline*, Communications of the ACM 52(4), 2009.
# - `kernels/cpu/`: the loops that you timed.
