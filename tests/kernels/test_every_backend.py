"""One body of tests for every backend, and every version of every kernel.

A test runs with each version that knows its case; that others refuse it is tested on
its own. With KVQ_REQUIRE_BACKENDS="ptxsim-c gxx ..." a backend that cannot run fails.
"""

import os
import re

import numpy as np
import pytest
from agree import (
    check_decode,
    check_dequant,
    check_pack,
    filled,
    queries,
    read,
    same_stored,
)
from plain import attend, uneven

from kvq.cache import KVCache
from kvq.dtypes import numpy_dtype
from kvq.kernels import BACKENDS
from kvq.kernels.host import operation
from kvq.scheme import Policy, Scheme
from kvq.tensor import QuantizedTensor, quantize

REQUIRED = os.environ.get("KVQ_REQUIRE_BACKENDS", "").split()
SLOW = ("numba-sim",)  # a new process for each call: see `test_executors.py`
WITHOUT_VERSIONS = ("numpy", "numba-cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_runs_or_says_why_not(name):
    reason = BACKENDS[name].unavailable()
    if reason:
        assert "\n" not in reason
        assert name not in REQUIRED, f"{name} is required here: {reason}"
        pytest.skip(reason)


class Runner:
    """One operation of one backend by one version: called as the operation is."""

    def __init__(self, op, backend, version):
        self.op, self.backend, self.version = op, backend, version
        self.options = {"version": version} if version else {}

    def __str__(self):
        return "-".join(filter(None, [self.backend.name, self.version]))

    def __call__(self, *inputs, **options):
        return getattr(self.backend, self.op)(*inputs, **self.options, **options)

    def unknown(self, case, D):
        """None, or why the version does not know this Scheme or Policy."""
        if self.version is None:
            return self.backend.unsupported(self.op, case)
        return operation(self.op).unsupported(case, self.version, D)


def runners(op):
    """Every backend that can run here with every version of `op`."""
    return [
        Runner(op, b, version)
        for name, b in BACKENDS.items()
        if name not in SLOW and not b.unavailable()
        for version in ([None] if name in WITHOUT_VERSIONS else operation(op).VERSIONS)
    ]


RUNNERS = {op: runners(op) for op in ("pack", "dequant", "decode")}


def every(op):
    """Run a test with each of them, as its argument called like the operation."""
    return pytest.mark.parametrize(op, RUNNERS[op], ids=str)


def every_case(op, cases):
    """Likewise with those cases, {name: (Scheme or Policy, D, ...)}, that it knows."""
    known = [
        pytest.param(run, case, id=f"{run}: {name}")
        for run in RUNNERS[op]
        for name, case in cases.items()
        if run.unknown(*case[:2]) is None
    ]
    return pytest.mark.parametrize((op, "case"), known)


def asymmetric(bits, per="token", group=None, dtype="float16"):
    return Scheme(bits, per, group, "asymmetric", dtype)


def symmetric(bits, per="token", group=None, dtype="float16"):
    return Scheme(bits, per, group, "symmetric", dtype)


# --- the three classes of agreement ---------------------------------------------------
SCHEMES = [  # (scheme, D, H, T): the first nine are for v1 alone
    (asymmetric(1, "token", 7, "float32"), 20, 3, 37),
    (symmetric(2, "channel", 32), 20, 3, 37),
    (asymmetric(3, "head"), 21, 3, 37),
    (symmetric(3, "token", None, "float32"), 33, 3, 37),
    (asymmetric(4, "channel", 7, "float32"), 20, 3, 37),
    (symmetric(5, "token", 1), 13, 2, 19),
    (symmetric(6, "head", 5, "float32"), 20, 3, 37),
    (asymmetric(7, "channel"), 20, 3, 37),
    (asymmetric(8, "token", 7), 20, 3, 37),
    (asymmetric(4, "token", 64), 128, 2, 37),
    (asymmetric(4, "channel", 32), 128, 3, 75),
    (asymmetric(8, "token", 64), 128, 3, 37),
    (asymmetric(8, "channel", 32), 64, 2, 33),
    (asymmetric(3, "token", 64), 128, 2, 37),
    (asymmetric(3, "channel", 32), 64, 1, 65),
    (asymmetric(2, "token", 64), 128, 2, 37),
    (asymmetric(2, "channel", 32), 128, 2, 70),
    (symmetric(4, "token", 32, "float32"), 80, 2, 19),
    (symmetric(3, "channel", 64), 96, 2, 70),
    (symmetric(8, "token"), 256, 2, 5),
    (Scheme(4, "token", 16, "full-range"), 20, 2, 9),
    (Scheme(3, "channel", 8, "signed-extreme"), 20, 2, 19),
]
SCHEMES = {
    f"{s.bits} {s.per} {s.group} {s.levels} {s.scale_dtype} {D}": (s, D, H, T)
    for s, D, H, T in SCHEMES
}


@every_case("pack", SCHEMES)
def test_codes_scales_and_zeros_are_exact(pack, case):
    scheme, D, H, T = case
    check_pack(pack, uneven((H, T, D), dtype=np.dtype(scheme.scale_dtype)), scheme)


@every_case("dequant", SCHEMES)
def test_values_are_within_one_unit_in_the_last_place(dequant, case):
    scheme, D, H, T = case
    check_dequant(dequant, quantize(uneven((H, T, D)), scheme))


# Most tests use these: TOKEN with D = 128, the others with D = 64 and three query heads
# per KV head, all in float16. Their PTX is committed, so that nothing must be compiled.
TOKEN = asymmetric(4, "token", 64)
CHANNEL = asymmetric(4, "channel", 32)
KIVI = Policy(CHANNEL, asymmetric(4, "token", 32), residual=32)
BITS = {
    bits: Policy(asymmetric(bits, "channel", 32), asymmetric(bits, "token", 32), 32)
    for bits in (2, 3, 4, 8)
}
BITS[16] = KVCache("bf16").policy


def kivi(B, H_kv, T, lengths=None, policy=KIVI):
    return filled(policy, (B, H_kv, T, 64), lengths, np.float16)


def half(B, H_q, D=64):
    return queries(B, H_q, D, dtype=np.float16)


CACHES = {  # (policy, D, B, H_q, H_kv, T, tokens of each sequence)
    "kivi": (KIVI, 128, 2, 8, 2, 203, [203, 130]),
    "3 bits per token": (
        Policy(asymmetric(3, "token", 64), asymmetric(3, "token", 64)),
        *(128, 1, 8, 2, 150, None),
    ),
    "sinks and window": (
        Policy(symmetric(8), asymmetric(2, "token", 32), residual=20, sinks=3),
        *(80, 2, 3, 3, 77, [9, 77]),
    ),
    "MQA": (
        Policy(symmetric(2, "channel", 32), symmetric(8, "token", 64), residual=32),
        *(96, 1, 17, 1, 140, None),
    ),
    "groups of v1": (
        Policy(asymmetric(5, "head", 16), symmetric(6, "channel", 16)),
        *(20, 2, 6, 2, 70, [31, 70]),
    ),
    "float16": (KVCache("fp16").policy, 256, 1, 8, 1, 45, None),
}


@every_case("decode", CACHES)
def test_attention_is_within_twice_the_error_of_naive_float32(decode, case):
    policy, D, B, H_q, H_kv, T, lengths = case
    dtype = np.float32 if D in (20, 80) else np.float16
    cache = filled(policy, (B, H_kv, T, D), lengths, dtype)
    check_decode(decode, queries(B, H_q, D, dtype=dtype), cache)


OPTIONS = {
    "scale": {"scale": 0.3},
    "soft cap": {"softcap": 5.0},
    "sink logits": {"sink_logits": [5, 0.0, -2, 1, 3, -1]},
    "all": {"scale": 0.2, "softcap": 3.0, "sink_logits": [1, 0.0, 3, -1, 2, 5]},
}


@pytest.mark.parametrize("name", OPTIONS)
@every("decode")
def test_every_option_of_attention(decode, name):
    check_decode(decode, half(1, 6), kivi(1, 2, 110), **OPTIONS[name])


# --- what is refused ------------------------------------------------------------------
REFUSED = {
    "nf4": Scheme(4, levels="nf4"),
    "tensor": Scheme(4, "tensor"),
    "hadamard": Scheme(4, transform="hadamard"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", {r.backend.name for r in RUNNERS["pack"]})
def test_a_case_that_no_version_knows_is_refused_with_the_reason(backend, name):
    b, scheme = BACKENDS[backend], REFUSED[name]
    x = uneven((2, 5, 64))
    cache = KVCache(Policy(Scheme(4), scheme) if name != "tensor" else KIVI)
    cache.append(x, x)
    reason = b.unsupported("pack", scheme)
    if backend == "numpy":
        assert reason is None
        return
    assert "; valid: " in reason
    with pytest.raises(ValueError, match=re.escape(f"{backend!r}: pack does not supp")):
        b.pack(x, scheme)
    with pytest.raises(ValueError, match="dequant does not support"):
        b.dequant(quantize(x, scheme))
    if name != "tensor":
        with pytest.raises(ValueError, match="decode does not support"):
            b.decode(half(1, 2), cache)


@every("pack")
def test_a_version_refuses_a_shape_that_it_is_not_built_for(pack):
    if pack.unknown(Scheme(4, "token", 32), 72):
        with pytest.raises(ValueError, match="D=72; valid: 64, 80"):
            pack(uneven((2, 5, 72)), Scheme(4, "token", 32))
    else:
        check_pack(pack, uneven((2, 5, 72)), Scheme(4, "token", 32))


# --- packing --------------------------------------------------------------------------
@every_case("pack", {b: (asymmetric(b, "token", None), 2**b) for b in range(1, 9)})
def test_every_code_appears_and_comes_back(pack, case):
    scheme, D = case
    x = np.arange(D, dtype=np.float32).reshape(1, 1, D)
    packed = check_pack(pack, x, scheme)
    np.testing.assert_array_equal(packed.unpack()[0, 0], np.arange(D))


@every("dequant")
def test_every_pair_of_nibbles_is_read_low_then_high(dequant):
    low, high = np.meshgrid(np.arange(16), np.arange(16))
    x = np.zeros((1, 256, 128), np.float32)
    x[0, :, 0], x[0, :, 1] = low.ravel(), high.ravel()
    x[0, :, 63] = x[0, :, 127] = 15  # s = 1, z = 0, and the top nibble of a word is 15
    np.testing.assert_array_equal(dequant(quantize(x, TOKEN)), x)


ROWS = {
    f"{rows} x {D}": (TOKEN, D, rows)
    for D in (48, 128)
    for rows in (1, 2, 31, 32, 33, 257)
}


@every_case("pack", ROWS)
def test_pack_at_any_number_of_rows(pack, case):
    scheme, D, rows = case
    check_pack(pack, uneven((1, rows, D), dtype=np.float16), scheme)


@every_case("dequant", ROWS)
def test_dequant_at_any_number_of_rows(dequant, case):
    scheme, D, rows = case
    check_dequant(dequant, quantize(uneven((1, rows, D)), scheme))


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 7, 8, 9])
@every("pack")
def test_any_number_of_groups_per_channel(pack, groups):
    check_pack(pack, uneven((1, 32 * groups - 1, 64), dtype=np.float16), CHANNEL)


# --- head dimensions ------------------------------------------------------------------
ODD = {
    f"{bits} bits, D={D}": (symmetric(bits, "token", 64), D)
    for bits, D in ((4, 1), (3, 3), (4, 63), (3, 65), (8, 65), (5, 100))
}


@every_case("pack", ODD)
def test_odd_widths_take_whole_bytes(pack, case):
    scheme, D = case
    packed = check_pack(pack, uneven((2, 3, D)), scheme)
    assert packed.codes.shape[-1] == -(-D * scheme.bits // 8)


@every_case("dequant", ODD)
def test_padding_bits_are_not_read(dequant, case):
    scheme, D = case
    qt = quantize(uneven((2, 3, D)), scheme)
    expected = dequant(qt)
    unused = -D * scheme.bits % 8
    qt.codes[..., -1] |= np.uint8(0xFF << (8 - unused) & 0xFF)
    np.testing.assert_array_equal(dequant(qt), expected)


@pytest.mark.parametrize("sign", [1, -1])
@every("pack")
def test_nothing_beyond_the_tensor_enters_the_extremes(pack, sign):
    rng = np.random.default_rng(0)
    x = sign * rng.uniform(10, 11, (2, 33, 96)).astype(np.float32)
    tokens = pack(x, asymmetric(4, "token", 64, "float32"))
    step = (x.max(axis=-1) - x.min(axis=-1)) / 15
    assert (tokens.scale.max(axis=-1) <= step * 1.00001).all()
    tail = pack(x, asymmetric(4, "channel", 32))
    assert (tail.scale[:, 1] == 0).all()  # token 32 is alone in its groups


@every("pack")
def test_constant_groups_zeros_and_extremes_that_do_not_fit(pack):
    x = uneven((1, 6, 80))
    for t, value in enumerate((0.0, -0.0, 0.01, 65504.0, -65504.0)):
        x[0, t] = value
    x[0, 5] = np.linspace(-125_000, 4, 80)
    packed = check_pack(pack, x, asymmetric(3, "token", 32))
    assert all(np.isfinite(a).all() for a in (packed.scale, packed.zero))


@every("pack")
def test_scales_too_small_for_their_format(pack):
    for factor, dtype in ((1e-7, "float16"), (1e-41, "float32")):
        check_pack(
            pack, uneven((1, 3, 64)) * np.float32(factor), symmetric(8, dtype=dtype)
        )


@every("pack")
def test_ties_go_to_the_even_code(pack):
    x = np.zeros((1, 1, 128), np.float32)
    x[0, 0, :8] = 0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 15
    codes = pack(x.astype(np.float16), TOKEN).unpack()[0, 0, :8]
    assert codes.tolist() == [0, 0, 2, 2, 4, 4, 6, 15]


# --- numbers that are not numbers -----------------------------------------------------
@every("pack")
def test_numbers_that_are_not_finite_are_refused(pack):
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match=str(bad)):
            pack(np.full((2, 3, 64), bad, np.float32), Scheme(4))


def poisoned(prepared):
    """The same with NaN, and codes of all bits, in every place that holds no token."""
    for side in (prepared.k, prepared.v):
        gt = side.group[0]
        for b, (coded, exact) in enumerate(prepared.lengths):
            side.codes[b, :, coded:] = 0xFFFFFFFF
            side.exact[b, :, exact:] = np.nan
            for a in (side.scale, side.zero):
                if a is not None:
                    a[b, :, -(-coded // gt) :] = np.nan
    return prepared


@every("decode")
def test_places_that_hold_no_token_are_not_read(decode):
    if decode.version is None:
        pytest.skip("reads the cache itself, which has no such places")
    q, cache = half(4, 3), kivi(4, 1, 100, [100, 5, 0, 65])
    clean = decode.backend.prepare(cache, decode.version)
    dirty = poisoned(decode.backend.prepare(cache, decode.version))
    out = decode(q, dirty)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out, decode(q, clean))


# --- grouped-query attention ----------------------------------------------------------
RATIOS = ((28, 4), (56, 8), (24, 4), (40, 8))  # 1, 3, 4, 8 and 17 are in `CACHES`


def compiled_for_each(run):
    """Where each ratio is a compilation of several seconds, one will do."""
    return str(run) == "ptxsim-numba-v3"


@pytest.mark.parametrize(
    ("decode", "H_q", "H_kv"),
    [
        pytest.param(run, *heads, id=f"{run}-{heads[0]}-{heads[1]}")
        for run in RUNNERS["decode"]
        for heads in (RATIOS[:1] if compiled_for_each(run) else RATIOS)
    ],
)
def test_any_number_of_query_heads_per_kv_head(decode, H_q, H_kv):
    check_decode(decode, half(1, H_q), kivi(1, H_kv, 70))


@every("decode")
def test_a_query_head_reads_the_head_of_its_group(decode):
    k, v = np.zeros((2, 3, 9, 64), np.float16)
    for j in range(3):
        k[j, np.arange(8), np.arange(8)] = 40  # token t answers to channel t
    v[..., 0], v[..., 1] = np.arange(3)[:, None], np.arange(9)
    v[..., 63] = 255  # s = 1, z = 0
    cache = KVCache(Policy(BITS[8].key, BITS[8].value))
    cache.append(k, v)
    q = np.zeros((9, 1, 64), np.float16)
    q[np.arange(9), 0, np.arange(9) % 8] = 40  # head h asks for token h mod 8
    out = decode(q, cache)[:, 0]
    np.testing.assert_allclose(out[:, 0], np.arange(9) // 3, atol=1e-5)
    np.testing.assert_allclose(out[:, 1], np.arange(9) % 8, atol=1e-5)


# --- sink logits ----------------------------------------------------------------------
@pytest.mark.parametrize("bits", BITS)
@every("decode")
def test_a_sink_logit_takes_its_share_at_every_width(decode, bits):
    v = uneven((1, 64, 64), dtype=np.float16)
    cache = KVCache(BITS[bits])
    cache.append(np.zeros_like(v), v)
    out = decode(half(1, 3)[0], cache, sink_logits=np.array([8.0, 0.0, -np.inf]))
    total = read(cache, 0)[1].astype(np.float64).sum(axis=1)
    shares = 1 / (64 + np.exp([8.0, 0.0, -np.inf]))
    np.testing.assert_allclose(out[:, 0], shares[:, None] * total, rtol=1e-5, atol=1e-5)


# --- nothing to attend to -------------------------------------------------------------
@every("decode")
def test_a_sequence_without_tokens_gives_zeros(decode):
    q, cache = half(2, 6), kivi(2, 2, 70, [0, 70])
    assert (check_decode(decode, q, cache)[0] == 0).all()
    cache.crop(0)
    for options in ({}, {"sink_logits": np.ones(6)}):
        np.testing.assert_array_equal(decode(q, cache, **options), 0 * q)


@pytest.mark.parametrize("shape", [(2, 0, 64), (0, 3, 64)])
@every("pack")
def test_pack_of_nothing(pack, shape):
    for scheme in (asymmetric(8, "channel", 32), CHANNEL):
        check_pack(pack, np.zeros(shape, np.float16), scheme)


@every("dequant")
def test_dequant_of_nothing(dequant):
    qt = quantize(np.zeros((2, 0, 64), np.float32), CHANNEL)
    assert dequant(qt).shape == (2, 0, 64)


# --- offsets and launch limits --------------------------------------------------------
@every("pack")
def test_seventy_thousand_heads(pack):
    D = 128 if pack.version == "v2" else 16
    check_pack(pack, uneven((70_000, 1, D), dtype=np.float16), TOKEN)


@every("dequant")
def test_dequant_of_seventy_thousand_heads(dequant):
    D = 128 if dequant.version == "v2" else 16
    check_dequant(dequant, quantize(uneven((70_000, 1, D)), TOKEN))


# --- types, layouts, side arrays ------------------------------------------------------
@every("pack")
def test_any_layout_of_the_input_and_it_is_not_changed(pack):
    x = uneven((4, 10, 128), dtype=np.float16)
    x.flags.writeable = False
    inputs = [x[::-1], x[:, ::3], x.transpose(1, 0, 2), np.asfortranarray(x)]
    inputs += [x.astype(">f2"), x.astype(">f4"), x.astype(np.float64)]
    inputs.append(np.broadcast_to(x[:1], (3, 10, 128)))
    for view in inputs:
        before = view.copy()
        same_stored(pack(view, TOKEN), quantize(view, TOKEN))
        np.testing.assert_array_equal(view, before)


@every("pack")
def test_bfloat16_is_read_as_what_it_is(pack):
    x = np.zeros((1, 1, 64), numpy_dtype("bfloat16"))
    x[0, 0, :3] = 0.1621, 188, 436
    packed = check_pack(pack, x, symmetric(8, "token", None, "float32"))
    assert abs(packed.dequantize()[0, 0, 2] - 436) < 2
    with pytest.raises(TypeError, match="uint16"):
        pack(x.view(np.uint16), symmetric(8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@every("dequant")
def test_scales_of_every_type_are_read_exactly(dequant, dtype):
    scheme = asymmetric(4, "token", 64, dtype)
    check_dequant(dequant, quantize(uneven((2, 5, 128)), scheme))


def strided(a):
    """The same numbers in every second place of a larger array."""
    if a is None:
        return None
    room = np.full((*a.shape[:-1], 2 * a.shape[-1]), 0x7F, np.uint8).astype(a.dtype)
    room[..., ::2] = a
    return room[..., ::2]


@every("dequant")
def test_codes_and_scales_of_any_strides(dequant):
    qt = quantize(uneven((2, 33, 64)), CHANNEL)
    spread = (strided(a) for a in (qt.codes, qt.scale, qt.zero))
    other = QuantizedTensor(qt.scheme, qt.shape, *spread)
    np.testing.assert_array_equal(dequant(other), dequant(qt))


@every("dequant")
def test_every_scale_and_every_zero_is_used(dequant):
    for scheme, D in ((TOKEN, 128), (CHANNEL, 64)):
        qt = quantize(uneven((3, 40, D)), scheme)
        qt.scale[...] = 1 + np.arange(qt.scale.size).reshape(qt.scale.shape) % 1021
        qt.zero[...] = np.arange(qt.zero.size).reshape(qt.zero.shape) % 1019
        check_dequant(dequant, qt)


@pytest.mark.parametrize("bits", BITS)
@every("decode")
def test_a_cache_in_pieces_cropped_and_reordered(decode, bits):
    q, cache = half(2, 6), kivi(2, 2, 120, [120, 75], BITS[bits])
    check_decode(decode, q, cache)
    cache.crop([98, 40])
    cache.reorder([1, 0])
    cache.append(
        uneven((2, 2, 3, 64), 5, np.float16), uneven((2, 2, 3, 64), 6, np.float16)
    )
    out = check_decode(decode, q, cache)
    expected = attend(q[1], *read(cache, 1))
    np.testing.assert_allclose(out[1], expected, rtol=1e-4, atol=1e-5)


@every("decode")
def test_a_cache_gathered_once_is_used_many_times(decode):
    if decode.version is None:
        pytest.skip("reads the cache itself")
    cache, b = kivi(2, 2, 70, [70, 31]), decode.backend
    prepared = b.prepare(cache, decode.version)
    assert prepared.version.name == decode.version
    q = half(2, 6)
    np.testing.assert_array_equal(decode(q, prepared), decode(q, cache))
    np.testing.assert_array_equal(b.decode(q, prepared), decode(q, cache))
    other = "v3" if decode.version == "v1" else "v1"
    with pytest.raises(ValueError, match=f"prepared for {decode.version}, in the"):
        b.decode(q, prepared, version=other)


@every("decode")
def test_a_single_sequence_needs_no_batch_axis(decode):
    q, cache = half(1, 6), kivi(1, 2, 45)
    np.testing.assert_array_equal(decode(q[0], cache), decode(q, cache)[0])


@every("decode")
def test_queries_that_do_not_fit_are_refused(decode):
    cache = kivi(2, 2, 45)
    with pytest.raises(ValueError, match=r"share 2 KV heads|a multiple of 2"):
        decode(half(2, 5), cache)
    with pytest.raises(ValueError, match="B = 2"):
        decode(half(3, 4), cache)
    with pytest.raises(ValueError, match=r"append first|valid"):
        decode(half(1, 4), KVCache(KIVI))
    with pytest.raises(TypeError, match="int64"):
        decode(np.ones((2, 4, 1, 64), np.int64), cache)


@every("decode")
def test_what_only_the_call_can_refuse(decode):
    if decode.version is None:
        pytest.skip("takes any number of queries, and masks")
    cache = kivi(1, 2, 45)
    with pytest.raises(ValueError, match="T_q=2; valid: 1"):
        decode(np.ones((1, 4, 2, 64), np.float32), cache)
    with pytest.raises(ValueError, match="mask"):
        decode(half(1, 4), cache, mask=np.ones(45, bool))
    with pytest.raises(ValueError, match=r"softcap=-1\.0"):
        decode(half(1, 4), cache, softcap=-1.0)
    with pytest.raises(ValueError, match="one per query head"):
        decode(half(1, 4), cache, sink_logits=[1.0])
    sliding = KVCache(KIVI, sliding_window=64)
    sliding.append(uneven((2, 5, 64)), uneven((2, 5, 64), 1))
    with pytest.raises(ValueError, match="sliding_window=64"):
        decode(half(1, 4), sliding)
