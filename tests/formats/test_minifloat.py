"""FP8, FP4, powers of two, MX and NVFP4 against ml_dtypes, code by code."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain import uneven

from kvq.formats import ggml
from kvq.formats.minifloat import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    MINIFLOATS,
    UE4M3,
    calibrated_scale,
    check_scale,
    e8m0_decode,
    e8m0_floor,
    e8m0_nearest,
    nvfp4_decode,
    nvfp4_encode,
    swizzle_scales,
    unswizzle_scales,
)

ORACLE = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
FP8 = [E4M3, E5M2]
SIGNED = [E4M3, E5M2, E2M1]


def cast(x, name):
    """ml_dtypes' codes of x, its own rules of overflow."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(ORACLE[name]).view(np.uint8)


def values(name):
    """ml_dtypes' value of every code."""
    count = 16 if name == "e2m1" else 256
    with np.errstate(all="ignore"):
        return np.arange(count, dtype=np.uint8).view(ORACLE[name]).astype(np.float32)


def boundaries(kind):
    """Every value, every midpoint, their neighbours, both signs, and the extremes."""
    v = np.unique(values(kind.name)[np.isfinite(values(kind.name))])
    x = np.concatenate([v, (v[1:] + v[:-1]) / 2]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(9e9)), np.nextafter(x, -x)])
    beyond = [448, 464, 480, 512, 57344, 61440, 65536, 1e30, 3.4e38, 2.0**-149, -0.0]
    x = np.concatenate([x, np.float32(beyond), np.nextafter(np.float32(beyond), 0)])
    return np.concatenate([x, -x])


# --- single numbers -------------------------------------------------------------------
@pytest.mark.parametrize("kind", SIGNED, ids=lambda f: f.name)
def test_every_code_means_what_ml_dtypes_says(kind):
    codes = np.arange(len(kind.values), dtype=np.uint8)
    expected = values(kind.name)
    np.testing.assert_array_equal(kind.decode(codes), expected)
    zero = np.flatnonzero(expected == 0)
    np.testing.assert_array_equal(np.signbit(kind.values[zero]), [False, True])


@pytest.mark.parametrize("kind", SIGNED, ids=lambda f: f.name)
def test_encoding_a_value_gives_its_code(kind):
    finite = np.flatnonzero(np.isfinite(kind.values))
    np.testing.assert_array_equal(kind.encode(kind.values[finite]), finite)


@pytest.mark.parametrize("kind", FP8, ids=lambda f: f.name)
def test_without_saturation_every_boundary_is_as_in_ml_dtypes(kind):
    x = np.append(boundaries(kind), np.float32([np.inf, -np.inf, np.nan, -np.nan]))
    np.testing.assert_array_equal(kind.encode(x, saturate=False), cast(x, kind.name))


@pytest.mark.parametrize("kind", SIGNED, ids=lambda f: f.name)
def test_with_saturation_the_number_is_clipped_first(kind):
    x = boundaries(kind)
    clipped = np.clip(x, -kind.largest, kind.largest)
    np.testing.assert_array_equal(kind.encode(x), cast(clipped, kind.name))
    top = kind.encode(np.float32([np.inf, -np.inf]))
    np.testing.assert_array_equal(kind.decode(top), [kind.largest, -kind.largest])


@pytest.mark.parametrize("kind", FP8, ids=lambda f: f.name)
def test_a_million_random_numbers_over_all_exponents(kind):
    rng = np.random.default_rng(5)
    x = rng.standard_normal(1_000_000) * 2.0 ** rng.uniform(-24, 18, 1_000_000)
    x = x.astype(np.float32)
    np.testing.assert_array_equal(kind.encode(x, saturate=False), cast(x, kind.name))


@given(st.floats(width=32))
def test_any_float32_at_all(x):
    for kind in FP8:
        code = kind.encode(np.float32(x), saturate=False)
        assert code == cast([x], kind.name)[0]


def test_e2m1_midpoints_go_to_the_even_mantissa():
    midpoints = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    even = [0, 1, 1, 2, 2, 4, 4]
    np.testing.assert_array_equal(E2M1.decode(E2M1.encode(midpoints)), even)
    np.testing.assert_array_equal(
        E2M1.decode(E2M1.encode(-midpoints)), np.negative(even)
    )


def test_an_unclamped_fp8_cast_turns_an_outlier_into_nan():
    # The scale was measured when the largest number was 10; then 10.4 arrives.
    scale = np.float32(10 / 448)
    later = np.float32([10.0, 10.35, 10.4]) / scale
    np.testing.assert_array_equal(
        np.isnan(E4M3.decode(E4M3.encode(later, saturate=False))), [False, False, True]
    )
    assert (E4M3.decode(E4M3.encode(later)) == 448).all()


def test_ue4m3_is_e4m3_without_a_sign():
    x = np.float32([0, 2**-10, 1.3, 448, 464, 500])
    np.testing.assert_array_equal(UE4M3.encode(x), E4M3.encode(x))
    assert len(UE4M3.values) == 128
    with pytest.raises(ValueError, match="no sign"):
        UE4M3.encode(np.float32(-1))


def test_what_e2m1_does_not_have_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        E2M1.encode(np.float32([1, np.nan]))
    with pytest.raises(ValueError, match="saturate=False"):
        E2M1.encode(np.float32(1), saturate=False)


def test_tables_cannot_be_written():
    for kind in MINIFLOATS.values():
        with pytest.raises(ValueError, match="read-only"):
            kind.values[0] = 1


# --- powers of two --------------------------------------------------------------------
def test_every_e8m0_code_means_what_ml_dtypes_says():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(e8m0_decode(codes), expected)


def test_e8m0_nearest_is_the_cast_of_ml_dtypes():
    rng = np.random.default_rng(6)
    x = (rng.uniform(1, 2, 20_000) * 2.0 ** rng.integers(-140, 128, 20_000)).astype(
        "f4"
    )
    ties = 1.5 * 2.0 ** np.arange(-126, 127)
    special = [0, -0.0, -1, np.inf, -np.inf, np.nan, 2.0**-149, 1.5 * 2.0**127, 3.4e38]
    x = np.concatenate([x, ties, special]).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    quirk = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
    assert (expected[quirk] == 1).all()
    assert (e8m0_nearest(x[quirk]) == 0).all()
    np.testing.assert_array_equal(e8m0_nearest(x[~quirk]), expected[~quirk])


def test_the_ocp_scale_takes_the_floor_where_a_cast_takes_the_nearest():
    x = np.float32([4, 7.9, 8, 2.0**127, 0, 2.0**-149])
    # e_max of E2M1 is 2
    np.testing.assert_array_equal(e8m0_floor(x, 2), [127, 127, 128, 252, 0, 0])
    assert e8m0_nearest(np.float32(7.9 / 4)) == 128


# --- MX -------------------------------------------------------------------------------
MX = [FORMATS[n] for n in ("ocp:mxfp8_e4m3", "ocp:mxfp8_e5m2", "ocp:mxfp4")]


def slow_mx(row, kind):
    """One block with Python's own floats and ml_dtypes' cast."""
    top = max(abs(float(v)) for v in row)
    X = 2.0 ** (np.floor(np.log2(top)) - kind.element.largest_exponent)
    y = np.clip(row / X, -kind.element.largest, kind.element.largest)
    return X, cast(y, kind.element.name)


@pytest.mark.parametrize("kind", MX, ids=lambda f: f.name)
def test_mx_blocks_are_a_power_of_two_and_casts(kind):
    x = uneven((2, 5, 96))
    data = np.frombuffer(kind.encode(x), np.uint8).reshape(-1, kind.block_bytes)
    decoded = kind.decode(data.tobytes(), x.shape).reshape(-1, 32)
    for row, block, y in zip(x.reshape(-1, 32), data, decoded, strict=True):
        X, codes = slow_mx(row, kind)
        assert block[0] == np.log2(X) + 127
        stored = block[1:]
        if kind.bits == 4:  # the even number in the low half
            stored = np.stack([stored & 15, stored >> 4], -1).ravel()
        np.testing.assert_array_equal(stored, codes)
        np.testing.assert_array_equal(y, values(kind.element.name)[codes] * X)


def test_mxfp4_has_the_values_of_ggml():
    x = np.random.default_rng(4).standard_normal((3, 7, 64))  # no ties: they differ
    ours, theirs = FORMATS["ocp:mxfp4"], ggml.FORMATS["ggml:mxfp4"]
    np.testing.assert_array_equal(
        ours.decode(ours.encode(x), x.shape), theirs.decode(theirs.encode(x), x.shape)
    )


def test_mxfp4_saturates_from_six_to_eight_times_its_scale():
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 7.9, -6.5, 6, 5
    kind = FORMATS["ocp:mxfp4"]
    np.testing.assert_array_equal(
        kind.decode(kind.encode(x), x.shape)[0, :4], [6, -6, 6, 4]
    )


# --- NVFP4 ----------------------------------------------------------------------------
def slow_nvfp4(row, scale, top):
    """One block, one operation after the other in float32."""
    f = np.float32
    g = f(1) / f(scale)
    S = cast([min(g * (np.abs(row).max() * (f(1) / f(top))), f(448))], "e4m3")[0]
    step = values("e4m3")[S] * (f(1) / g)
    m = f(1) / step if S else f(0)
    return S, cast(row * m, "e2m1"), step


@pytest.mark.parametrize("scale", [1.0, 0.013, 37.5])
def test_nvfp4_is_two_scales_and_a_cast(scale):
    x = uneven((3, 2, 48))
    x[1, 1, 16:32] = 0
    packed, S = nvfp4_encode(x, scale)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1, 16)
    decoded = nvfp4_decode(packed, S, scale).reshape(-1, 16)
    for i, row in enumerate(x.reshape(-1, 16)):
        expected_S, expected, _ = slow_nvfp4(row, scale, 6)
        assert S.ravel()[i] == expected_S
        np.testing.assert_array_equal(codes[i], expected)
        y = values("e2m1")[expected] * (values("e4m3")[expected_S] * np.float32(scale))
        np.testing.assert_array_equal(decoded[i], y)


def test_four_over_six_keeps_six_unless_four_is_strictly_better():
    x = uneven((4, 3, 64))
    _, S = nvfp4_encode(x, 0.5, four_over_six=True)
    fours = 0
    for i, row in enumerate(x.reshape(-1, 16)):
        errors = {}
        for top in (6, 4):
            block_S, codes, step = slow_nvfp4(row, 0.5, top)
            squares = np.square(values("e2m1")[codes] * step - row)
            total = np.float32(0)
            for a, b in squares.reshape(8, 2):
                total += a + b
            errors[top] = total, block_S
        chosen = 4 if errors[4][0] < errors[6][0] else 6
        fours += chosen == 4
        assert S.ravel()[i] == errors[chosen][1]
    assert 10 < fours < 40  # of 48


def test_modelopt_scales_leave_nvfp4_block_scales_below_75():
    # amax / 448 is the FP8 rule; the recipe for weights, amax / (448 * 6), uses them up
    x = uneven((2, 9, 64))
    absmax = np.abs(x).max()
    _, S = nvfp4_encode(x, calibrated_scale(absmax))
    assert E4M3.decode(S).max() == 72  # nearest to 448 / 6 = 74.67
    _, S = nvfp4_encode(x, absmax / np.float32(448 * 6))
    assert E4M3.decode(S).max() == 448


@pytest.mark.parametrize("n", [1, 4, 5, 8])
def test_swizzled_scales_put_four_tokens_side_by_side(n):
    S = np.arange(2 * 8 * n, dtype=np.uint8).reshape(2, 8, n)
    flat = swizzle_scales(S).reshape(2, -1)
    for t in range(8):
        for s in range(n):
            assert flat[1, t // 4 * 4 * n + 4 * s + t % 4] == S[1, t, s]
    np.testing.assert_array_equal(unswizzle_scales(swizzle_scales(S)), S)


def test_vllm_0_33_0_swizzle_of_the_first_sixteen_bytes():
    S = np.array([[10 * t + s for s in range(4)] for t in range(4)], np.uint8)
    expected = [10 * t + s for s in range(4) for t in range(4)]
    np.testing.assert_array_equal(swizzle_scales(S).ravel(), expected)


def test_impossible_scales_are_refused():
    for scale in (0, -1, np.nan, np.inf, 1e-40):
        with pytest.raises(ValueError, match="k_scale="):
            check_scale("k_scale", scale)
    with pytest.raises(ValueError, match="multiples of 4"):
        swizzle_scales(np.zeros((6, 4), np.uint8))
    with pytest.raises(ValueError, match="multiples of 16"):
        nvfp4_encode(np.zeros((3, 24)), 1)


# --- all formats ----------------------------------------------------------------------
BITS = {
    "ocp:mxfp8_e4m3": 8.25,
    "ocp:mxfp8_e5m2": 8.25,
    "ocp:mxfp4": 4.25,
    "nvidia:nvfp4": 4.5,
    "nvidia:nvfp4_4over6": 4.5,
}


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_claimed_bits_are_stored_bytes(kind):
    x = uneven((4, 64, 128))
    data = kind.encode(x)
    assert len(data) == kind.nbytes(x.shape)
    assert kind.bits_per_element(x.shape) == 8 * len(data) / x.size
    assert kind.bits_per_element(x.shape) == pytest.approx(BITS[kind.name], abs=2e-3)


NMSE = {  # of 640,000 Gaussian numbers; here 65,536
    "ocp:mxfp8_e5m2": 0.0029,
    "ocp:mxfp4": 0.0132,
    "nvidia:nvfp4": 0.00903,
    "nvidia:nvfp4_4over6": 0.00755,
}


@pytest.mark.parametrize("name", NMSE)
def test_error_on_gaussian_numbers(name):
    x = np.random.default_rng(7).standard_normal((512, 128), dtype=np.float32)
    y = FORMATS[name].decode(FORMATS[name].encode(x), x.shape)
    assert np.mean((x - y) ** 2) / np.mean(x**2) == pytest.approx(NMSE[name], rel=0.02)


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("factor", [0, 2.0**-149, 2.0**-120, 2.0**90])
def test_zeros_and_extremes_are_ordinary_input(kind, factor):
    x = uneven((1, 3, 96)) * np.float32(factor)
    y = kind.decode(kind.encode(x), x.shape)
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= np.abs(x).max() * 1.2


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_any_bytes_can_be_read(kind):
    shape = (2, 3, 96)
    data = np.random.default_rng(8).integers(0, 256, kind.nbytes(shape), dtype=np.uint8)
    assert kind.decode(data.tobytes(), shape).shape == shape


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_wrong_input_is_one_clear_error(kind):
    with pytest.raises(ValueError, match="multiples of"):
        kind.encode(np.ones((3, 40), np.float32))
    with pytest.raises(TypeError, match="int64"):
        kind.encode(np.ones((3, 96), np.int64))
    with pytest.raises(ValueError, match="nan"):
        kind.encode(np.full((3, 96), np.nan))
    with pytest.raises(ValueError, match="5 bytes"):
        kind.decode(b"12345", (3, 96))
