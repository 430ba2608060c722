"""The planner on the bundled models, and the systems' formats at a real size.

Golden numbers: each model's published config.json, multiplied out by hand; for the
formats, the bytes that `nbytes` of each format counts.
"""

import re
from importlib.resources import files
from itertools import pairwise

import pytest

from kvq.formats import find_format
from kvq.formats.base import Format
from kvq.formats.research import FORMATS
from kvq.hardware import device
from kvq.memory import (
    ModelShape,
    bytes_per_token,
    cache_bytes,
    max_batch,
    max_tokens,
    peak_bytes,
)
from kvq.roofline import decode_time, plan
from kvq.scheme import Policy, Scheme

MIB, GIB = 2**20, 2**30
CONFIGS = files("kvq") / "data" / "configs"
NAMES = sorted(p.name[:-5] for p in CONFIGS.iterdir() if p.name.endswith(".json"))
POLICIES = ("fp16", "int8-token", "int4-token-g64", "kivi-2")


def shape_of(name):
    return ModelShape.from_config(CONFIGS / f"{name}.json")


# --- bytes per token ------------------------------------------------------------------
# layers * (K and V) * KV heads * head dimension * 2 bytes, for the first token
PER_TOKEN = {
    "deepseek-v3": 61 * (512 + 64) * 2,
    "gemma-3-27b": 62 * 2 * 16 * 128 * 2,
    "gpt-oss-120b": 36 * 2 * 8 * 64 * 2,
    "llama-2-7b": 524_288,
    "llama-3.1-8b": 131_072,
    "llama-3.3-70b": 327_680,
    "mistral-7b-v0.3": 131_072,
    "qwen2.5-7b": 28 * 2 * 4 * 128 * 2,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2,
    "qwen3-4b": 147_456,
    "smollm2-135m": 23_040,
}


def test_every_bundled_model_has_a_golden_number_and_a_line_in_the_table():
    assert sorted(PER_TOKEN) == NAMES
    table = (CONFIGS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([^|]+) \|", table, re.M)[1:]
    assert sorted(", ".join(listed).split(", ")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fp16_bytes_of_the_first_token(name):
    shape = shape_of(name)
    assert cache_bytes("fp16", shape, tokens=1) == PER_TOKEN[name]
    assert bytes_per_token("fp16", shape, tokens=0) == PER_TOKEN[name]


def test_goldens_that_were_multiplied_out_elsewhere():
    assert PER_TOKEN["gpt-oss-120b"] == 73_728
    assert PER_TOKEN["deepseek-v3"] == 70_272
    assert PER_TOKEN["gemma-3-27b"] == 507_904


@pytest.mark.parametrize(("value_bits", "expected"), [(8, 52_224), (4, 39_936)])
def test_qwen3_30b_with_8_bit_keys(value_bits, expected):
    key, value = (Scheme(bits, "token", 64, "asymmetric") for bits in (8, value_bits))
    shape = shape_of("qwen3-30b-a3b")
    assert cache_bytes(Policy(key, value), shape, tokens=1) == expected


def test_head_dim_is_read_and_not_divided():
    assert shape_of("qwen3-4b").head_dim == 128  # hidden / heads would be 80
    assert shape_of("qwen3-30b-a3b").head_dim == 128  # and here 64


@pytest.mark.parametrize("name", ["mistral-7b-v0.3", "qwen2.5-7b", "qwen3-4b"])
def test_a_window_that_is_switched_off_does_not_slide(name):
    assert shape_of(name).sliding_layers == 0


# --- sliding layers and latents -------------------------------------------------------
def test_gpt_oss_grows_half_as_fast_after_its_window():
    shape = shape_of("gpt-oss-120b")
    sizes = [cache_bytes("fp16", shape, tokens=T) for T in range(301)]
    steps = [b - a for a, b in pairwise(sizes)]
    assert steps == [73_728] * 128 + [36_864] * 172
    assert cache_bytes("fp16", shape, tokens=1000) == 18 * 2048 * (1000 + 128)


def test_gemma_3_grows_in_10_of_62_layers_after_its_window():
    shape = shape_of("gemma-3-27b")
    assert (shape.growing_layers, shape.sliding_layers) == (10, 52)
    assert bytes_per_token("fp16", shape) == 81_920
    assert cache_bytes("fp16", shape, tokens=2000) == 8192 * (10 * 2000 + 52 * 1024)


def test_a_latent_holds_no_values():
    shape = shape_of("deepseek-v3")
    assert shape.widths == (576,)
    assert cache_bytes("fp16", shape, tokens=8192) == 8192 * 70_272
    # one scale per 64 numbers: 9 per token and layer
    int4 = cache_bytes("int4-token-g64", shape, tokens=8192)
    assert int4 == 8192 * 61 * (576 // 2 + 9 * 2)


def test_products_bind_where_128_query_heads_read_one_latent():
    shape = shape_of("deepseek-v3")
    assert decode_time("fp16", shape, "H200", 32768)["limit"] == "tensor cores"
    rank = shape.shard(8)
    assert (rank.kv_heads, rank.q_heads) == (1, 16)
    assert decode_time("fp16", rank, "H200", 32768)["limit"] == "bandwidth"


# --- tensor parallel ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "ranks", "share"),
    [
        ("llama-3.3-70b", 8, 8),
        ("qwen3-30b-a3b", 4, 4),
        ("qwen3-30b-a3b", 8, 4),  # four KV heads: every one is held twice
        ("deepseek-v3", 8, 1),
        ("gpt-oss-120b", 2, 2),
    ],
)
def test_bytes_of_a_rank(name, ranks, share):
    shape = shape_of(name)
    rank = cache_bytes("int8-token", shape, tokens=777, tensor_parallel=ranks)
    assert rank * share == cache_bytes("int8-token", shape, tokens=777)


@pytest.mark.parametrize(("name", "ranks"), [("qwen2.5-7b", 8), ("smollm2-135m", 2)])
def test_ranks_that_cannot_share_the_heads(name, ranks):
    with pytest.raises(ValueError, match=f"tensor_parallel={ranks} with kv_heads="):
        shape_of(name).shard(ranks)


# --- the exact inverse ----------------------------------------------------------------
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_one_more_token_or_user_does_not_fit(name, policy):
    shape, budget = shape_of(name), 12_345_678_901
    T = max_tokens(policy, budget, shape, batch=3)
    assert (
        peak_bytes(policy, shape, T, 3) <= budget < peak_bytes(policy, shape, T + 1, 3)
    )
    users = max_batch(policy, budget, shape, 1500)
    used = [peak_bytes(policy, shape, 1500, n) for n in (users, users + 1)]
    assert used[0] <= budget < used[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_every_model_agrees_with_its_own_columns(name):
    shape, weights = shape_of(name), 8 * GIB
    rows = plan(shape, "A100-80GB", POLICIES, 2048, 32, weights, reserve=8 * GIB)
    for row in rows:
        assert row["fits"] == (row["max_users"] >= 32) == (row["max_tokens"] >= 2048)
        assert row["total_bytes"] == row["cache_bytes"] + 16 * GIB
    assert [row["bits_per_element"] for row in rows][:1] == [16]


# Users with 2,048 tokens each: the smallest card for weights of 16 bits, a tenth of
# the memory kept free.
@pytest.mark.parametrize(
    ("name", "fp16", "int8", "int4"),
    [
        ("llama-2-7b", "A100-80GB", "A100-40GB", "RTX-4090"),
        ("llama-3.1-8b", "A100-40GB", "RTX-4090", "RTX-4090"),
        ("mistral-7b-v0.3", "RTX-4090", "RTX-4090", "RTX-4090"),
    ],
)
def test_the_smallest_card_for_32_users(name, fp16, int8, int4):
    shape = shape_of(name)
    cards = sorted(map(device, ("RTX-4090", "A100-40GB", "A6000", "A100-80GB")),
                   key=lambda card: card.usable)  # fmt: skip
    for policy, expected in zip(POLICIES, (fp16, int8, int4), strict=False):
        need = 2 * shape.weight_params + peak_bytes(policy, shape, 2048, 32)
        found = next(card.name for card in cards if need <= 0.9 * card.usable)
        assert found == expected


# --- the systems' own formats, 8,192 tokens of Llama-3.1-8B ---------------------------
SIZES = {
    "ggml:f16": 1024,
    "ggml:q8_0": 544,
    "ggml:q5_1": 384,
    "ggml:q5_0": 352,
    "ggml:q4_1": 320,
    "ggml:q4_0": 288,
    "ggml:iq4_nl": 288,
    "vllm:fp8_e4m3": 512,
    "vllm:int8_per_token_head": 528,
    "vllm:fp8_per_token_head": 528,
    "vllm:int4_per_token_head": 272,
    "vllm:nvfp4": 288,
    "vllm:ultraquant_4bit": 272,
    "vllm:turboquant_k8v4": 392,
    "vllm:turboquant_4bit_nc": 268,
    "vllm:turboquant_k3v4_nc": 236,
    "vllm:turboquant_3bit_nc": 204,
    "vllm:octave_k3v4": 256,
    "vllm:octave_k3v3": 224,
    "vllm:octave_k3v3_compact": 200,
    "tensorrt_llm:int8": 512,
    "tensorrt_llm:fp8": 512,
    "tensorrt_llm:nvfp4": 288,
    "hf:quanto-int4-axis0": 288,
    "hf:quanto-int4-axis-1": 288,
    "hf:quanto-int2-axis0": 160,
    "hf:hqq-int4-axis0": 288,
    "hf:hqq-int2-axis1": 160,
    "ocp:mxfp4": 272,
    "kivi:key-4": 320,
    "kivi:value-2": 192,
    "flexgen:int4": 288,
}


def layer_bytes(fmt, shape):
    """Bytes of K and V of one layer; vLLM's formats store both at once."""
    return fmt.nbytes(shape) * (2 if isinstance(fmt, Format) else 1)


@pytest.mark.parametrize(("name", "mib"), SIZES.items())
def test_mib_of_8192_tokens(name, mib):
    model = shape_of("llama-3.1-8b")
    fmt = FORMATS.get(name) or find_format(name)
    shape = (model.kv_heads, 8192, model.head_dim)
    assert model.layers * layer_bytes(fmt, shape) == mib * MIB
    numbers = model.numbers(8192)
    assert fmt.bits_per_element(shape) == 8 * mib * MIB / numbers


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("ggml:q8_0", Scheme(8, "token", 32)),
        ("ggml:q4_1", Scheme(4, "token", 32, "asymmetric")),
        ("vllm:int8_per_token_head", Scheme(8, "token", None, scale_dtype="float32")),
        ("ocp:mxfp4", Scheme(4, "token", 32, "e2m1", "e8m0")),
    ],
)
def test_a_format_and_its_setting_of_our_words_have_the_same_size(name, scheme):
    model = shape_of("qwen3-4b")
    shape = (model.kv_heads, 321, model.head_dim)
    stored = model.layers * layer_bytes(find_format(name), shape)
    assert stored == cache_bytes(Policy(scheme, scheme), model, tokens=321)
