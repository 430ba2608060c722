r"""Papers that rotate first: QJL, TurboQuant, PolarQuant.

After a random rotation, a coordinate of any vector has a known distribution. So one
codebook, computed once, serves every vector, and a group needs no scale of its own:
only the norm of the vector is stored.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvq.dtypes import cast
from kvq.formats.research_base import Method, as_heads, nearest
from kvq.packing import pack, unpack


# --- random matrices and codebooks ----------------------------------------------------
@lru_cache
def random_rotation(D, seed=0):
    """A uniformly random orthogonal matrix (D, D), float64, read-only.

    Q of the QR decomposition of a Gaussian matrix, with the signs of R's diagonal.
    """
    Q, R = np.linalg.qr(np.random.default_rng(seed).standard_normal((D, D)))
    return _read_only(Q * np.sign(np.diag(R)))


@lru_cache
def gaussian_matrix(m, D, seed=0):
    """S (m, D) of independent N(0, 1) numbers, float64, read-only."""
    return _read_only(np.random.default_rng(seed).standard_normal((m, D)))


def lloyd(density, low, high, bits, points=2**14):
    """The 2^bits levels with the smallest mean squared error for a density.

        c_i = E[t | cell i],  cells meet halfway between levels,  until nothing moves

    density : a function of t, up to a factor; tabulated at `points` midpoints of
    low..high. Returns float64 (2^bits,), increasing, and the mean squared error.
    """
    edges = np.linspace(low, high, points + 1)
    t = (edges[1:] + edges[:-1]) / 2
    p = density(t)
    p = p / p.sum()
    P, M = (np.append(0, np.cumsum(a)) for a in (p, p * t))
    c = _spread_levels(t, p, 2**bits)
    change = 1.0
    while change > 1e-9 * (high - low):
        cuts = np.concatenate([[low], (c[1:] + c[:-1]) / 2, [high]])
        new = np.diff(np.interp(cuts, edges, M)) / np.diff(np.interp(cuts, edges, P))
        change, c = np.max(np.abs(new - c)), new
    return c, float(
        np.sum(p * t**2) - np.sum(np.diff(np.interp(cuts, edges, P)) * c**2)
    )


def _spread_levels(t, p, n):
    """A start: n quantiles of p^(1/3), the density of good levels (Panter-Dite)."""
    cumulative = np.cumsum(np.cbrt(p))
    return np.interp((np.arange(n) + 0.5) / n * cumulative[-1], cumulative, t)


@lru_cache
def sphere_codebook(D, bits):
    """Lloyd-Max levels for a coordinate of a uniform unit vector, and their MSE.

        f(t) ~ (1 - t^2)^((D - 3) / 2) on [-1, 1],   close to N(0, 1 / D)

    The MSE is that of the whole vector: D times the MSE of a coordinate.
    Needs D >= 3. Returns float64 (2^bits,) and a float.
    """
    levels, mse = lloyd(lambda t: (1 - t * t) ** ((D - 3) / 2), -1, 1, bits)
    return _read_only(levels), D * mse


def unit(x):
    """x / ||x|| (0 where x is 0) and ||x|| (..., 1), along the last axis."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm == 0, 1.0, norm), norm


def _read_only(a):
    a.setflags(write=False)
    return a


# --- QJL ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Qjl(Method):
    r"""Signs of m random projections of a key, and its norm.

        <q, k>  ~  sqrt(pi / 2) / m  ||k||  <S q, sign(S k)>,      S_ij ~ N(0, 1)

    Unbiased over S: the same as <q, k_hat>, k_hat what `decode` returns. It is made
    for scores; as a copy of k it is poor until m is well above D.
    (QJL, arXiv 2406.03482. The paper takes m = 256, keeps 8 outlier channels apart and
    makes the rows of S orthogonal; here they are independent, as in its theorem.)
    """

    m: int = 256
    seed: int = 0

    def encode(self, x):
        x = as_heads(x)
        S = gaussian_matrix(self.m, x.shape[-1], self.seed)
        signs = (x @ S.T >= 0).astype(np.uint8)
        norm = np.linalg.norm(x, axis=-1)
        return {"signs": pack(signs, 1), "norm": cast(norm, "float16")}

    def decode(self, stored, shape):
        S = gaussian_matrix(self.m, shape[-1], self.seed)
        signs = signs_of(stored["signs"], self.m)
        factor = math.sqrt(math.pi / 2) / self.m * stored["norm"].astype(np.float64)
        return (factor[..., None] * (signs @ S)).astype(np.float32)

    def scores(self, q, stored):
        """<q, k> of each query and key, estimated from the sketch alone.

        q : (H, T_q, D), one group of queries per head. Returns float64 (H, T_q, T).
        """
        S = gaussian_matrix(self.m, q.shape[-1], self.seed)
        signs = signs_of(stored["signs"], self.m)
        factor = math.sqrt(math.pi / 2) / self.m * stored["norm"].astype(np.float64)
        return (q @ S.T) @ signs.swapaxes(-1, -2) * factor[..., None, :]


def signs_of(packed, m):
    """Packed bits (..., m / 8) as -1 and +1, float64 (..., m)."""
    return 2 * unpack(packed, 1, m).astype(np.float64) - 1


def qjl_variance(q, k, m):
    r"""((pi / 2) ||q||^2 ||k||^2 - <q, k>^2) / m, of one estimate over random S.

    q, k : (..., D). Returns float64 (...).
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    norms = np.sum(q * q, axis=-1) * np.sum(k * k, axis=-1)
    return (math.pi / 2 * norms - np.sum(q * k, axis=-1) ** 2) / m


# --- TurboQuant -----------------------------------------------------------------------
@dataclass(frozen=True)
class TurboQuant(Method):
    r"""y = Pi x / ||x||,  each coordinate to its nearest level,  x_hat = ||x|| Pi^T c.

    Pi is a random rotation; the levels are those of `sphere_codebook`. For any x,
    E ||x - x_hat||^2 / ||x||^2 <= (sqrt(3) pi / 2) 4^-b.
    (TurboQuant, arXiv 2504.19874, the MSE form. The preset "turboquant-4" is the same
    in our vocabulary: a Hadamard rotation, and the levels of N(0, 1 / D).)
    """

    bits: int = 4
    seed: int = 0

    def __post_init__(self):
        _check_bits(self.bits, 1)

    def encode(self, x):
        y, norm = unit(as_heads(x))
        D = y.shape[-1]
        levels, _ = sphere_codebook(D, self.bits)
        codes = nearest(y @ random_rotation(D, self.seed).T, levels)
        return {"codes": pack(codes, self.bits), "norm": cast(norm, "float16")}

    def decode(self, stored, shape):
        D = shape[-1]
        levels, _ = sphere_codebook(D, self.bits)
        c = levels[unpack(stored["codes"], self.bits, D)]
        x = stored["norm"].astype(np.float64) * (c @ random_rotation(D, self.seed))
        return x.astype(np.float32)


@dataclass(frozen=True)
class TurboQuantProduct(Method):
    r"""b - 1 bits of the MSE form, then the signs of D projections of what is left.

        r = x - x_hat,    x_hat <- x_hat + sqrt(pi / 2) / D  ||r||  S^T sign(S r)

    <q, x_hat> is unbiased, and E (<q, x> - <q, x_hat>)^2
    <= sqrt(3) pi^2 ||q||^2 ||x||^2 / D  4^-b. (arXiv 2504.19874, the product form.)
    """

    bits: int = 4
    seed: int = 0

    def __post_init__(self):
        _check_bits(self.bits, 2)  # one for the signs, one for the levels

    def encode(self, x):
        x = as_heads(x)
        mse, sketch = self._parts(x.shape[-1])
        stored = mse.encode(x)
        rest = sketch.encode(x - mse.decode(stored, x.shape))
        return stored | {"signs": rest["signs"], "rest_norm": rest["norm"]}

    def decode(self, stored, shape):
        mse, sketch = self._parts(shape[-1])
        rest = {"signs": stored["signs"], "norm": stored["rest_norm"]}
        return mse.decode(stored, shape) + sketch.decode(rest, shape)

    def _parts(self, D):
        return TurboQuant(self.bits - 1, self.seed), Qjl(D, self.seed + 1)


def _check_bits(bits, low):
    if type(bits) is not int or not low <= bits <= 8:
        raise ValueError(f"bits={bits!r}; valid: {low}..8")


# --- PolarQuant, recursive ------------------------------------------------------------
@dataclass(frozen=True)
class PolarAngles(Method):
    r"""Pairs to (radius, angle), the radii in pairs again: 16 numbers are one radius
    and 8 + 4 + 2 + 1 angles.

    After a random rotation the angles are independent of each other and of the scale:
    those of the first level uniform on [0, 2 pi), those of level l on [0, pi / 2] with
    the density sin(2 a)^(2^(l-1) - 1). Each level has one codebook; there are no
    scales. Bits per angle 4, 2, 2, 2: with a float16 radius (46 + 16) / 16 = 3.875 per
    number, the size the paper reports. (PolarQuant, arXiv 2502.02617.)
    """

    angle_bits: tuple[int, ...] = (4, 2, 2, 2)
    seed: int = 0

    def encode(self, x):
        block = 2 ** len(self.angle_bits)
        x = as_heads(x, multiple_of=block)
        r = (x @ random_rotation(x.shape[-1], self.seed).T).reshape(-1, block)
        stored = {}
        for level, bits in enumerate(self.angle_bits, 1):
            a, r = self._angles(r)
            stored[f"angles {level}"] = pack(nearest(a, self._levels(level)), bits, 0)
        return stored | {"radius": cast(r, "float16")}

    def _angles(self, r):
        """(angle in [0, 2 pi), radius) of neighbours: (n, m) -> (n, m / 2) each."""
        even, odd = r[:, 0::2], r[:, 1::2]
        return np.arctan2(odd, even) % (2 * np.pi), np.hypot(even, odd)

    def _levels(self, level):
        """The codebook of a level: equally spaced at first, Lloyd-Max above."""
        bits = self.angle_bits[level - 1]
        if level == 1:
            return (np.arange(2**bits) + 0.5) * (2 * np.pi / 2**bits)
        return angle_codebook(level, bits)

    def decode(self, stored, shape):
        r = stored["radius"].astype(np.float64)
        for level in range(len(self.angle_bits), 0, -1):
            bits, packed = self.angle_bits[level - 1], stored[f"angles {level}"]
            a = self._levels(level)[unpack(packed, bits, len(r), 0)]
            r = np.stack([r * np.cos(a), r * np.sin(a)], axis=-1).reshape(len(r), -1)
        x = r.reshape(shape) @ random_rotation(shape[-1], self.seed)
        return x.astype(np.float32)


@lru_cache
def angle_codebook(level, bits):
    """Lloyd-Max levels of the angles of level 2, 3, ...: float64 (2^bits,).

    f(a) ~ sin(2 a)^(2^(level - 1) - 1) on [0, pi / 2]
    """
    power = 2 ** (level - 1) - 1
    levels, _ = lloyd(lambda a: np.sin(2 * a) ** power, 0, np.pi / 2, bits)
    return _read_only(levels)
