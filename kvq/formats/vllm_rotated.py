r"""vLLM's sides that rotate a vector before they quantize it.

    y = H (signs * x),    H_ij = (-1)^popcount(i & j)

A rotation spreads an outlier channel over all channels; its inverse gives x back.
Decoding here returns x. vLLM rotates the query instead and keeps y.

`Int4PerTokenHead` (vllm/v1/attention/ops/int4_per_token_head.py), TurboQuant
(.../triton_turboquant_store.py, quantization/turboquant/), Octave (.../rocm_octave.py)
and UltraQuant (.../ultraquant/), all of vLLM 0.33.0.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvq.codebooks import codebook, normal_pdf
from kvq.formats.minifloat import e8m0_decode
from kvq.formats.rounding import bucket, f32, trc, trh
from kvq.formats.vllm_slots import Side, from_bytes, to_bytes, to_half
from kvq.packing import pack, unpack


# --- rotations ------------------------------------------------------------------------
def walsh(x):
    """x H for each row of x (..., D) by butterflies in float32, without the 1/sqrt(D).

    Rows stand side by side while it works: one NumPy call then adds one channel to
    another in all of them.
    """
    D = x.shape[-1]
    y = np.array(x.reshape(-1, D).T, f32, order="C")  # (D, n)
    step = 1
    while step < D:
        pairs = y.reshape(D // (2 * step), 2, step, -1)
        a, b = pairs[:, 0], pairs[:, 1]
        total = a + b
        np.subtract(a, b, out=b)
        a[...] = total
        step *= 2
    return np.ascontiguousarray(y.T).reshape(x.shape)


def in_blocks(x, block, transform):
    """`transform` of each run of `block` channels of x (n, D)."""
    return transform(x.reshape(len(x), -1, block)).reshape(x.shape)


def power_of_two_divisor(D):
    """The largest power of two that divides D."""
    return D & -D


def check_multiple(what, D, unit):
    """Raise ValueError unless D is a positive multiple of `unit`."""
    if D < 1 or D % unit:
        raise ValueError(f"{what}: D={D}; valid: multiples of {unit}")


def check_power_of_two(what, D, least):
    """Raise ValueError unless D is a power of two of at least `least`."""
    if least > D or D & (D - 1):
        raise ValueError(f"{what}: D={D}; valid: powers of two from {least}")


# --- int4_per_token_head --------------------------------------------------------------
@lru_cache
def int4_signs(D):
    """+1 where u < 0.5, u the uniforms of mt19937 with seed 0x9E3779B9; float32 (D,).

    The CPU generator of PyTorch keeps 24 of 32 bits: u = (word mod 2^24) / 2^24.
    """
    generator = np.random.RandomState(0x9E3779B9)
    words = generator.randint(0, 2**32, size=D, dtype=np.uint32)
    u = (words & 0xFFFFFF) / 2.0**24
    return np.where(u < 0.5, f32(1), f32(-1))


class Int4PerTokenHead(Side):
    """Rotate, then s = max((max - min) / 15, 1e-6),  zp = trh(-min / s) in 0..15.

        q = trh(y (1/s) + zp) in 0..15        y_hat = (q - zp) s

    zp replaces the four lowest bits of the float32 s: who takes the word for a plain
    scale is off by less than 2^-19 of it, but has lost the zero. zp is clipped to
    0..15, so a rotated vector must straddle 0: numbers of one sign are lost, as when
    the first channel of a block outweighs all others.
    """

    def widths(self, D):
        check_multiple("int4_per_token_head", D, 2)
        return D // 2, 4

    def encode(self, x):
        y = self.rotate(x)
        low, high = y.min(axis=-1, keepdims=True), y.max(axis=-1, keepdims=True)
        s = np.maximum((high - low) / f32(15), f32(1e-6))
        zp = np.clip(trh(-low / s), 0, 15)
        q = np.clip(trh(y * (f32(1) / s) + zp), 0, 15)
        word = s.view(np.uint32) & ~np.uint32(15) | zp.astype(np.uint32)
        return pack(q.astype(np.uint8), 4), to_bytes(word, "<u4")

    def decode(self, codes, scales, D):
        word = np.ascontiguousarray(scales).view("<u4").astype(np.uint32)
        s, zp = (word & ~np.uint32(15)).view(f32), (word & 15).astype(f32)
        y = (unpack(codes, 4, D).astype(f32) - zp) * s
        block = power_of_two_divisor(D)
        return in_blocks(y, block, lambda y: walsh(y) * int4_signs(block) / f32(block))

    def rotate(self, x):
        """y (n, D) float32, rounded to the dtype of x. Raises ValueError on inf."""
        block = power_of_two_divisor(x.shape[-1])
        y = in_blocks(x.astype(f32), block, lambda x: walsh(x * int4_signs(block)))
        dtype = f32 if x.dtype == np.float64 else x.dtype
        with np.errstate(over="ignore"):
            y = y.astype(dtype).astype(f32)
        if not np.isfinite(y).all():
            raise ValueError(
                f"int4_per_token_head: a rotated vector overflows {x.dtype}; "
                f"valid: sums of {block} numbers that fit"
            )
        return y


# --- TurboQuant -----------------------------------------------------------------------
@lru_cache
def turboquant_levels(bits, D):
    """vLLM's levels for N(0, 1/D): Lloyd's two lines, stopped early; float32 (2^bits,).

        c_i = E[x | t_i < x < t_{i+1}],    t_i = (c_{i-1} + c_i) / 2

    The means are trapezoid sums of 200 steps, the outer edges +-10.5 sigma, the start
    even over +-3.5 sigma, at most 200 rounds. (`codebooks.lloyd_max` has converged.)
    """
    sigma = D**-0.5
    n = 2**bits
    edge = 3.5 * sigma
    c = -edge + 2 * edge * (np.arange(n) + 0.5) / n
    for _ in range(200):
        t = np.concatenate([[-3 * edge], (c[:-1] + c[1:]) / 2, [3 * edge]])
        x = np.linspace(t[:-1], t[1:], 201, axis=-1)
        p = normal_pdf(x / sigma)
        mean = np.trapezoid(x * p, x, axis=-1) / np.trapezoid(p, x, axis=-1)
        change, c = np.max(np.abs(mean - c)), mean
        if change < 1e-10:
            break
    return c.astype(f32)


@dataclass(frozen=True)
class TurboKeys(Side):
    """n = |k|,  y = k / (n + 1e-8) H / sqrt(D),  code = nearest level, halfway up.

    The reader rescales the vector of levels c to length n: y_hat = n c / |c|. n is
    stored as float16. TurboQuant (arXiv 2504.19874) without its second stage; the idea
    of rotated levels with a stored norm is that of DRIVE, EDEN and HIGGS.
    """

    bits: int

    def widths(self, D):
        check_power_of_two("turboquant", D, 8)
        return D * self.bits // 8, 2

    def encode(self, x):
        x = x.astype(f32, copy=False)
        n = np.sqrt((x * x).sum(axis=-1, keepdims=True))
        y = walsh(x / (n + f32(1e-8))) * f32(x.shape[-1] ** -0.5)
        c = turboquant_levels(self.bits, x.shape[-1])
        code = bucket(y, (c[:-1] + c[1:]) / 2, ties="up")
        return pack(code, self.bits), to_half(n)

    def decode(self, codes, scales, D):
        c = turboquant_levels(self.bits, D)[unpack(codes, self.bits, D)]
        c = c / np.sqrt((c * c).sum(axis=-1, keepdims=True))
        return walsh(c * from_bytes(scales, "<f2")) * f32(D**-0.5)


@dataclass(frozen=True)
class TurboValues(Side):
    """s = max((max - min) / (2^b - 1), 1e-8),  q = trunc((v - min) / s + 0.5).

    v_hat = q s + min, with s and min stored as float16. Values are not rotated.
    """

    bits: int

    def widths(self, D):
        check_multiple("turboquant", D, 8)
        return D * self.bits // 8, 4

    def encode(self, x):
        x = x.astype(f32, copy=False)
        top = 2**self.bits - 1
        low = x.min(axis=-1, keepdims=True)
        s = np.maximum((x.max(axis=-1, keepdims=True) - low) / f32(top), f32(1e-8))
        q = np.clip(trc((x - low) / s, 0.5), 0, top).astype(np.uint8)
        return pack(q, self.bits), to_half(np.concatenate([s, low], axis=-1))

    def decode(self, codes, scales, D):
        s, low = np.split(from_bytes(scales, "<f2"), 2, axis=-1)
        return unpack(codes, self.bits, D).astype(f32) * s + low


# --- Octave ---------------------------------------------------------------------------
OCTAVE_LEVELS = {
    3: np.array([-127, -79, -45, -14, 14, 45, 79, 127], f32),
    4: np.array(
        [-126, -95, -74, -58, -43, -30, -18, -6, 6, 18, 30, 43, 58, 74, 95, 126], f32
    ),
}
# What a vector of RMS 1 is multiplied by, to fit the levels.
OCTAVE_GAIN = {3: f32(59), 4: f32(46)}
# Bit i: channel i changes its sign. (`torch.randint(0, 2)`, generator seed 0x5E17)
OCTAVE_SIGN_BITS = 0x74AFC7211E0AC1A1B5CABDC3F687E13268C675E641D23DB19E0D463582C270EB


@lru_cache
def octave_signs(D):
    """The signs of D channels, at most 256: float32 (D,)."""
    if D > 256:
        raise ValueError(f"octave: D={D}; valid: up to 256")
    bits = OCTAVE_SIGN_BITS >> np.arange(D).astype(object) & 1
    return 1 - 2 * bits.astype(f32)


def octave_rotate(x, block):
    """y = (x * signs) H / sqrt(block) of each block of channels of x (n, D)."""
    x = x.astype(f32) * octave_signs(x.shape[-1])
    return in_blocks(x, block, walsh) / f32(block**0.5)


def octave_unrotate(y, block):
    """The inverse of `octave_rotate`."""
    x = in_blocks(y, block, walsh) / f32(block**0.5)
    return x * octave_signs(y.shape[-1])


def octave_quantize(y, bits):
    """Codes and scales of groups y (..., m): the nearest level, halfway down.

        code = nearest level to gain y / rms,    s = 64 sum y^2 / sum(y level(code))
        y_hat = level(code) s / 64

    So y . y_hat = |y|^2: the projection on y is kept, the squared error is not the
    smallest. s is 0 where the lower sum is not positive. Returns uint8 (..., m) and
    float32 (..., 1).
    """
    squares = (y * y).sum(axis=-1, keepdims=True)
    rms = np.maximum(np.sqrt(squares / f32(y.shape[-1])), f32(1e-12))
    levels = OCTAVE_LEVELS[bits]
    middle = (levels[1:] + levels[:-1]) / 2
    code = bucket(y / rms * OCTAVE_GAIN[bits], middle, ties="down")
    dot = (y * levels[code]).sum(axis=-1, keepdims=True)
    s = f32(64) * np.divide(squares, dot, out=np.zeros_like(dot), where=dot > 0)
    return code, s


def octave_pack(codes, bits):
    """Codes (n, m) -> bytes (n, m bits / 8).

    4 bits: of eight numbers, byte j has number j low and number j + 4 high.
    3 bits: a plane of the low two bits, then one of the high bits. Byte k of a word of
    four has the numbers k, k + 4, k + 8, ... from its low bits up.
    """
    n, m = codes.shape
    if bits == 4:
        words = codes.reshape(n, m // 8, 2, 4)
        return (words[:, :, 0] | words[:, :, 1] << 4).reshape(n, m // 2)
    a, b, c, d = np.moveaxis(codes.reshape(n, m // 16, 4, 4) & 3, 2, 0)
    low = a | b << 2 | c << 4 | d << 6
    high = codes.reshape(n, m // 32, 8, 4) >> 2
    high = np.packbits(high, axis=2, bitorder="little")
    return np.concatenate([low.reshape(n, m // 4), high.reshape(n, m // 8)], axis=-1)


def octave_unpack(data, bits, m):
    """Bytes -> codes (n, m): the inverse of `octave_pack`."""
    n = len(data)
    if bits == 4:
        words = data.reshape(n, m // 8, 1, 4)
        return np.concatenate([words & 15, words >> 4], axis=2).reshape(n, m)
    shifts = np.uint8([0, 2, 4, 6])[:, None]
    low = data[:, : m // 4].reshape(n, m // 16, 1, 4) >> shifts & 3
    high = data[:, m // 4 :].reshape(n, m // 32, 1, 4)
    high = np.unpackbits(high, axis=2, bitorder="little")
    return low.reshape(n, m) | high.reshape(n, m) << 2


def octave_encode(y, bits, group):
    """Rotated y (n, m) -> packed codes and float16 scales, one per `group` channels."""
    n, m = y.shape
    codes, s = octave_quantize(y.reshape(n, m // group, group), bits)
    return octave_pack(codes.reshape(n, m), bits), to_half(s.reshape(n, m // group))


def octave_decode(codes, scales, bits, m, group):
    """The rotated y_hat (n, m): the inverse of `octave_encode`."""
    level = OCTAVE_LEVELS[bits][octave_unpack(codes, bits, m)]
    return level * np.repeat(from_bytes(scales, "<f2"), group, axis=-1) / f32(64)


@dataclass(frozen=True)
class OctaveKeys(Side):
    """Blocks of 64 channels, a scale each: 4 bits in the first `rope_dim`, then 3."""

    rope_dim: int

    def widths(self, D):
        check_multiple("octave", D, 64)
        if self.rope_dim % 64 or not 0 <= self.rope_dim <= D:
            raise ValueError(
                f"octave: rope_dim={self.rope_dim}; valid: multiples of 64 up to {D}"
            )
        return self.rope_dim // 2 + (D - self.rope_dim) * 3 // 8, 2 * D // 64

    def encode(self, x):
        y = octave_rotate(x, 64)
        rope = octave_encode(y[:, : self.rope_dim], 4, 64)
        rest = octave_encode(y[:, self.rope_dim :], 3, 64)
        return tuple(
            np.concatenate(pair, axis=-1) for pair in zip(rope, rest, strict=True)
        )

    def decode(self, codes, scales, D):
        r = self.rope_dim
        rope = octave_decode(codes[:, : r // 2], scales[:, : r // 32], 4, r, 64)
        rest = octave_decode(codes[:, r // 2 :], scales[:, r // 32 :], 3, D - r, 64)
        return octave_unrotate(np.concatenate([rope, rest], axis=-1), 64)


@dataclass(frozen=True)
class OctaveVector(Side):
    """One scale for all channels; rotated at once, or by 64 if D is no power of two.

    The values of every Octave format, and the keys of the compact one.
    """

    bits: int
    blocks: bool = True

    def widths(self, D):
        check_multiple("octave", D, 64)
        self.block(D)
        return D * self.bits // 8, 2

    def block(self, D):
        """Channels that are rotated together. Raises ValueError."""
        if self.blocks and D & (D - 1):
            return 64
        if D not in (64, 128, 256):
            raise ValueError(f"octave: D={D}; valid: 64, 128, 256")
        return D

    def encode(self, x):
        D = x.shape[-1]
        return octave_encode(octave_rotate(x, self.block(D)), self.bits, D)

    def decode(self, codes, scales, D):
        y = octave_decode(codes, scales, self.bits, D, D)
        return octave_unrotate(y, self.block(D))


# --- UltraQuant -----------------------------------------------------------------------
@dataclass(frozen=True)
class UltraQuant(Side):
    """Per 32 channels s = 2^floor(log2(0.156 max|y|) + 0.5),  y_hat = s e2m1(code).

    The nearest of the fifteen E2M1 values to y / s, halfway down; there is no -0. Keys
    are rotated by H / sqrt(D), values are not. Scale byte 0 is a group of zeros.
    """

    rotated: bool
    group = 32

    def widths(self, D):
        check_multiple("ultraquant", D, self.group)
        if self.rotated:
            check_power_of_two("ultraquant", D, self.group)
        return D // 2, D // self.group

    def encode(self, x):
        n, D = x.shape
        y = x.astype(f32, copy=False)
        if self.rotated:
            y = walsh(y) * f32(D**-0.5)
        y = y.reshape(n, D // self.group, self.group)
        e = self.exponents(np.abs(y).max(axis=-1))
        order = codebook("e2m1", 4).order  # codes by increasing value, without -0
        values = codebook("e2m1", 4).values[order]
        s = e8m0_decode(np.maximum(e, 1))[..., None]
        code = order[bucket(y / s, (values[1:] + values[:-1]) / 2, ties="down")]
        return pack(code.reshape(n, D), 4), e

    def exponents(self, absmax):
        """The scale bytes, 0 where absmax is 0."""
        with np.errstate(divide="ignore"):
            e = np.floor(np.log2(f32(0.156) * absmax) + f32(0.5))
        return np.where(absmax > 0, np.clip(e, -126, 127) + 127, 0).astype(np.uint8)

    def decode(self, codes, scales, D):
        s = np.where(scales > 0, e8m0_decode(scales), f32(0))
        values = codebook("e2m1", 4).values[unpack(codes, 4, D)]
        y = values * np.repeat(s, self.group, axis=-1)
        return walsh(y) * f32(D**-0.5) if self.rotated else y
