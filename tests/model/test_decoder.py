from dataclasses import replace

import numpy as np
import pytest
import tiny_model
from tiny_model import GEMMA, LLAMA, gguf, random_weights, write

from kvq.layers import parse_layers, parse_policy
from kvq.model import decoder, load

TOKENS = np.random.default_rng(7).integers(0, 37, 23)


@pytest.fixture(scope="module", params=["llama", "llama-untied", "gemma3"])
def pair(request, tmp_path_factory):
    """(the model that was loaded, logits by plain loops)."""
    c = GEMMA if request.param == "gemma3" else LLAMA
    weights = random_weights(c, tied=request.param != "llama-untied")
    path = write(tmp_path_factory.mktemp("m") / "m.gguf", c, weights)
    return load(path), tiny_model.logits(c, weights, TOKENS)


def run(model, tokens, policy="fp32", **options):
    return model.logits(model.forward(tokens, model.caches(policy), **options))


# Sums of tens of float32 products through seven layers: some 1e-5 of the largest.
def close(a, b, tolerance=3e-5):
    return np.abs(a - b).max() <= tolerance * np.abs(b).max()


def test_logits_agree_with_plain_loops(pair):
    model, expected = pair
    assert close(run(model, TOKENS), expected)


@pytest.mark.parametrize("chunk", [1, 5, 22])
def test_prefill_in_chunks_gives_the_same(pair, monkeypatch, chunk):
    model, expected = pair
    monkeypatch.setattr(decoder, "CHUNK", chunk)
    assert close(run(model, TOKENS), expected)


def test_token_by_token_gives_the_same(pair):
    model, expected = pair
    caches = model.caches("fp32")
    steps = [model.logits(model.forward([t], caches)) for t in TOKENS]
    assert close(np.concatenate(steps), expected)
    held = [W or len(TOKENS) for W in model.config.windows]
    assert [len(cache) for cache in caches] == held


@pytest.mark.parametrize(
    "policy", ["fp32", "int8-token", "kivi-2:residual=3", "kivi-2:residual=2:sinks=3"]
)
@pytest.mark.parametrize("sizes", [[80], [1] * 80, [3, 40, 1, 36]])
def test_what_a_sliding_layer_gives_up_was_not_seen(tmp_path, policy, sizes):
    policy = parse_policy(policy)
    model = load(write(tmp_path / "m.gguf", GEMMA, random_weights(GEMMA)))
    tokens = np.random.default_rng(3).integers(0, 37, 80)
    kept = [decoder.KVCache(policy) for _ in range(7)]
    whole, caches, out, start = model.forward(tokens, kept), model.caches(policy), [], 0
    for n in sizes:
        out.append(model.forward(tokens[start : start + n], caches))
        start += n
    held = [len(cache) for cache in caches]
    assert held[5] == 80  # the layer that sees everything
    if len(sizes) > 1:
        last = sizes[-1] + GEMMA["window"] + policy.block + policy.sinks
        assert max(held[:5] + held[6:]) < last
        assert sum(c.nbytes for c in caches) < sum(c.nbytes for c in kept)
    difference = np.abs(np.concatenate(out) - whole)
    assert np.median(difference) <= 1e-4 * np.abs(whole).max()


def test_a_window_as_long_as_the_layers_own_keeps_all_tokens(tmp_path):
    model = load(write(tmp_path / "m.gguf", GEMMA, random_weights(GEMMA)))
    caches = model.caches("kivi-2")  # 128 tokens in full precision, layers of 5
    assert {cache.sliding_window for cache in caches} == {None}
    assert model.caches("fp16")[0].sliding_window == 5
    for residual, slides in ((4, True), (5, False)):
        policy = parse_policy(f"kivi-2:residual={residual}")
        assert (model.caches(policy)[0].sliding_window == 5) == slides


def test_a_wrong_model_would_be_noticed(pair):
    model, expected = pair
    bases = tuple(b * 1.5 for b in model.config.rope_bases)
    wrong = replace(model, config=replace(model.config, rope_bases=bases))
    assert not close(run(wrong, TOKENS), expected, 1e-3)


def test_interleaved_rows_matter(tmp_path, monkeypatch):
    weights = random_weights(LLAMA)
    path = write(tmp_path / "m.gguf", LLAMA, weights)
    monkeypatch.setattr(decoder, "half_split", lambda W, heads: W)
    expected = tiny_model.logits(LLAMA, weights, TOKENS)
    assert not close(run(load(path), TOKENS), expected, 1e-3)


def test_a_window_narrower_than_the_text_matters(tmp_path):
    weights = random_weights(GEMMA)
    path = write(tmp_path / "m.gguf", GEMMA | {"window": 50}, weights)
    expected = tiny_model.logits(GEMMA, weights, TOKENS)
    assert not close(run(load(path), TOKENS), expected, 1e-3)


@pytest.mark.parametrize("policy", ["int8-token", "int4-channel-g32", "kivi-2"])
def test_chunks_do_not_matter_to_a_quantized_cache(pair, monkeypatch, policy):
    model, _ = pair
    tokens = np.random.default_rng(3).integers(0, 37, 80)
    policies = decoder.KVCache(policy).policy
    policies = replace(policies, residual=min(policies.residual, 7), sinks=2)
    whole = run(model, tokens, policies)
    monkeypatch.setattr(decoder, "CHUNK", 9)
    pieces = run(model, tokens, policies)
    # Noise of one ulp in a key can move one of its codes by one step.
    assert np.median(np.abs(whole - pieces)) <= 1e-4 * np.abs(whole).max()
    assert not close(whole, run(model, tokens), 1e-4)


def test_each_layer_may_have_its_own_policy(pair):
    model, _ = pair
    L = model.config.layers
    policies = ["int4-token-g64"] + ["fp32"] * (L - 1)
    caches = model.caches(policies)
    model.forward(TOKENS, caches)
    assert [c.policy.name for c in caches] == policies
    assert caches[0].nbytes < caches[1].nbytes / 3
    with pytest.raises(ValueError, match=f"{L + 1} policies; valid: one, or {L}"):
        model.caches(["fp32"] * (L + 1))
    by_layer = model.caches(parse_layers("fp16,layers=1:kivi-4"))
    assert [c.policy.name for c in by_layer] == ["fp16", "kivi-4"] + ["fp16"] * (L - 2)
    with pytest.raises(ValueError, match=rf"layer {L} in .*; valid: 0\.\.{L - 1}"):
        model.caches(parse_layers(f"fp16,layers={L}:kivi-4"))


def test_keys_and_values_are_rounded_to_the_dtype_they_enter_with(pair):
    model, _ = pair
    caches = model.caches("kivi-4")
    model.forward(TOKENS, caches, kv_dtype="float16")
    assert caches[0].keys().dtype == np.float16
    assert caches[0].nbytes == 2 * 2 * 10 * 2 * len(TOKENS)


def test_generation_takes_the_most_likely_token(pair):
    model, _ = pair
    tokens = list(TOKENS[:6])
    for token in model.generate(TOKENS[:6], 5):
        assert token == run(model, tokens)[-1].argmax()
        tokens.append(token)
    assert len(tokens) == 11
    stop = tokens[8]
    stopped = list(model.generate(TOKENS[:6], 5, stop=[stop]))
    assert stopped == tokens[6:8][: tokens[6:].index(stop)]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 37], r"token id 37; valid: 0\.\.36"),
        ([-1], r"token id -1"),
        ([], r"tokens \(0,\)"),
        ([[1, 2]], r"tokens \(1, 2\)"),
        ([0.5], "float64"),
        ([1] * 91, "91 tokens; the model was made for 90"),
    ],
)
def test_bad_tokens_change_nothing(pair, tokens, message):
    model, _ = pair
    caches = model.caches("fp32")
    with pytest.raises(ValueError, match=message):
        model.forward(tokens, caches)
    assert len(caches[0]) == 0


def test_quantized_weights_are_dequantized(tmp_path):
    c = LLAMA | {"width": 64, "hidden": 96, "head_dim": 10}
    weights = random_weights(c)
    kinds = {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0}
    kinds["blk.1.ffn_down.weight"] = gguf.GGMLQuantizationType.Q4_1
    kinds["blk.0.attn_q.weight"] = gguf.GGMLQuantizationType.F16
    model = load(write(tmp_path / "m.gguf", c, weights, kinds))
    stored = weights | {
        name: gguf.dequantize(gguf.quantize(weights[name], kind), kind)
        for name, kind in kinds.items()
    }
    assert not np.array_equal(stored["token_embd.weight"], weights["token_embd.weight"])
    assert close(run(model, TOKENS), tiny_model.logits(c, stored, TOKENS))
