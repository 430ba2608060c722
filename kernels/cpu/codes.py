"""x -> packed codes -> x_hat, row by row, without an array of codes in between.

Inside the compiled loops every array is (N, T, D): heads (and sequences) flattened,
tokens, channels. A group is `gt` tokens by `gc` channels, the last one smaller;
token t and channel c belong to group (t // gt, c // gc).

Numba's cache sees a change of this file only, so what the loops call stands here too.
"""

import math
from dataclasses import replace

import numpy as np
from numba import njit

from kvq.dtypes import as_float_array
from kvq.quantizer import integer_levels, scale_and_zero
from kvq.tensor import QuantizedTensor


def pack(x, scheme):
    """x (..., H, T, D) stored by `scheme`: what `kvq.quantize` gives.

    Raises TypeError or ValueError as `kvq.quantize` does.
    """
    x = as_float_array(x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., H, T, D) with D >= 1")
    shape = (1,) * (3 - x.ndim) + x.shape
    H, T, D = shape[-3:]
    N = math.prod(shape[:-2])
    x = np.ascontiguousarray(x, np.float32).reshape(N, T, D)
    _, gt, gc = scheme.group_shape(H, T, D)
    groups = (N, *scheme.metadata_shape(H, T, D)[1:])
    low, high = np.empty(groups, np.float32), np.empty(groups, np.float32)
    group_extremes(x, gt, gc, low, high)
    scale, zero = scale_of_extremes(low, high, scheme)
    codes = np.empty((N, T, scheme.row_bytes(D)), np.uint8)
    s, z = as_float32(scale, zero)
    s = np.where(s == 0, np.float32(1), s)  # such a group has one level: any s will do
    encode(x, s, z, gt, gc, scheme.bits, *integer_levels(scheme), codes)
    stored = [
        None if a is None else a.reshape(*shape[:-2], *a.shape[1:])
        for a in (codes, scale, zero)
    ]
    return QuantizedTensor(scheme, shape, *stored)


def dequant(qt, start=0, stop=None):
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
    s, z = (a.reshape(N, *a.shape[-2:]) for a in (s, z))
    offset = integer_levels(qt.scheme)[2]
    out = np.empty((N, t, D), np.float32)
    decode_codes(packed, s, z, gt, gc, start % gt, qt.scheme.bits, offset, out)
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


# --- compiled loops -----------------------------------------------------------------
@njit(cache=True)
def group_extremes(x, gt, gc, low, high):
    """low, high = min, max of each group; both (N, groups of T, groups of D)."""
    _, T, D = x.shape
    for n, i, j in np.ndindex(low.shape):
        a, b = np.float32(np.inf), np.float32(-np.inf)
        for t in range(i * gt, min(i * gt + gt, T)):
            for c in range(j * gc, min(j * gc + gc, D)):
                a, b = min(a, x[n, t, c]), max(b, x[n, t, c])
        low[n, i, j], high[n, i, j] = a, b


@njit(cache=True, error_model="numpy")
def encode(x, scale, zero, gt, gc, bits, lowest, highest, offset, packed):
    """code = clip(round((x - z) / s), lowest, highest) + offset, packed into rows.

    x, scale, zero : float32, scales without a 0.
    packed : uint8 (N, T, ceil(D * bits / 8)), written.
    """
    N, T, D = x.shape
    s, z = np.empty(D, np.float32), np.empty(D, np.float32)
    codes = np.zeros(-(-D // 8) * 8, np.uint8)
    low, high = np.float32(lowest), np.float32(highest)
    for n in range(N):
        for t in range(T):
            if t % gt == 0:
                spread(scale[n, t // gt], gc, s)
                spread(zero[n, t // gt], gc, z)
            for c in range(D):
                y = np.rint((x[n, t, c] - z[c]) / s[c])
                codes[c] = np.int32(min(max(y, low), high)) + offset
            pack_row(codes, bits, packed[n, t])


@njit(cache=True)
def spread(groups, gc, out):
    """out[c] = groups[c // gc]."""
    for j in range(len(groups)):
        out[j * gc : (j + 1) * gc] = groups[j]


@njit(cache=True)
def pack_row(codes, bits, row):
    """Eight codes are `bits` bytes: word = sum_i code_i * 2^(bits * i), low byte first.

    codes : uint8, zero-padded to a multiple of 8. row : uint8, written.
    """
    for u in range(len(codes) // 8):
        word = np.uint64(0)
        for i in range(8):
            word |= np.uint64(codes[8 * u + i]) << np.uint64(bits * i)
        for k in range(bits * u, min(bits * (u + 1), len(row))):
            row[k] = word & np.uint64(0xFF)
            word >>= np.uint64(8)


@njit(cache=True)
def decode_codes(packed, scale, zero, gt, gc, first, bits, offset, out):
    """x_hat = s * (code - offset) + z, in float32.

    packed : uint8 (N, T, ceil(D * bits / 8)), the first of them token `first` of its
    group. scale, zero : float32 (N, groups of T, groups of D).
    out : float32 (N, T, D), written.
    """
    N, T, D = out.shape
    s, z = np.empty(D, np.float32), np.empty(D, np.float32)
    codes = np.empty(-(-D // 8) * 8, np.uint8)
    for n in range(N):
        for t in range(T):
            i = (first + t) // gt
            if t == 0 or (first + t) % gt == 0:
                spread(scale[n, i], gc, s)
                spread(zero[n, i], gc, z)
            unpack_row(packed[n, t], bits, codes)
            for c in range(D):
                level = np.float32(np.int32(codes[c]) - offset)
                out[n, t, c] = s[c] * level + z[c]


@njit(cache=True)
def unpack_row(row, bits, codes):
    """The inverse of `pack_row`. codes : uint8, a multiple of 8 of them, written."""
    mask = np.uint64((1 << bits) - 1)
    for u in range(len(codes) // 8):
        word = np.uint64(0)
        for k in range(min(bits, len(row) - bits * u)):
            word |= np.uint64(row[bits * u + k]) << np.uint64(8 * k)
        for i in range(8):
            codes[8 * u + i] = word & mask
            word >>= np.uint64(bits)
