r"""llama.cpp / ggml cache types: blocks of 32 consecutive numbers of one token.

    x_hat = d * code   or   d * code + m,    d and m as float16 inside the block

The code is always computed with the float32 d; its float16 rounding is what a reader
multiplies by. Nibbles: number j of a block is in the low, j + 16 in the high half of
byte j. Source: ggml/src/ggml-quants.c (`quantize_row_*_ref`, `dequantize_row_*`) and
ggml-common.h at llama.cpp commit 0c1e57098; oracle: the package `gguf` 0.19.
"""

import numpy as np

from kvq.codebooks import IQ4_NL
from kvq.dtypes import as_float_array
from kvq.formats.base import BlockFormat, Facts, Format
from kvq.formats.rounding import f32, inverse, rha, trc
from kvq.scheme import Scheme
from kvq.transforms import hadamard

VERSION = "llama.cpp 0c1e57098"

# ggml_type ids, as state files store them.
TYPE_IDS = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}


# --- pieces of a block ----------------------------------------------------------------
def signed_extreme(x):
    """The first number of largest |x| of each block, with its sign: (n, 1)."""
    at = np.argmax(np.abs(x), axis=-1)[:, None]
    return np.take_along_axis(x, at, axis=-1)


def half(d):
    """d (n, 1) as the two bytes of a little-endian float16: (n, 2) uint8.

    ggml stores inf where d is beyond 65504 (|x| > 8.3e6 in q8_0).
    """
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(d.astype("<f2")).view(np.uint8)


def read_half(data):
    """The float16 in two bytes (n, 2) as float32 (n, 1)."""
    return np.ascontiguousarray(data).view("<f2").astype(f32)


def pack_nibbles(codes):
    """Codes (n, 2m) < 16 -> bytes (n, m): number j low, number j + m high."""
    codes = codes.astype(np.uint8)
    m = codes.shape[-1] // 2
    return codes[:, :m] | codes[:, m:] << 4


def unpack_nibbles(data):
    """Bytes (n, m) -> codes (n, 2m): the inverse of `pack_nibbles`."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def pack_fifth_bits(codes):
    """Bit 4 of each of 32 codes, code j at bit j of a little-endian u32: (n, 4)."""
    return np.packbits(codes.astype(np.uint8) >> 4 & 1, axis=-1, bitorder="little")


def unpack_fifth_bits(data):
    """(n, 4) bytes -> 32 values 0 or 16: the inverse of `pack_fifth_bits`."""
    return np.unpackbits(data, axis=-1, bitorder="little") << 4


def scale_and_min(x, levels):
    """d = (max - min) / levels and m = min of each block: (n, 1) each."""
    m = x.min(axis=-1, keepdims=True)
    return (x.max(axis=-1, keepdims=True) - m) / f32(levels), m


# --- the block formats ----------------------------------------------------------------
class Q8_0(BlockFormat):
    """d = max|x| / 127,  q = round half away (x / d),  x_hat = d q."""

    block, block_bytes = 32, 34

    def encode_blocks(self, x):
        d = np.abs(x).max(axis=-1, keepdims=True) / f32(127)
        q = rha(x * inverse(d)).astype(np.int8)
        return np.concatenate([half(d), q.view(np.uint8)], axis=-1)

    def decode_blocks(self, data):
        return read_half(data[:, :2]) * data[:, 2:].view(np.int8).astype(f32)


class Q4_0(BlockFormat):
    """d = m / -8, m the signed extreme,  q = trunc(x / d + 8.5),  x_hat = d (q - 8)."""

    block, block_bytes = 32, 18

    def encode_blocks(self, x):
        d = signed_extreme(x) / f32(-8)
        q = np.clip(trc(x * inverse(d), 8.5), 0, 15)
        return np.concatenate([half(d), pack_nibbles(q)], axis=-1)

    def decode_blocks(self, data):
        return read_half(data[:, :2]) * (unpack_nibbles(data[:, 2:]).astype(f32) - 8)


class Q4_1(BlockFormat):
    """d = (max - min) / 15, m = min,  q = trunc((x - m) / d + 0.5)."""

    block, block_bytes = 32, 20

    def encode_blocks(self, x):
        d, m = scale_and_min(x, 15)
        q = np.minimum(trc((x - m) * inverse(d), 0.5), 15)
        return np.concatenate([half(d), half(m), pack_nibbles(q)], axis=-1)

    def decode_blocks(self, data):
        d, m = read_half(data[:, :2]), read_half(data[:, 2:4])
        return d * unpack_nibbles(data[:, 4:]).astype(f32) + m


class Q5_0(BlockFormat):
    """d = m / -16, m the signed extreme,  q = trunc(x / d + 16.5), x_hat = d (q - 16).

    The fifth bits of the 32 codes form a u32 before the nibbles.
    """

    block, block_bytes = 32, 22

    def encode_blocks(self, x):
        d = signed_extreme(x) / f32(-16)
        q = np.clip(trc(x * inverse(d), 16.5), 0, 31).astype(np.uint8)
        parts = [half(d), pack_fifth_bits(q), pack_nibbles(q & 15)]
        return np.concatenate(parts, axis=-1)

    def decode_blocks(self, data):
        q = unpack_nibbles(data[:, 6:]) | unpack_fifth_bits(data[:, 2:6])
        return read_half(data[:, :2]) * (q.astype(f32) - 16)


class Q5_1(BlockFormat):
    """d = (max - min) / 31, m = min,  q = trunc((x - m) / d + 0.5)."""

    block, block_bytes = 32, 24

    def encode_blocks(self, x):
        d, m = scale_and_min(x, 31)
        q = trc((x - m) * inverse(d), 0.5).astype(np.uint8)
        parts = [half(d), half(m), pack_fifth_bits(q), pack_nibbles(q & 15)]
        return np.concatenate(parts, axis=-1)

    def decode_blocks(self, data):
        q = unpack_nibbles(data[:, 8:]) | unpack_fifth_bits(data[:, 4:8])
        return read_half(data[:, :2]) * q.astype(f32) + read_half(data[:, 2:4])


class Iq4Nl(BlockFormat):
    """Sixteen unequal levels; d minimizes sum x^2 (x - d level)^2 for chosen levels.

    Levels are chosen with d0 = m / -127, m the signed extreme, ties to the upper one.
    This is the path of the KV cache, without the scale search of weight files.
    """

    block, block_bytes = 32, 18
    levels = np.array(IQ4_NL, f32)

    def encode_blocks(self, x):
        q = self.nearest(x * inverse(signed_extreme(x) / self.levels[0]))
        d = self.best_scale(x, self.levels[q])
        small = np.abs(x).max(axis=-1, keepdims=True) < 1e-15
        q = np.where(small, 8, q)
        return np.concatenate([half(np.where(small, 0, d)), pack_nibbles(q)], axis=-1)

    def nearest(self, y):
        """Index of the nearest level, halfway to the upper one."""
        middle = (self.levels[1:] + self.levels[:-1]) / 2
        return np.searchsorted(middle, y, side="right")

    def best_scale(self, x, y):
        """d = sum w y x / sum w y^2, w = x^2, summed one after the other in float32.

        Beyond |x| of about 1e12 the sums are inf, and d is not a number, as in ggml.
        """
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            w = x * x
            top = np.cumsum(w * y * x, axis=-1, dtype=f32)[:, -1:]
            bottom = np.cumsum(w * y * y, axis=-1, dtype=f32)[:, -1:]
            return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)

    def decode_blocks(self, data):
        return read_half(data[:, :2]) * self.levels[unpack_nibbles(data[:, 2:])]


class Plain(Format):
    """Numbers as they are: f32, f16 or bf16, little-endian."""

    block = 1

    @property
    def dtype(self):
        if self.name.endswith("bf16"):
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype({"f32": "<f4", "f16": "<f2"}[self.name.partition(":")[2]])

    @property
    def block_bytes(self):
        return self.dtype.itemsize

    def nbytes(self, shape):
        return int(np.prod(shape)) * self.block_bytes

    def encode(self, x):
        """The bytes of x (..., T, D); inf and NaN are stored as they are, too."""
        x = as_float_array(x, finite=False)
        self.check_shape(x.shape)
        with np.errstate(over="ignore"):  # f16 of |x| > 65504 is inf, as in ggml
            return x.astype(self.dtype, copy=False).tobytes()

    def decode(self, data, shape):
        x = self.check_bytes(data, shape).view(self.dtype)
        return x.astype(f32).reshape(shape)


# --- tensor types of ggml that are not cache types ------------------------------------
class Mxfp4(BlockFormat):
    """One power of two per 32 numbers, E2M1 codes; nearest, the first of equals.

    e = floor(log2 max|x|) - 2 + 127,  x_hat = 2^(e - 128) * {0, 1, 2, 3, 4, 6, 8, 12}

    log2 is taken in float32, so just below a power of two it may round up to it.
    """

    block, block_bytes = 32, 17
    levels = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], f32)

    def encode_blocks(self, x):
        top = np.abs(x).max(axis=-1, keepdims=True)
        log2 = np.log2(top, out=np.full_like(top, -125), where=top > 0)
        e = np.maximum(np.floor(log2) - 2 + 127, 0).astype(np.uint8)
        y = np.abs(x) / self.scale(e)
        middle = (self.levels[1:8] + self.levels[:7]) / 2
        q = np.searchsorted(middle, y, side="left").astype(np.uint8)
        q |= ((x < 0) & (q > 0)).astype(np.uint8) << 3
        return np.concatenate([e, pack_nibbles(q)], axis=-1)

    def scale(self, e):
        """2^(e - 128), the scale of the doubled levels."""
        return np.ldexp(f32(1), e.astype(np.int32) - 128)

    def decode_blocks(self, data):
        return self.levels[unpack_nibbles(data[:, 1:])] * self.scale(data[:, :1])


class Nvfp4(BlockFormat):
    """Four unsigned E4M3 scales, then E2M1 codes: decode only.

    Number j of each 16 is in the low, j + 8 in the high half of its byte j.
    x_hat = s / 2 * {0, 1, 2, 3, 4, 6, 8, 12}; the scale byte 0x7F means 0.
    """

    block, block_bytes = 64, 36

    def encode_blocks(self, x):
        raise ValueError("ggml:nvfp4 can only be decoded here: no oracle for encoding")

    def decode_blocks(self, data):
        from kvq.codebooks import codebook

        scales = data[:, :4]
        e4m3 = np.nan_to_num(codebook("e4m3", 8).values[:128], nan=480)
        s = np.where(scales == 0x7F, 0, e4m3[scales & 0x7F]) / 2  # the sign is ignored
        codes = unpack_nibbles(data[:, 4:].reshape(-1, 8)).reshape(-1, 4, 16)
        return (Mxfp4.levels[codes] * s[..., None]).reshape(-1, 64)


# --- rotation of the cache ------------------------------------------------------------
def rotation_size(head_dim):
    """Channels that llama.cpp rotates together in K: the largest power of two >= 64
    that divides head_dim. Raises ValueError where it does not rotate."""
    if head_dim < 64 or head_dim % 64:
        raise ValueError(f"head_dim={head_dim}; valid: multiples of 64")
    return head_dim & -head_dim


def rotate(x, size):
    """H applied to each run of `size` channels of x (..., D); its own inverse.

    llama.cpp rotates quantized caches by itself (K by `rotation_size`, V by 64), after
    RoPE and before quantization, and does not record it in state files.
    Raises ValueError for a size that is no power of two or does not divide D.
    """
    x = np.asarray(x, f32)
    if size < 1 or x.shape[-1] % size:
        raise ValueError(f"size={size}; valid: powers of two that divide {x.shape[-1]}")
    return hadamard(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)


# --- the table ------------------------------------------------------------------------
def _facts(bits, scale, zero, rounding, exact, group="32 channels of a token"):
    return Facts(
        bits, group, scale, zero, rounding, "none", exact, "ggml/src/ggml-quants.c"
    )


_EXACT = "bytes equal to the package gguf 0.19"
_F16 = "float16 in the block"


def _int4(levels):
    return Scheme(4, "token", 32, levels)


FORMATS = {
    f.name: f
    for f in (
        *(
            Plain(
                f"ggml:{n}",
                VERSION,
                _facts(bits, "none", "none", "half-even", _EXACT, "none"),
                Scheme(int(bits), levels=levels, group=None),
            )
            for n, bits, levels in (
                ("f32", "32", "float32"),
                ("f16", "16", "float16"),
                ("bf16", "16", "bfloat16"),
            )
        ),
        Q8_0(
            "ggml:q8_0",
            VERSION,
            _facts("8", _F16, "none", "half-away", _EXACT),
            Scheme(8, "token", 32, "symmetric", rounding="half-away"),
        ),
        Q4_0(
            "ggml:q4_0",
            VERSION,
            _facts("4", _F16, "none", "trunc(v + 8.5)", _EXACT),
            _int4("signed-extreme"),
        ),
        Q4_1(
            "ggml:q4_1",
            VERSION,
            _facts("4", _F16, "float16 minimum", "trunc(v + 0.5)", _EXACT),
            _int4("asymmetric"),
        ),
        Q5_0(
            "ggml:q5_0",
            VERSION,
            _facts("5", _F16, "none", "trunc(v + 16.5)", _EXACT),
            Scheme(5, "token", 32, "signed-extreme"),
        ),
        Q5_1(
            "ggml:q5_1",
            VERSION,
            _facts("5", _F16, "float16 minimum", "trunc(v + 0.5)", _EXACT),
            Scheme(5, "token", 32, "asymmetric"),
        ),
        Iq4Nl(
            "ggml:iq4_nl",
            VERSION,
            _facts("4", _F16, "none", "nearest level, ties up", "decode: gguf 0.19"),
            _int4("iq4_nl"),
        ),
        Mxfp4(
            "ggml:mxfp4",
            VERSION,
            _facts("4", "E8M0", "none", "nearest level, ties down", _EXACT),
            Scheme(4, "token", 32, "e2m1", "e8m0"),
        ),
        Nvfp4(
            "ggml:nvfp4",
            VERSION,
            _facts("4", "E4M3", "none", "-", "decode: gguf 0.19", "16 channels"),
        ),
    )
}
