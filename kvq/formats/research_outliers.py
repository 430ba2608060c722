r"""Papers about outliers: KVQuant, GEAR, and the PolarQuant of RoPE pairs.

Rows: a matrix of vectors, either the channels of a head (over its tokens) or the
tokens (all of their heads together).
"""

from dataclasses import dataclass, field

import numpy as np

from kvq.attention import attention, attention_weights
from kvq.dtypes import cast
from kvq.formats.research_base import Method, as_heads, nearest
from kvq.packing import pack, unpack
from kvq.quantizer import reduce_groups, spread_groups
from kvq.scheme import Scheme
from kvq.tensor import QuantizedTensor, quantize

f64 = np.float64


# --- vectors and their outliers -------------------------------------------------------
def to_rows(x, per):
    """x (H, T, D) as rows: "channel" (H D, T), "token" (T, H D)."""
    H, T, D = x.shape
    if per == "channel":
        return x.swapaxes(1, 2).reshape(H * D, T)
    return x.swapaxes(0, 1).reshape(T, H * D)


def from_rows(rows, per, shape):
    """The inverse of `to_rows`."""
    H, T, D = shape
    if per == "channel":
        return rows.reshape(H, D, T).swapaxes(1, 2)
    return rows.reshape(T, H, D).swapaxes(0, 1)


def split_outliers(rows, fraction):
    """The numbers farthest from their row's mean, and the rows without them.

    Their places hold the mean of the rest. Returns (rest, positions, values): float64
    (n, m), uint16 (n, k) and float16 (n, k), k = round(fraction m). Raises ValueError
    for rows of more than 65,536 numbers.
    """
    k = round(fraction * rows.shape[1])
    if rows.shape[1] > 2**16:
        raise ValueError(f"rows of {rows.shape[1]} numbers; valid: up to {2**16}")
    distance = np.abs(rows - rows.mean(axis=1, keepdims=True))
    at = np.sort(np.argpartition(-distance, k, axis=1)[:, :k], axis=1)
    values = np.take_along_axis(rows, at, axis=1)
    rest = rows.copy()
    np.put_along_axis(rest, at, 0, axis=1)
    mean = rest.sum(axis=1, keepdims=True) / (rows.shape[1] - k)
    np.put_along_axis(rest, at, mean, axis=1)
    return rest, at.astype(np.uint16), cast(values, "float16")


def put_outliers(rows, positions, values):
    """`rows` with the outliers back in their places, in a new array."""
    rows = rows.copy()
    np.put_along_axis(
        rows, positions.astype(np.intp), values.astype(rows.dtype), axis=1
    )
    return rows


# --- KVQuant --------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Nuq(Method):
    r"""Non-uniform levels that are fitted once per layer, vectors scaled to [-1, 1].

        y = 2 (x - min) / (max - min) - 1,    code = nearest level to y

    min and max are those of a vector (a channel of K, a token of V with all its
    heads), without the `outliers` share of its numbers farthest from its mean. Those
    are stored apart: position as uint16, value as float16.
    (KVQuant, arXiv 2401.18079. There, scales and thresholds of K come from calibration
    data, and K is stored before RoPE; here they come from the vector itself.)

    levels : float64 (2^bits,), increasing, from `fit`.
    """

    levels: np.ndarray = field(repr=False)
    per: str = "channel"
    outliers: float = 0.0

    @classmethod
    def fit(cls, x, sensitivity, bits, per, outliers=0.0):
        r"""min over levels of  sum_i F_i (y_i - level(y_i))^2,  F the sensitivity.

        x : calibration data (H, T, D). sensitivity : F >= 0, of the same shape.
        """
        rows = to_rows(as_heads(x), per)
        rest, positions, _ = split_outliers(rows, outliers)
        y, low, high = _to_unit_range(rest)
        width = high.astype(f64) - low
        F = to_rows(np.asarray(sensitivity, f64), per) * width**2
        np.put_along_axis(F, positions.astype(np.intp), 0, axis=1)
        levels = weighted_kmeans(y.ravel(), F.ravel(), 2**bits)
        return cls(levels, per, outliers)

    @property
    def bits(self):
        """Bits per code."""
        return len(self.levels).bit_length() - 1

    def encode(self, x):
        rows, positions, values = split_outliers(
            to_rows(as_heads(x), self.per), self.outliers
        )
        y, low, high = _to_unit_range(rows)
        stored = {"codes": pack(nearest(y, self.levels), self.bits)}
        stored |= {"low": low, "high": high}
        if self.outliers:
            stored |= {"positions": positions, "values": values}
        return stored

    def decode(self, stored, shape):
        low, high = (stored[n].astype(f64) for n in ("low", "high"))
        n = shape[1] if self.per == "channel" else shape[0] * shape[2]
        y = self.levels[unpack(stored["codes"], self.bits, n)]
        rows = (y + 1) / 2 * (high - low) + low
        if self.outliers:
            rows = put_outliers(rows, stored["positions"], stored["values"])
        return from_rows(rows, self.per, shape).astype(np.float32)


def _to_unit_range(rows):
    """(y in [-1, 1], min, max) of each row, the latter two as stored: float16.

    y is near -1 in a constant row, and up to a rounding of min and max outside.
    """
    low = cast(rows.min(axis=1, keepdims=True), "float16")
    high = cast(rows.max(axis=1, keepdims=True), "float16")
    width = high.astype(f64) - low
    width = np.where(width == 0, 1.0, width)
    return 2 * (rows - low) / width - 1, low, high


def weighted_kmeans(x, w, n):
    """n levels that minimize sum w (x - nearest level)^2, by Lloyd's iteration.

    x, w : (N,), w >= 0. Starts at quantiles of x. Returns float64 (n,), increasing.
    """
    order = np.argsort(x)
    x = x[order].astype(f64)
    W, M = (np.append(0, np.cumsum(a)) for a in (w[order], w[order] * x))
    c = np.quantile(x, (np.arange(n) + 0.5) / n)
    for _ in range(200):
        cuts = np.searchsorted(x, (c[1:] + c[:-1]) / 2)
        cuts = np.concatenate([[0], cuts, [len(x)]])
        weight = np.diff(W[cuts])
        new = np.divide(np.diff(M[cuts]), weight, out=c.copy(), where=weight > 0)
        if np.array_equal(new, c):
            break
        c = new
    return np.sort(c)


def sensitivity(sample):
    r"""How much each stored number matters to the attention output o = sum_j p_j v_j.

        dL / dv_jc :  F_jc = sum_i p_ij^2
        dL / dk_jc :  F_jc = sum_i p_ij^2 ||v_j - o_i||^2 q_ic^2 / D

    The diagonal of J^T J, J = d o / d k or d o / d v: KVQuant takes the Fisher
    information of the language model's loss, which needs its gradients.
    sample : a `Sample` with queries. Returns float64, the shapes of k and v.
    """
    q, k, v = (np.asarray(a, f64) for a in (sample.q, sample.k, sample.v))
    H_kv, _, D = k.shape
    p2 = attention_weights(q, k, causal=True) ** 2
    o = attention(q, k, v, causal=True)
    # ||v_j - o_i||^2 = ||v_j||^2 - 2 o_i v_j + ||o_i||^2, heads of queries in groups.
    p2, o, q = (a.reshape(H_kv, -1, a.shape[-1]) for a in (p2, o, q))
    squares = np.sum(v * v, axis=-1)[:, None, :] + np.sum(o * o, axis=-1)[..., None]
    distance2 = np.maximum(squares - 2 * o @ v.swapaxes(1, 2), 0)
    F_k = (p2 * distance2).swapaxes(1, 2) @ (q * q) / D
    F_v = np.broadcast_to(p2.sum(axis=1)[..., None], v.shape)
    return F_k, F_v


def mean_over_rope_pairs(F):
    """F (..., D) with both channels of a RoPE pair (i, i + D/2) at their mean.

    RoPE turns a pair, and a turn keeps the sum of its two sensitivities: the mean
    serves keys before RoPE at every position.
    """
    first, second = np.split(F, 2, axis=-1)
    return np.concatenate([first + second] * 2, axis=-1) / 2


# --- GEAR -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Gear(Method):
    r"""x ~ backbone + low rank + sparse.

        S = the `sparse` share of x farthest from the mean of their channel
        backbone = Q(x without S),    A B^T ~ x - S - backbone, rank r, per head

    A (T, r) is orthonormal, B (D, r); both are stored as float16.
    (GEAR, arXiv 2403.05527. In the paper S leaves zeros in x; here it leaves the mean
    of the channel, so that an offset does not widen a group's range.)
    """

    scheme: Scheme = field(default_factory=Scheme)
    sparse: float = 0.02
    rank: int = 4
    iterations: int = 4

    def encode(self, x):
        x = as_heads(x)
        rows, positions, values = split_outliers(to_rows(x, "channel"), self.sparse)
        rest = from_rows(rows, "channel", x.shape)
        qt = quantize(rest, self.scheme)
        A, B = low_rank(rest - qt.dequantize(), self.rank, self.iterations)
        stored = {name: getattr(qt, name) for name in ("codes", "scale", "zero")}
        stored = {name: a for name, a in stored.items() if a is not None}
        stored |= {"A": cast(A, "float16"), "B": cast(B, "float16")}
        return stored | {"positions": positions, "values": values}

    def decode(self, stored, shape):
        parts = (stored.get(name) for name in ("codes", "scale", "zero"))
        x = QuantizedTensor(self.scheme, shape, *parts).dequantize()
        x = x + stored["A"].astype(f64) @ stored["B"].astype(f64).swapaxes(1, 2)
        rows = to_rows(x, "channel")
        rows = put_outliers(rows, stored["positions"], stored["values"])
        return from_rows(rows, "channel", shape).astype(np.float32)


def low_rank(E, rank, iterations, seed=0):
    """A (H, T, r) orthonormal, B (H, D, r) with A B^T near E (H, T, D): float64.

        B random,  repeat:  A = orthonormal basis of E B,  B = E^T A

    Power iteration on r vectors at once; it finds the r largest singular values.
    """
    H, T, D = E.shape
    rank = min(rank, T, D)
    B = np.random.default_rng(seed).standard_normal((H, D, rank))
    for _ in range(iterations):
        A = np.linalg.qr(E @ B)[0]
        B = E.swapaxes(1, 2) @ A
    return A, B


# --- PolarQuant, RoPE pairs -----------------------------------------------------------
@dataclass(frozen=True)
class PolarPairs(Method):
    r"""Each RoPE pair (k_i, k_{i+D/2}) as an angle and a radius, groups of G tokens.

        rho = hypot(k_i, k_{i+D/2}),    theta = atan2(k_{i+D/2}, k_i)
        theta code = floor((theta - min) / s), s = (max - min) / 2^t,
            read at the middle of its cell: min + (code + 1/2) s
        rho code = rne((rho - min) / s), s = (max - min) / (2^r - 1)

    An outlier channel makes its partner's pair long, not its neighbours' steps wide.
    A code is (rho code) 2^t + theta code. (PolarQuant, arXiv 2502.00527.)
    """

    radius_bits: int = 4
    angle_bits: int = 4
    group: int = 128

    def encode(self, x):
        x = as_heads(x, multiple_of=2)
        first, second = np.split(x, 2, axis=-1)
        r, t = 2**self.radius_bits - 1, 2**self.angle_bits
        radius, *rho = self._codes(np.hypot(first, second), r, np.rint, r)
        angle, *theta = self._codes(np.arctan2(second, first), t, np.floor, t - 1)
        codes = (radius.astype(np.uint8) << self.angle_bits) + angle.astype(np.uint8)
        names = "rho_min", "rho_step", "theta_min", "theta_step"
        codes = pack(codes, self.radius_bits + self.angle_bits)
        return {"codes": codes} | dict(zip(names, (*rho, *theta), strict=True))

    def _codes(self, y, steps, rounding, largest):
        """(codes, min, step), the latter two float16 and used as stored."""
        group = (1, self.group, 1)
        low = reduce_groups(np.minimum, y, group)
        step = (reduce_groups(np.maximum, y, group) - low) / steps
        low, step = cast(low, "float16"), cast(step, "float16")
        s = np.where(step == 0, 1.0, step.astype(f64))
        codes = rounding((y - self._spread(low, y.shape)) / self._spread(s, y.shape))
        return np.clip(codes, 0, largest), low, step

    def _spread(self, s, shape):
        tokens, channels = (range(n) for n in shape[1:])
        return spread_groups(s.astype(f64), (1, self.group, 1), tokens, channels)

    def decode(self, stored, shape):
        pairs = (*shape[:2], shape[2] // 2)
        bits = self.radius_bits + self.angle_bits
        codes = unpack(stored["codes"], bits, pairs[-1])
        low, step, low_a, step_a = (
            self._spread(stored[n], pairs)
            for n in ("rho_min", "rho_step", "theta_min", "theta_step")
        )
        rho = low + (codes >> self.angle_bits) * step
        theta = low_a + ((codes & 2**self.angle_bits - 1) + 0.5) * step_a
        x = np.concatenate([rho * np.cos(theta), rho * np.sin(theta)], axis=-1)
        return x.astype(np.float32)
