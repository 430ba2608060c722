"""What `make gpu-check` makes of the output of pytest and of Nsight Compute."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest

from kvq.kernels import gpu_status

JUNIT = """<testsuites><testsuite>
<testcase name="test_a[cupy-v1: 4 token]"/>
<testcase name="test_a[cupy-v2: 4 token]"><failure message="no"/></testcase>
<testcase name="test_b[cupy-v2-5]"/>
<testcase name="test_b[numba-cuda-v1]"><skipped/></testcase>
<testcase name="test_c[numba-cuda]"><error/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_by_backend_and_version():
    found = {
        (row["what"], row["where"]): row["measured"]
        for row in gpu_check.count_tests(JUNIT)
    }
    assert found == {
        ("tests passed", "cupy-v1"): 1,
        ("tests failed", "cupy-v1"): 0,
        ("tests passed", "cupy-v2"): 1,
        ("tests failed", "cupy-v2"): 1,
        ("tests passed", "numba-cuda"): 0,
        ("tests failed", "numba-cuda"): 1,
    }


def ncu(*kernels):
    """Text like that of `ncu --csv --page raw`: metrics of kernel i are 1,000 + i."""
    metrics = [m for names in gpu_check.METRICS.values() for m in names]
    lines = ["==PROF== Connected to process 7", "ok"]
    for cells in (
        ["ID", "Kernel Name", *metrics],
        ["", "", *["sector"] * len(metrics)],
        *([str(i), f"{k}(int)", *[f"1,00{i}"] * len(metrics)] for i, k in kernels),
    ):
        lines.append(",".join(f'"{cell}"' for cell in cells))
    return "\n".join(lines)


def test_counters_stand_beside_those_of_the_machine(monkeypatch):
    reports = [SimpleNamespace(sectors=5, requests=6, wavefronts=7, instructions=8)] * 2
    launches = [SimpleNamespace(kernel=name) for name in ("pack_v1_scales", "pack_v1")]
    monkeypatch.setattr(gpu_check, "cases", lambda: ["case"])
    monkeypatch.setattr(gpu_check, "launches", lambda case: launches)
    monkeypatch.setattr(gpu_check.ptxsim, "run", lambda launches, check: reports)
    text = ncu((0, "pack_v1_scales"), (1, "pack_v1"))
    monkeypatch.setattr(gpu_check, "run_ncu", lambda: text)
    rows = [tuple(row.values()) for row in gpu_check.counters()]
    assert rows[0] == ("sectors", "pack_v1_scales", 5, 2000)
    assert rows[6] == ("wavefronts", "pack_v1", 7, 1001)
    monkeypatch.setattr(gpu_check, "run_ncu", lambda: ncu((0, "pack_v1")))
    (only,) = gpu_check.counters()
    assert (only["what"], only["where"]) == ("no counters", "ncu saw ['pack_v1']")


def test_a_counter_that_ncu_did_not_give_is_named():
    with pytest.raises(RuntimeError, match="did not count l1tex__t_sectors"):
        gpu_check.read_ncu('"ID","Kernel Name"\n"0","pack_v1"')


def test_the_file_is_named_after_the_device():
    assert gpu_check.file_name("NVIDIA H200 (through cupy)") == "nvidia_h200"


def test_there_is_a_case_for_each_version():
    found = {(case.op, case.version) for case in gpu_check.cases()}
    assert {("pack", "v2"), ("dequant", "v2"), ("decode", "v3")} < found


@pytest.mark.skipif(gpu_status()[0], reason="there is a GPU")
def test_without_a_gpu_it_says_that_it_has_not_run():
    script = Path(gpu_check.__file__)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-check has not run: no GPU to use (cupy:")
