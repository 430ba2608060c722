import math
from dataclasses import replace

import pytest

from kvq.hardware import device
from kvq.memory import ModelShape, cache_bytes
from kvq.roofline import (
    INSTRUCTIONS,
    crossover_tokens,
    decode_bytes,
    decode_flops,
    decode_instructions,
    decode_time,
    max_speedup,
    plan,
)
from kvq.scheme import PRESETS, Policy, Scheme

ONE_LAYER = ModelShape(layers=1, kv_heads=8, head_dim=128, q_heads=32)


def asymmetric(bits, group):
    scheme = Scheme(bits, "token", group, "asymmetric")
    return Policy(scheme, scheme)


FP16 = PRESETS["fp16"]

# One layer of Llama-3.1-8B: policy, B, T, MB, us at 4.8 TB/s, us at 4.3 TB/s, speedup.
TABLE = [
    (FP16, 1, 131072, 536.9, 111.8, 124.9, 1.00),
    (asymmetric(8, 128), 1, 131072, 276.8, 57.7, 64.4, 1.94),
    (asymmetric(4, 64), 1, 131072, 151.0, 31.5, 35.1, 3.56),
    (asymmetric(2, 32), 1, 131072, 100.7, 21.0, 23.4, 5.33),
    (asymmetric(2, 64), 1, 131072, 83.9, 17.5, 19.5, 6.40),
    (asymmetric(4, 64), 8, 32768, 302.0, 62.9, 70.2, 3.56),
    (asymmetric(4, 64), 1, 32768, 37.7, 7.9, 8.8, 3.56),
]


@pytest.mark.parametrize(("policy", "B", "T", "mb", "us48", "us43", "speedup"), TABLE)
def test_bytes_and_times_of_the_reference_table(policy, B, T, mb, us48, us43, speedup):
    nbytes = cache_bytes(policy, ONE_LAYER, tokens=T, batch=B)
    assert nbytes / 1e6 == pytest.approx(mb, abs=0.051)
    at = decode_time(policy, ONE_LAYER, "H200", T, B)
    assert at["memory_seconds"] * 1e6 == pytest.approx(us48, abs=0.07)
    at = decode_time(policy, ONE_LAYER, "H200", T, B, bandwidth=4.3e12)
    assert at["memory_seconds"] * 1e6 == pytest.approx(us43, abs=0.07)
    assert max_speedup(policy, ONE_LAYER) == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_speedup_is_16_over_effective_bits(bits, group):
    shape = ModelShape(layers=3, kv_heads=2, head_dim=128)
    assert max_speedup(asymmetric(bits, group), shape) == 16 / (bits + 32 / group)
    if bits > 1:
        scheme = Scheme(bits, "token", group, "symmetric")
        expected = 16 / (bits + 16 / group)
        assert max_speedup(Policy(scheme, scheme), shape) == expected


def test_bytes_of_a_step_by_hand():
    shape = ModelShape(3, 2, 64, value_dim=32, q_heads=6)
    # fp16, 5 tokens: cache 3 * 5 * 2 * 96 * 2; q and output 3 * 6 * 96 * 2
    assert decode_bytes("fp16", shape, 5) == 3 * 5 * 2 * 96 * 2 + 3 * 6 * 96 * 2
    assert decode_bytes("fp16", shape, 5, batch=7) == 7 * decode_bytes("fp16", shape, 5)


def test_flops_by_hand():
    assert decode_flops(ONE_LAYER, 1000) == 4 * 32 * 1000 * 128
    shape = ModelShape(5, 2, 64, q_heads=6, sliding_window=100, sliding_layers=3)
    assert decode_flops(shape, 1000, 2) == 2 * 4 * 6 * 64 * (2 * 1000 + 3 * 100)
    latent = ModelShape(1, 1, 576, value_dim=512, q_heads=16, latent=True)
    assert decode_flops(latent, 10) == 2 * 16 * 10 * (576 + 512)


def test_instructions_count_quantized_numbers_only():
    T, R = 1000, 128
    quantized = (T - R) // 32 * 32
    expected = quantized * 8 * 2 * 128 * INSTRUCTIONS["exact"]
    assert decode_instructions("kivi-2", ONE_LAYER, T) == pytest.approx(expected)
    assert decode_instructions("fp16", ONE_LAYER, T) == 0
    mixed = Policy(FP16.key, asymmetric(4, 32).value)
    per_number = decode_instructions(mixed, ONE_LAYER, T, per_number=1)
    assert per_number == T * 8 * 128


def test_instructions_of_a_latent_count_the_latent_once():
    latent = ModelShape(2, 1, 576, value_dim=512, q_heads=16, latent=True)
    assert decode_instructions(asymmetric(4, 32), latent, 10, 3, 1) == 3 * 2 * 10 * 576


# Counted instructions per byte at 4.3 TB/s and 1.755 GHz: share of the issue rate used.
@pytest.mark.parametrize(
    ("kernel", "bits", "share"),
    [
        ("folded", 8, 0.20),
        ("folded", 4, 0.40),
        ("folded", 2, 0.68),
        ("exact", 8, 0.26),
        ("exact", 4, 0.50),
        ("exact", 2, 0.85),
        ("per-element", 8, 0.33),
        ("per-element", 4, 0.63),
        ("per-element", 2, 1.09),
    ],
)
def test_share_of_the_issue_rate_of_a_h200(kernel, bits, share):
    card = replace(device("H200"), clock=1.755e9, bandwidth=4.3e12)
    at = decode_time(
        asymmetric(bits, 64), ONE_LAYER, card, 65536, per_number=INSTRUCTIONS[kernel]
    )
    used = at["issue_seconds"] / at["memory_seconds"]
    assert used == pytest.approx(share, rel=0.08)
    assert at["limit"] == ("instructions" if share > 1 else "bandwidth")
    assert at["seconds"] == max(at["issue_seconds"], at["memory_seconds"])


def test_each_limit_can_bind():
    # 4-bit, 24 instructions per byte and query head: one head per warp, scalar code
    naive = 24 * (4 + 16 / 64) / 8 * 4
    at = decode_time("int4-token-g64", ONE_LAYER, "H200", 65536, per_number=naive)
    assert at["limit"] == "instructions"
    # 512 query heads share one latent: the products bind
    latent = ModelShape(1, 1, 576, value_dim=512, q_heads=512, latent=True)
    at = decode_time("fp16", latent, "H200", 65536)
    assert at["limit"] == "tensor cores"
    assert at["seconds"] == decode_flops(latent, 65536) / 989.4e12
    assert decode_time("fp16", ONE_LAYER, "T4", 10)["limit"] == "bandwidth"


@pytest.mark.parametrize("policy", ["kivi-2", "int4-token-g64", "int8-token"])
def test_crossover_is_the_first_length_that_wins(policy):
    overhead, bandwidth = 5e-6, 4.8e12

    def gain(T):
        saved = cache_bytes("fp16", ONE_LAYER, tokens=T) - cache_bytes(
            policy, ONE_LAYER, tokens=T
        )
        return saved / bandwidth - overhead

    T = crossover_tokens(policy, ONE_LAYER, "H200", overhead)
    assert gain(T) > 0
    assert all(gain(t) <= 0 for t in (*range(1, T, 37), T - 1))
    assert all(gain(t) > 0 for t in range(T, 3 * T, 37))


def test_crossover_by_hand():
    # int4-token-g64 saves 2 * 8 * 128 * (2 - 0.53125) bytes per token
    per_token = 2 * 8 * 128 * (2 - 0.53125)
    expected = math.floor(5e-6 * 4.8e12 / per_token) + 1
    found = crossover_tokens("int4-token-g64", ONE_LAYER, "H200", 5e-6)
    assert found == expected
    halved = crossover_tokens("int4-token-g64", ONE_LAYER, "H200", 5e-6, batch=2)
    assert halved == pytest.approx(found / 2, abs=1)
    assert crossover_tokens("int4-token-g64", ONE_LAYER, "H200", 0) == 1


def test_crossover_never_comes():
    assert crossover_tokens("fp16", ONE_LAYER, "H200", 0) is None
    assert crossover_tokens("fp32", ONE_LAYER, "H200", 0) is None
    sliding = replace(ONE_LAYER, sliding_window=512, sliding_layers=1)
    assert crossover_tokens("int4-token-g64", sliding, "H200", 5e-6) is None
    assert crossover_tokens("int4-token-g64", sliding, "H200", 1e-8) is not None


@pytest.mark.parametrize("overhead", [-1e-6, float("nan")])
def test_crossover_refuses_a_bad_overhead(overhead):
    with pytest.raises(ValueError, match="overhead="):
        crossover_tokens("int4-token-g64", ONE_LAYER, "H200", overhead)


LLAMA_7B = ModelShape(32, 32, 128, weight_params=6_738_415_616)


def test_plan_of_llama_7b_with_32_users():
    policies = ["fp16", "int8-token", "int4-token-g64"]
    rows = plan(LLAMA_7B, "RTX-4090", policies, 2048, batch=32)
    assert [row["policy"] for row in rows] == policies
    assert [row["fits"] for row in rows] == [False, False, True]
    assert rows[0]["bytes_per_token"] == 524_288
    assert rows[0]["cache_bytes"] == 32 * 2**30
    assert rows[0]["total_bytes"] == 32 * 2**30 + 2 * 6_738_415_616
    assert rows[2]["bits_per_element"] == 4.25
    assert rows[2]["max_speedup"] == pytest.approx(3.76, abs=0.005)
    for row in rows:
        weights = 2 * 6_738_415_616 / 1008e9
        assert row["step_seconds"] == pytest.approx(row["attention_seconds"] + weights)


@pytest.mark.parametrize("policy", ["kivi-2", "int8-token"])
def test_plan_columns_agree_at_the_edge(policy):
    (row,) = plan(LLAMA_7B, "L4", [policy], 2048, batch=5, reserve=2**30)
    edge = row["max_tokens"]
    for tokens, expected in ((edge, True), (edge + 1, False)):
        (row,) = plan(LLAMA_7B, "L4", [policy], tokens, batch=5, reserve=2**30)
        assert row["fits"] is expected
        assert (row["max_users"] >= 5) is expected


def test_plan_for_weights_that_do_not_fit_at_all():
    (row,) = plan(LLAMA_7B, "T4", ["kivi-2"], 2048, weight_bytes=20 * 2**30)
    assert (row["fits"], row["max_tokens"], row["max_users"]) == (False, 0, 0)


def test_plan_takes_policies_and_sliding_models():
    shape = ModelShape(2, 1, 64, sliding_window=128, sliding_layers=2)
    (row,) = plan(shape, "T4", [asymmetric(4, 64)], 9999, weight_bytes=0)
    assert row["policy"] == "unnamed"
    assert row["max_tokens"] is None
    assert row["bytes_per_token"] == 0


def test_plan_refuses_to_forget_the_weights():
    with pytest.raises(ValueError, match="weight_bytes=None"):
        plan(ONE_LAYER, "H200", ["fp16"], 2048)
    with pytest.raises(ValueError, match="unknown policy 'int5'"):
        plan(LLAMA_7B, "H200", ["int5"], 2048)
    with pytest.raises(ValueError, match="unknown device 'H300'"):
        plan(LLAMA_7B, "H300", ["fp16"], 2048)
