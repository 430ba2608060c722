"""What a user could take instead: attention and quantizers of other programs.

A peer of `DECODE` is a function of q (H_q, D), k and v (H_kv, T, D), float32, and a
number of threads. It stores the cache its way, and returns (start, nbytes): `start()`
attends and gives (H_q, D), `nbytes` is what is stored.

A peer of `PACK` is a function of x (N, D), float32, the group size and a number of
threads (`gguf` takes one). It returns (pack, dequant, nbytes): `pack()` gives what is
stored, `dequant(stored)` numbers again.

All import what they need when they are called; ImportError says that it is absent.
"""

import ctypes
import importlib.util
import weakref
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvq.formats.ggml import TYPE_IDS
from kvq.kernels.cpu.yardsticks import each

BLOCK = 256  # rows that blocked NumPy works on: they stay in the L2 cache


# --- NumPy ----------------------------------------------------------------------------
#     S = q K^T / sqrt(D)     p = exp(S - max S)     out = p V / sum p
def numpy_attention(q, k, v, threads):
    """Two matrix products for each KV head; threads take heads."""
    H, _, D = k.shape
    q, scale = q.reshape(H, -1, D), np.float32(D**-0.5)
    parts = np.array_split(np.arange(H), min(threads, H))
    out = np.empty_like(q)

    def heads(part):
        for h in part:
            S = q[h] @ k[h].T
            S *= scale
            S -= S.max(axis=-1, keepdims=True)
            p = np.exp(S, out=S)
            out[h] = p @ v[h]
            out[h] /= p.sum(axis=-1, keepdims=True)

    def start():
        each(heads, parts)
        return out.reshape(-1, D)

    return start, k.nbytes + v.nbytes


#     s = (max - min) / (2^b - 1)    z = min    code = round((x - z) / s)
def numpy_blocked(bits):
    """Groups along a row, asymmetric; in place, in blocks of rows that fit L2."""

    def peer(x, group, threads):
        N, D = x.shape
        width = D * bits // 8
        stored = (
            np.empty((N, width), np.uint8),
            *np.empty((2, N, D // group, 1), np.float16),
        )
        x_hat = np.empty((N, D), np.float32)
        blocks = [slice(i, min(i + BLOCK, N)) for i in range(0, N, BLOCK)]
        parts = [blocks[i::threads] for i in range(min(threads, len(blocks)))]

        def pack_blocks(part):
            y = np.empty((BLOCK, D // group, group), np.float32)
            for rows in part:
                groups = x[rows].reshape(-1, D // group, group)
                _quantize_block(groups, bits, y, *(a[rows] for a in stored))

        def dequantize_blocks(part):
            for rows in part:
                _dequantize_block(bits, *(a[rows] for a in stored), x_hat[rows])

        def pack():
            each(pack_blocks, parts)
            return stored

        def dequant(stored):
            each(dequantize_blocks, parts)
            return x_hat

        return pack, dequant, sum(a.nbytes for a in stored)

    return peer


def _quantize_block(x, bits, y, codes, scale, zero):
    """Write codes, scale and zero of x (n, groups, group). y : room for numbers."""
    y, top, width = y[: len(x)], np.float32(2**bits - 1), codes.shape[1]
    zero[...] = low = x.min(axis=2, keepdims=True)
    scale[...] = (x.max(axis=2, keepdims=True) - low) / top
    np.subtract(x, zero.astype(np.float32), out=y)
    y /= scale.astype(np.float32)
    np.clip(np.rint(y, out=y), 0, top, out=y)
    u = y.astype(np.uint8).reshape(len(x), -1)
    codes[...] = u[:, :width]
    for c in range(1, 8 // bits):
        codes |= u[:, c * width : (c + 1) * width] << np.uint8(bits * c)


def _dequantize_block(bits, codes, scale, zero, out):
    """Write x_hat (n, D)."""
    width, mask = codes.shape[1], np.uint8(2**bits - 1)
    for c in range(8 // bits):
        plane = codes >> np.uint8(bits * c) & mask
        out[:, c * width : (c + 1) * width] = plane
    groups = out.reshape(len(out), scale.shape[1], -1)
    groups *= scale.astype(np.float32)
    groups += zero.astype(np.float32)


# --- torch ----------------------------------------------------------------------------
def use_threads(threads):
    """Tell torch, if it is there, how many threads to take."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(threads)


def torch_sdpa(dtype):
    """Its fused kernel, the query heads of a KV head as rows of one query: several
    times faster than enable_gqa=True, which it computes the same as."""

    def peer(q, k, v, threads):
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = _tensors(q, k, v, dtype)

        def start():
            return _array(scaled_dot_product_attention(q, k, v))

        return start, k.nbytes + v.nbytes

    return peer


def torch_matmul(dtype):
    """Product, softmax in float32, product."""

    def peer(q, k, v, threads):
        q, k, v = _tensors(q, k, v, dtype)
        return (lambda: _array(_attend(q, k, v))), k.nbytes + v.nbytes

    return peer


#     k per channel: groups of tokens; v per token: groups of channels
def torch_dequantize(bits, dtype, group=64):
    """Codes become numbers again at every step, as KIVI's do without its kernel."""

    def peer(q, k, v, threads):
        import torch

        q, k, v = _tensors(q, k, v, torch.float32)
        kind = getattr(torch, dtype)
        K, V = _quantize(k.mT, bits, group), _quantize(v, bits, group)
        q = q.to(kind)

        def start():
            keys = _dequantize(K, bits, k.mT.shape, kind).mT
            return _array(_attend(q, keys, _dequantize(V, bits, v.shape, kind)))

        return start, sum(part.nbytes for part in (*K, *V))

    return peer


def torch_pack(bits):
    """Groups along a row, asymmetric, in operations on the whole tensor, as KIVI's."""

    def peer(x, group, threads):
        import torch

        x = torch.from_numpy(x)

        def pack():
            return _quantize(x, bits, group)

        def dequant(stored):
            return _dequantize(stored, bits, x.shape, torch.float32).numpy()

        return pack, dequant, sum(part.nbytes for part in pack())

    return peer


def _tensors(q, k, v, dtype):
    """q (1, H_kv, R, D), k and v (1, H_kv, T, D) in torch. dtype : or its name."""
    import torch

    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    H, _, D = k.shape
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (q, k, v))
    return q.view(1, H, -1, D).to(kind), k[None].to(kind), v[None].to(kind)


def _array(tensor):
    """(H_q, D) as NumPy reads it."""
    return tensor.float().numpy().reshape(-1, tensor.shape[-1])


def _attend(q, k, v):
    S = (q @ k.mT).float() * q.shape[-1] ** -0.5
    return S.softmax(-1).to(v.dtype) @ v


def _quantize(x, bits, group):
    """(codes, scale, zero): groups along the last axis, several codes in a byte."""
    import torch

    groups = x.reshape(*x.shape[:-1], -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    codes = ((groups - low) / scale).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    planes = codes.view(*x.shape).chunk(8 // bits, dim=-1)
    packed = planes[0].clone()
    for c, plane in enumerate(planes[1:], 1):
        packed |= plane << (bits * c)
    return packed, scale.half(), low.half()


def _dequantize(stored, bits, shape, dtype):
    import torch

    packed, scale, zero = stored
    planes = [packed >> (bits * c) & (2**bits - 1) for c in range(8 // bits)]
    x = torch.cat(planes, dim=-1).to(dtype).view(*shape[:-1], scale.shape[-2], -1)
    return x.mul_(scale.to(dtype)).add_(zero.to(dtype)).view(*shape)


# --- quantizers of Python packages ----------------------------------------------------
def quanto(bits):
    """optimum-quanto, for weights; its cache in Transformers is made of it."""

    def peer(x, group, threads):
        import torch
        from optimum import quanto as library

        kind = getattr(library, f"qint{bits}")
        x, optimizer = torch.from_numpy(x), library.MaxOptimizer()

        def pack():
            scale, shift = optimizer(x, kind, 0, group)
            return library.quantize_weight(x, kind, 0, scale, shift, group)

        nbytes = x.numel() * bits // 8 + 2 * 4 * x.numel() // group
        return pack, (lambda stored: stored.dequantize().numpy()), nbytes

    return peer


def hqq(bits):
    """HQQ without its iterative search for zeros, which takes 100 times longer."""

    def peer(x, group, threads):
        import torch
        from hqq.core.quantize import Quantizer

        x = torch.from_numpy(x)
        settings = {"nbits": bits, "group_size": group, "optimize": False, "axis": 1}
        settings |= {"device": "cpu", "compute_dtype": torch.float32}

        def pack():
            codes, meta = Quantizer.quantize(x, **settings)
            return codes, meta | {"compute_dtype": torch.float32}

        codes, meta = pack()
        nbytes = codes.nbytes + meta["scale"].nbytes + meta["zero"].nbytes
        return pack, (lambda s: Quantizer.dequantize(*s).numpy()), nbytes

    return peer


def gguf(kind):
    """The `gguf` package: llama.cpp's formats in NumPy. Its groups are of 32."""

    def peer(x, group, threads):
        from gguf import GGMLQuantizationType, quants

        number = GGMLQuantizationType[kind.upper()]
        nbytes = quants.quantize(x, number).nbytes
        return (
            lambda: quants.quantize(x, number),
            lambda stored: quants.dequantize(stored, number),
            nbytes,
        )

    return peer


# --- ggml -----------------------------------------------------------------------------
class InitParams(ctypes.Structure):
    """ggml_init_params of ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Plan(ctypes.Structure):
    """ggml_cplan of ggml-cpu.h, and room for fields that a later version may add."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("rest", ctypes.c_byte * 128),
    )


_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
BASE = {
    "ggml_init": (_POINTER, InitParams),
    "ggml_free": (None, _POINTER),
    "ggml_new_tensor_4d": (_POINTER, _POINTER, _INT, *[_LONG] * 4),
    "ggml_flash_attn_ext": (_POINTER, *[_POINTER] * 5, *[ctypes.c_float] * 3),
    "ggml_new_graph": (_POINTER, _POINTER),
    "ggml_build_forward_expand": (None, _POINTER, _POINTER),
    "ggml_get_data": (_POINTER, _POINTER),
    "ggml_row_size": (ctypes.c_size_t, _INT, _LONG),
    "ggml_quantize_chunk": (
        *(ctypes.c_size_t, _INT, _POINTER, _POINTER, *[_LONG] * 3, _POINTER),
    ),
    "dequantize_row_q4_0": (None, _POINTER, _POINTER, _LONG),
    "dequantize_row_q8_0": (None, _POINTER, _POINTER, _LONG),
}
CPU = {
    "ggml_cpu_init": (None,),
    "ggml_graph_plan": (Plan, _POINTER, _INT, _POINTER),
    "ggml_graph_compute": (_INT, _POINTER, ctypes.POINTER(Plan)),
}


@lru_cache
def ggml():
    """The functions of ggml by their names, from the libraries of llama-cpp-python."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None:
        raise ImportError("No module named 'llama_cpp'", name="llama_cpp")
    folder = Path(package.origin).parent / "lib"
    functions = {}
    for name, signatures in (("base", BASE), ("cpu", CPU)):
        path = next((p for p in sorted(folder.glob(f"*ggml-{name}.*"))), None)
        if path is None:
            raise ImportError(f"no ggml-{name} in llama_cpp/lib", name="llama_cpp")
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for function, (result, *arguments) in signatures.items():
            functions[function] = getattr(library, function)
            functions[function].restype = result
            functions[function].argtypes = arguments
    functions["ggml_cpu_init"]()
    return functions


def ggml_stored(x, kind, threads=1, out=None):
    """x (..., D) as ggml stores it: uint8 (rows, bytes of a row)."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint8).reshape(-1, 2 * x.shape[-1])
    D, number, f = x.shape[-1], TYPE_IDS[kind], ggml()
    rows = x.size // D
    if out is None:
        out = np.empty((rows, f["ggml_row_size"](number, D)), np.uint8)
    address = x.ctypes.data, out.ctypes.data

    def quantize(part):
        start, stop = part
        f["ggml_quantize_chunk"](number, *address, start * D, stop - start, D, None)

    each(quantize, _ranges(rows, threads))
    return out


def _ranges(n, parts):
    """0 .. n - 1 as (start, stop) of each part."""
    ends = [n * i // parts for i in range(parts + 1)]
    return list(pairwise(ends))


def ggml_attention(kind):
    """Its flash attention on the CPU; keys and values are stored alike."""

    def peer(q, k, v, threads):
        f, (H, T, D) = ggml(), k.shape
        stored = [ggml_stored(np.ascontiguousarray(x), kind) for x in (k, v)]
        nbytes = sum(x.nbytes for x in stored)
        shapes = (D, 1, len(q), 1), (D, T, H, 1), (D, T, H, 1)
        kinds = TYPE_IDS["f32"], TYPE_IDS[kind], TYPE_IDS[kind]
        context = f["ggml_init"](InitParams(nbytes + 2**26, None, False))
        if not context:
            raise MemoryError(f"ggml has no {nbytes} bytes")
        tensors = []
        for number, shape, x in zip(kinds, shapes, (q, *stored), strict=True):
            tensors.append(f["ggml_new_tensor_4d"](context, number, *shape))
            ctypes.memmove(f["ggml_get_data"](tensors[-1]), x.ctypes.data, x.nbytes)
        result = f["ggml_flash_attn_ext"](context, *tensors, None, D**-0.5, 0, 0)
        graph = f["ggml_new_graph"](context)
        f["ggml_build_forward_expand"](graph, result)
        plan = f["ggml_graph_plan"](graph, threads, None)
        work = np.empty(plan.work_size + 64, np.uint8)
        plan.work_data = work.ctypes.data
        at = ctypes.cast(f["ggml_get_data"](result), ctypes.POINTER(ctypes.c_float))
        out = np.ctypeslib.as_array(at, (len(q), D))

        def start():
            if f["ggml_graph_compute"](graph, ctypes.byref(plan)):
                raise RuntimeError("ggml_graph_compute failed")
            return out, work  # which must live as long as the plan

        def attend():
            return start()[0]

        weakref.finalize(attend, f["ggml_free"], context)
        return attend, nbytes

    return peer


def ggml_pack(kind):
    """ggml's own quantizer, in C. Its groups are of 32."""

    def peer(x, group, threads):
        f, stored = ggml(), ggml_stored(x, kind)
        (N, D), x_hat = x.shape, np.empty_like(x)

        def pack():
            return ggml_stored(x, kind, threads, stored)

        def dequant(stored):
            def rows(part):
                start, stop = part
                at = stored[start:].ctypes.data, x_hat[start:].ctypes.data
                f[f"dequantize_row_{kind}"](*at, (stop - start) * D)

            each(rows, _ranges(N, threads))
            return x_hat

        return pack, dequant, stored.nbytes

    return peer


# --- all of them ----------------------------------------------------------------------
# (system, version, storage): the peer
DECODE = {
    ("numpy", "attention", "float32"): numpy_attention,
    ("torch", "sdpa", "float32"): torch_sdpa("float32"),
    ("torch", "sdpa", "bfloat16"): torch_sdpa("bfloat16"),
    ("torch", "matmul", "float32"): torch_matmul("float32"),
    ("torch", "matmul", "bfloat16"): torch_matmul("bfloat16"),
    ("torch", "dequantize", "int4"): torch_dequantize(4, "bfloat16"),
    ("ggml", "flash attention", "f16"): ggml_attention("f16"),
    ("ggml", "flash attention", "q8_0"): ggml_attention("q8_0"),
    ("ggml", "flash attention", "q4_0"): ggml_attention("q4_0"),
}
PACK = {
    **{("numpy", "blocked", f"int{b}"): numpy_blocked(b) for b in (8, 4, 2)},
    **{("torch", "whole tensor", f"int{b}"): torch_pack(b) for b in (8, 4, 2)},
    **{("quanto", "max", f"int{b}"): quanto(b) for b in (4, 2)},
    **{("hqq", "no search", f"int{b}"): hqq(b) for b in (8, 4, 2)},
    **{("gguf", "quants", kind): gguf(kind) for kind in ("q8_0", "q4_0")},
    **{("ggml", "quantize_chunk", kind): ggml_pack(kind) for kind in ("q8_0", "q4_0")},
}
BITS = {"float32": 32, "bfloat16": 16, "f16": 16, "q8_0": 8, "q4_0": 4}
BITS |= {f"int{b}": b for b in (8, 4, 2)}
GROUPS = {"q8_0": 32, "q4_0": 32}  # of formats that fix it


def versions():
    """{package: version} of the peers that are there."""
    from importlib import metadata

    found = {}
    for name in ("torch", "optimum-quanto", "hqq", "gguf", "llama-cpp-python"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
