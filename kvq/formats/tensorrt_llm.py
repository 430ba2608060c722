"""TensorRT-LLM's INT8, FP8 and NVFP4 caches, and the pools their blocks lie in.

    q = conv(x (1/s)),    x_hat = q s

s is `kv_cache_scaling_factor`, one float32 per layer and not stored in the cache; the
entries of `FORMATS` have 1. Keys are stored after RoPE. K and V are separate blocks of
a pool, [num_kv_heads, tokens_per_block, head_dim] each; NVFP4 block scales have a pool
of their own, with those of V swizzled as in vLLM.

INT8 is reached through engines and checkpoints only; there is no INT4 cache.

Source: cpp/tensorrt_llm/kernels/ (kvCacheUtils.h, quantization.cuh and
unfusedAttentionKernels_2_template.h), docs/source/advanced/gpt-attention.md.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from kvq.formats.base import Facts, Format
from kvq.formats.minifloat import (
    E4M3,
    check_scale,
    chunks,
    nvfp4_decode,
    nvfp4_encode,
    swizzle_scales,
    unswizzle_scales,
)
from kvq.formats.rounding import f32, rne
from kvq.scheme import Scheme

VERSION = "TensorRT-LLM main, 2026"


# --- formats --------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ByteFormat(Format):
    """One byte per number and one scale for all: s is `scale`, float32.

    Subclasses give `to_codes` and `to_numbers`, float32 -> uint8 and back.
    """

    scale: np.float32

    def nbytes(self, shape):
        return int(np.prod(shape))

    def encode(self, x):
        x = self.check(x).ravel()
        codes = np.empty(x.shape, np.uint8)
        with np.errstate(over="ignore"):  # beyond float32: saturates
            for n in chunks(len(x), 1):
                y = x[n].astype(f32, copy=False) * (f32(1) / self.scale)
                codes[n] = self.to_codes(y)
        return codes.tobytes()

    def decode(self, data, shape):
        return (
            self.to_numbers(self.check_bytes(data, shape).reshape(shape)) * self.scale
        )

    @abstractmethod
    def to_codes(self, y): ...

    @abstractmethod
    def to_numbers(self, codes): ...


class Int8(ByteFormat):
    """q = x (1/s), rounded half to even, saturating at -128 and 127."""

    def to_codes(self, y):
        return np.clip(rne(y), -128, 127).astype(np.int8).view(np.uint8)

    def to_numbers(self, codes):
        return codes.view(np.int8).astype(f32)


class Fp8(ByteFormat):
    """code = e4m3(x (1/s)), saturating at 448.

    Some vectorized casts of the GPU pass through bfloat16: rarely, a code differs.
    """

    def to_codes(self, y):
        return E4M3.encode(y)

    def to_numbers(self, codes):
        return E4M3.decode(codes)


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Format):
    """Codes, then E4M3 block scales, both in the order of the tensor.

    In memory the two are different pools; `swizzled` is the order of V's scales, in
    groups of four tokens.
    """

    scale: np.float32
    swizzled: bool = False

    def nbytes(self, shape):
        if shape[-1] % 16:
            raise ValueError(
                f"{self.name}: rows of {shape[-1]} numbers; valid: multiples of 16"
            )
        n = int(np.prod(shape))
        return n // 2 + n // 16

    def encode(self, x):
        x = self.check(x)
        self.nbytes(x.shape)
        codes, S = nvfp4_encode(x, self.scale)
        S = swizzle_scales(S) if self.swizzled else S
        return codes.tobytes() + S.tobytes()

    def decode(self, data, shape):
        data = self.check_bytes(data, shape)
        *lead, D = shape
        codes, S = np.split(data, [int(np.prod(shape)) // 2])
        S = S.reshape(*lead, D // 16)
        S = unswizzle_scales(S) if self.swizzled else S
        return nvfp4_decode(codes.reshape(*lead, D // 2), S, self.scale)


# --- blocks of a pool -----------------------------------------------------------------
def check_tokens_per_block(tokens_per_block):
    """Raise ValueError unless it is a power of two above 1."""
    n = tokens_per_block
    if type(n) is not int or n < 2 or n & (n - 1):
        raise ValueError(f"tokens_per_block={n!r}; valid: powers of two from 2")


def to_blocks(x, tokens_per_block):
    """x (H, T, C), any dtype -> pool blocks (B, H, tokens_per_block, C), zeros last."""
    check_tokens_per_block(tokens_per_block)
    H, T, C = x.shape
    x = np.pad(x, [(0, 0), (0, -T % tokens_per_block), (0, 0)])
    return np.ascontiguousarray(x.reshape(H, -1, tokens_per_block, C).swapaxes(0, 1))


def element_offset(head, token, channel, tokens_per_block, head_dim):
    """Place of a number in its block, int64: head T D + (token mod T) D + channel."""
    check_tokens_per_block(tokens_per_block)
    slot = np.asarray(token, np.int64) & (tokens_per_block - 1)
    row = np.asarray(head, np.int64) * tokens_per_block + slot
    return row * head_dim + channel


def block_offsets(sequences, beams=1):
    """The table [batch, beams, 2, blocks]: which pool block holds K (0) and V (1).

    sequences : per sequence, (K blocks, V blocks): two lists of the same length, the
    same for all beams. Short ones are filled with -1. Returns int32. Raises ValueError.
    """
    longest = max(len(k) for k, _ in sequences)
    table = np.full((len(sequences), beams, 2, longest), -1, np.int32)
    for i, (k, v) in enumerate(sequences):
        if len(k) != len(v):
            raise ValueError(f"sequence {i}: {len(k)} blocks of K, {len(v)} of V")
        table[i, :, 0, : len(k)] = k
        table[i, :, 1, : len(v)] = v
    return table


def gather(pool, table, sequence, side, tokens, beam=0):
    """One sequence's K (side=0) or V (side=1): (H, tokens, C) of pool (B, H, N, C).

    Raises ValueError if the table has no block for some of the tokens.
    """
    _, H, N, C = pool.shape
    rows = table[sequence, beam, side, : -(-tokens // N)].astype(np.int64)
    if len(rows) * N < tokens or (rows < 0).any() or (rows >= len(pool)).any():
        raise ValueError(f"tokens={tokens}; the table has no block for all of them")
    return pool[rows].swapaxes(0, 1).reshape(H, -1, C)[:, :tokens]


def cyclic_index(token, window, sinks=0, tokens_per_block=32):
    """The place of a token in a cache that keeps `sinks` + the newest tokens.

        i < sinks: i        else: sinks + bubble + (i - sinks) mod (window - sinks)

    The bubble of unused places fills the last block of the sinks. Raises ValueError
    unless 0 <= sinks < window.
    """
    check_tokens_per_block(tokens_per_block)
    if not 0 <= sinks < window:
        raise ValueError(f"sinks={sinks}, window={window}; valid: 0 <= sinks < window")
    i = np.asarray(token, np.int64)
    bubble = -sinks % tokens_per_block
    return np.where(i < sinks, i, sinks + bubble + (i - sinks) % (window - sinks))


# --- the table ------------------------------------------------------------------------
def _facts(bits, group, scale, rounding, exact):
    return Facts(
        bits,
        group,
        scale,
        "none",
        rounding,
        "none",
        exact,
        "cpp/tensorrt_llm/kernels/",
    )


def int8(scale):
    """INT8 with the scale of a layer. Raises ValueError for an impossible scale."""
    facts = _facts(
        "8",
        "a layer's K, or V",
        "float32 beside the cache",
        "half-even, saturating",
        "decode exact; encode exact",
    )
    return Int8("tensorrt_llm:int8", VERSION, facts, scale=check_scale("scale", scale))


def fp8(scale):
    """FP8 E4M3 with the scale of a layer. Raises ValueError as `int8`."""
    facts = _facts(
        "8",
        "a layer's K, or V",
        "float32 beside the cache",
        "half-even, saturating",
        "decode exact; encode exact but for casts through bfloat16",
    )
    return Fp8("tensorrt_llm:fp8", VERSION, facts, scale=check_scale("scale", scale))


def nvfp4(scale, swizzled=False):
    """NVFP4 with the scale of a layer; swizzled for V. Raises ValueError as `int8`."""
    facts = _facts(
        "4",
        "16 channels of a (token, head)",
        "E4M3, V swizzled; float32 beside the cache",
        "half-even, saturating",
        "decode exact; encode up to reciprocal ties",
    )
    return Nvfp4(
        "tensorrt_llm:nvfp4",
        VERSION,
        facts,
        Scheme(4, "token", 16, "e2m1", "float8_e4m3fn"),
        scale=check_scale("scale", scale),
        swizzled=swizzled,
    )


FORMATS = {f.name: f for f in (int8(scale=1), fp8(scale=1), nvfp4(scale=1))}
