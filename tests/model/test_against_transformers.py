"""Our decoder beside Transformers, on the weights of real models.

`make test-models` runs it. It needs the extra `hf` and weights (`kvq model fetch`).
"""

import contextlib
import warnings

import numpy as np
import pytest

from kvq.model import load, weights
from kvq.model.texts import bundled_tokens

pytest.importorskip("gguf", reason="needs the package gguf")
with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")  # while it is imported, it warns about itself
    import kvq.integrations.transformers  # noqa: F401
torch = pytest.importorskip("torch", reason="needs torch (the extra hf)")
pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

from kvq.integrations.transformers import KVQCache, load_gguf  # noqa: E402


@pytest.fixture(scope="module", params=weights.MODELS)
def models(request):
    """(ours, theirs) of the same file."""
    path = weights.cached_path(request.param)
    if not path.exists():
        pytest.skip(f"no weights: run `kvq model fetch {request.param}`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = load_gguf(path)
    return load(path), theirs


def test_logits_are_equal_up_to_float32_noise(models):
    """600 tokens: beyond Gemma's sliding window of 512.

    The ids are words of a novel to SmolLM2 and any words to Gemma, after its BOS.
    """
    ours, theirs = models
    ids = np.r_[2, bundled_tokens()[:599]].astype(np.int64)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    expected = expected.numpy()
    found = ours.logits(ours.forward(ids, ours.caches("fp32")))
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


PROMPT = bundled_tokens()[:150].astype(np.int64)


@pytest.mark.parametrize("policy", ["int8-token", "kivi-4", "kivi-2"])
def test_the_drop_in_writes_what_our_decoder_writes(models, policy):
    """kivi's first block leaves its window of 128 while the tenth word is written."""
    ours, theirs = models
    cache = KVQCache(policy, theirs.config)
    found = theirs.generate(
        torch.from_numpy(PROMPT)[None],
        attention_mask=torch.ones(1, 150),
        cache=cache,
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert cache.get_seq_length() == 165
    theirs, mine = found[0, 150:].tolist(), list(ours.generate(PROMPT, 16, policy))
    same = next((i for i in range(16) if theirs[i] != mine[i]), None)
    if same is not None:  # only where two words are as likely, but for noise
        start = np.concatenate([PROMPT, mine[:same]])
        hidden = ours.forward(start, ours.caches(policy))
        logits = ours.logits(hidden[-1:])[0]
        assert logits.max() - logits[theirs[same]] < 0.02 * np.std(logits)


def test_four_bits_are_the_same_codes_until_noise_has_grown(models):
    """A code next to a tie falls either way, and later layers see another number.

    So two float32 programs agree on the codes of the first layers only.
    """
    ours, theirs = models
    policy = "int4-token-g32-asym"
    cache, caches = KVQCache(policy, theirs.config), ours.caches(policy)
    with torch.no_grad():
        theirs.model(torch.from_numpy(PROMPT)[None], cache=cache)
    ours.forward(PROMPT, caches)
    apart = []
    for layer, c in zip(cache.layers, caches, strict=True):
        (found,), (expected,) = layer.store.rows[0][0].chunks, c.rows[0][0].chunks
        apart.append(np.mean(found.codes != expected.codes))
    assert max(apart[:3]) < 0.01
    assert apart[-1] > 0.1
