"""The equations: real numbers -> codes -> real numbers, one scale per group.

Every quantizer here is one affine map around a list of levels,

    y = (x - z) / s        code = nearest level to y        x_hat = s * level(code) + z

and differs in how a group's scale `s` (and zero `z`) follows from its numbers, and
in which levels exist. All arithmetic is IEEE binary32, so that a kernel can repeat
it exactly. Scales and zeros are rounded to their stored format *before* codes are
computed: a code must be right for the scale that the reader will find.
"""

import numpy as np

from kvq.codebooks import codebook
from kvq.dtypes import DTYPES, cast
from kvq.scheme import CODEBOOKS


# --- groups: blocks of (heads, tokens, channels) that share one scale -----------------
def reduce_groups(ufunc, x, group):
    """`ufunc` over each group of x (..., H, T, D): one number per group.

    group : (heads, tokens, channels). The last group of an axis may be smaller.
    """
    for axis, size in zip((-3, -2, -1), group, strict=True):
        if size > 1:
            starts = np.arange(0, x.shape[axis], size)
            x = ufunc.reduceat(x, starts, axis=axis)
    return x


def spread_groups(s, group, tokens, channels):
    """Each group's `s` beside the numbers that share it.

    s : (..., groups of heads, groups of tokens, groups of channels).
    tokens, channels : indices of the wanted numbers, as ranges.
    Returns an array that broadcasts against (..., H, len(tokens), len(channels)).
    """
    for axis, index, size in ((-2, tokens, group[1]), (-1, channels, group[2])):
        if s.shape[axis] == 1:
            continue  # one group spans the whole axis and broadcasts
        s = np.take(s, np.arange(index.start, index.stop) // size, axis=axis)
    return s


# --- rounding -------------------------------------------------------------------------
def half_away(y):
    """Round half away from zero, exactly, for binary32 y: C `roundf`.

    trunc(y + h), h just below a half, with the sign of y. Adding 1/2 itself would give
    1 for 0.49999997.
    """
    return np.trunc(y + np.copysign(_BELOW_HALF, y))


_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
ROUND = {"half-even": np.rint, "half-away": half_away, "toward-zero": np.trunc}


# --- scales and zeros -----------------------------------------------------------------
def absmax_scale(x, group, top):
    """s = max|x| / top,  top the largest level.

    symmetric: top = Q = 2^(b-1) - 1.    full-range: top = (2^b - 1) / 2.
    """
    return _absmax(x, group) / np.float32(top)


def signed_extreme_scale(x, group, top):
    """s = m / -top,  m the number of largest |x|, with its sign.

    The levels reach further down than up, and m always lands on the lowest one.
    """
    low = reduce_groups(np.minimum, x, group)
    high = reduce_groups(np.maximum, x, group)
    return np.where(-low > high, low, high) / np.float32(-top)


def rms_scale(x, group):
    """s = sqrt(mean x^2): unit variance for levels made for N(0, 1)."""
    # Divided by the largest |x| first, so that no square overflows or vanishes.
    top = _absmax(x, group)
    safe = np.where(top == 0, np.float32(1), top)
    T, D = x.shape[-2:]
    y = x / spread_groups(safe, group, range(T), range(D))
    squares = reduce_groups(np.add, np.square(y, dtype=np.float64), group)
    count = reduce_groups(np.add, np.ones(x.shape[-3:]), group)
    return (top * np.sqrt(squares / count)).astype(np.float32)


def power_of_two_scale(x, group, top):
    """s = 2^(floor(log2 max|x|) - floor(log2 top)).

    The shared exponent of the OCP Microscaling specification v1.0: numbers beyond
    the largest level saturate.
    """
    absmax = _absmax(x, group)
    exponent = np.frexp(absmax)[1] - np.frexp(np.float32(top))[1]
    return np.where(absmax == 0, np.float32(0), np.ldexp(np.float32(1), exponent))


def asymmetric_scale_zero(x, group, bits, limit):
    """s = (max - min) / (2^b - 1),  z = min, both extremes within +-limit."""
    low = np.clip(reduce_groups(np.minimum, x, group), -limit, limit)
    high = np.clip(reduce_groups(np.maximum, x, group), -limit, limit)
    return (high - low) / np.float32(2**bits - 1), low


def _absmax(x, group):
    return reduce_groups(np.maximum, np.abs(x), group)


def largest_level(scheme):
    """`top`, what the largest |x| of a group is divided by."""
    if scheme.levels in CODEBOOKS:
        return codebook(scheme.levels, scheme.bits).top
    half = 2 ** (scheme.bits - 1)
    return {"symmetric": half - 1, "full-range": half - 0.5, "signed-extreme": half}[
        scheme.levels
    ]


def scale_rule(scheme):
    """Which of the rules above a scheme uses, but for asymmetric levels."""
    if scheme.levels in CODEBOOKS:
        rule = codebook(scheme.levels, scheme.bits).scale
    else:
        rule = "signed-extreme" if scheme.levels == "signed-extreme" else "absmax"
    return "power-of-two" if scheme.scale_dtype == "e8m0" and rule != "rms" else rule


def scale_and_zero(x, scheme):
    """Scales and zeros of x (..., H, T, D) float32, as they are stored.

    Returns (scale, zero), arrays of `scheme.scale_dtype` with the shape
    `scheme.metadata_shape`; zero is None unless the levels are asymmetric.
    Both are finite. A scale is 0 only where the group is constant (asymmetric) or
    zero (the others).
    """
    group = scheme.group_shape(*x.shape[-3:])
    if scheme.has_zero:
        limit = np.float32(DTYPES[scheme.scale_dtype][1])
        scale, zero = asymmetric_scale_zero(x, group, scheme.bits, limit)
        return _store_scale(scale, scheme), cast(zero, scheme.scale_dtype)
    rule, top = scale_rule(scheme), largest_level(scheme)
    if rule == "rms":
        scale = rms_scale(x, group)
    elif rule == "signed-extreme":
        scale = signed_extreme_scale(x, group, top)
    elif rule == "power-of-two":
        scale = power_of_two_scale(x, group, top)
    else:
        scale = absmax_scale(x, group, top)
    return _store_scale(scale, scheme), None


def _store_scale(scale, scheme):
    """`scale` in its stored format; one too small for it becomes its smallest."""
    smallest = DTYPES[scheme.scale_dtype][2]
    tiny = (scale != 0) & (np.abs(scale) < smallest)
    scale = np.where(tiny, np.copysign(np.float32(smallest), scale), scale)
    return cast(scale, scheme.scale_dtype)


# --- codes ----------------------------------------------------------------------------
def to_codes(x, scale, zero, scheme):
    """y = (x - z) / s;  code = the nearest level's index, unsigned.

    x : float32 (..., T, D). scale, zero : as `scale_and_zero` returns them.
    Signed integers are stored as code = integer + 2^(b-1).
    Returns uint8 codes of the shape of x.
    """
    group = scheme.group_shape(*x.shape[-3:])
    T, D = x.shape[-2:]
    s = scale.astype(np.float32)
    s = np.where(s == 0, np.float32(1), s)  # such a group has one level: any s will do
    if zero is None:
        y = x / spread_groups(s, group, range(T), range(D))
    else:
        y = x - spread_groups(zero.astype(np.float32), group, range(T), range(D))
        y /= spread_groups(s, group, range(T), range(D))
    if scheme.levels in CODEBOOKS:
        return codebook(scheme.levels, scheme.bits).encode(y)
    low, high, offset = integer_levels(scheme)
    y = np.clip(ROUND[scheme.rounding](y), low, high, out=y)
    y += np.float32(offset)
    return y.astype(np.uint8)


def integer_levels(scheme):
    """(smallest integer, largest integer, offset): stored code = integer + offset."""
    half = 2 ** (scheme.bits - 1)
    return {
        "symmetric": (1 - half, half - 1, half),
        "full-range": (-half, half - 1, half),
        "signed-extreme": (-half, half - 1, half),
        "asymmetric": (0, 2 * half - 1, 0),
    }[scheme.levels]


def from_codes(codes, scale, zero, scheme, start=0):
    """x_hat = s * level(code) + z, in float32.

    codes : uint8 (..., H, t, D), the tokens start .. start + t - 1 of a tensor whose
        groups `scale` and `zero` describe.
    Returns float32 of the shape of codes; finite.
    """
    t, D = codes.shape[-2:]
    group = scheme.group_shape(*codes.shape[-3:])
    tokens = range(start, start + t)
    if scheme.levels in CODEBOOKS:
        x = codebook(scheme.levels, scheme.bits).decode(codes)
    else:
        x = codes.astype(np.float32)
        x -= integer_levels(scheme)[2]
    x *= spread_groups(scale.astype(np.float32), group, tokens, range(D))
    if zero is not None:
        x += spread_groups(zero.astype(np.float32), group, tokens, range(D))
    return x
