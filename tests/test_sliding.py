"""A cache that slides: old tokens are not seen, and not kept."""

import numpy as np
import pytest

from kvq import KVCache, Policy, Scheme, attention
from kvq.scheme import FP16, PRESETS

KIVI = Policy(
    key=Scheme(4, "channel", 32, "asymmetric"),
    value=Scheme(4, "token", 32, "asymmetric"),
    residual=16,
    sinks=3,
)
POLICIES = {
    "fp16": PRESETS["fp16"],
    "int4-token-g64": PRESETS["int4-token-g64"],
    "kivi with sinks": KIVI,
}


def tensors(T, seed=0):
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((2, T, 64)).astype(np.float16)
    v = rng.standard_normal((2, T, 48)).astype(np.float16)
    return k, v


def seen(T, T_q, W, sinks):
    """Which of T tokens the newest T_q queries see, by the definition."""
    return np.array(
        [
            [t <= p and (t < sinks or p - t < W) for t in range(T)]
            for p in range(T - T_q, T)
        ]
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunks", [[300], [1] * 300, [7] * 42 + [6], [128, 5, 167]])
def test_attention_is_that_of_a_whole_cache_under_a_mask(name, chunks):
    W, policy = 50, POLICIES[name]
    k, v = tensors(300)
    q = np.random.default_rng(1).standard_normal((6, 5, 64))
    sliding, whole = KVCache(policy, sliding_window=W), KVCache(policy)
    start = 0
    for n in chunks:
        for cache in (sliding, whole):
            cache.append(k[:, start : start + n], v[:, start : start + n])
        start += n
        T_q = min(n, 5)
        mask = seen(start, T_q, W, policy.sinks)[None]
        mask = np.broadcast_to(mask, (6, T_q, start))
        np.testing.assert_allclose(
            sliding.attend(q[:, :T_q]),
            whole.attend(q[:, :T_q], mask=mask),
            rtol=1e-12,
            atol=1e-12,
        )


def test_A32_old_tokens_are_never_seen_and_bytes_stay_constant():
    """rajveer43/VeloxQuant-MLX#274: the window never evicts, and len() hides it."""
    T, W = 500, 32
    k, v = tensors(T)
    v[:, : T - W] = 3e4
    cache = KVCache("int8-token", sliding_window=W)
    sizes = []
    for t in range(T):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        sizes.append(cache.nbytes)
    assert np.abs(cache.attend(np.ones((6, 1, 64)))).max() < 10
    assert len(set(sizes[W - 1 :])) == 1
    assert len(cache) == W


@pytest.mark.parametrize("name", POLICIES)
def test_at_most_a_block_more_than_the_window_is_kept(name):
    policy = POLICIES[name]
    k, v = tensors(400)
    cache = KVCache(policy, sliding_window=64)
    for t in range(400):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        assert min(t + 1, 64) <= len(cache) < policy.sinks + 64 + policy.block


def test_rows_slide_by_their_own_lengths():
    k, v = tensors(200)
    batch = KVCache("int4-token-g64", sliding_window=40)
    mask = np.arange(200) >= np.array([[0], [150]])
    batch.append(np.stack([k, k]), np.stack([v, v]), mask=mask)
    batch.append(np.stack([k, k])[:, :, :1], np.stack([v, v])[:, :, :1])
    assert batch.lengths == [40, 40]
    alone = KVCache("int4-token-g64", sliding_window=40)
    alone.append(k[:, 150:], v[:, 150:])
    alone.append(k[:, :1], v[:, :1])
    np.testing.assert_array_equal(batch.keys(1), alone.keys())


def test_crop_gives_back_the_newest_tokens_only():
    k, v = tensors(100)
    cache = KVCache("fp16", sliding_window=30)
    for t in range(100):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
    cache.crop(20)
    np.testing.assert_array_equal(cache.keys(), k[:, 70:90])
    cache.append(k[:, 90:], v[:, 90:])
    np.testing.assert_array_equal(cache.keys(), k[:, 70:])


def test_A31_layers_of_both_kinds_in_one_model():
    """ml-explore/mlx-lm#1573: 35 of 42 layers slide, and the first request dies."""
    k, v = tensors(150)
    q = np.random.default_rng(2).standard_normal((6, 1, 64))
    layers = [KVCache("kivi-4", sliding_window=129) for _ in range(5)]
    layers.append(KVCache("kivi-4"))
    for cache in layers:
        cache.append(k, v)
    exact = attention(q, k, v, causal=True)
    near = attention(q, k[:, 21:], v[:, 21:], causal=True)
    for cache in layers[:5]:
        assert np.abs(cache.attend(q) - near).max() < 0.05
    assert np.abs(layers[5].attend(q) - exact).max() < 0.05


@pytest.mark.parametrize("W", [0, -1, 2.5, True, 128, "64"])
def test_an_impossible_window_is_refused_at_construction(W):
    with pytest.raises(ValueError, match=r"sliding_window=.*; valid: an integer > 128"):
        KVCache("kivi-4", sliding_window=W)


def test_full_precision_slides_too():
    k, v = tensors(80)
    cache = KVCache(Policy(FP16, FP16), sliding_window=10)
    cache.append(k, v)
    out = cache.attend(np.zeros((2, 1, 64)))
    np.testing.assert_allclose(
        out[:, 0], v[:, 70:].astype(float).mean(axis=1), rtol=1e-12
    )
