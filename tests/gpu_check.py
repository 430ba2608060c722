"""`make gpu-check`: a GPU's results and counters beside those of the PTX machine.

    results     every test of `tests/kernels/test_every_backend.py` on cupy and
                numba-cuda, and outputs that differ from the PTX machine's
    counters    what Nsight Compute (`ncu`) counts for every kernel of CUDA C, beside
                what the PTX machine counts; only where `ncu` is there and may count

Writes figures/data/gpu_check_<device>.csv. Exit codes: 0 all tests passed, 1 some did
not, 2 it has not run.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import numpy as np

from kvq.doctor import PACKAGES, _version
from kvq.kernels import gpu_status
from kvq.kernels.cases import Case, launches, versions
from kvq.kernels.launch import nvrtc, ptxsim
from kvq.tables import provenance, write_table

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("cupy", "numba-cuda")
TESTS = "tests/kernels/test_every_backend.py"
COLUMNS = ("what", "where", "simulated", "measured")
# Counters of the PTX machine, and the hardware's that should be the same.
METRICS = {
    "sectors": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    ),
    "requests": (
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    ),
    "wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    # Not the same: one counts PTX, the other machine code.
    "instructions": ("smsp__inst_executed.sum",),
}


def main():
    available, what = gpu_status()
    if not available:
        print(f"gpu-check has not run: no GPU to use ({what})", file=sys.stderr)
        return 2
    if sys.argv[1:] == ["--launch"]:  # under Nsight Compute
        from kvq.kernels.launch import cupy

        for case in cases():
            cupy.run(launches(case))
        return 0
    rows = [*tested(), *outputs(), *counters()]
    path = ROOT / "figures" / "data" / f"gpu_check_{file_name(what)}.csv"
    write_table(path, rows, header(what))
    print(*table(rows), f"written to {path.relative_to(ROOT)}", sep="\n")
    return int(any(row["what"] == "tests failed" and row["measured"] for row in rows))


def cases():
    """One case for each version of each operation, as in the tables of the kernels."""
    return [
        Case(op, version, per="channel", group=32, T=512, residual=40)
        for op, version in versions()
    ]


def row(what, where, simulated, measured):
    return dict(zip(COLUMNS, (what, where, simulated, measured), strict=True))


# --- results --------------------------------------------------------------------------
def tested():
    """How many tests passed and failed, for each backend and version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", TESTS]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-k", " or ".join(BACKENDS)]
        env = os.environ | {"KVQ_REQUIRE_BACKENDS": " ".join(BACKENDS)}
        subprocess.run(command, cwd=ROOT, env=env)
        return count_tests(report.read_text(encoding="utf-8"))


def count_tests(report):
    """Rows of a report in JUnit's format: tests by backend and version."""
    passed, failed = Counter(), Counter()
    for test in ElementTree.fromstring(report).iter("testcase"):
        found = re.search(rf"\b({'|'.join(BACKENDS)})(-v\d+)?", test.get("name"))
        bad = test.find("failure") is not None or test.find("error") is not None
        where = "".join(filter(None, found.groups())) if found else test.get("name")
        if test.find("skipped") is None:
            (failed if bad else passed)[where] += 1
    for where in sorted(passed | failed):
        yield row("tests passed", where, None, passed[where])
        yield row("tests failed", where, None, failed[where])


def outputs():
    """Numbers of a kernel's outputs whose bits differ from the PTX machine's."""
    from kvq.kernels.launch import cupy

    for case in cases():
        simulated, measured = launches(case), launches(case)
        ptxsim.run(simulated, check=False)
        cupy.run(measured)
        for a, b in zip(simulated, measured, strict=True):
            differ = [
                np.count_nonzero(bits(a.args[i]) != bits(b.args[i])) for i in a.outputs
            ]
            yield row("outputs that differ", a.kernel, 0, int(sum(differ)))


def bits(array):
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


# --- counters -------------------------------------------------------------------------
def counters():
    """Every counter of every kernel, or one row that says why there is none."""
    simulated = []
    for case in cases():
        todo = launches(case)
        reports = ptxsim.run(todo, check=False)
        simulated += zip((one.kernel for one in todo), reports, strict=True)
    try:
        measured = read_ncu(run_ncu())
        if [name for name, _ in measured] != [name for name, _ in simulated]:
            raise RuntimeError(f"ncu saw {[name for name, _ in measured]}")
    except (OSError, RuntimeError) as error:
        yield row("no counters", " ".join(str(error).split())[:200], None, None)
        return
    for (kernel, report), (_, found) in zip(simulated, measured, strict=True):
        for what, metrics in METRICS.items():
            total = sum(found[metric] for metric in metrics)
            yield row(what, kernel, int(getattr(report, what)), total)


def run_ncu():
    """What `ncu --csv` prints. Raises RuntimeError or OSError."""
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not here")
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--clock-control", "none", "--kernel-name-base", "function"]
    command += ["--kernel-name", "regex:^(pack|dequant|decode)_v"]
    command += ["--metrics", ",".join(m for names in METRICS.values() for m in names)]
    command += [sys.executable, __file__, "--launch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        lines = re.findall(r"==ERROR==.*", done.stdout + done.stderr)
        raise RuntimeError(lines[0] if lines else f"ncu: exit code {done.returncode}")
    return done.stdout


def read_ncu(text):
    """[(kernel, {metric: number})] in the order of the launches.

    Lines of ncu itself begin with ==; the row after the column names has the units.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    wanted = [metric for names in METRICS.values() for metric in names]
    found = []
    for cells in csv.DictReader(lines):
        if not cells["ID"]:
            continue
        missing = [metric for metric in wanted if not cells.get(metric)]
        if missing:
            raise RuntimeError(f"ncu did not count {missing[0]}")
        numbers = {m: round(float(cells[m].replace(",", ""))) for m in wanted}
        found.append((re.match(r"\w+", cells["Kernel Name"])[0], numbers))
    return found


# --- the table ------------------------------------------------------------------------
def header(device):
    from cupy.cuda import runtime

    versions = {name: _version(name) for name in PACKAGES}
    versions |= {"NVRTC": nvrtc.version(), "driver": runtime.driverGetVersion()}
    facts = provenance("make gpu-check")
    shown = ", ".join(
        f"{name} {version}" for name, version in versions.items() if version
    )
    return facts | {"device": device, "packages": shown}


def file_name(device):
    """The device's name as a part of a file's: "NVIDIA H200 (...)" -> "nvidia_h200"."""
    return re.sub(r"\W+", "_", device.partition(" (")[0]).strip("_").lower()


def table(rows):
    """The rows as lines of text."""
    yield f"{'what':<20} {'where':<24} {'simulated':>10} {'measured':>10}"
    for cells in rows:
        numbers = ("" if cells[c] is None else cells[c] for c in COLUMNS[2:])
        yield "{:<20} {:<24} {:>10} {:>10}".format(
            cells["what"], cells["where"], *numbers
        )


if __name__ == "__main__":
    sys.exit(main())
