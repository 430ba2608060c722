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
# # Races and bounds: faults that give the right answer
#
# The worst kernel bugs pass their tests. A missing barrier works until the timing
# changes, a missing guard works until another buffer moves. You will look for six
# faults in six small kernels, first with your eyes, then by running them, and at last
# with a machine that checks the rules in place of the results.
#
# **What you will do**
#
# - judge seven versions of one kernel by reading them, and by their results;
# - write the rule that makes two accesses a race, and check a log of accesses with it;
# - let the PTX machine find what the results did not show, with thread and line;
# - state the rules of guards, alignment, barriers and shuffles, one by one.
#
# **What you need**: threads and blocks, shared memory, warp shuffles.

# %%
import numpy as np

from kvq import checks
from kvq.kernels import ptxsim, teach
from kvq.kernels.launch.ptxsim import ptx_text

# %% [markdown]
# ## One kernel, seven times
#
# The task is small: reverse an array, within each block of 64 numbers. A block reads
# its numbers side by side into shared memory and writes them side by side from there.
# This version is right:

# %%
SOURCE = "faults/six_faults"
print(teach.excerpt(f"{SOURCE}.cu", "void reverse("))

# %% [markdown]
# The barrier, `__syncthreads()`, makes every thread of the block wait until all have
# arrived. Why it is needed: thread 0 reads what thread 63 has written, and thread 63 is
# in another warp, which may be far behind.
#
# Here are the others.
#
# **Predict.** For each, what is wrong? And with an array of 128 numbers, two full
# blocks: will its result be right or wrong?

# %%
FAULTY = (
    "reverse_without_guard",
    "reverse_without_barrier",
    "reverse_barrier_inside",
    "reverse_by_shuffle",
    "reverse_by_vectors",
    "reverse_too_far",
)
for name in FAULTY:
    print(teach.excerpt(f"{SOURCE}.cu", f"void {name}("), end="\n\n")

# %% [markdown]
# ## Judged by the result
#
# We run them as one would test a kernel: launch, compare with NumPy. First without the
# machine's checks of barriers, races and shuffles. (Accesses out of bounds, and those
# of global memory that are not aligned, it always reports. A GPU might not.)

# %%
module = ptxsim.Module(ptx_text(SOURCE, "reverse", {}))


def run(name, n, check):
    """y of one kernel for n numbers; KernelFault if the machine finds a fault."""
    x, y = np.arange(1, n + 1, dtype=np.float32), np.zeros(n, np.float32)
    args = x, y, np.int32(n)
    module.kernel(name).launch(-(-n // 64), 64, args, check, names=("x", "y", "n"))
    return x, y


def expected(x, width=64):
    """x reversed within each `width` numbers."""
    return np.concatenate([x[i : i + width][::-1] for i in range(0, len(x), width)])


def verdict(name, n, check):
    """ "right", "wrong", or what the machine says."""
    try:
        x, y = run(name, n, check)
    except ptxsim.KernelFault as fault:
        return str(fault)
    width = 32 if name == "reverse_by_shuffle" else 64
    return "right" if np.array_equal(y, expected(x, width)) else "wrong"


print("128 numbers, results only")
for name in ("reverse", *FAULTY):
    print(f"{name:24} {verdict(name, 128, check=False)[:90]}")

# %% [markdown]
# Four faulty kernels give the right result. The missing barrier does no harm, because
# the machine happens to run the warps of a block step by step together. On a GPU it may
# do no harm either, today. And with full blocks there is no thread without a number, so
# the missing guard, the barrier inside a branch and the shuffle after a return are all
# harmless. Test sizes are often round numbers.
#
# ## A race, as a rule
#
# A result cannot prove that there is no race, but a rule can. Note every access of
# shared memory: by which warp, at which place, read or write, and after how many
# barriers. Two accesses race if
#
# 1. they are at the same place,
# 2. by different warps,
# 3. at least one of them is a write,
# 4. with no barrier between them: they have passed the same number of barriers.
#
# **Exercise 1.** Write the rule.


# %%
def race(a, b):
    """Whether two accesses race; each is (warp, place, kind, barriers passed)."""
    # BEGIN SOLUTION (4 lines)
    same_place, other_warp = a[1] == b[1], a[0] != b[0]
    one_writes = "write" in (a[2], b[2])
    no_barrier = a[3] == b[3]
    return same_place and other_warp and one_writes and no_barrier
    # END SOLUTION


checks.check_race(race)

# %%
for barriers, name in ((1, "with the barrier"), (0, "without it")):
    log = [(i // 32, i, "write", 0) for i in range(64)]
    log += [(i // 32, 63 - i, "read", barriers) for i in range(64)]
    found = [(a, b) for i, a in enumerate(log) for b in log[:i] if race(a, b)]
    print(f"{name}: {len(found)} races" + (f", such as {found[0]}" if found else ""))

# %% [markdown]
# 64 races, one for each number, and the result was right all the same.
#
# ## Judged by the rules
#
# The PTX machine keeps such a log for every byte of shared memory, and checks three
# more rules. We let it, and give it 100 numbers, so that the last block is not full.
#
# **Predict.** Which of the six faults will it name?

# %%
print("100 numbers, with checks")
faults = {}
for name in ("reverse", *FAULTY):
    faults[name] = verdict(name, 100, check=True)
    print(f"\n{name}\n    {faults[name]}")
assert faults["reverse"] == "right"
assert all("line" in faults[name] for name in FAULTY)

# %% [markdown]
# All six, each with a buffer or a byte, the block and the thread, and the line of the
# source. Now the rules behind them.
#
# ## Guards
#
# A grid has whole blocks only. Every access must be inside of its buffer for *every*
# thread, also for those without work.
#
# **Exercise 2.** Which threads of the last block must not touch anything? Give their
# places in the block, for $n$ numbers and blocks of `block` threads.


# %%
def idle_threads(n, block):
    """The places (in the last block) of the threads that have no number: a list."""
    # BEGIN SOLUTION (2 lines)
    busy = n - (n - 1) // block * block
    return list(range(busy, block))
    # END SOLUTION


checks.check_idle_threads(idle_threads)
print(f"100 numbers, blocks of 64: threads {idle_threads(100, 64)[0]} to 63")

# %% [markdown]
# ## Alignment
#
# A load of 16 bytes must begin at a multiple of 16. The start of an array from the
# allocator is fine. A row of it, or an array that begins one element later, need not
# be.
#
# **Exercise 3.** Rows of $D$ float16 numbers lie one after the other, from an aligned
# start. What is the widest load (2, 4, 8 or 16 bytes) that fits the start of *every*
# row?


# %%
def widest_load(D):
    """Bytes of the widest load that is aligned at the start of every row."""
    # BEGIN SOLUTION (2 lines)
    row = 2 * D
    return max(w for w in (2, 4, 8, 16) if row % w == 0)
    # END SOLUTION


checks.check_widest_load(widest_load)
for D in (128, 80, 100, 66, 65):
    print(f"D = {D:3}: {widest_load(D):2} bytes")

# %% [markdown]
# ## Barriers and shuffles
#
# A barrier waits for all threads of the block: it must not stand in a branch that some
# of them do not take, and nobody may return before it. A shuffle waits for all lanes
# that its mask names. What happens otherwise is undefined: a GPU may hang, or go on
# with stale numbers, and either may change with the next compiler.
#
# **Exercise 4.** The kernel with the shuffle lets threads return when they have no
# number. Which mask would name exactly the lanes that stay, in a warp with `n` numbers?
# Bit $i$ stands for lane $i$.


# %%
def mask_of(n):
    """The mask of lanes 0 .. n - 1, an integer."""
    # BEGIN SOLUTION (1 line)
    return 2**n - 1
    # END SOLUTION


checks.check_mask_of(mask_of)
print(f"4 lanes: {mask_of(4):#x}, a full warp: {mask_of(32):#x}")

# %% [markdown]
# Simpler, and what the kernels here do: let every lane stay, and give idle lanes a
# neutral number.
#
# ## What a machine like this does not see
#
# It runs the warps of a block in one order. A race *within* a warp, between lanes that
# no longer run together, is not in its log. Two *blocks* that write the same place of
# global memory are not either. And it knows no weak memory, where one thread's writes
# arrive in another order at another thread. On a GPU, NVIDIA's `compute-sanitizer` with
# its tool `racecheck` looks at the real execution. To check a kernel of your own here:
#
# ```
# kvq kernels check my.cu reverse x:f32[100]=arange y:f32[100]=0 n:i32=100 \
#     --grid 2 --block 64
# ```

# %%
silent = [name for name in FAULTY if verdict(name, 128, check=False) == "right"]
named = [name for name in FAULTY if faults[name] not in ("right", "wrong")]
print(f"right by their results on 128 numbers: {len(silent)} of {len(FAULTY)}")
print(f"named by the rules on 100 numbers: {len(named)} of {len(FAULTY)}")
assert (len(silent), len(named)) == (4, 6)

# %% [markdown]
# ## Takeaway
#
# > **Of six faulty kernels, four gave the right result on 128 numbers. All six were
# > named by the rules for bounds, alignment, races, barriers and shuffles, on 100
# > numbers, with thread and line, and without a GPU. Test with ragged sizes, and check
# > rules, not only results.**
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*, "Synchronization Functions" and "Independent
#   Thread Scheduling".
# - NVIDIA, *Compute Sanitizer documentation*: memcheck, racecheck, synccheck.
# - `kernels/ptxsim/check.py`: the rules, as they are checked here.
