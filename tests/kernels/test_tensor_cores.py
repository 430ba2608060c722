"""Decode by tensor cores, run from its PTX: right on any pages, in any order.

Attention is within twice the error of the same computation done naively with products
of two 16-bit numbers and sums in float32: see `agree.py`. Outputs before they are
written hold all ones.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from agree import check_tensor_cores, rounded

from kvq.cache import KVCache
from kvq.dtypes import numpy_dtype
from kvq.kernels import backend, decode, ptxsim
from kvq.kernels.decode import tensor_cores
from kvq.kernels.decode.paged import paged
from kvq.kernels.launch import nvrtc
from kvq.kernels.pages import PageLayout
from kvq.memory import ModelShape, cache_bytes
from kvq.scheme import Policy, Scheme

needs_compiler = pytest.mark.skipif(
    nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable())
)
VERSIONS = list(tensor_cores.VERSIONS)
ASYMMETRIC = {"levels": "asymmetric"}


@dataclass(frozen=True)
class Case:
    """lengths : (quantized, exact) tokens of each sequence. key_scale, value_scale :
    factors of the scales of one channel, of one token in 16. exact : the dtype of q and
    of what is not quantized."""

    key: Scheme
    value: Scheme
    D: int = 64
    H_kv: int = 2
    ratio: int = 3
    lengths: tuple = ((96, 11), (0, 0), (32, 70), (0, 5))
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    q_scale: float = 1.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    exact: str = "float16"
    exact_scale: float = 1.0
    seed: int = 0


CASES = {
    "4 bits, keys per channel": Case(
        Scheme(4, "channel", 32, **ASYMMETRIC), Scheme(4, "token", 32, **ASYMMETRIC)
    ),
    "8 and 2 bits, no groups of heads": Case(
        Scheme(8, "channel", 64), Scheme(2, "token", 64, **ASYMMETRIC), ratio=1
    ),
    "2 bits, 128 tokens in a group, 16 heads": Case(
        Scheme(2, "channel", 128, **ASYMMETRIC),
        Scheme(2, "token", 32),
        H_kv=1,
        ratio=16,
        lengths=((256, 3), (128, 0)),
    ),
    "4 bits, keys per token": Case(
        Scheme(4, "token", 64), Scheme(8, "token", 64), D=128, ratio=8, H_kv=1,
        lengths=((75, 9), (129, 0)),
    ),
    "2 bits, keys per token": Case(
        Scheme(2, "token", 32, **ASYMMETRIC),
        Scheme(4, "token", 16, **ASYMMETRIC),
        ratio=5,
        lengths=((75, 9), (64, 64), (1, 0)),
        softcap=2.0,
        sinks=True,
    ),
    "256 channels, 9 heads": Case(
        Scheme(2, "channel", 64), Scheme(8, "token", 128, **ASYMMETRIC), D=256,
        ratio=9, H_kv=1, lengths=((128, 2),),
    ),
}  # fmt: skip


def baseline(dtype, **settings):
    """Nothing is quantized."""
    scheme = Scheme(16, levels=dtype, group=None)
    return Case(scheme, scheme, exact=dtype, **settings)


CASES |= {
    "float16 alone": baseline(
        "float16", D=128, ratio=4, lengths=((0, 203), (0, 0), (0, 16))
    ),
    "bfloat16 alone": baseline(
        "bfloat16", ratio=9, H_kv=1, lengths=((0, 66), (0, 300)), sinks=True
    ),
    "4 bits, a window in bfloat16": replace(
        CASES["4 bits, keys per channel"], exact="bfloat16"
    ),
    "2 bits per token, a window in bfloat16": replace(
        CASES["2 bits, keys per token"], exact="bfloat16", softcap=None
    ),
}
FIRST, EIGHT, TWO = (list(CASES.values())[i] for i in (0, 1, 2))
HARD = {
    "a channel 1000 times larger": replace(FIRST, key_scale=1e3),
    "2 bits, a channel 1000 times larger": replace(TWO, key_scale=1e3),
    "q 100 times larger as well": replace(
        EIGHT, key_scale=1e3, q_scale=100.0, scale=1e-4
    ),
    "scores whose exponentials overflow": replace(FIRST, q_scale=200.0),
    "scores that grow by some powers of two": replace(
        FIRST, q_scale=10.0, lengths=((960, 130), (448, 0)), H_kv=1
    ),
    "the same with 2 bits": replace(TWO, q_scale=10.0, lengths=((1024, 130), (896, 0))),
    "values beyond 1000": replace(EIGHT, value_scale=2e3),
    "tiny keys and values": replace(TWO, key_scale=1e-2, value_scale=1e-2, q_scale=0.1),
    "a negative scale": replace(FIRST, scale=-0.3),
    "bfloat16 beyond binary16": replace(
        CASES["bfloat16 alone"], q_scale=1e-4, exact_scale=1e5, sinks=False
    ),
    "a window in bfloat16 beyond binary16": replace(
        CASES["2 bits per token, a window in bfloat16"], q_scale=1e-4, exact_scale=1e5
    ),
}


@dataclass(frozen=True, eq=False)
class Problem:
    case: Case
    q: np.ndarray
    k: tuple
    v: tuple
    exact: tuple
    read: list  # of each sequence: the parts of `check_tensor_cores`
    sinks: np.ndarray | None

    @property
    def scale(self):
        return self.case.D**-0.5 if self.case.scale is None else self.case.scale


def make_side(case, scheme, rng, factor, values):
    """((codes, scale, zero), exact, [(s, level, z) of both parts]).

    NaN where there is no token.
    """
    (T, R), D = np.max(case.lengths, axis=0), case.D
    shape = len(case.lengths), case.H_kv
    exact = np.full((*shape, R, D), np.nan, numpy_dtype(case.exact))
    for b, (_, r) in enumerate(case.lengths):
        x = rng.standard_normal((case.H_kv, r, D)) * case.exact_scale
        exact[b, :, :r] = x
    full = [exact[b, :, :r].astype(float) for b, (_, r) in enumerate(case.lengths)]
    full = [(np.ones_like(x), x, np.zeros_like(x)) for x in full]
    if scheme.full_precision:
        nothing = exact[:, :, :0], None, None
        return nothing, exact, [[part] for part in full]
    _, gt, gc = scheme.group_shape(1, 1, D)
    codes = np.full((*shape, T, D), 2**scheme.bits - 1, np.uint8)
    size = (*shape, -(-T // gt), D // min(gc, D))
    scale, zero = np.full((2, *size), np.nan, np.float16)
    parts = []
    for b, (n, _) in enumerate(case.lengths):
        codes[b, :, :n] = rng.integers(0, 2**scheme.bits, (case.H_kv, n, D))
        used = scale[b, :, : -(-n // gt)]
        used[:] = rng.uniform(0.5, 1.5, used.shape) / 2 ** (scheme.bits - 1)
        used[
            (..., slice(3, None, 16), slice(None))
            if values
            else (..., used.shape[-1] // 3)
        ] *= factor
        used[:, -1:, -1:] = 0  # a constant group
        zero[b, :, : used.shape[1]] = rng.standard_normal(used.shape) - 0.5
        s, z = (
            a[b].astype(float).repeat(gt, 1)[:, :n].repeat(min(gc, D), 2)
            for a in (scale, zero)
        )
        level = codes[b, :, :n].astype(float)
        if not scheme.has_zero:
            level, z = level - 2 ** (scheme.bits - 1), np.zeros_like(z)
        parts.append([(s, level, z), full[b]])
    return (codes, scale, zero if scheme.has_zero else None), exact, parts


def make(case):
    rng = np.random.default_rng(case.seed)
    k, k_exact, k_read = make_side(case, case.key, rng, case.key_scale, False)
    v, v_exact, v_read = make_side(case, case.value, rng, case.value_scale, True)
    H_q = case.H_kv * case.ratio
    q = rng.standard_normal((len(case.lengths), H_q, 1, case.D)) * case.q_scale
    sinks = rng.standard_normal(H_q) if case.sinks else None
    dtypes = ["float16"] * (len(k_read[0]) - 1) + [case.exact]
    read = [
        list(zip(*sides, dtypes, strict=True))
        for sides in zip(k_read, v_read, strict=True)
    ]
    q = q.astype(numpy_dtype(case.exact))
    return Problem(case, q, k, v, (k_exact, v_exact), read, sinks)


def pages_of(p, order=None, version="v4"):
    case = p.case
    schemes = case.key, case.value
    version = tensor_cores.VERSIONS[version]
    return paged(p.k, p.v, *p.exact, case.lengths, *schemes, order, version)


@functools.cache
def compiled(source, constants):
    return ptxsim.Module(nvrtc.compile_ptx(source, dict(constants)))


def run(p, cache, version="v4"):
    """(attention, [report of each launch])"""
    launches, collect = decode.launches(
        p.q,
        cache,
        version,
        scale=p.scale,
        softcap=p.case.softcap,
        sink_logits=p.sinks,
    )
    reports = []
    for launch in launches:
        module = compiled(launch.source, tuple(sorted(launch.constants.items())))
        kernel = module.kernel(launch.kernel)
        reports.append(kernel.launch(launch.grid, launch.block, launch.args))
    return collect(), reports


def check(p, out):
    options = {"softcap": p.case.softcap, "sink_logits": p.sinks}
    for b, parts in enumerate(p.read):
        check_tensor_cores(out[b], p.q[b], parts, p.scale, **options)


def scattered(n):
    return np.random.default_rng(n).permutation(n)


@needs_compiler
@pytest.mark.parametrize("warps", [4, 2112])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_within_twice_the_error_of_the_naive_products(
    name, version, warps, monkeypatch
):
    """With many steps for a warp, of several sequences; and with one step."""
    monkeypatch.setattr(tensor_cores, "wave", lambda *_: warps)
    p = make(CASES[name])
    check(p, run(p, pages_of(p, scattered, version), version)[0])


@needs_compiler
@pytest.mark.parametrize("warps", [4, 8, 12])
def test_v5_leaves_its_counters_as_it_found_them(warps, monkeypatch):
    """So that the next launch can use them again. Blocks come one after the other."""
    monkeypatch.setattr(tensor_cores, "wave", lambda *_: warps)
    monkeypatch.setattr("kvq.kernels.ptxsim.kernel.LANES", 1)
    p = make(replace(FIRST, lengths=((640, 130), (0, 0), (320, 1))))
    args = (p.q, pages_of(p, None, "v5"), "v5")
    (launch,), collect = decode.launches(*args, scale=p.scale)
    module = compiled(launch.source, tuple(sorted(launch.constants.items())))
    outs = []
    for _ in range(2):
        launch.args[7][:] = np.nan  # part_o
        module.kernel("decode_v5").launch(launch.grid, launch.block, launch.args)
        outs.append(collect().copy())
    np.testing.assert_array_equal(*outs)
    check(p, outs[0])
    (arrived,) = (
        launch.args[i] for i in launch.outputs if launch.args[i].dtype == "i4"
    )
    assert not arrived.any()


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", HARD)
def test_numbers_that_binary16_hardly_holds(name, version, monkeypatch):
    """With many steps for a warp, so that m changes on the way."""
    monkeypatch.setattr(tensor_cores, "wave", lambda *_: 4)
    p = make(HARD[name])
    out, _ = run(p, pages_of(p, None, version), version)
    assert np.isfinite(out).all()
    check(p, out)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_the_order_of_the_pages_does_not_matter(version):
    p = make(replace(FIRST, lengths=((320, 70), (96, 0))))
    one, two = (
        run(p, pages_of(p, order, version), version)[0] for order in (None, scattered)
    )
    np.testing.assert_array_equal(one, two)


COPY = "cp.async.cg.shared"


def counted(report, texts, files=()):
    """Counts of the lines of device code that contain a text, or are in a file."""
    lines = {
        (f"decode/{path.name}", i + 1)
        for path in (nvrtc.KERNELS / "decode").glob("*.cu*")
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines())
        if path.name in files or any(text in line for text in texts)
    }
    return [c for place, c in report.places.items() if place in lines]


def one_row(name, tokens, exact=0):
    """A case with one sequence and one KV head."""
    lengths = (0, tokens) if CASES[name].key.full_precision else (tokens, exact)
    return make(replace(CASES[name], lengths=(lengths,), H_kv=1))


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_the_pages_is_fetched_once(name, version, monkeypatch):
    """In whole sectors. v4 asks for the scales of 128 tokens with each 64 of them."""
    monkeypatch.setattr(tensor_cores, "wave", lambda *_: 4)
    p = one_row(name, 512, exact=128)
    cache = pages_of(p, None, version)
    _, (report, *_) = run(p, cache, version)
    found = counted(report, [COPY], ["attend.cuh"])
    chunks, _ = tensor_cores.heads_of_block(p.case.ratio, p.case.D)
    head = 4 * sum(cache.layout.head)
    again = (cache.layout.steps - 1) * len(cache.pages) * head * (version == "v4")
    nbytes = cache.pages.nbytes + again + cache.exact_pages.nbytes
    sectors = sum(c.sectors for c in found)
    few = 4 * report.warps  # lengths and q; v5: the scales of a page that is shared
    few += chunks * 4 * head / 32 * (version == "v5" and cache.layout.steps > 1)
    assert 0 <= sectors - chunks * nbytes / 32 <= few
    assert sectors == sum(c.ideal_sectors for c in found)
    assert report.wavefronts <= 1.02 * report.ideal_wavefronts


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_a_long_row_moves_the_bytes_that_the_roofline_counts(name, monkeypatch):
    """Packed codes, scales and zeros within 1 %; no more sectors than the ideal.

    But for q, which a warp reads once for each row: half a sector at a time.
    """
    monkeypatch.setattr(tensor_cores, "wave", lambda *_: 4)
    p = one_row(name, 1024)
    _, (report,) = run(p, pages_of(p, None, "v5"), "v5")
    chunks, heads = tensor_cores.heads_of_block(p.case.ratio, p.case.D)
    policy = Policy(p.case.key, p.case.value)
    shape = ModelShape(layers=1, kv_heads=1, head_dim=p.case.D)
    nbytes = chunks * cache_bytes(policy, shape, tokens=1024)
    copies = counted(report, [COPY])
    sectors = sum(c.sectors for c in copies)
    assert sectors == sum(c.ideal_sectors for c in copies)
    assert nbytes / 32 <= sectors <= 1.01 * nbytes / 32
    parts, q = report.warps + chunks - 1, heads * p.case.D * 2 / 32
    assert report.sectors - report.ideal_sectors <= parts * (q + 2 * heads)


def truncated(x):
    """To 24 bits, toward zero: how tensor cores may add."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.trunc(mantissa * 2**24) / 2**24, exponent)


def test_two_sums_that_grow_alike_keep_the_precision_of_binary16():
    """2 bits: one sums p s (1 + code / 4^k), one p s; 4^k times their difference."""
    rng, T = np.random.default_rng(0), 32768
    codes, power = rng.integers(0, 4, (T, 4)), 4.0 ** np.arange(1, 5)
    ps = rounded(np.exp2(2 * rng.normal(size=T)), "float16").astype(float)
    o, lifted = np.zeros(4), 0.0
    for t in range(0, T, 16):
        p, c = ps[t : t + 16], codes[t : t + 16]
        o = truncated(o + p @ (1 + c / power))
        lifted = truncated(lifted + p.sum())
    np.testing.assert_allclose(power * (o - lifted), ps @ codes, rtol=2**-11)


# --- the host side --------------------------------------------------------------------
def cache_of(policy, dtype=np.float16, D=64):
    rng = np.random.default_rng(1)
    cache = KVCache(policy)
    k, v = rng.standard_normal((2, 2, 2, 200, D)).astype(dtype)
    cache.append(k, v, np.arange(200) < np.array([[200], [131]]))
    return cache, rng.standard_normal((2, 6, 1, D)).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("version", VERSIONS)
def test_a_backend_runs_it_on_a_cache(version):
    key = Scheme(4, "channel", 32, "asymmetric")
    cache, q = cache_of(Policy(key, Scheme(4, "token", 64), residual=40, sinks=3))
    sim = backend("ptxsim-c")
    out = sim.decode(q, cache, version)
    np.testing.assert_allclose(out, cache.attend(q), rtol=0, atol=1e-3)
    prepared = sim.prepare(cache, version)
    assert len(prepared) == 200
    np.testing.assert_array_equal(sim.decode(q, prepared), out)
    np.testing.assert_array_equal(sim.decode(q.astype(np.float32), prepared), out)


@pytest.mark.parametrize(
    ("bits", "G", "D", "ratio", "warps"),
    [(4, 64, 128, 4, (16, 8)), (2, 64, 128, 4, (12, 12)), (8, 32, 128, 8, (12, 4)),
     (4, 64, 64, 9, (16, 16)), (4, 64, 256, 1, (8, 4))],
)  # fmt: skip
def test_a_wave_is_what_registers_and_shared_memory_have_room_for(
    bits, G, D, ratio, warps
):
    key, value = (Scheme(bits, per, G, "asymmetric") for per in ("channel", "token"))
    layout = PageLayout(key, replace(value, group=64), D)
    waves = [tensor_cores.wave(version, layout, ratio) for version in VERSIONS]
    assert waves == [132 * n for n in warps]


def test_it_is_not_taken_unless_it_is_named():
    """The default computes in float32, in both languages."""
    assert list(decode.VERSIONS) == ["v1", "v2", "v3"]
    assert set(decode.TENSOR_CORES) == set(VERSIONS)
    policy = Policy(Scheme(4), Scheme(4))
    cache = KVCache(policy)
    cache.append(*np.zeros((2, 2, 5, 64), np.float16))
    reason = "v4: it is CUDA C alone; valid: v1, v2, v3"
    with pytest.raises(ValueError, match=reason):
        backend("ptxsim-numba").decode(np.zeros((2, 1, 64), np.float16), cache, "v4")


@pytest.mark.parametrize(
    ("policy", "D", "reason"),
    [
        (Policy(Scheme(4), None), 64, "value=None"),
        (Policy(Scheme(3), Scheme(4)), 64, "key: bits=3; valid: 16, 8, 4, 2"),
        (Policy(Scheme(4), Scheme(4)), 80, "D=80; valid: 64, 128, 256"),
        (Policy(Scheme(4), Scheme(4)), None, None),
    ],
)
def test_what_it_does_not_know(policy, D, reason):
    found = decode.unsupported(policy, "v4", D)
    assert found is None if reason is None else found.startswith(reason)


def test_full_precision_of_another_type_is_refused():
    cache, _ = cache_of(Policy(Scheme(4), Scheme(4), residual=9), np.float32)
    reason = "in full precision are float32; v4 reads float16 or bfloat16"
    with pytest.raises(ValueError, match=reason):
        decode.prepare(cache, "v4")
