"""The g++ executor: threads, barriers, shuffles, numbers, and the faults it finds."""

import re
import signal
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kvq.kernels.launch import Launch, gxx
from kvq.kernels.launch.nvrtc import CompileError
from kvq.kernels.ptxsim.errors import KernelFault

pytestmark = pytest.mark.skipif(gxx.unavailable(), reason=str(gxx.unavailable()))

GOOD = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#define LANE (threadIdx.x & 31)

extern "C" __global__ void where(int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 10000 * (int)gridDim.x + 1000 * (int)blockIdx.x + (int)threadIdx.x;
}
extern "C" __global__ void __launch_bounds__(1024) reverse(const int* x, int* out) {
    __shared__ int tile[1024];
    int t = threadIdx.x, first = blockIdx.x * blockDim.x;
    tile[t] = x[first + t];
    __syncthreads();
    out[first + t] = tile[blockDim.x - 1 - t];
}
extern "C" __global__ void total(const int* x, int* out) {
    __shared__ int partial[32];
    int v = x[threadIdx.x];
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if (LANE == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    v = LANE < blockDim.x / 32 ? partial[LANE] : 0;
    for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
    if (LANE == 0) out[0] = v;
}
extern "C" __global__ void shuffles(const int* x, int* out, int by, int width) {
    int v = x[LANE];
    out[LANE] = __shfl_sync(0xffffffffu, v, by, width);
    out[32 + LANE] = __shfl_up_sync(0xffffffffu, v, by, width);
    out[64 + LANE] = __shfl_down_sync(0xffffffffu, v, by, width);
    out[96 + LANE] = __shfl_xor_sync(0xffffffffu, v, by, width);
}
extern "C" __global__ void wide(const float* x, float* out) {
    double d = __shfl_xor_sync(0xffffffffu, (double)x[LANE] / 3, 1);
    out[LANE] = (float)(d * 3);
}
extern "C" __global__ void halves(const int* x, int* out) {
    int v = x[LANE];
    if (LANE < 16)
        for (int i = 0; i < 3; i++) v += __shfl_xor_sync(0x0000ffffu, v, 1);
    else
        v -= __shfl_sync(0xffff0000u, v, 31);
    out[LANE] = __shfl_sync(0xffffffffu, v, 31 - LANE);
}
extern "C" __global__ void interleaved(const int* x, int* out) {
    unsigned mask = LANE % 2 ? 0xaaaaaaaau : 0x55555555u;
    out[LANE] = __shfl_xor_sync(mask, x[LANE], 2);
}
extern "C" __global__ void some_leave(int* out, int leave) {
    __shared__ int first;
    if (threadIdx.x == 8 + leave) first = 5;
    if (threadIdx.x % 2 != leave) return;
    __syncthreads();
    out[threadIdx.x] = first;
}
extern "C" __global__ void votes(const int* x, unsigned* out) {
    out[LANE] = __ballot_sync(0xffffffffu, x[LANE] & 4);
    out[32 + LANE] = __any_sync(0xffffffffu, x[LANE] == 31);
    out[64 + LANE] = __all_sync(0xffffffffu, x[LANE] >= 0);
    out[96 + LANE] = __all_sync(0xffffffffu, x[LANE] > 0);
}
extern "C" __global__ void atomics(const int* x, int* out, float* sum, int n) {
    __shared__ int count[8];
    if (threadIdx.x < 8) count[threadIdx.x] = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        atomicAdd(&count[x[i] & 7], 1);
        atomicMax(&out[8], x[i]);
        atomicMin(&out[9], x[i]);
        atomicOr(&out[10], 1 << (x[i] & 7));
        atomicAdd(sum, 0.5f);
    }
    __syncthreads();
    if (threadIdx.x < 8) atomicAdd(&out[threadIdx.x], count[threadIdx.x]);
}
extern "C" __global__ void leftover(float* out) {
    __shared__ float tile[32];
    out[blockIdx.x * 32 + LANE] = tile[LANE];
    tile[LANE] = 1;
}
extern "C" __global__ void from_half(const __half* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = __half2float(x[i]);
}
extern "C" __global__ void to_half(const float* x, __half* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2half_rn(x[i]);
}
extern "C" __global__ void to_bfloat(const float* x, unsigned short* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __nv_bfloat16 b = __float2bfloat16(x[i]);
    out[i] = *reinterpret_cast<unsigned short*>(&b);
}
extern "C" __global__ void half_math(const __half* a, const __half* b, const __half* c,
                                     __half* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * i >= n) return;
    __half2 u = reinterpret_cast<const __half2*>(a)[i];
    __half2 v = reinterpret_cast<const __half2*>(b)[i];
    __half2 w = reinterpret_cast<const __half2*>(c)[i];
    __half2* o = reinterpret_cast<__half2*>(out);
    o[i] = __hadd2(u, v);
    o[n / 2 + i] = __hsub2(u, v);
    o[n + i] = __hmul2(u, v);
    o[3 * n / 2 + i] = __hfma2(u, v, w);
}
extern "C" __global__ void integers(const float* x, int* out) {
    out[threadIdx.x] = __float2int_rn(x[threadIdx.x]);
}
extern "C" __global__ void words(int a, int b, unsigned* out) {
    unsigned low = a, high = b;
    out[0] = __byte_perm(low, high, 0x6143);
    out[1] = __funnelshift_r(low, high, 4);
    out[2] = __funnelshift_l(low, high, 4);
    out[3] = __popc(low);
    out[4] = __umulhi(low, high);
}
extern "C" __global__ void product_and_sum(float a, float b, float c, float* out) {
    out[0] = a * b + c;
    out[1] = fmaf(a, b, c);
    out[2] = min(a, nanf(""));
    out[3] = FACTOR * a;
}
"""

BAD = r"""
extern "C" __global__ void half_leaves(int* out) {
    if (threadIdx.x > 29) return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 4);
}
extern "C" __global__ void outside_mask(int* out) {
    if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0x000000ffu, 1, 9);
}
extern "C" __global__ void two_shuffles(int* out) {
    if (threadIdx.x < 7)
        out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
    else
        out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 2, 1);
}
extern "C" __global__ void two_barriers(int* out) {
    if (threadIdx.x < 40)
        __syncthreads();
    else
        __syncthreads();
    out[0] = 1;
}
extern "C" __global__ void stuck(int* out) {
    if (threadIdx.x >= 32 && threadIdx.x < 63)
        out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
    __syncthreads();
}
extern "C" __global__ void far_away(int* out) {
    out[1L << 40] = 1;
}
extern "C" __global__ void divide(int* out, int n) {
    out[0] = 7 / n;
}
extern "C" __global__ void one_too_far(int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) out[i] = i;
}
extern "C" __global__ void read_past(const float* x, float* out, int n) {
    float s = 0;
    for (int i = 0; i < n; i++)
        s += x[i + threadIdx.x];
    out[threadIdx.x] = s;
}
extern "C" __global__ void crooked(const float* x, float* out) {
    float4 v = *reinterpret_cast<const float4*>(x + threadIdx.x);
    out[threadIdx.x] = v.w;
}
extern "C" __global__ void overflow(int rows, int columns, int* out) {
    out[0] = (rows * columns) > 0;
}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name, text in (("good", GOOD), ("bad", BAD)):
        (folder / f"{name}.cu").write_text(text)
    return folder


@pytest.fixture(scope="module")
def good(files):
    return runner(files / "good.cu", {"FACTOR": 3})


@pytest.fixture(scope="module")
def bad(files):
    return runner(files / "bad.cu", {})


def runner(source, constants):
    def run(kernel, block, *args, grid=1, outputs=(), **options):
        launch = Launch(str(source), kernel, constants, grid, block, args, outputs)
        gxx.run([launch], **options)
        return [launch.args[i] for i in outputs]

    return run


def line_of(text, source=BAD):
    """The number of the only line that contains `text`."""
    (number,) = (i for i, line in enumerate(source.split("\n"), 1) if text in line)
    return number


# --- threads and what they share ------------------------------------------------------
@pytest.mark.parametrize(("grid", "block"), [(1, 1), (3, 33), (2, 1024)])
def test_every_thread_of_every_block_runs(good, grid, block):
    (out,) = good(
        "where", block, np.zeros(grid * block, np.int32), grid=grid, outputs=(0,)
    )
    b, t = np.divmod(np.arange(grid * block), block)
    np.testing.assert_array_equal(out, 10000 * grid + 1000 * b + t)


@pytest.mark.parametrize("block", [1, 45, 1024])
def test_a_barrier_waits_for_the_whole_block(good, block):
    x = np.random.default_rng(1).integers(0, 999, (3, block), np.int32)
    (out,) = good(
        "reverse", block, x.ravel(), np.zeros_like(x).ravel(), grid=3, outputs=(1,)
    )
    np.testing.assert_array_equal(out.reshape(x.shape), x[:, ::-1])


def test_shuffles_and_barriers_together(good):
    x = np.random.default_rng(2).integers(-99, 99, 352, np.int32)
    (out,) = good("total", 352, x, np.zeros(1, np.int32), outputs=(1,))
    assert out[0] == x.sum()


@pytest.mark.parametrize("width", [32, 16, 4, 1])
@pytest.mark.parametrize("by", [0, 1, 3, 5, 19])
def test_shuffles(good, by, width):
    x = np.arange(100, 132, dtype=np.int32)
    (out,) = good("shuffles", 32, x, np.zeros(128, np.int32), by, width, outputs=(1,))
    lane = np.arange(32)
    first = lane // width * width
    direct = first + by % width
    up = np.where(lane - by < first, lane, lane - by)
    down = np.where(lane + by >= first + width, lane, lane + by)
    xor = np.where((lane ^ by) >= first + width, lane, lane ^ by)
    np.testing.assert_array_equal(out - 100, np.concatenate([direct, up, down, xor]))


def test_a_shuffle_of_eight_bytes(good):
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    (out,) = good("wide", 32, x, np.zeros_like(x), outputs=(1,))
    np.testing.assert_array_equal(out, x.reshape(16, 2)[:, ::-1].ravel())


def test_two_halves_of_a_warp_shuffle_apart_and_meet_again(good):
    x = np.random.default_rng(4).integers(0, 99, 32, np.int32)
    (out,) = good("halves", 32, x, np.zeros_like(x), outputs=(1,))
    v = x.copy()
    for _ in range(3):
        v[:16] += v[:16].reshape(8, 2)[:, ::-1].ravel()
    v[16:] -= v[31]
    np.testing.assert_array_equal(out, v[::-1])


def test_lanes_meet_only_those_of_their_own_mask(good):
    x = np.random.default_rng(9).integers(0, 99, 32, np.int32)
    (out,) = good("interleaved", 32, x, np.zeros_like(x), outputs=(1,))
    np.testing.assert_array_equal(out, x[np.arange(32) ^ 2])


@pytest.mark.parametrize("stay", [0, 1])
def test_a_barrier_waits_for_no_thread_that_has_returned(good, stay):
    (out,) = good("some_leave", 70, np.zeros(70, np.int32), stay, outputs=(0,))
    np.testing.assert_array_equal(out, np.where(np.arange(70) % 2 == stay, 5, 0))


def test_votes(good):
    (out,) = good(
        "votes",
        32,
        np.arange(32, dtype=np.int32),
        np.zeros(128, np.uint32),
        outputs=(1,),
    )
    ballot, any_, all_, not_all = out.reshape(4, 32)
    assert set(ballot) == {0xF0F0F0F0}
    assert (set(any_), set(all_), set(not_all)) == ({1}, {1}, {0})


def test_atomics(good):
    x = np.random.default_rng(5).integers(-50, 50, 150, np.int32)
    out = np.zeros(11, np.int32)
    out, total = good(
        "atomics", 64, x, out, np.zeros(1, np.float32), 150, grid=3, outputs=(1, 2)
    )
    np.testing.assert_array_equal(out[:8], np.bincount(x & 7, minlength=8))
    assert out[8:].tolist() == [x.max(), x.min(), np.bitwise_or.reduce(1 << (x & 7))]
    assert total[0] == 75


def test_shared_memory_holds_nothing_of_the_block_before(good):
    (out,) = good("leftover", 32, np.zeros(96, np.float32), grid=3, outputs=(0,))
    assert np.isnan(out).all()


def test_the_portable_switch_of_fibers_gives_the_same(files):
    run = runner(files / "good.cu", {"FACTOR": 3, "CUDA_CPU_UCONTEXT": 1})
    x = np.arange(96, dtype=np.int32)
    (out,) = run("total", 96, x, np.zeros(1, np.int32), outputs=(1,))
    assert out[0] == x.sum()


# --- numbers --------------------------------------------------------------------------
def test_every_half_becomes_its_float(good):
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    (out,) = good(
        "from_half", 256, x, np.zeros(x.size, np.float32), grid=256, outputs=(1,)
    )
    np.testing.assert_array_equal(out, x.astype(np.float32))


def floats():
    """Where rounding can go wrong: around each half and between two, and any bits."""
    h = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (h[:-1] + h[1:]) / 2
    bits = np.random.default_rng(6).integers(0, 0x7F800000, 20000, np.uint32)
    edge = np.array([65504, 65519.996, 65520, 1e9, np.inf, np.nan], np.float32)
    below = np.nextafter(ties, np.float32(0))
    x = np.concatenate([h, ties, below, bits.view(np.float32), edge])
    return np.concatenate([x, -x])


def test_floats_round_to_half(good):
    x = floats()
    (out,) = good(
        "to_half", 256, x, np.zeros(x.size, np.float16), x.size,
        grid=-(-x.size // 256), outputs=(1,),
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(out, x.astype(np.float16))
    assert np.signbit(out[x == 0]).any()


def test_floats_round_to_bfloat16(good):
    x = floats()
    (out,) = good(
        "to_bfloat", 256, x, np.zeros(x.size, np.float16), x.size,
        grid=-(-x.size // 256), outputs=(1,),
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(
        out.view(ml_dtypes.bfloat16).astype(np.float32), expected
    )


def test_half_arithmetic_rounds_once(good):
    bits = np.random.default_rng(7).integers(0, 0x7C00, (3, 40000), np.uint16)
    a, b, c = (bits | 0x8000 * (bits & 1)).view(np.float16)
    a[:9999] = 1024 + a[:9999] % 1024  # as a code turned into a number meets its bias
    (out,) = good(
        "half_math", 256, a, b, c, np.zeros(4 * a.size, np.float16), a.size,
        grid=-(-a.size // 512), outputs=(3,),
    )  # fmt: skip
    x, y, z = (v.astype(np.float64) for v in (a, b, c))
    with np.errstate(over="ignore"):
        expected = np.stack([x + y, x - y, x * y, x * y + z]).astype(np.float16)
    np.testing.assert_array_equal(out.reshape(4, -1), expected)


def test_floats_become_integers_as_on_a_gpu(good):
    x = np.array([0.5, 1.5, -2.5, 3e9, -3e9, np.nan, np.inf, -7.2], np.float32)
    (out,) = good("integers", 8, x, np.zeros(8, np.int32), outputs=(1,))
    assert out.tolist() == [0, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -7]


def test_words(good):
    low, high = 0x12345678, 0x6ABCDEF1
    (out,) = good("words", 1, low, high, np.zeros(5, np.uint32), outputs=(2,))
    both = high << 32 | low
    assert [hex(v) for v in out[:3]] == ["0xbc56f112", "0x11234567", "0xabcdef11"]
    assert out[3:].tolist() == [low.bit_count(), low * high >> 32]
    assert both >> 4 & 0xFFFFFFFF == out[1]


def test_a_product_and_a_sum_are_rounded_twice_and_fmaf_once(good):
    a, c = 1 + 2**-12, -1 - 2**-11  # a * a = 1 + 2**-11 + 2**-24 is a tie
    (out,) = good("product_and_sum", 1, a, a, c, np.zeros(4, np.float32), outputs=(3,))
    assert out.tolist() == [0, 2.0**-24, a, 3 * a]


# --- arguments ------------------------------------------------------------------------
def test_only_outputs_change_and_an_array_is_one_buffer_in_all_launches(files):
    x, y, z = (
        np.arange(32, dtype=np.int32),
        np.zeros(32, np.int32),
        np.zeros(32, np.int32),
    )

    def launch(a, b, outputs):
        return Launch(
            str(files / "good.cu"), "reverse", {"FACTOR": 3}, 1, 32, (a, b), outputs
        )

    gxx.run([launch(x, y, (1,)), launch(y, x, ()), launch(x, z, (1,))])
    np.testing.assert_array_equal(x, np.arange(32))
    np.testing.assert_array_equal(y, x[::-1])
    np.testing.assert_array_equal(z, x[::-1])  # the second launch changed its x alone


def test_arguments_of_a_wrong_type_are_refused(good):
    with pytest.raises(TypeError, match=re.escape("given (*2, *4)")):
        good("reverse", 32, np.zeros(32, np.float16), np.zeros(32, np.int32))
    with pytest.raises(TypeError, match=re.escape("takes (*4, *4, i4, i4)")):
        good("shuffles", 32, np.zeros(32, np.int32), np.zeros(128, np.int32), 1.0, 2)


def test_a_kernel_that_is_not_there_is_named(good):
    with pytest.raises(ValueError, match=r"good.cu has no kernel 'revers'"):
        good("revers", 32, np.zeros(32, np.int32))


# --- faults ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kernel", "block", "args", "words"),
    [
        ("half_leaves", 32, (), ["reads lane 30", "has returned", "threadIdx.x, 4)"]),
        ("outside_mask", 32, (), ["reads lane 9", "not in its mask", "1, 9)"]),
        ("two_shuffles", 32, (), ["wait for ever", "thread 0 at", "1, 1)", "2, 1)"]),
        ("two_barriers", 64, (), ["divergent barrier"]),
        ("stuck", 64, (), ["wait for ever", "1, 0)"]),
        ("far_away", 1, (), ["invalid address", "block 0, thread 0"]),
        ("divide", 1, (0,), ["division by zero"]),
        ("one_too_far", 32, (64,), ["a write beside argument 0"]),
    ],
)
def test_faults(bad, kernel, block, args, words):
    out = np.zeros(64, np.int32)
    with pytest.raises(KernelFault) as caught:
        bad(kernel, block, out, *args, grid=3, outputs=(0,))
    message = str(caught.value)
    assert message.startswith(f"{kernel}: ")
    for word in words:
        expected = f"bad.cu:{line_of(word)}" if word.endswith(")") else word
        assert expected in message
    assert not out.any()  # a call that fails changes nothing


def test_a_fault_leaves_nothing_behind(bad, good):
    with pytest.raises(KernelFault):
        bad("two_barriers", 64, np.zeros(1, np.int32))
    (out,) = bad("divide", 1, np.zeros(1, np.int32), 3, outputs=(0,))
    assert out[0] == 2


def test_signals_are_python_s_own_again_after_a_run(files):
    code = f"""
import os, signal
import numpy as np
from kvq.kernels.launch import Launch, gxx
out = np.zeros(1, np.int32)
gxx.run([Launch({str(files / "bad.cu")!r}, "divide", {{}}, 1, 1, (out, 3), (0,))])
os.kill(os.getpid(), signal.SIGSEGV)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("kernel", "block", "args", "words"),
    [
        ("read_past", 2, (np.ones(9, np.float32), np.ones(2, np.float32), 9),
         ["heap-buffer-overflow", "s += x[i + threadIdx.x]", "byte 36 of argument 0",
          "block 0, thread 1"]),
        ("crooked", 4, (np.ones(9, np.float32), np.ones(4, np.float32)),
         ["misaligned", "float4 v ="]),
        ("overflow", 1, (65536, 32768, np.ones(1, np.int32)),
         ["signed integer overflow", "(rows * columns)"]),
        ("half_leaves", 32, (np.ones(32, np.int32),),
         ["has returned", "threadIdx.x, 4)"]),
    ],
)  # fmt: skip
def test_sanitizers_name_the_line(bad, kernel, block, args, words):
    with pytest.raises(KernelFault) as caught:
        bad(kernel, block, *args, sanitize=True)
    lines = [f"bad.cu:{line_of(w)}" for w in words if BAD.count(w) == 1]
    for word in [*lines, *(w for w in words if w not in BAD)]:
        assert word in str(caught.value)


def test_sanitized_results_are_the_same(good, files):
    run = runner(files / "good.cu", {"FACTOR": 3})
    x = np.random.default_rng(8).integers(-99, 99, 352, np.int32)
    (out,) = run("total", 352, x, np.zeros(1, np.int32), outputs=(1,), sanitize=True)
    assert out[0] == x.sum()


# --- compiling ------------------------------------------------------------------------
def test_inline_ptx_is_refused_with_its_line(tmp_path):
    source = tmp_path / "ptx.cu"
    text = (
        'extern "C" __global__ void k(int* o) {\n  // asm here is a word\n  o[0] = 1;\n'
    )
    source.write_text(text + "}\n")
    launch = Launch(str(source), "k", {}, 1, 1, (np.zeros(1, np.int32),), (0,))
    assert gxx.missing([launch]) is None
    source.write_text(text + '  asm volatile("bar.sync 0;");\n}\n')
    assert 'inline PTX, which g++ cannot compile: asm volatile("bar' in gxx.missing(
        [launch]
    )
    with pytest.raises(ValueError, match="inline PTX"):
        gxx.run([launch])


def test_an_error_of_the_compiler_names_the_line(tmp_path):
    source = tmp_path / "typo.cu"
    source.write_text('extern "C" __global__ void k(int* o) {\n  o[0] = one;\n}\n')
    with pytest.raises(CompileError, match=r"^typo.cu:2:\d+: error: .one. was not"):
        gxx.load(str(source), {})


def test_a_changed_include_or_constant_is_compiled_again(tmp_path):
    (tmp_path / "part.cuh").write_text("#define VALUE 5\n")
    source = tmp_path / "whole.cu"
    source.write_text(
        '#include "part.cuh"\n'
        'extern "C" __global__ void k(int* o) { o[0] = VALUE * FACTOR; }\n'
    )
    launch = Launch(
        str(source), "k", {"FACTOR": 2}, 1, 1, (np.zeros(1, np.int32),), (0,)
    )
    gxx.run([launch])
    assert launch.args[0][0] == 10
    (tmp_path / "part.cuh").write_text("#define VALUE 7\n")
    gxx.run([launch])
    assert launch.args[0][0] == 14
    gxx.run([replace(launch, constants={"FACTOR": 3})])
    assert launch.args[0][0] == 21


def test_why_it_cannot_run(monkeypatch):
    monkeypatch.setattr(gxx, "_g", lambda option: "8.3.0\n")
    assert gxx.unavailable() == f"needs g++ {gxx.OLDEST} or newer; here is 8.3.0"
    monkeypatch.setattr(gxx, "compiler", lambda: "Apple clang version 17\nmore")
    assert gxx.unavailable() == "needs GNU g++; `g++` is Apple clang version 17"
    monkeypatch.setattr(gxx.shutil, "which", lambda name: None)
    assert gxx.unavailable() == "needs g++: no such command"
    monkeypatch.setattr(gxx.sys, "platform", "win32")
    assert gxx.unavailable() == "needs Linux; this is win32"
