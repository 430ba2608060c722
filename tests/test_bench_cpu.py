"""`kvq bench cpu`: what it runs, writes and concludes. No time is tested."""

import json
import math
import sys
import time

import numpy as np
import pytest

from kvq.attention import attention
from kvq.cli import main
from kvq.kernels.cpu import goals
from kvq.scheme import Scheme
from kvq.tables import read_table
from kvq.tensor import quantize

pytest.importorskip("numba")
from kvq.kernels.cpu import bench, fast, peers, threads, yardsticks

needs_v4 = pytest.mark.skipif(
    fast.unavailable("v4") is not None, reason=str(fast.unavailable("v4"))
)
TINY = {"threads": 2, "shapes": ((4, 64),), "seconds": 300.0, "memory": 2**18}


@pytest.fixture
def few_rounds(monkeypatch):
    """No more than must be: then the time that is left plays no role."""
    monkeypatch.setattr(bench, "MOST", bench.LEAST)


@pytest.fixture
def no_torch(monkeypatch):
    for name in ("torch", "optimum", "hqq", "llama_cpp", "gguf"):
        monkeypatch.setitem(sys.modules, name, None)
    peers.ggml.cache_clear()
    yield
    peers.ggml.cache_clear()


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(yardsticks, "last_level_cache", lambda: 2**16)


def run(**settings):
    rows = []
    for more in bench.run(bench.Settings(**{**TINY, **settings})):
        rows += more
    return bench.finished(rows)


# --- a whole run ----------------------------------------------------------------------
def test_every_candidate_has_a_row_that_is_timed_or_says_why_not(few_rounds, no_torch):
    settings = {"tokens": (64, 192), "only": bench.OPS}
    rows = run(**settings)
    todo = bench.scenes(bench.Settings(**{**TINY, **settings}))
    expected = sum(
        len(scene.candidates) * (2 if scene.op == "pack" else 1) for scene in todo
    )
    assert len([r for r in rows if r["op"] not in ("read", "dots")]) == expected
    for row in rows:
        assert list(row) == list(bench.COLUMNS)
        if row["seconds"]:
            assert row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
            assert row["note"] is None
        elif row["version"] in ("v4", "v4 two terms"):
            assert fast.unavailable("v4") in row["note"]
        else:
            assert row["system"] in ("torch", "quanto", "hqq", "ggml", "gguf")
            assert row["note"].startswith("absent: ")
    limit = {"int8": 0.02, "int4": 0.2, "int2": 1.0, "float32": 1e-5}
    compared = [row for row in rows if row["error"] is not None]
    assert {row["op"] for row in compared} == {"decode", "pack", "dequant"}
    for row in compared:
        assert 0 < row["error"] < limit[row["storage"]]
    assert {row["T"] for row in goals.pick(rows, op="decode")} == {64, 192}
    x = 8 * 192 * 128
    for op in ("pack", "dequant"):
        for row in goals.pick(rows, scene="pack", op=op, group=64):
            assert row["nbytes"] in (None, x * 4 + x * 4.5 / 8)
    for row in goals.pick(rows, op="step", system="kvq"):
        assert row["nbytes"] > 32 * 2 * 8 * 192 * 128 * 2 / 8
    for row in goals.pick(rows, scene="main", system="kvq"):
        assert row["cold"] == 1
        assert row["roofline_percent"] > 0


def test_a_peer_that_fails_is_one_line(monkeypatch, few_rounds):
    def broken(q, k, v, threads):
        raise OSError("first line\nsecond line")

    def wrong_shape(q, k, v, threads):
        return (lambda: np.zeros(3, np.float32)), 0

    ok = ("numpy", "attention", "float32")
    monkeypatch.setattr(
        peers,
        "DECODE",
        {
            ("a", "b", "int4"): broken,
            ok: peers.DECODE[ok],
            ("c", "d", "int8"): wrong_shape,
        },
    )
    rows = run(tokens=(128,), only=("decode",))
    by_system = {row["system"]: row for row in goals.pick(rows, scene="main")}
    assert by_system["a"]["note"] == "failed: first line second line"
    assert by_system["c"]["note"].startswith("failed: cannot reshape")
    assert by_system["numpy"]["seconds"] > 0
    assert by_system["a"]["seconds"] is None


def test_what_time_does_not_allow_is_left_out():
    scene = bench.Scene("main", "decode", 64, (("numpy", "attention", "float32"),))
    data, memory = bench.Tokens(64), yardsticks.Memory(2**16)
    over = bench.Clock(0, 0)
    [row] = bench.scene_rows(scene, data, memory, over, ("decode",))
    assert (row["note"], row["error"]) == ("left out: no time", None)
    assert data.exact == {}  # not even prepared
    now = time.monotonic()
    assert bench.Clock(now, now + 60).rounds(21) == 0
    assert bench.Clock(now, now + 60).rounds(1) == bench.LEAST
    assert bench.Clock(now + 10.5, now + 60).rounds(1) == 10
    assert bench.Clock(now + 1000, now + 9999).rounds(1) == bench.MOST


def test_what_memory_does_not_allow_is_left_out(monkeypatch):
    monkeypatch.setattr(yardsticks, "free_memory", lambda: 1.5e6)
    peer, ours = ("numpy", "attention", "float32"), ("kvq", "v3", "int4")
    scene = bench.Scene("sweep", "decode", 64, (peer, ours))
    later = bench.Clock(math.inf, math.inf)
    rows = bench.scene_rows(scene, bench.Tokens(64), None, later, ("decode",))
    assert [bool(row["seconds"]) for row in rows] == [False, True]
    assert rows[0]["note"] == "left out: no memory (0.0021 GB, 0.0015 are free)"


def test_scenes_are_the_same_each_time_and_contexts_only_grow():
    settings = bench.Settings(threads=2, only=bench.OPS)
    found = bench.scenes(settings)
    assert found == bench.scenes(settings)
    ordered = [scene.T for scene in found if scene.op != "step"]
    assert ordered == sorted(ordered)
    grid = [scene for scene in found if scene.name == "grid"]
    assert {scene.ratio for scene in grid} == {1, 4, 8}
    assert {scene.group for scene in grid} == {32, 64, 128}
    assert {scene.threads for scene in grid} == {1, 2}
    assert {s.T for s in found if s.name == "sweep"} == {2**n for n in range(6, 19)}


# --- the command ----------------------------------------------------------------------
def test_the_command_writes_what_it_prints(
    capsys, tmp_path, small_memory, few_rounds, no_torch
):
    path = tmp_path / "bench.csv"
    line = f"bench cpu --tokens 64 --only pack --threads 1 --quiet --csv {path}"
    assert main([*line.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows, header = read_table(path)
    assert rows == answer["rows"]
    assert {row["op"] for row in rows} == {"read", "pack"} | (
        set() if fast.unavailable("v4") else {"dots"}
    )
    assert header["command"].startswith("kvq bench cpu --threads 1 --tokens 64 ")
    assert (header["cores"], header["threads"]) == (str(threads.cores()), "1")
    assert len(answer["goals"]) == len(goals.GOALS)


def test_the_command_prints_rows_notes_and_goals(
    capsys, small_memory, few_rounds, no_torch
):
    line = "bench cpu --quick --tokens 64 --only dequant --threads 1 --seconds 200"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "numpy   blocked" in out
    assert "torch whole tensor int8" in out
    assert "absent: " in out
    assert "int4 pack over ggml q4_0" in out
    assert "cannot be said" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tokens 100", "--tokens 100; valid: multiples of 64"),
        ("--tokens 0,64", "--tokens 0; valid: multiples of 64"),
        ("--threads 0", "--threads 0; valid: 1 to"),
        ("--threads 9999", "--threads 9999; valid: 1 to"),
        ("--only decode,read", "--only read; valid: decode, pack, dequant, step"),
        ("--seconds 0", "'0' is not a number above 0"),
        ("--csv no/such/folder/x.csv", "its folder does not exist"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, line, message):
    assert main(["bench", "cpu", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


# --- goals, on numbers that nobody measured -------------------------------------------
def row(scene, op, system, version, storage, T, seconds, **more):
    found = dict.fromkeys(bench.COLUMNS)
    names = {"scene": scene, "op": op, "system": system, "version": version}
    return found | names | {"storage": storage, "T": T, "seconds": seconds, **more}


def example():
    """Rows of which every goal holds."""
    main, T = "main", goals.T
    made = [
        row(main, "decode", "kvq", "v4", "int4", T, 1.0, roofline_percent=60.0),
        row("one head", "decode", "kvq", "v4", "int4", T, 1.0, roofline_percent=95.0),
        row(main, "decode", "kvq", "v4", "int8", T, 1.4),
        row(main, "decode", "kvq", "v4", "int2", T, 0.7),
        row(main, "decode", "kvq", "v3", "int4", T, 3.0),
        row(main, "decode", "kvq", "v3", "int8", T, 4.0),
        row(main, "decode", "kvq", "v3", "int2", T, 2.5),
        row(main, "decode", "torch", "sdpa", "bfloat16", T, 9.0),
        row(main, "decode", "torch", "matmul", "bfloat16", T, 7.5),
        row(main, "decode", "torch", "dequantize", "int4", T, 0.1),
        row(main, "decode", "ggml", "flash attention", "f16", T, 8.5),
        row(main, "decode", "ggml", "flash attention", "q4_0", T, 21.0),
        row("pack", "pack", "kvq", "token", "int4", T, 1.0),
        row("pack", "pack", "numpy", "blocked", "int4", T, 9.5),
        row("pack", "pack", "torch", "whole tensor", "int4", T, 15.0),
        row("pack", "pack", "ggml", "quantize_chunk", "q4_0", T, 3.0),
    ]
    for n in range(7, 19):
        t = 2**n
        made.append(row("sweep", "decode", "kvq", "v4", "int4", t, 1e-6 * t))
        if n <= 16:
            form = "sdpa" if n % 2 else "matmul"
            made.append(row("sweep", "decode", "torch", form, "bfloat16", t, 3e-6 * t))
    return made


def verdict(rows, text):
    [found] = [v for v in goals.verdicts(rows) if text in v["goal"]]
    return found


def changed(rows, seconds, **wanted):
    return [
        r | {"seconds": seconds} if all(r[k] == x for k, x in wanted.items()) else r
        for r in rows
    ]


def test_all_goals_can_hold():
    found = goals.verdicts(example())
    assert len(found) == 15
    assert {v["verdict"] for v in found} == {"holds"}
    assert verdict(example(), "v4 int4 decode over the fastest")["measured"] == 7.5
    assert verdict(example(), "exponent")["measured"] == pytest.approx(1)
    assert verdict(example(), "crossover")["measured"] == 128


@pytest.mark.parametrize(
    ("text", "wanted", "seconds"),
    [
        ("v4 int4 decode over the fastest", {"version": "matmul"}, 6.9),
        ("v4 int8 decode", {"version": "v4", "storage": "int8"}, 1.6),
        ("v3 int2 decode", {"version": "v3", "storage": "int2"}, 3.3),
        ("over ggml f16", {"storage": "f16"}, 7.9),
        ("pack over ggml q4_0", {"version": "quantize_chunk"}, 2.4),
        ("pack over KIVI", {"version": "whole tensor"}, 13.9),
        ("exponent", {"system": "kvq", "scene": "sweep", "T": 2**18}, 0.6),
        ("crossover", {"system": "torch", "scene": "sweep", "T": 4096}, 1e-6),
    ],
)
def test_a_goal_that_is_missed_says_so(text, wanted, seconds):
    rows = changed(example(), seconds, **wanted)
    assert verdict(rows, text)["verdict"] == "does not hold"


def test_the_roofline_goals_read_the_percent():
    rows = example()
    rows[0]["roofline_percent"], rows[1]["roofline_percent"] = 54.9, 90.0
    assert verdict(rows, "4 queries")["verdict"] == "does not hold"
    assert verdict(rows, "1 query")["verdict"] == "holds"


def test_the_crossover_is_where_nothing_later_is_slower():
    slow = {"system": "torch", "scene": "sweep", "T": 1024}
    assert goals.crossover(changed(example(), 1e-9, **slow)) == 2048
    slow["T"] = 65536
    assert goals.crossover(changed(example(), 1e-9, **slow)) == math.inf


def test_a_peer_that_is_absent_leaves_the_goal_open():
    rows = changed(example(), None, system="torch")
    for r in goals.pick(rows, system="torch"):
        r["note"] = "absent: no torch"
    assert verdict(rows, "v4 int4 decode over the fastest") == {
        "goal": "v4 int4 decode over the fastest torch form",
        "asked": ">= 7x",
        "measured": None,
        "unit": "x",
        "verdict": "cannot be said: torch absent: no torch",
    }
    assert verdict(rows, "crossover")["verdict"].startswith("cannot be said: torch")
    assert verdict(rows, "over ggml f16")["verdict"] == "holds"


def test_shorter_contexts_are_not_what_the_goals_are_about():
    rows = [r for r in example() if r["T"] < 65536]
    for found in goals.verdicts(rows):
        if "crossover" not in found["goal"]:
            assert "not measured at T = " in found["verdict"]


# --- percents -------------------------------------------------------------------------
def test_percents_refer_to_reads_of_the_same_scene_or_thread_count():
    shape = {"threads": 2, "T": 64}
    read = {"op": "read", "system": "numba", "version": "loop", "storage": "float32"}
    rows = [
        dict.fromkeys(bench.COLUMNS) | row
        for row in (
            {**read, "scene": "memory", "threads": 1, "nbytes": 100, "seconds": 10.0},
            {**read, "scene": "memory", "threads": 2, "nbytes": 100, "seconds": 5.0},
            {**read, "scene": "main", "threads": 2, "nbytes": 100, "seconds": 4.0},
            {"scene": "memory", "op": "dots", "threads": 2, "dots": 30, "seconds": 3.0},
            {"scene": "main", "op": "decode", "nbytes": 50, "seconds": 8.0, **shape},
            {"scene": "sweep", "op": "decode", "nbytes": 50, "seconds": 8.0}
            | {"dots": 40, **shape},
            {"scene": "pack", "op": "pack", "nbytes": 50, "seconds": 10.0}
            | {**shape, "threads": 1},
        )
    ]
    *_, main_row, sweep_row, pack_row = bench.finished(rows)
    assert main_row["dram_percent"] == pytest.approx(100 * (50 / 8) / 25)
    assert main_row["roofline_percent"] == pytest.approx(25)
    assert main_row["roofline_limit"] == "memory"
    assert sweep_row["dram_percent"] == pytest.approx(100 * (50 / 8) / 20)
    assert sweep_row["roofline_limit"] == "dots"
    assert sweep_row["roofline_seconds"] == pytest.approx(4)
    assert pack_row["dram_percent"] == pytest.approx(50)
    assert pack_row["roofline_percent"] is None


def test_dots_that_are_needed():
    scene = bench.Scene("main", "decode", 128, (), ratio=4)
    assert bench.needed_dots(scene) == 2 * 32 * 128 * 128 // 64
    assert bench.needed_dots(scene, 2) == 4 * 32 * 128 * 128 // 64


# --- yardsticks and peers -------------------------------------------------------------
def test_the_yardsticks_do_their_work():
    memory = yardsticks.Memory(3 * 2**16)
    memory.read(2)
    for i in (0, 127, 6144, 3 * 2**14 - 1):  # each is read, wherever it is
        memory.numbers[i] += i + 1
        assert yardsticks.largest(memory.numbers) == i + 2
    assert yardsticks.last_level_cache() >= 2**20
    assert yardsticks.free_memory() > 2**20


@needs_v4
def test_dot_products_are_counted_and_not_left_out():
    assert yardsticks.start_dots(2) == 2 * yardsticks.DOTS
    # n times 4 n^2 is added to each of 16 lanes' sums, which began with their number.
    n, sums = 3, yardsticks.SUMS
    expected = 0
    for i in range(sums):
        expected ^= i + n * 1 * n * n
    assert yardsticks.dots(n) == expected


def numbers(*shape, seed=0):
    """As the benchmark's, with an outlier channel; no group is constant, where a peer
    may divide by zero."""
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    x[..., 5] *= 7
    return x


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("peer", list(peers.DECODE), ids=" ".join)
def test_peers_attend(peer, count):
    pytest.importorskip({"ggml": "llama_cpp"}.get(peer[0], peer[0]))
    q, k, v = (
        numbers(24, 128),
        numbers(8, 192, 128, seed=1),
        numbers(8, 192, 128, seed=2),
    )
    peers.use_threads(count)
    start, nbytes = peers.DECODE[peer](q, k, v, count)
    exact = attention(q[:, None], k, v)[:, 0]
    limit = {"float32": 1e-5, "int4": 0.5, "q4_0": 0.5}.get(peer[2], 0.1)
    assert bench.relative(start(), exact) < limit
    assert nbytes >= 2 * k.size * peers.BITS[peer[2]] / 8


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_blocked_numpy_quantizes_as_the_reference_does(bits):
    x = numbers(2, 300, 128)
    pack, dequant, nbytes = peers.numpy_blocked(bits)(x.reshape(-1, 128), 64, 3)
    ours = quantize(x, Scheme(bits, "token", 64, "asymmetric"))
    assert nbytes == ours.nbytes
    far = np.abs(dequant(pack()).reshape(x.shape) - ours.dequantize())
    step = ours.scale.astype(np.float32).repeat(64, axis=-1)
    assert np.mean(far > 0.01 * step) < 0.01  # ties may fall to the other side


@pytest.mark.parametrize("peer", list(peers.PACK), ids=" ".join)
def test_peers_pack(peer):
    module = {"ggml": "llama_cpp", "quanto": "optimum"}.get(peer[0], peer[0])
    pytest.importorskip(module)
    x = numbers(320, 128)
    pack, dequant, nbytes = peers.PACK[peer](x, 64, 2)
    limit = {8: 0.02, 4: 0.3, 2: 1}[peers.BITS[peer[2]]]
    assert bench.relative(dequant(pack()), x) < limit
    assert nbytes > x.size * peers.BITS[peer[2]] / 8
