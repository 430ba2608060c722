"""Faults that people reported in systems like this one, each with its right values.

A docstring names the report as repository#number on GitHub. The inputs are adapted to
this package; where it allows what others refuse (groups that do not divide the head
dimension), the test holds it to what it documents.
"""

import copy
import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from plain import attend, check_packing, check_quantized, uneven

import kvq.cache
from kvq.attention import attention, empty_partial, merge, partial_attention
from kvq.cache import KVCache
from kvq.dtypes import numpy_dtype
from kvq.packing import pack, unpack
from kvq.quantizer import scale_and_zero
from kvq.scheme import PRESETS, Policy, Scheme
from kvq.tensor import quantize
from kvq.transforms import hadamard_matrix


def kivi(bits=2, R=32, G=32):
    """Keys per channel, values per token, a window of R tokens."""
    return Policy(
        Scheme(bits, "channel", G, "asymmetric"),
        Scheme(bits, "token", G, "asymmetric"),
        residual=R,
    )


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def asymmetric(bits, group, dtype="float16"):
    return Scheme(bits, "token", group, "asymmetric", dtype)


def layout(cache, row=0):
    """(quantized, window) tokens of a sequence."""
    return cache.rows[row][0].lengths[1:]


def stored(cache, row=0):
    """Bytes of every stored array of a sequence, chunks joined."""
    for stream in cache.rows[row]:
        yield stream.sinks.tobytes()
        yield stream.window.tobytes()
        for arrays in zip(*(c.arrays for c in stream.chunks), strict=True):
            yield np.concatenate(arrays, axis=-2).tobytes()


# --- degenerate groups ----------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_A01_a_constant_group_is_exact(bits):
    """dropbox/hqq#159: NaN zero-points and codes."""
    x = np.float32([[9, 9], [-9, -9]])
    t = quantize(x, asymmetric(bits, 2))
    assert np.isfinite(t.scale).all()
    assert np.isfinite(t.zero).all()
    np.testing.assert_array_equal(t.dequantize()[0], x)


@pytest.mark.parametrize("c", [0, -0.0, 1e-3, 0.01, -0.01, 1, 65504, -65504])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("levels", ["asymmetric", "symmetric", "full-range"])
def test_A02_constants_of_any_size_come_back(c, bits, levels):
    """openvinotoolkit/openvino#28326: an epsilon on the data, not on the range."""
    x = np.full((1, 3, 64), c, np.float32)
    with np.errstate(all="raise", under="ignore"):
        t = quantize(x, Scheme(bits, "token", 32, levels))
    check_quantized(x, t)
    assert len(np.unique(t.unpack())) == 1
    if levels == "asymmetric":
        ulp = float(np.spacing(np.float16(abs(c)))) if abs(c) < 65504 else 32.0
        assert np.abs(t.dequantize() - c).max() <= ulp


def test_A03_a_constant_and_an_almost_constant_group_need_no_special_case():
    """openvinotoolkit/openvino#34105: a constant that decodes to another one."""
    constant = np.full(32, 100, np.float16)
    almost = constant.copy()
    almost[5] = np.nextafter(np.float16(100), np.float16(101))
    for bits in (2, 4, 8):
        t = quantize(np.stack([constant, almost]), asymmetric(bits, 32))
        assert (t.dequantize()[0, 0] == 100).all()
        step = (float(almost[5]) - 100) / (2**bits - 1)
        error = np.abs(t.dequantize()[0, 1] - almost.astype(np.float32))
        assert error.max() <= step / 2 + 0.0625


def test_A04_a_constant_channel_leaves_its_neighbours_alone():
    """jy-yuan/KIVI quant/new_pack.py: 0/0 spoils the word that lanes share."""
    k = normal(1, 32, 8)
    scheme = Scheme(2, "channel", 32, "asymmetric")
    flat = k.copy()
    flat[..., 3] = 2.5
    a, b = quantize(k, scheme), quantize(flat, scheme)
    others = np.arange(8) != 3
    np.testing.assert_array_equal(a.unpack()[..., others], b.unpack()[..., others])
    np.testing.assert_array_equal(a.scale[..., others], b.scale[..., others])
    np.testing.assert_array_equal(a.codes[..., 1], b.codes[..., 1])  # channels 4..7
    np.testing.assert_array_equal(a.codes[..., 0] & 0x3F, b.codes[..., 0] & 0x3F)
    np.testing.assert_array_equal(b.dequantize()[..., 3], 2.5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_A05_an_all_zero_cache_attends_to_exactly_zero(bits):
    """ml-explore/mlx#1028: zeros over a scale of zero."""
    zeros = np.zeros((2, 64, 64), np.float32)
    for levels in ("asymmetric", "symmetric", "lloyd-max"):
        scheme = Scheme(bits, "token", 32, levels)
        cache = KVCache(Policy(scheme, scheme))
        with np.errstate(all="raise"):
            cache.append(zeros, zeros)
            out = cache.attend(normal(4, 3, 64))
        np.testing.assert_array_equal(out, np.zeros((4, 3, 64)))


# --- ranges ---------------------------------------------------------------------------
def test_A06_an_outlier_beyond_float16_is_clamped_before_the_codes():
    """vllm-project/vllm#53334: an infinite zero-point, or a clamp only at the store."""
    v = np.append(np.linspace(-1, 4, 127), -125000).astype(np.float32)
    t = quantize(v, asymmetric(4, 128))
    error = np.abs(t.dequantize()[0, 0] - v)
    assert float(t.zero[0, 0, 0]) == -65504
    assert error[:-1].max() <= (65504 + 4) / 15 / 2 * 1.01
    apart = quantize(v, asymmetric(4, 32))
    error = np.abs(apart.dequantize()[0, 0] - v).reshape(4, 32).max(axis=1)
    assert (error[:3] <= 0.05).all()
    assert error[3] == 125000 - 65504
    for dtype in ("float32", "bfloat16"):
        wide = quantize(v, asymmetric(4, 128, dtype)).dequantize()[0, 0]
        assert abs(wide[-1] + 125000) <= 125000 * 2**-8


def test_A07_large_half_precision_scores_are_finite():
    """NVIDIA/kvpress#250: sentinels and sums that overflow half precision."""
    q, k = (np.full((1, n, 128), 22, np.float16) for n in (2, 9))
    k[0, ::2] *= -1
    v = normal(1, 9, 128, dtype=np.float16)
    mask = np.ones((1, 2, 9), bool)
    mask[0, 0, 3:] = False
    assert abs(float(q[0, 0].astype(float) @ k[0, 0].astype(float))) > 6e4
    cache = KVCache("fp16")
    cache.append(k, v)
    out = cache.attend(q, mask=mask, causal=False)
    np.testing.assert_allclose(out, attend(q, k, v, mask=mask), rtol=2e-3)
    for stream in cache.rows[0]:
        assert all(np.abs(a.astype(float)).max(initial=0) <= 22 for a in stream.arrays)


# --- what was never written -----------------------------------------------------------
@pytest.mark.parametrize("n", [1, 5, 15, 16, 17, 33])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -65504.0])
def test_A08_unused_slots_of_a_block_may_hold_anything(n, garbage):
    """vllm-project/vllm#936: a probability of 0 times NaN is NaN."""
    T = -(-n // 16) * 16
    k, v, q = normal(2, T, 8), normal(2, T, 6, seed=1), normal(4, 1, 8, seed=2)
    seen = np.arange(T) < n
    k[:, n:] = v[:, n:] = garbage
    out = attention(q, k, v, mask=seen)
    k[:, n:] = v[:, n:] = 0
    np.testing.assert_array_equal(out, attention(q, k, v, mask=seen))
    np.testing.assert_allclose(out, attention(q, k[:, :n], v[:, :n]), rtol=1e-12)


def test_A09_memory_that_was_allocated_and_not_written_is_never_read(monkeypatch):
    """deepbeepmeep/Wan2GP#1628: an additive mask over what empty() returned."""
    k, v, q = normal(2, 40, 8), normal(2, 40, 8, seed=1), normal(4, 1, 8, seed=2)

    def outputs():
        cache = KVCache(kivi(4, R=5, G=4))
        for t in range(40):
            cache.append(k[:, t : t + 1], v[:, t : t + 1])
            yield cache.attend(q, tile=8)

    expected = list(outputs())

    def poisoned(shape, dtype=float, **_):
        bad = np.nan if np.dtype(dtype).kind == "f" else 0xFF
        return np.full(shape, bad, dtype)

    monkeypatch.setattr(np, "empty", poisoned)
    monkeypatch.setattr(
        np, "empty_like", lambda a, dtype=None: poisoned(a.shape, dtype or a.dtype)
    )
    for out, right in zip(outputs(), expected, strict=True):
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, right)


# --- zero-points and rounding ---------------------------------------------------------
def test_A10_groups_that_do_not_contain_zero_keep_their_step():
    """mit-han-lab/llm-awq#193: an integer zero-point clamped into the code range."""
    for x, bits, bound in [
        (np.arange(10.5, 14.5, 0.5), 4, 3.5 / 15 / 2),
        (-np.arange(10.5, 14.5, 0.5), 4, 3.5 / 15 / 2),
        (np.arange(-22.0, -14.0), 8, 0.014),
        (1000 + np.linspace(0, 1, 8), 4, 1 / 15 / 2 * 1.01),
        (-1001 + np.linspace(0, 1, 8), 4, 1 / 15 / 2 * 1.01),
    ]:
        t = quantize(x.astype(np.float32), asymmetric(bits, 8))
        assert np.abs(t.dequantize()[0, 0] - x).max() <= bound
        assert t.zero.dtype == np.float16


@pytest.mark.parametrize("c", [-50, -1, 0, 1, 50])
def test_A11_a_shifted_group_has_the_same_codes(c):
    """hatchetProject/QuEST#18: a zero-point that quantizing forgets."""
    x = np.random.default_rng(0).integers(-64, 65, (3, 32)).astype(np.float32) / 16
    a, b = (quantize(y, asymmetric(4, 32, "float32")) for y in (x, x + np.float32(c)))
    check_quantized(b.dequantize(), b)
    np.testing.assert_array_equal(a.scale, b.scale)
    ulps = 2 * np.spacing(np.float32(54))
    assert np.abs(b.dequantize() - (a.dequantize() + c)).max() <= ulps


def test_A12_ties_round_to_even():
    """blue-oil/blueoil#397: two sides that differ by one code at ties."""
    x = np.float32([0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 15])
    t = quantize(x, asymmetric(4, 8))
    assert float(t.scale[0, 0, 0]) == 1
    assert t.unpack()[0, 0].tolist() == [0, 0, 2, 2, 4, 4, 6, 15]
    x = np.float32([-0.5, -1.5, -2.5, 0.5, 1.5, 2.5, -7, 7])
    for rounding, integers in [
        ("half-even", [0, -2, -2, 0, 2, 2, -7, 7]),
        ("half-away", [-1, -2, -3, 1, 2, 3, -7, 7]),
    ]:
        t = quantize(x, Scheme(4, "token", 8, rounding=rounding))
        assert (t.unpack()[0, 0].astype(int) - 8).tolist() == integers


# --- head dimensions and groups -------------------------------------------------------
@pytest.mark.parametrize(("D", "G"), [(96, 64), (80, 32), (112, 64), (576, 128)])
def test_A13_a_group_that_does_not_divide_the_head_is_ragged(D, G):
    """Blaizzy/mlx-vlm#2061: a crash in the middle of a generation."""
    scheme = asymmetric(4, G)
    cache = KVCache(Policy(scheme, scheme))
    k = uneven((2, 9, D))
    cache.append(k, k)
    groups = -(-D // G)
    assert cache.nbytes == 2 * (2 * 9 * D // 2 + 2 * 9 * groups * 2 * 2)
    check_quantized(k, quantize(k, scheme))
    expected = attention(normal(4, 1, D), cache.keys(), cache.values())
    np.testing.assert_allclose(cache.attend(normal(4, 1, D)), expected, rtol=1e-10)


@pytest.mark.parametrize("D", [64, 72, 80, 96, 100, 112, 128, 192, 256, 576])
def test_A14_every_ragged_group_has_its_own_scale_and_bound(D):
    """ggml-org/llama.cpp#4425: blocks of 32 and heads of 80."""
    v = uneven((2, 5, D))
    for bits, levels in [(4, "asymmetric"), (3, "symmetric"), (4, "nf4")]:
        scheme = Scheme(bits, "token", 32, levels)
        t = quantize(v, scheme)
        assert t.scale.shape == (2, 5, -(-D // 32))
        numbers = 10 * -(-D // 32) * (2 if levels == "asymmetric" else 1)
        assert t.nbytes == 10 * -(-D * bits // 8) + 2 * numbers
        check_quantized(v, t)


@pytest.mark.parametrize("D", [80, 96, 576])
def test_A15_a_rotation_of_another_width_is_refused_at_the_entry(D):
    """vllm-project/vllm#56197: 'Engine core initialization failed'."""
    k = normal(2, 3, D)
    for name in ("turboquant-4", "rotated-int4"):
        with pytest.raises(ValueError, match=f"power of two, not {D}"):
            quantize(k, PRESETS[name].key)
        cache = KVCache(name)
        with pytest.raises(ValueError, match=f"power of two, not {D}"):
            cache.append(k, k)
        assert len(cache) == 0
    for width in (64, 128, 256):
        H = hadamard_matrix(width)
        assert np.abs(H @ H.T - np.eye(width)).max() < 1e-6


@pytest.mark.parametrize("low", [10, -11])
def test_A16_padding_lanes_take_no_part_in_the_range(low):
    """InternLM/lmdeploy#4849: lanes loaded as 0 in a tile of 128 over 96 channels."""
    x = np.random.default_rng(0).uniform(low, low + 1, (2, 33, 96)).astype(np.float32)
    whole = quantize(x, asymmetric(4, None))
    assert (whole.scale <= 0.0667).all()
    assert (whole.scale >= 0.055).all()
    tail = quantize(x, Scheme(4, "channel", 32, "asymmetric"))
    assert (tail.scale[:, 0] <= 0.0667).all()
    assert (tail.scale[:, 1] == 0).all()  # one token: its own minimum and maximum
    assert (tail.zero[:, 1] == x[:, 32].astype(np.float16)).all()
    ragged = quantize(x, asymmetric(4, 64))
    assert ragged.scale.shape == (2, 33, 2)
    assert (ragged.scale <= 0.0667).all()
    check_quantized(x, ragged)


# --- packing --------------------------------------------------------------------------
@pytest.mark.parametrize("bits", range(1, 9))
def test_A17_every_code_of_every_width_survives(bits):
    """vllm-project/vllm#38479: a parameter for the bits and a mask of 0x3."""
    codes = np.arange(2**bits, dtype=np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits, 2**bits), codes)
    x = np.linspace(-1, 1, 999, dtype=np.float32)
    used = quantize(x, asymmetric(bits, None)).unpack()
    assert np.unique(used).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", [0, 9, 2.5, True, "4"])
def test_A17_widths_that_are_not_offered_are_refused(bits):
    for call in (lambda: pack(np.zeros(8, np.uint8), bits), lambda: Scheme(bits)):
        with pytest.raises(ValueError, match="bits="):
            call()


def test_A18_nibbles_are_eight_bits_wide_and_unsigned():
    """numba/numba#4786: shifts that promote uint8."""
    low, high = np.meshgrid(*[np.arange(16, dtype=np.uint8)] * 2, indexing="ij")
    packed = pack(np.stack([low, high], axis=-1).reshape(-1, 2), 4)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed[:, 0], (low + 16 * high).reshape(-1))
    word = pack(np.full(8, 15, np.uint8), 4)
    assert word.view("<u4").item() == 0xFFFFFFFF
    assert unpack(word, 4, 8).tolist() == [15] * 8


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 2047, 2048, 2049])
@pytest.mark.parametrize("columns", [32, 48, 96])
def test_A19_no_size_is_special(rows, columns):
    """triton-lang/triton#4884: 2048 passes and 2049 fails."""
    codes = np.random.default_rng(0).integers(0, 16, (rows, columns), dtype=np.uint8)
    packed = pack(codes, 4)
    np.testing.assert_array_equal(packed, codes[:, ::2] | codes[:, 1::2] << 4)
    np.testing.assert_array_equal(unpack(packed, 4, columns), codes)
    by_tokens = pack(codes, 4, axis=0)
    assert by_tokens.shape == (-(-rows // 2), columns)
    np.testing.assert_array_equal(unpack(by_tokens, 4, rows, axis=0), codes)


@pytest.mark.parametrize("D", [1, 3, 63, 65, 100])
def test_A20_odd_rows_are_padded_to_whole_bytes(D):
    """vllm-project/vllm#39668: head_size // 2 truncates."""
    for bits in (3, 4):
        check_packing(pack, unpack, bits, D)
        t = quantize(normal(2, 5, D), Scheme(bits, "token", None))
        assert t.codes.shape == (2, 5, -(-D * bits // 8))
        assert t.scale.flags.aligned
        if D * bits % 8:
            assert (t.codes[..., -1] >> (D * bits % 8) == 0).all()


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 7, 8, 9, 63, 65])
def test_A21_metadata_has_one_entry_per_group_whatever_their_number(groups):
    """bitsandbytes-foundation/bitsandbytes#2042: a store of 8 at a time."""
    x = uneven((1, 3, 4 * groups - 1))
    t = quantize(x, asymmetric(4, 4))
    assert t.scale.shape == t.zero.shape == (1, 3, groups)
    check_quantized(x, t)


# --- the residual window --------------------------------------------------------------
@pytest.mark.parametrize("chunks", [[31, 1], [30, 5], [40], [33, 33], [1] * 100])
def test_A22_an_append_that_jumps_over_the_window_flushes(chunks):
    """jy-yuan/KIVI#40: a flush test of equality."""
    cache, T = KVCache(kivi()), 0
    for n in chunks:
        k = normal(2, n, 16, seed=T)
        cache.append(k, k)
        T += n
        quantized, window = layout(cache)
        assert quantized + window == T
        assert quantized % 32 == 0
        assert window < 32 + 32
        assert window >= min(T, 32)


def test_A23_blocks_are_whole_groups_and_lossy():
    """rajveer43/VeloxQuant-MLX#162: groups of one token, exact and billed as 2 bits."""
    k, v = normal(2, 200, 64), normal(2, 200, 64, seed=1)
    cache = KVCache(kivi())
    cache.append(k[:, :32], v[:, :32])
    for t in range(32, 200):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
    assert layout(cache) == (160, 40)
    error = np.abs(cache.keys() - k).max(axis=(0, 2))
    assert (error[:160] > 0.3).all()
    assert error[:160].max() < 1.2
    assert (error[160:] == 0).all()
    keys = cache.rows[0][0]
    assert sum(c.scale.shape[1] for c in keys.chunks) == 160 / 32


def test_A23_the_chunks_do_not_matter():
    """rajveer43/VeloxQuant-MLX#163."""
    k, v = normal(2, 200, 64), normal(2, 200, 64, seed=1)
    results = []
    for chunks in ([200], [1] * 200, [7] * 28 + [4]):
        cache, start = KVCache(kivi()), 0
        for n in chunks:
            cache.append(k[:, start : start + n], v[:, start : start + n])
            start += n
        results.append(list(stored(cache)))
    assert results[0] == results[1] == results[2]


def test_A24_the_newest_tokens_are_exact_after_a_prompt_and_after_every_step():
    """huggingface/transformers#34189: the prompt is quantized whole."""
    k, v = normal(2, 260, 16), normal(2, 260, 16, seed=1)
    cache = KVCache(kivi(R=64))
    cache.append(k[:, :200], v[:, :200])
    for t in range(200, 260):
        assert 64 <= layout(cache)[1] < 96
        for got, x in ((cache.keys(), k), (cache.values(), v)):
            np.testing.assert_array_equal(got[:, t - 64 : t], x[:, t - 64 : t])
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
    short = KVCache(kivi(R=64))
    short.append(k[:, :63], v[:, :63])
    np.testing.assert_array_equal(short.keys(), k[:, :63])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_A25_the_length_is_all_tokens_and_the_view_has_one_dtype(dtype, T):
    """NVIDIA/kvpress#27: one of two stores counted, two dtypes joined."""
    k = normal(2, T, 16).astype(numpy_dtype(dtype))
    cache = KVCache(kivi(R=32))
    cache.append(k, k)
    assert len(cache) == T
    assert cache.lengths == [T]
    for view in (cache.keys(), cache.values()):
        assert view.shape == (2, T, 16)
        assert view.dtype == numpy_dtype(dtype)


def test_A25_a_second_question_on_the_same_prompt_is_like_the_first():
    """NVIDIA/kvpress#27: a cache that cannot be used twice."""
    prompt, q = normal(2, 100, 16), normal(4, 1, 16, seed=9)
    cache = KVCache(kivi(R=32))
    cache.append(prompt, prompt)
    for seed in (1, 2):
        suffix = normal(2, 30, 16, seed=seed)
        again, fresh = copy.copy(cache), KVCache(kivi(R=32))
        fresh.append(prompt, prompt)
        for one in (again, fresh):
            one.append(suffix, suffix)
        np.testing.assert_array_equal(again.attend(q), fresh.attend(q))
    assert len(cache) == 100


# --- batches --------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["left", "right"])
def test_A26_padding_is_not_quantized_with_real_tokens(side):
    """jy-yuan/KIVI#18: 66.0 falls to 57.0 when a batch of one becomes two."""
    k, v, q = normal(2, 2, 100, 16), normal(2, 2, 100, 16, seed=1), normal(2, 4, 1, 16)
    mask = np.arange(100) < np.array([[40], [100]])
    if side == "left":
        mask = mask[:, ::-1]
    padded = np.where(mask[:, None, :, None], k, np.float32(50))
    batch = KVCache(kivi(R=8))
    batch.append(padded, v, mask=mask)
    out = batch.attend(q)
    for b in range(2):
        alone = KVCache(kivi(R=8))
        alone.append(k[b][:, mask[b]], v[b][:, mask[b]])
        assert list(stored(batch, b)) == list(stored(alone))
        np.testing.assert_array_equal(out[b], alone.attend(q[b]))


@pytest.mark.parametrize("H", [8, 1])
def test_A27_masks_keep_heads_and_rows_apart(H):
    """ml-explore/mlx-lm#1322: (2, 1, 1, 66) against (2, 8, 2, 1, 66)."""
    k, v, q = normal(2, H, 66, 8), normal(2, H, 66, 8, seed=1), normal(2, 16, 1, 8)
    cache = KVCache("fp32")
    cache.append(k, v)
    rng = np.random.default_rng(0)
    for shape in [(66,), (2, 1, 1, 66), (2, 16, 1, 66)]:
        mask = rng.random(shape) < 0.5
        full = np.broadcast_to(mask, (2, 16, 1, 66))
        out = cache.attend(q, mask=mask)
        assert out.shape == (2, 16, 1, 8)
        for b in range(2):
            right = attend(q[b], k[b], v[b], mask=full[b])
            np.testing.assert_allclose(out[b], right, rtol=1e-9, atol=1e-12)
    for shape in [(2, 66), (2, 1, 66), (2, H, 2, 1, 66)]:
        with pytest.raises(ValueError, match="does not broadcast"):
            cache.attend(q, mask=np.ones(shape, bool))


# --- rolling back ---------------------------------------------------------------------
def test_A28_reorder_crop_repeat_and_select_move_all_parts():
    """huggingface/transformers#45510: only the window is moved."""
    k, v = normal(3, 2, 100, 16), normal(3, 2, 100, 16, seed=1)
    full = KVCache(kivi())
    full.append(k, v)
    assert layout(full) == (64, 36)
    view = [(full.keys(b), full.values(b)) for b in range(3)]
    for order in ([2, 0, 0], [0, 0, 1, 1, 2, 2], [1]):
        cache = copy.copy(full)
        cache.reorder(order) if len(order) == 3 else cache.select(order)
        for row, b in enumerate(order):
            np.testing.assert_array_equal(cache.keys(row), view[b][0])
            np.testing.assert_array_equal(cache.values(row), view[b][1])
    for n in (99, 65, 64, 63, 33, 32, 31, 1, 0):
        cache = copy.copy(full)
        cache.crop(n)
        assert cache.lengths == [n] * 3
        for b in range(3):
            np.testing.assert_array_equal(cache.keys(b), view[b][0][:, :n])
            np.testing.assert_array_equal(cache.values(b), view[b][1][:, :n])


def test_A29_every_layer_is_trimmed_and_gives_its_bytes_back():
    """waybarrios/vllm-mlx#69: quantized layers are skipped."""
    k = normal(2, 253, 16)
    layers = [KVCache(name) for name in ("fp16", "kivi-2", "int4-token-g32-asym")]
    for layer in layers:
        layer.append(k, k)
        before = layer.nbytes
        layer.crop(17)
        assert len(layer) == 17
        fresh = KVCache(layer.policy)
        fresh.append(k[:, :17], k[:, :17])
        assert layer.nbytes == fresh.nbytes < before / 5


def drafted(T, then=()):
    """Rows of T tokens that accept 0, 2 and 4 of 4 drafts, and the same rows alone."""
    policy, accepted = kivi(R=8), [0, 2, 4]
    k, v = normal(3, 2, T + 5, 16), normal(3, 2, T + 5, 16, seed=1)
    cache = KVCache(policy)
    for part in (slice(T), slice(T, T + 4)):
        cache.append(k[:, :, part], v[:, :, part])
    cache.crop([T + n for n in accepted])
    for x in (k[:, :, T + 4 :], *then):
        cache.append(x, x)
    alone = [KVCache(policy) for _ in accepted]
    for b, n in enumerate(accepted):
        alone[b].append(k[b][:, : T + n], v[b][:, : T + n])
        for x in (k[:, :, T + 4 :], *then):
            alone[b].append(x[b], x[b])
    return cache, alone


@pytest.mark.parametrize("T", [35, 60, 63, 64])
def test_A30_rows_that_accept_different_numbers_of_drafts_stay_apart(T):
    """Blaizzy/mlx-vlm#1155: every row advances by the whole draft."""
    cache, alone = drafted(T)
    assert cache.lengths == [len(one) for one in alone]
    for b, one in enumerate(alone):
        assert list(stored(cache, b)) == list(stored(one))


@pytest.mark.parametrize("T", [68, 69, 70])
def test_A30_a_block_that_drafts_pushed_out_of_the_window_stays_quantized(T):
    """The documented price of a rollback; later tokens make the rows alike again."""
    cache, alone = drafted(T)
    assert cache.lengths == [len(one) for one in alone]
    assert layout(cache) == (64, T + 1 - 64)
    assert layout(alone[0]) == (32, T + 1 - 32)
    cache, alone = drafted(T, then=[normal(3, 2, 9, 16, seed=7)])
    for b, one in enumerate(alone):
        assert list(stored(cache, b)) == list(stored(one))


# --- latent attention and query groups ------------------------------------------------
def test_A33_a_latent_is_stored_once_and_serves_as_key_and_value():
    """ml-explore/mlx-lm#1558: D_k = 576, D_v = 512, one KV head."""
    latent, q = normal(1, 50, 576), normal(16, 3, 576, seed=1)
    policy = Policy(asymmetric(4, 64), None, residual=8)
    cache = KVCache(policy, value_dim=512)
    for start, stop in [(0, 41), (41, 42), (42, 50)]:
        cache.append(latent[:, start:stop])
    assert cache.nbytes == policy.key.nbytes(1, 42, 576) + 8 * 576 * 4
    np.testing.assert_array_equal(cache.values(), cache.keys()[..., :512])
    right = attend(q, cache.keys(), cache.keys()[..., :512], causal=True)
    np.testing.assert_allclose(cache.attend(q, tile=16), right, rtol=1e-9)
    assert np.abs(cache.keys() - latent).max() < 0.6


@pytest.mark.parametrize(
    ("H_q", "H"), [(28, 4), (56, 8), (24, 4), (40, 8), (9, 3), (8, 1), (3, 3)]
)
def test_A34_every_ratio_of_heads_decodes(H_q, H):
    """flashinfer-ai/flashinfer#996: ratios 5, 6 and 7."""
    k, v, q = normal(H, 37, 8), normal(H, 37, 8, seed=1), normal(H_q, 1, 8, seed=2)
    cache = KVCache(kivi(4, R=4, G=8))
    cache.append(k, v)
    right = attend(q, cache.keys(), cache.values())
    np.testing.assert_allclose(cache.attend(q, tile=10), right, rtol=1e-9, atol=1e-12)


def test_A35_query_head_h_reads_kv_head_h_over_the_ratio():
    """quantumaikr/quant.cpp#61: only one KV head per query head works."""
    T = 12
    k = np.broadcast_to(1e5 * np.eye(T, dtype=np.float32), (3, T, T))
    v = np.arange(3, dtype=np.float32)[:, None, None] + np.zeros((3, T, 4), np.float32)
    v = v + 10 * np.arange(T, dtype=np.float32)[:, None]
    cache = KVCache("fp32")
    cache.append(k, v)
    picks = [7, 2, 0, 11, 5, 5, 1, 10, 3]
    q = np.eye(T, dtype=np.float32)[picks][:, None]
    out = cache.attend(q, tile=5)
    assert out[:, 0, 0].tolist() == [10 * t + h // 3 for h, t in enumerate(picks)]


def test_A36_only_kv_heads_are_quantized_whatever_the_query_heads(monkeypatch):
    """microsoft/onnxruntime#31726: the cache is built once per query head."""
    calls = []

    def spy(x, scheme):
        calls.append(x.shape)
        return quantize(x, scheme)

    monkeypatch.setattr(kvq.cache, "quantize", spy)
    k, seen, stored_bytes = normal(4, 96, 16), [], []
    for H_q in (4, 8, 32):
        calls.clear()
        cache = KVCache(kivi(4, R=0))
        cache.append(k, k)
        cache.attend(normal(H_q, 1, 16))
        seen.append(list(calls))
        stored_bytes.append(cache.nbytes)
    assert seen[0] == seen[1] == seen[2] == [(4, 96, 16), (4, 96, 16)]
    assert len(set(stored_bytes)) == 1


# --- sinks, quality, empty attention --------------------------------------------------
@pytest.mark.parametrize("policy", ["fp16", "int8-token", "int4-token-g64", "kivi-2"])
def test_A37_options_reach_every_kind_of_storage(policy):
    """kekzl/imp#1345: the sink is dropped wherever the cache is quantized."""
    zeros, v = np.zeros((1, 4, 64), np.float32), np.full((1, 4, 64), 0.5, np.float32)
    cache = KVCache(policy)
    cache.append(zeros, v)
    p = 1 / (4 + np.exp(5))
    assert p == pytest.approx(0.00656, abs=5e-6)
    out = cache.attend(normal(1, 1, 64), sink_logits=[5.0])
    np.testing.assert_allclose(out, 4 * p * cache.values()[:, :1], rtol=1e-12)
    k, q = normal(1, 200, 64), normal(2, 3, 64, seed=1)
    cache = KVCache(policy)
    cache.append(k, k)
    options = {"scale": 0.3, "softcap": 2.0}
    right = attend(
        q, cache.keys(), cache.values(), causal=True, sinks=[1, -2], **options
    )
    out = cache.attend(q, sink_logits=[1, -2], tile=32, **options)
    np.testing.assert_allclose(out, right, rtol=1e-9, atol=1e-12)
    plain = cache.attend(q, **options)
    assert np.abs(plain - out).max() > 1e-3


def output_error(k, v, q, key, value):
    """Relative error of the attention output with keys and values stored so."""
    right = attention(q, k, v)
    k_hat, v_hat = (
        x if scheme is None else quantize(x, scheme).dequantize()
        for x, scheme in ((k, key), (v, value))
    )
    return np.linalg.norm(attention(q, k_hat, v_hat) - right) / np.linalg.norm(right)


def test_A38_keys_with_shifted_channels_need_scales_per_channel():
    """huggingface/transformers#35185: 98 of 120 become 0 of 120."""
    k, v, q = (
        normal(1, 256, 128),
        normal(1, 256, 128, seed=1),
        normal(1, 64, 128, seed=2),
    )
    k[..., 5] += 120
    k[..., 37] -= 90
    token_64, token_32, channel_32 = (
        output_error(k, v, q, Scheme(4, per, G, "asymmetric"), None)
        for per, G in [("token", 64), ("token", 32), ("channel", 32)]
    )
    assert channel_32 < 0.15
    assert token_64 / channel_32 > 10
    assert token_32 / channel_32 > 10


def test_A39_keys_need_more_bits_than_values():
    """ml-explore/mlx-lm#1550: K8V4 against K4V8 at the same bytes."""
    k, v, q = (
        3 * normal(1, 512, 128),
        normal(1, 512, 128, seed=1),
        normal(1, 64, 128, seed=2),
    )
    eight, four = asymmetric(8, 64), asymmetric(4, 64)
    assert output_error(k, v, q, eight, four) < 0.6 * output_error(k, v, q, four, eight)

    def bytes_per_token(key, value):  # 48 layers of 4 KV heads
        return 48 * (key.nbytes(4, 1, 128) + value.nbytes(4, 1, 128))

    assert bytes_per_token(eight, eight) == 52224
    assert bytes_per_token(eight, four) == bytes_per_token(four, eight) == 39936


def test_A40_nothing_to_see_is_zero_and_neutral():
    """flashinfer-ai/flashinfer#4484: an output that is left untouched, or NaN."""
    q, k, v = normal(4, 2, 8), normal(2, 6, 8), normal(2, 6, 8, seed=1)
    with np.errstate(all="raise"):
        out = attention(q, k[:, :0], v[:, :0])
        nothing = partial_attention(q, k[:, :0], v[:, :0])
        masked = partial_attention(q, k, v, keep=np.zeros((4, 2, 6), bool))
        state = partial_attention(q, k, v)
        for neutral in (nothing, masked, empty_partial((4, 2), 8)):
            assert (neutral.out == 0).all()
            assert (neutral.lse == -np.inf).all()
            for both in (merge(state, neutral), merge(neutral, state)):
                for name in ("m", "l", "o"):
                    np.testing.assert_array_equal(
                        getattr(both, name), getattr(state, name)
                    )
    np.testing.assert_array_equal(out, np.zeros((4, 2, 8)))


# --- claims ---------------------------------------------------------------------------
def reachable_arrays(thing):
    """Every array that `thing` keeps alive; a view counts as what it is a view of."""
    found, seen, stack = {}, set(), [thing]
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, (type, type(np), type(normal))):
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            base = x if x.base is None else x.base
            found[id(base)] = base
        stack.extend(gc.get_referents(x))
    return list(found.values())


def test_A61_nbytes_is_all_that_the_cache_keeps_alive():
    """jy-yuan/KIVI#17, rajveer43/VeloxQuant-MLX#164: compression on paper only."""
    k, v = normal(2, 2, 300, 64), normal(2, 2, 300, 64, seed=1)
    watched = [weakref.ref(k), weakref.ref(v)]
    expected = 2 * (2 * PRESETS["kivi-2"].key.nbytes(2, 160, 64) + 2 * 2 * 140 * 64 * 4)
    cache = KVCache("kivi-2")
    cache.append(k[:, :, :150], v[:, :, :150])
    cache.append(k[:, :, 150:], v[:, :, 150:])
    del k, v
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    arrays = reachable_arrays(cache)
    assert cache.nbytes == expected == sum(a.nbytes for a in arrays)
    for a in arrays:  # no full-precision copy of the 160 tokens that left the window
        assert a.dtype != np.float32 or a.shape[-2] <= 140
    cache.hidden = np.zeros(7)
    assert sum(a.nbytes for a in reachable_arrays(cache)) == expected + 56


def test_A61_the_bytes_of_llama_2_7b():
    """jy-yuan/KIVI#17: 4,196 tokens, 32 layers of 32 heads of 128."""
    half, two = PRESETS["fp16"].key, PRESETS["kivi-2"].key
    full = 32 * 2 * half.nbytes(32, 4196, 128)
    assert full / 2**30 == pytest.approx(2.049, abs=5e-4)
    assert two.bits_per_element(4192, 128) == 3
    ratio = half.nbytes(32, 4192, 128) / two.nbytes(32, 4192, 128)
    assert ratio == pytest.approx(5.33, abs=0.005)


def traced(call):
    """(peak, kept): bytes allocated while `call` runs, and still held after it."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = call()
        kept, peak = tracemalloc.get_traced_memory()
        del result
        return peak - before, kept - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["int4-token-g64", "kivi-2", "rotated-int4"])
def test_A62_peaks_are_bounded(name):
    """ml-explore/mlx-lm#1587: a quantized cache that peaks above float16."""
    H, D, tile = 2, 64, 128
    q = normal(4, 1, D)
    peaks = {}
    for T in (2048, 8192):
        k = normal(H, T, D, dtype=np.float16)
        cache = KVCache(name)
        peak, kept = traced(lambda: cache.append(k, k))  # noqa: B023
        assert peak <= 6 * 2 * k.nbytes  # of the prompt that was passed in
        assert kept == pytest.approx(cache.nbytes, rel=0.1)
        cache.attend(q)
        peaks[T], _ = traced(lambda: cache.attend(q, tile=tile))  # noqa: B023
        whole, _ = traced(lambda: cache.attend(q, tile=None))  # noqa: B023
        one_tile = 2 * H * tile * D * 8  # keys and values, computed in float64
        assert peaks[T] <= 4 * one_tile + 16 * T
        assert whole > 2 * H * T * D * 4
    assert peaks[8192] < 1.2 * peaks[2048] + 16 * 8192


@pytest.mark.parametrize("name", ["int4-token-g64", "kivi-2"])
def test_A62_growth_is_amortised(name):
    """ml-explore/mlx-lm#1587: a concatenation of everything at each token."""
    k = normal(2, 8192, 64, dtype=np.float16)
    cache = KVCache(name)
    cache.append(k, k)

    def grow():
        for t in range(1000):
            cache.append(k[:, t : t + 1], k[:, t : t + 1])

    peak, kept = traced(grow)
    assert len(cache) == 9192
    assert peak - kept < cache.nbytes / 4  # never a second copy of what was there


@pytest.mark.parametrize("name", ["q4", "int4", 4.0, "8", "", None, "KIVI-2"])
def test_A63_what_cannot_be_honoured_is_refused(name):
    """ollama/ollama#8921: a setting without effect."""
    with pytest.raises(ValueError, match="unknown policy"):
        KVCache(name)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 16, "levels": "float16", "transform": "hadamard"},
        {"bits": 4, "levels": "nf4", "rounding": "half-away"},
        {"bits": 8, "levels": "nf4"},
        {"bits": "4"},
        {"bits": 4.0},
    ],
)
def test_A63_an_option_without_effect_is_refused(options):
    """ollama/ollama#8921."""
    with pytest.raises(ValueError, match="valid: "):
        Scheme(**options)


def test_A63_what_is_in_use_can_be_seen():
    """ollama/ollama#8921: the log still says f16."""
    cache = KVCache("kivi-2")
    k = normal(2, 300, 64)
    cache.append(k, k)
    assert cache.policy is PRESETS["kivi-2"]
    (report,) = cache.report()
    assert report["quantized"] == 160
    assert report["window"] == 140
    assert report["quantized_bytes"] == 2 * 160 * 2 * 64 * 3 / 8
    assert report["full_precision_bytes"] == 2 * 140 * 2 * 64 * 4
    assert scale_and_zero(k, cache.policy.key)[0].dtype == np.float16
