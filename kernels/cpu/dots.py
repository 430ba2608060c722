r"""Attention by dot products of integers: queries and weights as bytes, like the codes.

With codes u of a group, x_hat = s (u - offset) + z, a score is

    q . k = sum_d q_d s_d u_d  +  sum_d q_d (z_d - offset s_d)
          = a sum_d Q_d u_d    +  b,            q_d s_d = a Q_d,  Q_d in -127..127

so the scales are folded into the query once per group of tokens, and the inner loop has
bytes only. Where keys have scales per token these stay outside of the sum. The same for
the values, with the weights p_t s_t = a P_t, P_t in 0..255.

What rounding takes from Q and P is paid back for the middle code: its sum times
(2^b - 1) / 2 is added. Error and price: `tests/kernels/test_cpu_dots.py`.

Everything here is compiled by Numba. A *block* is 64 tokens, see `blocks.py`. Base 2
throughout: S is a score times log2(e).
"""

from collections import namedtuple

import numpy as np
from numba import njit

from kvq.kernels.cpu.blocks import UNIT
from kvq.kernels.cpu.simd import (
    address,
    dot_keys,
    dot_values,
    exp2,
    half_to_float,
    larger,
    round_even,
)

LOG2E = np.float32(1.4426950408889634)
NOTHING = np.float32(-1e30)  # the maximum of no scores
OPTIONS = {"cache": True, "fastmath": True, "error_model": "numpy"}

# One side of a cache. codes (N, blocks, bytes); scale, zero: binary16 as uint16,
# (N, groups of tokens, groups of channels); group: tokens or channels that share one;
# piece: of `blocks.py`; has_zero 0 or 1: without zeros `zero` is not read.
Side = namedtuple(
    "Side", "codes scale zero bits group piece per_channel has_zero offset"
)
# Tokens in full precision: k, v float32 (N, E, D), of which length[n] are there.
Exact = namedtuple("Exact", "k v length")
# Unfinished results: m, l (tasks, heads), o (tasks, heads, D), float32.
Partials = namedtuple("Partials", "m l o")


# --- the dot products, by number of bits and heads ------------------------------------
@njit(**OPTIONS)
def key_sums(bits, heads, piece, words, keys, query, stride, out, out_stride):
    """`dot_keys` for any of its cases: 1 head, or a multiple of 4; 32 or 64 tokens."""
    for h in range(0, heads, 4):
        q, o = query + h * stride, out + 4 * h * out_stride
        if heads == 1 and piece == 64:
            if bits == 8:
                dot_keys(8, 1, 4, words, keys, q, stride, o, out_stride)
            elif bits == 4:
                dot_keys(4, 1, 4, words, keys, q, stride, o, out_stride)
            else:
                dot_keys(2, 1, 4, words, keys, q, stride, o, out_stride)
        elif heads == 1:
            if bits == 8:
                dot_keys(8, 1, 2, words, keys, q, stride, o, out_stride)
            elif bits == 4:
                dot_keys(4, 1, 2, words, keys, q, stride, o, out_stride)
            else:
                dot_keys(2, 1, 2, words, keys, q, stride, o, out_stride)
        elif piece == 64:
            if bits == 8:
                dot_keys(8, 4, 4, words, keys, q, stride, o, out_stride)
            elif bits == 4:
                dot_keys(4, 4, 4, words, keys, q, stride, o, out_stride)
            else:
                dot_keys(2, 4, 4, words, keys, q, stride, o, out_stride)
        elif bits == 8:
            dot_keys(8, 4, 2, words, keys, q, stride, o, out_stride)
        elif bits == 4:
            dot_keys(4, 4, 2, words, keys, q, stride, o, out_stride)
        else:
            dot_keys(2, 4, 2, words, keys, q, stride, o, out_stride)


@njit(**OPTIONS)
def value_sums(bits, heads, piece, words, values, weights, stride, scale, out, D):
    """`dot_values` for any of its cases: as `key_sums`, of 32 or 64 channels."""
    for h in range(0, heads, 4):
        p, s, o = weights + h * stride, scale + 4 * h, out + 4 * h * D
        if heads == 1 and piece == 64:
            if bits == 8:
                dot_values(8, 1, 4, words, values, p, stride, s, o, D)
            elif bits == 4:
                dot_values(4, 1, 4, words, values, p, stride, s, o, D)
            else:
                dot_values(2, 1, 4, words, values, p, stride, s, o, D)
        elif heads == 1:
            if bits == 8:
                dot_values(8, 1, 2, words, values, p, stride, s, o, D)
            elif bits == 4:
                dot_values(4, 1, 2, words, values, p, stride, s, o, D)
            else:
                dot_values(2, 1, 2, words, values, p, stride, s, o, D)
        elif piece == 64:
            if bits == 8:
                dot_values(8, 4, 4, words, values, p, stride, s, o, D)
            elif bits == 4:
                dot_values(4, 4, 4, words, values, p, stride, s, o, D)
            else:
                dot_values(2, 4, 4, words, values, p, stride, s, o, D)
        elif bits == 8:
            dot_values(8, 4, 2, words, values, p, stride, s, o, D)
        elif bits == 4:
            dot_values(4, 4, 2, words, values, p, stride, s, o, D)
        else:
            dot_values(2, 4, 2, words, values, p, stride, s, o, D)


# --- scores ---------------------------------------------------------------------------
#     x_d = a Q_d + rest_d,   a = max |x| / 127,   Q_d = round(x_d / a)
@njit(**OPTIONS)
def round_query(x, Q, middle):
    """(a, middle sum_d rest_d) of x (n,) float32. Q (n,) int8, written."""
    top = np.float32(1e-20)
    for d in range(len(x)):
        top = larger(top, larger(x[d], -x[d]))
    a, inverse, rest = top / np.float32(127), np.float32(127) / top, np.float32(0)
    for d in range(len(x)):
        y = round_even(x[d] * inverse)
        rest += x[d] - a * y
        Q[d] = np.int8(np.int32(y))
    return a, middle * rest


#     q . k = a sum_d Q_d u_d + b
#     b = sum_d q_d (z_d - offset s_d) + middle sum_d rest_d
@njit(**OPTIONS)
def fold_scales(q, keys, n, group, middle, Q, a, b, x):
    """For every head of q (R, D): Q (R, D), a and b (R,), written. x (D,): scratch."""
    R, D = q.shape
    scale, zero = keys.scale[n, group], keys.zero[n, group * keys.has_zero]
    for h in range(R):
        row, sum_x, sum_z = q[h], np.float32(0), np.float32(0)
        for d in range(D):
            x[d] = row[d] * half_to_float(scale[d])
            sum_x += x[d]
        if keys.has_zero:
            for d in range(D):
                sum_z += row[d] * half_to_float(zero[d])
        a[h], rest = round_query(x, Q[h], middle)
        b[h] = sum_z - np.float32(keys.offset) * sum_x + rest


@njit(**OPTIONS)
def scores_per_channel(q, keys, n, block, valid, scratch, S):
    """S (R, 64) of a block whose keys have scales per channel."""
    Q, sums, a, b, x, folded = scratch
    R, D = q.shape
    piece, p = keys.piece, 8 // keys.bits
    start = address(keys.codes[n, block])
    for t in range(0, valid, piece):
        group = (block * UNIT + t) // keys.group
        if group != folded[0]:
            middle = np.float32((2**keys.bits - 1) / 2)
            fold_scales(q, keys, n, group, middle, Q, a[0], b[0], x)
            folded[0] = group
        words, codes = D // (4 * p), start + t * D // p
        key_sums(
            keys.bits, len(Q), piece, words, codes, address(Q), D, address(sums), UNIT
        )
        for h in range(R):
            row, i, a_h, b_h = S[h, t : t + piece], sums[h], a[0, h], b[0, h]
            for j in range(piece):
                row[j] = np.float32(i[j]) * a_h + b_h


#     q . k_t = sum_g s_tg (a_g sum_d Q_d u_td + b_g) + z_tg sum_d q_d,   d in group g
@njit(**OPTIONS)
def scores_per_token(q, keys, n, block, valid, scratch, S):
    """S (R, 64) of a block whose keys have scales per token, for groups of channels."""
    Q, sums, a, b, _, folded = scratch
    R, D = q.shape
    p, groups = 8 // keys.bits, -(-D // keys.group)
    if folded[0] < 0:
        fold_nothing(q, keys, Q, a, b, folded)
    start, first = address(keys.codes[n, block]), block * UNIT
    s, z = np.empty(UNIT, np.float32), np.zeros(UNIT, np.float32)
    for h in range(R):
        S[h] = np.float32(0)
    for g in range(groups):
        c = g * keys.group
        words = min(keys.group, D - c) // (4 * p)
        read_halves(keys.scale[n, first : first + valid, g], s)
        if keys.has_zero:
            read_halves(keys.zero[n, first : first + valid, g], z)
        codes = start + c // (4 * p) * UNIT * 4
        key_sums(
            keys.bits,
            len(Q),
            UNIT,
            words,
            codes,
            address(Q) + c,
            D,
            address(sums),
            UNIT,
        )
        for h in range(R):
            row, i, a_h, b_h, sum_q = S[h], sums[h], a[g, h], b[g, h], b[groups + g, h]
            for t in range(UNIT):
                row[t] += s[t] * (np.float32(i[t]) * a_h + b_h) + z[t] * sum_q


@njit(**OPTIONS)
def fold_nothing(q, keys, Q, a, b, folded):
    """Q, a and b of each group of channels, and sum_d q_d behind them, once for all."""
    R, D = q.shape
    groups, middle = -(-D // keys.group), np.float32((2**keys.bits - 1) / 2)
    for h in range(R):
        for g in range(groups):
            c = g * keys.group
            x = q[h, c : min(D, c + keys.group)]
            total = np.float32(0)
            for d in range(len(x)):
                total += x[d]
            a[g, h], rest = round_query(x, Q[h, c : c + len(x)], middle)
            b[g, h] = rest - np.float32(keys.offset) * total
            b[groups + g, h] = total
    folded[0] = 0


@njit(**OPTIONS)
def read_halves(bits, out):
    """binary16 numbers as float32, and 0 behind them."""
    for t in range(len(bits)):
        out[t] = half_to_float(bits[t])
    for t in range(len(bits), len(out)):
        out[t] = np.float32(0)


# --- softmax and values ---------------------------------------------------------------
#     m' = max(m, max_t S_t)     l' = l 2^(m - m') + sum_t 2^(S_t - m')
#     o' = o 2^(m - m')
@njit(**OPTIONS)
def softmax_step(S, valid, m, l, o, softcap):  # noqa: E741
    """The step for one head: S (64,) becomes 2^(S - m'); returns (m', l')."""
    if softcap > 0:
        for t in range(valid):
            S[t] = softcap * np.tanh(S[t] / softcap)
    for t in range(valid, UNIT):
        S[t] = NOTHING
    top = m
    for t in range(UNIT):
        S[t] *= LOG2E
        top = larger(top, S[t])
    if top > m:
        shrink = exp2(m - top)
        l *= shrink  # noqa: E741
        for d in range(len(o)):
            o[d] *= shrink
    total = np.float32(0)
    for t in range(UNIT):
        S[t] = exp2(S[t] - top)
    for t in range(valid, UNIT):
        S[t] = np.float32(0)
    for t in range(UNIT):
        total += S[t]
    return top, l + total


#     sum_t p_t v_td = a sum_t P_t u_td + sum_t p_t (z_t + (shift - offset) s_t)
@njit(**OPTIONS)
def round_weights(p, s, z, shift, middle, P, w):
    """(a, the second sum) of one head and group of channels. P (64,) uint8, written."""
    top, constant = np.float32(1e-30), np.float32(0)
    for t in range(UNIT):
        w[t] = p[t] * s[t]
        constant += p[t] * z[t] + w[t] * shift
        top = larger(top, w[t])
    a, inverse, rest = top / np.float32(255), np.float32(255) / top, np.float32(0)
    for t in range(UNIT):
        y = round_even(w[t] * inverse)
        rest += w[t] - a * y
        P[t] = np.uint8(np.int32(y))
    return a, constant + middle * rest


@njit(**OPTIONS)
def add_values(p, values, n, block, valid, o, P, a, s, z, w):
    """o (heads, D) of weights p (heads, 64) and the values of a block, added to."""
    heads, D = o.shape
    R, planes, first = len(p), 8 // values.bits, block * UNIT
    signed = np.float32(128 if values.bits == 8 else 0)
    middle = np.float32((2**values.bits - 1) / 2) - signed
    start = address(values.codes[n, block])
    for g in range(-(-D // values.group)):
        c, end = g * values.group, min(D, (g + 1) * values.group)
        read_halves(values.scale[n, first : first + valid, g], s)
        if values.has_zero:
            read_halves(values.zero[n, first : first + valid, g], z)
        shift = signed - np.float32(values.offset)
        for h in range(R):
            a[h], constant = round_weights(p[h], s, z, shift, middle, P[h], w)
            row = o[h]
            for d in range(c, end):
                row[d] += constant
        for d in range(c, end, values.piece):
            value_sums(
                values.bits,
                heads,
                values.piece,
                UNIT // (4 * planes),
                start + d * UNIT // planes,
                address(P),
                UNIT,
                address(a),
                address(o) + 4 * d,
                D,
            )


@njit(**OPTIONS)
def attend_exact(q, k, v, m, l, o, softcap):  # noqa: E741
    """The tokens in full precision join the state of every head."""
    for h in range(len(q)):
        row = o[h]
        for t in range(len(k)):
            S = np.float32(0)
            for d in range(q.shape[1]):
                S += q[h, d] * k[t, d]
            if softcap > 0:
                S = softcap * np.tanh(S / softcap)
            S *= LOG2E
            top = max(m[h], S)
            shrink, p = exp2(m[h] - top), exp2(S - top)
            m[h], l[h] = top, l[h] * shrink + p
            for d in range(len(row)):
                row[d] = row[d] * shrink + p * v[t, d]


# --- a task: one split of one KV head -------------------------------------------------
@njit(**OPTIONS)
def attend_split(task, splits, q, tokens, keys, values, exact, softcap, partials):
    """Write the partial result of task = n * splits + split. q (N, R, D), scaled."""
    n, split = task // splits, task % splits
    R, D = q.shape[1:]
    heads = partials.m.shape[1]  # R, filled up to what the dot products take
    blocks = (tokens[n] + UNIT - 1) // UNIT
    m, l = np.full(heads, NOTHING), np.zeros(heads, np.float32)  # noqa: E741
    o, S = np.zeros((heads, D), np.float32), np.empty((R, UNIT), np.float32)
    Q, P = np.zeros((heads, D), np.int8), np.zeros((heads, UNIT), np.uint8)
    sums, a_v = np.empty((heads, UNIT), np.int32), np.zeros(heads, np.float32)
    rows = 1 if keys.per_channel else 2 * -(-D // keys.group)
    a, b = np.empty((rows, heads), np.float32), np.empty((rows, heads), np.float32)
    folded, x = np.full(1, -1), np.empty(D, np.float32)
    s, z = np.zeros(UNIT, np.float32), np.zeros(UNIT, np.float32)
    w = np.empty(UNIT, np.float32)
    scratch = Q, sums, a, b, x, folded
    for block in range(blocks * split // splits, blocks * (split + 1) // splits):
        valid = min(UNIT, tokens[n] - block * UNIT)
        if keys.per_channel:
            scores_per_channel(q[n], keys, n, block, valid, scratch, S)
        else:
            scores_per_token(q[n], keys, n, block, valid, scratch, S)
        for h in range(R):
            m[h], l[h] = softmax_step(S[h], valid, m[h], l[h], o[h], softcap)
        add_values(S, values, n, block, valid, o, P, a_v, s, z, w)
    if split == splits - 1:
        E = exact.length[n]
        attend_exact(q[n], exact.k[n, :E], exact.v[n, :E], m, l, o, softcap)
    for h in range(R):
        partials.m[task, h], partials.l[task, h] = m[h], l[h]
        for d in range(D):
            partials.o[task, h, d] = o[h, d]


@njit(nogil=True, **OPTIONS)
def attend_tasks(
    first, last, splits, q, tokens, keys, values, exact, softcap, partials
):
    """The tasks first .. last - 1, without Python's lock: threads share the work."""
    for task in range(first, last):
        attend_split(task, splits, q, tokens, keys, values, exact, softcap, partials)
