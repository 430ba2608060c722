"""With NumPy alone: no compiler, no NVIDIA package, every committed kernel runs.

A new Python process refuses to import anything else that is not Python's own; the PTX
then comes from `kernels/ptx/` or from nowhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REFUSE = """
import sys

ALLOWED = {"numpy", "ml_dtypes", "kvq", "kernels", "agree", "plain"}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_")
        if not ours:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
"""
RUN = """
from dataclasses import replace

import numpy as np
from agree import check_decode, check_dequant, check_pack, filled, queries
from plain import uneven
from kvq.kernels import BACKENDS
from kvq.kernels.launch import numba_ptx, nvrtc
from kvq.kernels.ptx.specializations import cases
from kvq.tensor import quantize

assert nvrtc.unavailable() and numba_ptx.unavailable()
backend, runs = BACKENDS["ptxsim-{language}"], 0
for case in cases():
    if case.op != "{op}":
        continue

    def run(*inputs, **options):
        return getattr(backend, case.op)(*inputs, version=case.version, **options)

    x = uneven((case.H_kv, 45, case.D), dtype=np.dtype(case.dtype))
    if case.op == "pack":
        check_pack(run, x, case.scheme)
    elif case.op == "dequant":
        check_dequant(run, quantize(x, case.scheme))
    else:
        policy, dtype = replace(case.policy, residual=20), np.dtype(case.dtype)
        cache = filled(policy, (1, 1, 75, case.D), dtype=dtype)
        check_decode(run, queries(1, case.ratio, case.D, dtype=dtype), cache)
    runs += 1
print(runs)
"""

RUN_PAGES = """
import numpy as np
from agree import queries
from plain import uneven
from kvq.cache import KVCache
from kvq.kernels import BACKENDS, decode
from kvq.kernels.cases import Case, tensor_core_versions
from kvq.kernels.decode.growing import GrowingCache
from kvq.kernels.launch import nvrtc
from kvq.kernels.ptx.specializations import PAGE_BITS, PAGES

assert nvrtc.unavailable()
runs = 0
for bits in PAGE_BITS:
    for op, version in tensor_core_versions():
        case = Case(op, version, bits, residual=3, **PAGES)
        k, v = (uneven((1, 1, 69, case.D), seed).astype(np.float16) for seed in (0, 1))
        pages, cache = GrowingCache(case.policy, 1, 1, case.D, 70), KVCache(case.policy)
        for piece in (slice(0, 66), slice(66, 69)):
            pages.append(k[:, :, piece], v[:, :, piece])
            cache.append(k[:, :, piece], v[:, :, piece])
        q = queries(1, case.ratio, case.D, dtype=np.float16)
        paged = pages.paged(decode.TENSOR_CORES[version])
        out, expected = BACKENDS["ptxsim-c"].decode(q, paged), cache.attend(q)
        assert np.abs(out - expected).max() <= 4e-3 * np.abs(expected).max(), case
        runs += 1
print(runs)
"""


def python(code, folder):
    path = [str(TESTS), str(TESTS / "kernels")]
    # What was compiled before on this machine must not help.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "XDG_CACHE_HOME": folder}
    return subprocess.run(
        [sys.executable, "-c", REFUSE + code], env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("op", ["pack", "dequant", "decode"])
@pytest.mark.parametrize("language", ["c", "numba"])
def test_every_committed_kernel_runs_and_agrees(language, op, tmp_path):
    done = python(RUN.format(language=language, op=op), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 + 12


def test_committed_kernels_write_pages_and_read_them(tmp_path):
    done = python(RUN_PAGES, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 8


def test_the_refusal_works(tmp_path):
    for package in ("numba", "cupy", "cuda.bindings", "pytest"):
        done = python(f"import {package}", str(tmp_path))
        assert f"No module named {package.partition('.')[0]!r}" in done.stderr
