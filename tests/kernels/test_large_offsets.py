"""Offsets beyond 2^31 elements, in memory of which little is ever touched.

The PTX machine has the grid of a tensor of 3 * 2^24 tokens, and executes only its
last blocks. A cache of as many tokens has a short sequence at the end of its rows.
Memory is reserved, not filled: only windows of the arrays are copied.
"""

import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest
from agree import check_attention, filled, queries, same_stored
from plain import uneven

from kvq.kernels import decode, dequant, pack, ptxsim
from kvq.kernels.decode.gather import gather
from kvq.kernels.launch import nvrtc
from kvq.kernels.launch import ptxsim as executor
from kvq.kernels.layouts import from_words, row_words, to_words
from kvq.kernels.pack.pages import prompt
from kvq.kernels.pages import PageLayout
from kvq.kernels.ptxsim import kernel as machine_launch
from kvq.kernels.ptxsim.execute import Machine
from kvq.kernels.ptxsim.memory import Arena
from kvq.packing import pack as pack_bytes
from kvq.scheme import FP16, Policy, Scheme
from kvq.tensor import QuantizedTensor, quantize

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reserves memory as Linux does"
)
MAP_NORESERVE = 0x4000  # of Linux; in the module mmap from Python 3.13 on
SCHEMES = {
    "token": Scheme(4, "token", 64, "asymmetric"),
    "channel": Scheme(4, "channel", 32, "asymmetric"),
}
N, T, D = 3, 2**24, 64
ROWS = 200  # the last ones, which are compared
BLOCKS = 64  # the last ones, which are run
SMALL = 2**24  # bytes: an array up to this size is copied as a whole


def reserved(size):
    """`size` bytes, all zero, that take room where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


class Sparse:
    """Large arrays, the windows of them that matter, and an arena that copies these."""

    def __init__(self):
        self.windows = {}  # address of an array -> slice of its bytes

    def array(self, shape, dtype, values, start):
        """An array of `shape` with `values` from its flat index `start` on."""
        a = reserved(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype)
        a[start : start + values.size] = values.ravel()
        window = slice(start * a.itemsize, (start + values.size) * a.itemsize)
        self.windows[a.ctypes.data] = window
        return a.reshape(shape)

    def tail(self, shape, dtype, values):
        """An array of `shape` that ends in `values`."""
        return self.array(shape, dtype, values, int(np.prod(shape)) - values.size)

    def arena(self):
        windows = self.windows

        class SparseArena(Arena):
            def build(self):
                self.bytes = reserved(self.top)
                for start, data in zip(self.starts, self.contents, strict=True):
                    whole = slice(0, data.size if data.size <= SMALL else 0)
                    window = windows.get(data.ctypes.data, whole)
                    where = slice(start + window.start, start + window.stop)
                    self.bytes[where] = data[window]

        return SparseArena()


def run_last_blocks(launches, text_of, monkeypatch, sparse, language="c"):
    """Run BLOCKS blocks of each launch, and copy the windows of its outputs back."""
    monkeypatch.setattr(machine_launch, "Arena", sparse.arena)
    for one in launches:
        kernel = ptxsim.Module(text_of(one)).kernel(one.kernel)
        args = ptxsim.numba_args(one.args) if language == "numba" else one.args
        run = machine_launch.Launch(kernel, one.grid, one.block, args, True, 0, None)
        blocks = min(BLOCKS, one.grid)
        with np.errstate(all="ignore"):
            Machine(run, one.grid - blocks, blocks).run()
        for index, (_, array) in run.arrays.items():
            if run.arena.written[index]:
                whole = slice(0, array.nbytes)
                window = sparse.windows.get(array.ctypes.data, whole)
                array.view(np.uint8)[window] = run.arena.read_back(index)[window]


def committed(language):
    def text_of(one):
        return executor.ptx_text(one.source, one.kernel, one.constants, language)

    return text_of


@pytest.fixture(params=["c", "numba"])
def language(request):
    reason = executor.COMPILERS[request.param].unavailable()
    if reason:
        pytest.skip(reason)
    return request.param


# --- the three operations -------------------------------------------------------------
def check_pack_far(version, scheme, text_of, monkeypatch, language="c"):
    sparse, version = Sparse(), pack.VERSIONS[version]
    x = uneven((ROWS, D), dtype=np.float16)
    groups = (N, *scheme.metadata_shape(1, T, D)[1:])
    rows = (N, T, row_words(D, 4, version.layout))
    tail = -(-ROWS // 32) * 32  # in whole groups of tokens
    x = np.concatenate([np.zeros((tail - ROWS, D), np.float16), x])
    part = quantize(x, scheme)
    blank = [
        np.full(n, 0xFF, np.uint8) for n in (part.scale.nbytes, tail * 4 * rows[2])
    ]
    scale, zero = (
        sparse.tail(groups, np.float16, blank[0].view(np.float16)) for _ in range(2)
    )
    words = sparse.tail(rows, np.uint32, blank[1].view(np.uint32))
    arrays = sparse.tail((N, T, D), np.float16, x), scale, zero, words
    flat = tuple(a.reshape(-1) for a in arrays)
    build = {"v1": pack._v1, "v2": pack._v2}[version.name]
    launches = build(version, scheme, (N, T, D), groups, rows, flat)
    run_last_blocks(launches, text_of, monkeypatch, sparse, language)
    codes = from_words(words[-1, -tail:], 4, D, version.layout)
    stored = [a[-1, -part.scale.shape[-2] :][None] for a in (scale, zero)]
    packed = pack_bytes(codes, 4)[None]
    same_stored(QuantizedTensor(scheme, part.shape, packed, *stored), part)


def check_dequant_far(version, scheme, text_of, monkeypatch, language="c"):
    sparse, version = Sparse(), dequant.VERSIONS[version]
    tail = -(-ROWS // 32) * 32
    part = quantize(uneven((tail, D), dtype=np.float16), scheme)
    groups = (N, *scheme.metadata_shape(1, T, D)[1:])
    codes = to_words(part.unpack()[0], 4, version.layout)
    y = sparse.tail((N, T, D), np.float32, np.full((tail, D), np.nan, np.float32))
    arrays = (
        sparse.tail((N, T, codes.shape[-1]), np.uint32, codes),
        sparse.tail(groups, np.float16, part.scale),
        sparse.tail(groups, np.float16, part.zero),
        y,
    )
    flat = tuple(a.reshape(-1) for a in arrays)
    build = {"v1": dequant._v1, "v2": dequant._v2}[version.name]
    launches = build(version, scheme, (N, T, D), flat)
    run_last_blocks(launches, text_of, monkeypatch, sparse, language)
    expected = part.dequantize()[0, -ROWS:]
    np.testing.assert_array_max_ulp(y[-1, -ROWS:], expected, maxulp=1)


def check_decode_far(version, text_of, monkeypatch, language="c"):
    """The last of five sequences has 40 quantized and 3 exact tokens, others none.

    Its codes begin 4 * 2^24 * 32 = 2^31 words into their array.
    """
    sparse, B, D = Sparse(), 5, 128
    scheme = Scheme(8, "token", 64, "asymmetric")
    short = filled(Policy(scheme, scheme, sinks=3), (1, 1, 43, D), dtype=np.float16)
    prepared = gather(short, decode.VERSIONS[version])

    def far(side):
        parts = {}
        for name in ("codes", "scale", "zero"):
            values = getattr(side, name)
            shape = (B, 1, T, values.shape[-1])
            start = (B - 1) * T * shape[-1]
            parts[name] = sparse.array(shape, values.dtype, values, start)
        exact = np.zeros((B, *side.exact.shape[1:]), side.exact.dtype)
        exact[-1] = side.exact[0]
        return replace(side, exact=exact, **parts)

    lengths = np.array([[0, 0]] * 4 + [[40, 3]], np.int32)
    k, v = far(prepared.k), far(prepared.v)
    cache = replace(prepared, k=k, v=v, lengths=lengths)
    q = queries(B, 4, D, dtype=np.float16)
    launches, collect = decode.launches(q, cache, version)
    run_last_blocks(launches, text_of, monkeypatch, sparse, language)
    ((k, v),) = short.tiles(0, None)
    check_attention(collect()[-1], q[-1].astype(np.float32), k, v)


# --- pages ----------------------------------------------------------------------------
def check_pages_far(text_of, monkeypatch, language):
    """pack v3 on the last tokens: their numbers lie behind 2^31 others."""
    sparse = Sparse()
    key, value = SCHEMES["channel"], SCHEMES["token"]
    layout, exact = PageLayout(key, value, D), PageLayout(FP16, FP16, D)
    P, tail = T // layout.tokens, 4 * layout.tokens
    sides = [uneven((1, tail, D), seed).astype(np.float16) for seed in (0, 1)]
    k, v = (sparse.tail((1, N, T, D), np.float16, x) for x in sides)
    blank = np.full((4, layout.words), 0xFFFFFFFF, np.uint32)
    pages = sparse.tail((P, N, layout.words), np.uint32, np.repeat(blank, N, axis=0))
    table, largest = np.arange(P, dtype=np.int32)[None], np.zeros((1, N, 2), np.float32)
    launch = prompt(layout, exact, k, v, range(T), pages, table, largest)
    run_last_blocks([launch], text_of, monkeypatch, sparse, language)
    parts = [quantize(x, s) for x, s in zip(sides, (key, value), strict=True)]
    expected = layout.to_pages(*((t.unpack(), t.scale, t.zero) for t in parts))
    np.testing.assert_array_equal(pages[-4:, -1], expected[0])


def check_paged_far(version, text_of, monkeypatch, language):
    """v4 and v5: a page behind 2^31 pieces of 16 bytes."""
    sparse, D = Sparse(), 128
    scheme = Scheme(8, "token", 64, "asymmetric")
    short = filled(Policy(scheme, scheme), (1, 1, 43, D), dtype=np.float16)
    cache = decode.prepare(short, version)
    number = 2**31 // (cache.layout.words // 4) + 2
    pages = sparse.tail((number, 1, cache.layout.words), np.uint32, cache.pages)
    table = np.full_like(cache.table, number - 1)
    q = queries(1, 4, D, dtype=np.float16)
    launches, collect = decode.launches(
        q, replace(cache, pages=pages, table=table), version
    )
    run_last_blocks(launches, text_of, monkeypatch, sparse, language)
    np.testing.assert_allclose(collect(), short.attend(q), rtol=0, atol=2e-3)


CHECKS = {
    **{
        f"pack {v} {per}": (check_pack_far, v, SCHEMES[per])
        for v in pack.VERSIONS
        for per in SCHEMES
    },
    **{
        f"dequant {v} {per}": (check_dequant_far, v, SCHEMES[per])
        for v in dequant.VERSIONS
        for per in SCHEMES
    },
    **{f"decode {v}": (check_decode_far, v) for v in decode.VERSIONS},
}


PAGE_CHECKS = {
    "pack v3": (check_pages_far,),
    **{f"decode {v}": (check_paged_far, v) for v in decode.TENSOR_CORES},
}


@pytest.mark.parametrize("name", CHECKS)
def test_offsets_are_computed_in_64_bits(name, language, monkeypatch):
    check, *case = CHECKS[name]
    check(*case, committed(language), monkeypatch, language)


needs_compiler = pytest.mark.skipif(
    nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable())
)


@needs_compiler
@pytest.mark.parametrize("name", PAGE_CHECKS)
def test_offsets_into_pages_are_computed_in_64_bits(name, monkeypatch):
    check, *case = PAGE_CHECKS[name]
    check(*case, committed("c"), monkeypatch, "c")


@needs_compiler
@pytest.mark.parametrize("name", [*CHECKS, *PAGE_CHECKS])
def test_offsets_in_32_bits_fail(name, monkeypatch, tmp_path):
    def text_of(one):
        path = nvrtc.source_path(one.source)
        for file in (*nvrtc.KERNELS.glob("*.cuh"), *path.parent.glob("*.cu*")):
            text = file.read_text(encoding="utf-8")
            text = text.replace("typedef long long i64;", "typedef int i64;")
            (tmp_path / file.name).write_text(text, encoding="utf-8")
        return nvrtc.compile_ptx(str(tmp_path / path.name), one.constants)

    check, *case = (CHECKS | PAGE_CHECKS)[name]
    with pytest.raises((AssertionError, ptxsim.KernelFault)):
        check(*case, text_of, monkeypatch, "c")
