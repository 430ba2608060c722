"""What is read from machine code, on kernels that are known by hand."""

import pytest

from kvq.kernels import static
from kvq.kernels.launch import nvrtc

reason = nvrtc.unavailable() or static.unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SOURCE = """
extern "C" __global__ void copy(const uint4* x, uint4* y) {
    y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void narrow(const int* x, int* y) {
    y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void sum(const float* x, float* y, int n) {
    __shared__ float part[300];
    float s = 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
        part[threadIdx.x] = x[i] * y[i];
        __syncthreads();
        s += part[i] / part[i + 1];
        __syncthreads();
    }
    y[threadIdx.x] = s;
}

extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 64; ++j) a[i] += a[j] * a[i];
    for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = a[i];
}
"""


@pytest.fixture(scope="module", params=[80, 120])
def facts(request, tmp_path_factory):
    """{kernel: Facts}, and "arch"."""
    path = tmp_path_factory.mktemp("static") / "known.cu"
    path.write_text(SOURCE)
    return static.facts(nvrtc.compile_cubin(path, {}, request.param)) | {
        "arch": request.param
    }


def test_wide_loads(facts):
    assert facts["copy"].wide_loads == 1
    assert facts["narrow"].wide_loads == 0
    assert static.count(facts["narrow"].code, "LDG") == 1


def test_spills_and_registers(facts):
    assert facts["copy"].spills == 0
    assert facts["spills"].spills > 0
    assert facts["spills"].stack > 0
    assert facts["spills"].registers <= 64  # a block of 1024 threads
    assert facts["copy"].registers < facts["sum"].registers


def test_shared_memory(facts):
    reserved = 1024 if facts["arch"] >= 90 else 0
    assert facts["sum"].shared == 1200 + reserved
    assert facts["copy"].shared == reserved * (facts["copy"].shared > 0)


def test_the_loop_and_its_barriers(facts):
    found = facts["sum"]
    assert len(found.loops) == 1  # not those of the slow division, behind EXIT
    assert static.count(found.code, "BAR") == found.barriers == 2
    assert 20 < len(found.main_loop) < 80
    assert facts["copy"].loops == ()
    assert facts["copy"].main_loop == ()


def test_instructions_know_their_lines(facts):
    line = SOURCE.splitlines().index("    y[threadIdx.x] = s;") + 1
    found = facts["sum"]
    stores = [p for op, p in zip(found.code, found.places, strict=True) if "STG" in op]
    assert stores == [("known.cu", line)]


def test_count_takes_whole_parts_of_an_opcode():
    code = ("LDG.E.128", "LDG.E", "LDGSTS.E.128", "LDGDEPBAR", "BAR.SYNC", "BARRIER")
    assert static.count(code, "LDG") == 2
    assert static.count(code, "LDG.E.128") == 1
    assert static.count(code, "BAR", "LDGDEPBAR") == 2


def test_wide_loads_and_matrix_instructions_of_every_form():
    wide = ("LDG.E.128", "LDG.E.128.CONSTANT", "LDGSTS.E.BYPASS.LTC128B.128")
    code = (*wide, "LDG.E.LTC128B", "LDS.128", "STG.E.128", "HMMA.16816.F32", "IMMA")
    found = static.Facts(1, 0, 0, code, (), ())
    assert (found.wide_loads, found.matrix) == (3, 2)


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(static, "tool", lambda name: None)
    assert static.unavailable() == "needs nvidia-cuda-cuobjdump"
    with pytest.raises(
        RuntimeError, match="cuobjdump is not here: pip install nvidia-"
    ):
        static.facts(b"")
