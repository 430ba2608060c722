"""The numbers that introductions to KV-cache quantization quote, reproduced by code.

Two worked examples recur: a model with 32 layers, 8 KV heads and head dimension 128
that has read 8,192 tokens, and LLaMA-7B with 32 users of 2,048 tokens. Others are five
numbers that share a scale, and two logits whose order a small key error turns round.
"""

import math

import numpy as np
import pytest

from kvq import bounds, metrics
from kvq.attention import attention_weights, scores
from kvq.cache import KVCache
from kvq.hardware import GIB, MIB
from kvq.memory import (
    ModelShape,
    cache_bytes,
    fits,
    format_bytes,
    ideal_bytes,
    max_batch,
    max_tokens,
)
from kvq.scheme import PRESETS, Policy, Scheme
from kvq.tensor import quantize

SHAPE = ModelShape(layers=32, kv_heads=8, head_dim=128)
LLAMA_7B = ModelShape.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
)


def stored_bits(tensor):
    """Bits that the arrays of a stored tensor take, counted from the arrays."""
    return 8 * sum(a.nbytes for a in tensor.arrays)


# --- 8,192 tokens, 32 layers, 8 KV heads, head dimension 128 --------------------------
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bit_cache_of_8192_tokens_is_1_gib(name):
    nbytes = cache_bytes(name, SHAPE, tokens=8192)
    assert nbytes == 1_073_741_824 == 2 * 32 * 8192 * 8 * 128 * 2
    assert format_bytes(nbytes) == "1.00 GiB"


@pytest.mark.parametrize(("bits", "ratio"), [(8, 2), (4, 4), (2, 8)])
def test_ideal_ratio_against_bf16(bits, ratio):
    bf16 = cache_bytes("bf16", SHAPE, tokens=8192)
    assert bf16 / ideal_bytes(SHAPE, bits, 8192) == ratio


@pytest.mark.parametrize(("bits", "ratio"), [(8, 2), (4, 4), (2, 8)])
def test_codes_alone_reach_the_ideal_ratio(bits, ratio):
    x = np.random.default_rng(bits).standard_normal((3, 7, 128)).astype(np.float16)
    codes = quantize(x, Scheme(bits, "token", 64)).codes
    assert x.nbytes / codes.nbytes == ratio


def test_ideal_4_bits_are_256_mib():
    assert ideal_bytes(SHAPE, 4, 8192) == 256 * MIB


def test_4_bits_and_a_scale_per_64_take_0_53125_bytes_per_number():
    scheme = PRESETS["int4-token-g64"].key
    assert scheme.bits_per_element(T=8192, D=128) / 8 == 0.53125
    x = np.random.default_rng(1).standard_normal((3, 5, 128))
    assert stored_bits(quantize(x, scheme)) / x.size / 8 == 0.53125


def test_4_bits_and_a_scale_per_64_are_272_mib_and_3_76_times_smaller():
    nbytes = cache_bytes("int4-token-g64", SHAPE, tokens=8192)
    assert nbytes == 272 * MIB
    assert round(cache_bytes("bf16", SHAPE, tokens=8192) / nbytes, 2) == 3.76


def test_a_cache_that_exists_is_as_small_as_planned():
    k, v = np.random.default_rng(2).standard_normal((2, 8, 96, 128))
    cache = KVCache("int4-token-g64")
    cache.append(k.astype(np.float16), v.astype(np.float16))
    per_token_and_layer = cache.nbytes / 96
    assert 32 * 8192 * per_token_and_layer == 272 * MIB


def test_100_contexts_fall_from_100_to_26_6_gib():
    full = cache_bytes("bf16", SHAPE, tokens=8192, batch=100)
    small = cache_bytes("int4-token-g64", SHAPE, tokens=8192, batch=100)
    assert full == 100 * GIB
    assert round(small / GIB, 1) == 26.6


# --- five numbers and their scales ----------------------------------------------------
SMALL, LARGE = [0.03, -0.07, 0.12, 0.09], [6.4]


def test_with_one_scale_the_four_small_numbers_become_zero():
    stored = quantize(np.array(SMALL + LARGE), Scheme(4, "token", 5))
    assert stored.scale.size == 1
    x_hat = stored.dequantize().ravel()
    assert x_hat[:4].tolist() == [0, 0, 0, 0]
    assert x_hat[4] == pytest.approx(6.4, rel=2**-11)


def test_with_scales_of_their_own_they_do_not():
    stored = quantize(np.array(SMALL + LARGE), Scheme(4, "token", 4))
    assert stored.scale.size == 2
    error = np.abs(stored.dequantize().ravel() - (SMALL + LARGE))
    assert (stored.dequantize().ravel()[:4] != 0).all()
    assert error[:4].max() <= 0.12 / 7 / 2
    assert error[4] <= 6.4 * 2**-11


def test_the_better_groups_cost_one_more_scale():
    x = np.array(SMALL + LARGE)
    one, two = (stored_bits(quantize(x, Scheme(4, "token", G))) for G in (5, 4))
    assert two - one == 16


# --- two logits -----------------------------------------------------------------------
# Scores are q . k / sqrt(4) = the sum of the key's four numbers. The third token sets
# the scale that all share: 1.4 / 7 = 0.2.
QUERY = np.full((1, 1, 4), 2.0)
KEYS = np.array([[[1.08, 1.08, 1.08, 0.76], [0.92, 0.92, 0.92, 1.04], [1.4] * 4]])


@pytest.fixture
def stored_keys():
    scheme = Scheme(4, "tensor", None, "symmetric", "float32")
    return quantize(KEYS, scheme).dequantize()


def test_a_key_error_below_half_a_step_turns_the_logits_round(stored_keys):
    assert metrics.max_error(KEYS, stored_keys) < 0.2 / 2
    before = scores(QUERY, KEYS).ravel()[:2]
    after = scores(QUERY, stored_keys).ravel()[:2]
    np.testing.assert_allclose(before, [4.0, 3.8], rtol=1e-6)
    np.testing.assert_allclose(after, [3.8, 4.0], rtol=1e-6)


def test_attention_weights_before_and_after_the_flip(stored_keys):
    first_two = np.array([True, True, False])
    before = attention_weights(QUERY, KEYS, mask=first_two).ravel()
    after = attention_weights(QUERY, stored_keys, mask=first_two).ravel()
    np.testing.assert_allclose(before, [0.550, 0.450, 0], atol=5e-4)
    np.testing.assert_allclose(after, [0.450, 0.550, 0], atol=5e-4)
    # The logits moved by -0.2 and +0.2. Two tokens attain the bound.
    moved = metrics.total_variation(before, after)
    assert moved == pytest.approx(bounds.softmax_tv_bound(0.4), rel=1e-2)
    assert moved <= bounds.softmax_tv_bound(0.4) * (1 + 1e-6)
    assert moved == pytest.approx(math.tanh(0.1), rel=1e-4)


# --- LLaMA-7B: 32 layers, hidden size 4096 --------------------------------------------
def test_llama_7b_takes_524288_bytes_per_token():
    nbytes = cache_bytes("fp16", LLAMA_7B, tokens=1)
    assert nbytes == 524_288 == 2 * 32 * 4096 * 2
    assert format_bytes(nbytes) == "512.00 KiB"
    assert format_bytes(nbytes, decimal=True) == "524.29 kB"


def test_llama_7b_in_float32_takes_twice_as_much():
    assert cache_bytes("fp32", LLAMA_7B, tokens=1, window_dtype="float32") == 1_048_576


def test_2048_tokens_are_1_gib():
    assert cache_bytes("fp16", LLAMA_7B, tokens=2048) == GIB


def test_32_users_are_32_gib_and_16_and_8_with_fewer_bits():
    assert cache_bytes("fp16", LLAMA_7B, tokens=2048, batch=32) == 32 * GIB
    assert ideal_bytes(LLAMA_7B, 8, 2048, batch=32) == 16 * GIB
    assert ideal_bytes(LLAMA_7B, 4, 2048, batch=32) == 8 * GIB


def test_what_fits_and_where_the_weights_are_forgotten():
    """For each card and number of bits: does the cache fit, alone and with weights?"""
    weights = 2 * LLAMA_7B.weight_params
    assert LLAMA_7B.weight_params == 6_738_415_616
    assert round(weights / GIB, 2) == 12.55
    table = {
        (card, bits): (fits(card, 0, cache), fits(card, weights, cache))
        for card in ("A100-80GB", "A6000", "A100-40GB", "RTX-4090")
        for bits in (16, 8, 4)
        for cache in [ideal_bytes(LLAMA_7B, bits, 2048, batch=32)]
    }
    yes, no, forgotten = (True, True), (False, False), (True, False)
    assert table == {
        ("A100-80GB", 16): yes,
        ("A100-80GB", 8): yes,
        ("A100-80GB", 4): yes,
        ("A6000", 16): yes,  # 44.55 GiB: 80 GB are not required
        ("A6000", 8): yes,
        ("A6000", 4): yes,
        ("A100-40GB", 16): forgotten,  # 32 GiB would fit, 44.55 do not
        ("A100-40GB", 8): yes,
        ("A100-40GB", 4): yes,
        ("RTX-4090", 16): no,
        ("RTX-4090", 8): forgotten,  # 16 GiB would fit, 28.55 do not
        ("RTX-4090", 4): yes,
    }


@pytest.mark.parametrize(
    ("name", "card"), [("int8-token", "A100-40GB"), ("int4-token-g64", "RTX-4090")]
)
def test_scales_change_no_verdict(name, card):
    weights = 2 * LLAMA_7B.weight_params
    assert fits(card, weights, cache_bytes(name, LLAMA_7B, tokens=2048, batch=32))


# --- "two to four times" --------------------------------------------------------------
@pytest.mark.parametrize(("name", "ratio"), [("int8-token", 2), ("int4-token-g64", 4)])
def test_the_same_memory_holds_almost_2_and_4_times_the_tokens_and_users(name, ratio):
    budget = 64 * GIB
    tokens = {n: max_tokens(n, budget, LLAMA_7B) for n in ("fp16", name)}
    users = {n: max_batch(n, budget, LLAMA_7B, tokens=2048) for n in ("fp16", name)}
    scheme = PRESETS[name].key
    exact = 16 / scheme.bits_per_element(T=1, D=128)
    assert tokens[name] / tokens["fp16"] == pytest.approx(exact, rel=1e-4)
    assert users[name] / users["fp16"] == pytest.approx(exact, rel=0.02)
    assert 0.93 * ratio < exact < ratio


def test_a_residual_window_comes_on_top():
    key = Scheme(4, "token", 64)
    plain, window = Policy(key, key), Policy(key, key, residual=128)
    extra = cache_bytes(window, SHAPE, tokens=8192) - cache_bytes(
        plain, SHAPE, tokens=8192
    )
    assert extra == 2 * 32 * 128 * 8 * 128 * (2 - 0.53125)
