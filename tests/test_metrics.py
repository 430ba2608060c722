import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kvq import metrics


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# --- stored numbers -------------------------------------------------------------------
def test_stored_number_errors_of_a_worked_example():
    x = np.array([[3.0, 0.0, -4.0], [0.0, 0.0, 0.0]])
    x_hat = np.array([[3.0, 0.5, -4.0], [0.0, -1.0, 0.0]])
    assert metrics.mse(x, x_hat) == pytest.approx(1.25 / 6)
    assert metrics.nmse(x, x_hat) == pytest.approx(1.25 / 25)
    assert metrics.sqnr_db(x, x_hat) == pytest.approx(13.0103, abs=1e-4)
    assert metrics.max_error(x, x_hat) == 1.0
    assert metrics.output_error(x, x_hat) == pytest.approx(math.sqrt(0.05))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_errors_are_computed_in_float64(dtype):
    x = np.full((7, 3), 256, dtype)  # its squares overflow float16
    x_hat = np.full((7, 3), 258, dtype)
    assert metrics.mse(x, x_hat) == 4.0
    assert metrics.nmse(x, x_hat) == 4 / 65536
    assert metrics.max_error(x, x_hat) == 2.0


def test_a_perfect_copy_has_infinite_sqnr():
    x = np.random.default_rng(0).standard_normal((2, 5, 3))
    assert metrics.sqnr_db(x, x.copy()) == math.inf
    assert metrics.nmse(x, x.copy()) == 0.0


def test_a_zero_signal_is_copied_perfectly_or_infinitely_badly():
    zero, other = np.zeros((2, 3)), np.full((2, 3), 1e-3)
    assert metrics.nmse(zero, zero) == 0.0
    assert metrics.sqnr_db(zero, zero) == math.inf
    assert metrics.nmse(zero, other) == math.inf
    assert metrics.sqnr_db(zero, other) == -math.inf
    assert metrics.output_error(zero, other) == math.inf


def test_empty_arrays_have_no_error():
    empty = np.zeros((3, 0, 5), np.float32)
    assert metrics.mse(empty, empty) == 0.0
    assert metrics.max_error(empty, empty) == 0.0
    assert metrics.sqnr_db(empty, empty) == math.inf
    assert metrics.score_error(np.ones((6, 2, 5)), empty, empty) == (0.0, 0.0)


@settings(max_examples=50, deadline=None)
@given(
    x=arrays(
        np.float32, array_shapes(max_dims=3), elements=st.floats(-99, 99, width=32)
    ),
    scale=st.floats(0.125, 8),
)
def test_nmse_does_not_depend_on_the_unit_and_mse_does(x, scale):
    x = x.astype(np.float64)
    x_hat = np.round(x)
    assert metrics.mse(scale * x, scale * x_hat) == pytest.approx(
        scale**2 * metrics.mse(x, x_hat)
    )
    if np.any(np.abs(x) > 1e-6):
        assert metrics.nmse(scale * x, scale * x_hat) == pytest.approx(
            metrics.nmse(x, x_hat)
        )


@pytest.mark.parametrize(
    "metric",
    [
        metrics.mse,
        metrics.nmse,
        metrics.sqnr_db,
        metrics.max_error,
        metrics.attention_kl,
        metrics.total_variation,
        metrics.output_error,
    ],
)
def test_different_shapes_are_refused_by_name(metric):
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(1, 4\)"):
        metric(np.ones((3, 4)), np.ones((1, 4)))


# --- logits ---------------------------------------------------------------------------
def test_logit_change_is_the_difference_of_the_logits_of_each_query_head():
    rng = np.random.default_rng(1)
    q = rng.standard_normal((6, 3, 5))
    k = rng.standard_normal((2, 7, 5))
    k_hat = k + 0.1 * rng.standard_normal(k.shape)
    delta = metrics.logit_change(q, k, k_hat)
    assert delta.shape == (6, 3, 7)
    for head in range(6):
        before = q[head] @ k[head // 3].T / math.sqrt(5)
        after = q[head] @ k_hat[head // 3].T / math.sqrt(5)
        np.testing.assert_allclose(delta[head], after - before, atol=1e-14)
    largest, rms = metrics.score_error(q, k, k_hat)
    assert largest == pytest.approx(np.abs(delta).max())
    assert rms == pytest.approx(np.linalg.norm(delta) / math.sqrt(delta.size))


def test_score_error_of_a_worked_example():
    q = np.array([[[2.0, 0.0, 0.0, 1.0]]])
    k = np.zeros((1, 2, 4))
    k_hat = np.array([[[0.5, 9.0, 9.0, 0.0], [0.0, 9.0, 9.0, -3.0]]])
    np.testing.assert_allclose(metrics.logit_change(q, k, k_hat), [[[0.5, -1.5]]])
    assert metrics.score_error(q, k, k_hat) == pytest.approx((1.5, math.sqrt(1.25)))
    assert metrics.logit_spread([[0.5, -1.5], [2.0, 2.0]]).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("q", "k", "k_hat", "message"),
    [
        ((6, 3, 5), (2, 7, 5), (2, 8, 5), r"\(2, 7, 5\) and \(2, 8, 5\)"),
        ((6, 3, 4), (2, 7, 5), (2, 7, 5), r"\(6, 3, 4\) and k \(2, 7, 5\)"),
        ((5, 3, 5), (2, 7, 5), (2, 7, 5), r"\(5, 3, 5\), k \(2, 7, 5\)"),
    ],
)
def test_score_error_refuses_shapes_that_do_not_match(q, k, k_hat, message):
    with pytest.raises(ValueError, match=message):
        metrics.score_error(np.ones(q), np.ones(k), np.ones(k_hat))


# --- attention weights ----------------------------------------------------------------
def test_weight_errors_of_a_worked_example():
    p = np.array([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
    p_hat = np.array([[0.25, 0.75, 0.0], [0.25, 0.25, 0.5]])
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    np.testing.assert_allclose(metrics.attention_kl(p, p_hat), [kl, 0.0])
    np.testing.assert_allclose(metrics.total_variation(p, p_hat), [0.25, 0.0])


def test_kl_is_infinite_where_a_weight_was_lost_and_zero_where_none_was():
    assert metrics.attention_kl([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert metrics.attention_kl([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2))
    assert metrics.attention_kl([1.0, 0.0], [1.0, 0.0]) == 0.0
    assert metrics.attention_kl([1.0, 0.0], [5e-324, 1.0]) == pytest.approx(
        744.44, abs=0.01
    )


def test_kl_of_nearly_equal_weights_is_not_negative():
    rng = np.random.default_rng(2)
    s = rng.standard_normal((400, 11))
    p, p_hat = softmax(s), softmax(s + 1e-9 * rng.standard_normal(s.shape))
    assert np.all(metrics.attention_kl(p, p_hat) >= 0)


@settings(max_examples=50, deadline=None)
@given(
    s=arrays(np.float64, (2, 3, 5), elements=st.floats(-20, 20)),
    t=arrays(np.float64, (2, 3, 5), elements=st.floats(-20, 20)),
)
def test_total_variation_and_kl_obey_pinsker(s, t):
    p, p_hat = softmax(s), softmax(t)
    tv, kl = metrics.total_variation(p, p_hat), metrics.attention_kl(p, p_hat)
    assert tv.shape == kl.shape == (2, 3)
    assert np.all(tv <= 1 + 1e-15)
    assert np.all(2 * tv**2 <= kl + 1e-15)
