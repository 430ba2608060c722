"""`KVQCache` in tiny models of Transformers: the same numbers, bytes and orders."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (the extra hf)")
pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

import tiny_models as tiny  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.cache_utils import QuantizedLayer  # noqa: E402

import kvq  # noqa: E402
from kvq import metrics  # noqa: E402
from kvq.integrations.transformers import KVQCache, KVQLayer  # noqa: E402
from kvq.layers import LayerPolicies  # noqa: E402
from kvq.tensor import concatenate  # noqa: E402

CHANNEL = kvq.Scheme(4, "channel", 8, "asymmetric")
TOKEN = kvq.Scheme(4, "token", 8, "asymmetric")
GROUPED = kvq.Policy(CHANNEL, TOKEN)  # a token shares its scale with seven others
WINDOWED = kvq.Policy(CHANNEL, TOKEN, residual=16, sinks=3)
POLICIES = {"fp32": "fp32", "token": "int4-token-g32-asym", "rotated": "turboquant-4"}
POLICIES |= {"grouped": GROUPED, "windowed": WINDOWED}
MIXED = ["full_attention", "chunked_attention", "chunked_attention"]
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(scope="module", params=[tiny.llama, tiny.gemma], ids=["llama", "gemma"])
def model(request):
    return request.param()


@pytest.fixture(scope="module")
def llama():
    return tiny.llama()


def tensors(shape=(3, 2, 100, 16), seed=0):
    """k, v (B, H, T, D) and (B, H, T, D - 4), float32; one channel is large."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal(shape, np.float32)
    v = rng.standard_normal((*shape[:3], shape[3] - 4), np.float32)
    k[..., 3] += 20
    return torch.from_numpy(k), torch.from_numpy(v)


def view(layer):
    """What the layer holds, k and v, as it would hand it out."""
    B, H = len(layer.store.rows), 2
    k, v = torch.zeros(B, H, 0, 16), torch.zeros(B, H, 0, 12)
    return [x.numpy() for x in layer.update(k, v)]


def arrays(stream):
    """Sinks, codes, scales, zeros and window of a stream, its chunks joined."""
    whole = concatenate(stream.chunks).arrays if stream.chunks else []
    return [stream.sinks, *whole, stream.window]


# --- the same as our decoder ----------------------------------------------------------
@every_policy
def test_every_token_reads_what_it_reads_in_our_decoder(model, policy):
    """Two float32 programs: a scale or a code next to a tie may come out otherwise."""
    tokens, ours = tiny.ids(60), tiny.decoder(model)
    cache, caches = KVQCache(policy, model.config), ours.caches(policy)
    exact = tiny.logits(model, tokens, None)[0].numpy()
    apart, lost = [], []
    for i, token in enumerate(tokens[0].tolist()):
        expected = ours.logits(ours.forward([token], caches))[0]
        found = tiny.logits(model, tokens[:, i : i + 1], cache)[0, 0].numpy()
        apart.append(np.abs(found - expected).max())
        lost.append(np.abs(found - exact[i]).max())
    assert max(apart) < 1e-4 if policy == "fp32" else max(apart) < max(lost) / 5
    assert cache.nbytes == sum(c.nbytes for c in caches)
    for layer, c in zip(cache.layers, caches, strict=True):
        for a, b in zip(layer.store.rows[0], c.rows[0], strict=True):
            for x, y in zip(arrays(a), arrays(b), strict=True):
                assert x.shape == y.shape
                if x.dtype != np.float32:  # packed codes, scales and zeros
                    assert np.count_nonzero(x != y) <= 0.2 * x.size


@pytest.mark.parametrize(
    ("policy", "chunk"), [("int4-token-g32-asym", None), (GROUPED, 1), (WINDOWED, 1)]
)
def test_greedy_text_is_that_of_our_decoder(model, policy, chunk):
    prompt, ours = tiny.ids(50, seed=1), tiny.decoder(model)
    cache = KVQCache(policy, model.config)
    found = tiny.generate(model, prompt, cache, 24, prefill_chunk_size=chunk)
    expected = ours.generate(prompt[0].numpy(), 24, policy)
    assert found[0, 50:].tolist() == list(expected)


def test_an_exact_cache_changes_nothing(model):
    prompt = tiny.ids(50)
    expected = tiny.generate(model, prompt, DynamicCache(config=model.config))
    for cache in (KVQCache("fp32", model.config), KVQCache("fp32")):
        assert torch.equal(tiny.generate(model, prompt, cache), expected)


# --- what is stored -------------------------------------------------------------------
def held(thing, found):
    """Gather every array and tensor that `thing` leads to, by id, into `found`."""
    if isinstance(thing, np.ndarray | torch.Tensor):
        while isinstance(getattr(thing, "base", None), np.ndarray):
            thing = thing.base  # a view keeps all of it
        found[id(thing)] = thing
    elif isinstance(thing, dict | list | tuple):
        for x in thing.values() if isinstance(thing, dict) else thing:
            held(x, found)
    elif hasattr(thing, "__dict__"):
        held(vars(thing), found)
    return found


@every_policy
def test_the_bytes_are_those_of_the_policy_and_all_that_is_held(llama, policy):
    half = copy.deepcopy(llama).to(torch.bfloat16)
    cache = KVQCache(policy, half.config)
    tiny.generate(half, tiny.ids(50), cache, 15)
    assert cache.get_seq_length() == 64
    expected = kvq.cache_bytes(policy, layers=3, kv_heads=2, head_dim=16, tokens=64)
    assert cache.nbytes == expected
    assert sum(x.nbytes for x in held(cache, {}).values()) == expected


def test_full_precision_is_what_came_in_whatever_the_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        layer = KVQLayer(kvq.Policy(CHANNEL, TOKEN, residual=16, sinks=2))
        k, v = (x[:1].to(dtype) for x in tensors())
        for t in (90, 1, 9):
            at = slice(layer.length, layer.length + t)
            read = layer.update(k[:, :, at], v[:, :, at])
        for x, y in zip(read, (k, v), strict=True):
            assert x.dtype == dtype
            exact = torch.float32 if dtype == torch.float64 else dtype
            for part in (slice(0, 2), slice(-16, None)):
                assert torch.equal(x[:, :, part], y[:, :, part].to(exact).to(dtype))
            assert not torch.equal(x, y)


def test_no_number_is_quantized_twice(llama, monkeypatch):
    tokens = []
    real = kvq.quantize

    def spy(x, scheme):
        tokens.append(x.shape[-2])
        return real(x, scheme)

    monkeypatch.setattr("kvq.cache.quantize", spy)
    cache = KVQCache(GROUPED, llama.config)
    tiny.generate(llama, tiny.ids(37), cache, 30)
    quantized = cache.get_seq_length() // 8 * 8
    assert sum(tokens) == 3 * 2 * quantized  # layers, keys and values


def test_channels_with_a_constant_survive_four_bits():
    k, v = tensors((1, 1, 256, 128))
    k[..., 5] += 120
    k[..., 37] -= 90
    q = np.random.default_rng(1).standard_normal((1, 64, 128))
    exact = kvq.attention(q, k[0].numpy(), v[0].numpy())
    error = {}
    for name in ("int4-channel-g32", "int4-token-g64-asym"):
        k_hat, v_hat = KVQLayer(name).update(k, v)
        out = kvq.attention(q, k_hat[0].numpy(), v_hat[0].numpy())
        error[name] = metrics.output_error(exact, out)
    assert error["int4-channel-g32"] < 0.15
    assert error["int4-token-g64-asym"] > 5 * error["int4-channel-g32"]


# --- batches --------------------------------------------------------------------------
def test_padding_is_not_stored_wherever_it_is():
    k, v = tensors((2, 2, 100, 16))
    left = torch.ones(2, 100, dtype=torch.long)
    left[0, :60] = 0
    for mask, where in ((left, slice(60, 100)), (left.flip(1), slice(0, 40))):
        padded = [x.clone() for x in (k, v)]
        for x, y in zip(padded, (k, v), strict=True):
            x[0] = 50
            x[0, :, where] = y[0, :, :40]
        cache = KVQCache(GROUPED, attention_mask=mask)
        alone = KVQLayer(GROUPED)
        for part in (slice(0, 33), slice(33, 100)):  # the padding may come in pieces
            read = cache.update(*(x[:, :, part] for x in padded), 0)
        expected = alone.update(*(x[:1, :, :40] for x in (k, v)))
        for x, y in zip(read, expected, strict=True):
            assert torch.equal(x[0, :, where], y[0])
            assert not x[0][:, ~mask[0].bool()].any()
        store = cache.layers[0].store
        assert store.lengths == [40, 100]
        for a, b in zip(store.rows[0], alone.store.rows[0], strict=True):
            for x, y in zip(arrays(a), arrays(b), strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("policy", [GROUPED, WINDOWED], ids=["grouped", "windowed"])
def test_a_row_of_a_padded_batch_writes_what_it_writes_alone(model, policy):
    prompts = [tiny.ids(n, seed=n)[0] for n in (23, 60, 41)]
    tokens, mask = torch.zeros(2, 3, 60, dtype=torch.long)
    for row, p in enumerate(prompts):
        tokens[row, 60 - len(p) :] = p
        mask[row, 60 - len(p) :] = 1
    cache = KVQCache(policy, model.config, attention_mask=mask)
    found = tiny.generate(model, tokens, cache, attention_mask=mask)
    for row, p in zip(found, prompts, strict=True):
        alone = tiny.generate(model, p[None], KVQCache(policy, model.config))
        assert row[60:].tolist() == alone[0, len(p) :].tolist()


def test_a_batch_without_a_mask_is_refused_where_padding_would_matter(llama):
    tokens = tiny.ids(20, batch=2)
    sinks = kvq.Policy(TOKEN, TOKEN, sinks=3)
    for policy, what in ((GROUPED, "groups of 8 tokens"), (sinks, "3 sinks")):
        with pytest.raises(ValueError, match=f"a batch of 2 with .*{what}"):
            tiny.logits(llama, tokens, KVQCache(policy, llama.config))
    tiny.logits(llama, tokens, KVQCache("int4-token-g32-asym", llama.config))
    cache = KVQCache(GROUPED, llama.config, attention_mask=torch.ones(3, 20))
    with pytest.raises(ValueError, match="attention_mask has 3 rows, the batch 2"):
        tiny.logits(llama, tokens, cache)


# --- rows and columns that move -------------------------------------------------------
@pytest.mark.parametrize("order", [[2, 0, 0], [1, 2, 0], [0, 0, 0]])
def test_reordering_moves_all_of_a_row(order):
    k, v = tensors()
    policy = kvq.Policy(CHANNEL, TOKEN, residual=32)
    mask = torch.ones(3, 10)
    mask[1, :7] = 0
    cache = KVQCache(policy, attention_mask=mask)
    cache.update(k, v, 0)
    (layer,) = cache.layers
    before = view(layer)
    cache.reorder_cache(torch.tensor(order))
    after = view(layer)
    for x, y in zip(after, before, strict=True):
        np.testing.assert_array_equal(x, y[order])
    assert layer.store.lengths == [[100, 93, 100][i] for i in order]


def test_beams_share_what_they_have_in_common():
    cache = KVQCache(GROUPED, attention_mask=torch.ones(3, 1))
    cache.update(*tensors(), 0)
    three = cache.nbytes
    cache.reorder_cache(torch.tensor([1, 1, 1]))
    assert cache.nbytes == three / 3


def test_the_beams_of_a_prompt_have_its_mask():
    mask = torch.ones(2, 10)
    mask[1, :7] = 0
    cache = KVQCache(GROUPED, attention_mask=mask)
    cache.update(*tensors((6, 2, 20, 16)), 0)
    assert cache.layers[0].store.lengths == [20, 20, 20, 13, 13, 13]


def test_rows_are_repeated_and_selected():
    layer = KVQLayer(GROUPED, mask=np.ones((3, 1), bool))
    layer.update(*tensors())
    before = view(layer)
    layer.batch_repeat_interleave(2)
    for x, y in zip(view(layer), before, strict=True):
        np.testing.assert_array_equal(x, y.repeat(2, axis=0))
    for chosen in (
        torch.tensor([4, 1]),
        torch.tensor([False, True]),
    ):
        expected = [x[chosen.numpy()] for x in view(layer)]
        layer.batch_select_indices(chosen)
        for x, y in zip(view(layer), expected, strict=True):
            np.testing.assert_array_equal(x, y)
    assert layer.batch_size == 1


@pytest.mark.parametrize("keep", [99, 65, 64, 63, 33, 32, 31, 1])
def test_cropping_keeps_what_was_stored(keep):
    k, v = tensors()
    mask = np.ones((3, 20), bool)
    mask[1, :7] = False
    for tokens in (keep, keep - 100):  # transformers 5.0 says what to keep
        layer = KVQLayer(kvq.Policy(CHANNEL, TOKEN, residual=32), mask=mask)
        layer.update(k, v)
        before = view(layer)
        layer.crop(tokens)
        assert layer.get_seq_length() == keep
        for x, y in zip(view(layer), before, strict=True):
            np.testing.assert_array_equal(x, y[:, :, :keep])
        layer.crop(0)
        layer.crop(1000)
        assert layer.get_seq_length() == keep
        with pytest.raises(ValueError, match=f"cannot remove 101 of {keep}"):
            layer.crop(-101)


def test_a_prompt_that_is_cropped_takes_its_mask_along():
    mask = np.ones((1, 40), bool)
    mask[:, 20:30] = False
    layer = KVQLayer(GROUPED, mask=mask)
    k, v = (x[:1] for x in tensors())
    layer.update(k[:, :, :40], v[:, :, :40])
    layer.crop(-20)
    layer.update(k[:, :, 20:40], v[:, :, 20:40])
    assert layer.store.lengths == [40]


@every_policy
def test_beam_search_runs_and_equals_exact_beams_where_nothing_is_lost(model, policy):
    tokens, mask = tiny.ids(30, batch=2), torch.ones(2, 30, dtype=torch.long)
    tokens[1, :9], mask[1, :9] = 0, 0
    options = {"num_beams": 3, "attention_mask": mask}
    cache = KVQCache(policy, model.config, attention_mask=mask)
    found = tiny.generate(model, tokens, cache, 12, **options)
    assert cache.get_seq_length() == 41
    exact = DynamicCache(config=model.config)
    expected = tiny.generate(model, tokens, exact, 12, **options)
    assert torch.equal(found, expected) or policy != "fp32"


@pytest.mark.parametrize("policy", ["fp32", "int4-token-g32-asym"])
def test_assisted_decoding_writes_the_same_text(model, policy):
    prompt = tiny.ids(30).repeat(1, 2)  # so that a look-up finds candidates
    options = {"count": 40, "eos_token_id": 60}  # transformers 4.57 cannot do without
    cache = KVQCache(policy, model.config)
    plain = tiny.generate(model, prompt, KVQCache(policy, model.config), **options)
    found = tiny.generate(model, prompt, cache, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(found, plain)


def test_a_snapshot_answers_two_questions_as_a_fresh_cache_would(model):
    shared, cache = tiny.ids(45), KVQCache(WINDOWED, model.config)
    tiny.logits(model, shared, cache)
    for seed in (1, 2):
        question, fresh = tiny.ids(13, seed=seed), KVQCache(WINDOWED, model.config)
        tiny.logits(model, shared, fresh)
        snapshot = copy.deepcopy(cache)
        found = tiny.logits(model, question, snapshot)
        assert torch.equal(found, tiny.logits(model, question, fresh))
        assert snapshot.get_seq_length() == 58
    assert cache.get_seq_length() == 45
    cache.reset()
    assert (cache.nbytes, cache.get_seq_length()) == (0, 0)
    assert torch.equal(
        tiny.logits(model, shared, cache),
        tiny.logits(model, shared, KVQCache(WINDOWED, model.config)),
    )


# --- sliding windows ------------------------------------------------------------------
def test_a_sliding_layer_forgets():
    W, layer = 32, KVQLayer(GROUPED, window=32)
    k, v = tensors((1, 2, 500, 16))
    v[:, :, :468] = 1e4
    for i in range(499):
        assert layer.get_mask_sizes(1) == (min(i, W - 1) + 1, max(i - W + 1, 0))
        k_hat, v_hat = layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert k_hat.shape[2] == v_hat.shape[2] == min(i + 1, W)
        assert len(layer.store) <= W + 8 - 1
    assert layer.get_seq_length() == 499
    assert v_hat.max() > 9e3
    _, v_hat = layer.update(k[:, :, 499:], v[:, :, 499:])
    assert v_hat.abs().max() < 10


def test_a_sliding_model_stores_less_and_says_the_same(model):
    tokens = tiny.ids(200)
    caches = KVQCache(GROUPED, model.config), KVQCache(GROUPED)
    for i in range(0, 200, 25):
        slid, whole = (tiny.logits(model, tokens[:, i : i + 25], c) for c in caches)
        torch.testing.assert_close(slid, whole, rtol=0, atol=0.005)
    slid, whole = caches
    sliding = model.config.get_text_config().model_type == "gemma3_text"
    assert (slid.nbytes < 0.7 * whole.nbytes) == sliding


def test_a_window_no_larger_than_the_residual_is_all_full_precision():
    policy = kvq.Policy(CHANNEL, TOKEN, residual=16)
    layer, (k, v) = KVQLayer(policy, window=16), tensors((1, 2, 90, 16))
    for i in range(90):
        k_hat, _ = layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert torch.equal(k_hat, k[:, :, max(i - 15, 0) : i + 1])


def test_a_sliding_layer_goes_back_only_as_far_as_it_remembers():
    layer, (k, v) = KVQLayer(GROUPED, window=32), tensors((1, 2, 90, 16))
    for i in range(90):
        layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
    kept = 90 - len(layer.store)
    before = [x.copy() for x in view(layer)]
    with pytest.raises(ValueError, match=f"given up tokens 0..{kept - 1}"):
        layer.crop(-20)
    assert layer.get_seq_length() == 90
    layer.crop(-1)
    assert layer.get_seq_length() == 89
    for x, y in zip(view(layer), before, strict=True):
        np.testing.assert_array_equal(x[:, :, 1:], y[:, :, :-1])


# --- what Transformers' own cache does ------------------------------------------------
class Counting(QuantizedLayer):
    """Their flush with a quantizer that changes nothing and counts tokens."""

    quantized = 0

    def _quantize(self, tensor, axis):
        self.quantized += tensor.shape[-2]
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_their_cache_quantizes_its_whole_history_at_every_flush(monkeypatch):
    k, v = tensors((1, 2, 100, 16))
    ours = KVQLayer(kvq.Policy(CHANNEL, TOKEN, residual=8))
    theirs, counted = Counting(residual_length=8), []
    monkeypatch.setattr(
        "kvq.cache.quantize",
        lambda x, scheme: counted.append(x.shape[-2]) or kvq.quantize(x, scheme),
    )
    for part in (slice(0, 36), *(slice(i, i + 1) for i in range(36, 100))):
        ours.update(k[:, :, part], v[:, :, part])
        theirs.update(k[:, :, part], v[:, :, part])
    assert theirs.quantized == 2 * sum(range(36, 101, 8))  # 612 tokens, twice
    assert sum(counted) == 2 * 88  # all but the newest 8..15, once
    assert not theirs.keys.numel()  # not even the newest 8 are exact any more


def test_their_first_answer_is_exact_and_ours_is_what_was_stored():
    k, v = tensors((1, 2, 64, 16))
    first, _ = Counting().update(k, v)
    assert first is k
    stored, _ = KVQLayer(GROUPED).update(k, v)
    assert not torch.equal(stored, k)


@pytest.mark.parametrize("length", [64, 37])
def test_their_channel_groups_need_lengths_that_fit(length):
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto (hf-peers)")
    from transformers.cache_utils import QuantoQuantizedLayer

    k = tensors((1, 3, length, 64))[0]
    theirs = QuantoQuantizedLayer(axis_key=-1, axis_value=-1)
    if length % 64:
        with pytest.raises(ValueError, match="must be a divisor of"):
            theirs.update(k, k)
    else:
        theirs.update(k, k)
    ours = KVQLayer("int4-channel-g32")
    assert ours.update(k, k)[0].shape == k.shape


@pytest.mark.skipif(not tiny.RENAMED, reason="what transformers 5.24 does")
def test_their_cache_takes_no_sliding_model_and_goes_back_for_nobody(model):
    from transformers.cache_utils import QuantizedCache

    if model.config.model_type == "gemma3_text":
        with pytest.raises(ValueError, match="only full attention"):
            QuantizedCache("hqq", model.config)
        KVQCache(GROUPED, model.config)
    else:
        prompt = tiny.ids(30).repeat(1, 2)
        theirs = DynamicCache()
        theirs.layers, theirs.layer_class_to_replicate = [], Counting
        with pytest.raises(ValueError, match=r"[Aa]ssisted"):
            tiny.generate(model, prompt, theirs, prompt_lookup_num_tokens=3)


# --- construction ---------------------------------------------------------------------
def test_layers_may_have_policies_of_their_own(llama):
    few = LayerPolicies(kvq.policy("kivi-2"), {1: kvq.policy("int8-token")})
    for policy in (few, ["kivi-2", "int8-token", "kivi-2"]):
        cache = KVQCache(policy, llama.config)
        assert [layer.policy.name for layer in cache.layers] == [
            *("kivi-2", "int8-token", "kivi-2")
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "int5"}, "unknown policy 'int5'"),
        ({"policy": kvq.Policy(kvq.Scheme(group=None, per="head"), TOKEN)}, "group="),
        ({"policy": ["kivi-2"] * 2, "config": {}}, "2 policies; valid: one, or 3"),
        ({"policy": ["kivi-2"] * 3}, "policies of layers need config"),
        (
            {"policy": "kivi-2", "config": {"layer_types": MIXED}},
            "layers 1, 2 are 'chunked_attention'; valid: 'full_attention' and",
        ),
        (
            {"policy": "kivi-2", "config": {"num_kv_shared_layers": 2}},
            "layers 1..2 read those of others",
        ),
        ({"policy": "kivi-2", "attention_mask": [[2, 1]]}, "expected .* of 0 and 1"),
        ({"policy": "kivi-2", "attention_mask": [1, 1]}, r"shape \(2,\)"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(settings, message, llama):
    if "config" in settings:
        config = copy.deepcopy(llama.config)
        for name, value in settings["config"].items():
            setattr(config, name, value)
        settings = settings | {"config": config}
    with pytest.raises(ValueError, match=message):
        KVQCache(**settings)
