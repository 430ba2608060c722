"""`make bench-gpu` without a GPU: its dry run, and what it does with faults."""

import contextlib
import importlib.util
import io
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import bench_gpu
import gpu_machines
import gpu_peers
import gpu_work
import matplotlib
import numpy as np
import pytest
from bench_gpu import BITS, FULL, TINY, Scene
from gpu_machines import Card, Simulator
from gpu_peers import PEERS

from kvq.attention import attention
from kvq.kernels import decode, dequant, gpu_status, pack
from kvq.kernels.backends import import_problem
from kvq.kernels.launch import nvrtc
from kvq.tables import read_table, write_table

matplotlib.use("Agg")
FIGURE = Path(__file__).parents[2] / "figures" / "plot_gpu_decode.py"
needs_compiler = pytest.mark.skipif(
    nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable())
)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """(exit code, what it prints, rows, header) of the whole dry run."""
    folder, printed = tmp_path_factory.mktemp("bench"), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = bench_gpu.main(["--dry-run", "--folder", str(folder)])
    (path,) = folder.iterdir()
    return code, printed.getvalue(), path, *read_table(path)


# --- the dry run ----------------------------------------------------------------------
@needs_compiler
def test_every_kernel_is_visited(dry_run):
    code, _, path, rows, header = dry_run
    assert code == 0
    assert path.name == "decode_dry_run.csv"
    assert header["command"] == "make bench-gpu DRY=1"
    ran = {(r["op"], r["kernel"], r["bits"]) for r in rows if r["note"] is None}
    versions = {
        "decode": [*decode.VERSIONS, *decode.TENSOR_CORES],
        "pack": [*pack.VERSIONS, gpu_work.PAGES],
        "dequant": dequant.VERSIONS,
    }
    assert ran - {("decode", name, PEERS[name][2]) for name in PEERS} == {
        ("copy", "copy", 16),
        ("decode", "v5", 16),
        *(
            (op, v, bits)
            for op, names in versions.items()
            for v in names
            for bits in BITS
        ),
    }


def test_a_dry_run_has_no_times(dry_run):
    rows = dry_run[3]
    assert {row[name] for row in rows for name in bench_gpu.TIMES} == {None}


def test_each_absent_peer_is_listed(dry_run):
    _, printed, _, rows, _ = dry_run
    for name, (_, package, _, _) in PEERS.items():
        notes = {row["note"] for row in rows if row["kernel"] == name}
        reason = import_problem(package)
        assert notes == {f"absent: {reason}" if reason else None}
        if reason:
            assert f"absent: {reason}" in printed
            assert f"decode {name}" in printed


@needs_compiler
def test_what_must_move_is_counted_once(dry_run):
    """Of one sequence of 128 tokens, one KV head of 128 channels."""
    nbytes = {
        (r["op"], r["kernel"], r["bits"]): r["nbytes"]
        for r in dry_run[3]
        if r["T"] == 128 or r["op"] == "copy"
    }
    numbers = 128 * 128
    groups = numbers // 64 * 4  # bytes of scales and zeros
    for bits in BITS:
        stored = numbers * bits // 8 + groups
        assert (
            nbytes["decode", "v3", bits] == nbytes["decode", "v5", bits] == 2 * stored
        )
        assert nbytes["dequant", "v2", bits] == stored + 4 * numbers
        assert nbytes["pack", "v1", bits] == stored + 2 * numbers
    assert nbytes["decode", "v5", 16] == 4 * numbers
    assert nbytes["copy", "copy", 16] == 2 * 2**16


# --- the plan -------------------------------------------------------------------------
def keys(scenes):
    return [(s.op, s.B, s.T, *kernel) for s in scenes for kernel in s.kernels]


def test_a_full_run_plans_every_size_once_and_what_matters_first():
    scenes = bench_gpu.planned(FULL)
    found = keys(scenes)
    assert max(Counter(found).values()) == 1
    assert [s.op for s in scenes[:6]] == ["copy"] * 5 + ["decode"]
    sizes = {(B, T) for op, B, T, *_ in found if op == "decode"}
    assert {T for _, T in sizes} >= {512, 2**20}
    assert {B for B, _ in sizes} == {1, 8, 64}
    for size in sizes:
        kernels = {k[3:] for k in found if k[:3] == ("decode", *size)}
        assert kernels >= {(f"v{n}", b) for n in range(1, 6) for b in BITS}
        assert ("v5", 16) in kernels
    assert {k[3] for k in found if k[:3] == ("decode", 8, 32768)} >= set(PEERS)


def test_what_there_is_no_time_for_is_noted():
    (first, *_) = bench_gpu.timed(Simulator(), TINY, time.monotonic() - 1)
    assert {row["note"] for row in first} == {"left out: no time"}
    assert {row["nbytes"] for row in first} == {None}


def test_a_slow_scene_makes_less_time_for_those_after_it(monkeypatch):
    clock = iter(np.arange(0, 1000, 20.0))  # each scene takes 20 s
    monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bench_gpu, "LARGE", 0)
    monkeypatch.setattr(bench_gpu, "measured", lambda *args: args[-1])
    notes = list(bench_gpu.timed(Simulator(), TINY, 65))
    assert notes[0] is None  # begins at 0; the next one, of 16 times the data, at 40
    assert set(notes[1:]) == {"left out: no time"}


def test_what_there_is_no_memory_for_is_noted(monkeypatch):
    machine = Simulator()
    machine.room = lambda: bench_gpu.stored_bytes(TINY, scene, 8)
    scene = Scene("dequant", 1, 64, [("v1", 8), ("v1", 4)])
    one, two = bench_gpu.measured(machine, TINY, scene, None)
    assert (one["note"], two["note"]) == (None, "left out: no memory")


# --- times ----------------------------------------------------------------------------
class FakeCuPy:
    """A GPU whose clock is `now`: what starts adds to it."""

    def __init__(self):
        self.now, self.log, self.float32 = 0.0, [], np.float32
        self.uint8, self.copyto = np.uint8, np.copyto
        self.cuda = self.runtime = self
        self.get_elapsed_time = lambda a, b: 1e3 * (b.at - a.at)
        self.Event = lambda: SimpleNamespace(record=None)

    def memGetInfo(self):
        return 2**12, 2**13

    def ones(self, size, dtype):
        return SimpleNamespace(sum=lambda out: self.start("flush", 5)())

    zeros = ones

    def start(self, name, seconds):
        def run():
            self.log.append(name)
            self.now += seconds

        return run

    def get_current_stream(self):
        return SimpleNamespace(synchronize=lambda: None)


@pytest.fixture
def card(monkeypatch):
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)

    class Event:
        def record(self):
            self.at = fake.now

    fake.Event = Event
    return Card("NVIDIA Made-up (through a test)"), fake


def test_kernels_take_turns_each_after_a_flush_that_is_not_timed(card):
    machine, fake = card
    starts = [fake.start("a", 1), fake.start("b", 3)]
    assert machine.time(starts, 2) == [[1, 1], [3, 3]]
    assert fake.log == ["flush", "a", "flush", "b"] * 2
    assert machine.time([], 0) == []


def test_the_median_stands_between_quartiles():
    found = bench_gpu.spread([1.0, 9.0, 2.0, 3.0, 4.0])
    assert found == {
        "rounds": 5, "seconds": 3.0, "seconds_low": 2.0, "seconds_high": 4.0,
    }  # fmt: skip


def test_the_largest_copy_is_the_yardstick():
    rows = [
        {"op": op, "nbytes": nbytes, "seconds": seconds, "copy_percent": None}
        for op, nbytes, seconds in (
            ("copy", 900, 1.0), ("copy", 4000, 10.0), ("decode", 900, 3.0),
            ("decode", 8, None),
        )
    ]  # fmt: skip
    percents = [row["copy_percent"] for row in bench_gpu.finished(rows)]
    assert percents == [225, 100, 75, None]


# --- what goes wrong ------------------------------------------------------------------
class Faulty(Simulator):
    """Adds one to the first number that a kernel writes."""

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, launches):
        super().run(launches)
        for launch in launches:
            if launch.kernel == self.kernel:
                launch.args[launch.outputs[-1]][0] += 1


@pytest.mark.parametrize(
    ("kernel", "case", "reason"),
    [
        ("pack_v2", ("pack", "v2", 4), "1 numbers differ"),
        ("pack_v1_scales", ("pack", "v1", 2), "1 numbers differ"),
        ("dequant_v1", ("dequant", "v1", 8), "units in the last place"),
        ("decode_v3_merge", ("decode", "v3", 4), "relative error"),
        ("decode_v1", ("decode", "v1", 4), "relative error"),
    ],
)
def test_a_wrong_kernel_is_seen(kernel, case, reason):
    assert reason in gpu_work.wrong(Faulty(kernel), *case)
    assert gpu_work.wrong(Faulty("another"), *case) is None


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "case"),
    [("pack_v3", ("pack", gpu_work.PAGES, 2)), ("decode_v5", ("decode", "v5", 8))],
)
def test_a_wrong_kernel_of_pages_is_seen(kernel, case):
    machine = Faulty(kernel)
    if kernel == "pack_v3":  # its last output are the largest scales
        machine.run = lambda launches: (
            Simulator.run(machine, launches),
            np.add.at(launches[0].args[2], 0, 1),
        )
    assert gpu_work.wrong(machine, *case)
    assert gpu_work.wrong(Simulator(), *case) is None


def test_nothing_is_timed_after_a_wrong_kernel(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_gpu, "progress", lambda todo, title: todo)
    monkeypatch.setattr(bench_gpu, "checked", lambda sizes: [("dequant", "v1", 4)])
    assert bench_gpu.bench(Faulty("dequant_v1"), TINY, tmp_path, 60) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dequant v1, 4 bits, is wrong: ")
    assert list(tmp_path.iterdir()) == []


class Tensor(np.ndarray):
    """As much of a tensor of PyTorch as a peer's check needs."""

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


class WithTensors(Simulator):
    def tensors(self, B, H_kv, T):
        rng = np.random.default_rng(0)
        shapes = (B, 4 * H_kv, 1, 128), (B, H_kv, T, 128), (B, H_kv, T, 128)
        return [rng.normal(size=s).astype(np.float16).view(Tensor) for s in shapes]


def right(q, k, v):
    exact = [
        attention(*x) for x in zip(*(a.astype(float) for a in (q, k, v)), strict=True)
    ]
    return lambda: np.stack(exact).view(Tensor)


def broken(q, k, v):
    raise RuntimeError("CUDA error\nout of luck")


STRANGERS = {
    "wrong": (lambda q, k, v: lambda: 0 * q, "numpy", 16, 1e-2),
    "broken": (broken, "numpy", 16, 1e-2),
    "late": (lambda q, k, v: lambda: time.sleep(9), "numpy", 16, 1e-2),
    "elsewhere": (right, "no_such_package", 16, 1e-2),
    "right": (right, "numpy", 8, 1e-2),
}


def test_a_peer_that_fails_is_one_line_and_the_others_are_timed(monkeypatch, tmp_path):
    for module in (bench_gpu, gpu_peers):
        monkeypatch.setattr(module, "PEERS", STRANGERS)
    monkeypatch.setattr(gpu_peers, "LIMIT", 1)
    monkeypatch.setattr(bench_gpu, "progress", lambda todo, title: todo)
    monkeypatch.setattr(bench_gpu, "checked", lambda sizes: [])
    scene = Scene("decode", 2, 64, [(name, 16) for name in STRANGERS])
    monkeypatch.setattr(bench_gpu, "scenes", lambda sizes: [scene])
    assert bench_gpu.bench(WithTensors(), TINY, tmp_path, 60) == 0
    rows, _ = read_table(tmp_path / "decode_dry_run.csv")
    notes = {row["kernel"]: row["note"] for row in rows}
    assert notes == {
        "right": None,
        "wrong": "failed: relative error 1",
        "broken": "failed: CUDA error out of luck",
        "late": "failed: not ready after 1 s",
        "elsewhere": "absent: No module named 'no_such_package'",
    }
    assert rows[-1]["nbytes"] == 2 * 2 * 64 * 128  # of FP8
    assert signal.alarm(0) == 0


def test_a_kernel_of_ours_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(launches):
        raise RuntimeError("decode_v1 failed on the GPU")

    machine = Simulator()
    machine.ready = fail
    monkeypatch.setattr(bench_gpu, "progress", lambda todo, title: todo)
    monkeypatch.setattr(bench_gpu, "checked", lambda sizes: [])
    scene = Scene("decode", 1, 64, [("v1", 4)])
    monkeypatch.setattr(bench_gpu, "scenes", lambda sizes: [scene])
    assert bench_gpu.bench(machine, TINY, tmp_path, 60) == 1
    ((row,), _) = read_table(tmp_path / "decode_dry_run.csv")
    assert row["note"] == "failed: decode_v1 failed on the GPU"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "unrecognized arguments: --fast"),
        (["--seconds", "0"], "--seconds 0; valid: more than 0"),
        (["--seconds", "soon"], "argument --seconds: invalid float value: 'soon'"),
        (["--folder", "no/such"], "--folder no/such; valid: a folder that exists"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_gpu.main(["--dry-run", *arguments])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"bench_gpu.py: {message}\n"


@pytest.mark.skipif(gpu_status()[0], reason="there is a GPU")
def test_without_a_gpu_it_says_that_it_has_not_run():
    script = Path(bench_gpu.__file__)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("bench-gpu has not run: no GPU to use (cupy:")


def test_a_gpu_without_the_instructions_is_told_apart(card):
    machine, fake = card
    fake.Device = lambda: SimpleNamespace(compute_capability="75")
    v4 = SimpleNamespace(source="decode/v4_tensor_cores")
    v3 = SimpleNamespace(source="decode/v3_split_kv")
    assert machine.missing([v3, v4]) == "compute capability 8.0 is needed"
    assert machine.missing([v3]) is None


# --- the figure -----------------------------------------------------------------------
@needs_compiler
def test_measured_rows_are_drawn_beside_predicted_ones(dry_run, tmp_path, monkeypatch):
    """With made-up times, in a folder of this test."""
    rows = [dict(row) for row in dry_run[3] if row["note"] is None]
    rng = np.random.default_rng(0)
    for row in rows:
        row["seconds"] = (2 + rng.random()) * 1e-6 + row["nbytes"] / 1e10
        row["copy_percent"] = 100 * row["nbytes"] / row["seconds"] / 1e10
    header = {"device": "MADE UP for a test (no GPU)"}
    write_table(tmp_path / "decode_made_up.csv", rows, header)
    spec = importlib.util.spec_from_file_location("plot_gpu_decode", FIGURE)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "MEASURED", tmp_path)
    table = script.data()
    measured = [row for row in table if row["kind"] == "measured"]
    assert len(measured) == sum(row["op"] == "decode" for row in rows)
    assert {row["device"] for row in measured} == {"MADE UP for a test"}
    seconds = {(r["kernel"], r["bits"], r["B"], r["T"]): r["seconds"] for r in measured}
    for row in measured:
        full = seconds["v5", 16, row["B"], row["T"]]
        assert row["speedup"] == full / row["seconds"]
    monkeypatch.setattr(script, "B", 1)
    monkeypatch.setattr(script, "T", 128)
    script.draw(table, tmp_path / "made_up")
    assert (tmp_path / "made_up.png").exists()
    assert script.finding(table).startswith("Measured for MADE UP for a test: no, no")


def test_a_measured_device_stands_beside_its_own_prediction():
    spec = importlib.util.spec_from_file_location("plot_gpu_decode", FIGURE)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.model("NVIDIA H200") == ["H200"]
    assert script.model("NVIDIA A100-SXM4-80GB") == ["A100-80GB"]
    assert script.model("NVIDIA GeForce RTX 4090") == ["RTX-4090"]
    assert script.model("NVIDIA L4") == []


def test_the_machines_know_the_same(card):
    public = {name for name in vars(Simulator) if not name.startswith("_")}
    assert public - {"name"} <= set(dir(card[0]))
    assert gpu_machines.Simulator().copy(8)[1] == 16
