"""Files that are broken, cut, or of another kind: one line, and no memory wasted."""

import resource
import struct

import numpy as np
import pytest
from tiny_model import GEMMA, LLAMA, gguf, random_weights, write

from kvq.model import gguf_file, load
from kvq.model.gguf_file import GGUFFile


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA))


def refused(path):
    """The one line that `load` says about the file."""
    with pytest.raises(ValueError, match=r"\.gguf: ") as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_metadata_and_tensors_are_read(path):
    file = GGUFFile(path)
    assert file.get("general.architecture") == "llama"
    assert file.integer("llama.block_count") == 2
    assert file.number("llama.rope.freq_base") == 500.0
    assert file.shape("blk.1.ffn_down.weight") == (20, 28)
    x = file.tensor("blk.1.ffn_down.weight", (20, 28))
    np.testing.assert_array_equal(x, random_weights(LLAMA)["blk.1.ffn_down.weight"])
    assert x.flags.writeable


def test_what_is_missing_is_named(path):
    file = GGUFFile(path)
    assert file.get("no.such.key", 5) == 5
    for call, name in [
        (lambda: file.get("no.such.key"), "no.such.key"),
        (lambda: file.integer("general.architecture"), "general.architecture='llama'"),
        (lambda: file.shape("blk.9.attn_q.weight"), "blk.9.attn_q.weight"),
        (lambda: file.tensor("output_norm.weight", (3,)), r"expected \(3,\)"),
    ]:
        with pytest.raises(ValueError, match=name):
            call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "unsupported architecture 'qwen2'; valid: llama"),
        ({"q_heads": 5}, "5 query heads cannot share 2 KV heads"),
        ({"head_dim": 9}, "head_dim=9"),
        ({"layers": 3}, "blk.2.attn_norm.weight"),
        ({"layers": 1}, "unknown tensor 'blk.1"),
        ({"layers": 4000}, "block_count=4000"),
        ({"width": 22}, r"expected \(22,\)|expected \(37, 22\)"),
        ({"hidden": 27}, r"blk.0.ffn_gate.weight is \(28, 20\); expected \(27, 20\)"),
        ({"eps": 0.0}, "layer_norm_rms_epsilon=0.0"),
        ({"base": float("nan")}, "freq_base=nan"),
    ],
)
def test_a_model_that_does_not_fit_its_metadata(tmp_path, changes, message):
    path = write(tmp_path / "m.gguf", LLAMA | changes, random_weights(LLAMA))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_scaled_rope_is_refused(tmp_path):
    path = write(
        tmp_path / "m.gguf",
        LLAMA,
        random_weights(LLAMA),
        llama__rope__scaling__type="linear",
    )
    assert "unsupported RoPE scaling 'linear'; valid: none" in refused(path)


def test_an_unknown_or_missing_tensor_is_named(tmp_path):
    weights = random_weights(GEMMA)
    extra = weights | {"rope_freqs.weight": np.ones(5, np.float32)}
    path = write(tmp_path / "a.gguf", GEMMA, extra)
    assert "unknown tensor 'rope_freqs.weight' in a gemma3 model" in refused(path)
    del weights["blk.3.attn_k_norm.weight"]
    path = write(tmp_path / "b.gguf", GEMMA, weights)
    assert "has no tensor 'blk.3.attn_k_norm.weight'" in refused(path)


def test_a_tensor_type_that_cannot_be_read_is_named(tmp_path):
    weights = random_weights(LLAMA)
    weights["output_norm.weight"] = np.ones(20, np.int32)
    text = refused(write(tmp_path / "m.gguf", LLAMA, weights))
    assert "output_norm.weight has type I32, which cannot be read; valid: F32" in text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path, bad):
    weights = random_weights(LLAMA)
    weights["blk.1.attn_v.weight"][3, 4] = bad
    text = refused(write(tmp_path / "m.gguf", LLAMA, weights))
    assert "blk.1.attn_v.weight holds numbers that are not finite" in text


def test_missing_files_and_folders_say_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.gguf")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04" * 20, b"GGUF", b"\0" * 99])
def test_another_kind_of_file(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert "not a complete GGUF file" in refused(path)


def test_another_byte_order_is_refused(path):
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack(">I", 3)
    path.write_bytes(data)
    refused(path)


def test_a_file_cut_anywhere_is_refused(path):
    data = path.read_bytes()
    cut = path.with_name("cut.gguf")
    for n in np.linspace(1, len(data) - 60, 60).astype(int):
        cut.write_bytes(data[:n])
        assert "not a complete GGUF file" in refused(cut)


HUGE = 2**60


def _array(kind, count, body):
    """A file whose only metadata is an array that promises `count` items."""
    key = b"k"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    return head + struct.pack("<IIQ", 9, kind, count) + body


@pytest.mark.parametrize(
    "data",
    [
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE),
        _array(0, HUGE, b"\1" * 50),
        _array(8, HUGE, struct.pack("<Q", HUGE)),
        _array(9, 2, struct.pack("<IQ", 9, 1) * 5000),
        _array(77, 3, b"\1" * 50),
    ],
)
def test_promises_beyond_the_end_cost_nothing(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "not a complete GGUF file" in refused(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_endless_metadata_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    path.write_bytes(_array(0, 5000, b"\1" * 5000))
    monkeypatch.setattr(gguf_file, "MAX_PIECES", 1000)
    assert "more than 1,000 pieces of metadata" in refused(path)


def complaint(path):
    """What `load` says about a file; nothing if it is one."""
    try:
        load(path)
    except ValueError as error:
        return str(error)
    return ""


def test_flipped_bytes_are_survived(path):
    """Either a model comes out or one line does: no other exception."""
    data, rng = path.read_bytes(), np.random.default_rng(0)
    broken, outcomes = path.with_name("broken.gguf"), set()
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(0, 3000, 3):  # metadata and the list of tensors
            damaged[at] = rng.integers(256)
        broken.write_bytes(damaged)
        message = complaint(broken)
        assert message == "" or ("broken.gguf: " in message and "\n" not in message)
        outcomes.add(message == "")
    assert outcomes == {True, False}


def test_the_package_gguf_is_the_judge_of_the_test_files(path):
    assert len(gguf.GGUFReader(path).tensors) == 2 + 9 * 2
