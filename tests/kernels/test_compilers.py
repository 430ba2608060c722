"""CUDA C and the Numba twins to PTX and machine code, on a machine without a GPU."""

import subprocess
import sys

import pytest

from kvq.kernels.launch import cache, numba_ptx, nvrtc

SAXPY = """#include "shared.cuh"
extern "C" __global__ void saxpy(const X* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += scaled(x[i]);
}
"""
SHARED = """#include <cuda_fp16.h>
__device__ inline float scaled(X x) { return A * (float)x; }
"""
needs_nvrtc = pytest.mark.skipif(
    nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable())
)
needs_numba = pytest.mark.skipif(
    numba_ptx.unavailable() is not None, reason=str(numba_ptx.unavailable())
)


@pytest.fixture
def saxpy(tmp_path, monkeypatch):
    """A source with a header beside it, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_results", {})
    (tmp_path / "shared.cuh").write_text(SHARED)
    path = tmp_path / "saxpy.cu"
    path.write_text(SAXPY)
    return path


CONSTANTS = {"X": "__half", "A": 3}


@needs_nvrtc
def test_constants_reach_the_code(saxpy):
    ptx = nvrtc.compile_ptx(saxpy, CONSTANTS)
    assert ".visible .entry saxpy(" in ptx
    assert "cvt.f32.f16" in ptx
    assert "0f40400000" in ptx  # 3.0
    ptx = nvrtc.compile_ptx(saxpy, {"X": "float", "A": 5})
    assert "cvt.f32.f16" not in ptx
    assert "0f40A00000" in ptx  # 5.0


@needs_nvrtc
def test_ptx_names_lines_of_the_source_and_no_folder(saxpy, tmp_path, monkeypatch):
    here = nvrtc.compile_ptx(saxpy, CONSTANTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "_results", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert nvrtc.compile_ptx(saxpy, CONSTANTS) == here
    assert str(tmp_path) not in here
    assert '.file\t1 "saxpy.cu"' in here
    assert ".loc\t1 4 " in here  # the line of the load


@needs_nvrtc
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_machine_code_for_every_architecture(saxpy, arch):
    assert nvrtc.compile_cubin(saxpy, CONSTANTS, arch)[:4] == b"\x7fELF"


@needs_nvrtc
def test_an_error_has_the_line_of_the_source(saxpy):
    saxpy.write_text(SAXPY.replace("y[i] +=", "y[i] = = "))
    with pytest.raises(
        nvrtc.CompileError, match=r"^saxpy\.cu\(4\): error: expected an"
    ):
        nvrtc.compile_ptx(saxpy, CONSTANTS)
    with pytest.raises(nvrtc.CompileError, match='identifier "A" is undefined'):
        nvrtc.compile_ptx(saxpy, {"X": "float"})


@needs_nvrtc
def test_wrong_arguments_name_the_valid_ones(saxpy):
    with pytest.raises(ValueError, match=r"compute_81 is .*80, 86"):
        nvrtc.compile_ptx(saxpy, CONSTANTS, arch=81)
    with pytest.raises(
        ValueError, match=r"no source 'pack/v9'; valid: a \.cu file, or"
    ):
        nvrtc.compile_ptx("pack/v9")


def test_a_missing_wheel_is_named(tmp_path):
    """In a fresh interpreter: the compiler's packages hidden, one after the other."""
    code = (
        "import sys; sys.modules['cuda'] = None; sys.modules['numba'] = None\n"
        "from kvq.kernels.launch import numba_ptx, nvrtc\n"
        "print(nvrtc.unavailable()); print(numba_ptx.unavailable())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    c, numba = done.stdout.splitlines()
    assert c.startswith("needs nvidia-cuda-nvrtc and cuda-bindings")
    assert numba.startswith("needs numba-cuda and nvidia-nvvm")


# --- the cache ------------------------------------------------------------------------
@needs_nvrtc
def test_a_result_is_kept_between_processes(saxpy, monkeypatch):
    first = nvrtc.compile_ptx(saxpy, CONSTANTS)
    monkeypatch.setattr(cache, "_results", {})  # another process
    monkeypatch.setattr(nvrtc, "_nvrtc", None)  # must not be called
    assert nvrtc.compile_ptx(saxpy, dict(reversed(CONSTANTS.items()))) == first


@needs_nvrtc
@pytest.mark.parametrize("name", ["saxpy.cu", "shared.cuh"])
def test_an_edited_file_is_compiled_again(saxpy, name):
    first = nvrtc.compile_ptx(saxpy, CONSTANTS)
    path = saxpy.with_name(name)
    path.write_text(path.read_text().replace("[i] +=", "[i] -=").replace("A *", "A +"))
    assert nvrtc.compile_ptx(saxpy, CONSTANTS) != first


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(cache, "_results", {})
    assert cache.kept("x", [], ["fact"], lambda: b"new") == b"new"


def test_every_fact_and_file_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_results", {})
    file, results = tmp_path / "source", iter([b"1", b"2", b"3"])
    file.write_text("a")
    get = lambda *facts: cache.kept("x", [file], facts, lambda: next(results))  # noqa: E731
    assert get("p") == get("p") == b"1"
    assert get("q") == b"2"
    file.write_text("b")
    assert get("p") == b"3"
    assert not list((tmp_path / "kvq").rglob("tmp*"))


# --- Numba ----------------------------------------------------------------------------
TWIN = '''"""y += A * x, through a device function."""

def kernels(c):
    from numba import cuda, float32

    A = c.A

    @cuda.jit(device=True)
    def scaled(x):
        return float32(A) * float32(x)

    def saxpy(x, y, n):
        i = cuda.grid(1)
        if i < n:
            y[i] += scaled(x[i])

    return {"saxpy": saxpy}


def signatures(c):
    from numba import types

    return {"saxpy": (types.float16[::1], types.float32[::1], types.int32)}
'''


@pytest.fixture
def twin(saxpy, tmp_path, monkeypatch):
    """The name of a twin in a package of its own."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "v1_saxpy.py").write_text(TWIN)
    monkeypatch.setattr(numba_ptx, "KERNELS", tmp_path)
    import kvq.kernels

    monkeypatch.setattr(kvq.kernels, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "kvq.kernels.toy", raising=False)
    monkeypatch.delitem(sys.modules, "kvq.kernels.toy.v1_saxpy", raising=False)
    return "toy/v1_saxpy"


@needs_numba
def test_a_twin_has_a_plain_name_and_its_lines(twin, tmp_path):
    ptx = numba_ptx.compile_ptx(twin, "saxpy", {"A": 3})
    assert ".visible .entry saxpy(" in ptx
    assert "0f40400000" in ptx
    assert "_ZN" not in ptx
    assert str(tmp_path) not in ptx
    assert ".loc\t1 15 " in ptx


@needs_numba
def test_a_twin_gives_the_same_text_again(twin, monkeypatch):
    first = numba_ptx.compile_ptx(twin, "saxpy", {"A": 3})
    assert numba_ptx._compile(twin, "saxpy", {"A": 3}, (8, 0)) == first
    assert numba_ptx._compile(twin, "saxpy", {"A": 5}, (8, 0)) != first


@needs_numba
def test_a_wrong_twin_is_named(twin):
    with pytest.raises(ValueError, match="no Numba twin 'toy/v2'; valid: toy/v1_saxpy"):
        numba_ptx.compile_ptx("toy/v2", "saxpy")
    with pytest.raises(
        ValueError, match="no kernel 'axpy' in toy/v1_saxpy; valid: sax"
    ):
        numba_ptx.compile_ptx(twin, "axpy", {"A": 1})
