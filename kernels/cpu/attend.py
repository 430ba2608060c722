r"""Attention over blocks of codes: what is compiled.

With codes u of a group, x_hat = s (u - offset) + z, a score is

    q . k = sum_d x_d u_d + b,     x_d = q_d s_d,     b = sum_d q_d z_d - offset x_d

so the scales are folded into the query once per group of tokens, and the sum over the
codes has none. The values likewise, with the weights p_t in place of q_d. Keys with
scales per token keep them outside of the sum. Two ways to do the sum:

    v3  numbers    sum_d x_d u_d, a field of every word at a time (`blocks.py`)
    v4  integers   x_d = a Q_d + rest_d, Q_d a byte: a sum of products of bytes. What
                   rounding takes is paid back for the middle code, m = (2^b - 1) / 2:
                   the zeros become z + m s, and m a sum Q_d is taken from the sum.
                   Queries and weights may have a second term, the rest in bytes, where
                   8 bits are not enough.

In here an array is the address where it begins, a row of it `floats(address, start,
n)`: no references are counted. Logarithms have base 2: the scale of queries, sink
logits and soft cap come multiplied by log2(e).
"""

from collections import namedtuple

import numpy as np
from numba import njit

from kvq.kernels.cpu.simd import (
    LINE,
    address,
    ask,
    exp2_of_128,
    floats,
    fold_row,
    half_to_float,
    halves,
    integers,
    key_bytes,
    key_numbers,
    larger,
    largest_of_128,
    prefetch,
    round_row,
    scale_row,
    signed_bytes,
    value_bytes,
    value_numbers,
    wide_vectors,
    words,
)

# Of NumPy's type: a literal would be a type of its own, for which Numba compiles every
# function that it reaches once more.
UNIT, LANES = np.int64(128), np.int64(32)  # tokens of a block; lanes of a panel
PANELS = UNIT // LANES  # of keys, in a block
FIRST, ONE = np.int64(0), np.int64(1)
NOTHING = np.float32(-1e30)  # the maximum of no scores
MOST, MAGNITUDE = np.float32(3.4028234e38), np.uint32(0x7FFFFFFF)  # of a float32
OPTIONS = {"cache": True, "fastmath": True, "error_model": "numpy"}
# For what only compiled code calls: without it each takes half as long to compile.
INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **OPTIONS}
ONCE = {"inline": "always", **INNER}  # called from one place: compiled there

# One side of a cache of H heads, as in `blocks.Store`, all int64. words uint32 (H,
# blocks, 4 D bits); scale, zero binary16 (H, groups or zero_groups, groups of
# channels). group: tokens or channels that share a scale.
Side = namedtuple(
    "Side",
    "words blocks scale groups zero zero_groups bits group per_channel has_zero offset",
)
# R queries of D numbers meet a KV head; `heads` have room, 1 of them or a multiple of 4
# (1 only where panels come in pairs). terms: bytes for a number of the query and for a
# weight, 0 for the number itself.
Shape = namedtuple("Shape", "R heads D terms")
# Rows of a task, float32 but Q, P (bytes). q: queries, x: folded (heads, D); w: weights
# (heads, 128). S: scores, then weights; T, U: sums (heads, 128). o: output (heads, D).
# a: the step of each term (2, heads), b: constants (heads,), both for every group of
# channels; sum_q likewise. a_v (2, heads), b_v: of weights. m, l: of the softmax. top:
# the largest number of a row. one, none: ones and zeros. s, z: scales and zeros of one
# group. ahead_k, ahead_v: what to ask memory for, see `look_ahead`.
Rows = namedtuple(
    "Rows", "q x w S T U o a b sum_q a_v b_v m l top one none s z Q P ahead_k ahead_v"
)


# --- scales into queries, or into weights ---------------------------------------------
#     z_i + center s_i,    center = middle - offset for integers, which meet u - middle
@njit(**INNER)
def read_scales(side, at, zero_at, step, count, n, center, rows):
    """rows.s and rows.z: numbers at, at + step, ... of scales, and of zeros; n of them,
    those from `count` on 0. As many behind them are wanted next, and asked for."""
    scale, zero = side.scale + 2 * at, side.zero + 2 * zero_at
    for line in range(2 * n * step, 4 * n * step, LINE):
        prefetch(scale + line)
        prefetch(zero + line)
    if not side.has_zero:
        zero = scale  # any numbers, times 0
    has_zero = np.float32(side.has_zero)
    if step == 1 and count == n:
        scale_row(scale, zero, has_zero, center, count, rows.s, rows.z)
        return
    wide_vectors()
    s, z = floats(rows.s, FIRST, n), floats(rows.z, FIRST, n)
    size = (count - 1) * step + 1
    scales, zeros = halves(scale, FIRST, size), halves(zero, FIRST, size)
    for i in range(count):
        s[i] = half_to_float(scales[i * step])
        z[i] = has_zero * half_to_float(zeros[i * step]) + center * s[i]
    for i in range(count, n):
        s[i], z[i] = np.float32(0), np.float32(0)


@njit(**INNER)
def center_of(side, terms):
    """What belongs to a zero, in scales."""
    middle = middle_code(side.bits) if terms else np.float32(0)
    return middle - np.float32(side.offset)


@njit(**ONCE)
def middle_code(bits):
    """The middle of the codes 0 .. 2^bits - 1."""
    return np.float32((2**bits - 1) / 2)


#     x_i = row_i s_i     b = sum_i row_i z_i     top = max_i |x_i|
@njit(**INNER)
def fold(rows, R, n, first, count, s, z, x, b, top, ahead):
    """Of each row of `rows` (R, n), the numbers first .. first + count - 1."""
    b, top = floats(b, FIRST, R), floats(top, FIRST, R)
    for h in range(R):
        ask(ahead)
        at = 4 * (h * n + first)
        b[h], most = fold_row(rows + at, s, z, count, x + at)
        top[h] = larger(most, np.float32(1e-30))


#     x_i = a Q_i + rest_i,    a = top / levels,    Q_i = round(x_i / a - down)
#     b -= a middle sum_i Q_i
@njit(**INNER)
def round_rows(x, R, n, first, count, top, levels, down, middle, Q, a, b, ahead):
    """Rows of x to bytes. levels: 127, or 255 for x >= 0. down: 1/2 leaves no rest
    below 0."""
    a, b, top = floats(a, FIRST, R), floats(b, FIRST, R), floats(top, FIRST, R)
    for h in range(R):
        ask(ahead)
        at = h * n + first
        step = top[h] / levels
        total = round_row(x + 4 * at, count, levels / top[h], down, Q + at)
        a[h] = step
        b[h] -= step * middle * total


#     rest_i = x_i - a Q_i
@njit(**INNER)
def leave_rest(x, R, n, first, count, signed, Q, a):
    """In the rows of x, for the next term."""
    wide_vectors()
    for h in range(R):
        step, row = floats(a, h, ONE)[0], floats(x, h * n + first, count)
        byte = signed_bytes(Q, h * n + first, count)
        for i in range(count):
            row[i] -= step * np.float32(byte[i] if signed else np.uint8(byte[i]))


#     x = a_1 Q_1 + a_2 Q_2 + ...
@njit(**INNER)
def round_terms(terms, signed, bits, x, R, heads, n, first, count, rows, Q, a, b):
    """`round_rows` for each term: Q (terms, heads, n), a (terms, heads). rows.top: the
    largest |x| of each row."""
    middle, zero = middle_code(bits), np.float32(0)
    if signed:
        levels, down, part = np.float32(127), zero, np.float32(0.5)
    else:
        levels, down, part = np.float32(255), np.float32(0.5), np.float32(1)
        middle -= np.float32(128 if bits == 8 else 0)  # these codes are code - 128
    top, more = floats(rows.top, FIRST, R), rows.ahead_v
    for term in range(terms):
        to, step, last = Q + term * heads * n, a + 4 * term * heads, term == terms - 1
        less = zero if last else down
        round_rows(
            x, R, n, first, count, rows.top, levels, less, middle, to, step, b, more
        )
        if not last:
            leave_rest(x, R, n, first, count, signed, to, step)
            for h in range(R):
                top[h] = floats(step, h, ONE)[0] * part  # the largest rest


# --- rows times codes -----------------------------------------------------------------
#     out[h, lane] = a_h sum_i row[h, i] code[i, lane] + b_h        (keys)
#     out[h, lane] += ...                                          (values)
# `codes` is the address of `panels` panels of `count` rows each, `row` of (heads, n)
# numbers, or bytes, `out` of (heads, m). A head that is alone takes two panels at a
# time, so that enough sums are under way; four heads take two for fewer loads, but of
# numbers, which would need too many registers.
def _multiply(by_numbers, by_bytes):
    """The loop over panels, around the intrinsics of one side."""

    @njit(**{**INNER, "cache": False})  # a part of what `attend_tasks` caches
    def multiply(
        numbers, bits, row, heads, n, codes, panels, count, a, b, out, m, ahead
    ):
        width = 4 if numbers else 1
        pair = panels % 2 == 0 and not (numbers and heads > 1)
        for i in range(0, panels, 2 if pair else 1):
            line, o = codes + i * count * 128, out + i * 128
            for h in range(0, heads, 4):
                four, to = row + width * h * n, o + 4 * h * m
                s, c = a + 4 * h, b + 4 * h
                if numbers and heads > 1:
                    by_numbers(4, 1, bits, count, line, four, n, s, c, to, m, ahead)
                elif numbers:
                    by_numbers(1, 2, bits, count, line, four, n, s, c, to, m, ahead)
                elif heads == 1:
                    by_bytes(1, 2, bits, count, line, four, n, s, c, to, m, ahead)
                elif pair:
                    by_bytes(4, 2, bits, count, line, four, n, s, c, to, m, ahead)
                else:
                    by_bytes(4, 1, bits, count, line, four, n, s, c, to, m, ahead)

    return multiply


multiply_keys = _multiply(key_numbers, key_bytes)
multiply_values = _multiply(value_numbers, value_bytes)


@njit(**INNER)
def words_of(side, n, block, D):
    """Where a block of KV head n begins."""
    return side.words + 16 * D * side.bits * (n * side.blocks + block)


# --- scores ---------------------------------------------------------------------------
@njit(**INNER)
def fold_query(shape, keys, g, first, count, rows):
    """The scales rows.s of group of channels g into the queries' numbers from `first`
    on, and the bytes of these."""
    R, heads, D, terms = shape
    a, b = rows.a + 8 * g * heads, rows.b + 4 * g * heads
    q, x = rows.q, rows.x
    fold(q, R, D, first, count, rows.s, rows.z, x, b, rows.top, rows.ahead_k)
    round_terms(
        terms, True, keys.bits, x, R, heads, D, first, count, rows, rows.Q, a, b
    )


@njit(**INNER)
def times_keys(shape, keys, g, first, codes, panels, count, rows, out):
    """out (R, 128), in the lanes of panels: the folded queries' numbers from `first` on
    times the codes."""
    R, heads, D, terms = shape
    a, b, bits = rows.a + 8 * g * heads, rows.b + 4 * g * heads, keys.bits
    if terms == 0:
        x, a = rows.x + 4 * first, rows.one
        multiply_keys(
            True, bits, x, heads, D, codes, panels, count, a, b, out, UNIT, rows.ahead_k
        )
        return
    Q = rows.Q + first
    multiply_keys(
        False, bits, Q, heads, D, codes, panels, count, a, b, out, UNIT, rows.ahead_k
    )
    if terms == 2:
        Q, a, b, more = Q + heads * D, a + 4 * heads, rows.none, rows.U
        multiply_keys(
            False,
            bits,
            Q,
            heads,
            D,
            codes,
            panels,
            count,
            a,
            b,
            more,
            UNIT,
            rows.ahead_k,
        )
        for h in range(R):
            line = floats(out, h * UNIT, LANES * panels)
            rest = floats(more, h * UNIT, LANES * panels)
            for t in range(LANES * panels):
                line[t] += rest[t]


@njit(**ONCE)
def scores_per_channel(shape, keys, n, block, valid, folded, rows):
    """S (R, 128) of a block. folded: the group of tokens whose scales the queries have;
    returns it."""
    D, count, center = shape.D, shape.D * keys.bits // 32, center_of(keys, shape.terms)
    lanes = min(keys.group, UNIT)
    for t in range(0, valid, lanes):
        group = (block * UNIT + t) // keys.group
        if group != folded:
            at, zero_at = n * keys.groups + group, n * keys.zero_groups + group
            read_scales(keys, at * D, zero_at * D, ONE, D, D, center, rows)
            fold_query(shape, keys, FIRST, FIRST, D, rows)
            folded = group
        codes = words_of(keys, n, block, D) + 128 * (t // LANES) * count
        panels, out = lanes // LANES, rows.S + 4 * t
        times_keys(shape, keys, FIRST, FIRST, codes, panels, count, rows, out)
    return folded


#     q . k_t = sum_g s_tg (sum_d q_d (u_td - offset)) + z_tg sum_d q_d,   d in group g
@njit(**ONCE)
def scores_per_token(shape, keys, n, block, valid, rows):
    """S (R, 128) of a block; sums over groups of channels meet the scales of tokens."""
    R, heads, D, _ = shape
    fields, groups = 32 // keys.bits, -(-D // keys.group)
    s, z = floats(rows.s, FIRST, UNIT), floats(rows.z, FIRST, UNIT)
    S = floats(rows.S, FIRST, R * UNIT)
    for i in range(R * UNIT):
        S[i] = np.float32(0)
    for g in range(groups):
        c = g * keys.group
        count = min(keys.group, D - c) // fields
        for panel in range(PANELS):
            row = panel * (D // fields) + c // fields
            codes = words_of(keys, n, block, D) + 128 * row
            out = rows.T + 4 * LANES * panel
            times_keys(shape, keys, g, c, codes, ONE, count, rows, out)
        at, zero_at = n * keys.groups, n * keys.zero_groups
        at, zero_at = (at + block * UNIT) * groups, (zero_at + block * UNIT) * groups
        zero = np.float32(0)
        read_scales(keys, at + g, zero_at + g, groups, valid, UNIT, zero, rows)
        for h in range(R):
            S, T = floats(rows.S, h * UNIT, UNIT), floats(rows.T, h * UNIT, UNIT)
            sum_q = floats(rows.sum_q, g * heads + h, ONE)[0]
            for t in range(UNIT):
                S[t] += s[t] * T[t] + z[t] * sum_q


@njit(**ONCE)
def fold_nothing(shape, keys, rows):
    """For scales per token: the queries and their bytes once for all, by groups of
    channels, and sum_d q_d of each."""
    R, heads, D, terms = shape
    s, z = floats(rows.s, FIRST, D), floats(rows.z, FIRST, D)
    for d in range(D):
        s[d], z[d] = np.float32(1), center_of(keys, terms)
    for g in range(-(-D // keys.group)):
        c = g * keys.group
        count = min(keys.group, D - c)
        sums = floats(rows.sum_q, g * heads, R)
        for h in range(R):
            row, total = floats(rows.q, h * D + c, count), np.float32(0)
            for d in range(count):
                total += row[d]
            sums[h] = total
        fold_query(shape, keys, g, c, count, rows)


# --- softmax --------------------------------------------------------------------------
#     m' = max(m, max_t S_t)     l' = l 2^(m - m') + sum_t 2^(S_t - m')
#     o' = o 2^(m - m')
@njit(**INNER)
def softmax_step(R, D, valid, softcap, rows):
    """S (R, 128) becomes 2^(S - m'); m, l and o of every head follow."""
    wide_vectors()
    m, l = floats(rows.m, 0, R), floats(rows.l, 0, R)  # noqa: E741
    for h in range(R):
        ask(rows.ahead_k)
        ask(rows.ahead_v)
        S = floats(rows.S, h * UNIT, UNIT)
        if softcap > 0:
            for t in range(valid):
                S[t] = softcap * np.tanh(S[t] / softcap)
        for t in range(valid, UNIT):
            S[t] = NOTHING
        top = larger(m[h], largest_of_128(rows.S + 4 * h * UNIT))
        if top > m[h]:
            shrink = np.exp2(m[h] - top)
            m[h] = top
            l[h] *= shrink
            o = floats(rows.o, h * D, D)
            for d in range(D):
                o[d] *= shrink
        total = exp2_of_128(rows.S + 4 * h * UNIT, top)
        for t in range(valid, UNIT):  # of which each has added 2^-125
            S[t] = np.float32(0)
        l[h] += total


# --- values ---------------------------------------------------------------------------
@njit(**ONCE)
def add_values(shape, values, n, block, valid, rows):
    """o (R, D) of the weights S (R, 128) and the values of a block, added to."""
    R, heads, D, terms = shape
    bits, groups = values.bits, -(-D // values.group)
    count = UNIT * bits // 32
    start = words_of(values, n, block, D)
    w, P, top = rows.w, rows.P, rows.top
    a, b, one, none = rows.a_v, rows.b_v, rows.one, rows.none
    center = center_of(values, terms)
    for g in range(groups):
        c = g * values.group
        panels, out = min(values.group, D - c) // LANES, rows.o + 4 * c
        codes = start + 128 * (c // LANES) * count
        at, zero_at = n * values.groups, n * values.zero_groups
        at, zero_at = (at + block * UNIT) * groups, (zero_at + block * UNIT) * groups
        read_scales(values, at + g, zero_at + g, groups, valid, UNIT, center, rows)
        fold(rows.S, R, UNIT, FIRST, UNIT, rows.s, rows.z, w, b, top, rows.ahead_k)
        if terms == 0:
            multiply_values(
                True,
                bits,
                w,
                heads,
                UNIT,
                codes,
                panels,
                count,
                one,
                b,
                out,
                D,
                rows.ahead_v,
            )
        round_terms(terms, False, bits, w, R, heads, UNIT, FIRST, UNIT, rows, P, a, b)
        for term in range(terms):
            row, step = P + term * heads * UNIT, a + 4 * term * heads
            constant = b if term == 0 else none
            multiply_values(
                False,
                bits,
                row,
                heads,
                UNIT,
                codes,
                panels,
                count,
                step,
                constant,
                out,
                D,
                rows.ahead_v,
            )


# --- tokens in full precision ---------------------------------------------------------
@njit(**ONCE)
def attend_exact(shape, n, part, softcap, rows):
    """128 at a time, they join the state of every head. part: int64 of addresses of
    keys and of values (H, tokens, D), tokens, and whether they are of binary16."""
    R, D = shape.R, shape.D
    keys, values, tokens, half = part[0], part[1], part[2], part[3]
    for first in range(0, tokens, UNIT):
        valid, at = min(UNIT, tokens - first), n * tokens + first
        for t in range(valid):
            k = one_token(keys, at + t, D, half, rows)
            for h in range(R):
                row, total = floats(rows.q, h * D, D), np.float32(0)
                for d in range(D):
                    total += row[d] * k[d]
                floats(rows.S, h * UNIT + t, ONE)[0] = total
        softmax_step(R, D, valid, softcap, rows)
        for t in range(valid):
            v = one_token(values, at + t, D, half, rows)
            for h in range(R):
                p, o = floats(rows.S, h * UNIT + t, ONE)[0], floats(rows.o, h * D, D)
                for d in range(D):
                    o[d] += p * v[d]


@njit(**INNER)
def one_token(tokens, i, D, half, rows):
    """Row i of (tokens, D) as float32."""
    if not half:
        return floats(tokens, i * D, D)
    at, zero = tokens + 2 * i * D, np.float32(0)
    scale_row(at, at, zero, zero, D, rows.s, rows.z)
    return floats(rows.s, FIRST, D)


# --- a task: one split of one KV head -------------------------------------------------
@njit(**ONCE)
def folds_of(shape, keys, values):
    """How often scales are folded into rows while a block is computed."""
    of_keys = UNIT // min(keys.group, UNIT) if keys.per_channel else FIRST
    return of_keys + -(-shape.D // values.group)


@njit(**INNER)
def look_ahead(ahead, shape, side, n, block, folds):
    """What `ask` asks for from now on: the words of a block, at two places each.

    A core waits for some 16 lines of memory at a time, so it asks all the while that it
    computes: in the loops over codes for half of the lines (for all, where these take
    a panel at a time), and wherever a row is folded, rounded or exponentiated for a
    share of the others. Several places, for memory gives more from several pages.
    """
    half = 8 * shape.D * side.bits
    place = integers(ahead, FIRST, np.int64(3))
    place[0] = words_of(side, n, block, shape.D)
    place[1] = place[0] + half
    rows = shape.R * (folds + 1)
    place[2] = (half // (2 * LINE) + rows - 1) // rows
    if shape.terms == 0 and shape.heads > 1:
        place[2] = 0


@njit(**ONCE)
def attend_split(n, first, last, shape, tokens, keys, values, softcap, rows):
    """The blocks first .. last - 1 of KV head n, into the state in `rows`."""
    folded, folds = -ONE, folds_of(shape, keys, values)
    if not keys.per_channel:
        fold_nothing(shape, keys, rows)
    for block in range(first, last):
        valid = min(UNIT, tokens - block * UNIT)
        look_ahead(rows.ahead_k, shape, keys, n, block + 1, folds)
        look_ahead(rows.ahead_v, shape, values, n, block + 1, folds)
        if keys.per_channel:
            folded = scores_per_channel(shape, keys, n, block, valid, folded, rows)
        else:
            scores_per_token(shape, keys, n, block, valid, rows)
        softmax_step(shape.R, shape.D, valid, softcap, rows)
        add_values(shape, values, n, block, valid, rows)


@njit(**ONCE)
def whole_line(at):
    """The first address from here on where a line of memory begins. A vector that lies
    in two lines is two loads, or stores."""
    return -(-at // LINE) * LINE


@njit(**ONCE)
def rows_in(shape, groups, memory, space):
    """Rows in two arrays, float32 and bytes, of `sizes`."""
    _, heads, D, terms = shape
    n, tile = max(D, UNIT), heads * UNIT
    q, ahead = whole_line(address(memory)), whole_line(address(space))
    x, o, w = q + 4 * heads * D, q + 8 * heads * D, q + 12 * heads * D
    S, T, U, s = w + 4 * tile, w + 8 * tile, w + 12 * tile, w + 16 * tile
    z, a = s + 4 * n, s + 8 * n
    b, sum_q = a + 8 * groups * heads, a + 12 * groups * heads
    a_v = a + 16 * groups * heads
    b_v, m, l = a_v + 8 * heads, a_v + 12 * heads, a_v + 16 * heads  # noqa: E741
    top, one, none = a_v + 20 * heads, a_v + 24 * heads, a_v + 28 * heads
    Q = ahead + LINE
    P, ahead_v = Q + max(terms, 1) * heads * D, ahead + 24
    return Rows(
        *(q, x, w, S, T, U, o, a, b, sum_q, a_v, b_v, m, l, top, one, none, s, z, Q, P),
        ahead,
        ahead_v,
    )


@njit(**ONCE)
def sizes(shape, groups):
    """Numbers and bytes that the rows need."""
    _, heads, D, terms = shape
    numbers = (3 * D + 4 * UNIT + 4 * groups + 8) * heads + 2 * max(D, UNIT)
    return numbers + LINE // 4, max(terms, 1) * heads * (D + UNIT) + 2 * LINE


#     q scale; as integers, numbers >= 0 are in order, then comes inf, and NaN
@njit(**ONCE)
def begin(shape, q, scale, rows):
    """The state of the softmax, and the queries of a task. How many are not finite, or
    will not be when they are scaled."""
    wide_vectors()
    size, wrong = shape.R * shape.D, 0
    limit = floats(rows.top, FIRST, ONE)
    limit[0] = MOST / abs(scale) if abs(scale) > 1 else MOST
    most = words(rows.top, FIRST, ONE)[0]
    given, bits = floats(q, FIRST, size), words(q, FIRST, size)
    scaled, o = floats(rows.q, FIRST, size), floats(rows.o, FIRST, size)
    for i in range(size):
        scaled[i], o[i] = given[i] * scale, np.float32(0)
        wrong += bits[i] & MAGNITUDE > most
    m, l = floats(rows.m, FIRST, shape.R), floats(rows.l, FIRST, shape.R)  # noqa: E741
    for h in range(shape.R):
        m[h], l[h] = NOTHING, np.float32(0)
    return wrong


@njit(nogil=True, **OPTIONS)
def attend_tasks(
    first, last, splits, shape, q, scale, tokens, keys, values, exact, softcap, out
):
    """The tasks first .. last - 1, without Python's lock: threads share the work.

    Task n * splits + split is one split of the tokens of KV head n. q : float32 (H, R,
    D). keys, values : int64, the fields of each Side. exact : int64 (parts, 4), see
    `attend_exact`. out : float32 (H, splits, R, D + 2), where o, m and l of the tasks
    go. Returns how many numbers of q are not finite.
    """
    wide_vectors()
    R, heads, D, _ = shape
    scale, softcap = np.float32(scale), np.float32(softcap)
    k, v = side_of(keys), side_of(values)
    groups = 1 if k.per_channel else -(-D // k.group)
    numbers, places = sizes(shape, groups)
    # Zeros, for `heads` beyond R: their weights stay 0.
    memory, space = np.zeros(numbers, np.float32), np.zeros(places, np.int8)
    rows = rows_in(shape, groups, memory, space)
    ones = floats(rows.one, FIRST, heads)
    for h in range(heads):
        ones[h] = np.float32(1)
    blocks, wrong = (tokens + UNIT - 1) // UNIT, 0
    for task in range(first, last):
        n, split = task // splits, task % splits
        wrong += begin(shape, address(q) + 4 * n * R * D, scale, rows)
        start, stop = blocks * split // splits, blocks * (split + 1) // splits
        attend_split(n, start, stop, shape, tokens, k, v, softcap, rows)
        if split == splits - 1:
            for i in range(len(exact)):
                attend_exact(shape, n, exact[i], softcap, rows)
        for h in range(R):
            o = floats(rows.o, h * D, D)
            for d in range(D):
                out[n, split, h, d] = o[d]
            out[n, split, h, D] = floats(rows.m, h, ONE)[0]
            out[n, split, h, D + 1] = floats(rows.l, h, ONE)[0]
    return wrong


@njit(**ONCE)
def side_of(fields):
    """The Side of its fields."""
    return Side(
        fields[0],
        fields[1],
        fields[2],
        fields[3],
        fields[4],
        fields[5],
        fields[6],
        fields[7],
        fields[8],
        fields[9],
        fields[10],
    )


# --- the splits of a head -------------------------------------------------------------
#     M = max_i m_i    l = sum_i l_i 2^(m_i - M)    o = sum_i o_i 2^(m_i - M) / l
@njit(**OPTIONS)
def merge(parts, sinks, out):
    """out (H, R, D) of partial results o, m, l: parts (H, splits, R, D + 2), in the
    order of the splits. sinks: logits (H, R) that take weight and give nothing, or
    (1, 0)."""
    H, R, D = out.shape
    has_sink = sinks.shape[1] > 0
    for n in range(H):
        for h in range(R):
            top, total = NOTHING, np.float32(0)
            if has_sink:
                top = sinks[n, h]
            for i in range(parts.shape[1]):
                top = larger(top, parts[n, i, h, D])
            if has_sink:
                total = np.exp2(sinks[n, h] - top)
            for d in range(D):
                out[n, h, d] = np.float32(0)
            for i in range(parts.shape[1]):
                weight = np.exp2(parts[n, i, h, D] - top)
                total += weight * parts[n, i, h, D + 1]
                for d in range(D):
                    out[n, h, d] += weight * parts[n, i, h, d]
            if total > 0:
                for d in range(D):
                    out[n, h, d] /= total
