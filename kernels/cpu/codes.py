"""x -> packed codes -> x_hat, without an array of codes in between.

Inside the compiled loops every array is (N, T, D): heads (and sequences) flattened,
tokens, channels. A group is `gt` tokens by `gc` channels, the last one smaller;
token t and channel c belong to group (t // gt, c // gc). A *strip* is gt tokens of one
head: it is read once from memory, and all that follows finds it in the cache.

Numba's cache sees a change of this file only, so what the loops call stands here too,
but for the instructions in `simd.py`.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
from numba import njit

from kvq.dtypes import LARGEST_INPUT, as_float_array
from kvq.kernels.cpu.simd import (
    LINE,
    address,
    codes_of,
    encode_rows,
    encode_same,
    extremes,
    float_to_half,
    floats,
    half_to_float,
    halves,
    larger,
    nearest_byte,
    prefetch,
    words,
)
from kvq.kernels.cpu.threads import in_parts
from kvq.quantizer import integer_levels, largest_level, scale_and_zero
from kvq.tensor import QuantizedTensor

HALF = np.float32(65504)  # the largest and the smallest number of binary16
TINY = np.float32(2**-24)
LARGEST = np.float32(LARGEST_INPUT)
NOTHING = np.float32(-3.4e38)  # less than any number that is taken
BATCH = 32  # strips of one token


def pack(x, scheme, threads=None):
    """x (..., H, T, D) stored by `scheme`: what `kvq.quantize` gives.

    threads : at most so many; None: one for each core that the process may use.
    Raises TypeError or ValueError as `kvq.quantize` does.
    """
    x = as_float_array(x, finite=False)  # `stored` looks
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., H, T, D) with D >= 1")
    shape = (1,) * (3 - x.ndim) + x.shape
    rows = x.reshape(math.prod(shape[:-2]), *shape[-2:])
    arrays = stored(rows, scheme, scheme.bits, threads)
    arrays = [
        None if a is None else a.reshape(*shape[:-2], *a.shape[1:]) for a in arrays
    ]
    return QuantizedTensor(scheme, shape, *arrays)


def stored(given, scheme, bits, threads=None):
    """(codes, scale, zero) of x (N, T, D); zero None where the scheme has none.

    bits : of a code in the rows, uint8 (N, T, ceil(D bits / 8)): the scheme's, or 8 for
    a code in each byte. Raises ValueError for numbers that are not finite.
    """
    N, T, D = given.shape
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.ascontiguousarray(given, np.float32)
    _, gt, gc = scheme.group_shape(1, T, D)
    groups = (N, *scheme.metadata_shape(1, T, D)[1:])
    codes = np.empty((N, T, -(-D * bits // 8)), np.uint8)
    levels, finite = integer_levels(scheme), np.ones(1, bool)
    strips = partial(in_parts, N * groups[1], size=gt * D, threads=threads)
    if scheme.scale_dtype == "float16":
        scale = np.empty(groups, np.float16)
        zero = np.empty(groups, np.float16) if scheme.has_zero else None
        some = scale if zero is None else zero  # the loop must be given an array
        s16, z16, rule = scale.view(np.uint16), some.view(np.uint16), _rule(scheme)
        strips(pack_strips, x, gt, gc, bits, levels, rule, s16, z16, codes, finite)
    else:
        low, high = np.empty(groups, np.float32), np.empty(groups, np.float32)
        strips(extremes_of_strips, x, gt, gc, low, high, finite)
        if finite[0]:
            scale, zero = scale_of_extremes(low, high, scheme)
            s, z = as_float32(scale, zero)
            s = np.where(s == 0, np.float32(1), s)  # one level: any s will do
            strips(encode_strips, x, s, z, gt, gc, bits, levels, codes)
    if not finite[0]:
        as_float_array(given)  # raises, and names the number
    return codes, scale, zero


def dequant(qt, start=0, stop=None, threads=None):
    """x_hat of the tokens start..stop-1: what `qt.dequantize(start, stop)` gives."""
    start, stop, _ = slice(start, stop).indices(qt.tokens)
    H, T, D = qt.shape[-3:]
    N, t = math.prod(qt.shape[:-2]), stop - start
    _, gt, gc = qt.scheme.group_shape(H, T, D)
    packed = qt.codes[..., start:stop, :].reshape(N, t, qt.scheme.row_bytes(D))
    groups = slice(start // gt, -(-stop // gt))  # those that hold these tokens
    s, z = as_float32(
        *(a if a is None else a[..., groups, :] for a in (qt.scale, qt.zero))
    )
    s, z = (np.ascontiguousarray(a.reshape(N, *a.shape[-2:])) for a in (s, z))
    offset = integer_levels(qt.scheme)[2]
    out = np.empty((N, t, D), np.float32)
    settings = gt, gc, start % gt, qt.scheme.bits, offset
    rows = np.ascontiguousarray(packed)
    in_parts(N * t, decode_rows, rows, s, z, settings, out, size=D, threads=threads)
    return out.reshape(*qt.shape[:-2], t, D)


def scale_of_extremes(low, high, scheme):
    """Scale and zero of each group, as stored: the reference's.

    A group's scale follows from its extremes alone, so the reference is given
    groups of two numbers.
    """
    axis = 2 if scheme.per == "token" else 1
    shape = list(low.shape)
    shape[axis] *= 2
    pairs = np.stack([low, high], axis=axis + 1).reshape(shape)
    return scale_and_zero(pairs, replace(scheme, group=2))


def as_float32(scale, zero):
    """Scales and zeros as the loops read them; no zero is a zero of 0."""
    s = scale.astype(np.float32)
    return s, np.zeros_like(s) if zero is None else zero.astype(np.float32)


def _rule(scheme):
    """(which rule, the divisor) of a scale: see `scale_and_zero_of`."""
    if scheme.has_zero:
        return 0, np.float32(2**scheme.bits - 1)
    if scheme.levels == "signed-extreme":
        return 2, np.float32(-largest_level(scheme))
    return 1, np.float32(largest_level(scheme))


# --- strips ---------------------------------------------------------------------------
@njit(cache=True, nogil=True, error_model="numpy")
def pack_strips(
    first, last, x, gt, gc, bits, levels, rule, scale, zero, packed, finite
):
    """The strips first .. last - 1 of x float32 (N, T, D).

    scale, zero : binary16 as uint16 (N, groups of T, groups of D), written; zero only
    where the rule has one. packed : uint8 (N, T, row bytes), written. finite : bool
    (1,), set to False for numbers that the reference does not take.

    Strips of one token go through in batches: what a group's scale waits for, its
    extremes, is long done when it is computed.
    """
    _, T, D = x.shape
    strips, groups = scale.shape[1:]
    batch = BATCH if gt == 1 else 1
    n_groups = batch * groups
    width = max(D, 16)
    memory = np.zeros(width + 5 * max(n_groups, D), np.float32)
    codes, step = np.zeros((D + 7) // 8 * 8, np.uint8), 4 * max(n_groups, D)
    wrong, to, numbers = address(memory), address(codes), address(x)
    low, high = wrong + 4 * width, wrong + 4 * width + step
    s, z, r = high + step, high + 2 * step, high + 3 * step
    to_scale, to_zero = address(scale), address(zero)
    for start in range(first, last, batch):
        stop = min(start + batch, last)
        for strip in range(start, stop):
            n, i = strip // strips, strip % strips
            row, end = n * T + i * gt, n * T + min((i + 1) * gt, T)
            at = (strip - start) * groups
            if gt == 1:  # half of a row of the next batch here, half below
                ask_for(numbers + 4 * D * stop + 2 * D * (strip - start), 2 * D)
            group_extremes(numbers, row, end, D, gc, low, high, at, wrong)
        finite[0] &= all_taken(low, high, 0, (stop - start) * groups, wrong, width)
        store_scales(low, high, start * groups, stop * groups, rule, to_scale, to_zero)
        read_scales(to_scale, to_zero, start * groups, stop * groups, rule, s, z, r)
        for strip in range(start, stop):
            n, i = strip // strips, strip % strips
            row, end = n * T + i * gt, n * T + min((i + 1) * gt, T)
            at = 4 * (strip - start) * groups
            for t in range(row, end):
                if gt == 1:
                    ask_for(numbers + 4 * D * stop + 2 * D * (batch + t - start), 2 * D)
                else:
                    ask_for(numbers + 4 * D * (t + gt), 4 * D)
                encode_row(numbers, t, D, gc, s + at, z + at, r + at, levels, to)
                pack_row(to, len(codes), bits, packed, t)


@njit(cache=True)
def ask_for(start, nbytes):
    """Bytes of the next batch, while this one is in the cache. Past the end nothing
    happens."""
    for line in range(0, nbytes, LINE):
        prefetch(start + line)


@njit(cache=True, nogil=True)
def extremes_of_strips(first, last, x, gt, gc, low, high, finite):
    """low, high = min, max of each group of the strips; (N, groups of T, of D)."""
    _, T, D = x.shape
    strips, groups = low.shape[1:]
    sums = np.zeros(max(D, 16), np.float32)
    to_low, to_high, wrong = address(low), address(high), address(sums)
    for strip in range(first, last):
        n, i = strip // strips, strip % strips
        row, end, at = n * T + i * gt, n * T + min((i + 1) * gt, T), strip * groups
        group_extremes(address(x), row, end, D, gc, to_low, to_high, at, wrong)
    count = (last - first) * groups
    finite[0] &= all_taken(to_low, to_high, first * groups, count, wrong, len(sums))


@njit(cache=True, nogil=True, error_model="numpy")
def encode_strips(first, last, x, scale, zero, gt, gc, bits, levels, packed):
    """Codes of the strips; scale, zero : float32, scales without a 0."""
    _, T, D = x.shape
    strips, groups = scale.shape[1:]
    codes = np.zeros((D + 7) // 8 * 8, np.uint8)
    inverse = np.float32(1) / scale
    for strip in range(first, last):
        n, i = strip // strips, strip % strips
        at = 4 * strip * groups
        s, z, r = address(scale) + at, address(zero) + at, address(inverse) + at
        for row in range(n * T + i * gt, n * T + min((i + 1) * gt, T)):
            encode_row(address(x), row, D, gc, s, z, r, levels, address(codes))
            pack_row(address(codes), len(codes), bits, packed, row)


# --- groups: extremes and scales ------------------------------------------------------
@njit(cache=True)
def group_extremes(x, start, stop, D, gc, low, high, at, wrong):
    """low, high = min, max of the groups of the rows start .. stop - 1 of x (rows, D),
    from number `at` on. wrong : address of max(D, 16) sums of x 0."""
    if gc == 1:
        channel_extremes(x, start, stop, D, low, high, at, wrong)
        return
    for j in range((D + gc - 1) // gc):
        least, most = -NOTHING, NOTHING
        for t in range(start, stop):
            a, b = row_extremes(x + 4 * (t * D + j * gc), min(gc, D - j * gc), wrong)
            least, most = -larger(-least, -a), larger(most, b)
        floats(low, at + j, 1)[0], floats(high, at + j, 1)[0] = least, most


@njit(cache=True)
def row_extremes(x, n, wrong):
    """`extremes` of any number of numbers."""
    if n % 16 == 0:
        return extremes(x, n, wrong)
    row, sums, low, high = floats(x, 0, n), floats(wrong, 0, 1), -NOTHING, NOTHING
    for c in range(n):
        low, high = -larger(-low, -row[c]), larger(high, row[c])
        sums[0] += row[c] * np.float32(0)
    return low, high


@njit(cache=True)
def channel_extremes(x, start, stop, D, low, high, at, wrong):
    """`group_extremes` of groups of one channel: a row at a time."""
    low, high = floats(low, at, D), floats(high, at, D)
    for c in range(D):
        low[c], high[c] = -NOTHING, NOTHING
    for t in range(start, stop):
        row, sums = floats(x, t * D, D), floats(wrong, 0, D)
        for c in range(D):
            low[c] = -larger(-low[c], -row[c])
            high[c] = larger(high[c], row[c])
            sums[c] += row[c] * np.float32(0)


@njit(cache=True)
def all_taken(low, high, at, n, wrong, width):
    """Whether the reference takes all numbers of n groups with these extremes, and
    these `width` sums of x 0."""
    low, high, sums = floats(low, at, n), floats(high, at, n), floats(wrong, 0, width)
    top, bad = NOTHING, np.float32(0)
    for k in range(n):
        top = larger(top, larger(-low[k], high[k]))
    for k in range(width):
        bad += sums[k]
    return bad == 0 and top <= LARGEST


#     0  asymmetric      s = (max - min) / divisor,     z = min
#     1  symmetric       s = max |x| / divisor
#     2  signed-extreme  s = the x of largest |x| / divisor
@njit(cache=True, error_model="numpy")
def store_scales(low, high, start, stop, rule, scale, zero):
    """Scales and zeros start .. stop - 1 as binary16, as the reference stores them, of
    the extremes low, high, of which the first is that of `start`."""
    kind, divisor = rule
    n = stop - start
    low, high = floats(low, 0, n), floats(high, 0, n)
    scale, zero = halves(scale, start, n), halves(zero, start, n)
    for k in range(n):
        a, b = within(low[k], HALF), within(high[k], HALF)
        s = b - a
        if kind == 1:
            s = larger(-low[k], high[k])
        elif kind == 2:
            s = low[k] if -low[k] > high[k] else high[k]
        s /= divisor
        if s != 0:  # one too small for the format becomes its smallest
            s = copysign(larger(abs(s), TINY), s)
        scale[k] = float_to_half(within(s, HALF))
        if kind == 0:
            zero[k] = float_to_half(a)


@njit(cache=True, error_model="numpy")
def read_scales(scale, zero, start, stop, rule, s, z, r):
    """s, z and r = 1 / s of what was stored. A group whose scale is 0 has one level:
    any scale will do for its codes."""
    n = stop - start
    scale, zero = halves(scale, start, n), halves(zero, start, n)
    s, z, r = floats(s, 0, n), floats(z, 0, n), floats(r, 0, n)
    for k in range(n):
        s_k = half_to_float(scale[k])
        s[k] = s_k if s_k != 0 else np.float32(1)
        r[k] = np.float32(1) / s[k]
        if rule[0] == 0:
            z[k] = half_to_float(zero[k])


@njit(cache=True, inline="always")
def within(x, limit):
    """x clipped to +-limit."""
    return larger(-larger(-x, -limit), -limit)


@njit(cache=True, inline="always")
def copysign(x, sign):
    """x >= 0 with the sign of `sign`."""
    return x if sign > 0 else -x


# --- rows: codes ----------------------------------------------------------------------
#     code = clip(round((x - z) / s), lowest, highest) + offset
@njit(cache=True)
def encode_row(x, row, D, gc, s, z, r, levels, codes):
    """Row `row` of x (rows, D), of scales s, zeros z and r = 1 / s of its groups."""
    if gc == 1:
        encode_channels(x, row * D, D, s, z, r, levels, codes)
        return
    for j in range((D + gc - 1) // gc):
        a, n = j * gc, min(gc, D - j * gc)
        s_j, z_j, r_j = floats(s, j, 1)[0], floats(z, j, 1)[0], floats(r, j, 1)[0]
        encode_group(x, row * D + a, n, s_j, z_j, r_j, levels, codes + a)


@njit(cache=True)
def encode_channels(x, start, n, s, z, r, levels, codes):
    """x[start : start + n], with a scale and a zero for each number."""
    low, high = np.float32(levels[0]), np.float32(levels[1])
    offset, whole = np.int32(levels[2]), n // 16 * 16
    encode_rows(x + 4 * start, whole, s, z, r, low, high, offset, codes)
    x, s, z, out = (
        floats(x, start, n),
        floats(s, 0, n),
        floats(z, 0, n),
        codes_of(codes, 0, n),
    )
    for c in range(whole, n):
        out[c] = encoded(x[c], s[c], z[c], low, high, offset)


@njit(cache=True)
def encode_group(x, start, n, s, z, r, levels, codes):
    """x[start : start + n], with one scale and one zero."""
    low, high = np.float32(levels[0]), np.float32(levels[1])
    offset, whole = np.int32(levels[2]), n // 16 * 16
    encode_same(x + 4 * start, whole, s, z, r, low, high, offset, codes)
    x, out = floats(x, start, n), codes_of(codes, 0, n)
    for c in range(whole, n):
        out[c] = encoded(x[c], s, z, low, high, offset)


@njit(cache=True, inline="always", error_model="numpy")
def encoded(x, s, z, low, high, offset):
    """One number's code."""
    y = (x - z) / s
    return nearest_byte(larger(-larger(-y, -high), low), offset)


# --- rows: packing --------------------------------------------------------------------
@njit(cache=True)
def pack_row(codes, n, bits, packed, row):
    """Eight codes are `bits` bytes: word = sum_i code_i * 2^(bits * i), low byte first.

    codes : uint8, zero-padded to a multiple n of 8. packed : uint8 (..., row bytes), of
    which row `row` is written.
    """
    size = packed.shape[2]
    out = codes_of(address(packed), row * size, size)
    codes, pairs, fours = codes_of(codes, 0, n), halves(codes, 0, n), words(codes, 0, n)
    if bits == 8:
        for i in range(size):
            out[i] = codes[i]
    elif bits == 4:  # two codes are 16 bits that lie side by side
        for i in range(size):
            out[i] = np.uint8(pairs[i] | pairs[i] >> 4)
    elif bits == 2:
        for i in range(size):
            four = fours[i]
            out[i] = np.uint8(four | four >> 6 | four >> 12 | four >> 18)
    else:
        for u in range(n // 8):
            word = np.uint64(0)
            for i in range(8):
                word |= np.uint64(codes[8 * u + i]) << np.uint64(bits * i)
            for k in range(bits * u, min(bits * (u + 1), size)):
                out[k] = word & np.uint64(0xFF)
                word >>= np.uint64(8)


@njit(cache=True, nogil=True)
def decode_rows(first, last, packed, scale, zero, settings, out):
    """x_hat = s * (code - offset) + z, in float32, of the rows first .. last - 1.

    packed : uint8 (N, t, row bytes), the first of them token `start` of its group.
    scale, zero : float32 (N, groups of T, groups of D). out : float32 (N, t, D),
    written.
    """
    gt, gc, start, bits, offset = settings
    _, T, D = out.shape
    strips, groups = scale.shape[1:]
    memory, space = np.empty(2 * D, np.float32), np.empty((D + 7) // 8 * 8, np.uint8)
    at, shift = address(memory), np.float32(offset)
    s, z, codes = floats(at, 0, D), floats(at, D, D), codes_of(address(space), 0, D)
    current = -1
    for row in range(first, last):
        n, t = divmod(row, T)
        strip = n * strips + (start + t) // gt
        if strip != current:
            for j in range(groups):
                a, count = j * gc, min(gc, D - j * gc)
                set_group(at, a, count, scale[n, strip - n * strips, j])
                set_group(at + 4 * D, a, count, zero[n, strip - n * strips, j])
            current = strip
        unpack_row(packed, row, bits, address(space), len(space))
        x = floats(address(out), row * D, D)
        for c in range(D):
            x[c] = s[c] * (np.float32(codes[c]) - shift) + z[c]


@njit(cache=True)
def set_group(out, start, n, value):
    """out[start : start + n] = value"""
    part = floats(out, start, n)
    for c in range(n):
        part[c] = value


@njit(cache=True)
def unpack_row(packed, row, bits, codes, n):
    """The inverse of `pack_row`."""
    size = packed.shape[2]
    packed = codes_of(address(packed), row * size, size)
    codes, pairs, fours = codes_of(codes, 0, n), halves(codes, 0, n), words(codes, 0, n)
    if bits == 8:
        for i in range(size):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range(size):
            byte = np.uint16(packed[i])
            pairs[i] = byte & 15 | (byte & 240) << 4
    elif bits == 2:
        for i in range(size):
            byte = np.uint32(packed[i])
            low = byte & 3 | (byte & 12) << 6
            fours[i] = low | (byte & 48) << 12 | (byte & 192) << 18
    else:
        mask = np.uint64((1 << bits) - 1)
        for u in range(n // 8):
            word = np.uint64(0)
            for k in range(min(bits, size - bits * u)):
                word |= np.uint64(packed[bits * u + k]) << np.uint64(8 * k)
            for i in range(8):
                codes[8 * u + i] = word & mask
                word >>= np.uint64(bits)
