"""vLLM's `--kv-cache-dtype` formats.

A vLLM cache is paged. What `encode` gives are the slots of `vllm_slots` in the order
of the tokens (for nvfp4: the pages of `vllm_nvfp4`); `vllm_blocks` puts slots into
blocks. Keys are stored after RoPE, and no token is kept in full precision. (On dense
models TurboQuant leaves the two first and the two last layers as they are.)

The scales of fp8 and nvfp4 are numbers of the checkpoint, given to `fp8` and `nvfp4`.
The entries of `FORMATS` have 1, which vLLM takes where a checkpoint has none.

Decoding is exact. Encoding repeats vLLM's float32 arithmetic. Its GPU kernels take
approximate reciprocals (an exact tie can move by a code), and rotate in bfloat16 in
int4_per_token_head and turboquant.
"""

from kvq.formats.base import Facts
from kvq.formats.minifloat import E4M3, MINIFLOATS, check_scale
from kvq.formats.rounding import f32
from kvq.formats.vllm_mla import Fp8DsMla, Fp8DsMlaV4, Fp8DsMlaV41, Nvfp4DsMla
from kvq.formats.vllm_nvfp4 import Nvfp4Pages
from kvq.formats.vllm_rotated import (
    Int4PerTokenHead,
    OctaveKeys,
    OctaveVector,
    TurboKeys,
    TurboValues,
    UltraQuant,
)
from kvq.formats.vllm_slots import Fp8, Fp8PerTokenHead, Int8PerTokenHead, SlotFormat
from kvq.scheme import Policy, Scheme

VERSION = "vLLM 0.33.0"

# Words of the table.
LAYER = "a layer's K, or V"
TOKEN_HEAD = "D channels of a (token, head)"
EXACT = "decode exact; encode up to reciprocal ties"
ROTATED = "decode exact; encode as the float32 path"
HALF_AWAY = "trunc(v + 0.5 sign(v))"
OPS = "vllm/v1/attention/ops/"


def _facts(bits, group, scale, rounding, exact, source, zero="none", window="none"):
    return Facts(bits, group, scale, zero, rounding, window, exact, source)


def _slots(name, facts, key, value, **options):
    return SlotFormat(f"vllm:{name}", VERSION, facts, key=key, value=value, **options)


def _both(scheme):
    return Policy(scheme, scheme)


# --- formats with numbers of the checkpoint, or of the model --------------------------
def fp8(kind, k_scale, v_scale):
    """fp8_e4m3 or fp8_e5m2 (kind "e4m3", "e5m2") with the scales of a layer.

    vLLM takes scales of 1 with fp8_e5m2. "fp8" is another name of fp8_e4m3.
    Raises ValueError for another kind or an impossible scale.
    """
    if kind not in ("e4m3", "e5m2"):
        raise ValueError(f"kind={kind!r}; valid: e4m3, e5m2")
    facts = _facts(
        bits="8",
        group=LAYER,
        scale="float32 beside the cache",
        rounding="half-even, saturating",
        exact="decode exact; encode exact",
        source="csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh",
    )
    key = Fp8(MINIFLOATS[kind], check_scale("k_scale", k_scale))
    value = Fp8(MINIFLOATS[kind], check_scale("v_scale", v_scale))
    return _slots(f"fp8_{kind}", facts, key, value)


def nvfp4(k_scale, v_scale, four_over_six=False, block_size=16):
    """nvfp4 or nvfp4_4over6 with the scales of a layer. Raises ValueError."""
    if type(block_size) is not int or block_size < 4 or block_size % 4:
        raise ValueError(f"block_size={block_size!r}; valid: multiples of 4")
    facts = _facts(
        bits="4",
        group="16 channels of a (token, head)",
        scale="E4M3, V swizzled; float32 beside the cache",
        rounding="half-even, saturating",
        exact=EXACT,
        source="csrc/nvfp4_kv_cache_kernels.cu",
    )
    return Nvfp4Pages(
        "vllm:nvfp4_4over6" if four_over_six else "vllm:nvfp4",
        VERSION,
        facts,
        _both(Scheme(4, "token", 16, "e2m1", "float8_e4m3fn")),
        k_scale=check_scale("k_scale", k_scale),
        v_scale=check_scale("v_scale", v_scale),
        four_over_six=four_over_six,
        block_size=block_size,
    )


def octave(name, rope_dim=64):
    """octave_k3v4, octave_k3v3 or octave_k3v3_compact.

    rope_dim : leading channels of K with 4 bits; the compact format has none.
    Raises ValueError for another name.
    """
    if name not in _OCTAVE:
        raise ValueError(f"name={name!r}; valid: {', '.join(_OCTAVE)}")
    key_bits, key_group, align, value_bits = _OCTAVE[name]
    facts = _facts(
        bits=f"K {key_bits}; V {value_bits}",
        group=f"{key_group}; V all channels",
        scale="float16 at the end of the slot",
        rounding="nearest level, ties down",
        exact=EXACT,
        source=OPS + "rocm_octave.py",
    )
    compact = name == "octave_k3v3_compact"
    key = OctaveVector(3, blocks=False) if compact else OctaveKeys(rope_dim)
    value = OctaveVector(value_bits)
    return _slots(name, facts, key, value, align=align, scales_last=True)


# name -> (bits of K, group of K, alignment of a slot, bits of V)
_OCTAVE = {
    "octave_k3v4": ("4 in RoPE channels, else 3", "K 64 channels", 8, 4),
    "octave_k3v3": ("4 in RoPE channels, else 3", "K 64 channels", 8, 3),
    "octave_k3v3_compact": ("3", "K all channels", 4, 3),
}


# --- formats without a choice ---------------------------------------------------------
def _per_token_head(name, side, rounding, scheme):
    facts = _facts(
        bits="8",
        group=TOKEN_HEAD,
        scale="float32 in the slot",
        rounding=rounding,
        exact=EXACT,
        source=OPS + "triton_reshape_and_cache_flash.py",
    )
    return _slots(name, facts, side, side, policy=_both(scheme))


def _int4_per_token_head():
    facts = _facts(
        bits="4",
        group=TOKEN_HEAD,
        scale="float32 in the slot",
        zero="0..15 in the low 4 bits of the scale",
        rounding=HALF_AWAY,
        exact=ROTATED,
        source=OPS + "int4_per_token_head.py",
    )
    side = Int4PerTokenHead()
    return _slots("int4_per_token_head", facts, side, side)


def _turboquant(name, key_bits, value_bits):
    raw = key_bits == 8
    facts = _facts(
        bits=f"K {key_bits}; V {value_bits}",
        group=TOKEN_HEAD,
        scale=f"K {'none' if raw else 'float16 norm'}; V float16",
        zero="V float16 minimum",
        rounding=f"K {'half-even' if raw else 'nearest level, ties up'}; "
        "V trunc(v + 0.5)",
        window="two first, two last layers",
        exact=ROTATED,
        source=OPS + "triton_turboquant_store.py",
    )
    key = Fp8(E4M3, f32(1)) if raw else TurboKeys(key_bits)
    return _slots(f"turboquant_{name}", facts, key, TurboValues(value_bits), align=2)


def _ultraquant():
    facts = _facts(
        bits="4",
        group="32 channels of a (token, head)",
        scale="E8M0 of 0.156 max, nearest",
        rounding="nearest level, ties down",
        exact=EXACT,
        source=OPS + "ultraquant/",
    )
    key, value = UltraQuant(rotated=True), UltraQuant(rotated=False)
    return _slots("ultraquant_4bit", facts, key, value)


def _mla(cls, name, bits, group, scale):
    facts = _facts(
        bits=bits,
        group=group,
        scale=f"{scale} in the record",
        rounding="-",
        exact="decode exact",
        source="vllm/v1/attention/backends/mla/",
    )
    return cls(f"vllm:{name}", VERSION, facts)


_INT8 = Scheme(8, "token", None, "symmetric", "float32", rounding="half-away")
_FP8 = Scheme(8, "token", None, "e4m3", "float32")

FORMATS = {
    f.name: f
    for f in (
        fp8("e4m3", k_scale=1, v_scale=1),
        fp8("e5m2", k_scale=1, v_scale=1),
        _per_token_head("int8_per_token_head", Int8PerTokenHead(), HALF_AWAY, _INT8),
        _per_token_head("fp8_per_token_head", Fp8PerTokenHead(), "half-even", _FP8),
        _int4_per_token_head(),
        _turboquant("k8v4", 8, 4),
        _turboquant("4bit_nc", 4, 4),
        _turboquant("k3v4_nc", 3, 4),
        _turboquant("3bit_nc", 3, 3),
        *(octave(name) for name in _OCTAVE),
        _ultraquant(),
        nvfp4(k_scale=1, v_scale=1),
        nvfp4(k_scale=1, v_scale=1, four_over_six=True),
        _mla(Fp8DsMla, "fp8_ds_mla", "8", "128 channels", "float32"),
        _mla(Fp8DsMlaV4, "fp8_ds_mla_v4", "8", "64 channels", "E8M0"),
        _mla(Fp8DsMlaV41, "fp8_ds_mla_v4.1", "8", "32 channels", "E8M0"),
        _mla(Nvfp4DsMla, "nvfp4_ds_mla", "4", "16 channels", "E4M3"),
    )
}
