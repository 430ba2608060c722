"""What every cache format offers: bytes out of numbers, numbers out of bytes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from kvq.dtypes import as_float_array
from kvq.scheme import Scheme


@dataclass(frozen=True)
class Facts:
    """What a format is, in the words of the generated table.

    bits : of one code. group : numbers that share a scale, and along what.
    scale, zero : how they are stored. rounding : the rule of `formats.rounding`.
    window : what stays in full precision. exact : what "the same bytes" can mean.
    source : files of the upstream version that `version` names.
    """

    bits: str
    group: str
    scale: str
    zero: str
    rounding: str
    window: str
    exact: str
    source: str


@dataclass(frozen=True)
class Format(ABC):
    """One format of one system.

    name : "system:format". version : the upstream version whose bytes these are.
    scheme : the setting of our vocabulary with the same levels, or None. A code may
        differ by one from `kvq.quantize`, near the middle of two levels, where the
        format rounds otherwise.
    """

    name: str
    version: str
    facts: Facts = field(repr=False)
    scheme: Scheme | None = None

    @abstractmethod
    def nbytes(self, shape):
        """Bytes of an encoded tensor of `shape` (..., T, D)."""

    @abstractmethod
    def encode(self, x):
        """The bytes of x (..., T, D), as the system stores them.

        Raises TypeError or ValueError for numbers or shapes the format cannot hold.
        """

    @abstractmethod
    def decode(self, data, shape):
        """The float32 tensor of `shape` that these bytes stand for.

        Raises ValueError if the number of bytes does not fit the shape.
        """

    def bits_per_element(self, shape):
        """Stored bits per number, everything counted."""
        return 8 * self.nbytes(shape) / np.prod(shape)

    def check(self, x):
        """x as a finite native float array of at least one axis."""
        x = as_float_array(x)
        self.check_shape(x.shape)
        return x

    def check_shape(self, shape):
        """Raise ValueError for a shape that holds no numbers."""
        if len(shape) < 1 or min(shape) < 1:
            raise ValueError(f"{self.name}: shape {tuple(shape)}; expected (..., T, D)")

    def check_bytes(self, data, shape):
        """`data` as a uint8 array of exactly the bytes that `shape` needs."""
        self.check_shape(shape)
        need = self.nbytes(shape)
        if len(data) != need:
            raise ValueError(
                f"{self.name}: {len(data)} bytes; a tensor of shape {tuple(shape)} "
                f"has {need}"
            )
        return np.frombuffer(data, np.uint8)


# Numbers encoded or decoded at a time: what is computed on the way stays in the
# processor's cache.
CHUNK = 2**16


class BlockFormat(Format):
    """A format of fixed-size blocks along the last axis: array of structs.

    Subclasses give `block` (numbers), `block_bytes`, `encode_blocks` (n, block)
    float32 -> (n, block_bytes) uint8 and `decode_blocks`, its inverse.
    """

    block: int
    block_bytes: int

    def nbytes(self, shape):
        if shape[-1] % self.block:
            raise ValueError(
                f"{self.name}: rows of {shape[-1]} numbers; "
                f"valid: multiples of {self.block}"
            )
        return int(np.prod(shape)) // self.block * self.block_bytes

    def encode(self, x):
        x = self.check(x)
        self.nbytes(x.shape)
        blocks = x.astype(np.float32, copy=False).reshape(-1, self.block)
        parts = (self.encode_blocks(blocks[n]) for n in self._chunks(len(blocks)))
        return b"".join(np.ascontiguousarray(part) for part in parts)

    def decode(self, data, shape):
        blocks = self.check_bytes(data, shape).reshape(-1, self.block_bytes)
        x = np.empty((len(blocks), self.block), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # bytes may hold inf or NaN
            for n in self._chunks(len(blocks)):
                x[n] = self.decode_blocks(blocks[n])
        return x.reshape(shape)

    def _chunks(self, blocks):
        """Slices of a few blocks that together are all of them."""
        step = max(CHUNK // self.block, 1)
        return [slice(i, i + step) for i in range(0, blocks, step)]

    @abstractmethod
    def encode_blocks(self, x): ...

    @abstractmethod
    def decode_blocks(self, data): ...
