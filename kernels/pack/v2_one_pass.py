"""pack v2 in Numba: scale, zero and codes in one pass; x is read once.

    s = (max - min) / (2^b - 1),  z = min          or s = max|x| / (2^(b-1) - 1),  z = 0
    code = clip(round((x - z) / s), lowest, highest) + offset

The twin of `v2_one_pass.cu`: same arrays, same constants (X is `__half` or `float`
here), same threads, same registers, same shuffles. What Numba cannot say is the 16-byte
load: a thread reads its neighbouring numbers one by one, so the lanes of one load are
far apart and a warp touches up to 8 times as many sectors in each of them.

For the host, `unsupported` says what is built, and `geometry` how many threads that
takes.
"""

from types import SimpleNamespace

import numpy as np

from kvq.kernels.device import DTYPES, array_of, functions, x_and_s
from kvq.kernels.host import first_invalid, group_constants, invalid, whole_tokens

BITS = (2, 3, 4, 8)
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (16, 32, 64, 128)
BLOCK = 256  # threads, per token
LIMITS = {
    "bits": BITS,
    "per": ("token", "channel"),
    "levels": ("symmetric", "asymmetric"),
    "scale_dtype": ("float16", "float32"),
    "transform": (None,),
    "rounding": ("half-even",),
}
BYTES = {"__half": 2, "__nv_bfloat16": 2, "float": 4}


def unsupported(scheme, D):
    """None, or why there is no such kernel for heads of dimension D.

    Groups other than these are v1's: a group of lanes must be a power of two, and the
    numbers of a block must fit into its registers.
    """
    G = GROUPS[0] if whole_tokens(scheme, D) else scheme.group
    reason = first_invalid(scheme, LIMITS)
    reason = reason or invalid("D", D, HEAD_DIMS) or invalid("group", G, GROUPS)
    if reason:
        return reason
    if (scheme.bits, scheme.per, D, scheme.group) == (3, "token", 80, 16):
        return "group=16 of 3-bit rows of 36 bytes (D=80); valid: 32, 64, 128"
    return None


def constants(scheme, D, X, S):
    """The constants of the kernel that stores x of type X, scales of type S."""
    return {**group_constants(scheme, D), "X": X, "S": S}


def geometry(c, N, T):
    """(grid, block) for x (N, T, HEAD_DIM); c : the constants, as attributes."""
    p = plan(c)
    if c.PER_CHANNEL:
        return N * -(-T // c.GROUP), p.rows * p.row_lanes
    return -(-N * T * p.row_lanes // BLOCK), BLOCK


def plan(c):
    """How threads share the work: the constants derived in `v2_one_pass.cu`.

    vec : numbers that a thread reads at once. unit, unit_words : codes that fill whole
    words. padded, words : codes and words of a row. row_lanes : threads of a row.
    Per token: lanes of a group. Per channel: rows that a block reads at a time.
    parts : vectors of a thread.
    """
    vec = 16 // BYTES[c.X]
    unit, unit_words = (32, 3) if c.BITS == 3 else (32 // c.BITS, 1)
    units = -(-c.HEAD_DIM // unit)
    p = SimpleNamespace(
        vec=vec, unit=unit, padded=units * unit, words=units * unit_words
    )
    if c.PER_CHANNEL:
        p.row_lanes = p.padded // vec
        p.rows = next(r for n, r in ((16, 16), (32, 8), (64, 4)) if p.row_lanes <= n)
        p.parts = c.GROUP // p.rows
    else:
        needed = 1 << (-(-c.GROUP // vec) - 1).bit_length()
        p.lanes = min(needed, 32)
        p.parts = needed // p.lanes
        p.groups = -(-c.HEAD_DIM // c.GROUP)
        word_lanes = max(unit // vec, 1)
        p.row_lanes = -(-p.groups * p.lanes // word_lanes) * word_lanes
    return p


def kernels(c):
    """The kernel as a plain function, by name."""
    return {"pack_v2": _per_channel(c) if c.PER_CHANNEL else _per_token(c)}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import int32

    x, s = x_and_s(c)
    return {"pack_v2": (x, s, s, array_of(np.uint32), int32, int32)}


def _per_token(c):
    from numba import cuda, float32, int32, int64, uint32

    f, p = functions(c.S), plan(c)
    store_codes = _store_codes(c.BITS, p)
    thread_index, scale_and_zero, to_code = f.thread_index, f.scale_and_zero, f.to_code
    D, GROUP, BITS, ASYMMETRIC = c.HEAD_DIM, c.GROUP, c.BITS, c.ASYMMETRIC
    VEC, LANES, PARTS, ROW_LANES = p.vec, p.lanes, p.parts, p.row_lanes
    GROUPS, PADDED, W = p.groups, p.padded, p.words
    NUMBERS = PARTS * VEC  # of a thread
    STORED = array_of(DTYPES[c.S]).dtype

    def pack_v2(x, scale, zero, codes, N, T):
        thread = thread_index()
        row = thread // ROW_LANES
        group, lane = thread % ROW_LANES // LANES, thread % ROW_LANES % LANES
        first = group * GROUP + lane * VEC  # the first channel that this thread reads
        inside = row < int64(N) * T

        part = cuda.local.array(NUMBERS, float32)
        low, high = float32(np.inf), float32(-np.inf)
        for p in range(PARTS):
            channel = first + p * LANES * VEC
            if inside and channel < D:
                for j in range(VEC):
                    value = float32(x[row * D + channel + j])
                    part[p * VEC + j] = value
                    low, high = min(low, value), max(high, value)
        other = LANES // 2
        while other > 0:
            low = min(low, cuda.shfl_xor_sync(0xFFFFFFFF, low, other))
            high = max(high, cuda.shfl_xor_sync(0xFFFFFFFF, high, other))
            other //= 2

        s, z = scale_and_zero(low, high, BITS, ASYMMETRIC)
        s, z = STORED(s), STORED(z)
        if inside and first < D and lane == 0:
            scale[row * GROUPS + group] = s
            if ASYMMETRIC:
                zero[row * GROUPS + group] = z
        code = cuda.local.array(VEC, uint32)
        for p in range(PARTS):
            channel = first + p * LANES * VEC
            for j in range(VEC):
                code[j] = uint32(0)
                if inside and channel < D:
                    value = part[p * VEC + j]
                    code[j] = to_code(value, float32(s), float32(z), BITS, ASYMMETRIC)
            active = inside and channel < PADDED
            store_codes(codes, row * W, int32(channel), code, active)

    return pack_v2


def _per_channel(c):
    from numba import cuda, float32, int32, int64, uint32

    f, p = functions(c.S), plan(c)
    store_codes = _store_codes(c.BITS, p)
    scale_and_zero, to_code = f.scale_and_zero, f.to_code
    D, GROUP, BITS, ASYMMETRIC = c.HEAD_DIM, c.GROUP, c.BITS, c.ASYMMETRIC
    VEC, PARTS, ROWS, ROW_LANES, W = p.vec, p.parts, p.rows, p.row_lanes, p.words
    BLOCK, NUMBERS = ROWS * ROW_LANES, PARTS * VEC  # of a thread
    SHARED = BLOCK * VEC
    STORED = array_of(DTYPES[c.S]).dtype

    def pack_v2(x, scale, zero, codes, N, T):
        # One number of each thread after the other: [j * BLOCK + thread].
        lows = cuda.shared.array(SHARED, float32)
        highs = cuda.shared.array(SHARED, float32)
        groups = (T + GROUP - 1) // GROUP
        me = int32(cuda.threadIdx.x)
        slot = me % ROW_LANES
        channel = slot * VEC
        t0 = int64(cuda.blockIdx.x % groups) * GROUP + me // ROW_LANES
        row = int64(cuda.blockIdx.x // groups) * T + t0

        part = cuda.local.array(NUMBERS, float32)
        for j in range(VEC):
            lows[j * BLOCK + me] = float32(np.inf)
            highs[j * BLOCK + me] = float32(-np.inf)
        for p in range(PARTS):
            if t0 + p * ROWS < T and channel < D:
                for j in range(VEC):
                    value = float32(x[(row + p * ROWS) * D + channel + j])
                    part[p * VEC + j] = value
                    i = j * BLOCK + me
                    lows[i], highs[i] = min(lows[i], value), max(highs[i], value)
        rows = ROWS // 2
        while rows > 0:  # the other half of the rows joins in
            cuda.syncthreads()
            if me < rows * ROW_LANES:
                for j in range(VEC):
                    i = j * BLOCK + me
                    other = i + rows * ROW_LANES
                    lows[i] = min(lows[i], lows[other])
                    highs[i] = max(highs[i], highs[other])
            rows //= 2
        cuda.syncthreads()

        i = me
        while i < D:
            at = i % VEC * BLOCK + i // VEC
            s, z = scale_and_zero(lows[at], highs[at], BITS, ASYMMETRIC)
            scale[int64(cuda.blockIdx.x) * D + i] = s
            if ASYMMETRIC:
                zero[int64(cuda.blockIdx.x) * D + i] = z
            i += BLOCK

        # Every thread makes the scales of its own channels once more, sooner than it
        # could fetch them.
        scales = cuda.local.array(VEC, float32)
        zeros = cuda.local.array(VEC, float32)
        for j in range(VEC):
            at = j * BLOCK + slot
            s, z = scale_and_zero(lows[at], highs[at], BITS, ASYMMETRIC)
            scales[j], zeros[j] = float32(STORED(s)), float32(STORED(z))
        code = cuda.local.array(VEC, uint32)
        for p in range(PARTS):
            active = t0 + p * ROWS < T
            for j in range(VEC):
                code[j] = uint32(0)
                if active and channel < D:
                    value = part[p * VEC + j]
                    code[j] = to_code(value, scales[j], zeros[j], BITS, ASYMMETRIC)
            store_codes(codes, (row + p * ROWS) * W, channel, code, active)

    return pack_v2


def _store_codes(BITS, p):
    """A device function: the codes from `channel` on, VEC of them, into their row."""
    from numba import cuda, int32, uint32

    VEC, UNIT = p.vec, p.unit
    MINE = min(UNIT, VEC)

    @cuda.jit(device=True)
    def join(code, begin, mine, first, mask, shift, bits):
        """A word of 32 / bits codes: `mine` are here, from element `first` on."""
        word = uint32(0)
        for e in range(0, mine, 2):  # two neighbours are 16 bits apart
            even = (code[begin + e] >> uint32(shift)) & uint32(mask)
            odd = (code[begin + e + 1] >> uint32(shift)) & uint32(mask)
            word |= (even | odd << uint32(16)) << uint32((first + e) // 2 * bits)
        lanes = 1
        while lanes * mine < 32 // bits:
            word |= uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(word), lanes))
            lanes *= 2
        return word

    @cuda.jit(device=True)
    def store_three_bits(words, row, channel, code, active):
        lows = join(code, 0, VEC, channel % 16, 3, 0, 2)
        highs = join(code, 0, VEC, channel % 32, 1, 2, 1)
        # Of the lanes that share 32 codes the first three store a word each. The second
        # low word belongs to the lane 16 / VEC: lane 1 fetches it.
        second = uint32(cuda.shfl_down_sync(0xFFFFFFFF, int32(lows), 16 // VEC - 1))
        lane = channel % 32 // VEC
        word = highs
        if lane == 0:
            word = lows
        elif lane == 1:
            word = second
        if active and lane < 3:
            words[row + channel // 32 * 3 + lane] = word

    @cuda.jit(device=True)
    def store_codes(words, row, channel, code, active):
        for k in range(VEC // MINE):
            word = join(code, k * MINE, MINE, channel % UNIT, 2**BITS - 1, 0, BITS)
            if active and channel % UNIT == 0:
                words[row + channel // UNIT + k] = word

    return store_three_bits if BITS == 3 else store_codes
