r"""Formats that PyTorch code defines: groups of G numbers, arithmetic op by op.

PyTorch computes a half-precision operation in float32 and rounds its result, so one
formula has as many roundings as it has operations. Here numbers stay float32 arrays
whose values the tensor's dtype can hold, and `rounded` stands after each operation.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvq.dtypes import DTYPES, itemsize, numpy_dtype
from kvq.formats.base import CHUNK, Format
from kvq.formats.rounding import f32, rne

TENSOR_DTYPES = ("float16", "bfloat16", "float32")


# --- arithmetic -----------------------------------------------------------------------
def rounded(x, dtype):
    """x rounded to the format `dtype`, as float32; inf where it is too large for it."""
    if dtype == "float32":
        return x
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(numpy_dtype(dtype)).astype(f32)


def in_dtype(x, dtype):
    """x as a tensor of `dtype`: float32. Raises ValueError for what does not fit."""
    x = x.astype(f32, copy=False)
    largest = DTYPES[dtype][1]
    if max(x.max(), -x.min()) > largest:
        raise ValueError(f"a tensor of {dtype} holds numbers up to {largest:g}")
    return rounded(x, dtype)


def reciprocal_times(scalar, t):
    """`scalar / tensor` in PyTorch: 1 / t, then times the scalar. Float32.

    inf where t is 0 or so small that 1 / t overflows.
    """
    with np.errstate(divide="ignore", over="ignore"):
        return f32(1) / t * f32(scalar)


def minmax_encode(x, axis, bits, dtype):
    """s = (max - min) / (2^b - 1),  code = rne((x - min) / s),  op by op in `dtype`.

    x : float32 (R, C) of numbers that `dtype` holds; groups lie along `axis`.
    Returns codes uint8 (R, C), s and min, float32 with one number per group. In a
    constant group s and the codes are 0. (PyTorch computes 0 / 0 there, and what a
    NaN becomes as an integer is undefined.) Raises ValueError where max - min is inf.
    """
    low = x.min(axis=axis, keepdims=True)
    width = rounded(x.max(axis=axis, keepdims=True) - low, dtype)
    if not np.isfinite(width).all():
        raise ValueError(f"the range of a group does not fit {dtype}")
    s = rounded(width / f32(2**bits - 1), dtype)
    y = rounded(x - low, dtype)
    y = rounded(y / np.where(s == 0, f32(1), s), dtype)
    return np.clip(rne(y), 0, 2**bits - 1).astype(np.uint8), s, low


def minmax_decode(codes, s, low, dtype):
    """x_hat = s code + min: two operations, two roundings."""
    return rounded(rounded(codes * s, dtype) + low, dtype)


# --- a few groups at a time -----------------------------------------------------------
def parts(shape, along):
    """Indices of a few groups of a matrix each, which together are all of it.

    Groups lie along axis `along`, 0 or 1. What is computed of so few numbers stays in
    the processor's cache.
    """
    rows, columns = shape
    groups = rows if along == 1 else columns
    count = min(-(-rows * columns // CHUNK), groups)
    slices = [
        slice(*cut) for cut in pairwise(groups * i // count for i in range(count + 1))
    ]
    return slices if along == 1 else [(slice(None), part) for part in slices]


def in_parts(function, along, *arrays):
    """The arrays `function(*arrays)`, computed a few groups at a time.

    Groups lie along axis `along` of all arrays, the largest of which is the first.
    """
    results = [
        function(*(a[part] for a in arrays)) for part in parts(arrays[0].shape, along)
    ]
    return [np.concatenate(r, axis=1 - along) for r in zip(*results, strict=True)]


# --- packing --------------------------------------------------------------------------
def pack_rows(codes, shifts, word=np.uint8):
    """Row k n + r of codes (R, C) at bit shifts[k] of word r: (n, C).

    n = ceil(R / len(shifts)): rows that are far apart share a word. Missing rows are
    zeros.
    """
    n = math.ceil(len(codes) / len(shifts))
    words = np.zeros((n, codes.shape[1]), word)
    for k, shift in enumerate(shifts):
        rows = codes[k * n : (k + 1) * n]
        words[: len(rows)] |= rows.astype(word) << word(shift)
    return words


def unpack_rows(words, shifts, bits, rows):
    """The first `rows` rows of codes, uint8: the inverse of `pack_rows`."""
    mask = words.dtype.type(2**bits - 1)
    blocks = [(words >> words.dtype.type(shift)) & mask for shift in shifts]
    return np.concatenate(blocks).astype(np.uint8)[:rows]


# --- a format of codes, scales and offsets --------------------------------------------
@dataclass(frozen=True, kw_only=True)
class GroupedFormat(Format):
    """Packed codes, then one scale and one offset per group, both in `dtype`.

    bits : of one code. axis : as the system calls it. group : G. dtype : of the
    tensor, in which the system computes and stores; little-endian here.

    A tensor becomes a matrix whose groups are rows or columns (`groups_along` 1 or
    0). Subclasses give `check_layout`, `to_matrix`, `from_matrix`, `quantize`,
    `dequantize`, `pack`, `unpack` and `packed_bytes`.
    """

    bits: int
    axis: int
    group: int = 64
    dtype: str = "float16"

    def __post_init__(self):
        if self.dtype not in TENSOR_DTYPES:
            valid = ", ".join(TENSOR_DTYPES)
            raise ValueError(f"{self.name}: dtype={self.dtype!r}; valid: {valid}")
        if type(self.group) is not int or self.group < 1:
            raise ValueError(f"{self.name}: group={self.group!r}; valid: integers >= 1")

    @property
    def largest(self):
        """The largest number of `dtype`, float32."""
        return f32(DTYPES[self.dtype][1])

    def nbytes(self, shape):
        self.check_shape(shape)
        self.check_layout(shape)
        numbers = 2 * math.prod(shape) // self.group
        return self.packed_bytes(shape) + numbers * itemsize(self.dtype)

    def encode(self, x):
        x = in_dtype(self.check(x), self.dtype)
        self.nbytes(x.shape)
        codes, *numbers = self.quantize_all(self.to_matrix(x))
        pieces = [self.pack(codes, x.shape), *map(self._stored, numbers)]
        return b"".join(piece.tobytes() for piece in pieces)

    def quantize_all(self, m):
        """Codes, scales and offsets of a matrix, by `quantize` of a few groups."""
        return in_parts(self.quantize, self.groups_along, m)

    def decode(self, data, shape):
        data = self.check_bytes(data, shape)
        end = self.packed_bytes(shape)
        codes = self.unpack(data[:end], shape)
        scale, offset = self.numbers(data[end:])
        m = np.empty(codes.shape, f32)
        with np.errstate(over="ignore", invalid="ignore"):  # bytes may hold inf or NaN
            for n in parts(m.shape, self.groups_along):
                m[n] = self.dequantize(codes[n], scale[n], offset[n])
        return self.from_matrix(m, shape)

    def _stored(self, x):
        return x.astype(numpy_dtype(self.dtype))

    def numbers(self, data):
        """Scales and offsets of these bytes, float32, shaped against the matrix."""
        numbers = np.ascontiguousarray(data).view(numpy_dtype(self.dtype)).astype(f32)
        return numbers.reshape((2, -1, 1) if self.groups_along == 1 else (2, 1, -1))

    @property
    @abstractmethod
    def groups_along(self):
        """The axis of the matrix along which a group lies: 0 or 1."""

    @abstractmethod
    def check_layout(self, shape):
        """Raise ValueError for a shape that the system cannot group or pack."""

    @abstractmethod
    def to_matrix(self, x): ...

    @abstractmethod
    def from_matrix(self, m, shape): ...

    @abstractmethod
    def quantize(self, m): ...

    @abstractmethod
    def dequantize(self, codes, scale, offset): ...

    @abstractmethod
    def packed_bytes(self, shape): ...

    @abstractmethod
    def pack(self, codes, shape): ...

    @abstractmethod
    def unpack(self, data, shape): ...

    def refuse(self, what, valid):
        """Raise the ValueError of a shape that does not fit."""
        raise ValueError(f"{self.name}: {what}; valid: {valid}")
