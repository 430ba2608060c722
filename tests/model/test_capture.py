import numpy as np
import pytest
from safetensors import SafetensorError
from tiny_model import LLAMA, random_weights, write

from kvq.model import decoder, load
from kvq.model.capture import capture, save
from kvq.samples import load_kv
from kvq.transforms import rope

TOKENS = np.random.default_rng(2).integers(0, 37, 31)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return load(write(folder / "tiny.gguf", LLAMA, random_weights(LLAMA)))


def test_shapes_dtypes_and_names(model):
    arrays = capture(model, TOKENS, [1], queries=9)
    assert {name: x.shape for name, x in arrays.items()} == {
        "k_1": (2, 31, 10),
        "v_1": (2, 31, 10),
        "before_rope_1": (2, 31, 10),
        "q_1": (6, 9, 10),
        "token_ids": (31,),
    }
    assert all(x.dtype == np.float16 for name, x in arrays.items() if name[-1] == "1")
    assert arrays["token_ids"].dtype == np.int32


def test_what_is_captured_is_what_the_cache_holds(model, monkeypatch):
    monkeypatch.setattr(decoder, "CHUNK", 12)
    arrays = capture(model, TOKENS, [0, 1], queries=None, dtype="float32")
    caches = model.caches("fp32")
    model.forward(TOKENS, caches)
    for layer in (0, 1):
        np.testing.assert_array_equal(arrays[f"k_{layer}"], caches[layer].keys())
        np.testing.assert_array_equal(arrays[f"v_{layer}"], caches[layer].values())
    assert not np.allclose(arrays["k_0"], arrays["k_1"])
    assert arrays["q_0"].shape == (6, 31, 10)
    rotated = rope(arrays["before_rope_1"], np.arange(31), LLAMA["base"])
    np.testing.assert_allclose(arrays["k_1"], rotated, rtol=1e-6, atol=1e-6)
    newest = capture(model, TOKENS, [1], queries=4, dtype="float32")["q_1"]
    np.testing.assert_array_equal(newest, arrays["q_1"][:, 27:])


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_study_can_read_the_file(model, tmp_path, suffix):
    path, arrays = tmp_path / f"kv{suffix}", capture(model, TOKENS, [0, 1], 5)
    save(path, arrays)
    sample = load_kv(path, layer=1)
    np.testing.assert_array_equal(sample.k, arrays["k_1"])
    np.testing.assert_array_equal(sample.v, arrays["v_1"])
    np.testing.assert_array_equal(sample.q, arrays["q_1"])
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_fails_leaves_nothing(model, tmp_path):
    arrays = {"k_0": np.ones(3), "bad": object}
    with pytest.raises(SafetensorError):
        save(tmp_path / "kv.safetensors", arrays)
    with pytest.raises(ValueError, match=r"unknown kind of file; valid: \.npz"):
        save(tmp_path / "kv.pt", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, r"layer=2; valid: 0\.\.1"),
        ({"layers": [-1]}, "layer=-1"),
        ({"layers": [0], "queries": 0}, "queries=0"),
        ({"layers": [0], "queries": 32}, r"queries=32; valid: 1\.\.31"),
    ],
)
def test_wrong_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        capture(model, TOKENS, **options)
