"""Decode attention by integer dot products: the layout, the result, the threads."""

import numpy as np
import pytest

from kvq.cache import KVCache
from kvq.kernels import BACKENDS
from kvq.scheme import Policy, Scheme, policy

pytest.importorskip("numba")
from kvq.kernels.cpu import blocks, fast, simd

needs_vnni = pytest.mark.skipif(
    not simd.available(), reason="the CPU lacks AVX-512 VNNI"
)
# The price of bytes: queries and weights have 8 bits. Over all cases below the largest
# relative error was 0.0125; a fault of one code or one scale gives far more.
BYTE_ERROR = 0.02


def scheme(bits, per="token", group=None, levels="asymmetric"):
    return Scheme(bits, per, group, levels)


# --- the layout -----------------------------------------------------------------------
@pytest.mark.parametrize(("D", "piece"), [(128, 64), (96, 32), (64, 32)])
@pytest.mark.parametrize("bits", blocks.BITS)
def test_blocks_hold_every_code_once(bits, D, piece):
    codes = (
        np.random.default_rng(bits).integers(0, 2**bits, (2, 77, D)).astype(np.uint8)
    )
    for pack, unpack, width in (
        (blocks.pack_keys, blocks.unpack_keys, piece),
        (blocks.pack_values, blocks.unpack_values, 64 if D == 128 else 32),
    ):
        packed = pack(codes, bits, width)
        assert packed.nbytes == 2 * 128 * D * bits // 8  # two whole blocks of 64
        np.testing.assert_array_equal(unpack(packed, bits, width, 77, D), codes)


def test_where_a_key_and_a_value_stand():
    codes = np.zeros((1, 64, 64), np.uint8)
    codes[0, 5, 14] = 9  # 4 bits: channel 14 = 8 j + 4 c + b with j 1, c 1, b 2
    keys = blocks.pack_keys(codes, 4, 64).reshape(8, 64, 4)
    assert keys[1, 5, 2] == 9 << 4
    assert np.count_nonzero(keys) == 1
    values = blocks.pack_values(codes.transpose(0, 2, 1), 4, 64).reshape(8, 64, 4)
    assert values[1, 5, 2] == 9 << 4
    assert np.count_nonzero(values) == 1


# --- the result -----------------------------------------------------------------------
CASES = {
    "kivi-4": (Policy(scheme(4, "channel", 32), scheme(4, "token", 32), 32), 3, 64),
    "8 bits, symmetric": (
        Policy(scheme(8, "channel", 64, "symmetric"), scheme(8, "token", 64), 0, 3),
        4,
        128,
    ),
    "2 bits, groups of 128": (
        Policy(scheme(2, "channel", 128, "symmetric"), scheme(2, "token", 128)),
        5,
        256,
    ),
    "per token": (
        Policy(scheme(4, "token", 32, "symmetric"), scheme(2, "token", 32)),
        1,
        96,
    ),
    "whole tokens": (Policy(scheme(8), scheme(8, levels="symmetric")), 2, 128),
}


def filled(the_policy, D, lengths, H_kv=2, seed=0):
    """A cache of sequences of different lengths, one channel of the keys large."""
    rng = np.random.default_rng(seed)
    T, B = max(lengths), len(lengths)
    k, v = rng.standard_normal((2, B, H_kv, T, D)).astype(np.float16)
    k[..., 3] += 6
    mask = np.arange(T) >= T - np.array(lengths)[:, None]
    cache = KVCache(the_policy)
    cache.append(k, v, mask=mask)
    return cache


def queries(B, H_q, D, seed=1):
    return np.random.default_rng(seed).standard_normal((B, H_q, 1, D), np.float32)


def relative_error(out, expected):
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


@needs_vnni
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_reference_but_for_the_bytes(name):
    the_policy, ratio, D = CASES[name]
    for lengths in ((1, 65, 200), (64, 7, 333)):
        cache = filled(the_policy, D, lengths)
        q = queries(3, 2 * ratio, D)
        for b, row in enumerate(fast.decode(q, cache)):
            assert relative_error(row, cache.attend(q)[b]) < BYTE_ERROR, (lengths, b)


@needs_vnni
def test_each_query_head_reads_the_keys_and_values_of_its_group():
    the_policy, D = CASES["whole tokens"][0], 64
    v = np.broadcast_to(np.arange(3.0)[:, None, None], (3, 70, D)).astype(np.float16)
    cache = KVCache(the_policy)
    cache.append(np.zeros_like(v), v)
    out = fast.decode(queries(1, 9, D)[0], cache)
    np.testing.assert_allclose(
        out, np.arange(9)[:, None, None] // 3 + 0 * out, atol=0.02
    )


@needs_vnni
def test_no_quantized_token_yet_is_exact():
    cache = filled(policy("kivi-4"), 64, (7, 100))
    q = queries(2, 6, 64)
    np.testing.assert_allclose(fast.decode(q, cache), cache.attend(q), atol=1e-6)


@needs_vnni
def test_soft_cap_and_sink_logits_reach_the_softmax():
    cache = filled(CASES["per token"][0], 96, (200,))
    q = queries(1, 2, 96)
    for options in ({"softcap": 2.0}, {"sink_logits": [5.0, -1.0]}, {"scale": 0.3}):
        expected = cache.attend(q, **options)
        assert relative_error(fast.decode(q, cache, **options), expected) < BYTE_ERROR
        assert relative_error(fast.decode(q, cache), expected) > 2 * BYTE_ERROR


@needs_vnni
def test_what_lies_past_a_sequence_is_never_read():
    cache = filled(CASES["kivi-4"][0], 64, (200, 90))
    q, prepared = queries(2, 6, 64), fast.prepare(cache)
    before = fast.decode(q, prepared)
    for side in (prepared.keys, prepared.values):
        T = side.scale.shape[1]
        tokens = T * 32 if side.per_channel else T
        for n, held in enumerate(prepared.tokens):
            groups = -(-held * T // tokens)
            side.scale[n, groups:] = side.zero[n, groups:] = 0x7E00  # NaN
            side.codes[n, -(-held // 64) :] = 0xFF
    np.testing.assert_array_equal(fast.decode(q, prepared), before)


@needs_vnni
def test_the_number_of_threads_changes_no_bit():
    cache = filled(CASES["kivi-4"][0], 64, (9000, 300))
    q, prepared = queries(2, 6, 64), fast.prepare(cache)
    one = fast.decode(q, prepared, threads=1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(fast.decode(q, prepared, threads=threads), one)


@needs_vnni
def test_a_prepared_cache_has_the_bytes_of_the_packed_one():
    cache = filled(CASES["whole tokens"][0], 128, (512,))
    assert fast.prepare(cache).nbytes == cache.nbytes


@needs_vnni
def test_the_backend_takes_it_when_it_is_asked_for():
    cache = filled(CASES["kivi-4"][0], 64, (200,))
    q, cpu = queries(1, 6, 64), BACKENDS["numba-cpu"]
    by_bytes = cpu.decode(q, cache, version="v4")
    np.testing.assert_array_equal(by_bytes, fast.decode(q, cache))
    exact = cpu.decode(q, cache)
    np.testing.assert_array_equal(cpu.decode(q, cache, version="v2"), exact)
    assert 0 < relative_error(by_bytes, exact) < BYTE_ERROR


# --- what it refuses ------------------------------------------------------------------
def test_a_cpu_without_the_instruction_says_so(monkeypatch):
    monkeypatch.setattr(simd, "available", lambda: False)
    assert fast.unavailable() == "the CPU lacks AVX-512 VNNI"
    cache = filled(CASES["kivi-4"][0], 64, (5,))
    with pytest.raises(RuntimeError, match="v4 cannot run here: the CPU lacks"):
        BACKENDS["numba-cpu"].decode(queries(1, 6, 64), cache, version="v4")


def test_an_unknown_version_and_a_mask_are_refused():
    cache, cpu = filled(CASES["kivi-4"][0], 64, (5,)), BACKENDS["numba-cpu"]
    with pytest.raises(ValueError, match="unknown version 'v9'; valid: v2, v4"):
        cpu.decode(queries(1, 6, 64), cache, version="v9")
    if simd.available():
        with pytest.raises(ValueError, match="v4 does not support a mask"):
            cpu.decode(queries(1, 6, 64), cache, version="v4", mask=np.ones(5, bool))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 3}, "key: bits=3; valid: 8, 4, 2"),
        ({"group": 16}, "key: group=16; valid: 32, 64, 128"),
        ({"levels": "nf4"}, "key: levels='nf4'; valid: symmetric, asymmetric"),
        ({"scale_dtype": "float32"}, "key: scale_dtype='float32'; valid: float16"),
    ],
)
def test_what_is_not_supported_is_named(change, reason):
    settings = {"bits": 4, "per": "channel", "group": 32, "levels": "asymmetric"}
    key = Scheme(**{**settings, **change})
    assert fast.unsupported(Policy(key, scheme(4))) == reason


def test_head_dimensions_must_fill_registers():
    assert fast.unsupported(CASES["kivi-4"][0], 80) == "D=80; valid: multiples of 32"
    with pytest.raises(ValueError, match="do not support D=80"):
        fast.prepare(filled(CASES["whole tokens"][0], 80, (5,)))


@needs_vnni
def test_queries_that_do_not_fit_are_refused():
    prepared = fast.prepare(filled(CASES["whole tokens"][0], 64, (5, 9)))
    for shape in ((2, 3, 1, 64), (1, 4, 1, 64), (2, 4, 2, 64), (2, 4, 1, 32)):
        with pytest.raises(ValueError, match="expected"):
            fast.decode(np.zeros(shape, np.float32), prepared)
