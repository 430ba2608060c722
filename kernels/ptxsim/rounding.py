"""Numbers of 16 bits, and sums that are rounded once.

NumPy has no fused multiply-add, no bfloat16, and rounds to nearest only. Here float64
carries the exact product of two float32, and what the float64 sum drops decides the
last rounding.
"""

from fractions import Fraction

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

    An inexact number goes to the neighbour that has a one in its last place.
    """
    if values.dtype == f32:
        return values
    near = values.astype(f32)
    gap = values - near.astype(f64)
    even = (near.view(u32) & u32(1)) == 0
    beside = np.nextafter(near, np.copysign(f32(np.inf), gap.astype(f32)))
    return np.where(even & ((gap < 0) | (gap > 0)), beside, near)


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


# The bits of a float64 that a narrower type has no room for.
SPARE = {"f32": 29, "bf16": 45}


def sum_to_round(p, z, type_):
    """p + z as a float64 that rounds to nearest in `type_` as the exact sum does.

    The float64 sum s does, unless it lies halfway between two results: then what s lost
    decides, and s moves that way. Exact but where the result is subnormal.
    """
    s = p + z
    if np.ndim(s) == 0:
        return sum_to_round(*(np.atleast_1d(f64(v)) for v in (p, z)), type_)[0]
    spare = SPARE[type_]
    halfway = (s.view(u64) & u64(2**spare - 1)) == u64(2 ** (spare - 1))
    if halfway.any():
        i = halfway.nonzero()[0]
        p, z = (v[i] if np.ndim(v) else v for v in (p, z))
        e = _dropped(p, z, s[i])
        s[i] = np.where(e != 0, _beside(s[i], e), s[i])
    return s


def _dropped(p, z, s):
    """(p + z) - s exactly: what the float64 sum s lost (Knuth's two-sum)."""
    back = s - p
    return (p - (s - back)) + (z - back)


def _beside(s, e):
    """The float64 next to s in the direction of e."""
    return np.nextafter(s, np.copysign(np.inf, e))


def rounded_sum(p, z, mode):
    """p + z for float64 p, z, rounded once to float32.

    mode: rn to nearest even, rz toward zero, rm down, rp up.
    """
    if mode == "rn":
        return sum_to_round(p, z, "f32").astype(f32)
    s = p + z
    if mode == "rm":  # downward, a sum of opposites is -0
        s = np.where((s == 0) & (np.signbit(p) | np.signbit(z)), f64(-0.0), s)
    return directed(s, _dropped(p, z, s), f32, mode)


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
    return rounded_sum(x.astype(f64) * y, z.astype(f64), mode)


def fma_f64(x, y, z):
    """x * y + z, rounded once (Boldo and Melquiond 2008, "Emulation of FMA").

    The product is p + e exactly, the sum of all three s + (t + d) exactly; the small
    sum is rounded to odd, so that the last rounding is right.
    """
    p = x * y
    e = _product_error(x, y, p)
    t = z + e
    s = p + t
    small = _odd_sum(_dropped(p, t, s), _dropped(z, e, t))
    zero = (x == 0) | (y == 0)
    result = np.where(zero | (e == 0), p + z, s + small)
    risky = ~zero & ((np.abs(p) < 2.0**-960) | ~np.isfinite(result))
    return _with_exact(result, risky, x, y, z) if np.any(risky) else result


def _with_exact(result, where, x, y, z):
    """`result`, with exact fractions `where` a part may under- or overflow."""
    where, x, y, z = np.broadcast_arrays(where, x, y, z)
    result = np.array(np.broadcast_to(result, where.shape))
    for i in np.ndindex(where.shape):
        if where[i]:
            result[i] = _exact_fma(*(float(v[i]) for v in (x, y, z)))
    return result


def _exact_fma(x, y, z):
    if not np.isfinite([x, y, z]).all():
        return x * y + z
    total = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(total)
    except OverflowError:
        return np.inf if total > 0 else -np.inf


def _product_error(x, y, p):
    """x * y - p exactly, by factors of 26 bits (Dekker)."""
    x1, y1 = _head(x), _head(y)
    x2, y2 = x - x1, y - y1
    return x2 * y2 - (((p - x1 * y1) - x2 * y1) - x1 * y2)


def _head(x):
    """The upper 26 bits of a float64."""
    c = x * f64(2**27 + 1)
    return c - (c - x)


def _odd_sum(p, z):
    """p + z rounded to odd: an inexact sum gets a one in its last place."""
    s = p + z
    e = _dropped(p, z, s)
    even = (np.asarray(s).view(u64) & u64(1)) == 0
    return np.where((e != 0) & even, _beside(s, e), s)


def saturate(x):
    """x clamped to [+0, 1]; NaN becomes +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(x > 0, np.minimum(x, one), zero)
