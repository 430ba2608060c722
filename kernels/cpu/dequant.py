"""Packed codes -> x_hat, in one pass."""

import numpy as np
from numba import njit

from kvq.kernels.cpu.pack import as_float32, spread
from kvq.quantizer import integer_levels


def dequant(qt, start=0, stop=None):
    """x_hat of the tokens start..stop-1: what `qt.dequantize(start, stop)` gives."""
    start, stop, _ = slice(start, stop).indices(qt.tokens)
    H, T, D = qt.shape[-3:]
    _, gt, gc = qt.scheme.group_shape(H, T, D)
    packed = qt.codes.reshape(-1, *qt.codes.shape[-2:])
    s, z = as_float32(qt.scale, qt.zero)
    s, z = (a.reshape(-1, *a.shape[-2:]) for a in (s, z))
    offset = integer_levels(qt.scheme)[2]
    out = np.empty((len(packed), stop - start, D), np.float32)
    decode_codes(packed, s, z, gt, gc, qt.scheme.bits, offset, start, out)
    return out.reshape(*qt.shape[:-2], stop - start, D)


@njit(cache=True)
def decode_codes(packed, scale, zero, gt, gc, bits, offset, start, out):
    """x_hat = s * (code - offset) + z, in float32, for the tokens from `start` on.

    packed : uint8 (N, T, ceil(D * bits / 8)). scale, zero : float32 (N, groups of T,
    groups of D). out : float32 (N, t, D), written.
    """
    N, T, D = out.shape
    s, z = np.empty(D, np.float32), np.empty(D, np.float32)
    codes = np.empty(-(-D // 8) * 8, np.uint8)
    for n in range(N):
        for t in range(T):
            i = (start + t) // gt
            if t == 0 or (start + t) % gt == 0:
                spread(scale[n, i], gc, s)
                spread(zero[n, i], gc, z)
            unpack_row(packed[n, start + t], bits, codes)
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
