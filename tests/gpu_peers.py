"""Decode kernels of other systems, for `bench_gpu.py`: full precision, or FP8.

Each function takes q (B, H_q, 1, D), k and v (B, H_kv, T, D), float16 tensors of
PyTorch, and returns what starts its kernel: a function without arguments that gives the
output, of as many numbers as q. What a system would keep from step to step (pages, a
plan, FP8 keys) is made before. `PEERS` names them all; `prepared` checks one and makes
it ready, or says why it is not there.
"""

import functools
import signal
from contextlib import contextmanager

import numpy as np
from gpu_work import CHECKED, relative

from kvq.attention import attention
from kvq.kernels.backends import import_problem, one_line

PAGE = 64  # tokens, of those that read pages
LIMIT = 60  # seconds until a peer must be ready: some compile
WORKSPACE = 256 * 2**20  # bytes that FlashInfer asks for


def torch_sdpa(q, k, v):
    """FlashAttention as PyTorch brings it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def start():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return start


def torch_flex(q, k, v):
    """FlexAttention: a Triton kernel that PyTorch generates."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.compile(flex_attention, dynamic=False) if q.is_cuda else None
    return lambda: (attend or flex_attention)(q, k, v, enable_gqa=True)


def flashinfer_fp16(q, k, v):
    return _flashinfer(q, k, v, q.dtype)


def flashinfer_fp8(q, k, v):
    """Half the bytes: the format that systems really use today."""
    import torch

    return _flashinfer(q, k, v, torch.float8_e4m3fn)


def _flashinfer(q, k, v, dtype):
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    B, H_q, _, D = q.shape
    H_kv, (cache, table, lengths) = k.shape[1], _paged(k, v)
    pages = table.shape[1]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device),
        "NHD",
        use_tensor_cores=True,
    )
    wrapper.plan(
        pages * torch.arange(B + 1, dtype=torch.int32, device=q.device),
        table.flatten(),
        lengths - PAGE * (pages - 1),
        H_q,
        H_kv,
        D,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=dtype,
    )
    cache = tuple(side.to(dtype) for side in cache)
    return lambda: wrapper.run(q[:, :, 0], cache)


def vllm_triton(q, k, v):
    """The Triton kernel of vLLM."""
    import torch
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    B, H_q, _, D = q.shape
    (keys, values), table, lengths = _paged(k, v)
    splits = max(4, 256 // B)
    out = torch.empty(B, H_q, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H_q, dtype=torch.float32, device=q.device)
    parts = torch.empty(
        B, H_q, splits, D + 1, dtype=torch.float32, device=q.device
    )  # an output and its weight

    def start():
        decode_attention_fwd(
            *(q[:, :, 0], keys, values, out, lse, table, lengths, parts),
            *(splits, D**-0.5, PAGE),
        )
        return out

    return start


def _paged(k, v):
    """((keys, values), table, lengths): pages (n, PAGE, H_kv, D), filled with zeros."""
    import torch
    from torch.nn.functional import pad

    B, H, T, D = k.shape
    pages = -(-T // PAGE)
    cache = tuple(
        pad(x, (0, 0, 0, pages * PAGE - T))
        .transpose(1, 2)
        .reshape(B * pages, PAGE, H, D)
        .contiguous()
        for x in (k, v)
    )
    numbers = {"dtype": torch.int32, "device": k.device}
    table = torch.arange(B * pages, **numbers).reshape(B, pages)
    return cache, table, torch.full((B,), T, **numbers)


# name: (what starts it, the package, bits of a stored number, error that is not wrong)
PEERS = {
    "torch-sdpa": (torch_sdpa, "torch", 16, 1e-2),
    "torch-flex": (torch_flex, "torch.nn.attention.flex_attention", 16, 1e-2),
    "flashinfer-fp16": (flashinfer_fp16, "flashinfer", 16, 1e-2),
    "flashinfer-fp8": (flashinfer_fp8, "flashinfer", 8, 1e-1),
    "vllm-triton": (
        vllm_triton,
        "vllm.v1.attention.ops.triton_decode_attention",
        16,
        1e-2,
    ),
}


def prepared(machine, name, B, H_kv, T):
    """(what starts it, bytes it must read, None), or (None, None, why not).

    machine : see `gpu_machines.py`; it makes the tensors.
    """
    if reason := problem(machine, name):
        return None, None, reason
    q, k, v = machine.tensors(B, H_kv, T)
    with at_most(LIMIT):
        start = PEERS[name][0](q, k, v)
        start()
        machine.wait()
    return start, (k.nbytes + v.nbytes) * PEERS[name][2] // 16, None


@functools.cache
def problem(machine, name):
    """None, or why a peer is not timed: found once."""
    start, package, _, limit = PEERS[name]
    if reason := import_problem(package):
        return f"absent: {reason}"
    try:
        q, k, v = machine.tensors(2, 2, CHECKED)
        with at_most(LIMIT):
            out = start(q, k, v)().cpu().numpy().reshape(q.shape)
    except Exception as error:  # of any library
        return f"failed: {one_line(error)}"
    exact = map(attention, *(x.cpu().numpy().astype(float) for x in (q, k, v)))
    error = relative(out, np.stack(list(exact)))
    return None if error <= limit else f"failed: relative error {error:.1g}"


@contextmanager
def at_most(seconds):
    """Raises TimeoutError in what takes longer."""

    def late(*_):
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
