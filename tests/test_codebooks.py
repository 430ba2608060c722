import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.codebooks import codebook, levels, lloyd_max, normal_cells
from kvq.scheme import CODEBOOKS

MINIFLOATS = {
    "e2m1": (4, ml_dtypes.float4_e2m1fn, 6),
    "e4m3": (8, ml_dtypes.float8_e4m3fn, 448),
    "e5m2": (8, ml_dtypes.float8_e5m2, 57344),
}
ALL = [("lloyd-max", bits) for bits in range(1, 9)]
ALL += [("nf4", 4), ("iq4_nl", 4), ("e2m1", 4), ("e4m3", 8), ("e5m2", 8)]


def midpoints(book):
    """Every level but the last, its upper neighbour, and their exact middle."""
    values = book.values[book.order].astype(np.float64)
    return book.order[:-1], book.order[1:], (values[:-1] + values[1:]) / 2


def test_every_codebook_of_the_vocabulary_is_tested_here():
    assert {name for name, _ in ALL} == set(CODEBOOKS)


# --- small floats ---------------------------------------------------------------------
@pytest.mark.parametrize("name", MINIFLOATS)
def test_every_bit_pattern_has_the_value_that_ml_dtypes_gives_it(name):
    bits, dtype, top = MINIFLOATS[name]
    patterns = np.arange(2**bits, dtype=np.uint8)
    expected = patterns.view(dtype).astype(np.float64)
    np.testing.assert_array_equal(levels(name, bits), expected)
    number = ~np.isnan(expected)  # a NaN has no sign worth keeping, a zero has
    np.testing.assert_array_equal(
        np.signbit(levels(name, bits))[number], np.signbit(expected)[number]
    )
    np.testing.assert_array_equal(codebook(name, bits).decode(patterns), expected)
    assert codebook(name, bits).top == top


@pytest.mark.parametrize("name", MINIFLOATS)
def test_float_codes_are_the_bits_of_a_saturating_round_to_even(name):
    bits, dtype, top = MINIFLOATS[name]
    rng = np.random.default_rng(3)
    y = rng.standard_normal(3001) * 10.0 ** rng.uniform(-9, 6, 3001)
    y = np.concatenate([y, midpoints(codebook(name, bits))[2]]).astype(np.float32)
    expected = np.clip(y, -top, top).astype(dtype)
    minus_zero = expected.astype(np.float32) == 0
    expected = np.where(minus_zero, 0, expected.view(np.uint8))
    np.testing.assert_array_equal(codebook(name, bits).encode(y), expected)


def test_e2m1_midpoints_go_to_the_even_mantissa():
    middle = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    book = codebook("e2m1", 4)
    np.testing.assert_array_equal(
        book.decode(book.encode(middle)), [0, 1, 1, 2, 2, 4, 4]
    )
    np.testing.assert_array_equal(
        book.decode(book.encode(-middle)), [0, -1, -1, -2, -2, -4, -4]
    )


@pytest.mark.parametrize("name", MINIFLOATS)
def test_encode_never_makes_nan_inf_or_minus_zero(name):
    bits, _, top = MINIFLOATS[name]
    book = codebook(name, bits)
    y = np.float32([-3e38, -1e5, -1e-45, -0.0, 0.0, 1e-45, 465, 61440, 3e38])
    y_hat = book.decode(book.encode(y))
    assert np.all(np.isfinite(y_hat))
    assert not np.any(np.signbit(y_hat) & (y_hat == 0))
    assert (y_hat[0], y_hat[-1]) == (-top, top)


# --- tables ---------------------------------------------------------------------------
def test_nf4_levels_are_as_published():
    book = codebook("nf4", 4)
    assert (book.values[0], book.values[7], book.values[15]) == (-1, 0, 1)
    # QLoRA builds 8 levels above zero and 7 below from normal quantiles between 1/2
    # and an offset, scaled to end at 1.
    from statistics import NormalDist

    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    quantile = np.vectorize(NormalDist().inv_cdf)
    up = quantile(np.linspace(offset, 0.5, 9)[:-1])[::-1] / quantile(offset)
    down = -quantile(np.linspace(offset, 0.5, 8)[:-1]) / quantile(offset)
    expected = np.concatenate([down, [0], up])
    np.testing.assert_allclose(levels("nf4", 4), expected, atol=2e-7)


def test_iq4_nl_levels_are_denser_around_zero_as_published():
    gaps = [23, 21, 18, 16, 14, 13, 12, 11, 12, 12, 13, 15, 16, 20, 24]
    np.testing.assert_array_equal(np.diff(levels("iq4_nl", 4)), gaps)
    assert levels("iq4_nl", 4)[8] == 1


def test_iq4_nl_codes_of_a_known_llama_cpp_block():
    i = np.arange(32)
    x = (((37 * i) % 64 - 31) / 8 + (i % 5) * 0.07).astype(np.float32)
    qs = np.frombuffer(bytes.fromhex("cf269d036be138be159cf35ad127be14"), np.uint8)
    book = codebook("iq4_nl", 4)
    extreme = x[np.abs(x).argmax()]
    codes = book.encode(x / (extreme / book.values[0]))
    np.testing.assert_array_equal(codes, np.concatenate([qs & 15, qs >> 4]))


def test_iq4_nl_midpoints_go_up_and_its_scale_has_a_sign():
    book = codebook("iq4_nl", 4)
    lower, upper, middle = midpoints(book)
    np.testing.assert_array_equal(book.encode(middle), upper)
    below = np.nextafter(middle.astype(np.float32), np.float32(-np.inf))
    np.testing.assert_array_equal(book.encode(below), lower)
    assert (book.scale, book.top, book.values[0]) == ("signed-extreme", 127, -127)


@pytest.mark.parametrize("name", ["nf4", "lloyd-max"])
def test_other_midpoints_go_down(name):
    book = codebook(name, 4)
    lower, upper, middle = midpoints(book)
    exact = middle.astype(np.float32) == middle
    assert np.any(exact)
    np.testing.assert_array_equal(book.encode(middle[exact]), lower[exact])
    above = np.nextafter(middle.astype(np.float32), np.float32(np.inf))
    np.testing.assert_array_equal(book.encode(above), upper)


# --- every codebook -------------------------------------------------------------------
@pytest.mark.parametrize(("name", "bits"), ALL)
def test_encode_inverts_decode(name, bits):
    book = codebook(name, bits)
    codes = book.order[:, None].repeat(3, axis=1)
    np.testing.assert_array_equal(book.encode(book.decode(codes)), codes)
    assert book.encode(book.decode(codes)).dtype == np.uint8
    assert book.decode(codes).dtype == np.float32


@pytest.mark.parametrize(("name", "bits"), ALL)
@settings(max_examples=25, deadline=None)
@given(y=st.lists(st.floats(-700, 700, width=32), min_size=1, max_size=40))
def test_encode_finds_the_nearest_level(name, bits, y):
    book = codebook(name, bits)
    y = np.float32([*y, *np.float32(y) / 256])
    distance = np.abs(y[:, None].astype(np.float64) - book.values[book.order])
    error = np.abs(y.astype(np.float64) - book.decode(book.encode(y)))
    np.testing.assert_array_equal(error, distance.min(axis=1))


@pytest.mark.parametrize(("name", "bits"), ALL)
def test_encode_finds_the_nearest_level_right_beside_every_midpoint(name, bits):
    book = codebook(name, bits)
    middle = midpoints(book)[2].astype(np.float32)
    y = np.nextafter(middle, np.float32([[-np.inf], [0], [np.inf]]), dtype=np.float32)
    y = np.concatenate([y, middle[None]])
    distance = np.abs(y[..., None].astype(np.float64) - book.values[book.order])
    error = np.abs(y.astype(np.float64) - book.decode(book.encode(y)))
    np.testing.assert_array_equal(error, distance.min(axis=-1))


@pytest.mark.parametrize(("name", "bits"), ALL)
def test_codebooks_are_built_once_and_cannot_be_changed(name, bits):
    book = codebook(name, bits)
    assert codebook(name, bits) is book
    for array in (book.values, book.order, book.thresholds):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("name", "bits", "message"),
    [
        ("nf5", 4, "codebook='nf5'; valid: lloyd-max, nf4"),
        ("symmetric", 4, "codebook='symmetric'; valid: lloyd-max"),
        ("nf4", 3, "bits=3 .*valid: 4"),
        ("e4m3", 4, "bits=4 .*valid: 8"),
        ("lloyd-max", 9, "bits=9 .*valid: 1, 2"),
        ("lloyd-max", 2.0, "bits=2.0 .*valid: 1, 2"),
    ],
)
def test_unknown_names_and_impossible_bits_are_refused(name, bits, message):
    with pytest.raises(ValueError, match=message):
        levels(name, bits)


# --- Lloyd-Max ------------------------------------------------------------------------
POSITIVE_LEVELS = {  # converged levels for N(0, 1); Max (1960) has four digits of them
    1: [0.7978846],
    2: [0.45278, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.94234, 1.256231, 1.618046, 2.069017, 2.73259],
}


@pytest.mark.parametrize("bits", POSITIVE_LEVELS)
def test_lloyd_max_levels_are_as_published(bits):
    half = lloyd_max(bits)[2 ** (bits - 1) :]
    np.testing.assert_allclose(half, POSITIVE_LEVELS[bits], atol=6e-7)


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_lloyd_max_level_is_the_mean_of_its_cell(bits):
    c = lloyd_max(bits)
    assert np.all(np.diff(c) > 0)
    np.testing.assert_array_equal(c, -c[::-1])
    half = c[len(c) // 2 :]
    P, M = normal_cells(np.concatenate([[0], (half[:-1] + half[1:]) / 2, [np.inf]]))
    np.testing.assert_allclose(half, M / P, rtol=0, atol=1e-12)


def test_normal_cells_agree_with_plain_numerical_integration():
    t = np.array([0, 0.31, 1.7, 4.2, np.inf])
    P, M = normal_cells(t)
    for i, (low, high) in enumerate(zip(t[:-1], np.minimum(t[1:], 12), strict=True)):
        x = np.linspace(low, high, 20_001)
        phi = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
        assert P[i] == pytest.approx(np.trapezoid(phi, x), rel=1e-6)
        assert M[i] == pytest.approx(np.trapezoid(x * phi, x), rel=1e-6)


# --- the error on Gaussian numbers, as known from the systems' own encoders -----------
def quantized(book, x, s):
    s = s.astype(np.float32)
    return s * book.decode(book.encode(x / s))


@pytest.mark.parametrize(("name", "nmse"), [("e4m3", 7e-4), ("e5m2", 2.79e-3)])
def test_float_codebooks_with_one_scale_have_the_known_gaussian_error(name, nmse):
    x = np.random.default_rng(5).standard_normal(640_000, np.float32)
    book = codebook(name, 8)
    x_hat = quantized(book, x, np.abs(x).max() / book.top)
    assert np.mean((x_hat - x) ** 2) == pytest.approx(nmse, rel=0.015)


def test_e2m1_with_power_of_two_scales_has_the_known_gaussian_error():
    x = np.random.default_rng(6).standard_normal((20_000, 32), np.float32)
    s = 2.0 ** (np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True))) - 2)
    x_hat = quantized(codebook("e2m1", 4), x, s)
    assert np.mean((x_hat - x) ** 2) == pytest.approx(0.0132, rel=0.01)


def test_iq4_nl_with_a_refined_scale_has_the_known_gaussian_error():
    x = np.random.default_rng(7).standard_normal((20_000, 32), np.float32)
    book = codebook("iq4_nl", 4)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    level = book.decode(book.encode(x / (extreme / book.values[0])))
    weight = x**2
    s = (weight * level * x).sum(axis=1) / (weight * level**2).sum(axis=1)
    assert np.mean((s[:, None] * level - x) ** 2) == pytest.approx(0.0061869, rel=0.01)
