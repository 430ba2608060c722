"""dequant v2 in Numba: one thread per word, magic-number conversion.

    x_hat = s * (code - offset) + z

The twin of `v2_magic_words.cu`: same arrays, same constants, same threads, same
shuffles. What Numba cannot say: two binary16 numbers in one register (a code becomes a
number by the magic number of binary32, one at a time), and the 16-byte store (a lane
writes its numbers one by one, so a warp touches up to 8 times as many sectors in each
store).

For the host, `unsupported` says what is built, and `geometry` how many threads that
takes.
"""

from types import SimpleNamespace

import numpy as np

from kvq.kernels.device import DTYPES, array_of, functions, x_and_s
from kvq.kernels.host import first_invalid, group_constants, invalid, whole_tokens
from kvq.scheme import UNIFORM

BITS = (2, 3, 4, 8)
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK = 256  # threads
LIMITS = {
    "bits": BITS,
    "per": ("token", "channel"),
    "levels": UNIFORM,
    "transform": (None,),
}


def unsupported(scheme, D):
    """None, or why there is no such kernel for heads of dimension D.

    Per token, a group is a multiple of 16 numbers: those stored together share a scale.
    """
    reason = first_invalid(scheme, LIMITS) or invalid("D", D, HEAD_DIMS)
    if reason:
        return reason
    G = scheme.group
    if scheme.per == "channel":
        return "group=None; valid: an integer" if G is None else None
    if whole_tokens(scheme, D) or G % 16 == 0:
        return None
    return f"group={G!r}; valid: multiples of 16"


def constants(scheme, D, S, Y="float"):
    """The constants of the kernel that reads scales of type S and writes type Y."""
    return {**group_constants(scheme, D), "S": S, "Y": Y}


def geometry(c, N, T):
    """(grid, block) for y (N, T, HEAD_DIM); c : the constants, as attributes."""
    p = plan(c)
    warps = -(-N * T * p.words // (p.units * p.unit_words))
    return -(-warps * 32 // BLOCK), BLOCK


def plan(c):
    """How threads share the work: the constants derived in `v2_magic_words.cu`.

    unit, unit_words : codes that fill whole words. padded, words : codes and words of a
    row. units : of a warp. vec : numbers that a lane stores at once, `steps` times.
    """
    unit, unit_words, units = (32, 3, 8) if c.BITS == 3 else (32 // c.BITS, 1, 32)
    row_units = -(-c.HEAD_DIM // unit)
    vec = min(16 // np.dtype(DTYPES[c.Y]).itemsize, unit)
    return SimpleNamespace(
        unit=unit,
        unit_words=unit_words,
        units=units,
        padded=row_units * unit,
        words=row_units * unit_words,
        vec=vec,
        steps=units * unit // (32 * vec),
    )


def kernels(c):
    """The kernel as a plain function, by name."""
    from numba import cuda, float32, int32, int64, uint32

    f, p = functions(c.S), plan(c)
    thread_index, ceil_div, level = f.thread_index, f.ceil_div, f.level
    pair_of_codes, affine = f.pair_of_codes, f.affine
    D, GROUP, BITS = c.HEAD_DIM, c.GROUP, c.BITS
    PER_CHANNEL, ASYMMETRIC = c.PER_CHANNEL, c.ASYMMETRIC
    UNIT, UNIT_WORDS, UNITS, PADDED, W = (
        p.unit,
        p.unit_words,
        p.units,
        p.padded,
        p.words,
    )
    VEC, STEPS = p.vec, p.steps
    OFFSET = 0 if ASYMMETRIC else 1 << (BITS - 1)
    LARGEST = float32(65504 if c.Y == "__half" else np.inf)

    @cuda.jit(device=True)
    def fetch(word, i):
        """The words that hold code i of the warp; `word` is the lane's own."""
        word = int32(word)
        if BITS == 3:
            low = cuda.shfl_sync(0xFFFFFFFF, word, 3 * (i // 32) + i % 32 // 16)
            high = cuda.shfl_sync(0xFFFFFFFF, word, 3 * (i // 32) + 2)
            return uint32(low), uint32(high)
        word = cuda.shfl_sync(0xFFFFFFFF, word, i // UNIT)
        return uint32(word), uint32(0)

    @cuda.jit(device=True)
    def pair_at(low, high, i):
        """Codes i and i + 1, 16 bits apart."""
        if BITS == 3:
            high = pair_of_codes(high, i % 32 // 2, 1)
            return pair_of_codes(low, i % 16 // 2, 2) | high << uint32(2)
        return pair_of_codes(low, i % UNIT // 2, BITS)

    def dequant_v2(codes, scale, zero, y, N, T):
        thread = thread_index()
        warp, lane = thread // 32, int32(thread % 32)
        index = warp * (UNITS * UNIT_WORDS) + lane
        word = uint32(0)
        if lane < UNITS * UNIT_WORDS and index < int64(N) * T * W:
            word = codes[index]

        # What a warp spans is small: 64-bit divisions are made once, for its first
        # number.
        start = warp * (UNITS * UNIT)
        start_row, start_c = start // PADDED, int32(start % PADDED)
        start_n, start_t = start_row // T, int32(start_row % T)
        groups = ceil_div(int64(T) if PER_CHANNEL else int64(D), GROUP)
        for step in range(STEPS):
            i = int32((step * 32 + lane) * VEC)
            low, high = fetch(word, i)

            c, down = (start_c + i) % PADDED, (start_c + i) // PADDED
            row = start_row + down
            if row < int64(N) * T and c < D:
                at = row * groups + c // GROUP  # where the scale is
                if PER_CHANNEL:
                    t = start_t + down
                    at = ((start_n + t // T) * groups + t % T // GROUP) * D + c
                for k in range(VEC):
                    pair = pair_at(low, high, i + k)
                    code = (pair >> uint32(16 * (k % 2))) & uint32(0xFFFF)
                    own = at + k if PER_CHANNEL else at
                    z = float32(zero[own]) if ASYMMETRIC else float32(0)
                    value = affine(scale[own], level(code, OFFSET), z)
                    y[row * D + c + k] = min(max(value, -LARGEST), LARGEST)

    return {"dequant_v2": dequant_v2}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import int32

    _, s = x_and_s(c)
    y = array_of(DTYPES[c.Y])
    return {"dequant_v2": (array_of(np.uint32), s, s, y, int32, int32)}
