"""Wrong kernels must fail: every mutant of `tests/mutants/`, by name.

Each is run on the case that it names, and so is the kernel without the change, in the
same way. A mutant fails by a result that differs from the reference or by a fault that
the executor reports.
"""

import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agree import (
    check_dequant,
    check_pack,
    filled,
    queries,
)
from mutants.catalogue import ASYNC, MUTANTS, POLICIES, SCHEMES
from plain import uneven

from kvq.attention import attention
from kvq.kernels import decode, dequant, pack
from kvq.kernels.launch import Launch, gxx, nvrtc, ptxsim
from kvq.kernels.ptxsim.errors import KernelFault
from kvq.tensor import quantize

KERNELS = nvrtc.KERNELS
ASYNC_COPY = Path(__file__).parents[1] / "mutants" / "async_copy.cu"
CASES = sorted({(m.op, m.version, m.case) for m in MUTANTS})
MAP_NORESERVE = 0x4000  # of Linux; in the module mmap from Python 3.13 on
SINKS = np.linspace(-1, 2, 6)
RACES = [m for m in MUTANTS if m.races]

needs_gxx = pytest.mark.skipif(gxx.unavailable(), reason=str(gxx.unavailable()))
needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable(), reason=str(nvrtc.unavailable()))


def mutate(folder, mutant):
    """All sources in one folder, where includes find each other, one line changed."""
    for path in [
        *KERNELS.glob("*.cuh"),
        *KERNELS.glob("*/*.cu"),
        *KERNELS.glob("*/*.cuh"),
    ]:
        text = path.read_text(encoding="utf-8")
        if path == KERNELS / mutant.file:
            assert text.count(mutant.right) == 1
            text = text.replace(mutant.right, mutant.wrong)
        Path(folder, path.name).write_text(text, encoding="utf-8")
    return folder


# --- what is run ----------------------------------------------------------------------
class Run:
    """The three operations by one version, its source perhaps from another folder."""

    def __init__(self, executor, version, folder=None):
        self.executor, self.version, self.folder = executor, version, folder

    def do(self, host, *inputs, **options):
        launches, collect = host.launches(*inputs, self.version, **options)
        if self.folder:
            launches = [replace(a, source=self._path(a.source)) for a in launches]
        self.executor.run(launches)
        return collect()

    def _path(self, source):
        return str(self.folder / f"{Path(source).name}.cu")

    def pack(self, x, scheme):
        return self.do(pack, x, scheme)

    def dequant(self, qt):
        return self.do(dequant, qt)

    def decode(self, q, cache, **options):
        return self.do(decode, q, poisoned(cache, self.version), **options)


def poisoned(cache, version):
    """The cache as the kernels read it, with NaN wherever no token is."""
    prepared = decode.prepare(cache, version)
    for side in (prepared.k, prepared.v):
        gt = side.group[0]
        for b, (coded, exact) in enumerate(prepared.lengths):
            side.codes[b, :, coded:] = 0xFFFFFFFF
            side.exact[b, :, exact:] = np.nan
            for a in filter(lambda a: a is not None, (side.scale, side.zero)):
                a[b, :, -(-coded // gt) :] = np.nan
    return prepared


def check(run, op, case):
    """Raises AssertionError or KernelFault unless all is right."""
    if op == "pack":
        check_pack(run.pack, numbers(), SCHEMES[case])
    elif op == "dequant":
        check_dequant(run.dequant, quantize(numbers(), SCHEMES[case]))
    elif case == "far":
        check_far(run)
    elif case == "long":
        q, cache = queries(1, 6, 64), filled(POLICIES["token"], (1, 3, 300, 64))
        same(run.decode(q, cache, softcap=0.9), cache.attend(q, softcap=0.9))
    else:
        cache = filled(POLICIES[case], (3, 3, 77, 80), [77, 0, 48])
        q, options = queries(3, 6, 80), {"softcap": 7.0, "sink_logits": SINKS}
        same(run.decode(q, cache, **options), cache.attend(q, **options))


def same(out, expected):
    """Equal but for the rounding of float32; what a mutant does is no rounding."""
    np.testing.assert_array_less(
        np.linalg.norm(out - expected, axis=-1),
        1e-5 * np.linalg.norm(expected, axis=-1) + 1e-30,
    )


def numbers():
    """x (3, 37, 80): an outlier channel, ties, tiny numbers and constant groups."""
    x = uneven((3, 37, 80))
    x[0, 3] = np.tile([0, *np.arange(1.5, 15), 15], 5)  # scale 1: ties
    x[0, 4, :32] = np.linspace(0, 15, 32) + 0.25
    x[1, 5, 16:32] *= 1e-9 / np.abs(x[1, 5, 16:32]).max()
    x[2, 6, 32:48] = 0
    x[2, :, 7] = 0
    return x


def check_far(run):
    """Tokens at offsets beyond 2^31, in an array of which little is ever touched."""
    B, R_cap, D = 3, 2**24 + 8, 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, B * R_cap * D * 2, flags=flags)
    exact = np.frombuffer(memory, np.float16).reshape(B, 1, R_cap, D)
    exact[2, 0, :5] = uneven((5, D))
    cache = filled(POLICIES["token"], (B, 1, 5, D), [0, 0, 5], np.float16)
    cache = decode.prepare(cache, run.version)
    k, v = (replace(side, exact=exact) for side in (cache.k, cache.v))
    q = queries(B, 2, D, dtype=np.float16)
    out = run.do(decode, q, replace(cache, k=k, v=v))
    kv = exact[2, :, :5].astype(np.float64)
    same(out[2], attention(q[2].astype(np.float64), kv, kv))


# --- the tests ------------------------------------------------------------------------
@needs_gxx
@pytest.mark.parametrize(("op", "version", "case"), CASES)
def test_the_kernel_without_a_change_passes(op, version, case):
    check(Run(gxx, version), op, case)


@needs_gxx
@pytest.mark.parametrize(
    ("op", "version", "case"),
    [
        ("pack", "v2", "channel"),
        ("dequant", "v2", "3 bits"),
        ("decode", "v1", "channel"),
        ("decode", "v3", "channel"),
    ],
)
def test_the_sanitizers_find_nothing(op, version, case):
    check(Run(Sanitized, version), op, case)


class Sanitized:
    """The g++ executor, with AddressSanitizer and UndefinedBehaviorSanitizer."""

    @staticmethod
    def run(launches):
        gxx.run(launches, sanitize=True)


@needs_gxx
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_wrong_kernel_fails(tmp_path, mutant):
    run = Run(gxx, mutant.version, mutate(tmp_path, mutant))
    with pytest.raises((AssertionError, KernelFault)):
        check(run, mutant.op, mutant.case)


@needs_nvrtc
@pytest.mark.parametrize("mutant", RACES, ids=lambda m: m.name)
def test_a_race_is_reported(tmp_path, mutant):
    check(Run(ptxsim, mutant.version), mutant.op, mutant.case)
    run = Run(ptxsim, mutant.version, mutate(tmp_path, mutant))
    with pytest.raises(KernelFault, match=r"race|barrier"):
        check(run, mutant.op, mutant.case)


def reverse_tiles(source):
    x = uneven((3, 128))
    y = np.full(x.size, np.nan, np.float32)
    args = x.ravel(), y, len(x)
    ptxsim.run([Launch(str(source), "reverse_tiles", {}, 1, 32, args, (1,))])
    np.testing.assert_array_equal(y.reshape(x.shape), x[:, ::-1])


@needs_nvrtc
def test_the_asynchronous_copy_without_a_change_passes():
    reverse_tiles(ASYNC_COPY)


@needs_nvrtc
@pytest.mark.parametrize("name", ASYNC)
def test_a_wrong_asynchronous_copy_fails(tmp_path, name):
    right, wrong = ASYNC[name]
    text = ASYNC_COPY.read_text(encoding="utf-8")
    assert text.count(right) == 1
    source = tmp_path / "async_copy.cu"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises((AssertionError, KernelFault)):
        reverse_tiles(source)
