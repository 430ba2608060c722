"""vLLM's `--kv-cache-dtype` formats, and its NVFP4 pages and MLA records.

A vLLM cache is paged: what `encode` gives are slots in the order of the tokens;
`vllm_blocks` puts them into blocks. Keys are stored after RoPE, and there is no window
of full precision. Scales of fp8 and nvfp4 are numbers of the checkpoint, given here:
the entries of `FORMATS` have 1, which is what vLLM takes where a checkpoint has none.

Decoding is exact. Encoding repeats vLLM's float32 arithmetic; the GPU kernels take
approximate reciprocals (an exact tie can move by a code) and int4_per_token_head and
turboquant rotate in bfloat16 there.
"""

from dataclasses import dataclass, field

import numpy as np

from kvq.formats.base import Facts, Format
from kvq.formats.minifloat import (
    E2M1,
    E4M3,
    MINIFLOATS,
    check_scale,
    e8m0_decode,
    nvfp4_decode,
    nvfp4_encode,
    swizzle_scales,
    unswizzle_scales,
)
from kvq.formats.rounding import f32
from kvq.formats.vllm_rotated import (
    Int4PerTokenHead,
    OctaveKeys,
    OctaveVector,
    TurboKeys,
    TurboValues,
    UltraQuant,
)
from kvq.formats.vllm_slots import (
    Fp8,
    Fp8PerTokenHead,
    Int8PerTokenHead,
    SlotFormat,
    check_bytes,
    check_pair,
    from_bytes,
)
from kvq.packing import unpack
from kvq.scheme import Policy, Scheme

VERSION = "vLLM 0.33.0"


# --- NVFP4: pages, because V scales of four tokens are interleaved --------------------
@dataclass(frozen=True)
class Nvfp4Pages:
    """nvfp4 and nvfp4_4over6: page = K codes | K scales | V codes | V scales.

    Within each part heads come first, then tokens (vLLM's HND). K scales are in order,
    V scales swizzled (`minifloat.swizzle_scales`) for each head. Same methods as
    `SlotFormat`, for k and v of shape (H, T, D); the last page is filled with zeros.
    """

    name: str
    version: str
    facts: Facts = field(repr=False)
    k_scale: np.float32
    v_scale: np.float32
    four_over_six: bool = False
    block_size: int = 16
    policy: Policy | None = None

    def page_bytes(self, H, D, value_dim=None):
        """Bytes of a page of `block_size` tokens. Raises ValueError."""
        dims = D, value_dim or D
        for n in dims:
            if n % 16:
                raise ValueError(f"{self.name}: D={n}; valid: multiples of 16")
        return H * self.block_size * sum(n // 2 + n // 16 for n in dims)

    def nbytes(self, shape, value_dim=None):
        """Bytes of encoded K and V, K of `shape` (H, T, D)."""
        H, T, D = shape
        return -(-T // self.block_size) * self.page_bytes(H, D, value_dim)

    def bits_per_element(self, shape, value_dim=None):
        """Stored bits per number of K and V, everything counted."""
        numbers = np.prod(shape[:-1]) * (shape[-1] + (value_dim or shape[-1]))
        return 8 * self.nbytes(shape, value_dim) / numbers

    def encode(self, k, v):
        """The bytes of k (H, T, D) and v (H, T, D_v), page after page.

        Raises TypeError or ValueError for numbers or shapes the format cannot hold.
        """
        k, v = check_pair(self.name, k, v)
        self._check_block(k.shape)
        self.page_bytes(k.shape[0], k.shape[-1], v.shape[-1])
        parts = []
        for x, scale, is_value in ((k, self.k_scale, False), (v, self.v_scale, True)):
            codes, S = nvfp4_encode(self._pages(x), scale, self.four_over_six)
            parts += [codes, swizzle_scales(S) if is_value else S]
        pages = [part.reshape(len(part), -1) for part in parts]
        return np.concatenate(pages, axis=-1).tobytes()

    def decode(self, data, shape, value_dim=None):
        """(k, v): the float32 tensors, k of `shape` (H, T, D).

        Raises ValueError if the number of bytes does not fit the shape.
        """
        self._check_block(shape)
        H, T, D = shape
        pages = check_bytes(self, data, shape, value_dim)
        pages = pages.reshape(-1, self.page_bytes(H, D, value_dim))
        tensors = []
        for n, scale in ((D, self.k_scale), (value_dim or D, self.v_scale)):
            codes, S, pages = self._split(pages, H, n)
            S = unswizzle_scales(S) if tensors else S
            x = nvfp4_decode(codes, S, scale)
            tensors.append(x.swapaxes(0, 1).reshape(H, -1, n)[:, :T])
        return tuple(tensors)

    def _check_block(self, shape):
        if len(shape) != 3:
            raise ValueError(f"{self.name}: shape {tuple(shape)}; expected (H, T, D)")
        if self.block_size < 4 or self.block_size % 4:
            raise ValueError(f"block_size={self.block_size}; valid: multiples of 4")

    def _pages(self, x):
        """x (H, T, D) -> (pages, H, block_size, D), zeros after the last token."""
        H, T, D = x.shape
        x = np.pad(x, [(0, 0), (0, -T % self.block_size), (0, 0)])
        return x.reshape(H, -1, self.block_size, D).swapaxes(0, 1)

    def _split(self, pages, H, n):
        """Codes (pages, H, N, n/2), scales (pages, H, N, n/16), and what follows."""
        N = self.block_size
        ends = np.cumsum([H * N * n // 2, H * N * n // 16])
        codes, S, rest = np.split(pages, ends, axis=-1)
        return codes.reshape(-1, H, N, n // 2), S.reshape(-1, H, N, n // 16), rest


# --- MLA: one record per token, for all heads -----------------------------------------
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

    def encode(self, x):
        raise ValueError(f"{self.name} can only be decoded here")

    def decode(self, data, shape):
        records = self.check_bytes(data, shape).reshape(-1, self.record_bytes)
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


# --- the table ------------------------------------------------------------------------
_OPS = "vllm/v1/attention/ops/"
_EXACT = "decode exact; encode up to reciprocal ties"
_ROTATED = "decode exact; encode as the float32 path (GPU: bfloat16 rotation)"


def _facts(bits, group, scale, zero, rounding, exact, source):
    return Facts(bits, group, scale, zero, rounding, "none", exact, source)


def _slot(name, facts, key, value=None, **options):
    return SlotFormat(f"vllm:{name}", VERSION, facts, key, value or key, **options)


def _both(scheme):
    return Policy(scheme, scheme)


def fp8(kind, k_scale, v_scale):
    """fp8_e4m3 or fp8_e5m2 (kind "e4m3", "e5m2") with the scales of a layer.

    vLLM takes scales of 1 with fp8_e5m2. `fp8` is another name of fp8_e4m3.
    Raises ValueError for another kind or an impossible scale.
    """
    if kind not in ("e4m3", "e5m2"):
        raise ValueError(f"kind={kind!r}; valid: e4m3, e5m2")
    facts = _facts(
        "8",
        "a layer's K, or V",
        "float32 beside the cache",
        "none",
        "half-even, saturating",
        "decode exact; encode exact",
        "csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh",
    )
    sides = (
        Fp8(MINIFLOATS[kind], check_scale(name, scale))
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    )
    return _slot(f"fp8_{kind}", facts, *sides)


def nvfp4(k_scale, v_scale, four_over_six=False, block_size=16):
    """nvfp4 or nvfp4_4over6 with the scales of a layer. Raises ValueError."""
    facts = _facts(
        "4",
        "16 channels of a (token, head)",
        "E4M3, V swizzled; float32 beside the cache",
        "none",
        "half-even, saturating",
        _EXACT,
        "csrc/nvfp4_kv_cache_kernels.cu",
    )
    return Nvfp4Pages(
        "vllm:nvfp4_4over6" if four_over_six else "vllm:nvfp4",
        VERSION,
        facts,
        check_scale("k_scale", k_scale),
        check_scale("v_scale", v_scale),
        four_over_six,
        block_size,
    )


def octave(name, rope_dim=64):
    """octave_k3v4, octave_k3v3 or octave_k3v3_compact; rope_dim has no part in the last.

    Raises ValueError for another name.
    """
    if name not in _OCTAVE:
        raise ValueError(f"name={name!r}; valid: {', '.join(_OCTAVE)}")
    bits, compact = _OCTAVE[name]
    key = OctaveVector(3, any_multiple=False) if compact else OctaveKeys(rope_dim)
    facts = _facts(
        f"K {'3' if compact else '4 in the RoPE channels, else 3'}; V {bits}",
        "all channels" if compact else "K 64 channels; V all channels",
        "float16 at the end of the slot",
        "none",
        "nearest level, ties down",
        _EXACT,
        _OPS + "rocm_octave.py",
    )
    align = 4 if compact else 8
    value = OctaveVector(bits)
    return _slot(name, facts, key, value, align=align, scales_last=True)


_OCTAVE = {
    "octave_k3v4": (4, False),
    "octave_k3v3": (3, False),
    "octave_k3v3_compact": (3, True),
}


def _turboquant(name, key_bits, value_bits):
    key = Fp8(E4M3, f32(1)) if key_bits == 8 else TurboKeys(key_bits)
    keys = "K none" if key_bits == 8 else "K float16 norm"
    facts = _facts(
        f"K {key_bits}; V {value_bits}",
        "D channels of a (token, head)",
        f"{keys}; V float16",
        "V float16 minimum",
        "K half-even; V trunc(v + 0.5)"
        if key_bits == 8
        else "K nearest level, ties up; V trunc(v + 0.5)",
        _ROTATED,
        _OPS + "triton_turboquant_store.py",
    )
    return _slot(f"turboquant_{name}", facts, key, TurboValues(value_bits), align=2)


_TOKEN_HEAD = "D channels of a (token, head)"
_PER_TOKEN = _OPS + "triton_reshape_and_cache_flash.py"


def _mla(cls, name, bits, group, scale):
    facts = _facts(
        bits, group, scale, "none", "-", "decode exact", "vLLM 0.33.0, MLA cache"
    )
    return cls(f"vllm:{name}", VERSION, facts)


FORMATS = {
    f.name: f
    for f in (
        fp8("e4m3", k_scale=1, v_scale=1),
        fp8("e5m2", k_scale=1, v_scale=1),
        _slot(
            "int8_per_token_head",
            _facts(
                "8",
                _TOKEN_HEAD,
                "float32 in the slot",
                "none",
                "half-away",
                _EXACT,
                _PER_TOKEN,
            ),
            Int8PerTokenHead(),
            policy=_both(
                Scheme(8, "token", None, "symmetric", "float32", rounding="half-away")
            ),
        ),
        _slot(
            "fp8_per_token_head",
            _facts(
                "8",
                _TOKEN_HEAD,
                "float32 in the slot",
                "none",
                "half-even",
                _EXACT,
                _PER_TOKEN,
            ),
            Fp8PerTokenHead(),
            policy=_both(Scheme(8, "token", None, "e4m3", "float32")),
        ),
        _slot(
            "int4_per_token_head",
            _facts(
                "4",
                _TOKEN_HEAD,
                "float32 in the slot",
                "0..15 in the low 4 bits of the scale",
                "half-away",
                _ROTATED,
                _OPS + "int4_per_token_head.py",
            ),
            Int4PerTokenHead(),
        ),
        _turboquant("k8v4", 8, 4),
        _turboquant("4bit_nc", 4, 4),
        _turboquant("k3v4_nc", 3, 4),
        _turboquant("3bit_nc", 3, 3),
        *(octave(name) for name in _OCTAVE),
        _slot(
            "ultraquant_4bit",
            _facts(
                "4",
                "32 channels of a (token, head)",
                "E8M0 from 0.156 max",
                "none",
                "nearest level, ties down",
                _EXACT,
                _OPS + "ultraquant/",
            ),
            UltraQuant(rotated=True),
            UltraQuant(rotated=False),
        ),
        nvfp4(k_scale=1, v_scale=1),
        nvfp4(k_scale=1, v_scale=1, four_over_six=True),
        _mla(Fp8DsMla, "fp8_ds_mla", "8", "128 channels", "float32"),
        _mla(Fp8DsMlaV4, "fp8_ds_mla_v4", "8", "64 channels", "E8M0"),
        _mla(Fp8DsMlaV41, "fp8_ds_mla_v4.1", "8", "32 channels", "E8M0"),
        _mla(Nvfp4DsMla, "nvfp4_ds_mla", "4", "16 channels", "E4M3"),
    )
}
