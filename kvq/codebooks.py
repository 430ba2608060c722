"""Levels that are not equally spaced: which value each code stands for.

    code = argmin_c |y - level(c)|        y_hat = level(code)

Three kinds: small floating-point formats (the code is the bit pattern), tables
from papers and file formats, and the Lloyd-Max levels, which minimize the mean
squared error of Gaussian numbers and are computed here.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvq.scheme import CODEBOOKS, Scheme

# QLoRA's 4-bit normal float (arXiv 2305.14314, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# llama.cpp's non-linear 4-bit levels (ggml/src/ggml-common.h, kvalues_iq4nl).
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_TABLES = {"nf4": NF4, "iq4_nl": IQ4_NL}

# name -> (exponent bits E, mantissa bits M, bias): OCP Microscaling Formats v1.0 and
# OCP 8-bit floating point v1.0.
_MINIFLOATS = {"e2m1": (2, 1, 1), "e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}

# How a group's scale follows from its numbers x, where it is not "absmax".
#   absmax: s = max|x| / top      signed-extreme: s = (the x of largest |x|) / level(0)
#   rms: s = sqrt(mean x^2)
_SCALE_RULES = {"lloyd-max": "rms", "iq4_nl": "signed-extreme"}


# --- the normal distribution ----------------------------------------------------------
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def normal_pdf(x):
    """phi(x) = exp(-x^2 / 2) / sqrt(2 pi), float64 of the shape of x."""
    return np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)


def normal_tail(x):
    """P(X > x) for X ~ N(0, 1), accurate far into the tail; float64."""
    return _erfc(np.asarray(x) / math.sqrt(2)) / 2


def normal_cells(t):
    """P_i = P(t_i < X < t_{i+1}) and M_i = integral of x phi(x) over the same cell.

    t : non-negative increasing thresholds (n + 1,), the last may be inf.
    Returns two float64 arrays (n,). M_i / P_i is the mean of cell i.
    """
    return -np.diff(normal_tail(t)), -np.diff(normal_pdf(t))


# --- Lloyd-Max ------------------------------------------------------------------------
@lru_cache
def lloyd_max(bits):
    """The 2^bits levels with the smallest mean squared error for N(0, 1).

        c_i = E[x | t_i < x < t_{i+1}],    t_i = (c_{i-1} + c_i) / 2

    (Max 1960; Lloyd 1982.) Repeating these two lines converges slowly, so the
    equation c - m(c) = 0, m_i the mean of cell i, is solved by Newton's method. The
    levels are symmetric: only the positive half, with t_0 = 0, is unknown.

    Returns read-only float64 (2^bits,), increasing. Needs bits >= 1.
    """
    c = _spread_levels(2 ** (bits - 1))
    change = 1.0
    while change > 1e-10:  # Newton doubles the digits: the next change is < 1e-16
        t = np.concatenate([[0], (c[:-1] + c[1:]) / 2, [np.inf]])
        P, M = normal_cells(t)
        delta = np.linalg.solve(_residual_slope(t, P, M / P), c - M / P)
        c = c - delta
        change = np.max(np.abs(delta))
    return _read_only(np.concatenate([-c[::-1], c]))


def _spread_levels(n):
    """A start: the positive half of 2n quantiles of N(0, 3).

    Good levels for a density phi lie as densely as phi^(1/3) (Panter and Dite 1951),
    and phi^(1/3) is the shape of N(0, 3).
    """
    from statistics import NormalDist

    wide = NormalDist(sigma=math.sqrt(3))
    return np.array([wide.inv_cdf((n + i + 0.5) / (2 * n)) for i in range(n)])


def _residual_slope(t, P, m):
    """d(c_i - m_i) / dc_j, a tridiagonal matrix (n, n).

    dm_i / dt_i = phi(t_i) (m_i - t_i) / P_i
    dm_i / dt_{i+1} = phi(t_{i+1}) (t_{i+1} - m_i) / P_i,     dt_i / dc_i = 1/2
    """
    inner = t[1:-1]  # t_0 = 0 and t_n = inf do not move
    below = np.append(0, normal_pdf(inner) * (m[1:] - inner) / P[1:]) / 2
    above = np.append(normal_pdf(inner) * (inner - m[:-1]) / P[:-1], 0) / 2
    return np.diag(1 - below - above) - np.diag(below[1:], -1) - np.diag(above[:-1], 1)


# --- small floating-point formats -----------------------------------------------------
def _minifloat(name):
    """Every bit pattern's value: sign, E exponent bits e, M mantissa bits m.

    x = (-1)^sign * 2^(max(e, 1) - bias) * ([e > 0] + m / 2^M)
    """
    E, M, bias = _MINIFLOATS[name]
    code = np.arange(2 ** (1 + E + M))
    sign, e, m = code >> (E + M), (code >> M) % 2**E, code % 2**M
    x = (-1.0) ** sign * 2.0 ** (np.maximum(e, 1) - bias) * ((e > 0) + m / 2**M)
    last = e == 2**E - 1
    if name == "e4m3":  # no infinities; the last pattern of each sign is NaN
        x[last & (m == 2**M - 1)] = np.nan
    if name == "e5m2":  # as IEEE 754: the last exponent is inf and NaN
        x[last] = np.where(m[last] == 0, np.copysign(np.inf, x[last]), np.nan)
    return x


# --- codebooks ------------------------------------------------------------------------
def levels(name, bits):
    """The value of every code: float64 (2^bits,), indexed by code.

    name : a key of `kvq.scheme.CODEBOOKS`. The 8-bit floats hold NaN (and e5m2 inf)
        at the codes that mean it.
    Raises ValueError for an unknown name or a number of bits the name does not have.
    """
    if name not in CODEBOOKS:
        raise ValueError(f"codebook={name!r}; valid: {', '.join(CODEBOOKS)}")
    Scheme(bits, levels=name)  # raises where the number of bits is wrong
    if name == "lloyd-max":
        return lloyd_max(bits)
    if name in _MINIFLOATS:
        return _minifloat(name)
    return np.array(_TABLES[name], np.float64)


@dataclass(frozen=True, eq=False)
class Codebook:
    """Levels and the arithmetic between them, ready to use. Made by `codebook`.

    name, bits : as in `levels`.
    scale : how a group is scaled first: "absmax" (s = max|x| / top),
        "signed-extreme" (s = the x of largest |x|, with its sign, / the first level)
        or "rms" (s = sqrt(mean x^2)).
    values : float32 (2^bits,), the value of each code.
    top : the largest finite |value|.
    order : uint8 (n,), the codes that `encode` produces, by increasing value.
    thresholds : float32 (n - 1,). y takes `order[i]`, i the number of thresholds < y.
    """

    name: str
    bits: int
    scale: str
    values: np.ndarray
    top: float
    order: np.ndarray
    thresholds: np.ndarray

    def encode(self, y):
        """The nearest level's code: float32 of any shape -> uint8 of that shape.

        Numbers beyond the outermost levels take those: never inf, NaN or -0. Halfway
        between two levels, floats go to the even mantissa, iq4_nl to the upper level
        and the others to the lower one.
        """
        y = np.asarray(y, np.float32)
        return self.order[np.searchsorted(self.thresholds, y, side="left")]

    def decode(self, codes):
        """The value of each code: uint8 of any shape -> float32 of that shape."""
        return self.values[codes]


@lru_cache
def codebook(name, bits):
    """The `Codebook` called `name`, built once. Raises ValueError as `levels` does."""
    values = levels(name, bits).astype(np.float32)
    negative_zero = (values == 0) & np.signbit(values)
    usable = np.flatnonzero(np.isfinite(values) & ~negative_zero)
    order = usable[np.argsort(values[usable])].astype(np.uint8)
    return Codebook(
        name=name,
        bits=bits,
        scale=_SCALE_RULES.get(name, "absmax"),
        values=_read_only(values),
        top=float(np.max(np.abs(values[order]))),
        order=_read_only(order),
        thresholds=_read_only(_thresholds(values[order], _ties_up(name, order))),
    )


def _ties_up(name, order):
    """Whether halfway between codes order[i] and order[i + 1] means the upper one."""
    if name in _MINIFLOATS:
        return order[1:] % 2 == 0  # the even mantissa
    return np.full(len(order) - 1, name == "iq4_nl")


def _thresholds(values, ties_up):
    """The largest float32 that still belongs to the lower of two neighbours.

    That is their midpoint, or one step below it where the midpoint goes up or is no
    float32. (The midpoint of two float32 levels is exact in float64.)
    """
    middle = (values[:-1].astype(np.float64) + values[1:]) / 2
    t = middle.astype(np.float32)
    down = np.where(ties_up, t >= middle, t > middle)
    with np.errstate(under="ignore"):  # the step below 0 is subnormal
        below = np.nextafter(t, np.float32(-np.inf))
    return np.where(down, below, t)


def _read_only(a):
    a.setflags(write=False)
    return a
