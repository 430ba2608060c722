r"""How vLLM stores one token of one KV head: a slot, K and V in one record.

    slot = K codes | K scales | V codes | V scales | zeros       (Octave: scales last)

A `Side` says what becomes of one of the two; a `SlotFormat` puts them together. The
sides here quantize numbers as they are; `vllm_rotated` has those that rotate first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from kvq.dtypes import as_float_array
from kvq.formats.base import Facts
from kvq.formats.minifloat import E4M3, Minifloat, chunks
from kvq.formats.rounding import f32, trh
from kvq.scheme import Policy


# --- pieces of a slot -----------------------------------------------------------------
def to_bytes(numbers, dtype):
    """Numbers (n, m) as little-endian bytes: (n, m * itemsize) uint8."""
    return np.ascontiguousarray(numbers.astype(dtype)).view(np.uint8)


def from_bytes(data, dtype):
    """The numbers in bytes (n, m * itemsize), as float32 (n, m)."""
    return np.ascontiguousarray(data).view(dtype).astype(f32)


def to_half(numbers):
    """Numbers (n, m) as float16 bytes. vLLM stores inf for numbers beyond 65504."""
    with np.errstate(over="ignore"):
        return to_bytes(numbers, "<f2")


class Side(ABC):
    """What a slot holds of K, or of V: codes and scales of one vector of D numbers."""

    @abstractmethod
    def widths(self, D):
        """(bytes of codes, bytes of scales). Raises ValueError for an impossible D."""

    @abstractmethod
    def encode(self, x):
        """Vectors x (n, D), any float dtype -> codes and scales, uint8 (n, width)."""

    @abstractmethod
    def decode(self, codes, scales, D):
        """float32 (n, D), the inverse of `encode`."""


# --- formats of K and V together ------------------------------------------------------
@dataclass(frozen=True)
class PairFormat(ABC):
    """One format that stores K and V side by side.

    name, version, facts : as in `base.Format`.
    policy : the setting of our vocabulary with the same levels, or None.
    Shapes are those of K, (..., T, D); `value_dim` is given where V has another D.
    """

    name: str
    version: str
    facts: Facts = field(repr=False)
    policy: Policy | None = None

    @abstractmethod
    def nbytes(self, shape, value_dim=None):
        """Bytes of encoded K and V."""

    @abstractmethod
    def encode(self, k, v):
        """The bytes of k (..., T, D) and v (..., T, value_dim), as vLLM stores them.

        Raises TypeError or ValueError for numbers or shapes the format cannot hold.
        """

    @abstractmethod
    def decode(self, data, shape, value_dim=None):
        """(k, v), the float32 tensors that these bytes stand for.

        Raises ValueError if the number of bytes does not fit the shape.
        """

    def bits_per_element(self, shape, value_dim=None):
        """Stored bits per number of K and V, everything counted."""
        numbers = np.prod(shape[:-1]) * (shape[-1] + (value_dim or shape[-1]))
        return 8 * self.nbytes(shape, value_dim) / numbers

    def check(self, k, v):
        """k and v as finite float arrays of the same (..., T)."""
        k, v = as_float_array(k, "k"), as_float_array(v, "v")
        self.check_shape(k.shape)
        self.check_shape(v.shape)
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"{self.name}: k {k.shape} and v {v.shape} do not match")
        return k, v

    def check_shape(self, shape):
        """Raise ValueError for a shape that holds no numbers."""
        if len(shape) < 1 or min(shape) < 1:
            raise ValueError(f"{self.name}: shape {tuple(shape)}; expected (..., T, D)")

    def check_bytes(self, data, shape, value_dim=None):
        """`data` as a uint8 array of exactly the bytes that K and V need."""
        self.check_shape(shape)
        need = self.nbytes(shape, value_dim)
        if len(data) != need:
            raise ValueError(
                f"{self.name}: {len(data)} bytes; keys and values of shape "
                f"{tuple(shape)} have {need}"
            )
        return np.frombuffer(data, np.uint8)


@dataclass(frozen=True, kw_only=True)
class SlotFormat(PairFormat):
    """K and V of a (token, head) in one slot; slots in the order of the tensors.

    key, value : the two sides. align : a slot is padded with zeros to a multiple of
    it. scales_last : the codes of both sides come before the scales of both.
    """

    key: Side
    value: Side
    align: int = 1
    scales_last: bool = False

    def slot_bytes(self, D, value_dim=None):
        """Bytes of one slot. Raises ValueError for an impossible D."""
        used = sum(self.key.widths(D)) + sum(self.value.widths(value_dim or D))
        return -(-used // self.align) * self.align

    def nbytes(self, shape, value_dim=None):
        *lead, D = shape
        return int(np.prod(lead)) * self.slot_bytes(D, value_dim)

    def encode(self, k, v):
        return self.encode_slots(k, v).tobytes()

    def decode(self, data, shape, value_dim=None):
        slots = self.check_bytes(data, shape, value_dim)
        return self.decode_slots(slots.reshape(*shape[:-1], -1), shape[-1], value_dim)

    def encode_slots(self, k, v):
        """uint8 (..., T, slot bytes), for a paged cache. Raises as `encode`."""
        k, v = self.check(k, v)
        lead = k.shape[:-1]
        D, value_dim = k.shape[-1], v.shape[-1]
        slots = np.zeros((k.size // D, self.slot_bytes(D, value_dim)), np.uint8)
        k, v = k.reshape(-1, D), v.reshape(-1, value_dim)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float32: as vLLM
            for n in chunks(len(slots), D):
                parts = self._order(self.key.encode(k[n]), self.value.encode(v[n]))
                used = np.concatenate(parts, axis=-1)
                slots[n, : used.shape[-1]] = used
        return slots.reshape(*lead, -1)

    def decode_slots(self, slots, D, value_dim=None):
        """(k, v) of slots (..., T, slot bytes): the inverse of `encode_slots`."""
        value_dim = value_dim or D
        *lead, width = slots.shape
        slots = slots.reshape(-1, width)
        k = np.empty((len(slots), D), f32)
        v = np.empty((len(slots), value_dim), f32)
        ends = np.cumsum(self._order(self.key.widths(D), self.value.widths(value_dim)))
        with np.errstate(over="ignore", invalid="ignore"):  # bytes may hold inf or NaN
            for n in chunks(len(slots), D):
                a, b, c, d, _ = np.split(slots[n], ends, axis=-1)
                key, value = ((a, c), (b, d)) if self.scales_last else ((a, b), (c, d))
                k[n] = self.key.decode(*key, D)
                v[n] = self.value.decode(*value, value_dim)
        return k.reshape(*lead, D), v.reshape(*lead, value_dim)

    def _order(self, key, value):
        """(codes, scales) of both sides in the order of the slot."""
        if self.scales_last:
            return key[0], value[0], key[1], value[1]
        return *key, *value


# --- sides without a rotation ---------------------------------------------------------
@dataclass(frozen=True)
class Fp8(Side):
    """code = fp8(x / s), saturating;  x_hat = s value.   s is given, not stored."""

    kind: Minifloat
    scale: np.float32

    def widths(self, D):
        return D, 0

    def encode(self, x):
        codes = self.kind.encode(x.astype(f32, copy=False) / self.scale)
        return codes, np.empty((len(x), 0), np.uint8)

    def decode(self, codes, scales, D):
        return self.kind.decode(codes) * self.scale


class Int8PerTokenHead(Side):
    """s = max(max|x| / 127, 1e-6),  q = trh(x (1/s)),  x_hat = s q."""

    def widths(self, D):
        return D, 4

    def encode(self, x):
        x = x.astype(f32, copy=False)
        s = token_scale(x, 127)
        q = np.clip(trh(x * (f32(1) / s)), -128, 127).astype(np.int8)
        return q.view(np.uint8), to_bytes(s, "<f4")

    def decode(self, codes, scales, D):
        return codes.view(np.int8).astype(f32) * from_bytes(scales, "<f4")


class Fp8PerTokenHead(Side):
    """s = max(max|x| / 448, 1e-6),  code = e4m3(x (1/s)),  x_hat = s value."""

    def widths(self, D):
        return D, 4

    def encode(self, x):
        x = x.astype(f32, copy=False)
        s = token_scale(x, 448)
        return E4M3.encode(x * (f32(1) / s)), to_bytes(s, "<f4")

    def decode(self, codes, scales, D):
        return E4M3.decode(codes) * from_bytes(scales, "<f4")


def token_scale(x, top):
    """max(max|x| / top, 1e-6) of each vector: (n, 1) float32."""
    absmax = np.abs(x).max(axis=-1, keepdims=True)
    return np.maximum(absmax / f32(top), f32(1e-6))
