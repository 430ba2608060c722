"""pack v3: pages of keys and values, bit for bit those of the reference."""

import functools

import numpy as np
import pytest

from kvq.kernels import ptxsim
from kvq.kernels.launch import nvrtc
from kvq.kernels.pages import PageLayout
from kvq.scheme import FP16, Scheme
from kvq.tensor import quantize

pytestmark = pytest.mark.skipif(
    nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable())
)
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
    "full precision": (FP16, FP16, 64, 70),
}
B, H = 2, 3


def constants(key, value, D):
    per_channel = key.per == "channel"
    return {
        "HEAD_DIM": D,
        "KEY_BITS": key.bits,
        "KEY_GROUP": key.group if per_channel else min(key.group or D, D),
        "KEY_PER_CHANNEL": int(per_channel),
        "KEY_ASYMMETRIC": int(key.has_zero),
        "VALUE_BITS": value.bits,
        "VALUE_GROUP": min(value.group or D, D),
        "VALUE_ASYMMETRIC": int(value.has_zero),
        "X": "__half",
    }


@functools.cache
def kernel(key, value, D):
    text = nvrtc.compile_ptx("pack/v3_pages", constants(key, value, D))
    return ptxsim.Module(text).kernel("pack_v3")


def run(key, value, D, k, v):
    """(pages (B, H, P, words), largest (B, H, 2)); the pages lie in random order."""
    layout, T = PageLayout(key, value, D), k.shape[-2]
    P = -(-T // layout.tokens)
    table = np.random.default_rng(1).permutation(B * P).astype(np.int32)
    pages = np.full(B * P * H * layout.words, 0xFFFFFFFF, np.uint32)
    largest = np.zeros(B * H * 2, np.float32)
    sizes = (np.int32(H), np.int32(T), np.int32(P))
    args = [k.reshape(-1), v.reshape(-1), pages, table, largest, *sizes]
    kernel(key, value, D).launch(B * H * P, 96, args)
    pages = pages.reshape(B * P, H, -1)[table.reshape(B, P)]
    return pages.swapaxes(1, 2), largest.reshape(B, H, 2)


def expected(x, scheme, page):
    """(codes, scale, zero) of whole pages, by the reference."""
    if scheme.full_precision:
        return padded(x, page), None, None
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


@pytest.mark.parametrize("name", CASES)
def test_pages_are_those_of_the_reference(name):
    key, value, D, T = CASES[name]
    k, v = np.random.default_rng(0).standard_normal((2, B, H, T, D)).astype(np.float16)
    k[..., 5] *= 100
    v[1, 2] = 2.5  # constant groups
    pages, largest = run(key, value, D, k, v)
    layout = PageLayout(key, value, D)
    sides = [expected(x, s, layout.tokens) for x, s in ((k, key), (v, value))]
    np.testing.assert_array_equal(pages, layout.to_pages(*sides))
    for i, (_, scale, _) in enumerate(sides):
        most = 0 if scale is None else scale.max(axis=(2, 3))
        np.testing.assert_array_equal(largest[..., i], most)
