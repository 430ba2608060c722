import math

import numpy as np
import pytest
import tiny_model
from tiny_model import GEMMA, LLAMA, random_weights, write

from kvq.layers import parse_policy
from kvq.model import load
from kvq.model.evaluate import (
    Protocol,
    compare,
    evaluate,
    hidden_states,
    log_softmax,
    summary,
)
from kvq.scheme import PRESETS
from kvq.tables import read_table

TOKENS = np.random.default_rng(5).integers(0, 37, 100)
PROTOCOL = Protocol(window=40, start=11, limit=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write(folder / "tiny.gguf", LLAMA, random_weights(LLAMA))


def plain_nll(c, weights, window, start):
    z = tiny_model.logits(c, weights, window[:-1])[start:]
    return [
        math.log(sum(math.exp(a - max(row)) for a in row)) + max(row) - row[t]
        for row, t in zip(z, window[start + 1 :], strict=True)
    ]


def test_perplexity_agrees_with_plain_loops(path):
    (row,) = evaluate(path, TOKENS, ["fp32"], PROTOCOL)
    windows = TOKENS[:40], TOKENS[40:80]
    nll = [plain_nll(LLAMA, random_weights(LLAMA), w, 11) for w in windows]
    assert row["tokens"] == len(nll[0]) * 2 == 2 * 28
    expected = math.exp(np.mean(nll))
    # "fp32" stores what comes in, and float16 comes in.
    assert row["perplexity"] == pytest.approx(expected, rel=2e-3)
    assert row["bits_per_element"] == 32
    assert abs(row["change_percent"]) < 0.2
    assert 0 <= row["kl"] < 1e-5


def test_coarser_codes_cost_more(path):
    policies = ["fp16", "int8-token", "int4-token-g64", "int2-token-g32"]
    rows = evaluate(path, TOKENS, policies, PROTOCOL)
    assert [row["policy"] for row in rows] == policies
    kl = [row["kl"] for row in rows]
    assert kl == sorted(kl)
    assert kl[3] > 30 * kl[1] > 0
    agreement = [row["agreement"] for row in rows]
    assert agreement[0] == 1 > agreement[3]
    # One scale of 16 bits per row of D=10, a zero as well; rows are whole bytes.
    bits = [row["bits_per_element"] for row in rows]
    assert bits == [16, 8 + 1.6, 4 + 1.6, (8 * 3 + 32) / 10]


def test_keys_values_windows_and_layers_are_set_apart(path):
    names = ["int2-token-g32", "int2-token-g32/fp16", "fp16/int2-token-g32"]
    names += ["int2-token-g32:residual=39", "int2-token-g32:sinks=4"]
    rows = {r["policy"]: r for r in evaluate(path, TOKENS, names, PROTOCOL)}
    both, keys, values, window, sinks = (rows[name]["kl"] for name in names)
    assert 0 < min(keys, values) < both
    assert window < 1e-6 < sinks != both
    layers = [PRESETS["int2-token-g32"], PRESETS["fp16"]]
    (row,) = evaluate(path, TOKENS, {"first layer": layers}, PROTOCOL)
    assert row["policy"] == "first layer"
    assert 1e-6 < row["kl"] < both
    by_text = evaluate(path, TOKENS, ["fp16,layers=0:int2-token-g32"], PROTOCOL)[0]
    assert by_text["policy"] == "fp16,layers=0:int2-token-g32"
    assert by_text["kl"] == row["kl"]


def test_token_by_token_is_the_same_measurement(path):
    """Greedy decoding through the same caches sees what the measurement saw."""
    model, policy = load(path), parse_policy("kivi-2:residual=3:sinks=2")
    window = TOKENS[:75]
    whole, caches = hidden_states(model, window, 20, policy)
    steps = model.caches(policy)
    hidden = [model.forward([t], steps, "float16") for t in window[:-1]]
    for a, b in zip(caches, steps, strict=True):
        codes, again = (c.rows[0][0].chunks[0].codes for c in (a, b))
        assert codes.shape == again.shape == (2, 64, 3)
        assert np.mean(codes == again) > 0.999  # float32 noise can move a code
    difference = np.abs(whole - np.concatenate(hidden)[20:])
    assert np.median(difference) < 1e-4 * np.abs(whole).max()


def test_the_statistics_are_those_of_their_definitions(path):
    model = load(path)
    rng = np.random.default_rng(1)
    exact, changed = rng.standard_normal((2, 150, 20)).astype(np.float32) / 4
    changed[:80] = exact[:80]
    targets = rng.integers(0, 37, 150)
    got = compare(model, exact, changed, targets)
    p, p_hat = (np.exp(log_softmax(model.logits(h))) for h in (exact, changed))
    for n in range(150):
        t = targets[n]
        kl = sum(a * math.log(a / b) for a, b in zip(p[n], p_hat[n], strict=True))
        assert got["nll"][n] == pytest.approx(-math.log(p_hat[n, t]), abs=1e-4)
        assert got["d"][n] == pytest.approx(math.log(p[n, t] / p_hat[n, t]), abs=1e-4)
        assert got["kl"][n] == pytest.approx(kl, abs=1e-4)
        assert got["agree"][n] == (p[n].argmax() == p_hat[n].argmax())
    row = summary("name", [got | {"bits": 3.0}, got | {"bits": 5.0}])
    assert row["tokens"] == 300
    assert row["bits_per_element"] == 4
    assert row["perplexity"] == pytest.approx(np.exp(np.mean(got["nll"])))
    d = np.tile(got["d"], 2)
    assert row["change_percent"] == pytest.approx(100 * (np.exp(d.mean()) - 1))
    se = 100 * np.sqrt(np.sum((d - d.mean()) ** 2) / 299 / 300)
    assert row["se_percent"] == pytest.approx(se)


def test_a_stopped_run_goes_on_where_it_stopped(path, tmp_path, monkeypatch):
    out = tmp_path / "table.csv"
    first = evaluate(path, TOKENS, ["fp16", "kivi-2"], PROTOCOL, out=out)
    rows, header = read_table(out)
    assert rows == first
    assert header["protocol"] == "2 windows of 40 tokens, scored from position 11"
    assert header["model"] == "tiny.gguf"
    command = "kvq eval tiny.gguf --window 40 --start 11 --windows 2 --policies"
    assert header["command"] == f"{command} fp16 kivi-2"
    assert len(header["weights_sha256"]) == len(header["token_ids_sha256"]) == 64
    assert str(tmp_path) not in out.read_text()

    again = evaluate(path, TOKENS, ["kivi-2", "int8-token"], PROTOCOL, out=out)
    assert [r["policy"] for r in again] == ["fp16", "kivi-2", "int8-token"]
    assert again[:2] == first
    monkeypatch.setattr("kvq.model.evaluate.run", None)  # nothing is left to compute
    assert evaluate(path, TOKENS, ["int8-token"], PROTOCOL, out=out) == again


def test_a_table_of_another_origin_is_not_continued(path, tmp_path):
    out = tmp_path / "table.csv"
    evaluate(path, TOKENS, ["fp16"], PROTOCOL, out=out)
    before = out.read_bytes()
    other = write(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA, seed=1))
    for arguments, what in [
        ((path, TOKENS + 0, ["fp16"], Protocol(40, 12, 2)), "protocol"),
        ((path, TOKENS[::-1], ["fp16"], PROTOCOL), "token_ids_sha256"),
        ((other, TOKENS, ["fp16"], PROTOCOL), "weights_sha256"),
    ]:
        with pytest.raises(ValueError, match=f"was made with {what}"):
            evaluate(*arguments, out=out)
    assert out.read_bytes() == before


def test_processes_give_the_same_table(path):
    one = evaluate(path, TOKENS, ["int4-channel-g32"], PROTOCOL)
    assert evaluate(path, TOKENS, ["int4-channel-g32"], PROTOCOL, jobs=2) == one


def test_gemma_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("kvq.model.decoder.CHUNK", 8)  # so that layers slide
    path = write(tmp_path / "g.gguf", GEMMA, random_weights(GEMMA))
    rows = evaluate(path, TOKENS, ["int8-token", "kivi-2:residual=0"], PROTOCOL)
    assert rows[0]["kl"] < rows[1]["kl"]
    # Per stored number, though most layers hold a few of 39 tokens: 8 + 16 / 10 bits.
    assert rows[0]["bits_per_element"] == pytest.approx(9.6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 20, "start": 19}, r"start=19, window=20; valid: 0\.\.window - 2"),
        ({"start": -1}, "start=-1"),
        ({"limit": 0}, "limit=0"),
    ],
)
def test_a_protocol_that_scores_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        Protocol(**settings)


def test_windows_after_a_first_token():
    windows = Protocol(window=5, start=1, limit=None).windows(np.arange(9), bos=77)
    assert [w.tolist() for w in windows] == [[77, 0, 1, 2, 3], [77, 4, 5, 6, 7]]
    windows = Protocol(window=4, start=1, limit=None).windows(np.arange(9))
    assert [w.tolist() for w in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_text_that_is_too_short(path):
    with pytest.raises(ValueError, match="100 tokens; a window needs 101"):
        evaluate(path, TOKENS, ["fp16"], Protocol(window=101, start=0))
