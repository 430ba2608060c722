"""What v2 and v3 share in Numba: the work of one warp on one tile of tokens.

    m' = max(m, max_t S_t)
    l' = l exp(m - m') + sum_t exp(S_t - m')
    o' = o exp(m - m') + sum_t exp(S_t - m') v_t             attention = o / l

The twin of `tile.cuh`: same lanes, same shared memory, same order of every sum. What
Numba cannot say: 16-byte loads (rows are moved one word at a time), two binary16
numbers in one register (a code becomes a number by the magic number of binary32), and
structs (tuples stand for them, with their fields in the order of `tile.cuh`).

For the host, `unsupported` says what is built, and `warps` how large a block is.
"""

import math
from types import SimpleNamespace

import numpy as np

from kvq.kernels.device import array_of, functions, x_and_s

HEAD_DIMS = (64, 80, 96, 128, 256)
TILE = 32  # tokens: one for each lane
UNIT = 8  # channels whose values a lane adds up
MOST_HEADS = 8  # query heads of a block
MOST_SHARED = 48 * 1024  # bytes of shared memory that any GPU gives a block
EVERY_LANE = 0xFFFFFFFF


# --- sizes ----------------------------------------------------------------------------
def chunks_and_heads(ratio):
    """Blocks that share the `ratio` query heads of a KV head, and the heads of each."""
    chunks = -(-ratio // MOST_HEADS)
    return chunks, -(-ratio // chunks)


def plan(c):
    """The constants derived in `tile.cuh`, under the same names in lower case."""
    D, (_, heads) = c.HEAD_DIM, chunks_and_heads(getattr(c, "RATIO", 1))
    keys = side(D, c.KEY_BITS, c.KEY_GROUP, c.KEY_PER_CHANNEL, c.KEY_ASYMMETRIC)
    values = side(D, c.VALUE_BITS, c.VALUE_GROUP, 0, c.VALUE_ASYMMETRIC)
    keys.unit = 16 if keys.bits == 3 else 32 // keys.bits * keys.step
    values.unit = UNIT
    space = _whole(max(4 * (D + 4), keys.space, values.space))
    span = c.KEY_GROUP if c.KEY_PER_CHANNEL else TILE
    return SimpleNamespace(
        heads=heads,
        keys=keys,
        values=values,
        units=D // UNIT,
        slots=32 // (D // UNIT),
        space=space,
        scales=_whole(max(keys.scales, values.scales)),
        exact_tile=min(space // (D + 4), TILE),
        span=span,
        tiles=-(-span // TILE),
    )


def side(D, bits, group, per_channel, asymmetric):
    """`Coded` of `tile.cuh`, but for its unit."""
    words = 3 * -(-D // 32) if bits == 3 else D * bits // 32
    columns = D if per_channel else -(-D // group)
    step = math.gcd(words, {2: 2, 3: 1, 4: 4, 8: 4}[bits])
    return SimpleNamespace(
        bits=bits,
        group=group,
        per_channel=per_channel,
        asymmetric=asymmetric,
        offset=0 if asymmetric else 1 << (bits - 1),
        words=words,
        step=step,
        columns=columns,
        tokens=group if per_channel else 1,
        period=math.lcm(words, 32),
        scale_period=math.lcm(columns, 32),
        space=_space(words, step),
        scales=D if per_channel else _space(columns, 1),
    )


def _space(words, step):
    return TILE * words + TILE * words // math.lcm(words, 32) * step


def _whole(n):
    return -(-n // 4) * 4


def warps(c):
    """Warps of a block: 4, or 2 or 1 where there is no shared memory for more."""
    return next(n for n in (4, 2, 1) if n == 1 or shared_bytes(c, n) <= MOST_SHARED)


def shared_bytes(c, n):
    """Shared memory of a block of n warps, in bytes."""
    p = plan(c)
    return 4 * (p.heads * 2 * c.HEAD_DIM + n * (p.space + 2 * p.scales + 2 * p.heads))


def unsupported(policy):
    """None, or why shared memory cannot hold the scales of a tile of this policy."""
    for side, scheme in (("key", policy.key), ("value", policy.value)):
        if scheme.per == "token" and scheme.group is not None and scheme.group < 8:
            return f"{side}: group={scheme.group}; valid: None, or 8 and more"
    return None


# --- rows of a tile -------------------------------------------------------------------
def coded(c, s):
    """copy(tile, stored, first, count) and read(tile, t, u, x) of rows of codes."""
    from numba import cuda, float32, int64, uint32

    f, D, UNIT = functions(c.S), c.HEAD_DIM, s.unit
    level, pair_of_codes, affine = f.level, f.pair_of_codes, f.affine
    BITS, GROUP, PER_CHANNEL, ASYMMETRIC = s.bits, s.group, s.per_channel, s.asymmetric
    WORDS, COLUMNS, TOKENS, OFFSET = s.words, s.columns, s.tokens, s.offset
    PERIOD, SCALE_PERIOD = s.period, s.scale_period
    CODES = 32 // BITS  # of a word

    @cuda.jit(device=True)
    def at(i):
        """Where word i of the tile is: see `Rows` of `tile.cuh`."""
        return i + i // PERIOD

    @cuda.jit(device=True)
    def copy(tile, stored, first, count):
        words, scale, zero = tile
        codes, scales, zeros, _, row, group, _ = stored
        lane = cuda.threadIdx.x % 32
        source = row + int64(first) * WORDS
        for i in range(lane, count * WORDS, 32):
            words[at(i)] = codes[source + i]
        source = group + int64(first // TOKENS) * COLUMNS
        for i in range(lane, (1 if PER_CHANNEL else count) * COLUMNS, 32):
            scale[i + i // SCALE_PERIOD] = float32(scales[source + i])
            if ASYMMETRIC:
                zero[i + i // SCALE_PERIOD] = float32(zeros[source + i])

    @cuda.jit(device=True)
    def pair(words, t, i):
        """Codes i and i + 1 of token t, i even: 16 bits apart."""
        if BITS == 3:
            word = t * WORDS + i // 32 * 3
            low, high = words[at(word + i % 32 // 16)], words[at(word + 2)]
            high = pair_of_codes(high, i % 32 // 2, 1)
            return pair_of_codes(low, i % 16 // 2, 2) | high << uint32(2)
        return pair_of_codes(words[at(t * WORDS + i // CODES)], i % CODES // 2, BITS)

    @cuda.jit(device=True)
    def x_hat(tile, t, i, code):
        """x_hat = s * level + z        channel i of token t"""
        _, scale, zero = tile
        g = i if PER_CHANNEL else t * COLUMNS + i // GROUP
        g += g // SCALE_PERIOD
        z = zero[g] if ASYMMETRIC else float32(0)
        return affine(scale[g], level(code, OFFSET), z)

    @cuda.jit(device=True)
    def read(tile, t, u, x):
        """x = x_hat of unit u of token t."""
        for p in range(UNIT // 2):
            i = u * UNIT + 2 * p
            codes = pair(tile[0], t, i)
            x[2 * p] = x_hat(tile, t, i, codes & uint32(0xFFFF))
            x[2 * p + 1] = x_hat(tile, t, i + 1, codes >> uint32(16))

    return SimpleNamespace(copy=copy, read=read, unit=UNIT, units=D // UNIT)


def exact(c):
    """The same of rows in full precision, which a tile holds as float32."""
    from numba import cuda, float32, int64, uint32

    D, PERIOD = c.HEAD_DIM, math.lcm(c.HEAD_DIM, 32)

    @cuda.jit(device=True)
    def copy(tile, stored, first, count):
        words, _, _ = tile
        _, _, _, numbers, _, _, row = stored
        source = row + int64(first) * D
        for i in range(cuda.threadIdx.x % 32, count * D, 32):
            words[i + i // PERIOD] = float32(numbers[source + i]).view(np.uint32)

    @cuda.jit(device=True)
    def read(tile, t, u, x):
        for j in range(UNIT):
            i = t * D + u * UNIT + j
            x[j] = uint32(tile[0][i + i // PERIOD]).view(np.float32)

    return SimpleNamespace(copy=copy, read=read, unit=UNIT, units=D // UNIT)


# --- the equations --------------------------------------------------------------------
def warp_functions():
    """Largest and sum over the lanes of a warp."""
    from numba import cuda

    @cuda.jit(device=True)
    def largest_of_warp(x):
        for i in (16, 8, 4, 2, 1):
            x = max(x, cuda.shfl_xor_sync(EVERY_LANE, x, i))
        return x

    @cuda.jit(device=True)
    def sum_of_warp(x):
        for i in (16, 8, 4, 2, 1):
            x += cuda.shfl_xor_sync(EVERY_LANE, x, i)
        return x

    return largest_of_warp, sum_of_warp


def tile_functions(c, K, V):
    """attend_tile(q, tile, keys, values, first, count, options, state) of rows K, V."""
    from numba import cuda, float32, int32

    p = plan(c)
    D, HEADS, UNITS, SLOTS = c.HEAD_DIM, p.heads, p.units, p.slots
    K_UNIT, K_UNITS, k_copy, k_read = K.unit, K.units, K.copy, K.read
    v_copy, v_read = V.copy, V.read
    largest_of_warp, _ = warp_functions()
    NOTHING = float32(-np.inf)

    @cuda.jit(device=True)
    def scores(q, tile, count, options, s):
        """S_t = scale q . k_t,  with a soft cap: softcap tanh(S_t / softcap)

        t is the lane; beyond `count` there is no token: -inf.
        """
        scale, softcap = options
        k = cuda.local.array(K_UNIT, float32)
        t = cuda.threadIdx.x % 32
        for h in range(HEADS):
            s[h] = float32(0) if t < count else NOTHING
        if t >= count:
            return
        for u in range(K_UNITS):
            k_read(tile, t, u, k)
            for h in range(HEADS):
                # Short sums: their rounding errors stay small.
                a = b = c = d = float32(0)
                for i in range(0, K_UNIT, 4):
                    j = h * D + u * K_UNIT + i
                    a += q[j] * k[i]
                    b += q[j + 1] * k[i + 1]
                    c += q[j + 2] * k[i + 2]
                    d += q[j + 3] * k[i + 3]
                s[h] += (a + b) + (c + d)
        for h in range(HEADS):
            s[h] *= scale
            if softcap > float32(0):
                s[h] = softcap * math.tanh(s[h] / softcap)

    @cuda.jit(device=True)
    def rescale(state, s):
        """m' = max(m, max_t S_t)   l' = l exp(m - m') + sum_t exp(S_t - m')

        and o exp(m - m'). s[h] becomes p_t = exp(S_t - m').
        """
        m, l, o = state  # noqa: E741
        for h in range(HEADS):
            top = max(m[h], largest_of_warp(s[h]))
            shrink = math.exp(m[h] - top)
            s[h] = math.exp(s[h] - top)
            m[h] = top
            l[h] = l[h] * shrink + s[h]
            for i in range(UNIT):
                o[h * UNIT + i] *= shrink

    @cuda.jit(device=True)
    def add_values(tile, count, p, o):
        """o' = o + sum_t p_t v_t

        Lane t has p_t: whoever needs it takes it from there.
        """
        v = cuda.local.array(UNIT, float32)
        weight = cuda.local.array(HEADS, float32)
        slot, u = cuda.threadIdx.x % 32 // UNITS, cuda.threadIdx.x % 32 % UNITS
        for first in range(0, count, SLOTS):
            t = first + slot
            for h in range(HEADS):
                weight[h] = cuda.shfl_sync(EVERY_LANE, p[h], int32(t % 32))
            if slot < SLOTS and t < count:
                v_read(tile, t, u, v)
                for h in range(HEADS):
                    for i in range(UNIT):
                        o[h * UNIT + i] += weight[h] * v[i]

    @cuda.jit(device=True)
    def attend_tile(q, tile, keys, values, first, count, options, state):
        """The tokens first .. first + count - 1 join the state.

        Keys and values use the same shared memory one after the other; syncwarp keeps
        copying and reading apart.
        """
        p = cuda.local.array(HEADS, float32)
        cuda.syncwarp()
        k_copy(tile, keys, first, count)
        cuda.syncwarp()
        scores(q, tile, count, options, p)
        rescale(state, p)
        cuda.syncwarp()
        v_copy(tile, values, first, count)
        cuda.syncwarp()
        add_values(tile, count, p, state[2])

    return attend_tile


# --- the tokens of a block ------------------------------------------------------------
def block_functions(c):
    """What a block does with its tokens; see the second half of `tile.cuh`."""
    from numba import cuda, float32

    p = plan(c)
    D, WARPS, HEADS, UNITS, SLOTS = c.HEAD_DIM, c.WARPS, p.heads, p.units, p.slots
    SPAN, TILES, EXACT_TILE = p.span, p.tiles, p.exact_tile
    K_WORDS, K_COLUMNS, K_TOKENS = p.keys.words, p.keys.columns, p.keys.tokens
    V_WORDS, V_COLUMNS = p.values.words, p.values.columns
    E = exact(c)
    attend_coded_tile = tile_functions(c, coded(c, p.keys), coded(c, p.values))
    attend_exact_tile = tile_functions(c, E, E)
    _, sum_of_warp = warp_functions()
    NOTHING = float32(-np.inf)

    @cuda.jit(device=True)
    def stored_keys(codes, scale, zero, exact, head, T_cap, R_cap):
        """The keys of KV head number head = b H_kv + g."""
        groups = head * ((T_cap + K_TOKENS - 1) // K_TOKENS) * K_COLUMNS
        row = head * T_cap * K_WORDS
        return codes, scale, zero, exact, row, groups, head * R_cap * D

    @cuda.jit(device=True)
    def stored_values(codes, scale, zero, exact, head, T_cap, R_cap):
        groups, row = head * T_cap * V_COLUMNS, head * T_cap * V_WORDS
        return codes, scale, zero, exact, row, groups, head * R_cap * D

    @cuda.jit(device=True)
    def nothing_seen(state):
        m, l, o = state  # noqa: E741
        for h in range(HEADS):
            m[h], l[h] = NOTHING, float32(0)
        for i in range(HEADS * UNIT):
            o[i] = float32(0)

    @cuda.jit(device=True)
    def attend_coded(q, tile, keys, values, begin, end, options, state):
        """Quantized tokens begin .. end - 1; begin is a multiple of SPAN."""
        tiles = (end - begin + SPAN - 1) // SPAN * TILES
        for i in range(cuda.threadIdx.x // 32, tiles, WARPS):
            span = begin + i // TILES * SPAN
            first = span + i % TILES * TILE
            count = min(min(first + TILE, span + SPAN), end) - first
            if count > 0:
                attend_coded_tile(q, tile, keys, values, first, count, options, state)

    @cuda.jit(device=True)
    def attend_exact(q, tile, keys, values, begin, end, options, state):
        """Full-precision tokens begin .. end - 1."""
        first = begin + cuda.threadIdx.x // 32 * EXACT_TILE
        while first < end:
            count = min(EXACT_TILE, end - first)
            attend_exact_tile(q, tile, keys, values, first, count, options, state)
            first += WARPS * EXACT_TILE

    @cuda.jit(device=True)
    def read_queries(shared_q, q, row, heads):
        """q of `heads` neighbouring heads, as float32; the rest of shared_q is 0."""
        for i in range(cuda.threadIdx.x, HEADS * D, cuda.blockDim.x):
            shared_q[i] = float32(q[row * D + i]) if i < heads * D else float32(0)
        cuda.syncthreads()

    @cuda.jit(device=True)
    def weight_of(m, M):
        """exp(m - M), the weight of a part with the maximum m: 0 if it saw nothing."""
        return float32(0) if m == NOTHING else math.exp(m - M)

    @cuda.jit(device=True)
    def largest_of_block(m, h):
        """M = max_w m_w"""
        M = NOTHING
        for w in range(WARPS):
            M = max(M, m[h * WARPS + w])
        return M

    @cuda.jit(device=True)
    def sum_of_block(m, l, h, M):  # noqa: E741
        """l = sum_w l_w exp(m_w - M)"""
        total = float32(0)
        for w in range(WARPS):
            total += l[h * WARPS + w] * weight_of(m[h * WARPS + w], M)
        return total

    @cuda.jit(device=True)
    def place_of(h, i):
        """Where o of channel i is: neighbouring units in neighbouring banks."""
        return (h * UNIT + i % UNIT) * UNITS + i // UNIT

    @cuda.jit(device=True)
    def merge_warps(shared, state):
        """o = sum_w o_w exp(m_w - M), one slot of one warp after the other.

        Afterwards m and l of every warp, and o of the block, are in `shared`.
        """
        shared_m, shared_l, shared_o = shared
        m, l, o = state  # noqa: E741
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        slot, u = lane // UNITS, lane % UNITS
        for h in range(HEADS):
            total = sum_of_warp(l[h])
            if lane == 0:
                shared_m[h * WARPS + warp], shared_l[h * WARPS + warp] = m[h], total
        for i in range(cuda.threadIdx.x, HEADS * D, cuda.blockDim.x):
            shared_o[i] = float32(0)
        cuda.syncthreads()
        for turn in range(WARPS * SLOTS):
            if slot < SLOTS and turn == warp * SLOTS + slot:
                for h in range(HEADS):
                    weight = weight_of(m[h], largest_of_block(shared_m, h))
                    for i in range(UNIT):
                        shared_o[place_of(h, u * UNIT + i)] += o[h * UNIT + i] * weight
            cuda.syncthreads()

    return SimpleNamespace(
        stored_keys=stored_keys,
        stored_values=stored_values,
        nothing_seen=nothing_seen,
        attend_coded=attend_coded,
        attend_exact=attend_exact,
        read_queries=read_queries,
        weight_of=weight_of,
        largest_of_block=largest_of_block,
        sum_of_block=sum_of_block,
        place_of=place_of,
        merge_warps=merge_warps,
    )


def array_types(c):
    """Numba's types of q ... lengths, the arguments that v2 and v3 begin with."""
    x, s = x_and_s(c)
    words, lengths = array_of(np.uint32), array_of(np.int32)
    return x, words, s, s, words, s, s, x, x, lengths
