"""What this machine does at best: bytes read, dot products of bytes started.

    Memory      an array larger than the last-level cache; to read it is the yardstick,
                and leaves a cache that holds nothing else
    start_dots  the instruction that v4 lives on, on registers alone

Both use as many threads as the work that is measured by them.
"""

import os
from functools import partial
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvq.kernels.cpu import simd
from kvq.kernels.cpu.threads import run

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MEMINFO = Path("/proc/meminfo")
USUAL_CACHE = 32 * 2**20  # where the system does not say
TIMES_CACHE = 4  # what counts as much larger
PLACES, PIECE = 8, 512  # read in turns; bytes at a time
SUMS = 16  # independent ones: enough to hide the latency of the instruction
DOTS = 2**20  # of a thread


# --- bytes ----------------------------------------------------------------------------
class Memory:
    """`nbytes` of memory, four times the last-level cache if a quarter of what is free
    allows it."""

    def __init__(self, most=None):
        most = free_memory() // 4 if most is None else most
        self.nbytes = min(TIMES_CACHE * last_level_cache(), most)
        self.numbers = np.ones(self.nbytes // 4, np.float32)

    def read(self, threads):
        """Read all of it once; each thread has a part of its own."""
        each(largest, np.array_split(self.numbers, threads))

    def dot(self):
        """The same by NumPy's BLAS."""
        return np.dot(self.numbers, self.numbers)


def last_level_cache():
    """Bytes, as the system says (of a virtual machine: as its host says)."""
    sizes = [p.read_text().strip() for p in sorted(CACHES.glob("index*/size"))]
    units = {"K": 2**10, "M": 2**20}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes), default=USUAL_CACHE)


def free_memory():
    """Bytes that a program can still have; half of all, where that is not known."""
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@njit(cache=True, nogil=True)
def largest(x):
    """max_i x_i, but for a rest at the end, read at PLACES places in turns: memory
    gives more from several pages than from one, so this is its best."""
    start, size = simd.address(x), 4 * x.size // PLACES // PIECE * PIECE
    top = x[0]
    for at in range(0, size, PIECE):
        for place in range(PLACES):
            top = max(top, simd.largest_of_128(start + place * size + at))
    return top


# --- dot products of bytes ------------------------------------------------------------
def start_dots(threads):
    """Run DOTS instructions on each thread; returns how many there were."""
    each(dots, [DOTS // SUMS] * threads)
    return DOTS * threads


@intrinsic
def _dots(typing, n):
    """n times SUMS dot products, each added to a sum of its own; a lane of them all."""

    def codegen(context, b, signature, args):
        factor = simd._splat(b, b.trunc(args[0], simd.I32))
        sums = [cgutils.alloca_once_value(b, simd._words(i)) for i in range(SUMS)]
        for i, cell in enumerate(sums):
            b.store(simd._words(i), cell)
        with cgutils.for_range(b, args[0]):
            for cell in sums:
                b.store(simd._dot(b, b.load(cell), factor, factor), cell)
        result = b.load(sums[0])
        for cell in sums[1:]:
            result = b.xor(result, b.load(cell))
        return b.zext(b.extract_element(result, simd.I32(0)), ir.IntType(64))

    return types.int64(types.int64), codegen


@njit(cache=True, nogil=True)
def dots(n):
    """A number that depends on all of them, so that none is left out."""
    return _dots(n)


# --- threads --------------------------------------------------------------------------
def each(f, parts):
    """Call f of every part, on a thread each."""
    run([partial(f, part) for part in parts], len(parts))
