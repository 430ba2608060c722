r"""Rounding rules that formats are defined by. Only these are used in `kvq.formats`.

All arithmetic is IEEE binary32 unless a format says otherwise. Two encoders that
differ in one of these rules write different bytes.
"""

import numpy as np

from kvq.quantizer import half_away

f32 = np.float32


def rne(v):
    """Round half to even: `np.rint`, CUDA `rintf`, `torch.round`."""
    return np.rint(v)


rha = half_away


def trh(v):
    """trunc(v + 0.5) for v >= 0, trunc(v - 0.5) below, the sums in binary32.

    The same as `rha` but just below a half, where the sum rounds up
    (vLLM int8_per_token_head and int4_per_token_head).
    """
    return np.trunc(v + np.copysign(f32(0.5), v))


def trc(v, c):
    """trunc(v + c), the sum in binary32: c = 8.5 is ggml's q4_0."""
    return np.trunc(v + f32(c))


def bucket(y, midpoints, ties):
    """How many midpoints lie below y: uint8, for at most 255 midpoints.

    A tie counts with ties="up", not with "down". For a few midpoints, comparing with
    each is ten times as fast as `np.searchsorted`.
    """
    is_above = {"up": np.greater_equal, "down": np.greater}[ties]
    count = np.zeros(np.shape(y), np.uint8)
    for m in midpoints:
        count += is_above(y, m)
    return count


def inverse(d):
    """1 / d in binary32, and 0 where d is 0 (ggml's convention).

    Also 0 for |d| below 2^-128, whose inverse is inf: what C makes of the codes that
    follow is undefined, and such a d is stored as a zero anyway.
    """
    d = np.asarray(d, f32)
    return np.divide(f32(1), d, out=np.zeros_like(d), where=np.abs(d) > 2.0**-128)
