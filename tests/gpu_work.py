"""What `bench_gpu.py` runs: launches on data of any size, and the check before.

A block of random tokens is stored by the reference; longer contexts and batches repeat
it, at addresses of their own. Pages lie in memory in random order.
"""

import dataclasses
import functools

import numpy as np

from kvq.cache import KVCache
from kvq.kernels import decode, dequant, pack
from kvq.kernels.backends import one_line
from kvq.kernels.decode import tensor_cores
from kvq.kernels.decode.paged import Paged
from kvq.kernels.host import flat, operation, unwritten
from kvq.kernels.layouts import to_words
from kvq.kernels.pack.pages import prompt
from kvq.kernels.pages import PageLayout
from kvq.scheme import FP16, Policy, Scheme
from kvq.tensor import quantize

D, RATIO, GROUP = 128, 4, 64
PAGES = "v3-pages"  # pack's third version: it writes pages
CHECKED = 168  # tokens of the small case: two groups, 40 in full precision
# Largest relative error of decode: products of binary32, and of binary16.
FLOAT32, FLOAT16 = 1e-5, 4e-3


# --- data -----------------------------------------------------------------------------
def schemes(bits):
    """Of keys and of values."""
    if bits == 16:
        return FP16, FP16
    return tuple(Scheme(bits, per, GROUP, "asymmetric") for per in ("channel", "token"))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def launches_of(op, version, bits, B, T, H_kv, block):
    """(launches, bytes that they must move) of a version of an operation.

    block : tokens that are stored, and repeated until there are T, a multiple.
    """
    build = {"decode": decoding, "pack": packing, "dequant": dequantizing}[op]
    return build(version, bits, B, H_kv, block, T // block)


@functools.cache
def block_of(version, bits, H_kv, block):
    """`decode.prepare` of one sequence, all of its tokens quantized."""
    cache = KVCache(Policy(*schemes(bits)))
    cache.append(*normal(2, 1, H_kv, block, D))
    return decode.prepare(cache, version)


def decoding(version, bits, B, H_kv, block, times):
    cache = repeated(block_of(version, bits, H_kv, block), B, times)
    q = normal(B, H_kv * RATIO, 1, D, seed=1)
    launches, _ = decode.launches(q, cache, version)
    return launches, sum(a.nbytes for a in stored(cache))


def stored(cache):
    """The arrays that a step must read."""
    if isinstance(cache, Paged):
        return cache.pages, cache.exact_pages
    sides = [(s.codes, s.scale, s.zero) for s in (cache.k, cache.v)]
    return [a for side in sides for a in side if a is not None]


def repeated(cache, B, times):
    """B sequences, each `times` as long as the one in `cache`."""
    lengths = np.tile(cache.lengths, (B, 1)) * times
    if not isinstance(cache, Paged):
        sides = {"k": longer(cache.k, B, times), "v": longer(cache.v, B, times)}
        return dataclasses.replace(cache, lengths=lengths, **sides)
    pools = {
        name: np.tile(getattr(cache, name), (B * times, 1, 1))
        for name in ("pages", "exact_pages")
    }
    tables = [scattered(len(pool)).reshape(B, -1) for pool in pools.values()]
    return dataclasses.replace(
        cache,
        **pools,
        table=np.concatenate(tables, axis=1),
        lengths=lengths,
        largest=np.tile(cache.largest, (B, 1, 1)),
    )


def longer(side, B, times):
    """A Side of the gathered cache, its tokens repeated."""
    arrays = {
        name: a if a is None else np.tile(a, (B, 1, times, 1))
        for name in ("codes", "scale", "zero", "exact")
        for a in [getattr(side, name)]
    }
    return dataclasses.replace(side, **arrays)


def scattered(n):
    """Pages lie in any order."""
    return np.random.default_rng(n).permutation(n).astype(np.int32)


def packing(version, bits, B, H_kv, block, times):
    """Of keys alone; pages are of keys and values."""
    key, value = schemes(bits)
    x = np.tile(normal(1, H_kv, block, D), (B, 1, times, 1))
    if version == PAGES:
        launches = [pages_launch(x, x.copy(), key, value)]
    else:
        launches, _ = pack.launches(x, key, version)
    return launches, distinct_bytes(launches)


def pages_launch(k, v, key, value):
    """`pack/v3_pages.cu` on k, v (B, H_kv, T, D)."""
    layout, (B, H, T, _) = PageLayout(key, value, D), k.shape
    P = -(-T // layout.tokens)
    pages = unwritten((B * P, H, layout.words), np.uint32)
    largest = np.zeros((B, H, 2), np.float32)
    exact, table = PageLayout(FP16, FP16, D), scattered(B * P).reshape(B, P)
    return prompt(layout, exact, k, v, range(T), pages, table, largest)


@functools.cache
def words_of(layout, bits, H_kv, block):
    """words, scale and zero of keys, as dequant's kernels take them."""
    qt = quantize(normal(H_kv, block, D), schemes(bits)[0])
    return to_words(qt.unpack(), bits, layout), qt.scale, qt.zero


def dequantizing(version, bits, B, H_kv, block, times):
    version = dequant.VERSIONS[version]
    arrays = [
        flat(np.tile(a, (B, times, 1)))
        for a in words_of(version.layout, bits, H_kv, block)
    ]
    shape = B * H_kv, block * times, D
    arrays.append(unwritten(shape, np.float32))
    launches = dequant.of_words(version, schemes(bits)[0], shape, tuple(arrays))
    return launches, distinct_bytes(launches)


def distinct_bytes(launches):
    """Every array once."""
    arrays = {id(a): a.nbytes for one in launches for a in one.args if np.ndim(a)}
    return sum(arrays.values())


# --- the check ------------------------------------------------------------------------
def wrong(machine, op, kernel, bits):
    """None if a kernel gives the reference's result; else what is wrong."""
    try:
        return CHECKS[op](machine, kernel, bits)
    except Exception as error:  # of any library
        return one_line(error)


def result(machine, op, kernel, *inputs):
    """What a kernel gives, None where it cannot be had."""
    launches, collect = operation(op).launches(*inputs, kernel)
    if machine.missing(launches):
        return None
    machine.run(launches)
    return collect()


def check_pack(machine, kernel, bits):
    k, v = normal(2, 1, 2, CHECKED, D)
    if kernel == PAGES:
        return check_pages(machine, k, v, bits)
    found, expected = (
        result(machine, "pack", kernel, k, schemes(bits)[0]),
        quantize(k, schemes(bits)[0]),
    )
    pairs = zip(found.arrays, expected.arrays, strict=True) if found else ()
    differ = sum(np.count_nonzero(a != b) for a, b in pairs)
    return f"{differ} numbers differ" if differ else None


def check_pages(machine, k, v, bits):
    """Those of whole pages: what is behind the last token is zero."""
    whole = CHECKED // GROUP * GROUP
    k, v = k[:, :, :whole], v[:, :, :whole]
    launch = pages_launch(k, v, *schemes(bits))
    if machine.missing([launch]):
        return None
    machine.run([launch])
    layout, sides = PageLayout(*schemes(bits), D), []
    for x, scheme in zip((k, v), schemes(bits), strict=True):
        qt = quantize(x, scheme)
        sides.append((qt.unpack(), qt.scale, qt.zero))
    expected = layout.to_pages(*sides).swapaxes(1, 2)  # (B, P, H, words)
    pages = launch.args[2].reshape(-1, k.shape[1], layout.words)[launch.args[3]]
    differ = np.count_nonzero(pages.reshape(expected.shape) != expected)
    return f"{differ} words differ" if differ else None


def check_dequant(machine, kernel, bits):
    qt = quantize(normal(2, CHECKED, D), schemes(bits)[0])
    found, expected = result(machine, "dequant", kernel, qt), qt.dequantize()
    if found is None:
        return None
    off = np.abs(found - expected) / np.spacing(np.abs(expected))
    return None if (off <= 1).all() else f"{off.max():.0f} units in the last place"


def check_decode(machine, kernel, bits):
    policy = "fp16" if bits == 16 else Policy(*schemes(bits), residual=40)
    cache = KVCache(policy)
    cache.append(*normal(2, 2, 2, CHECKED, D))
    q = normal(2, 2 * RATIO, 1, D, seed=1)
    found = result(machine, "decode", kernel, q, cache)
    error = 0 if found is None else relative(found, cache.attend(q))
    limit = FLOAT16 if kernel in tensor_cores.VERSIONS else FLOAT32
    return None if error <= limit else f"relative error {error:.1g}"


CHECKS = {"pack": check_pack, "dequant": check_dequant, "decode": check_decode}


def relative(x, exact):
    return np.linalg.norm(x - exact) / np.linalg.norm(exact)
