"""pack v3: pages of keys and values, bit for bit those of the reference."""

import functools

import ml_dtypes
import numpy as np
import pytest

from kvq.cache import KVCache
from kvq.kernels import decode, ptxsim
from kvq.kernels.decode.growing import GrowingCache
from kvq.kernels.decode.paged import NUMBERS
from kvq.kernels.host import C_TYPES, flat_numbers
from kvq.kernels.launch import nvrtc
from kvq.kernels.launch.ptxsim import run as run_launches
from kvq.kernels.pages import PageLayout
from kvq.scheme import Policy, Scheme
from kvq.tensor import quantize

needs_compiler = pytest.mark.skipif(
    nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable())
)
BFLOAT = np.dtype(ml_dtypes.bfloat16)
CASES = {
    "4 and 2 bits": (
        Scheme(4, "channel", 32, "asymmetric"),
        Scheme(2, "token", 32),
        64,
        160,
    ),
    "2 and 4 bits": (
        Scheme(2, "channel", 128, "asymmetric"),
        Scheme(4, "token", 64, "asymmetric"),
        128,
        256,
    ),
    "8 bits, ragged": (
        Scheme(8, "token", 64, "asymmetric"),
        Scheme(8, "token", None),
        128,
        75,
    ),
    "2 bits, ragged": (
        Scheme(2, "token", 16),
        Scheme(2, "token", 64, "asymmetric"),
        64,
        65,
    ),
}
B, H = 2, 3


@functools.cache
def kernel(key, value, D, X):
    constants = {**PageLayout(key, value, D).constants, "X": X, "E": "__half"}
    text = nvrtc.compile_ptx("pack/v3_pages", constants)
    return ptxsim.Module(text).kernel("pack_v3")


def run(key, value, D, k, v):
    """pages (B, H, P, words), largest (B, H, 2), report; pages lie in random order.

    The first token of k and v is left out.
    """
    layout, T = PageLayout(key, value, D), k.shape[-2]
    P = -(-(T - 1) // layout.tokens)
    order = np.random.default_rng(1).permutation(B * P).astype(np.int32)
    table = np.full((B, P + 2), -1, np.int32)
    table[:, 2:] = order.reshape(B, P)
    pages = np.full(B * P * H * layout.words, 0xFFFFFFFF, np.uint32)
    largest = np.zeros(B * H * 2, np.float32)
    (x, X), (y, _) = flat_numbers(k), flat_numbers(v)
    args = [x, y, pages, table.reshape(-1), largest]
    sizes = map(np.int32, (H, T, 1, T, P, P + 2, 2))
    report = kernel(key, value, D, X).launch(B * H * P, 96, [*args, *sizes])
    pages = pages.reshape(B * P, H, -1)[table[:, 2:]]
    return pages.swapaxes(1, 2), largest.reshape(B, H, 2), report


def expected(x, scheme, page):
    """(codes, scale, zero) of whole pages, by the reference."""
    stored = [quantize(row, scheme) for row in x]
    groups = page // scheme.group_shape(1, 1, x.shape[-1])[1]
    parts = [
        np.stack([t.unpack() for t in stored]),
        np.stack([t.scale for t in stored]),
    ]
    zero = (
        padded(np.stack([t.zero for t in stored]), groups) if scheme.has_zero else None
    )
    return padded(parts[0], page), padded(parts[1], groups), zero


def padded(x, unit):
    missing = -x.shape[2] % unit
    return np.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))


def numbers(shape, dtype, seed=0):
    """k, v with an outlier channel and constant groups."""
    k, v = np.random.default_rng(seed).standard_normal((2, *shape))
    k[..., 5] *= 100
    v[-1, -1] = 2.5
    return k.astype(dtype), v.astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT, np.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_pages_are_those_of_the_reference(name, dtype):
    key, value, D, T = CASES[name]
    k, v = numbers((B, H, T + 1, D), dtype)
    pages, largest, report = run(key, value, D, k, v)
    if dtype == np.float16:  # the page fits into shared memory; scales are scattered
        assert 32 * report.sectors <= 1.4 * (k.nbytes + v.nbytes + pages.nbytes)
    layout = PageLayout(key, value, D)
    sides = [
        expected(x[:, :, 1:].astype(np.float32), s, layout.tokens)
        for x, s in ((k, key), (v, value))
    ]
    np.testing.assert_array_equal(pages, layout.to_pages(*sides))
    for i, (_, scale, _) in enumerate(sides):
        np.testing.assert_array_equal(largest[..., i], scale.max(axis=(2, 3)))


# --- a cache that grows ---------------------------------------------------------------
POLICIES = {
    "4 bits": Policy(
        Scheme(4, "channel", 64, "asymmetric"), Scheme(4, "token", 32), 100, sinks=3
    ),
    "2 bits, 128 tokens in a group": Policy(
        Scheme(2, "channel", 128, "asymmetric"), Scheme(2, "token", 64, "asymmetric")
    ),
    "8 bits, more sinks than a page": Policy(
        Scheme(8, "channel", 64), Scheme(8, "token", 64), 20, sinks=70
    ),
}
D, T = 64, 260


def grown(policy, dtype, pieces):
    """A cache that got the same tokens in these pieces, and k, v."""
    k, v = numbers((B, H, T, D), dtype)
    cache = GrowingCache(policy, B, H, D, 300, np.dtype(dtype).name)
    for start, stop in zip([0, *pieces], [*pieces, T], strict=True):
        cache.append(k[:, :, start:stop], v[:, :, start:stop])
    assert len(cache) == T
    return cache, k, v


def contents(cache):
    """(codes, scale, zero) of keys and of values, then k and v of sinks and window."""
    coded, exact = cache.split(len(cache))
    column = cache.table.shape[1] - len(cache.exact_pages) // B
    pages = cache.pages[cache.table[:, : coded // cache.layout.tokens]].swapaxes(1, 2)
    sides = cache.layout.from_pages(pages) if coded else []
    window = cache.exact_pages[cache.table[:, column:]].swapaxes(1, 2)
    full = [x[:, :, :exact] for x, *_ in cache.exact.from_pages(window)]
    return [x for side in sides for x in side if x is not None] + full


def reference(policy, k, v):
    """The same of a KVCache that quantizes blocks of a page."""
    cache = KVCache(policy)
    cache.append(k, v)
    parts = []
    for streams in zip(*cache.rows, strict=True):
        chunks = [list(s.chunks) for s in streams]
        for read in (lambda c: c.unpack(), lambda c: c.scale, lambda c: c.zero):
            found = [[read(c) for c in row] for row in chunks]
            if found[0][0] is not None:
                parts.append(np.stack([np.concatenate(row, axis=1) for row in found]))
    for streams in zip(*cache.rows, strict=True):
        full = [np.concatenate([s.sinks, s.window], axis=1) for s in streams]
        parts.append(np.stack(full))
    return parts


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_a_stream_of_tokens_stores_what_a_prompt_does(name, dtype):
    policy = POLICIES[name]
    bulk, k, v = grown(policy, dtype, [])
    stream, *_ = grown(policy, dtype, [1, 2, 90, *range(180, T)])
    np.testing.assert_array_equal(stream.pages, bulk.pages)
    np.testing.assert_array_equal(stream.largest, bulk.largest)
    for found in (contents(bulk), contents(stream)):
        for a, b in zip(found, reference(policy, k, v), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@needs_compiler
@pytest.mark.parametrize("version", decode.TENSOR_CORES)
def test_decode_reads_what_has_grown(version):
    policy = POLICIES["4 bits"]
    q = np.random.default_rng(3).standard_normal((B, 2 * H, 1, D)).astype(np.float16)
    outs = []
    for pieces in ([], [150, *range(240, T)]):
        cache, k, v = grown(policy, np.float16, pieces)
        paged = cache.paged(decode.TENSOR_CORES[version])
        launches, collect = decode.launches(q, paged, version)
        run_launches(launches)
        outs.append(collect())
    np.testing.assert_array_equal(*outs)
    expected = KVCache(policy)
    expected.append(k, v)
    np.testing.assert_allclose(outs[0], expected.attend(q), rtol=0, atol=2e-3)


@needs_compiler
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_full_precision_is_stored_as_it_is(name):
    dtype = {"fp16": np.float16, "bf16": BFLOAT}[name]
    cache, k, v = grown(name, dtype, [50, 51])
    assert cache.split(T) == (0, T)
    for a, b in zip(contents(cache), (k, v), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_growing_cache_refuses_what_it_cannot_store():
    policy = POLICIES["4 bits"]
    with pytest.raises(ValueError, match="dtype='float32'; valid: float16, bfloat16"):
        GrowingCache(policy, B, H, D, 300, "float32")
    with pytest.raises(ValueError, match="dtype='float16'; valid: bfloat16"):
        GrowingCache("bf16", B, H, D, 300)
    with pytest.raises(ValueError, match="value=None"):
        GrowingCache(Policy(policy.key, None), B, H, D, 300)
    cache = GrowingCache(policy, B, H, D, 70)
    k = np.zeros((B, H, 71, D), np.float16)
    with pytest.raises(ValueError, match="71 tokens; valid: up to the capacity, 70"):
        cache.append(k, k)
    with pytest.raises(ValueError, match=r"v \(2, 3, 1, 64\); expected \(2, 3, 2, 64"):
        cache.append(k[:, :, :2], k[:, :, :1])
    with pytest.raises(ValueError, match=r"k \(3, 2, 64\); expected \(2, 3, t, 64\)"):
        cache.append(k[0, :, :2], k[0, :, :2])
    with pytest.raises(TypeError, match="v is float32; valid: float16"):
        cache.append(k[:, :, :2], k[:, :, :2].astype(np.float32))
    assert len(cache) == 0


def test_numbers_are_given_in_their_own_type():
    assert set(NUMBERS) < set(C_TYPES)
    x = np.arange(6).reshape(2, 3)
    words, name = flat_numbers(x.astype(BFLOAT))
    assert (words.dtype, name) == (np.uint32, "__nv_bfloat16")
    np.testing.assert_array_equal(words.view(BFLOAT), np.arange(6))
    assert flat_numbers(x.astype(np.float64))[1] == "float"
