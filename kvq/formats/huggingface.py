r"""Hugging Face's `QuantizedCache`: quanto, HQQ and fp8.

All three take post-RoPE keys or values (B, H_kv, T, D). They live in memory as Python
objects; the bytes here are their arrays one after the other: packed codes, scales,
offsets. Equal arrays are the contract, on a CPU:

    quanto   decode and encode exact (CUDA divides by a constant through its reciprocal)
    hqq      decode exact; encode exact but for the order in which a mean is summed,
             and the last place of a power
    fp8      exact

The library's words "per channel" mean its axis -1 (quanto) and nothing in HQQ: axis 0,
its default, makes runs of 64 numbers along the head dimension in quanto, and strided
groups over the whole tensor in HQQ.

Sources: transformers/cache_utils.py (`QuantizedLayer`, `Fp8QuantizedLayer`);
optimum/quanto/tensor/{grouped,packed,qbits}.py and optimizers/max_optimizer.py;
hqq/core/{quantize,optimize,bitpack}.py.
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import numpy as np

from kvq.dtypes import as_float_array
from kvq.formats.base import Facts, Format
from kvq.formats.grouped import (
    GroupedFormat,
    in_dtype,
    in_parts,
    minmax_decode,
    minmax_encode,
    pack_rows,
    reciprocal_times,
    rounded,
    unpack_rows,
)
from kvq.formats.minifloat import E4M3
from kvq.formats.rounding import f32
from kvq.scheme import Scheme

QUANTO = "optimum-quanto 0.2.7"
HQQ = "hqq 0.2.8.post1"
TRANSFORMERS = "transformers 5.24.0"

# Numbers from which a refinement pays for importing Numba (and, once, compiling).
LARGE = 2**20
# Fewer groups than these are not worth separating from those that are done. (NumPy
# would also add up a single column in another order.)
FEW = 64


class RowPacked(GroupedFormat):
    """Codes packed down the rows of the matrix; `shifts` says where in a word."""

    word = np.uint8

    def packed_bytes(self, shape):
        rows, columns = self.matrix_shape(shape)
        words = -(-rows // len(self.shifts)) * columns
        return words * np.dtype(self.word).itemsize

    def pack(self, codes, shape):
        return pack_rows(codes, self.shifts, self.word)

    def unpack(self, data, shape):
        rows, columns = self.matrix_shape(shape)
        words = np.ascontiguousarray(data).view(self.word).reshape(-1, columns)
        return unpack_rows(words, self.shifts, self.bits, rows)

    def matrix_shape(self, shape):
        """(rows, columns) of the matrix of codes."""
        others = int(np.prod(shape)) // self.group
        return (others, self.group) if self.groups_along else (self.group, others)


# --- quanto ---------------------------------------------------------------------------
class Quanto(RowPacked):
    """s = (max - min) / (2^b - 1),  code = rne((x - min) / s),  x_hat = s code + min.

    quanto stores shift = -min and subtracts it, which is the same arithmetic.
    axis 0: a group is 64 consecutive numbers, along D, then T.
    axis -1: a group is 64 consecutive tokens (b, h, t) of a channel; if 64 does not
    divide T, groups reach over from one head into the next.
    (A tensor of a single group gets a scale and a shift per number there; here it does
    not.)
    """

    @property
    def groups_along(self):
        return 1 if self.axis == 0 else 0

    @property
    def shifts(self):
        return range(0, 8, self.bits)  # the first rows in the low bits

    def check_layout(self, shape):
        count = np.prod(shape) if self.axis == 0 else np.prod(shape[:-1])
        if count % self.group:
            what = "numbers" if self.axis == 0 else "tokens, all heads together"
            self.refuse(f"{count} {what}", f"multiples of {self.group}")

    def to_matrix(self, x):
        if self.axis == 0:
            return x.reshape(-1, self.group)
        groups = x.reshape(-1, self.group, x.shape[-1])  # (A, 64, D)
        return groups.transpose(1, 2, 0).reshape(self.group, -1)  # column d A + a

    def from_matrix(self, m, shape):
        if self.axis == 0:
            return m.reshape(shape)
        groups = m.reshape(self.group, shape[-1], -1)
        return groups.transpose(2, 0, 1).reshape(shape)

    def quantize(self, m):
        codes, s, low = minmax_encode(m, self.groups_along, self.bits, self.dtype)
        return codes, s, -low

    def dequantize(self, codes, scale, offset):
        return minmax_decode(codes, scale, -offset, self.dtype)


# --- HQQ ------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Hqq(RowPacked):
    """code = rne(s x + z), x_hat = (code - z) / s; z is refined to fit heavy tails.

    axis 1: a group is 64 consecutive numbers. axis 0: the numbers c, c + N / 64,
    c + 2 N / 64, ... of a tensor of N form group c: strided, whatever its heads are.
    Stored are 1 / s and z, rounded to the tensor's dtype. z counts steps, so float16
    holds it to 1 step only up to 2048 of them: a narrow group far from 0 loses its
    codes when it is read. (The library cannot read its own 3-bit codes of axis 1 back
    from a cache: it counts their rows as if the tensor had two axes.)
    """

    optimize: bool = True
    iterations, beta, p = 20, 10.0, 0.7

    @property
    def groups_along(self):
        return self.axis

    @property
    def word(self):
        return np.int32 if self.bits == 3 else np.uint8

    @property
    def shifts(self):  # the first rows in the high bits
        highest = 27 if self.bits == 3 else 8 - self.bits
        return range(highest, -1, -self.bits)

    def check_layout(self, shape):
        n = int(np.prod(shape))
        if n % self.group:
            self.refuse(f"{n} numbers", f"multiples of {self.group}")
        rows = self.matrix_shape(shape)[0]
        if self.bits != 3 and rows % len(self.shifts):
            self.refuse(f"{rows} rows of groups", f"multiples of {len(self.shifts)}")

    def to_matrix(self, x):
        return x.reshape(self.matrix_shape(x.shape))

    def from_matrix(self, m, shape):
        return m.reshape(shape)

    def quantize_all(self, m):
        return self.quantize(m)  # all groups end their refinement together

    def quantize(self, m):
        along = self.groups_along
        s, z = in_parts(self.scale_and_zero, along, m)
        if self.optimize:
            z = self.refine(m, s, z)
        return in_parts(self.as_stored, along, m, s, z)

    def as_stored(self, m, s, z):
        codes = self.codes(m, s, z).astype(np.uint8)
        return codes, rounded(f32(1) / s, self.dtype), rounded(z, self.dtype)

    def scale_and_zero(self, m):
        """s = M / (max - min), at most 20,000, and 1 in a constant group; z = -min s.

        s is also limited so that z fits the dtype: HQQ stores inf there.
        """
        M, along = 2**self.bits - 1, self.groups_along
        low = m.min(axis=along, keepdims=True)
        width = m.max(axis=along, keepdims=True) - low
        s = reciprocal_times(M, width)
        s = np.where(width <= f32(1e-4), f32(1), np.minimum(s, f32(2e4)))
        top = self.largest - f32(2 * (M + 1))
        with np.errstate(divide="ignore", over="ignore"):
            s = np.minimum(s, top / np.abs(low))
        return s, -low * s

    def codes(self, m, s, z):
        """Float32 numbers 0 .. 2^b - 1."""
        y = m * s
        y += z
        np.rint(y, out=y)
        return np.clip(y, 0, 2**self.bits - 1, out=y)

    def refine(self, m, s, z):
        r"""z <- mean(code - (x - e') s) while mean |e| falls, at most 20 times.

            e = x - x_hat,    e' = sign(e) max(|e| - |e|^(p - 1) / beta, 0)

        e' keeps the large errors of e and drops the small ones: minimizing
        ||e||_p^p, p < 1, by half-quadratic splitting. A group whose z stays is done;
        once half of them are, only the others (`moving`) go on.
        """
        step, other = self.fastest_step(m), 1 - self.groups_along
        x, (s, z), shape = m, (s.ravel(), z.flatten()), z.shape
        moving, size, best = np.arange(z.size), np.empty_like(z), np.inf
        for _ in range(self.iterations):
            before = z[moving]
            z[moving], size[moving] = step(x, s, before)
            error = size.mean()
            if error >= best:
                break
            best, moves = error, z[moving] != before
            if FEW <= np.count_nonzero(moves) <= len(moves) / 2:
                moving, s, x = moving[moves], s[moves], np.compress(moves, x, other)
        return z.reshape(shape)

    def fastest_step(self, m):
        """`step`, or what Numba made of it where that is installed and pays."""
        if m.size < LARGE or self.group != 64 or find_spec("numba") is None:
            return self.step
        from kvq.formats import hqq_refine

        top = 2**self.bits - 1
        return partial(hqq_refine.step, along=self.groups_along, top=top)

    def step(self, x, s, z):
        """(the next z, mean |e|) of each group of x; s, z and these: (groups,)."""
        along = self.groups_along
        s, z = np.expand_dims((s, z), along + 1)
        return [a.ravel() for a in in_parts(self.step_of_few, along, x, s, z)]

    def step_of_few(self, x, s, z):
        codes = self.codes(x, s, z)
        e = codes - z
        e /= s
        np.subtract(x, e, out=e)
        size = np.abs(e)
        shrunk = np.subtract(x, self.shrink(e, size), out=e)
        shrunk *= s
        codes -= shrunk
        return [a.mean(self.groups_along, keepdims=True) for a in (codes, size)]

    def shrink(self, e, size):
        """e' = sign(e) max(|e| - |e|^(p - 1) / beta, 0).  size : |e|."""
        less = self.power(size)
        less *= f32(1 / self.beta)
        np.subtract(size, less, out=less)
        np.maximum(less, 0, out=less)
        return np.copysign(less, e, out=less)

    def power(self, size):
        """|e|^(p - 1)."""
        with np.errstate(divide="ignore"):  # 0^(p - 1) is inf, and e' is 0
            return np.power(size, f32(self.p - 1))

    def dequantize(self, codes, scale, offset):
        return rounded(rounded(codes - offset, self.dtype) * scale, self.dtype)


# --- fp8 ------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Fp8(Format):
    """scale = max|x| / 448 of the first update;  code = e4m3(x / scale).

    Bytes: float32 scale, codes. Later updates keep the scale (`encode_next`).
    clamp : saturate at 448 scale. The library does not: beyond 464 scale its codes
    are NaN, and so `clamp=False` writes them.
    """

    clamp: bool = True
    dtype: str = "float16"

    def nbytes(self, shape):
        return 4 + int(np.prod(shape))

    def encode(self, x):
        x = in_dtype(self.check(x), self.dtype)
        scale = np.maximum(np.abs(x).max() / f32(448), np.finfo(f32).tiny)
        return scale.astype("<f4").tobytes() + self.encode_next(x, scale)

    def encode_next(self, x, scale):
        """The codes of tokens that come after the first update, without a scale."""
        x = in_dtype(self.check(x), self.dtype)
        with np.errstate(over="ignore"):
            return E4M3.encode(x / f32(scale), saturate=self.clamp).tobytes()

    def decode(self, data, shape):
        data = self.check_bytes(data, shape)
        scale = np.ascontiguousarray(data[:4]).view("<f4")
        with np.errstate(over="ignore", invalid="ignore"):
            x = E4M3.decode(data[4:].reshape(shape)) * scale
        return rounded(x, self.dtype)


# --- the cache around quanto and HQQ --------------------------------------------------
class RequantizingCache:
    """Keys or values as `QuantizedCache` keeps them: an exhibit of drift.

    update(x) of the first tokens quantizes all of them and returns x itself. Later:

        seen = [decoded history, residual, x]
        if len(residual) + len(x) >= R: quantize all of `seen`, empty the residual

    so history is quantized again at every flush, and its error grows. `KVCache`
    quantizes a token once.

    format : a Quanto or Hqq. residual_length : R.
    """

    def __init__(self, format, residual_length=128):
        self.format, self.residual_length = format, residual_length
        self.data, self.shape, self.residual = b"", None, None
        self.flushes = 0

    def update(self, x):
        """Add x (..., t, D); returns what attention sees, float32 (..., T, D)."""
        x = in_dtype(as_float_array(x), self.format.dtype)
        if self.shape is None:
            seen = x
            self._quantize(x)
        else:
            pending = np.concatenate([self.residual, x], axis=-2)
            seen = np.concatenate([self.history(), pending], axis=-2)
            if pending.shape[-2] >= self.residual_length:
                self._quantize(seen)
            else:
                self.residual = pending
        return seen

    def history(self):
        """The quantized tokens as they are read: float32 (..., T, D)."""
        return self.format.decode(self.data, self.shape)

    def _quantize(self, x):
        self.data, self.shape = self.format.encode(x), x.shape
        self.residual = x[..., :0, :]
        self.flushes += 1


# --- the table ------------------------------------------------------------------------
_WINDOW = "fewer than 128 tokens; history is quantized again when it is full"


def _quanto(bits, axis):
    group = "64 numbers, along D then T" if axis == 0 else "64 tokens of a channel"
    facts = Facts(
        str(bits),
        group,
        "the tensor's dtype",
        "shift = -min, the tensor's dtype",
        "half-even, each operation in the tensor's dtype",
        _WINDOW,
        "arrays of optimum-quanto on a CPU",
        "optimum/quanto/tensor",
    )
    per = "token" if axis == 0 else "channel"
    scheme = Scheme(bits, per, 64, "asymmetric")
    name = f"hf:quanto-int{bits}-axis{axis}"
    return Quanto(name, QUANTO, facts, scheme, bits=bits, axis=axis)


def _hqq(bits, axis):
    group = "64 numbers, N / 64 apart" if axis == 0 else "64 numbers, along D then T"
    facts = Facts(
        str(bits),
        group,
        "the tensor's dtype",
        "real number of steps, refined",
        "half-even, float32",
        _WINDOW,
        "arrays of hqq on a CPU, but for a mean's order and a power's last place",
        "hqq/core",
    )
    return Hqq(f"hf:hqq-int{bits}-axis{axis}", HQQ, facts, bits=bits, axis=axis)


_FP8 = Facts(
    "8 (E4M3)",
    "the whole tensor",
    "float32, frozen at the first update",
    "none",
    "half-even, float32",
    "none",
    "bytes of transformers up to 464 scale, where it writes NaN",
    "transformers/cache_utils.py",
)

FORMATS = {
    f.name: f
    for f in (
        *(_quanto(bits, axis) for bits in (2, 4) for axis in (0, -1)),
        *(_hqq(bits, axis) for bits in (1, 2, 3, 4, 8) for axis in (0, 1)),
        Fp8("hf:fp8", TRANSFORMERS, _FP8, Scheme(8, "tensor", None, "e4m3", "float32")),
    )
}


def with_dtype(name, dtype):
    """The format `name` for tensors of `dtype` (float16, bfloat16 or float32)."""
    return replace(FORMATS[name], dtype=dtype)
