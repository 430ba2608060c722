"""A launch is checked before it runs, and each executor runs what it was given."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from agree import check_decode, check_dequant, check_pack, filled, queries
from plain import uneven

from kvq.kernels import BACKENDS, backends, decode, pack
from kvq.kernels.launch import Launch, nvrtc, scalar
from kvq.kernels.launch import cupy as cupy_executor
from kvq.kernels.launch import ptxsim as ptxsim_executor
from kvq.scheme import Policy, Scheme
from kvq.tensor import quantize

INT4 = Scheme(4, "token", 32, "asymmetric")


# --- a launch -------------------------------------------------------------------------
def launch(*args, grid=1, block=32, outputs=()):
    return Launch("pack/v1_word_per_thread", "pack_v1", {}, grid, block, args, outputs)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, np.int32(7)),
        (True, np.int32(1)),
        (np.True_, np.int32(1)),
        (np.int64(2**40), np.int64(2**40)),
        (np.uint8(7), np.int32(7)),
        (0.3, np.float32(0.3)),
        (np.float64(0.3), np.float32(0.3)),
        (np.float32(0.3), np.float32(0.3)),
    ],
)
def test_a_number_gets_the_type_that_a_kernel_takes(value, expected):
    (found,) = launch(value).args
    assert found == expected
    assert found.dtype == expected.dtype


def test_a_number_that_no_kernel_takes_is_refused():
    with pytest.raises(ValueError, match="argument 1 is 2147483648, beyond int32"):
        launch(1, 2**31)
    with pytest.raises(TypeError, match="argument 0 is str; expected"):
        launch("4")
    with pytest.raises(TypeError, match="scalar is NoneType"):
        scalar(None)


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros(4), TypeError, "dtype float64; expected float16, float32"),
        (np.zeros(4, ">f4"), TypeError, "dtype >f4"),
        (np.zeros((2, 2), np.float32), ValueError, r"shape \(2, 2\)"),
        (np.zeros(8, np.float32)[::2], ValueError, r"strides \(8,\)"),
        (np.zeros(0, np.float32), ValueError, "is empty"),
        (np.zeros(9, np.uint8)[1:].view(np.float32), ValueError, "aligned"),
    ],
)
def test_an_array_that_a_kernel_would_misread_is_refused(array, error, message):
    with pytest.raises(error, match=f"pack_v1: argument 0.*{message}"):
        launch(array)


def test_a_launch_beyond_the_limits_is_refused():
    for sizes in ({"grid": 0}, {"grid": 2**31}, {"block": 0}, {"block": 1025}):
        ((name, value),) = sizes.items()
        with pytest.raises(ValueError, match=f"pack_v1: {name}={value}; valid: 1.."):
            launch(**sizes)
    locked = np.zeros(4, np.float32)
    locked.flags.writeable = False
    for args in ((locked,), (3,)):
        with pytest.raises(ValueError, match="output 0"):
            launch(*args, outputs=(0,))


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [((70_000, 1, 64), INT4), ((1, 2**20, 64), Scheme(4, "channel", 32))],
)
def test_many_heads_and_many_tokens_fit_into_a_grid(shape, scheme):
    x = np.broadcast_to(np.ones(64, np.float16), shape)
    for version in pack.VERSIONS:
        for one in pack.launches(x, scheme, version)[0]:
            assert one.grid * one.block >= np.prod(shape) // scheme.group // 4


def test_the_number_of_splits_fits_the_cache():
    long, short = (decode._split(_lengths(T), 8) for T in (2**24, 5))
    assert short == (1, 192)  # a tile for each of four warps, in whole groups
    splits, tokens = long
    assert splits * tokens >= 2**24 > (splits - 1) * tokens
    assert tokens % 96 == 0  # whole tiles of 32 and whole groups of 48


def _lengths(T):
    side = SimpleNamespace(group=(48, 1))
    return SimpleNamespace(lengths=np.array([[T, 0], [1, 3]]), k=side)


# --- which version --------------------------------------------------------------------
@pytest.fixture
def started(monkeypatch):
    """Names of the kernels that "ptxsim-c" was asked for; nothing is run."""
    names = []

    def run(launches, language):
        names.extend(one.kernel for one in launches)

    monkeypatch.setattr(ptxsim_executor, "run", run)
    monkeypatch.setattr(ptxsim_executor, "missing", lambda launches, language: None)
    return names


def test_without_a_version_the_newest_that_knows_the_case_runs(started):
    b, x = BACKENDS["ptxsim-c"], uneven((1, 3, 64))
    for D in (64, 20):
        b.dequant(quantize(x[..., :D], INT4))
    b.dequant(quantize(x, INT4), version="v1")
    b.decode(queries(1, 2, 64), filled("kivi-4", (1, 1, 5, 64)))
    b.decode(queries(1, 2, 20), filled("kivi-4", (1, 1, 5, 20)))
    assert started == [
        *("dequant_v2", "dequant_v1", "dequant_v1"),
        *("decode_v3", "decode_v3_merge", "decode_v1"),
    ]
    with pytest.raises(ValueError, match="unknown version 'v9'; valid: v1, v2, v3"):
        b.decode(queries(1, 2, 64), filled("kivi-4", (1, 1, 5, 64)), version="v9")


# --- PTX ------------------------------------------------------------------------------
def test_what_the_machine_does_not_know_is_an_error(monkeypatch):
    from kvq.kernels.ptxsim import UnsupportedPTX

    def text(source, kernel, constants, language):
        return (
            ".version 8.0\n.target sm_80\n.address_size 64\n"
            f".visible .entry {kernel}()\n{{\n  wgmma.fence.sync.aligned;\n  ret;\n}}\n"
        )

    monkeypatch.setattr(ptxsim_executor, "ptx_text", text)
    ptxsim_executor._kernel.cache_clear()
    with pytest.raises(UnsupportedPTX, match="wgmma"):
        BACKENDS["ptxsim-c"].pack(uneven((1, 3, 8)), INT4, version="v1")
    ptxsim_executor._kernel.cache_clear()


def test_without_a_compiler_an_older_version_that_is_here_runs(monkeypatch):
    have = []

    def find(source, constants, language, kernel):
        return None if "v1" not in source else "here"

    monkeypatch.setattr(ptxsim_executor.ptx, "find", find)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "needs nvidia-cuda-nvrtc")
    monkeypatch.setattr(
        ptxsim_executor, "run", lambda launches, language: have.extend(launches)
    )
    x = uneven((1, 3, 64))
    with pytest.raises(RuntimeError, match="'ptxsim-c': no committed PTX of pack_v2"):
        BACKENDS["ptxsim-c"].pack(x, INT4, version="v2")
    BACKENDS["ptxsim-c"].dequant(quantize(x, INT4))
    assert [one.kernel for one in have] == ["dequant_v1"]


# --- Numba's simulator ----------------------------------------------------------------
@pytest.fixture
def simulator():
    b = BACKENDS["numba-sim"]
    if b.unavailable():
        pytest.skip(b.unavailable())
    return b


def test_numbas_simulator_runs_the_twins(simulator):
    x = uneven((2, 5, 20))
    packed = check_pack(simulator.pack, x, Scheme(3, "channel", 4, "asymmetric"))
    check_dequant(simulator.dequant, packed)


def test_numbas_simulator_decodes(simulator):
    policy = Policy(Scheme(4, "channel", 4), INT4, residual=2)
    cache = filled(policy, (1, 2, 9, 16))
    check_decode(simulator.decode, queries(1, 4, 16), cache, sink_logits=np.ones(4))


def test_numbas_simulator_is_for_small_cases_and_for_the_first_version(simulator):
    with pytest.raises(ValueError, match=r"T=65, which would take minutes; valid: 0"):
        simulator.pack(uneven((1, 65, 64)), INT4)
    with pytest.raises(ValueError, match="no warp shuffles; valid: v1"):
        simulator.pack(uneven((1, 3, 64)), INT4, version="v2")
    assert simulator.unsupported("pack", INT4) is None


def test_a_failure_in_numbas_simulator_is_reported(simulator):
    (one,) = pack.launches(uneven((1, 3, 8)), INT4, "v1")[0][:1]
    wrong = Launch(one.source, "pack_v9", one.constants, 1, 1, one.args, one.outputs)
    from kvq.kernels.launch import numba_sim

    with pytest.raises(RuntimeError, match="simulator failed: KeyError: 'pack_v9'"):
        numba_sim.run([wrong])


GPU_EXECUTOR_IN_THE_SIMULATOR = """
import numpy as np
from numba import cuda
from numba.cuda.simulator import kernel as running
cuda.__getattr__ = lambda name: getattr(running._get_kernel_context(), name)
from kvq import Scheme, quantize
from kvq.kernels import pack
from kvq.kernels.launch import numba_cuda

x, scheme = np.arange(60, dtype=np.float32).reshape(1, 3, 20), Scheme(3, "channel", 2)
launches, collect = pack.launches(x, scheme, "v1")
numba_cuda.run(launches)
for a, b in zip(collect().arrays, quantize(x, scheme).arrays):
    assert a.tobytes() == b.tobytes()
assert "not a GPU" in numba_cuda.unavailable()
print("ok")
"""


def test_the_executor_of_numba_on_a_gpu_with_the_simulator_for_a_gpu(simulator):
    done = subprocess.run(
        [sys.executable, "-c", GPU_EXECUTOR_IN_THE_SIMULATOR],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "ok", done.stderr


# --- CuPy, with a stand-in for the GPU ------------------------------------------------
class DeviceArray:
    """What `cupy.asarray` gives."""

    def __init__(self, array):
        self.numbers = array.copy()

    def get(self, out):
        out[:] = self.numbers


class FakeCuPy:
    """The few functions of CuPy that the executor calls; a kernel is `body`."""

    def __init__(self, body):
        self.body, self.calls, self.waits = body, [], 0
        self.asarray = DeviceArray
        error = type("CUDADriverError", (RuntimeError,), {})
        device = SimpleNamespace(compute_capability="90", id=0)
        self.driver = SimpleNamespace(CUDADriverError=error)
        self.runtime = SimpleNamespace(CUDARuntimeError=error)
        self.Device = lambda: device
        self.cuda = self

    def RawModule(self, path):
        with open(path, "rb") as file:
            assert file.read() == b"machine code"
        return SimpleNamespace(get_function=self._function)

    def _function(self, name):
        def call(grid, block, args):
            self.calls.append((name, grid, block, args))
            self.body(name, args)

        return call

    def get_current_stream(self):
        return SimpleNamespace(synchronize=self._wait)

    def _wait(self):
        self.waits += 1


@pytest.fixture
def fake_cupy(monkeypatch):
    def install(body):
        fake, compiled = FakeCuPy(body), []

        def compile_cubin(source, constants, arch):
            compiled.append((source, constants, arch))
            return b"machine code"

        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setitem(sys.modules, "cupy.cuda", fake)
        monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
        asked_each_time = backends._executor_problem.__wrapped__
        monkeypatch.setattr(backends, "_executor_problem", asked_each_time)
        cupy_executor._module.cache_clear()
        fake.compiled = compiled
        return fake

    yield install
    cupy_executor._module.cache_clear()


def test_what_cupy_is_given(fake_cupy):
    def body(name, args):
        args[2].numbers[:] = 3
        if name == "pack_v1":
            args[3].numbers[:] = 5

    fake = fake_cupy(body)
    x = uneven((1, 3, 8), dtype=np.float16)
    x.flags.writeable = False
    launches, _ = pack.launches(x, INT4, "v1")
    cupy_executor.run(launches)
    constants = {"X": "__half", "S": "__half"}
    assert fake.compiled == [("pack/v1_word_per_thread", constants, 90)]
    (_, _, _, scales), (name, grid, block, args) = fake.calls
    assert (name, grid, block) == ("pack_v1", (1,), (256,))
    assert args[:3] == scales[:3]  # the same buffers
    assert {type(a) for a in args[4:]} == {np.int32}
    assert fake.waits == 2
    scale, zero, words = launches[1].args[1:4]
    assert np.isnan(scale).all()
    assert (zero == 3).all()
    assert (words == 5).all()


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, AttributeError])
def test_a_package_that_fails_is_a_reason_in_one_line(error, fake_cupy):
    def count():
        raise error("driver version\nis insufficient")

    fake = fake_cupy(None)
    fake.runtime.getDeviceCount = count
    assert BACKENDS["cupy"].unavailable() == "driver version is insufficient"
    fake.runtime.getDeviceCount = lambda: 0
    assert BACKENDS["cupy"].unavailable() == "no CUDA device"


def test_a_gpu_without_a_compiler_is_not_enough(fake_cupy, monkeypatch):
    fake_cupy(None).runtime.getDeviceCount = lambda: 1
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "needs nvidia-cuda-nvrtc")
    assert BACKENDS["cupy"].unavailable() == "needs nvidia-cuda-nvrtc"


def test_an_error_of_the_gpu_names_the_kernel(fake_cupy):
    def body(name, args):
        raise fake.driver.CUDADriverError("an illegal memory access was encountered")

    fake = fake_cupy(body)
    launches, _ = pack.launches(uneven((1, 3, 8)), INT4, "v1")
    with pytest.raises(RuntimeError, match="pack_v1_scales failed on the GPU: an ill"):
        cupy_executor.run(launches)
