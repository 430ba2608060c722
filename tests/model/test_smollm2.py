"""The real model, where its weights are here (`kvq model fetch smollm2-135m`)."""

from importlib.resources import files

import numpy as np
import pytest

from kvq.model import load, weights
from kvq.model.capture import capture
from kvq.model.texts import bundled_tokens, tokens_for
from kvq.model.tokenizer import tokenizer

pytest.importorskip("gguf", reason="needs the package gguf")
SAMPLE = files("kvq") / "data" / "smollm2_sample.npz"
PATH = weights.cached_path("smollm2-135m")
pytestmark = pytest.mark.skipif(
    not PATH.exists(), reason="no weights: run `kvq model fetch smollm2-135m`"
)


@pytest.fixture(scope="module")
def model():
    return load(PATH)


def test_the_bundled_sample_is_captured_again(model):
    """It came from PyTorch; float32 noise decides some roundings to float16.

    At least 98 % of the numbers are equal, the others differ by a rounding of the
    number (2^-10 of it) and the noise of thirty layers (1e-4).
    """
    with np.load(SAMPLE) as sample:
        arrays = capture(model, sample["token_ids"], [0, 7, 15, 29])
        for name in sample.files:
            a, b = sample[name], arrays[name]
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert np.mean(a == b) > 0.98
            a, b = a.astype(np.float64), b.astype(np.float64)
            assert np.all(np.abs(a - b) <= np.abs(a) / 1024 + 1e-4)


def test_the_bundled_ids_are_what_the_tokenizer_gives():
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    t, ids = tokenizer(PATH), bundled_tokens()
    assert t.encode(t.decode(ids.tolist())).ids == ids.tolist()
    np.testing.assert_array_equal(tokens_for(PATH), ids)


@pytest.mark.parametrize("policy", ["fp16", "kivi-4"])
def test_it_knows_the_capital_of_france(model, policy):
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    t = tokenizer(PATH)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    ids = t.encode(prompt + "<|im_start|>assistant\n").ids
    text = t.decode(list(model.generate(ids, 8, policy, stop=[2], kv_dtype="float16")))
    assert "Paris" in text
