"""`QuantizedTensor`: what is really stored of one tensor, and how it is read back."""

import math
from dataclasses import dataclass, replace

import numpy as np

from kvq import transforms
from kvq.dtypes import as_float_array, cast
from kvq.packing import pack, unpack
from kvq.quantizer import from_codes, scale_and_zero, to_codes
from kvq.scheme import Scheme


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor (..., H, T, D) stored by `scheme`.

    codes : uint8 (..., H, T, ceil(D * bits / 8)), one packed row per token; for the
        float levels the numbers themselves, (..., H, T, D).
    scale, zero : arrays of `scheme.scale_dtype` with the shape
        (..., *scheme.metadata_shape(H, T, D)), or None where there are none.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    codes: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None

    @property
    def arrays(self):
        """Every array that is stored."""
        return [a for a in (self.codes, self.scale, self.zero) if a is not None]

    @property
    def nbytes(self):
        """Bytes of everything that is stored."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def bits_per_element(self):
        """Stored bits per number: 8 * nbytes / size. Raises ValueError if size is 0."""
        size = math.prod(self.shape)
        if size == 0:
            raise ValueError(f"a tensor of shape {self.shape} holds no numbers")
        return 8 * self.nbytes / size

    @property
    def tokens(self):
        """T, the number of tokens."""
        return self.shape[-2]

    def unpack(self, start=0, stop=None):
        """Codes of the tokens start..stop-1: uint8 (..., H, stop - start, D)."""
        if self.scheme.full_precision:
            raise ValueError(f"levels={self.scheme.levels!r} has no codes")
        packed = self.codes[..., start:stop, :]
        return unpack(packed, self.scheme.bits, self.shape[-1])

    def dequantize(self, start=0, stop=None):
        """x_hat of the tokens start..stop-1: float32 (..., H, stop - start, D).

        x_hat = s * level(code) + z, then the inverse of the scheme's transform.
        Only these tokens are unpacked.
        """
        start, stop, _ = slice(start, stop).indices(self.tokens)
        if self.scheme.full_precision:
            return self.codes[..., start:stop, :].astype(np.float32)
        x = from_codes(
            self.unpack(start, stop), self.scale, self.zero, self.scheme, start
        )
        return transforms.invert(self.scheme.transform, x)

    def crop(self, tokens):
        """The first `tokens` tokens, in arrays of their own (no hidden history).

        `tokens` must be whole groups. Raises ValueError otherwise.
        """
        return self._cut(slice(0, tokens), tokens, f"cannot crop to {tokens} tokens")

    def drop(self, tokens):
        """All but the first `tokens` tokens, likewise."""
        return self._cut(slice(tokens, None), tokens, f"cannot drop {tokens} tokens")

    def _cut(self, keep, at, message):
        block = self.scheme.token_block
        whole = at == self.tokens or (block is not None and at % block == 0)
        if not (whole and 0 <= at <= self.tokens):
            raise ValueError(
                f"{message}; valid: multiples of {block} up to {self.tokens}"
            )
        start, stop, _ = keep.indices(self.tokens)
        H, D = self.shape[-3], self.shape[-1]
        first, last = (self.scheme.metadata_shape(H, n, D)[1] for n in (start, stop))
        parts = {"codes": self.codes[..., start:stop, :].copy()}
        for name in ("scale", "zero"):
            a = getattr(self, name)
            parts[name] = None if a is None else a[..., first:last, :].copy()
        return replace(self, shape=(*self.shape[:-2], stop - start, D), **parts)


def quantize(x, scheme):
    """Store x (..., H, T, D) by `scheme`.

    x : float16, bfloat16, float32 or float64; a leading batch axis is allowed, and
        (T, D) or (D,) count as one head (and one token).
    Returns a QuantizedTensor of shape (..., H, T, D).
    Raises TypeError for another dtype or if `scheme` is no Scheme; ValueError for
    numbers that are not finite or a head dimension that the scheme's transform cannot
    rotate.
    """
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme={scheme!r}; expected a Scheme")
    x = as_float_array(x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {x.shape}; expected (..., H, T, D) with D >= 1")
    shape = (1,) * (3 - x.ndim) + x.shape
    x = x.reshape(shape)
    scheme.check_head_dim(shape[-1])
    if scheme.full_precision:
        return QuantizedTensor(scheme, shape, cast(x, scheme.levels))
    x = transforms.apply(scheme.transform, x.astype(np.float32, copy=False))
    scale, zero = scale_and_zero(x, scheme)
    codes = to_codes(x, scale, zero, scheme)
    return QuantizedTensor(scheme, shape, pack(codes, scheme.bits), scale, zero)


def concatenate(tensors):
    """Tensors of one scheme, one after the other along the tokens.

    All but the last must hold whole groups. Raises ValueError otherwise.
    """
    first, *_ = tensors
    block = first.scheme.token_block
    for t in tensors[:-1]:
        if block is None or t.tokens % block:
            raise ValueError(
                f"{t.tokens} tokens are not whole groups of {block}; "
                "only the last tensor may end inside a group"
            )
    if any(t.scheme != first.scheme for t in tensors):
        raise ValueError("tensors of different schemes cannot be concatenated")
    parts = {
        name: None
        if getattr(first, name) is None
        else np.concatenate([getattr(t, name) for t in tensors], axis=-2)
        for name in ("codes", "scale", "zero")
    }
    T = sum(t.tokens for t in tensors)
    return replace(first, shape=(*first.shape[:-2], T, first.shape[-1]), **parts)
