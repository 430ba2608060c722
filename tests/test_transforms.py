import numpy as np
import pytest

from kvq import transforms
from kvq.attention import attention_weights
from kvq.transforms import hadamard, hadamard_matrix, random_signs, rope, smooth_keys

WIDTHS = [1, 2, 4, 8, 64, 128, 256]


@pytest.mark.parametrize("D", WIDTHS)
def test_hadamard_matrix_is_orthonormal_symmetric_and_of_one_size(D):
    H = hadamard_matrix(D)
    np.testing.assert_allclose(H @ H.T, np.eye(D), atol=1e-12)
    np.testing.assert_array_equal(H, H.T)
    np.testing.assert_allclose(np.abs(H), D**-0.5)
    i, j = 5 % D, 3 % D
    assert np.sign(H[i, j]) == (-1) ** bin(i & j).count("1")


@pytest.mark.parametrize("D", WIDTHS)
def test_butterflies_equal_the_matrix(D, make):
    x = make((2, 3, D))
    np.testing.assert_allclose(
        hadamard(x), x @ hadamard_matrix(D), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)
    assert hadamard(x).dtype == np.float32


@pytest.mark.parametrize("D", [0, 3, 20, 80, 96, 576])
def test_a_rotation_needs_a_power_of_two(D):
    for call in (lambda: hadamard(np.zeros((2, D))), lambda: hadamard_matrix(D)):
        with pytest.raises(ValueError, match=f"power of two, not D={D}"):
            call()


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 4), (0, 1)])
def test_rotating_nothing_gives_nothing(shape):
    for name in (None, "hadamard", "signed-hadamard"):
        y = transforms.apply(name, np.zeros(shape, np.float32))
        assert transforms.invert(name, y).shape == shape


@pytest.mark.parametrize("name", ["hadamard", "signed-hadamard"])
def test_a_rotation_keeps_scores_and_is_undone(name, make):
    q, k = make((3, 5, 64)), make((3, 7, 64), 1)
    rotated = transforms.apply(name, q) @ transforms.apply(name, k).swapaxes(-1, -2)
    np.testing.assert_allclose(rotated, q @ k.swapaxes(-1, -2), rtol=2e-5, atol=2e-3)
    back = transforms.invert(name, transforms.apply(name, k))
    np.testing.assert_allclose(back, k, rtol=1e-5, atol=2e-5)


def test_a_rotation_spreads_one_large_number_over_all_channels():
    x = np.zeros((1, 64), np.float32)
    x[0, 17] = 8
    for name in ("hadamard", "signed-hadamard"):
        np.testing.assert_array_equal(np.abs(transforms.apply(name, x)), 1)


def test_the_largest_input_survives_a_rotation_and_its_inverse():
    x = np.full((1, 2, 4096), 2.0**100, np.float32)
    y = transforms.apply("hadamard", x)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(transforms.invert("hadamard", y), x)


def test_signs_are_fixed_balanced_and_read_only():
    signs = random_signs(128)
    assert set(signs.tolist()) == {-1, 1}
    assert signs.dtype == np.float32
    np.testing.assert_array_equal(signs, random_signs(128))
    assert (signs != random_signs(128, seed=1)).any()
    assert abs(signs.sum()) < 40
    with pytest.raises(ValueError, match="read-only"):
        signs[0] = 0


def test_transforms_leave_their_input_alone(make):
    x = make((2, 3, 8))
    before = x.copy()
    transforms.apply("signed-hadamard", x)
    transforms.invert("signed-hadamard", x)
    rope(x, range(3))
    smooth_keys(x)
    np.testing.assert_array_equal(x, before)


# --- RoPE -----------------------------------------------------------------------------
def test_rope_turns_each_pair_like_a_complex_number(make):
    x, positions = make((2, 5, 12)), [0, 1, 2, 7, 1000]
    first, second = x[..., :6].astype(complex), x[..., 6:]
    for i in range(6):
        angle = np.array(positions) * 500.0 ** (-2 * i / 12)
        turned = (first[..., i] + 1j * second[..., i]) * np.exp(1j * angle)
        y = rope(x, positions, base=500.0)
        np.testing.assert_allclose(y[..., i], turned.real, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(y[..., i + 6], turned.imag, rtol=1e-12, atol=1e-12)


def test_rope_is_undone_keeps_norms_and_leaves_position_zero(make):
    x = make((2, 9, 16)).astype(np.float64)
    y = rope(x, range(9))
    np.testing.assert_allclose(rope(y, range(9), inverse=True), x, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1))
    np.testing.assert_array_equal(y[:, 0], x[:, 0])


def test_scores_after_rope_depend_on_the_distance_alone(make):
    q, k = make((1, 1, 16)), make((1, 1, 16), 1)
    score = [
        (rope(q, [p + 5]) @ rope(k, [p]).swapaxes(-1, -2)).item() for p in (0, 3, 400)
    ]
    np.testing.assert_allclose(score, score[0], rtol=1e-9)


def test_rope_needs_pairs():
    with pytest.raises(ValueError, match="D=7 is odd"):
        rope(np.zeros((3, 7)), range(3))


# --- smoothing ------------------------------------------------------------------------
def test_smoothed_keys_have_mean_zero_and_the_same_attention_weights(kv):
    k, _, q = kv
    smooth, mean = smooth_keys(k)
    assert mean.shape == (2, 1, 16)
    np.testing.assert_allclose(smooth + mean, k, rtol=1e-12)
    np.testing.assert_allclose(smooth.mean(axis=-2), 0, atol=1e-12)
    weights = attention_weights(q, k, causal=True)
    np.testing.assert_allclose(attention_weights(q, smooth, causal=True), weights)
