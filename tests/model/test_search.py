"""`kvq.model.search`: sensitivities, the knapsack, and the command."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import GEMMA, LLAMA, random_weights, write

from kvq.cli import main
from kvq.layers import load_layers, parse_policy
from kvq.model.evaluate import Protocol, evaluate
from kvq.model.search import (
    Search,
    exact_point,
    frontier,
    inputs_point,
    one_side_point,
    sensitivities,
)
from kvq.tables import read_table

TOKENS = np.random.default_rng(5).integers(0, 37, 100)
PROTOCOL = Protocol(window=40, start=11, limit=2)
NAMES = ["int2-token-g32:residual=3", "int8-token:residual=3"]
CANDIDATES = [parse_policy(name) for name in NAMES]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write(folder / "tiny.gguf", LLAMA, random_weights(LLAMA))


@pytest.fixture(scope="module")
def rows(path):
    return sensitivities(path, TOKENS, CANDIDATES, PROTOCOL)


# --- the knapsack ---------------------------------------------------------------------
def brute_force(costs, losses):
    """The front of all assignments, by trying every one."""
    n, m = costs.shape
    all_ = [
        (sum(costs[range(n), c]), sum(losses[range(n), c]))
        for c in map(list, itertools.product(range(m), repeat=n))
    ]
    front, best = [], np.inf
    for cost, loss in sorted(all_):
        if loss < best:
            front.append((cost, loss))
            best = loss
    return front


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 5),
    m=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
)
def test_the_front_is_that_of_all_assignments(n, m, seed, coarse):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 7, (n, m))
    losses = rng.integers(0, 9, (n, m)) if coarse else rng.random((n, m)) ** 4
    front = frontier(costs, losses.astype(float))
    expected = brute_force(costs, losses.astype(float))
    assert front.cost.tolist() == [cost for cost, _ in expected]
    np.testing.assert_allclose(front.loss, [loss for _, loss in expected], rtol=1e-12)
    for i in range(len(expected)):
        choice = front.choice(i)
        assert costs[range(n), choice].sum() == front.cost[i]
        assert losses[range(n), choice].sum() == pytest.approx(front.loss[i])


def test_a_common_unit_of_costs_keeps_the_front_small():
    rng = np.random.default_rng(0)
    costs = 512 * np.tile([3, 4, 5, 9], (120, 1))
    front = frontier(costs, rng.random((120, 4)) * [8, 4, 1, 0.1])
    assert len(front.cost) <= 120 * 6 + 1
    assert np.all(np.diff(front.cost) > 0)
    assert np.all(np.diff(front.loss) < 0)


# --- sensitivities --------------------------------------------------------------------
def test_one_side_of_one_layer_is_measured(path, rows):
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        rest = "fp16:residual=3"
        pair = {"key": f"{row['candidate'].split(':')[0]}/{rest}"}
        pair["value"] = f"fp16/{row['candidate']}"
        text = f"{rest},layers={row['layer']}:{pair[row['side']]}"
        (alone,) = evaluate(path, TOKENS, [text], PROTOCOL)
        assert row["kl"] == pytest.approx(alone["kl"], rel=1e-9)
        assert 0 < row["kl_se"] < row["kl"]
    kl = {(r["layer"], r["side"], r["candidate"]): r["kl"] for r in rows}
    for layer, side in itertools.product((0, 1), ("key", "value")):
        assert kl[layer, side, NAMES[0]] > 20 * kl[layer, side, NAMES[1]]


def test_the_standard_error_is_that_of_the_mean(path, rows):
    window = PROTOCOL.windows(TOKENS)[0]
    (row,) = sensitivities(path, TOKENS, CANDIDATES[:1], Protocol(40, 11, 1))[-1:]
    exact, x = exact_point(path, window, 11), inputs_point(path, window)
    item = 1, "value", CANDIDATES[0]
    point = one_side_point(path, window, 11, exact["hidden"], x["inputs"][1], *item)
    assert row["kl"] == pytest.approx(np.mean(point["kl"]))
    spread = np.sum((point["kl"] - row["kl"]) ** 2) / 27 / 28
    assert row["kl_se"] == pytest.approx(np.sqrt(spread))


def test_bytes_are_those_of_the_stored_numbers(rows):
    """D=10: rows of 3 or 10 bytes, a scale and perhaps a zero of 2 bytes; H=2, T=40."""
    expected = {NAMES[0]: 2 * 40 * (3 + 4), NAMES[1]: 2 * 40 * (10 + 2)}
    for row in rows:
        assert row["bytes"] == expected[row["candidate"]]
        assert row["bits"] == row["bytes"] * 8 / (2 * 40 * 10)


def test_a_sliding_layer_holds_what_it_keeps(tmp_path):
    path = write(tmp_path / "g.gguf", GEMMA, random_weights(GEMMA))
    candidates = [parse_policy("int8-token"), parse_policy("int4-token-g64")]
    rows = sensitivities(path, TOKENS, candidates, Protocol(30, 20, 1))
    held = {r["layer"]: r["bytes"] for r in rows if r["candidate"] == "int8-token"}
    assert [n // (2 * 12) for n in held.values()] == [5] * 5 + [30] + [5]
    problem = Search.of(rows, candidates, 30)
    assert problem.numbers == 2 * 2 * 10 * (6 * 5 + 30)
    assert problem.bits(problem.bytes[:, 0].sum()) == pytest.approx(9.6)


def test_a_stopped_run_goes_on_where_it_stopped(path, rows, tmp_path, monkeypatch):
    out = tmp_path / "s.csv"
    assert sensitivities(path, TOKENS, CANDIDATES, PROTOCOL, out=out) == rows
    again, header = read_table(out)
    assert again == rows
    assert header["full_precision"] == "residual 3, sinks 0"
    assert header["command"] == (
        "kvq search tiny.gguf --window 40 --start 11 --windows 2 --residual 3 "
        "--policies int2-token-g32 int8-token"
    )
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:-3]))  # stopped within the last layer
    back = sensitivities(path, TOKENS, CANDIDATES, PROTOCOL, out=out, jobs=2)
    key = ("layer", "side", "candidate")
    assert sorted(back, key=lambda r: [r[k] for k in key]) == sorted(
        rows, key=lambda r: [r[k] for k in key]
    )
    monkeypatch.setattr("kvq.model.search.run", None)  # nothing is left to compute
    sensitivities(path, TOKENS, CANDIDATES[:1], PROTOCOL, out=out)
    with pytest.raises(ValueError, match="was made with full_precision residual 3"):
        sensitivities(path, TOKENS, [parse_policy("kivi-2")], PROTOCOL, out=out)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([], "no candidates"),
        (
            ["kivi-2", "int8-token"],
            "candidates with residual 0, .* and with residual 1",
        ),
        (["kivi-2", "kivi-2"], "valid: names that differ"),
    ],
)
def test_candidates_that_cannot_be_mixed(path, candidates, message):
    with pytest.raises(ValueError, match=message):
        sensitivities(path, TOKENS, [parse_policy(c) for c in candidates], PROTOCOL)


# --- the choice -----------------------------------------------------------------------
def test_bits_go_where_the_sensitivity_is(rows):
    problem = Search.of(rows, CANDIDATES, 40)
    front = problem.solve()
    by_item = {
        (r["layer"], r["side"]): r["kl"] for r in rows if "int2" in r["candidate"]
    }
    worst = max(by_item, key=by_item.get)
    one_up = 5.6 + (9.6 - 5.6) / 4  # one item of four at 9.6 bits, the rest at 5.6
    n = problem.within(front, bits=one_up)
    assert problem.bits(front.cost[n]) == pytest.approx(one_up)
    chosen = dict(zip(problem.items, front.choice(n), strict=True))
    assert [item for item, c in chosen.items() if c == 1] == [worst]
    policies = problem.policies(front.choice(n)).all(2)
    for layer, p in enumerate(policies):
        assert p.residual == 3
        for side in ("key", "value"):
            bits = 8 if (layer, side) == worst else 2
            assert getattr(p, side).bits == bits
        assert parse_policy(p.name) == p
    assert problem.within(front, bits=one_up - 0.01) == n - 1
    assert problem.within(front, bits=99) == len(front.cost) - 1
    assert problem.within(front, kl=front.loss[n]) == n
    assert problem.within(front, kl=9) == 0
    (low, all_low), (high, all_high) = problem.uniform()
    assert (low, high) == (5.6, 9.6)
    assert all_low == front.loss[0] > front.loss[-1] == pytest.approx(all_high)


def test_a_pair_is_named_by_its_two_sides():
    names = "kivi-2/int8-token:residual=3", "int4-token-g64/fp16:residual=3"
    candidates = [parse_policy(name) for name in names]
    items = [(layer, side) for layer in range(3) for side in ("key", "value")]
    problem = Search(candidates, items, np.ones((6, 2)), np.ones((6, 2)), 9, 9)
    policies = problem.policies([0, 0, 0, 1, 0, 1], "mine")
    mixed = "kivi-2/fp16:residual=3"
    assert [p.name for p in policies.all(3)] == [names[0], mixed, mixed]
    assert all(parse_policy(p.name) == p for p in policies.all(3))
    assert (policies.default.name, policies.name) == (mixed, "mine")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"bits": 5.5}, r"budget of 5\.5 bits; valid: >= 5\.6"),
        ({"bits": float("nan")}, "budget of nan bits"),
        ({"kl": 1e-9}, r"budget of KL 1e-09; valid: >= "),
    ],
)
def test_a_budget_that_nothing_meets(rows, budget, message):
    problem = Search.of(rows, CANDIDATES, 40)
    with pytest.raises(ValueError, match=message):
        problem.within(problem.solve(), **budget)


# --- the command ----------------------------------------------------------------------
@pytest.fixture
def kvq(capsys, tmp_path, monkeypatch):
    """Runs a command line beside m.gguf and ids.npy: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA))
    np.save(tmp_path / "ids.npy", TOKENS)

    def run(line):
        code = main(line.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


SEARCH = "search m.gguf --tokens ids.npy --window 40 --start 11 --quiet --residual 3"
TWO = "--policies int2-token-g32 int8-token"


def test_search_prints_a_frontier_and_writes_a_preset(kvq, tmp_path):
    line = f"{SEARCH} {TWO} --budget-bits 7 --out s.csv --preset p.json"
    code, out, err = kvq(line)
    assert (code, err) == (0, "")
    chosen = [x for x in out.splitlines() if x.endswith("<- chosen")]
    ((bits, keys, values, *_),) = (x.split() for x in chosen)
    assert bits == "6.60"
    assert {keys, values} == {"5.60", "7.60"}  # one of two layers on one side
    assert "everywhere int8-token:residual=3: 9.60 bits" in out
    assert len(read_table("s.csv")[0]) == 8
    policies = load_layers("p.json").all(2)
    assert sorted(s.bits for p in policies for s in p.schemes) == [2, 2, 2, 8]
    answer = json.loads(kvq(f"{line} --json")[1])
    assert answer["layers"] == [p.name for p in policies]
    assert answer["chosen"] in answer["frontier"]
    assert f"measured {answer['measured']['kl']:.5f}" in out

    line = "eval m.gguf --tokens ids.npy --window 40 --start 11 --windows 1 --quiet"
    (row,) = json.loads(kvq(f"{line} --policies p.json --json")[1])
    assert row["policy"].startswith("p.json@")
    assert row["kl"] == answer["measured"]["kl"]


def test_budgets_in_bytes_and_in_divergence(kvq):
    # 80 numbers per token: 66 bytes are 6.6 bits per number.
    for budget, bits in (("bytes 66", 6.6), ("bytes 65.9", 5.6), ("kl 99", 5.6)):
        answer = json.loads(kvq(f"{SEARCH} {TWO} --budget-{budget} --json")[1])
        assert answer["chosen"]["bits"] == pytest.approx(bits)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            SEARCH,
            "one of the arguments --budget-bits --budget-bytes --budget-kl is req",
        ),
        (f"{SEARCH} --budget-bits 0", "'0' is not a number above 0"),
        (f"{SEARCH} --budget-bits 4 --budget-kl 1", "not allowed with argument"),
        (f"{SEARCH} --budget-bits 4 --policies int5", "unknown policy 'int5"),
        (f"{SEARCH} --budget-bits 4 --residual -1", "'residual=-1'"),
        (f"{SEARCH} {TWO} --budget-bits 4", "budget of 4 bits; valid: >= 5.6"),
        (f"{SEARCH} --budget-bits 4 --preset p.txt", "--preset p.txt; valid: a .json"),
        ("eval m.gguf --policies p.json", "p.json: No such file"),
        ("eval m.gguf --policies fp16,layers=2:kivi-2", "layer 2 in 'fp16,layers=2"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(kvq, line, message):
    code, out, err = kvq(line)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
