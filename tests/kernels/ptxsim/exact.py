"""Numbers rounded once, in Python's exact fractions: what IEEE 754 asks for.

Values of every floating-point type are held as float64, which holds f16, bf16, f32 and
f64 exactly. A pair (f16x2, bf16x2) is an array (n, 2): low half, high half.
"""

import math
from fractions import Fraction

import numpy as np

# significand bits with the hidden one, smallest and largest exponent of a normal number
FORMATS = {
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "f32": (24, -126, 127),
    "f64": (53, -1022, 1023),
}


def rounded(x, type_, mode="rn"):
    """A fraction, not zero, as the float of `type_`.

    rn nearest, ties to even; rz toward zero; rm down; rp up.
    """
    bits, lowest, highest = FORMATS[type_]
    size, sign = abs(x), (-1.0 if x < 0 else 1.0)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent  # 2^exponent <= size
    ulp = Fraction(2) ** (max(exponent, lowest) - bits + 1)
    count, rest = divmod(size, ulp)
    away = (mode == "rp" and sign > 0) or (mode == "rm" and sign < 0)
    if mode == "rn":
        up = rest > ulp / 2 or (rest == ulp / 2 and count % 2 == 1)
    else:
        up = away and rest > 0
    result = (count + up) * ulp
    if result < Fraction(2) ** (highest + 1):
        return sign * float(result)
    largest = float((Fraction(2) - Fraction(2) ** (1 - bits)) * Fraction(2) ** highest)
    return sign * (math.inf if mode == "rn" or away else largest)


def sum_of_products(type_, mode, *terms):
    """The sum of the products of the factors in each term, rounded once.

    terms: tuples of arrays. `((x, y), (z,))` is x * y + z.
    """
    terms = [[np.asarray(f, np.float64) for f in term] for term in terms]
    shape = terms[0][0].shape
    rows = zip(*(f.reshape(-1).tolist() for term in terms for f in term), strict=True)
    counts = [len(term) for term in terms]
    one = lambda row: _sum_of_products(type_, mode, _cut(row, counts))  # noqa: E731
    return np.array([one(row) for row in rows]).reshape(shape)


def _cut(row, counts):
    row = iter(row)
    return [[next(row) for _ in range(n)] for n in counts]


def _sum_of_products(type_, mode, terms):
    factors = [f for term in terms for f in term]
    if not all(map(math.isfinite, factors)):
        return sum(math.prod(map(_size_forgotten, term)) for term in terms)
    exact = sum(math.prod(map(Fraction, term)) for term in terms)
    if exact:
        return rounded(exact, type_, mode)
    signs = {math.prod(math.copysign(1, f) for f in term) for term in terms}
    if len(signs) == 1:
        return 0.0 * signs.pop()
    return -0.0 if mode == "rm" else 0.0


def _size_forgotten(x):
    """Beside an infinity or a NaN only the sign of a number counts."""
    return math.copysign(1.0, x) if math.isfinite(x) and x else x


def quotient(type_, x, y):
    """x / y, rounded once to nearest."""

    def one(a, b):
        if math.isfinite(a) and math.isfinite(b) and a and b:
            return rounded(Fraction(a) / Fraction(b), type_)
        return float(np.float64(a) / np.float64(b))

    pairs = zip(x.tolist(), y.tolist(), strict=True)
    return np.array([one(a, b) for a, b in pairs])


def to_type(type_, x, mode="rn"):
    """Whole numbers or floats, rounded once."""

    def one(value):
        if not math.isfinite(value) or not value:
            return value
        return rounded(Fraction(value), type_, mode)

    return np.array([one(value) for value in x.reshape(-1).tolist()]).reshape(x.shape)


# ---- the bits of the types that registers hold as bits


def values_of(bits, type_):
    """float64 values of f16, bf16 (n,) or of pairs (n, 2)."""
    if type_.endswith("x2"):
        halves = np.stack([bits & 0xFFFF, bits >> 16], axis=-1).astype(np.uint16)
        return values_of(halves, type_.removesuffix("x2"))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if type_ == "f16":
            return bits.view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bits_of(values, type_):
    """The inverse of `values_of`, for values that the type holds exactly."""
    if type_.endswith("x2"):
        low, high = bits_of(values, type_.removesuffix("x2")).astype(np.uint32).T
        return low | (high << 16)
    if type_ == "f16":
        return np.asarray(values).astype(np.float16).view(np.uint16)
    return (np.asarray(values).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
