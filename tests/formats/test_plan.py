"""Caches of whole models in other systems' formats."""

import pytest

from kvq.formats.plan import format_cache_bytes, format_plan
from kvq.memory import ModelShape, cache_bytes

SHAPE = ModelShape(layers=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("ggml:q8_0", 544),
        ("ggml:q4_0", 288),
        ("vllm:int8_per_token_head", 528),
        ("vllm:int4_per_token_head", 272),
        ("vllm:turboquant_4bit_nc", 268 * 28 / 32 + 1024 * 4 / 32),
        ("tensorrt_llm:fp8", 512),
    ],
)
def test_8192_tokens_of_an_8b_model(name, mib):
    assert format_cache_bytes(name, SHAPE, tokens=8192) == mib * 2**20


def test_pages_are_paid_for_whole():
    one = format_cache_bytes("ggml:q8_0", SHAPE, tokens=1)
    assert one == format_cache_bytes("ggml:q8_0", SHAPE, tokens=256)
    assert one < format_cache_bytes("ggml:q8_0", SHAPE, tokens=257)
    assert format_cache_bytes("ggml:q8_0", SHAPE, tokens=1, page=1) == one / 256


def test_hugging_face_keeps_a_residual_in_full_precision():
    extra = 127 * 32 * 8 * 2 * 128 * (2 - 4.5 / 8)
    quantized = 8192 * 32 * 8 * 2 * 128 * 4.5 / 8
    got = format_cache_bytes("hf:quanto-int4-axis0", SHAPE, tokens=8192)
    assert got == quantized + extra


def test_a_sliding_layer_holds_its_window():
    shape = ModelShape(36, 8, 64, sliding_window=128, sliding_layers=18)
    names = {"tokens": 4096, "page": 1}
    got = format_cache_bytes("ggml:f16", shape, **names)
    assert got == cache_bytes("fp16", shape, tokens=4096)


def test_a_latent_has_no_values_to_put_in_a_slot():
    latent = ModelShape(61, 1, 576, value_dim=512, latent=True)
    assert format_cache_bytes("ggml:f16", latent, tokens=256) == 61 * 256 * 576 * 2
    with pytest.raises(ValueError, match="a latent has no values"):
        format_cache_bytes("vllm:int8_per_token_head", latent, tokens=256)


@pytest.mark.parametrize("name", ["ggml:q4_0", "vllm:nvfp4", "hf:hqq-int4-axis1"])
def test_max_tokens_is_the_exact_inverse(name):
    row = format_plan(name, SHAPE, "RTX-4090", 8192, 2, weight_bytes=16e9)
    T = row["max_tokens"]
    room = row["total_bytes"] - row["cache_bytes"]
    usable = format_cache_bytes(name, SHAPE, tokens=T, batch=2) + room
    over = format_cache_bytes(name, SHAPE, tokens=T + 1, batch=2) + room
    from kvq.hardware import device

    assert usable <= device("RTX-4090").usable < over


def test_a_plan_without_a_device_says_what_it_costs():
    row = format_plan("ggml:q8_0", SHAPE, None, 8192)
    assert row["bits_per_element"] == 8.5
    assert row["bytes_per_token"] == 32 * 8 * 2 * 128 * 8.5 / 8
    assert "fits" not in row
