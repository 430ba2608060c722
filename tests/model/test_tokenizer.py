from importlib.resources import files

import numpy as np
import pytest
from tiny_model import LLAMA, gguf, random_weights, write

from kvq.model.texts import bundled_tokens, tokens_for
from kvq.model.tokenizer import bos_token, merges_by_score, tokenizer
from kvq.samples import real_kv

pytest.importorskip("tokenizers", reason="needs the package tokenizers")

# A space is Ġ in the alphabet of bytes.
SAMPLE = files("kvq") / "data" / "smollm2_sample.npz"

WORDS = ["<|end|>", "h", "e", "l", "o", "Ġ", "1", "2", "he", "ll", "hell", "hello"]
WORDS += ["Ġhello", "12", "Ã", "©"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]


def vocabulary(path, kind="gpt2", pre="smollm", words=WORDS, merges=MERGES):
    """A model file with nothing but a vocabulary."""
    out = gguf.GGUFWriter(path, "llama")
    out.add_tokenizer_model(kind)
    out.add_tokenizer_pre(pre)
    out.add_token_list(words)
    out.add_token_types([3] + [1] * (len(words) - 1))
    out.add_token_merges(merges)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_text_becomes_ids_and_comes_back(tmp_path):
    t = tokenizer(vocabulary(tmp_path / "v.gguf"))
    text = "hello hello 12é"
    assert t.encode(text).tokens == ["hello", "Ġhello", "Ġ", "1", "2", "Ã", "©"]
    assert t.encode(text).ids == [11, 12, 5, 6, 7, 14, 15]
    assert t.decode(t.encode(text).ids) == text


def test_control_tokens_are_recognized(tmp_path):
    t = tokenizer(vocabulary(tmp_path / "v.gguf"))
    assert t.encode("he<|end|>").ids == [8, 0]


PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "abc", "▁ab", "▁▁"]
PIECES += ["<0x21>", "<0xC3>", "<0xA9>"]
SCORES = [0, 0, 0, -6, -7, -8, -9, -2, -1, -4, -3, 0, 0, 0, 0]
TYPES = [2, 3, 3] + [1] * 8 + [4] + [6] * 3


def sentencepiece(path, prefix):
    out = gguf.GGUFWriter(path, "gemma3")
    out.add_tokenizer_model("llama")
    out.add_token_list(PIECES)
    out.add_token_types(TYPES)
    out.add_token_scores([float(s) for s in SCORES])
    out.add_add_space_prefix(prefix)
    out.add_bos_token_id(1)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_merges_follow_the_scores():
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    assert merges_by_score(vocab, SCORES) == [
        ("▁", "▁"),
        ("b", "c"),
        ("a", "b"),
        ("▁", "ab"),
        ("a", "bc"),
        ("ab", "c"),
    ]


def test_sentencepiece(tmp_path):
    t = tokenizer(sentencepiece(tmp_path / "v.gguf", prefix=False))
    text = "ab abc  b!é"
    # "bc" has a better score than "ab": abc is a + bc. No word: bytes.
    tokens = ["ab", "▁", "abc", "▁▁", "b", "<0x21>", "<0xC3>", "<0xA9>"]
    assert t.encode(text).tokens == tokens
    assert t.decode(t.encode(text).ids) == text
    assert t.encode("</s>c").ids == [2, 6]


def test_sentencepiece_with_a_space_before_the_text(tmp_path):
    t = tokenizer(sentencepiece(tmp_path / "v.gguf", prefix=True))
    assert t.encode("ab").tokens == ["▁ab"]
    assert t.decode(t.encode("ab c").ids) == "ab c"


def test_what_must_come_first(tmp_path):
    assert bos_token(sentencepiece(tmp_path / "a.gguf", prefix=True)) == 1
    assert bos_token(vocabulary(tmp_path / "b.gguf")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "t5"}, "unsupported tokenizer 't5' with pre-tokenizer 'smollm'"),
        ({"kind": "llama"}, "has no 'tokenizer.ggml.scores'"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2'; valid: 'gpt2' with 'smollm'"),
        ({"words": [*WORDS, "he"]}, "some twice"),
        ({"merges": ["h x"]}, "its merges do not fit its words"),
        ({"merges": ["h e l"]}, "its merges do not fit its words"),
    ],
)
def test_another_vocabulary_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer(vocabulary(tmp_path / "v.gguf", **changes))


def test_the_bundled_ids_are_the_bundled_samples_text():
    ids = bundled_tokens()
    assert ids.shape == (16384,)
    assert ids.dtype == np.int32
    assert ids.max() < 49152
    with np.load(SAMPLE) as sample:
        np.testing.assert_array_equal(ids[:512], sample["token_ids"])
    assert real_kv().k.shape[1] == 512


def test_text_files(tmp_path):
    path, text = vocabulary(tmp_path / "v.gguf"), tmp_path / "text.txt"
    text.write_text("hello 12", encoding="utf-8")
    ids = tokens_for(path, text=text)
    np.testing.assert_array_equal(ids, [11, 5, 6, 7])
    assert ids.dtype == np.int32
    for data, message in [(b"he\xff", "not UTF-8 text"), (b" \n", "holds no text")]:
        text.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            tokens_for(path, text=text)


def test_files_of_ids(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.array([3, 1, 2], np.uint16))
    np.testing.assert_array_equal(tokens_for(None, ids=path), [3, 1, 2])
    for array in (np.ones(3), np.ones((2, 3), int), np.zeros(0, int), np.array([-1])):
        np.save(path, array)
        with pytest.raises(ValueError, match=r"ids\.npy: .*token ids"):
            tokens_for(None, ids=path)
    for data in (b"", b"\x93NUMPY\x01", b"text"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"ids\.npy: not a \.npy file"):
            tokens_for(None, ids=path)


def test_the_bundled_ids_fit_no_other_vocabulary(tmp_path):
    path = write(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA))
    with pytest.raises(ValueError, match="has another vocabulary than the bundled ids"):
        tokens_for(path)
