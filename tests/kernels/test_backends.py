"""Every backend gives what the reference gives, or says why it does not."""

import itertools

import numpy as np
import pytest
from agree import same_stored
from plain import attend, check_quantized, uneven

from kvq import kernels
from kvq.cache import KVCache
from kvq.kernels import BACKENDS, backend
from kvq.scheme import UNIFORM, Policy, Scheme, policy
from kvq.tensor import quantize

pytest.importorskip("numba")
FAST = BACKENDS["numba-cpu"]


def asymmetric(bits, per="token", group=None, dtype="float32"):
    return Scheme(bits, per, group, "asymmetric", dtype)


# --- which backend --------------------------------------------------------------------
def no_gpu(monkeypatch):
    for name in ("cupy", "numba-cuda"):
        monkeypatch.setattr(BACKENDS[name], "unavailable", lambda: "no GPU")


def test_auto_is_the_first_that_can_run(monkeypatch):
    no_gpu(monkeypatch)
    assert backend().name == "numba-cpu"
    monkeypatch.setattr(type(FAST), "unavailable", lambda self: "no compiler")
    assert backend("auto").name == "numpy"
    with pytest.raises(RuntimeError, match="'numba-cpu' cannot run here: no compiler"):
        backend("numba-cpu")
    monkeypatch.setattr(BACKENDS["cupy"], "unavailable", lambda: None)
    assert backend("auto").name == "cupy"


def test_auto_for_a_case_that_the_fastest_does_not_know(monkeypatch):
    no_gpu(monkeypatch)
    assert backend("auto", "pack", Scheme(4, levels="nf4")).name == "numpy"
    assert backend("auto", "pack", Scheme(4)).name == "numba-cpu"
    assert backend("auto", "decode", policy("rotated-int4")).name == "numpy"
    assert backend("auto", "decode", policy("kivi-2")).name == "numba-cpu"


def test_auto_is_never_a_simulator(monkeypatch):
    fast = ("cupy", "numba-cuda", "numba-cpu", "numpy")
    assert list(BACKENDS)[: len(fast)] == list(fast)
    for name in fast:
        monkeypatch.setattr(BACKENDS[name], "unavailable", lambda: "not here")
    with pytest.raises(StopIteration):
        backend("auto")


def test_an_unknown_backend_is_named_with_the_known_ones():
    names = "cupy, numba-cuda, numba-cpu, numpy, ptxsim-c, ptxsim-numba, gxx, numba-sim"
    with pytest.raises(ValueError, match=f"'cuda'; valid: auto, {names}"):
        backend("cuda")


def test_every_backend_has_its_name_and_the_reference_does_everything():
    assert all(b.name == name for name, b in BACKENDS.items())
    reference = BACKENDS["numpy"]
    assert reference.unavailable() is None
    assert reference.unsupported("pack", Scheme(4, levels="nf4")) is None


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (Scheme(4, levels="nf4"), "levels='nf4'; valid: symmetric, asymmetric"),
        (Scheme(4, "tensor"), "per='tensor'; valid: token, channel, head"),
        (Scheme(4, transform="hadamard"), "transform='hadamard'; valid: None"),
        (Scheme(4, rounding="half-away"), "rounding='half-away'; valid: half-even"),
        (Scheme(16, levels="float16"), "levels='float16'"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(scheme, reason):
    assert reason in FAST.unsupported("pack", scheme)
    x = uneven((2, 5, 16))
    with pytest.raises(ValueError, match="'numba-cpu': pack does not support"):
        FAST.pack(x, scheme)
    with pytest.raises(ValueError, match="dequant does not support"):
        FAST.dequant(quantize(x, scheme))


def test_decode_refuses_a_policy_for_its_values_too():
    nf4_values = Policy(Scheme(4), Scheme(4, levels="nf4"))
    cache = KVCache(nf4_values)
    cache.append(uneven((2, 5, 16)), uneven((2, 5, 12)))
    with pytest.raises(ValueError, match="decode does not support levels='nf4'"):
        FAST.decode(uneven((2, 1, 16)), cache)


# --- pack and dequant -----------------------------------------------------------------
@pytest.mark.parametrize("group", [None, 1, 7, 32])
@pytest.mark.parametrize("per", ["token", "channel", "head"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_and_dequant_give_what_the_reference_gives(bits, per, group):
    x = uneven((3, 37, 20))
    for levels in UNIFORM if bits > 1 else ("asymmetric",):
        scheme = Scheme(bits, per, group, levels)
        packed = FAST.pack(x, scheme)
        same_stored(packed, quantize(x, scheme))
        expected = packed.dequantize()
        np.testing.assert_array_max_ulp(FAST.dequant(packed), expected, maxulp=1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("per", ["token", "channel"])
def test_pack_holds_to_the_definition(bits, per):
    x = uneven((2, 37, 20))
    for levels in UNIFORM:
        check_quantized(x, FAST.pack(x, Scheme(bits, per, 7, levels)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "e8m0"])
def test_scales_in_every_format(dtype):
    x = uneven((2, 19, 12)) * 1e-3
    for levels in ("symmetric",) if dtype == "e8m0" else UNIFORM:
        scheme = Scheme(3, "channel", 5, levels, dtype)
        same_stored(FAST.pack(x, scheme), quantize(x, scheme))


def test_extremes_that_do_not_fit_the_stored_format():
    x = np.linspace(-1, 4, 64, dtype=np.float32).reshape(1, 2, 32)
    x[0, 1, 31] = -125_000.0
    scheme = asymmetric(4, group=16, dtype="float16")
    packed = FAST.pack(x, scheme)
    same_stored(packed, quantize(x, scheme))
    assert np.isfinite(FAST.dequant(packed)).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 0.01, 65504.0, -65504.0])
def test_constant_groups(value):
    x = np.full((2, 5, 9), value, np.float32)
    for bits in (2, 4, 8):
        scheme = asymmetric(bits, group=4, dtype="float16")
        back = FAST.dequant(FAST.pack(x, scheme))
        np.testing.assert_array_equal(back, np.float32(np.float16(value)))


def test_every_pair_of_nibbles_is_low_then_high():
    low, high = np.meshgrid(np.arange(16), np.arange(16))
    x = np.zeros((1, 256, 8), np.float32)
    x[0, :, 0], x[0, :, 1] = low.ravel(), high.ravel()
    x[0, :, 7] = 15  # s = 1, z = 0: codes are the numbers; the top nibble is 15
    packed = FAST.pack(x, asymmetric(4))
    assert packed.codes.dtype == np.uint8
    np.testing.assert_array_equal(packed.codes[0, :, 0], (low | high << 4).ravel())
    assert (packed.codes[0, :, 3] == 0xF0).all()
    words = packed.codes.view("<u4")
    np.testing.assert_array_equal(words[0, :, 0] >> 28, 15)
    np.testing.assert_array_equal(FAST.dequant(packed), x)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_appears_and_comes_back(bits):
    x = np.arange(2**bits, dtype=np.float32).reshape(1, 1, -1)
    packed = FAST.pack(x, asymmetric(bits))
    np.testing.assert_array_equal(packed.unpack()[0, 0], np.arange(2**bits))
    np.testing.assert_array_equal(FAST.dequant(packed), x)


def test_ties_go_to_the_even_code():
    x = np.array([0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 15], np.float32)
    assert FAST.pack(x, asymmetric(4)).unpack().ravel().tolist() == [
        *(0, 0, 2, 2, 4, 4, 6, 15)
    ]
    x = np.array([-7, -0.5, -1.5, -2.5, 0.5, 1.5, 2.5], np.float32)
    codes = FAST.pack(x, Scheme(4, group=None, scale_dtype="float32")).unpack()
    assert (codes.ravel().astype(int) - 8).tolist() == [-7, 0, -2, -2, 0, 2, 2]


@pytest.mark.parametrize("sign", [1, -1])
def test_nothing_beyond_the_tensor_enters_the_extremes(sign):
    rng = np.random.default_rng(0)
    x = sign * rng.uniform(10, 11, (2, 33, 96)).astype(np.float32)
    per_token = FAST.pack(x, asymmetric(4))
    step = (x.max(axis=-1) - x.min(axis=-1)) / 15
    np.testing.assert_allclose(per_token.scale[..., 0], step, rtol=1e-5)
    tail = FAST.pack(x, asymmetric(4, "channel", 32))
    assert (tail.scale[:, 1] == 0).all()  # token 32 is alone in its groups
    np.testing.assert_array_equal(FAST.dequant(tail)[:, 32], x[:, 32])


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 2047, 2048, 2049])
@pytest.mark.parametrize("columns", [32, 48, 96])
def test_sizes_around_a_block(rows, columns):
    x = uneven((1, rows, columns))
    for scheme in (asymmetric(3, "channel", 32), Scheme(4)):
        packed = FAST.pack(x, scheme)
        same_stored(packed, quantize(x, scheme))
        np.testing.assert_array_equal(FAST.dequant(packed), packed.dequantize())


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_nothing_is_written_beside_the_outputs(bits):
    from kvq.kernels.cpu.codes import decode_rows, encode_strips

    N, T, D, canary = 1, 33, 13, 0xA5
    width = -(-D * bits // 8)
    guarded = np.full(N * T * width + 64, canary, np.uint8)
    packed = guarded[32:-32].reshape(N, T, width)
    ones = np.ones((N, T, 1), np.float32)
    levels = 0, 2**bits - 1, 0
    x = np.tile(np.arange(D, dtype=np.float32) % 2**bits, (N, T, 1))
    encode_strips(0, T, x, ones, 0 * ones, 1, D, bits, levels, packed)
    out = np.full(N * T * D + 32, np.float32(canary))
    view = out[16:-16].reshape(N, T, D)
    decode_rows(0, T, packed, ones, 0 * ones, (1, D, 0, bits, 0), view)
    np.testing.assert_array_equal(view, x)
    for margin in (guarded[:32], guarded[-32:], out[:16], out[-16:]):
        assert (margin == canary).all()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("levels", ["asymmetric", "symmetric", "full-range"])
def test_numbers_near_a_tie_are_divided(bits, levels):
    # Halves of a step, one unit in the last place below and above: a product with the
    # rounded reciprocal of the scale takes some of them to the other side.
    scheme = Scheme(bits, "token", 64, levels)
    s = np.float32(np.float16(0.3)) * np.ones(64, np.float32)
    grid = (np.arange(64) % (2**bits - 1) + np.float32(0.5)) * s
    rows = [np.nextafter(grid, np.float32(way)) for way in (-np.inf, np.inf)]
    x = np.stack([grid, *rows, 3 * grid, grid / 7])[None]
    x[..., 0], x[..., 1] = 0, (2**bits - 1) * s[0]
    same_stored(FAST.pack(x, scheme), quantize(x, scheme))


@pytest.mark.parametrize("scheme", [asymmetric(4, "channel", 32), Scheme(4)])
def test_threads_change_no_byte(scheme):
    from kvq.kernels.cpu.codes import dequant, pack

    x = uneven((3, 2111, 64))
    one = pack(x, scheme, threads=1)
    for threads in (2, 5):
        same_stored(pack(x, scheme, threads=threads), one)
        np.testing.assert_array_equal(
            dequant(one, threads=threads), dequant(one, threads=1)
        )


@pytest.mark.parametrize("D", [1, 3, 63, 65, 100])
def test_odd_widths_take_whole_bytes_and_ignore_the_padding(D):
    x = uneven((2, 3, D))
    for bits, row in ((4, -(-D // 2)), (3, -(-3 * D // 8))):
        packed = FAST.pack(x, Scheme(bits))
        assert packed.codes.shape[-1] == row
        unused = 8 * row - bits * D
        assert (packed.codes[..., -1] >> (8 - unused) == 0).all() or not unused
        expected = FAST.dequant(packed)
        packed.codes[..., -1] |= np.uint8(0xFF << (8 - unused) & 0xFF)
        np.testing.assert_array_equal(FAST.dequant(packed), expected)


def test_part_of_a_tensor():
    from kvq.kernels.cpu.codes import dequant

    for scheme in (asymmetric(4, "channel", 8), Scheme(3, "token", 7)):
        qt = quantize(uneven((2, 37, 20)), scheme)
        for start, stop in ((0, 37), (5, 21), (8, 16), (36, None), (7, 7)):
            part = dequant(qt, start, stop)
            np.testing.assert_array_equal(part, qt.dequantize(start, stop))


@pytest.mark.parametrize("shape", [(20,), (5, 20), (2, 0, 20), (2, 3, 5, 20)])
def test_any_number_of_axes(shape):
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    scheme = asymmetric(4, "channel", 3)
    packed = FAST.pack(x, scheme)
    same_stored(packed, quantize(x, scheme))
    assert FAST.dequant(packed).shape == packed.shape


def test_any_layout_of_the_input_and_it_is_not_changed():
    x = uneven((4, 10, 24))
    x.flags.writeable = False
    inputs = [x[::-1], x[:, ::3], x.transpose(1, 0, 2), np.asfortranarray(x)]
    inputs += [x.astype(">f4"), x.astype(np.float16), x.astype(np.float64)]
    inputs.append(np.broadcast_to(x[:1], (3, 10, 24)))
    for view in inputs:
        before = view.copy()
        same_stored(FAST.pack(view, Scheme(4)), quantize(view, Scheme(4)))
        np.testing.assert_array_equal(view, before)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="nan"):
        FAST.pack(np.full((2, 3, 4), np.nan, np.float32), Scheme(4))
    with pytest.raises(TypeError, match="uint16"):
        FAST.pack(np.zeros((2, 3, 4), np.uint16), Scheme(4))
    with pytest.raises(ValueError, match="D >= 1"):
        FAST.pack(np.zeros((2, 3, 0), np.float32), Scheme(4))


# --- decode ---------------------------------------------------------------------------
def filled(name_or_policy, k, v):
    """A cache that got its tokens in pieces."""
    cache = KVCache(name_or_policy)
    for piece in (slice(0, 41), slice(41, 42), slice(42, None)):
        cache.append(k[..., piece, :], v[..., piece, :])
    return cache


def error(a, b):
    return np.linalg.norm(a - b)


def naive_float32(q, k, v):
    """Attention of the newest queries, every step in float32."""
    ratio, (T_q, T) = len(q) // len(k), (q.shape[1], k.shape[1])
    k, v = (np.repeat(x.astype(np.float32), ratio, axis=0) for x in (k, v))
    S = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(q.shape[-1]))
    S[:, np.arange(T) > np.arange(T - T_q, T)[:, None]] = -np.inf
    p = np.exp(S - S.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ v


@pytest.mark.parametrize(
    "name", ["fp16", "int8-token", "int4-token-g64", "int4-channel-g32", "kivi-2"]
)
def test_decode_within_twice_the_error_of_naive_float32(name):
    k, v, q = uneven((2, 301, 64)), uneven((2, 301, 48), 1), uneven((6, 3, 64), 2)
    cache = filled(name, k, v)
    k_hat, v_hat = cache.keys(), cache.values()
    exact = attend(q, k_hat, v_hat, causal=True)
    out = FAST.decode(q, cache)
    assert out.dtype == np.float32
    assert error(out, exact) <= 2 * error(naive_float32(q, k_hat, v_hat), exact)


POLICIES = {
    "sinks and window": Policy(
        asymmetric(4, "channel", 16), Scheme(3, group=8), residual=20, sinks=5
    ),
    "full-precision values": Policy(Scheme(2), Scheme(16, levels="float16")),
    "window only": Policy(Scheme(4), Scheme(4), residual=1000),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_piece_is_read(name, kv):
    k, v, q = kv
    cache = filled(POLICIES[name], k, v)
    expected = attend(q, cache.keys(), cache.values(), causal=True)
    np.testing.assert_allclose(FAST.decode(q, cache), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"scale": 0.3},
        {"softcap": 5.0},
        {"sink_logits": np.array([5.0, 0.0, -2.0, 1.0, 3.0, 0.5])},
        {"mask": np.arange(75) % 3 > 0},
        {"mask": np.arange(75) < 0},
        {"mask": np.random.default_rng(0).random((6, 5, 75)) < 0.5, "softcap": 2.0},
    ],
    ids=lambda options: " ".join(options),
)
def test_every_option_of_attend(options, kv):
    k, v, q = kv
    cache = filled("int4-channel-g32", k, v)
    names = {"sink_logits": "sinks", "mask": "mask"}
    plain = {"causal": True} | {names.get(n, n): x for n, x in options.items()}
    if "mask" in plain:
        plain["mask"] = np.broadcast_to(plain["mask"], (6, 5, 75))
    expected = attend(q, cache.keys(), cache.values(), **plain)
    out = FAST.decode(q, cache, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_tile_that_nobody_sees_comes_first():
    k, v, q = uneven((2, 301, 16)), uneven((2, 301, 12), 1), uneven((4, 1, 16), 2)
    cache = filled("int8-token", k, v)
    mask = np.arange(301) > 200  # tiles are 128 tokens
    expected = attend(q, cache.keys()[:, 201:], cache.values()[:, 201:])
    out = FAST.decode(q, cache, mask=mask)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("H_q", "H_kv"), [(28, 4), (56, 8), (24, 4), (40, 8), (9, 3), (8, 1), (3, 3)]
)
def test_any_number_of_query_heads_per_kv_head(H_q, H_kv):
    cache = filled("kivi-4", uneven((H_kv, 150, 24)), uneven((H_kv, 150, 20), 1))
    q = uneven((H_q, 1, 24), 2)
    expected = attend(q, cache.keys(), cache.values(), causal=True)
    np.testing.assert_allclose(FAST.decode(q, cache), expected, rtol=1e-4, atol=1e-5)


def test_a_query_head_reads_the_head_of_its_group():
    k = np.zeros((3, 9, 8), np.float32)
    for j, t in itertools.product(range(3), range(8)):
        k[j, t, t] = 40.0
    v = np.broadcast_to(np.arange(3.0, dtype=np.float32)[:, None, None], (3, 9, 4))
    cache = KVCache("int8-token")
    cache.append(k, v)
    out = FAST.decode(uneven((9, 2, 8)), cache)
    np.testing.assert_allclose(out, np.arange(9)[:, None, None] // 3 + 0 * out, 1e-3)
    tokens = np.broadcast_to(np.arange(9, dtype=np.float32)[:, None], (3, 9, 4))
    cache = KVCache(Policy(Scheme(8), Scheme(32, levels="float32")))
    cache.append(k, tokens)
    q = np.zeros((9, 1, 8), np.float32)
    q[np.arange(9), 0, np.arange(9) % 8] = 40.0  # head h asks for token h mod 8
    out = FAST.decode(q, cache)[:, 0, 0]
    np.testing.assert_allclose(out, np.arange(9) % 8, atol=1e-5)


def test_sequences_of_different_lengths():
    k, v, q = uneven((2, 2, 40, 16)), uneven((2, 2, 40, 12), 1), uneven((2, 6, 1, 16))
    cache = KVCache(asymmetric_policy := POLICIES["sinks and window"])
    mask = np.ones((2, 40), bool)
    mask[1, 23:] = False
    cache.append(k, v, mask)
    out = FAST.decode(q, cache)
    for b, T in ((0, 40), (1, 23)):
        alone = KVCache(asymmetric_policy)
        alone.append(k[b, :, :T], v[b, :, :T])
        np.testing.assert_array_equal(out[b], FAST.decode(q[b], alone))
        expected = attend(q[b], alone.keys(), alone.values(), causal=True)
        np.testing.assert_allclose(out[b], expected, rtol=1e-5, atol=1e-6)


def test_a_latent_cache_and_an_empty_one():
    latent = uneven((1, 70, 36))
    cache = KVCache(Policy(Scheme(4, "token", 16), None), value_dim=28)
    cache.append(latent)
    q = uneven((4, 3, 36), 1)
    expected = attend(q, cache.keys(), cache.keys()[..., :28], causal=True)
    np.testing.assert_allclose(FAST.decode(q, cache), expected, rtol=1e-5, atol=1e-6)
    cache.crop(0)
    np.testing.assert_array_equal(FAST.decode(q, cache), np.zeros((4, 3, 28)))


def test_decode_refuses_queries_that_do_not_fit(kv):
    k, v, q = kv
    cache = filled("kivi-4", k, v)
    with pytest.raises(
        ValueError, match=r"H_q a multiple of 2 \(KV heads\) and D = 16"
    ):
        FAST.decode(q[:5], cache)
    with pytest.raises(ValueError, match="D = 16"):
        FAST.decode(q[..., :8], cache)
    with pytest.raises(ValueError, match="append first"):
        FAST.decode(q, KVCache("kivi-4"))
    with pytest.raises(TypeError, match="expected bool"):
        FAST.decode(q, cache, mask=np.ones(75))


def test_the_numpy_backend_is_the_reference(kv):
    k, v, q = kv
    reference = BACKENDS["numpy"]
    packed = reference.pack(k, Scheme(4))
    same_stored(packed, quantize(k, Scheme(4)))
    np.testing.assert_array_equal(reference.dequant(packed), packed.dequantize())
    cache = filled("kivi-4", k, v)
    out = reference.decode(q, cache, softcap=3.0)
    np.testing.assert_array_equal(out, cache.attend(q, softcap=3.0))


def test_a_name_that_the_package_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kernels.nothing  # noqa: B018
