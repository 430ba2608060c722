import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.cache import KVCache
from kvq.memory import (
    MAX_CONFIG_BYTES,
    ModelShape,
    bits_per_element,
    bytes_per_token,
    cache_bytes,
    cache_parts,
    fits,
    format_bytes,
    ideal_bytes,
    max_batch,
    max_tokens,
    page_bytes,
    peak_bytes,
    shared_bytes,
)
from kvq.scheme import PRESETS, Policy, Scheme

MIB, GIB = 2**20, 2**30

LLAMA_3_8B = ModelShape(layers=32, kv_heads=8, head_dim=128, q_heads=32)
LLAMA_7B = ModelShape(32, 32, 128, weight_params=6_738_415_616)
GPT_OSS = ModelShape(36, 8, 64, q_heads=64, sliding_window=128, sliding_layers=18)
DEEPSEEK_V3 = ModelShape(61, 1, 576, value_dim=512, q_heads=128, latent=True)


def both(bits, group, levels, scale_dtype="float16", per="token"):
    scheme = Scheme(bits, per, group, levels, scale_dtype)
    return Policy(scheme, scheme)


# --- the numbers everybody quotes -----------------------------------------------------
def test_one_context_of_8192_tokens():
    fp16 = cache_bytes("bf16", layers=32, kv_heads=8, head_dim=128, tokens=8192)
    assert fp16 == 1_073_741_824 == GIB
    assert ideal_bytes(LLAMA_3_8B, 16, 8192) == GIB
    assert ideal_bytes(LLAMA_3_8B, 4, 8192) == 256 * MIB
    int4 = cache_bytes("int4-token-g64", LLAMA_3_8B, tokens=8192)
    assert int4 == 272 * MIB
    assert bits_per_element("int4-token-g64", LLAMA_3_8B) / 8 == 0.53125
    assert round(fp16 / int4, 2) == 3.76


@pytest.mark.parametrize(("bits", "ratio"), [(8, 2), (4, 4), (2, 8)])
def test_ideal_ratios(bits, ratio):
    assert (
        ideal_bytes(LLAMA_3_8B, 16, 777) / ideal_bytes(LLAMA_3_8B, bits, 777) == ratio
    )


def test_a_hundred_contexts():
    assert cache_bytes("fp16", LLAMA_3_8B, tokens=8192, batch=100) == 100 * GIB
    int4 = cache_bytes("int4-token-g64", LLAMA_3_8B, tokens=8192, batch=100)
    assert int4 / GIB == 26.5625
    assert format_bytes(int4) == "26.56 GiB"


def test_llama_7b():
    assert cache_bytes("fp16", LLAMA_7B, tokens=1) == 524_288
    assert bytes_per_token("fp16", LLAMA_7B) == 524_288
    assert cache_bytes("fp16", LLAMA_7B, tokens=2048) == GIB
    for bits, gib in ((16, 32), (8, 16), (4, 8)):
        assert ideal_bytes(LLAMA_7B, bits, 2048, batch=32) == gib * GIB
    assert cache_bytes("fp16", LLAMA_7B, tokens=2048, batch=32) == 32 * GIB


def test_llama_2_7b_at_4196_tokens():
    fp16 = cache_bytes("fp16", LLAMA_7B, tokens=4196)
    assert fp16 / GIB == pytest.approx(2.049, abs=5e-4)
    int2 = cache_bytes("int2-token-g32", LLAMA_7B, tokens=4196)
    assert bits_per_element("int2-token-g32", LLAMA_7B) == 3
    assert fp16 / int2 == 16 / 3


def test_keys_with_8_and_values_with_4_bits():
    qwen = ModelShape(layers=48, kv_heads=4, head_dim=128)
    eight, four = (Scheme(b, "token", 64, "asymmetric") for b in (8, 4))
    assert bytes_per_token(Policy(eight, eight), qwen) == 52_224
    assert bytes_per_token(Policy(eight, four), qwen) == 39_936
    assert cache_bytes(Policy(eight, four), qwen, tokens=1) == 39_936


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "expected"),
    [(36, 8, 128, 147_456), (64, 8, 128, 262_144), (80, 8, 128, 327_680)],
)
def test_fp16_bytes_per_token(layers, kv_heads, head_dim, expected):
    assert bytes_per_token("fp16", ModelShape(layers, kv_heads, head_dim)) == expected


def test_32k_contexts_with_their_units():
    assert cache_bytes("fp16", LLAMA_7B, tokens=32768) == 16 * GIB
    llama_70b = cache_bytes("fp16", ModelShape(80, 8, 128), tokens=32768)
    assert format_bytes(llama_70b) == "10.00 GiB"
    assert format_bytes(llama_70b, decimal=True) == "10.74 GB"


RMS = "lloyd-max"
SIZES = [  # bytes per element and MiB, for 8192 tokens of LLAMA_3_8B
    ("fp16", PRESETS["fp16"], 2, 1024),
    ("q8_0", both(8, 32, "symmetric"), 1.0625, 544),
    ("q5_1", both(5, 32, "asymmetric"), 0.75, 384),
    ("q5_0", both(5, 32, "signed-extreme"), 0.6875, 352),
    ("q4_1", both(4, 32, "asymmetric"), 0.625, 320),
    ("q4_0", both(4, 32, "signed-extreme"), 0.5625, 288),
    ("iq4_nl", both(4, 32, "iq4_nl"), 0.5625, 288),
    ("int8 per token head", both(8, None, "symmetric", "float32"), 1.03125, 528),
    ("int4 per token head", both(4, None, "symmetric", "float32"), 0.53125, 272),
    ("nvfp4", both(4, 16, "e2m1", "float8_e4m3fn"), 0.5625, 288),
    ("mxfp4", PRESETS["mxfp4"], 0.53125, 272),
    (
        "turboquant 4bit",
        Policy(Scheme(4, "token", None, RMS), Scheme(4, "token", None, "asymmetric")),
        0.5234375,
        268,
    ),
    (
        "turboquant k3v4",
        Policy(Scheme(3, "token", None, RMS), Scheme(4, "token", None, "asymmetric")),
        0.4609375,
        236,
    ),
    (
        "turboquant 3bit",
        Policy(Scheme(3, "token", None, RMS), Scheme(3, "token", None, "asymmetric")),
        0.3984375,
        204,
    ),
    ("int4 g64, scale and zero", both(4, 64, "asymmetric"), 0.5625, 288),
    ("int2 g64, scale and zero", both(2, 64, "asymmetric"), 0.3125, 160),
    ("turbo3_0", both(3, 128, RMS), 0.390625, 200),
    ("turbo2_0", both(2, 128, RMS), 0.265625, 136),
]


@pytest.mark.parametrize(("name", "policy", "per_element", "mib"), SIZES)
def test_sizes_of_known_formats(name, policy, per_element, mib):
    assert bits_per_element(policy, LLAMA_3_8B) == 8 * per_element
    assert cache_bytes(policy, LLAMA_3_8B, tokens=8192) == mib * MIB


@pytest.mark.parametrize(
    ("name", "bits", "mib"), [("kivi-4", 5, 320), ("kivi-2", 3, 192)]
)
def test_kivi_trades_128_quantized_tokens_for_a_window(name, bits, mib):
    parts = cache_parts(name, LLAMA_3_8B, 8192)
    assert bits_per_element(name, LLAMA_3_8B) == bits
    assert parts["window"] == 16 * MIB
    assert parts["total"] == mib * MIB * (8192 - 128) / 8192 + 16 * MIB


# --- equal to what is stored ----------------------------------------------------------
def fill(policy, H, T, D, D_v, batch=1, dtype=np.float16):
    """A cache of one layer with T tokens, an outlier channel and a constant row."""
    rng = np.random.default_rng(T)
    k = rng.normal(size=(batch, H, T, D)).astype(dtype)
    k[..., D // 2] *= 30
    k[:, 0, T // 2 :] = 1
    cache = KVCache(policy, value_dim=D_v if policy.value is None else None)
    v = None if policy.value is None else k[..., :D_v] * dtype(0.5)
    cache.append(k, v)
    return cache


schemes = st.builds(
    Scheme,
    bits=st.integers(2, 8),
    per=st.sampled_from(["token", "channel", "head", "tensor"]),
    group=st.sampled_from([1, 5, 8, 12]),
    levels=st.sampled_from(["symmetric", "asymmetric", "lloyd-max"]),
    scale_dtype=st.sampled_from(["float16", "float32", "float8_e4m3fn"]),
)
policies = st.builds(
    Policy, schemes, schemes, residual=st.integers(0, 20), sinks=st.integers(0, 6)
)


@settings(max_examples=50, deadline=None)
@given(policies, st.integers(1, 3), st.integers(1, 90), st.integers(1, 19))
def test_bytes_equal_what_a_cache_stores(policy, H, T, D):
    D_v = D // 2 + 1
    cache = fill(policy, H, T, D, D_v, batch=2, dtype=np.float32)
    expected = cache_bytes(
        policy,
        layers=1,
        kv_heads=H,
        head_dim=D,
        value_dim=D_v,
        tokens=T,
        batch=2,
        window_dtype="float32",
    )
    assert expected == cache.nbytes


@pytest.mark.parametrize("name", PRESETS)
def test_presets_cost_what_a_cache_stores(name):
    shape = ModelShape(layers=1, kv_heads=3, head_dim=64, value_dim=32)
    cache = fill(PRESETS[name], 3, 201, 64, 32)
    parts = cache_parts(name, shape, 201)
    assert parts["total"] == cache.nbytes
    (stored,) = cache.report()
    assert (
        parts["codes"] + parts["scales"] + parts["zeros"] == stored["quantized_bytes"]
    )
    assert parts["window"] + parts["sinks"] == stored["full_precision_bytes"]


def test_a_latent_is_stored_once():
    policy = Policy(Scheme(4, "token", 64, "asymmetric"), None, residual=7)
    latent = ModelShape(1, 1, 576, value_dim=512, q_heads=16, latent=True)
    cache = fill(policy, 1, 50, 576, 512)
    assert cache_bytes(policy, latent, tokens=50) == cache.nbytes
    # Any policy is read without its values.
    with_values = replace(policy, value=policy.key)
    assert cache_bytes(with_values, latent, tokens=50) == cache.nbytes
    assert bytes_per_token("fp16", DEEPSEEK_V3) == 61 * 576 * 2 == 70_272


def test_parts_by_hand():
    policy = Policy(
        Scheme(3, "channel", 4, "asymmetric", "float32"),
        Scheme(2, "token", 5, "symmetric"),
        residual=2,
        sinks=1,
    )
    shape = ModelShape(layers=7, kv_heads=2, head_dim=6, value_dim=12)
    # 12 tokens: 1 sink, 8 quantized in two groups of 4, 3 in the window
    parts = cache_parts(policy, shape, 12, batch=3, page=16)
    lots = 3 * 7 * 2
    assert parts["codes"] == lots * 8 * (3 + 3)
    assert parts["scales"] == lots * (2 * 6 * 4 + 8 * 3 * 2)
    assert parts["zeros"] == lots * 2 * 6 * 4
    assert parts["window"] == lots * 3 * (6 + 12) * 2
    assert parts["sinks"] == lots * 1 * (6 + 12) * 2
    assert parts["padding"] == lots * (8 * (3 + 3) + 2 * 6 * 4 * 2 + 8 * 3 * 2)
    assert parts["total"] == sum(n for part, n in parts.items() if part != "total")


def test_nothing_costs_nothing():
    assert set(cache_parts("kivi-2", GPT_OSS, 0).values()) == {0}


def test_page_padding():
    def fp16(T, **options):
        return cache_bytes("fp16", LLAMA_3_8B, tokens=T, **options)

    assert fp16(17, page=16) == fp16(32)
    assert fp16(32, page=16) == fp16(32)
    assert cache_parts("fp16", LLAMA_3_8B, 17, page=16)["padding"] == fp16(15)
    with pytest.raises(ValueError, match=r"page=16; valid: multiples .* 32"):
        cache_bytes("kivi-2", LLAMA_3_8B, tokens=17, page=16)


# --- layers that forget ---------------------------------------------------------------
def test_sliding_layers_are_counted_until_their_window():
    def gpt_oss(T):
        return cache_bytes("fp16", GPT_OSS, tokens=T)

    assert gpt_oss(1) == 73_728
    assert gpt_oss(1000) == 18 * 2048 * 1000 + 18 * 2048 * 128
    assert np.all(np.diff([gpt_oss(T) for T in range(300)]) > 0)
    assert (
        gpt_oss(128) - gpt_oss(127) == bytes_per_token("fp16", GPT_OSS, 127) == 73_728
    )
    assert (
        gpt_oss(129) - gpt_oss(128) == bytes_per_token("fp16", GPT_OSS, 128) == 36_864
    )
    assert bytes_per_token("fp16", GPT_OSS) == 36_864


def test_a_window_keeps_its_rows_in_full_precision():
    parts = cache_parts("kivi-2", GPT_OSS, 5000)
    row = 2 * 8 * 64 * 2
    growing = PRESETS["kivi-2"].split(5000)
    assert growing == (0, 4864, 136)
    assert parts["window"] == 18 * row * (136 + 128)  # nothing of 128 is quantized


def test_the_slope_is_the_average_over_a_block():
    rise = cache_bytes("kivi-2", LLAMA_3_8B, tokens=8192 + 32) - cache_bytes(
        "kivi-2", LLAMA_3_8B, tokens=8192
    )
    assert bytes_per_token("kivi-2", LLAMA_3_8B) * 32 == rise


# --- tensor-parallel ranks ------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_heads_are_split_and_then_replicated(ranks, heads):
    shard = LLAMA_3_8B.shard(ranks)
    assert (shard.kv_heads, shard.q_heads) == (heads, 32 // ranks)
    expected = cache_bytes("kivi-2", replace(LLAMA_3_8B, kv_heads=heads), tokens=999)
    options = {"tokens": 999, "tensor_parallel": ranks}
    assert cache_bytes("kivi-2", LLAMA_3_8B, **options) == expected
    unknown_q = replace(LLAMA_3_8B, q_heads=None)
    assert cache_bytes("kivi-2", unknown_q, **options) == expected


def test_a_latent_is_whole_on_every_rank():
    one = cache_bytes("int8-token", DEEPSEEK_V3, tokens=100)
    assert cache_bytes("int8-token", DEEPSEEK_V3, tokens=100, tensor_parallel=8) == one


@pytest.mark.parametrize("ranks", [0, 3, 64, 2.0, True])
def test_impossible_ranks(ranks):
    with pytest.raises(ValueError, match="tensor_parallel="):
        cache_bytes("fp16", LLAMA_3_8B, tokens=1, tensor_parallel=ranks)


# --- the inverse ----------------------------------------------------------------------
SMALL = ModelShape(2, 1, 8)
SMALL_SLIDING = ModelShape(5, 2, 8, sliding_window=40, sliding_layers=4)


def first_overrun(policy, budget, shape, **options):
    T = 0
    while cache_bytes(policy, shape, tokens=T, **options) <= budget:
        T += 1
    return T


@settings(max_examples=50, deadline=None)
@given(
    policies | st.sampled_from([PRESETS[n] for n in ("kivi-2", "kivi-4", "fp16")]),
    st.sampled_from([SMALL, SMALL_SLIDING]),
    st.integers(1, 250),
    st.integers(-1, 1),
)
def test_max_tokens_is_the_exact_inverse(policy, shape, near, nudge):
    budget = max(cache_bytes(policy, shape, tokens=near, batch=3) + nudge, 0)
    expected = first_overrun(policy, budget, shape, batch=3) - 1
    assert max_tokens(policy, budget, shape, batch=3) == expected


@pytest.mark.parametrize("shape", [SMALL, SMALL_SLIDING])
@pytest.mark.parametrize("page", [32, 64])
def test_peak_and_inverse_of_kivi_2_at_every_length(shape, page):
    tokens = range(500)
    sizes = [cache_bytes("kivi-2", shape, tokens=T, page=page) for T in tokens]
    peaks = np.maximum.accumulate(sizes)
    assert min(np.diff(sizes)) < 0  # a flush shrinks the cache
    assert [peak_bytes("kivi-2", shape, T, page=page) for T in tokens] == list(peaks)
    for T in range(0, 400, 7):
        found = max_tokens("kivi-2", peaks[T], shape, page=page)
        assert found == np.searchsorted(peaks, peaks[T], side="right") - 1


def test_a_sliding_layer_can_hold_the_peak():
    # 40 = 8 + 32: the sliding layers are largest at 39 tokens, before their one flush.
    policy = replace(PRESETS["kivi-2"], residual=8)
    sizes = [cache_bytes(policy, SMALL_SLIDING, tokens=T) for T in range(300)]
    assert max(sizes[40:]) < sizes[39]
    peaks = [peak_bytes(policy, SMALL_SLIDING, T) for T in range(300)]
    assert peaks == list(np.maximum.accumulate(sizes))
    assert max_tokens(policy, sizes[39] - 1, SMALL_SLIDING) == 38
    assert max_tokens(policy, sizes[39], SMALL_SLIDING) > 299


def test_max_tokens_without_a_limit_and_without_room():
    sliding = replace(SMALL, sliding_window=40, sliding_layers=2)
    most = cache_bytes("fp16", sliding, tokens=40)
    assert max_tokens("fp16", most, sliding) is None
    assert max_tokens("fp16", most - 1, sliding) == 39
    assert max_tokens("fp16", 0, SMALL) == 0


def test_max_tokens_of_a_real_budget():
    T = max_tokens("kivi-2", 256 * MIB, LLAMA_3_8B)
    assert peak_bytes("kivi-2", LLAMA_3_8B, T) <= 256 * MIB
    assert cache_bytes("kivi-2", LLAMA_3_8B, tokens=T + 1) > 256 * MIB


@pytest.mark.parametrize("policy", ["kivi-2", "int4-token-g64"])
def test_max_batch_leaves_room_for_every_length_on_the_way(policy):
    budget = 3 * GIB + 12345
    users = max_batch(policy, budget, LLAMA_3_8B, 4321)
    assert max_tokens(policy, budget, LLAMA_3_8B, batch=users) >= 4321
    assert max_tokens(policy, budget, LLAMA_3_8B, batch=users + 1) < 4321
    assert max_batch(policy, 0, LLAMA_3_8B, 1) == 0


@pytest.mark.parametrize("budget", [-1, float("nan"), float("inf")])
def test_impossible_budgets(budget):
    with pytest.raises(ValueError, match="budget_bytes="):
        max_tokens("fp16", budget, SMALL)
    with pytest.raises(ValueError, match="budget_bytes="):
        max_batch("fp16", budget, SMALL, 5)


# --- what fits where ------------------------------------------------------------------
WEIGHTS = 2 * LLAMA_7B.weight_params
HOLDS_32_USERS = [
    # device, FP16, INT8, INT4 at 2048 tokens each
    ("A100-80GB", True, True, True),
    ("A100-40GB", False, True, True),
    ("A6000", True, True, True),
    ("RTX-4090", False, False, True),
]


@pytest.mark.parametrize(("name", "fp16", "int8", "int4"), HOLDS_32_USERS)
def test_which_device_holds_llama_7b_and_32_users(name, fp16, int8, int4):
    assert format_bytes(WEIGHTS, decimal=True) == "13.48 GB"
    for bits, expected in ((16, fp16), (8, int8), (4, int4)):
        ideal = ideal_bytes(LLAMA_7B, bits, 2048, batch=32)
        assert fits(name, WEIGHTS, ideal) is expected
    stored = {"fp16": fp16, "int8-token": int8, "int4-token-g64": int4}
    for policy, expected in stored.items():
        nbytes = cache_bytes(policy, LLAMA_7B, tokens=2048, batch=32)
        assert fits(name, WEIGHTS, nbytes) is expected


def test_forgetting_the_weights_changes_the_answer():
    fp16, int8 = (ideal_bytes(LLAMA_7B, b, 2048, batch=32) for b in (16, 8))
    assert fits("A100-40GB", 0, fp16)
    assert not fits("A100-40GB", WEIGHTS, fp16)
    assert fits("RTX-4090", 0, int8)
    assert not fits("RTX-4090", WEIGHTS, int8)


def test_the_reserve_counts():
    int4 = ideal_bytes(LLAMA_7B, 4, 2048, batch=32)
    left = 24564 * MIB - WEIGHTS - int4
    assert fits("RTX-4090", WEIGHTS, int4, reserve=left)
    assert not fits("RTX-4090", WEIGHTS, int4, reserve=left + 1)
    with pytest.raises(ValueError, match="reserve=-1"):
        fits("RTX-4090", WEIGHTS, int4, reserve=-1)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (272 * MIB, "272.00 MiB"),
        (-3 * GIB, "-3.00 GiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_format_bytes(n, text):
    assert format_bytes(n) == text


# --- input that is refused ------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"kv_heads": -1}, "kv_heads=-1"),
        ({"head_dim": 64.0}, r"head_dim=64\.0"),
        ({"kv_heads": True}, "kv_heads=True"),
        ({"value_dim": 0}, "value_dim=0"),
        ({"q_heads": 12}, "q_heads=12; valid: multiples of kv_heads=8"),
        ({"sliding_layers": 3}, "valid: both or neither"),
        ({"sliding_window": 99}, "valid: both or neither"),
        ({"sliding_window": 99, "sliding_layers": 33}, r"valid: 0\.\.32"),
        ({"latent": True, "value_dim": 129}, r"valid: 1\.\.128"),
    ],
)
def test_impossible_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        replace(LLAMA_3_8B, **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": -1}, "tokens=-1"),
        ({"tokens": 10, "batch": 0}, "batch=0"),
        ({"tokens": 10, "page": 0}, "page=0"),
        ({"tokens": 10, "window_dtype": "int8"}, "window_dtype='int8'; valid: float16"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        cache_bytes("fp16", LLAMA_3_8B, **options)


def test_policies_that_do_not_suit_the_shape():
    keys_only = Policy(PRESETS["fp16"].key, None)
    with pytest.raises(ValueError, match="value=None"):
        cache_bytes(keys_only, LLAMA_3_8B, tokens=1)
    with pytest.raises(ValueError, match="power of two, not 576"):
        cache_bytes("turboquant-4", DEEPSEEK_V3, tokens=1)
    with pytest.raises(ValueError, match="needs all tokens at once"):
        cache_bytes(both(8, None, "symmetric", per="channel"), SMALL, tokens=1)
    with pytest.raises(TypeError, match="head_dims"):
        cache_bytes("fp16", layers=1, kv_heads=1, head_dim=64, tokens=1, head_dims=64)


def test_numpy_integers_are_integers():
    T = np.int64(100)
    assert cache_bytes("fp16", SMALL, tokens=T) == cache_bytes(
        "fp16", SMALL, tokens=100
    )


# --- config.json ----------------------------------------------------------------------
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def test_config_of_llama_3_1_8b():
    shape = ModelShape.from_config(LLAMA_CONFIG)
    expected = {"weight_params": 8_030_261_248, "max_positions": 131072}
    assert shape == replace(LLAMA_3_8B, **expected)


def test_config_of_llama_7b_has_no_kv_heads():
    config = without(LLAMA_CONFIG, "num_key_value_heads")
    config |= {"intermediate_size": 11008, "vocab_size": 32000}
    shape = ModelShape.from_config(config)
    assert (shape.kv_heads, shape.head_dim) == (32, 128)
    assert shape.weight_params == 6_738_415_616


def test_tied_embeddings_count_once():
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    shape = ModelShape.from_config(config)
    assert shape.weight_params == 134_515_008
    assert bytes_per_token("fp16", shape) == 23_040
    assert ModelShape.from_config(config | {"mlp_bias": True}).weight_params is None
    assert (
        ModelShape.from_config(config | {"model_type": "gemma"}).weight_params is None
    )


def test_explicit_head_dim_wins():
    config = LLAMA_CONFIG | {"hidden_size": 2560, "num_hidden_layers": 36}
    assert ModelShape.from_config(config).head_dim == 80
    shape = ModelShape.from_config(config | {"head_dim": 128})
    assert bytes_per_token("fp16", shape) == 147_456


def test_nested_text_config():
    nested = {"model_type": "llava", "vision_config": {}, "text_config": LLAMA_CONFIG}
    assert ModelShape.from_config(nested) == ModelShape.from_config(LLAMA_CONFIG)


def sliding(**config):
    shape = ModelShape.from_config(LLAMA_CONFIG | config)
    return shape.layers, shape.sliding_layers, shape.sliding_window


def test_layer_types():
    kinds = ["sliding_attention", "full_attention"] * 16
    assert sliding(layer_types=kinds, sliding_window=128) == (32, 16, 128)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert sliding(layer_types=kinds * 8) == (8, 0, None)


def test_sliding_windows_of_older_configs():
    assert sliding(sliding_window=4096) == (32, 32, 4096)  # Mistral
    assert sliding(sliding_window=None) == (32, 0, None)
    # Gemma 3: 26 layers, every sixth is full
    gemma = {"num_hidden_layers": 26, "sliding_window": 512}
    assert sliding(**gemma, sliding_window_pattern=6) == (26, 22, 512)
    assert sliding(**gemma, model_type="gemma3_text") == (26, 22, 512)
    assert sliding(**gemma, model_type="gemma2") == (26, 13, 512)
    qwen = {"sliding_window": 32768, "max_window_layers": 28}
    assert sliding(**qwen, use_sliding_window=False) == (32, 0, None)
    assert sliding(**qwen, use_sliding_window=True) == (32, 4, 32768)
    assert sliding(num_hidden_layers=30, full_attention_interval=4) == (7, 0, None)


def test_config_of_deepseek_v3():
    config = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert ModelShape.from_config(config) == DEEPSEEK_V3
    with pytest.raises(ValueError, match="no qk_rope_head_dim"):
        ModelShape.from_config(without(config, "qk_rope_head_dim"))


def test_names_of_gpt_2_and_falcon():
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    assert ModelShape.from_config(gpt2) == ModelShape(
        12, 12, 64, q_heads=12, max_positions=1024
    )
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
    falcon |= {"num_kv_heads": 71, "multi_query": True}
    assert ModelShape.from_config(falcon).kv_heads == 1
    falcon |= {"new_decoder_architecture": True}
    assert ModelShape.from_config(falcon).kv_heads == 71


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads='8'"),
        ({"num_key_value_heads": 7}, "kv_heads=7"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": 4097}, "hidden_size=4097 is not a multiple"),
        ({"head_dim": -128}, "head_dim=-128"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ({"layer_types": ["full_attention"]}, "valid: a list of 32 names"),
        ({"layer_types": ["mamba"] * 32}, "layer_types has 'mamba'"),
        ({"layer_types": [[]] * 32}, r"layer_types has \[\]"),
        ({"layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
        ({"layer_types": ["linear_attention"] * 32}, "layers=0"),
        ({"sliding_window": -1}, "sliding_window=-1"),
        ({"sliding_window": 9, "max_window_layers": "x"}, "max_window_layers='x'"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers=15"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size=8192"),
    ],
)
def test_config_errors_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(LLAMA_CONFIG | change)


def test_config_from_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG))
    expected = ModelShape.from_config(LLAMA_CONFIG)
    assert ModelShape.from_config(path) == expected
    assert ModelShape.from_config(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\xff", "is not JSON"),
        (b"import os", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[1]", "holds a list"),
        (b" " * (MAX_CONFIG_BYTES + 1), "larger than 1.00 MiB"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        ModelShape.from_config(tmp_path / "nowhere.json")


@pytest.mark.parametrize(("page", "inside"), [(1, 96), (64, 64), (32, 96)])
def test_a_prefix_is_shared_in_whole_pages_of_quantized_tokens(page, inside):
    shape = ModelShape(layers=3, kv_heads=2, head_dim=64)
    key, value = PRESETS["kivi-4"].schemes
    expected = 3 * (key.nbytes(2, inside, 64) + value.nbytes(2, inside, 64))
    assert shared_bytes("kivi-4", shape, 400, prefix=100, page=page) == expected
    # The window of 128 keeps the rest: 200 tokens have 64 quantized ones.
    assert shared_bytes("kivi-4", shape, 200, prefix=200, page=page) == 3 * (
        key.nbytes(2, 64, 64) + value.nbytes(2, 64, 64)
    )


def test_users_with_a_prefix_pay_for_it_once():
    shape = ModelShape(layers=3, kv_heads=2, head_dim=64)
    one = cache_bytes("int4-token-g64", shape, tokens=100)
    shared = shared_bytes("int4-token-g64", shape, 100, prefix=80)
    assert 0 < shared < one
    for users in (1, 2, 7):
        budget = shared + users * (one - shared)
        assert max_batch("int4-token-g64", budget, shape, 100, prefix=80) == users
        assert max_batch("int4-token-g64", budget - 1, shape, 100, prefix=80) < users
    assert max_batch("int4-token-g64", 7 * one, shape, 100) == 7


def test_a_page_costs_what_its_tokens_do():
    shape = ModelShape(layers=3, kv_heads=2, head_dim=64)
    key, value = PRESETS["kivi-4"].schemes
    expected = 3 * (key.nbytes(2, 64, 64) + value.nbytes(2, 64, 64))
    assert page_bytes("kivi-4", shape, 64) == expected
    assert page_bytes("kivi-4", shape, 1) == 0
