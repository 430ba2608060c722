"""Numbers of 16 bits, and sums that are rounded once.

NumPy has no fused multiply-add, no bfloat16, and rounds to nearest only. Here float64
carries the exact product of two float32, and what the float64 sum drops decides the
last rounding.
"""

import numpy as np

f16, f32, f64 = np.float16, np.float32, np.float64
u16, u32, u64 = np.uint16, np.uint32, np.uint64

HALF_VALUES = np.arange(65536, dtype=u16).view(f16).astype(f32)
BF16_NAN = u16(0x7FFF)


# ---- 16-bit floating point, held as bits


def widen(bits, type_):
    """The float32 values of f16 or bf16 bits; exact."""
    if type_ == "f16":
        return HALF_VALUES.take(bits)
    return (bits.astype(u32) << u32(16)).view(f32)


def narrow(values, type_):
    """The f16 or bf16 bits of float32 or float64 values, to nearest, ties to even."""
    if type_ == "f16":
        return values.astype(f16).view(u16)
    bits = to_odd(values).view(u32)
    even = (bits >> u32(16)) & u32(1)
    rounded = ((bits + u32(0x7FFF) + even) >> u32(16)).astype(u16)
    return np.where(np.isnan(values), BF16_NAN, rounded)


def to_odd(values):
    """float64 -> float32 such that a second rounding gives what one would give.

    Bits that are dropped leave a one in the last place ("round to odd").
    """
    if values.dtype == f32:
        return values
    low = u64(2**29 - 1)
    bits = values.view(u64)
    sticky = bits | ((bits & low) + low)
    return (sticky & ~low).view(f64).astype(f32)


def on_halves(function, type_):
    """A function of float32 values as one of bits of `type_`, f16, bf16 or pairs."""
    kind = type_.removesuffix("x2")

    def single(*bits):
        return narrow(function(*(widen(b, kind) for b in bits)), kind)

    return single if kind == type_ else on_pairs(single)


def on_pairs(function):
    """A function of uint16 arrays as one of uint32 arrays that hold two each."""

    def pairs(*words):
        n = max(np.size(w) for w in words)
        halves = [spread(w, n).view(u16) for w in words]
        result = np.ascontiguousarray(function(*halves)).view(u32)
        return result if any(np.ndim(w) for w in words) else result[0]

    return pairs


def spread(value, n):
    """A value that may be a scalar as a contiguous array of n."""
    return np.full(n, value) if np.ndim(value) == 0 else np.ascontiguousarray(value)


# ---- sums and products rounded once


def rounded_sum(p, z, dtype, mode="rn"):
    """p + z for float64 p, z, rounded once to `dtype` (float32 or float16).

    mode: rn to nearest even, rz toward zero, rm down, rp up. Exact but for subnormal
    float32 results, which may be rounded twice.
    """
    s = p + z
    if mode == "rn":
        return _nearest(p, z, s, dtype)
    return directed(s, _dropped(p, z, s), dtype, mode)


def _dropped(p, z, s):
    """(p + z) - s exactly: what the float64 sum s lost (Knuth's two-sum)."""
    back = s - p
    return (p - (s - back)) + (z - back)


def _nearest(p, z, s, dtype):
    """s is right unless it lies halfway between two results: what it lost decides."""
    if np.ndim(s) == 0:
        return _nearest(*(np.atleast_1d(v) for v in (p, z, s)), dtype)[0]
    result = s.astype(dtype)
    low, half = _SPARE[dtype]
    halfway = (s.view(u64) & low) == half
    if halfway.any():
        i = halfway.nonzero()[0]
        p, z, s = (v[i] if np.ndim(v) else v for v in (p, z, s))
        e = _dropped(p, z, s)
        if e.any():
            beside = np.nextafter(s, np.copysign(np.inf, e))
            result[i] = np.where(e != 0, beside, s).astype(dtype)
    return result


# The bits of a float64 that a narrower type has no room for: all, and the first.
_SPARE = {
    f32: (u64(2**29 - 1), u64(2**28)),
    f16: (u64(2**42 - 1), u64(2**41)),
}


def directed(s, e, dtype, mode):
    """The exact value s + e rounded rz, rm or rp to `dtype`; |e| < 1 ulp of s."""
    r = s.astype(dtype)
    d = s - r.astype(f64)
    above = np.where(d != 0, d, e)  # > 0: the exact value is above r
    inf = dtype(np.inf)
    down, up = np.nextafter(r, -inf), np.nextafter(r, inf)
    if mode == "rm" or mode == "rz":
        r = np.where((above < 0) & ((mode == "rm") | (s > 0)), down, r)
    if mode == "rp" or mode == "rz":
        r = np.where((above > 0) & ((mode == "rp") | (s < 0)), up, r)
    return r


def fma_f32(x, y, z, mode="rn"):
    """x * y + z, rounded once."""
    return rounded_sum(x.astype(f64) * y, z.astype(f64), f32, mode)


def fma_f64(x, y, z):
    """x * y + z with the product's rounding error put back (Dekker's product)."""
    p = x * y
    x1, y1 = _head(x), _head(y)
    x2, y2 = x - x1, y - y1
    error = x2 * y2 - (((p - x1 * y1) - x2 * y1) - x1 * y2)
    s = p + z
    result = s + (_dropped(p, z, s) + error)
    return np.where(np.isfinite(result), result, s)


def _head(x):
    """The upper 26 bits of a float64."""
    c = x * f64(2**27 + 1)
    return c - (c - x)


def saturate(x):
    """x clamped to [0, 1]; NaN becomes 0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(np.isnan(x), zero, np.clip(x, zero, one))
