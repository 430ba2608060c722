"""ggml blocks: golden bytes, and byte for byte the package gguf.

What gguf cannot encode (iq4_nl, nvfp4) is decoded by both. Its arithmetic warns where
ours must not, so it runs with NumPy's warnings off.
"""

import numpy as np
import pytest
from plain import IQ4_NL, uneven

from kvq.formats.ggml import FORMATS, TYPE_IDS, rotate, rotation_size
from kvq.formats.rounding import inverse, rha, trc, trh
from kvq.tensor import quantize

GOLDEN = {  # the first 32 numbers of `ramp`; gguf 0.19.0, but for iq4_nl
    "q8_0": "50288d18b642e060fe9c28c646e4700eac2dca56f47f13b03cda65f99722c04bdf6a",
    "q4_0": "48b8bf369d047ad248ae268cf46ac137ad15",
    "q4_1": "5938c0c340c963fb852db751da741b953ec852ea",
    "q5_0": "48b4d54aa5567e5d2908e4a4805d3b17d7c3827e4b3a",
    "q5_1": "3634c0c32ab55aa980a2d5f71b5b6fa2c4e7183b7d80a4c4",
    "mxfp4": "7fce529c641ad540bd530ce42ac651ad63",
    "iq4_nl": "4da8cf269d036be138be159cf35ad127be14",
}
ENCODED_BY_GGUF = [
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "mxfp4",
]
BITS = dict(zip(GOLDEN, (8.5, 4.5, 5, 5.5, 6, 4.25, 4.5), strict=True))


def ramp(n):
    i = np.arange(n)
    return (((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07).astype(np.float32)


def gguf_quantize(x, name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        return gguf.quantize(x, kind).tobytes()


def gguf_dequantize(data, name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        return gguf.dequantize(data, kind).astype(np.float32, copy=False)


def same_bits(a, b):
    """Equal, a NaN to any NaN."""
    assert a.dtype == b.dtype == np.float32
    nan = np.isnan(a)
    np.testing.assert_array_equal(nan, np.isnan(b))
    a, b = a[~nan].view(np.uint32), b[~nan].view(np.uint32)
    np.testing.assert_array_equal(a, b)


# --- blocks ---------------------------------------------------------------------------
def signs(rng, shape):
    return rng.choice(np.float32([-1, 1]), shape)


def normal(rng, n):
    return rng.standard_normal((n, 32), dtype=np.float32)


def every_scale(rng, n):
    return normal(rng, n) * np.float32(10) ** rng.integers(-30, 30, (n, 1))


def heavy_tails(rng, n):
    return rng.standard_cauchy((n, 32)).astype(np.float32)


def half_precision(rng, n):
    return normal(rng, n).astype(np.float16)


def integers(rng, n):
    """The largest is often there with both signs: the first one decides."""
    return rng.integers(-5, 6, (n, 32)).astype(np.float32)


def ties(rng, n):
    """Numbers on and one step beside the middle of two levels, for every format."""
    top = rng.choice(np.float32([4, 8, 16, 15, 31, 127, 254]), (n, 1))
    x = rng.integers(-508, 509, (n, 32)).astype(np.float32) / 4
    x = np.clip(x, -top, top)
    x = np.nextafter(x, x + rng.integers(-1, 2, x.shape).astype(np.float32))
    x[:, 7:8] = top * signs(rng, (n, 1))
    return x * np.float32(2) ** rng.integers(-20, 20, (n, 1))


def powers(rng, n):
    """Powers of two and their neighbours: where log2 in float32 rounds."""
    x = signs(rng, (n, 32)) * np.float32(2) ** rng.integers(-40, 40, (n, 32))
    return np.nextafter(x, x * rng.integers(0, 3, x.shape).astype(np.float32))


def sparse(rng, n):
    return normal(rng, n) * (rng.random((n, 32)) < 0.05)


def constant(rng, n):
    return np.repeat(normal(rng, n)[:, :1], 32, axis=1)


def almost_constant(rng, n):
    x = constant(rng, n)
    return np.nextafter(x, x + rng.integers(-1, 2, x.shape).astype(np.float32))


def huge(rng, n):
    return normal(rng, n) * np.float32(2) ** rng.integers(20, 97, (n, 1))


def outliers(rng, n):
    x = normal(rng, n)
    x[:, 5] *= np.float32(10) ** rng.integers(0, 8, n)
    return x


BLOCKS = [
    normal,
    every_scale,
    heavy_tails,
    half_precision,
    integers,
    ties,
    powers,
    sparse,
    constant,
    almost_constant,
    huge,
    outliers,
]


def adversarial(n, seed=0):
    """(rows, 1024) float32: n blocks of each kind."""
    rng = np.random.default_rng(seed)
    return np.concatenate([kind(rng, n) for kind in BLOCKS]).reshape(-1, 1024)


@pytest.fixture(scope="module")
def many():
    x = adversarial(10_240)
    assert x.size // 32 * len(ENCODED_BY_GGUF) > 10**6
    return x.astype(np.float32, copy=False)


# --- the bytes ------------------------------------------------------------------------
@pytest.mark.parametrize("name", GOLDEN)
def test_gguf_0_19_golden_bytes(name):
    kind, data = FORMATS[f"ggml:{name}"], bytes.fromhex(GOLDEN[name])
    assert kind.encode(ramp(32)) == data
    assert kind.bits_per_element((32,)) == BITS[name]
    step = {"q8_0": 0.03, "q5_0": 0.25, "q5_1": 0.25}.get(name, 1)
    assert 0 < np.abs(kind.decode(data, (32,)) - ramp(32)).max() < step


@pytest.mark.parametrize("name", ENCODED_BY_GGUF)
def test_gguf_0_19_encodes_a_million_blocks_to_the_same_bytes(name, many):
    with np.errstate(all="raise", under="ignore"):
        data = FORMATS[f"ggml:{name}"].encode(many)
    theirs = gguf_quantize(many, name)
    if data != theirs:
        size = FORMATS[f"ggml:{name}"].nbytes((32,))
        a, b = (np.frombuffer(d, np.uint8).reshape(-1, size) for d in (data, theirs))
        bad = np.flatnonzero((a != b).any(axis=1))
        raise AssertionError(
            f"{len(bad)} blocks differ; {many.reshape(-1, 32)[bad[0]]}"
        )


@pytest.mark.parametrize("name", ENCODED_BY_GGUF)
def test_gguf_0_19_decodes_what_was_encoded_to_the_same_numbers(name, many):
    data = gguf_quantize(many, name)
    rows = np.frombuffer(data, np.uint8).reshape(len(many), -1)
    ours = FORMATS[f"ggml:{name}"].decode(data, many.shape)
    same_bits(ours, gguf_dequantize(rows, name))


@pytest.mark.parametrize("name", [n.partition(":")[2] for n in FORMATS])
def test_gguf_0_19_decodes_any_bytes_to_the_same_numbers(name):
    """Scales that are inf, NaN, subnormal or negative included."""
    kind = FORMATS[f"ggml:{name}"]
    shape = (1000, 640)
    size = kind.nbytes(shape)
    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    ours = kind.decode(data.tobytes(), shape)
    same_bits(ours, gguf_dequantize(data.reshape(1000, -1), name))


@pytest.mark.parametrize("name", ENCODED_BY_GGUF)
def test_any_shape_and_strides_give_the_bytes_of_the_rows(name):
    x = uneven((2, 5, 96))
    for part in (x, x[:, ::2], x.swapaxes(0, 1), x[..., 32:], x[0, 0]):
        data = FORMATS[f"ggml:{name}"].encode(part)
        assert data == gguf_quantize(np.ascontiguousarray(part), name)
        assert FORMATS[f"ggml:{name}"].decode(data, part.shape).shape == part.shape


@pytest.mark.parametrize("name", [*GOLDEN, "bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", [np.float64, ">f4", ">f2"])
def test_A47_other_float_types_are_read_as_numbers(name, dtype):
    """vllm-project/vllm#54338: bits of one type taken for another."""
    kind, x = FORMATS[f"ggml:{name}"], ramp(64)
    if dtype == ">f2":
        x = x.astype(np.float16)
    assert kind.encode(x.astype(dtype)) == kind.encode(x)
    with pytest.raises(TypeError, match="uint16"):
        kind.encode(x.astype(np.float16).view(np.uint16))


def test_A47_bfloat16_survives_where_it_fits():
    """vllm-project/vllm#54338: 0.1621 becomes 1.537, 436 becomes 3.926."""
    x = np.float32([0.1621, 188, 436] + [0] * 29).astype(FORMATS["ggml:bf16"].dtype)
    for name, relative in (("bf16", 0), ("f16", 0), ("f32", 0), ("q8_0", 0.02)):
        kind = FORMATS[f"ggml:{name}"]
        back = kind.decode(kind.encode(x), (32,))
        np.testing.assert_allclose(back[1:3], [188, 436], rtol=relative)
    for name in ("bf16", "f16", "f32"):
        kind = FORMATS[f"ggml:{name}"]
        assert kind.decode(kind.encode(x), (32,))[0] == np.float32(x[0])


def nearest_iq4_nl(y):
    """Binary search, then the nearer neighbour; halfway to the upper one."""
    if y <= IQ4_NL[0]:
        return 0
    if y >= IQ4_NL[15]:
        return 15
    low, high = 0, 15
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if y < IQ4_NL[middle] else (middle, high)
    return low if y - IQ4_NL[low] < IQ4_NL[high] - y else high


def plain_iq4_nl(x):
    """One block, one number after the other, every operation in float32."""
    f32, extreme = np.float32, x[np.abs(x).argmax()]
    if abs(extreme) < 1e-15:
        return f32(0), [8] * 32
    inverse_d = f32(1) / (extreme / f32(-127))
    codes = [nearest_iq4_nl(value * inverse_d) for value in x]
    top = bottom = f32(0)
    for value, code in zip(x, codes, strict=True):
        w, level = value * value, f32(IQ4_NL[code])
        top += w * level * value
        bottom += w * level * level
    return top / bottom, codes


@pytest.mark.parametrize("blocks", [b for b in BLOCKS if b is not huge])
def test_iq4_nl_is_what_one_number_at_a_time_gives(blocks):
    x = blocks(np.random.default_rng(3), 40).astype(np.float32)
    x = x * np.minimum(1e6 / np.abs(x).max(axis=1, keepdims=True, initial=1), 1)
    x = x.astype(np.float32)
    kind = FORMATS["ggml:iq4_nl"]
    data = np.frombuffer(kind.encode(x), np.uint8).reshape(-1, 18)
    for row, got in zip(x, data, strict=True):
        with np.errstate(under="ignore"):
            d, codes = plain_iq4_nl(row)
        assert got[:2].tobytes() == np.float16(d).tobytes()
        assert [*(got[2:] & 15), *(got[2:] >> 4)] == codes
        if d:
            assert kind.best_scale(row[None], kind.levels[codes][None]) == d


# --- degenerate blocks ----------------------------------------------------------------
@pytest.mark.parametrize("name", [*GOLDEN, "f32"])
@pytest.mark.parametrize("c", [0.0, -0.0, 1.0, -3.5, 65504.0])
def test_a_constant_block_comes_back(name, c):
    x = np.full((3, 64), c, np.float32)
    kind = FORMATS[f"ggml:{name}"]
    with np.errstate(all="raise", under="ignore"):
        back = kind.decode(kind.encode(x), x.shape)
    assert np.unique(back).size == 1
    # Half an ulp of a float16 d. E2M1 ends at 6, and 65504 is 7.996 times its scale.
    tolerance = 0.25 if name == "mxfp4" else 2.0**-11
    np.testing.assert_allclose(back, x, rtol=tolerance)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 2.0**-128, 1e-37, 1e-20, 1e-9])
def test_numbers_below_the_smallest_scale_become_zero(name, tiny):
    x = ramp(64) * np.float32(tiny)
    kind = FORMATS[f"ggml:{name}"]
    with np.errstate(all="raise", under="ignore"):
        back = kind.decode(kind.encode(x), x.shape)
    assert np.abs(back - x).max() <= np.abs(x).max()
    assert name == "mxfp4" or (back == 0).all()


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_beyond_the_largest_scale_do_not_warn(name):
    x = ramp(64) * np.float32(2) ** np.float32([[13], [24], [60], [97]])
    kind = FORMATS[f"ggml:{name}"]
    with np.errstate(all="raise", under="ignore"):
        back = kind.decode(kind.encode(x), x.shape)
    finite = 4 if name == "mxfp4" else 1  # d and m are float16
    assert np.isfinite(back[:finite]).all()
    if name != "mxfp4":
        assert not np.isfinite(back[1:]).all(axis=-1).any()


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e30 * 1e3])
def test_numbers_that_are_not_finite_are_refused(name, bad):
    x = ramp(64)
    x[40] = bad
    with pytest.raises(ValueError, match="valid: finite numbers"):
        FORMATS[f"ggml:{name}"].encode(x)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_types_store_inf_and_nan_as_they_are(name):
    x = np.float32([np.nan, np.inf, -np.inf, 3, 1e38])
    kind = FORMATS[f"ggml:{name}"]
    data = kind.encode(x)
    back = kind.decode(data, x.shape)
    large = np.inf if name == "f16" else 1e38
    np.testing.assert_allclose(back, [np.nan, np.inf, -np.inf, 3, large], rtol=2**-8)
    assert data == gguf_quantize(x, name)


# --- refusals -------------------------------------------------------------------------
@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("width", [1, 31, 33, 48, 80])
def test_rows_that_are_not_whole_blocks_are_refused(name, width):
    kind = FORMATS[f"ggml:{name}"]
    for call in (
        lambda: kind.encode(np.ones((64, width), np.float32)),
        lambda: kind.decode(bytes(64), (64, width)),
        lambda: kind.bits_per_element((64, width)),
    ):
        with pytest.raises(
            ValueError, match=f"{width} numbers; valid: multiples of 32"
        ):
            call()


@pytest.mark.parametrize("name", [n.partition(":")[2] for n in FORMATS])
def test_a_wrong_number_of_bytes_is_refused(name):
    kind = FORMATS[f"ggml:{name}"]
    need = kind.nbytes((2, 64))
    for wrong in (0, 1, need - 1, need + 1, 2 * need):
        with pytest.raises(ValueError, match=rf"{wrong} bytes; .* has {need}"):
            kind.decode(bytes(wrong), (2, 64))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 32)])
def test_an_empty_tensor_is_refused(shape):
    for kind in FORMATS.values():
        with pytest.raises(ValueError, match=r"expected \(\.\.\., T, D\)"):
            kind.encode(np.ones(shape, np.float32))
        with pytest.raises(ValueError, match=r"expected \(\.\.\., T, D\)"):
            kind.decode(b"", shape)


def test_nvfp4_is_decode_only():
    with pytest.raises(ValueError, match="only be decoded"):
        FORMATS["ggml:nvfp4"].encode(ramp(64))


# --- the vocabulary -------------------------------------------------------------------
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"])
def test_the_scheme_stores_the_same_scales_and_at_most_the_neighbouring_level(name):
    kind = FORMATS[f"ggml:{name}"]
    x = uneven((3, 50, 96)) * np.float32(0.1)
    ours, data = quantize(x, kind.scheme), np.frombuffer(kind.encode(x), np.uint8)
    blocks = data.reshape(3, 50, 3, kind.block_bytes)
    if name == "mxfp4":
        step = np.ldexp(np.float32(1), blocks[..., 0].astype(int) - 127)
        np.testing.assert_array_equal(ours.scale.astype(np.float32), step)
        step = 2 * step  # between the largest levels
    else:
        d = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        np.testing.assert_array_equal(ours.scale, d)
        step = np.abs(d.astype(np.float32))
    if kind.scheme.has_zero:
        m = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
        np.testing.assert_array_equal(ours.zero, m)
    theirs = kind.decode(data.tobytes(), x.shape)
    difference = np.abs(ours.dequantize() - theirs)
    assert (difference <= 1.001 * np.repeat(step, 32, axis=-1)).all()
    assert np.mean(difference == 0) > 0.97
    assert kind.bits_per_element(x.shape) == ours.bits_per_element


def test_iq4_nl_has_the_levels_of_its_scheme_and_a_better_scale():
    kind, x = FORMATS["ggml:iq4_nl"], uneven((3, 50, 96))
    ours = quantize(x, kind.scheme).dequantize()
    theirs = kind.decode(kind.encode(x), x.shape)
    assert kind.bits_per_element(x.shape) == 4.5
    w = x.astype(np.float64) ** 2
    assert np.sum(w * (x - theirs) ** 2) < np.sum(w * (x - ours) ** 2)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_types_store_what_the_scheme_does(name):
    kind, x = FORMATS[f"ggml:{name}"], uneven((3, 5, 96))
    assert kind.encode(x) == quantize(x, kind.scheme).codes.tobytes()


def test_every_cache_type_has_a_type_id_a_format_and_facts():
    assert set(TYPE_IDS) < {name.partition(":")[2] for name in FORMATS}
    for name, kind in FORMATS.items():
        assert kind.name == name
        assert kind.version.startswith("llama.cpp ")
        assert all(vars(kind.facts).values())


# --- rounding -------------------------------------------------------------------------
def test_rounding_rules_just_below_a_half():
    below = np.nextafter(np.float32(0.5), np.float32(0))
    v = np.float32([below, -below, 0.5, -0.5, 1.5, -2.5, 2.4999998, 0, -0.0])
    assert rha(v).tolist() == [0, 0, 1, -1, 2, -3, 2, 0, 0]
    assert trh(v).tolist() == [1, -1, 1, -1, 2, -3, 2, 0, 0]
    assert trc(np.float32([-0.4, 0.6, 7.5]), 8.5).tolist() == [8, 9, 16]


def test_half_away_is_exact_at_every_half_and_beside_it():
    v = np.concatenate([np.arange(2**16), 2.0 ** np.arange(16, 22)]) + 0.5
    v = np.concatenate([v, -v]).astype(np.float32)
    for beside in (v, np.nextafter(v, np.float32(0)), np.nextafter(v, 2 * v)):
        exact = np.floor(np.abs(beside.astype(np.float64)) + 0.5)
        np.testing.assert_array_equal(rha(beside), np.copysign(exact, beside))


def test_the_inverse_of_nothing_is_zero():
    d = np.float32([0, -0.0, 1e-45, -(2.0**-128), 2.0**-127, -4])
    with np.errstate(all="raise"):
        assert inverse(d).tolist() == [0, 0, 0, 0, 2.0**127, -0.25]


# --- rotation -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head_dim", "size"), [(64, 64), (128, 128), (192, 64), (256, 256), (320, 64)]
)
def test_rotation_size_is_the_largest_power_of_two_that_divides(head_dim, size):
    assert rotation_size(head_dim) == size


@pytest.mark.parametrize("head_dim", [0, -64, 32, 80, 96, 100])
def test_heads_that_llama_cpp_does_not_rotate_are_refused(head_dim):
    with pytest.raises(
        ValueError, match=f"head_dim={head_dim}; valid: multiples of 64"
    ):
        rotation_size(head_dim)


@pytest.mark.parametrize(("D", "size"), [(128, 128), (128, 64), (192, 64)])
def test_the_rotation_is_natural_order_hadamard_and_its_own_inverse(D, size):
    x = uneven((2, 7, D))
    i = np.arange(size)
    parity = np.bitwise_count(i[:, None] & i) % 2
    H = (1 - 2.0 * parity) / np.sqrt(size)
    right = x.reshape(2, 7, -1, size).astype(np.float64) @ H
    rotated = rotate(x, size)
    assert rotated.dtype == np.float32
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * np.abs(x).max()}
    np.testing.assert_allclose(rotated, right.reshape(x.shape), **tolerance)
    np.testing.assert_allclose(rotate(rotated, size), x, **tolerance)


@pytest.mark.parametrize(("D", "size"), [(96, 64), (128, 96), (64, 128), (64, 0)])
def test_a_rotation_that_does_not_divide_the_heads_is_refused(D, size):
    with pytest.raises(ValueError, match=f"size={size}|power of two"):
        rotate(np.ones((2, D), np.float32), size)


def test_rotation_lowers_the_error_of_keys_with_outlier_channels():
    x = np.random.default_rng(0).standard_normal((50, 128)).astype(np.float32)
    x[:, ::32] *= 20  # one in each block
    kind = FORMATS["ggml:q4_0"]
    plain = kind.decode(kind.encode(x), x.shape) - x
    rotated = rotate(x, 128)
    back = rotate(kind.decode(kind.encode(rotated), x.shape), 128) - x
    assert np.sum(back**2) < np.sum(plain**2)
