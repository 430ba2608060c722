import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvq import bounds
from kvq.codebooks import codebook
from kvq.metrics import (
    attention_kl,
    logit_change,
    logit_spread,
    output_error,
    total_variation,
)
from kvq.quantizer import from_codes, scale_and_zero, to_codes
from kvq.scheme import Scheme


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def printed(value, digits):
    """`value` with that many significant digits, as a published table prints it."""
    return float(f"{value:.{digits}g}")


# --- the uniform quantizer ------------------------------------------------------------
def test_uniform_step_predicts_the_largest_and_the_mean_squared_error():
    step = 0.37
    x = np.random.default_rng(0).uniform(-50, 50, 200_000)
    error = np.abs(step * np.rint(x / step) - x)
    assert (
        0.999 * bounds.max_error(step) < error.max() <= bounds.max_error(step) + 1e-14
    )
    assert np.mean(error**2) == pytest.approx(bounds.granular_mse(step), rel=0.01)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("xmax", "sigma"), [(1.0, 1.0), (6.0, 1.5)])
def test_each_bit_is_worth_6_02_db(bits, xmax, sigma):
    textbook = 6.0206 * bits + 4.7712 - 20 * math.log10(xmax / sigma)
    assert bounds.uniform_sqnr_db(bits, xmax, sigma) == pytest.approx(
        textbook, abs=1e-3
    )


# --- the best scalar quantizers of N(0, 1) --------------------------------------------
# bits: Lloyd-Max MSE, its SQNR in dB, uniform MSE, its step. The columns up to 7 bits
# are known to these digits. At 8 bits Lloyd's own iteration, started from Gaussian
# quantiles, is at 4.1189e-5 after 30,000 rounds and settles at the value below after
# 60,000; larger published values come from stopping it early.
PUBLISHED = {
    1: (0.363380, 4.40, 0.363380, 1.59577),
    2: (0.117482, 9.30, 0.118846, 0.99569),
    3: (0.0345478, 14.62, 0.0374397, 0.58602),
    4: (0.00950101, 20.22, 0.0115429, 0.33520),
    5: (0.00250467, 26.01, 0.00349521, 0.18814),
    6: (6.4424e-4, 31.91, 0.00104005, 0.10406),
    7: (1.63478e-4, 37.87, 3.04333e-4, 0.05687),
    8: (4.11851e-5, 43.85, 8.76862e-5, 0.03076),
}


@pytest.mark.parametrize("row", bounds.gaussian_table(), ids=lambda row: row["bits"])
def test_gaussian_table_has_the_published_digits(row):
    lloyd_max, sqnr, uniform, step = PUBLISHED[row["bits"]]
    digits = 5 if row["bits"] == 6 else 6
    assert printed(row["lloyd_max_mse"], digits) == lloyd_max
    assert round(row["lloyd_max_sqnr_db"], 2) == sqnr
    assert printed(row["uniform_mse"], 6) == uniform
    assert round(row["uniform_step"], 5) == step
    assert row["rate_distortion"] == 2.0 ** (-2 * row["bits"])
    assert row["panter_dite"] == pytest.approx(
        2.7207 * row["rate_distortion"], rel=1e-4
    )


def test_no_scalar_quantizer_passes_the_rate_distortion_bound():
    for row in bounds.gaussian_table():
        assert row["rate_distortion"] < row["lloyd_max_mse"] < row["panter_dite"]
        assert row["lloyd_max_mse"] <= row["uniform_mse"] * (1 + 1e-12)
    ratio = [
        row["lloyd_max_mse"] / row["panter_dite"] for row in bounds.gaussian_table()
    ]
    assert ratio == sorted(ratio)
    assert ratio[-1] > 0.99


@pytest.mark.parametrize("bits", [1, 3, 4, 6])
def test_lloyd_max_codebook_reaches_its_predicted_error(bits):
    x = np.random.default_rng(bits).standard_normal(400_000, np.float32)
    book = codebook("lloyd-max", bits)
    measured = np.mean((book.decode(book.encode(x)) - x) ** 2)
    assert measured == pytest.approx(bounds.lloyd_max_mse(bits), rel=0.01)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_optimal_uniform_step_is_a_minimum_of_the_measured_error(bits):
    x = np.random.default_rng(9).standard_normal(400_000)
    step, predicted = bounds.optimal_uniform(bits)

    def measured(s):
        k = np.clip(np.floor(x / s), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
        return np.mean((k * s - x) ** 2)

    assert measured(step) == pytest.approx(predicted, rel=0.01)
    assert measured(step) < measured(0.9 * step)
    assert measured(step) < measured(1.1 * step)


# --- groups ---------------------------------------------------------------------------
GROUP_MAX = {
    16: (2.0772, 3.5320),
    32: (2.3471, 4.1393),
    64: (2.5961, 4.6875),
    128: (2.8276, 5.1892),
    256: (3.0442, 5.6537),
    512: (3.2484, 6.0878),
    1024: (3.4419, 6.4965),
}


@pytest.mark.parametrize("G", GROUP_MAX)
def test_expected_extremes_have_the_published_digits(G):
    assert round(bounds.expected_group_max(G), 4) == GROUP_MAX[G][0]
    assert round(bounds.expected_group_range(G), 4) == GROUP_MAX[G][1]
    assert bounds.expected_group_max(G) < math.sqrt(2 * math.log(2 * G))


def test_expected_extremes_of_one_and_two_numbers():
    assert bounds.expected_group_max(1) == pytest.approx(
        math.sqrt(2 / math.pi), abs=1e-6
    )
    assert bounds.expected_group_max(1, 2) == pytest.approx(1, abs=1e-6)
    assert (bounds.expected_group_range(1), bounds.expected_group_range(1, 2)) == (0, 0)
    # The difference of two numbers is N(0, 2).
    assert bounds.expected_group_range(2) == pytest.approx(2 / math.sqrt(math.pi), 2e-4)
    assert bounds.expected_group_range(2, 2) == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("G", [5, 48])
def test_expected_squared_extremes_agree_with_simulation(G):
    x = np.random.default_rng(G).standard_normal((60_000, G))
    m2, r2 = np.mean(np.abs(x).max(axis=1) ** 2), np.mean(np.ptp(x, axis=1) ** 2)
    assert bounds.expected_group_max(G, 2) == pytest.approx(m2, rel=0.01)
    assert bounds.expected_group_range(G, 2) == pytest.approx(r2, rel=0.01)


# (bits, G): error of symmetric and of asymmetric levels, 20,000 simulated groups.
SIMULATED = {
    (2, 32): (0.434, 0.154),
    (2, 64): (0.513, 0.203),
    (2, 128): (0.588, 0.251),
    (3, 32): (0.0516, 0.0281),
    (3, 64): (0.0630, 0.0369),
    (3, 128): (0.0749, 0.0457),
    (4, 32): (0.00939, 0.00610),
    (4, 64): (0.01162, 0.00805),
    (4, 128): (0.01377, 0.00996),
    (8, 32): (2.86e-5, 2.11e-5),
}


def measured_group_mse(bits, G, levels):
    """The reference quantizer's error on 20,000 groups of G Gaussian numbers."""
    x = np.random.default_rng(G).standard_normal((1, 20_000, G), np.float32)
    scheme = Scheme(bits, "token", G, levels, scale_dtype="float32")
    scale, zero = scale_and_zero(x, scheme)
    x_hat = from_codes(to_codes(x, scale, zero, scheme), scale, zero, scheme)
    return np.mean((x_hat - x) ** 2)


@pytest.mark.parametrize(("bits", "G"), SIMULATED)
def test_measured_group_error_is_the_published_and_the_predicted_one(bits, G):
    for levels, published in zip(
        ("symmetric", "asymmetric"), SIMULATED[bits, G], strict=True
    ):
        measured = measured_group_mse(bits, G, levels)
        assert measured == pytest.approx(published, rel=0.015)
        if bits > 2 or levels == "asymmetric":
            assert bounds.group_mse(bits, G, levels) == pytest.approx(
                measured, rel=0.02
            )


def test_two_symmetric_bits_are_beyond_the_group_model():
    excess = {G: bounds.group_mse(2, G) / SIMULATED[2, G][0] - 1 for G in (32, 128)}
    assert excess[32] == pytest.approx(0.06, abs=0.01)
    assert excess[128] == pytest.approx(0.15, abs=0.01)


def test_group_model_says_that_numbers_that_set_the_scale_are_exact():
    assert bounds.group_mse(4, 1) == 0
    assert bounds.group_mse(4, 1, "asymmetric") == 0
    assert bounds.group_mse(4, 2, "asymmetric") == 0


@pytest.mark.parametrize(
    ("bits", "levels", "message"),
    [
        (4, "nf4", "levels='nf4'; valid: symmetric, asymmetric"),
        (1, "symmetric", "bits=1 .*valid: 2, 3"),
        (9, "asymmetric", "bits=9 .*valid: 1, 2"),
    ],
)
def test_group_model_refuses_what_it_does_not_describe(bits, levels, message):
    with pytest.raises(ValueError, match=message):
        bounds.group_mse(bits, 32, levels)


# --- one group with its stored metadata -----------------------------------------------
@pytest.mark.parametrize("levels", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
@settings(max_examples=25, deadline=None)
@given(
    x=arrays(np.float32, (1, 3, 7), elements=st.floats(-1e6, 1e6, width=32)),
    bits=st.integers(2, 8),
    unit=st.sampled_from([1e-38, 1e-6, 1, 1e30]),
)
def test_no_number_is_further_off_than_its_groups_metadata_allows(
    levels, scale_dtype, x, bits, unit
):
    x = x * np.float32(unit)
    x[0, 1] = x[0, 1, 0]  # a constant group
    scheme = Scheme(bits, "token", None, levels, scale_dtype)
    scale, zero = scale_and_zero(x, scheme)
    codes = to_codes(x, scale, zero, scheme)
    x_hat = from_codes(codes, scale, zero, scheme).astype(np.float64)
    bound = bounds.group_error_bound(
        x, bits, scale[..., 0], None if zero is None else zero[..., 0]
    )
    assert bound.shape == (1, 3)
    assert np.all(np.abs(x_hat - x).max(axis=-1) <= bound)


def test_group_error_bound_is_half_a_step_where_metadata_is_exact():
    x = np.float32([[0, 1, 4.5, 15], [-3, 2, 2.5, 3]])
    zero, symmetric_zero = np.float32([0, -3]), None
    asymmetric = bounds.group_error_bound(x, 4, np.float32([1, 0.4]), zero)
    np.testing.assert_allclose(asymmetric, [0.5, 0.2], rtol=1e-4)
    symmetric = bounds.group_error_bound(x, 3, np.float32([5, 1]), symmetric_zero)
    np.testing.assert_allclose(symmetric, [2.5, 0.5], rtol=1e-4)


def test_group_error_bound_counts_rounded_metadata():
    x = np.float32([[-1, 0, 14]])
    bound = bounds.group_error_bound(x, 4, np.float32([1.25]), np.float32([-1.5]))
    np.testing.assert_allclose(bound, [0.5 + 15 * 0.25 + 0.5], rtol=1e-4)


def test_float32_rounding_breaks_the_half_step_but_not_the_bound():
    x = np.random.default_rng(8).standard_normal((1, 4000, 7)) + 1000
    x = x.astype(np.float32)
    scheme = Scheme(8, "token", None, "asymmetric", "float32")
    scale, zero = scale_and_zero(x, scheme)
    x_hat = from_codes(to_codes(x, scale, zero, scheme), scale, zero, scheme)
    error = np.abs(x_hat.astype(np.float64) - x).max(axis=-1)
    assert np.any(error > np.ptp(x.astype(np.float64), axis=-1) / 255 / 2 * 1.001)
    assert np.all(error <= bounds.group_error_bound(x, 8, scale[..., 0], zero[..., 0]))


# --- from the cache to the logits -----------------------------------------------------
def per_channel_keys(seed, T=3000, D=6):
    """Queries (5, D), keys (T, D) with a wide channel, rounded keys, steps (D,)."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((5, D)), rng.standard_normal((T, D))
    k[:, 2] *= 40
    step = np.ptp(k, axis=0) / 15
    return q, k, k.min(axis=0) + step * np.rint((k - k.min(axis=0)) / step), step


def test_score_error_stays_within_its_bound_and_has_its_variance():
    q, k, k_hat, step = per_channel_keys(1)
    error = q @ (k_hat - k).T
    bound = bounds.score_error_bound(q, step)
    assert bound.shape == (5,)
    assert np.all(np.abs(error).max(axis=1) <= bound)
    assert np.all(np.abs(error).max(axis=1) > 0.5 * bound)
    variance = bounds.score_error_variance(q, step)
    np.testing.assert_allclose(error.var(axis=1), variance, rtol=0.1)


def test_score_error_bound_is_attained_by_the_worst_signs():
    q, step = np.array([3.0, -0.5, 0.0, 2.0]), 0.25
    worst = np.sign(q) * step / 2
    assert bounds.score_error_bound(q, step) == pytest.approx(q @ worst)
    assert bounds.score_error_bound(q, step) == 5.5 * 0.125
    assert bounds.score_error_variance(q, step) == pytest.approx(13.25 * 0.0625 / 12)


def test_qjl_estimate_is_unbiased_and_has_its_variance():
    rng = np.random.default_rng(4)
    D, m, trials = 12, 20, 6000
    q = rng.standard_normal(D)
    k = 3 * q + rng.standard_normal(D)  # nearly parallel: (q . k)^2 counts
    S = rng.standard_normal((trials, m, D))
    sign_dot = np.sum((S @ q) * np.sign(S @ k), axis=1)
    estimate = math.sqrt(math.pi / 2) / m * np.linalg.norm(k) * sign_dot
    variance = bounds.qjl_variance(q, k, m)
    assert estimate.mean() == pytest.approx(q @ k, abs=4 * math.sqrt(variance / trials))
    assert estimate.var() == pytest.approx(variance, rel=0.06)


# --- from the logits to the weights ---------------------------------------------------
@settings(max_examples=50, deadline=None)
@given(
    s=arrays(np.float64, (3, 9), elements=st.floats(-8, 8)),
    delta=arrays(np.float64, (3, 9), elements=st.floats(-3, 3)),
    shift=st.floats(-5, 5),
)
def test_softmax_moves_no_further_than_its_bounds(s, delta, shift):
    p, p_hat = softmax(s), softmax(s + delta + shift)
    omega = logit_spread(delta)
    tv, kl = total_variation(p, p_hat), attention_kl(p, p_hat)
    assert np.all(tv <= bounds.softmax_tv_bound(omega) + 1e-14)
    assert np.all(kl <= bounds.softmax_kl_bound(omega) + 1e-14)


@pytest.mark.parametrize("omega", [1e-3, 0.5, 2.0, 10.0])
def test_two_tokens_attain_the_total_variation_bound(omega):
    s = np.array([-omega / 4, omega / 4])
    tv = total_variation(softmax(s), softmax(-s))
    assert tv == pytest.approx(float(bounds.softmax_tv_bound(omega)), rel=1e-9)


def test_kl_bound_is_tight_for_small_changes_and_zero_for_none():
    s, delta = np.zeros(2), np.array([0.5e-3, -0.5e-3])
    kl = attention_kl(softmax(s), softmax(s + delta))
    assert kl == pytest.approx(float(bounds.softmax_kl_bound(1e-3)), rel=1e-5)
    assert bounds.softmax_tv_bound(0.0) == bounds.softmax_kl_bound(0.0) == 0


# --- from the weights to the output ---------------------------------------------------
def attention(q, k, v):
    p = softmax(q @ k.T / math.sqrt(q.shape[-1]))
    return p, p @ v


@pytest.mark.parametrize("seed", range(4))
def test_output_error_stays_within_its_bound(seed):
    q, k, k_hat, _ = per_channel_keys(seed, T=37)
    k, k_hat = k / 10, k_hat / 10
    v = np.random.default_rng(seed + 50).standard_normal((37, 4)) + 9
    v_hat = np.round(4 * v) / 4
    (p, o), (p_hat, o_hat) = attention(q, k, v), attention(q, k_hat, v_hat)
    value_error = np.linalg.norm(v_hat - v, axis=-1).max()
    tv = bounds.softmax_tv_bound(
        logit_spread(logit_change(q[None], k[None], k_hat[None]))
    )
    for moved in (total_variation(p, p_hat), tv[0]):
        bound = bounds.output_error_bound(moved, bounds.value_radius(v), value_error)
        assert np.all(np.linalg.norm(o_hat - o, axis=-1) <= bound)
    assert output_error(o, o_hat) <= bound.max() / np.linalg.norm(o, axis=-1).min()


def test_output_bound_is_attained_by_opposite_values():
    v = np.array([[-1.0, 3.0], [5.0, 3.0]])
    assert bounds.value_radius(v) == 3.0
    p, p_hat = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    moved = np.linalg.norm(p_hat @ v - p @ v)
    bound = bounds.output_error_bound(total_variation(p, p_hat), 3.0, 0.0)
    assert moved == bound == 6.0
