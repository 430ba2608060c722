"""The real model, where its weights are here (`kvq model fetch gemma-3-270m`)."""

import pytest

from kvq.model import load, weights
from kvq.model.gguf_file import open_gguf
from kvq.model.tokenizer import bos_token, tokenizer

pytest.importorskip("gguf", reason="needs the package gguf")
pytest.importorskip("tokenizers", reason="needs the package tokenizers")
PATH = weights.cached_path("gemma-3-270m")
pytestmark = pytest.mark.skipif(
    not PATH.exists(), reason="no weights: run `kvq model fetch gemma-3-270m`"
)


def test_it_goes_on_as_it_does_in_transformers():
    """Transformers 5.24 on the same file, greedily, continues with these words."""
    file = open_gguf(PATH)
    text, model = tokenizer(file), load(file)
    ids = [bos_token(file), *text.encode("The capital of France is").ids]
    continued = text.decode(list(model.generate(ids, 8)))
    assert "capital of the country of France" in continued
