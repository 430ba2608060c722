"""What an import brings along, and how a broken GPU package is survived."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    *("numba", "cupy", "matplotlib", "joblib", "ml_dtypes", "tqdm", "safetensors"),
    *("jupytext", "kvq.kernels", "kernels"),
)


def python(code, cwd, path=()):
    """What a fresh interpreter prints. path : folders put in front of sys.path."""
    path = filter(None, [*map(str, path), os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    env.pop("NUMBA_ENABLE_CUDASIM", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["kvq", "kvq.cli", "kvq.study", "kvq.memory"])
def test_the_reference_imports_numpy_and_nothing_heavier(module, tmp_path):
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert python(code, tmp_path) == ""


def test_the_import_is_quick(tmp_path):
    # Processor time, so that a busy machine does not matter; NumPy's own is left out.
    code = (
        "import time, numpy; start = time.process_time(); import kvq; "
        "print(time.process_time() - start)"
    )
    assert float(python(code, tmp_path)) < 0.3


def test_kernels_are_a_part_of_the_package(tmp_path):
    code = (
        "import sys, kvq.kernels; assert 'numba' not in sys.modules; "
        "print(kvq.kernels.backend('numpy').name)"
    )
    assert python(code, tmp_path) == "numpy"


def test_the_folder_called_kernels_imports_nothing(tmp_path):
    code = (
        "import sys; before = set(sys.modules); import kernels; "
        "print(*sorted(set(sys.modules) - before), kernels.__file__)"
    )
    expected = f"kernels {ROOT / 'kernels' / '__init__.py'}"
    assert python(code, ROOT) == expected


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
def test_transformers_imports_from_the_root():
    assert python("import transformers; print('ok')", ROOT) == "ok"


# --- packages that are installed and do not work --------------------------------------
STATUS = (
    "import kvq, numpy as np; from kvq.kernels import backend, gpu_status; "
    "print(gpu_status()); "
    "x = np.ones((2, 5, 8), np.float32); b = backend('auto'); "
    "x_hat = b.dequant(b.pack(x, kvq.Scheme(4))); assert np.allclose(x_hat, 1, 1e-3); "
    "print(b.name)"
)


def fake(folder, **sources):
    """Packages of these names whose __init__ is this text."""
    for name, source in sources.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
    return [folder]


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('libcuda.so.1: cannot open shared object file')",
        "OSError('libcublas.so.12: cannot open shared object file')",
        "RuntimeError('CUDARuntimeError: driver too old')",
        "AttributeError('_ARRAY_API not found')",
    ],
)
def test_a_gpu_package_that_fails_on_import_is_a_reason(error, tmp_path):
    path = fake(tmp_path, cupy=f"raise {error}", numba=f"raise {error}")
    status, name = python(STATUS, tmp_path, path).splitlines()
    available, what = eval(status)
    assert available is False
    message = eval(error).args[0]
    assert what == f"cupy: {message}; numba-cuda: {message}"
    assert name == "numpy"


CUDA = """
class cuda:
    class runtime:
        @staticmethod
        def getDeviceCount(): {count}
        @staticmethod
        def getDeviceProperties(i): return {{"name": b"Tesla Test"}}
import sys; sys.modules["cupy.cuda"] = cuda
"""


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("raise RuntimeError('driver\\nis insufficient')", "driver is insufficient"),
        ("raise OSError", "OSError"),
        ("return 0", "no CUDA device"),
    ],
)
def test_a_gpu_that_is_not_there_is_a_reason(count, expected, tmp_path):
    path = fake(tmp_path, cupy=CUDA.format(count=count), numba="raise ImportError")
    status = python(STATUS, tmp_path, path).splitlines()[0]
    assert eval(status) == (False, f"cupy: {expected}; numba-cuda: ImportError")


def test_a_gpu_that_is_there_is_named(tmp_path):
    path = fake(tmp_path, cupy=CUDA.format(count="return 1"), numba="raise ImportError")
    status = python(STATUS, tmp_path, path).splitlines()[0]
    assert eval(status) == (True, "Tesla Test (through cupy)")


def test_the_simulator_is_not_a_gpu(tmp_path):
    numba = "class config: ENABLE_CUDASIM = 1\ncuda = None"
    path = fake(tmp_path, cupy="raise ImportError('no cupy')", numba=numba)
    status = python(STATUS, tmp_path, path).splitlines()[0]
    available, what = eval(status)
    assert not available
    assert "a simulator, not a GPU" in what


def test_every_package_of_the_checkout_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    folders = [
        p.parent
        for top in ("kvq", "kernels")
        for p in ROOT.glob(f"{top}/**/__init__.py")
    ]
    names = [".".join(f.relative_to(ROOT).parts) for f in folders]
    wanted = [n if n.startswith("kvq") else f"kvq.{n}" for n in names]
    assert sorted(listed) == sorted(wanted)
