"""vLLM's records of latent attention (MLA): one per token, for all heads. Decode only.

A record holds a compressed vector (512 or 448 numbers) in FP8 or FP4 with its scales,
and 64 RoPE channels, in bfloat16 or FP8.
"""

import numpy as np

from kvq.formats.base import Format
from kvq.formats.minifloat import E2M1, E4M3, e8m0_decode
from kvq.formats.rounding import f32
from kvq.formats.vllm_slots import from_bytes
from kvq.packing import unpack


class MlaRecord(Format):
    """A latent vector and RoPE keys of one token in one record: decode only.

    Subclasses give `dim` (numbers), `record_bytes` and `read` (n, record_bytes) uint8
    -> (n, dim) float32.
    """

    dim: int
    record_bytes: int

    def nbytes(self, shape):
        if shape[-1] != self.dim:
            raise ValueError(f"{self.name}: rows of {shape[-1]}; valid: {self.dim}")
        return int(np.prod(shape[:-1])) * self.record_bytes

    def bits_per_element(self, shape):
        """Stored bits per number: a record has one size, whatever the shape."""
        return 8 * self.record_bytes / self.dim

    def encode(self, x):
        raise ValueError(f"{self.name} can only be decoded here")

    def decode(self, data, shape):
        records = self.check_bytes(data, shape).reshape(-1, self.record_bytes)
        with np.errstate(over="ignore", invalid="ignore"):  # bytes may hold inf or NaN
            return self.read(records).reshape(shape)


def _bfloat16(data):
    """bfloat16 bytes (n, 2m) as float32 (n, m): the upper half of a float32."""
    words = np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16
    return words.view(f32)


class Fp8DsMla(MlaRecord):
    """512 E4M3 | 4 float32 scales, one per 128 | 64 bfloat16 RoPE."""

    dim, record_bytes = 576, 656

    def read(self, data):
        latent, scales, rope = np.split(data, [512, 528], axis=-1)
        s = np.repeat(from_bytes(scales, "<f4"), 128, axis=-1)
        return np.concatenate([E4M3.decode(latent) * s, _bfloat16(rope)], axis=-1)


class Fp8DsMlaV4(MlaRecord):
    """448 E4M3 | 64 bfloat16 RoPE | 7 E8M0 scales, one per 64 | a byte unused."""

    dim, record_bytes = 512, 584

    def read(self, data):
        latent, rope, scales, _ = np.split(data, [448, 576, 583], axis=-1)
        s = np.repeat(e8m0_decode(scales), 64, axis=-1)
        return np.concatenate([E4M3.decode(latent) * s, _bfloat16(rope)], axis=-1)


class Fp8DsMlaV41(MlaRecord):
    """512 E4M3 | 16 E8M0 scales, one per 32."""

    dim, record_bytes = 512, 528

    def read(self, data):
        latent, scales = np.split(data, [512], axis=-1)
        return E4M3.decode(latent) * np.repeat(e8m0_decode(scales), 32, axis=-1)


class Nvfp4DsMla(MlaRecord):
    """512 E2M1 in 256 bytes | 64 E4M3 RoPE, unscaled | 32 E4M3 scales, one per 16.

    Scale s stands at byte 8 (s mod 4) + s // 4. Decoded without a scale of the layer.
    """

    dim, record_bytes = 576, 352

    def read(self, data):
        codes, rope, scales = np.split(data, [256, 320], axis=-1)
        s = np.arange(32)
        S = E4M3.decode(scales[:, 8 * (s % 4) + s // 4])
        latent = E2M1.decode(unpack(np.ascontiguousarray(codes), 4, 512))
        return np.concatenate([latent * np.repeat(S, 16, -1), E4M3.decode(rope)], -1)
