"""TensorRT-LLM's formats: golden bytes, casts, pool blocks, the cyclic window."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from plain import uneven

from kvq.formats import tensorrt_llm as trt
from kvq.formats.minifloat import calibrated_scale, nvfp4_encode

MAKERS = {"int8": trt.int8, "fp8": trt.fp8, "nvfp4": trt.nvfp4}

# x = ramp(64); computed from the equations, version "main, 2026".
INT8 = (
    "841ab047dd68fe942bc14ce2780fa530c65cf37f14aa40d76df88e24bb51dc72"
    "089f35c056ec7f19a43ad067fd881eb44be16c02982fc550e67c13a934ca60f7"
)
FP8 = (
    "c835c241b94596c53bc042b7472fc33cbe44ad4932c340ba46a8c639c142b946"
    "28c43dc043b24834c43fbc459cc737c141b84619c53cbf42b54831c33dbd44a9"
)
FP8_CALIBRATED = (
    "fd6bf876ee7bccfb71f578ec7c64f972f479e37e68f975f07bddfc6ff678ef7c"
    "5efa73f579e87d6af974f27ad2fc6cf777ed7b4ffb72f478eb7d67f973f37adf"
)
NVFP4 = "3f6e7cf8d4b6174e6d79e2c5963f6d7be1d4a6275e6cf8d3b6074f6d7be2d59632333332"
NVFP4_CALIBRATED = (
    "3f6e7cf8d4b6274e6d79e2c5963f6d7be1d4a6275e6cf8d3b6074f6d7be2d59668696968"
)


def ramp(n):
    i = np.arange(n)
    return (((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07).astype(np.float16)[None]


# --- golden bytes ---------------------------------------------------------------------
def test_tensorrt_llm_2026_int8():
    assert trt.int8(0.03125).encode(ramp(64)).hex() == INT8


def test_tensorrt_llm_2026_fp8():
    calibrated = calibrated_scale(ramp(64).max())
    assert trt.fp8(1).encode(ramp(64)).hex() == FP8
    assert trt.fp8(calibrated).encode(ramp(64)).hex() == FP8_CALIBRATED


def test_tensorrt_llm_2026_nvfp4():
    calibrated = calibrated_scale(ramp(64).max())
    assert trt.nvfp4(1).encode(ramp(64)).hex() == NVFP4
    assert trt.nvfp4(calibrated).encode(ramp(64)).hex() == NVFP4_CALIBRATED


# --- casts ----------------------------------------------------------------------------
def test_int8_multiplies_by_the_reciprocal_and_saturates():
    x = uneven((2, 9, 20)) * 4
    inverse = np.float32(1) / np.float32(0.3)
    codes = np.frombuffer(trt.int8(0.3).encode(x), np.int8).reshape(x.shape)
    expected = [
        [[max(-128, min(127, round(float(v * inverse)))) for v in row] for row in head]
        for head in x
    ]
    np.testing.assert_array_equal(codes, expected)
    assert {-128, 127} <= set(codes.ravel().tolist())


def test_int8_rounds_halves_to_even():
    x = np.float32([[0.5, 1.5, 2.5, -0.5, -2.5]])
    codes = np.frombuffer(trt.int8(1).encode(x), np.int8)
    assert codes.tolist() == [0, 2, 2, 0, -2]


def test_fp8_clamps_where_a_plain_cast_gives_nan():
    x = np.float32([[448, 464, 465, -1e6, 2.0**100]])
    kind = trt.fp8(1)
    clamped = kind.decode(kind.encode(x), x.shape)
    np.testing.assert_array_equal(clamped, [[448, 448, 448, -448, 448]])
    naive = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.isnan(naive).sum() == 3


@pytest.mark.parametrize(
    ("name", "bound"), [("int8", 0.5 / 127), ("fp8", 1 / 16), ("nvfp4", 1 / 5)]
)
def test_decoding_is_within_half_a_step(name, bound):
    x = np.random.default_rng(0).standard_normal((3, 37, 64)).astype(np.float32)
    top = np.abs(x).max()
    kind = MAKERS[name](top / 127 if name == "int8" else calibrated_scale(top))
    y = kind.decode(kind.encode(x), x.shape)
    assert y.dtype == np.float32
    assert np.abs(x - y).max() <= bound * top * 1.0001
    assert kind.bits_per_element(x.shape) == {"nvfp4": 4.5}.get(name, 8)


@pytest.mark.parametrize("name", MAKERS)
def test_the_scale_is_used_on_both_ways(name):
    x = uneven((2, 5, 32))
    one, eight = MAKERS[name](0.5), MAKERS[name](4)
    assert one.encode(x) != eight.encode(x)
    data = one.encode(x)
    np.testing.assert_array_equal(
        eight.decode(data, x.shape), 8 * one.decode(data, x.shape)
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_scale_must_be_given(name):
    parameter = inspect.signature(MAKERS[name]).parameters["scale"]
    assert parameter.default is inspect.Parameter.empty
    with pytest.raises(ValueError, match="scale=0; valid"):
        MAKERS[name](0)


def test_swizzled_nvfp4_moves_scales_and_no_codes():
    x = uneven((3, 8, 64))
    codes, S = nvfp4_encode(x, 0.25)
    data = np.frombuffer(trt.nvfp4(0.25, swizzled=True).encode(x), np.uint8)
    assert data[: codes.size].tobytes() == codes.tobytes()
    scales = data[codes.size :].reshape(3, 2, 4, 4)  # head, tokens / 4, D / 16, 4
    for h, t, s in ((0, 0, 0), (1, 5, 2), (2, 7, 3)):
        assert scales[h, t // 4, s, t % 4] == S[h, t, s]
    both = trt.nvfp4(0.25), trt.nvfp4(0.25, swizzled=True)
    plain, swizzled = (kind.decode(kind.encode(x), x.shape) for kind in both)
    np.testing.assert_array_equal(plain, swizzled)


@pytest.mark.parametrize("name", MAKERS)
def test_any_bytes_can_be_read(name):
    kind = MAKERS[name](2.0**100)
    data = np.random.default_rng(8).integers(0, 256, kind.nbytes((2, 4, 48)), np.uint8)
    assert kind.decode(data.tobytes(), (2, 4, 48)).shape == (2, 4, 48)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("factor", [0, 2.0**-149, 2.0**90])
def test_zeros_and_extremes_are_ordinary_input(name, factor):
    x = uneven((1, 4, 48)) * np.float32(factor)
    kind = MAKERS[name](2.0**-100)
    assert np.isfinite(kind.decode(kind.encode(x), x.shape)).all()


def test_wrong_input_is_one_clear_error():
    for kind in trt.FORMATS.values():
        with pytest.raises(TypeError, match="int32"):
            kind.encode(np.ones((2, 16), np.int32))
        with pytest.raises(ValueError, match="inf"):
            kind.encode(np.full((2, 16), np.inf))
        with pytest.raises(ValueError, match="3 bytes"):
            kind.decode(b"abc", (2, 16))
    with pytest.raises(ValueError, match="multiples of 16"):
        trt.nvfp4(1).encode(np.ones((2, 24), np.float32))


def test_formats_are_named_after_the_system():
    assert list(trt.FORMATS) == [f"tensorrt_llm:{n}" for n in ("int8", "fp8", "nvfp4")]
    assert {f.version for f in trt.FORMATS.values()} == {"TensorRT-LLM main, 2026"}


# --- blocks of a pool -----------------------------------------------------------------
def test_a_block_is_heads_then_tokens_then_channels():
    H, T, D, N = 3, 37, 20, 16
    x = np.arange(H * T * D, dtype=np.int32).reshape(H, T, D) + 1
    blocks = trt.to_blocks(x, N)
    assert blocks.shape == (3, H, N, D)
    assert blocks.flags.c_contiguous
    for h, t, d in ((0, 0, 0), (1, 17, 3), (2, 36, 19)):
        block = blocks[t // N].ravel()
        assert block[trt.element_offset(h, t, d, N, D)] == x[h, t, d]
    assert not blocks[2, :, 5:].any()


def test_offsets_are_64_bit():
    head = np.array([40_000], np.int32)
    offset = trt.element_offset(head, np.int32(63), np.int32(5), 64, 1024)
    assert offset.dtype == np.int64
    assert offset[0] == 40_000 * 64 * 1024 + 63 * 1024 + 5 > 2**31


def test_a_table_finds_keys_and_values_of_a_sequence_in_one_pool():
    k, v = uneven((2, 21, 4)), uneven((2, 21, 4), 1)
    other = uneven((2, 6, 4), 2)
    pool = np.full((9, 2, 8, 4), np.nan, np.float32)
    pool[[7, 2, 5]] = trt.to_blocks(k, 8)
    pool[[0, 8, 3]] = trt.to_blocks(v, 8)
    pool[[4]] = trt.to_blocks(other, 8)
    table = trt.block_offsets([([4], [1]), ([7, 2, 5], [0, 8, 3])], beams=2)
    assert table.shape == (2, 2, 2, 3)
    assert table.dtype == np.int32
    assert table[0, 1].tolist() == [[4, -1, -1], [1, -1, -1]]
    np.testing.assert_array_equal(trt.gather(pool, table, 1, 0, 21, beam=1), k)
    np.testing.assert_array_equal(trt.gather(pool, table, 1, 1, 21), v)
    np.testing.assert_array_equal(trt.gather(pool, table, 0, 0, 6), other)
    with pytest.raises(ValueError, match="tokens=9"):
        trt.gather(pool, table, 0, 0, 9)
    with pytest.raises(ValueError, match="tokens=25"):
        trt.gather(pool, table, 1, 0, 25)
    with pytest.raises(ValueError, match="2 blocks of K, 1 of V"):
        trt.block_offsets([([1, 2], [3])])


@pytest.mark.parametrize("tokens_per_block", [0, 1, 24, 32.0, True])
def test_blocks_hold_a_power_of_two(tokens_per_block):
    with pytest.raises(ValueError, match="tokens_per_block="):
        trt.to_blocks(np.zeros((1, 4, 2)), tokens_per_block)


# --- the cyclic window ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("window", "sinks", "block"), [(10, 0, 4), (11, 3, 4), (9, 4, 2)]
)
def test_the_window_holds_the_sinks_and_the_newest_tokens(window, sinks, block):
    cache = {}
    for t in range(60):
        cache[int(trt.cyclic_index(t, window, sinks, block))] = t
        newest = range(max(sinks, t + 1 - (window - sinks)), t + 1)
        assert sorted(cache.values()) == [*range(min(sinks, t + 1)), *newest]
    bubble = range(sinks, -(-sinks // block) * block)
    assert not set(bubble) & set(cache)
    assert len(cache) == window


def test_cyclic_index_of_many_tokens():
    places = trt.cyclic_index(np.arange(9), window=6, sinks=2, tokens_per_block=4)
    assert places.tolist() == [0, 1, 4, 5, 6, 7, 4, 5, 6]
    assert places.dtype == np.int64


def test_an_impossible_window_is_named():
    with pytest.raises(ValueError, match="sinks=8, window=8"):
        trt.cyclic_index(0, window=8, sinks=8)
