import copy
import gc
import weakref

import numpy as np
import pytest
from plain import attend, uneven

from kvq.attention import attention
from kvq.cache import CHUNK, KVCache
from kvq.dtypes import numpy_dtype
from kvq.scheme import PRESETS, Policy, Scheme
from kvq.tensor import quantize

# Keys in blocks of 4, values per token, a window and sinks: every part is in use.
MIXED = Policy(
    Scheme(4, "channel", 4, "asymmetric"),
    Scheme(3, "token", 8, "asymmetric"),
    residual=6,
    sinks=3,
)
LATENT = Policy(Scheme(4, "token", 8, "asymmetric"), None, residual=4)
CHUNKINGS = {
    "all at once": [75],
    "one by one": [1] * 75,
    "uneven": [7, 1, 0, 30, 2, 35],
    "prompt, then tokens": [64] + [1] * 11,
}


def fed(policy, k, v, chunks, **options):
    """A cache that got the tokens of k and v in these portions."""
    cache, start = KVCache(policy, **options), 0
    for n in chunks:
        part = (..., slice(start, start + n), slice(None))
        cache.append(k[part], *(() if v is None else (v[part],)))
        start += n
    assert start == k.shape[-2]
    return cache


def contents(cache, row=0):
    """Every stored number of a sequence, chunks joined."""
    parts = []
    for stream in cache.rows[row]:
        joined = [
            np.concatenate(arrays, axis=-2)
            for arrays in zip(*(c.arrays for c in stream.chunks), strict=True)
        ]
        parts += [stream.sinks, stream.window, *joined]
    return parts


def same_contents(a, b, row_a=0, row_b=0):
    one, other = contents(a, row_a), contents(b, row_b)
    for x, y in zip(one, other, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def views(cache):
    return [(cache.keys(b), cache.values(b)) for b in range(len(cache.rows))]


def same_views(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x[0], y[0])
        np.testing.assert_array_equal(x[1], y[1])


# --- layout ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_how_the_tokens_came_does_not_matter(name, chunking, kv):
    k, v, q = kv
    v = uneven((2, 75, 16), 1)
    whole = fed(name, k, v, [75])
    cache = fed(name, k, v, CHUNKINGS[chunking])
    same_contents(cache, whole)
    np.testing.assert_allclose(cache.attend(q), whole.attend(q), rtol=1e-12)


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_sinks_window_and_blocks_are_where_the_policy_says(chunking, kv):
    k, v, _ = kv
    cache = fed(MIXED, k, v, CHUNKINGS[chunking])
    assert cache.lengths == [75]
    sinks, quantized, window = MIXED.split(75)
    assert (sinks, quantized, window) == (3, 64, 8)
    report = cache.report()[0]
    assert [report[part] for part in ("sinks", "quantized", "window")] == [3, 64, 8]
    for got, x, scheme in (
        (cache.keys(), k, MIXED.key),
        (cache.values(), v, MIXED.value),
    ):
        np.testing.assert_array_equal(got[:, :3], x[:, :3])
        np.testing.assert_array_equal(got[:, 67:], x[:, 67:])
        expected = quantize(x[:, 3:67], scheme).dequantize()
        np.testing.assert_array_equal(got[:, 3:67], expected)
        assert np.abs(got[:, 3:67] - x[:, 3:67]).max() > 0.01


def test_a_token_is_quantized_once_and_never_again(kv):
    k, v, _ = kv
    cache, before = KVCache(MIXED), np.empty((2, 0, 16), np.float32)
    for t in range(75):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        sinks, quantized, _ = MIXED.split(t + 1)
        now = cache.keys()[:, : sinks + quantized]
        np.testing.assert_array_equal(now[:, : before.shape[1]], before)
        before = now


def test_a_prompt_shorter_than_the_window_stays_exact(kv):
    k, v, _ = kv
    cache = fed("kivi-2", k, v[:, :, :8], [75])
    np.testing.assert_array_equal(cache.keys(), k)
    assert cache.report()[0]["quantized_bytes"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_window_keeps_the_dtype_that_came_in(dtype, kv):
    k, v, q = (x.astype(numpy_dtype(dtype)) for x in kv)
    cache = fed(MIXED, k, v, [10, 65])
    assert cache.keys().dtype == cache.values().dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(cache.keys()[:, 67:], k[:, 67:])
    expected = attention(q, cache.keys(), cache.values(), causal=True)
    assert np.isfinite(expected).all()
    got = cache.attend(q)
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=0.05 * np.abs(expected).max()
    )


def test_float64_is_kept_as_float32(kv):
    k, v, _ = kv
    wide = fed(MIXED, k.astype(np.float64), v.astype(np.float64), [75])
    same_contents(wide, fed(MIXED, k, v, [75]))


# --- attention over the cache ---------------------------------------------------------
@pytest.mark.parametrize("tile", [1, 7, 64, 256, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"scale": 0.2, "softcap": 3.0, "sink_logits": np.arange(6.0)},
    ],
)
def test_attending_by_tiles_equals_attention_over_what_is_stored(tile, options, kv):
    k, v, q = kv
    cache = fed(MIXED, k, v, [75])
    plain = {**options, "causal": options.get("causal", True)}
    plain["sinks"] = plain.pop("sink_logits", None)
    expected = attend(q, cache.keys(), cache.values(), **plain)
    got = cache.attend(q, tile=tile, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("H_q", [2, 14, 56])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_attends_with_any_number_of_query_heads(name, H_q, kv):
    k, _, _ = kv
    q = uneven((H_q, 2, 16), 3)
    cache = fed(name, k, k[::-1], [75])
    expected = attention(q, cache.keys(), cache.values(), causal=True)
    np.testing.assert_allclose(cache.attend(q), expected, rtol=1e-10, atol=1e-10)


def test_masks_over_stored_tokens(kv):
    k, v, q = kv
    cache = fed(MIXED, k, v, [75])
    rng = np.random.default_rng(0)
    for shape in [(75,), (1, 1, 75), (6, 5, 75), (1, 6, 1, 75)]:
        mask = rng.random(shape) < 0.5
        full = np.broadcast_to(mask, (1, 6, 5, 75))[0]
        expected = attend(q, cache.keys(), cache.values(), causal=True, mask=full)
        got = cache.attend(q, mask=mask, tile=10)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    for shape in [(74,), (5, 75), (2, 6, 5, 75)]:
        with pytest.raises(ValueError, match="does not broadcast"):
            cache.attend(q, mask=np.ones(shape, bool))


def test_a_cache_without_tokens_gives_zeros_or_the_sink_alone(kv):
    k, v, q = kv
    cache = fed(MIXED, k[:, :0], v[:, :0], [0])
    with np.errstate(all="raise"):
        for options in ({}, {"sink_logits": np.zeros(6)}, {"tile": None}):
            out = cache.attend(q, **options)
            assert out.shape == (6, 5, 12)
            assert (out == 0).all()
    assert len(cache) == 0
    assert cache.nbytes == 0
    assert cache.keys().shape == (2, 0, 16)
    cache.append(k, v)
    same_contents(cache, fed(MIXED, k, v, [75]))


# --- batches --------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_store_what_they_would_alone(side, kv):
    k, v, q = kv
    lengths, T = [20, 75, 0], 75
    mask = np.arange(T) < np.array(lengths)[:, None]
    mask = mask[:, ::-1] if side == "left" else mask
    pad = [np.full((3, 2, T, D), 50, np.float32) for D in (16, 12)]
    for b in range(3):
        for padded, x in zip(pad, (k, v), strict=True):
            padded[b][:, mask[b]] = x[:, : lengths[b]]
    batch = KVCache(MIXED)
    batch.append(*pad, mask=mask)
    batch_q = np.stack([q, 2 * q, q])
    out = batch.attend(batch_q)
    assert batch.lengths == lengths
    assert len(batch) == 75
    for b, n in enumerate(lengths):
        alone = fed(MIXED, k[:, :n], v[:, :n], [n])
        same_contents(batch, alone, b, 0)
        np.testing.assert_array_equal(out[b], alone.attend(batch_q[b]))


def test_rows_of_different_lengths_take_one_mask_over_stored_tokens(kv):
    k, v, q = kv
    cache = KVCache(MIXED)
    keep = np.arange(75) < np.array([[30], [75]])
    cache.append(np.stack([k, k]), np.stack([v, v]), mask=keep)
    mask = np.random.default_rng(0).random((2, 6, 5, 75)) < 0.5
    out = cache.attend(np.stack([q, q]), mask=mask, causal=False)
    for b, n in enumerate([30, 75]):
        expected = attend(q, cache.keys(b), cache.values(b), mask=mask[b, ..., :n])
        np.testing.assert_allclose(out[b], expected, rtol=1e-10, atol=1e-10)


# --- shrinking and rearranging --------------------------------------------------------
@pytest.mark.parametrize("n", range(0, 76, 5))
def test_crop_is_indexing(n, kv):
    k, v, _ = kv
    cache = fed(MIXED, k, v, [75])
    before, bytes_before = views(cache), cache.nbytes
    cache.crop(n)
    same_views(views(cache), [(x[:, :n], y[:, :n]) for x, y in before])
    assert cache.lengths == [n]
    assert cache.nbytes == sum(a.nbytes for s in cache.rows[0] for a in s.arrays)
    assert cache.nbytes < bytes_before or n == 75


@pytest.mark.parametrize("n", [75, 72, 67])
def test_crop_within_the_window_is_exact(n, kv):
    k, v, _ = kv
    cache = fed(MIXED, k, v, [75])
    cache.crop(n)
    cache.append(k[:, n:], v[:, n:])
    same_contents(cache, fed(MIXED, k, v, [75]))


@pytest.mark.parametrize("n", [0, 2, 3])
def test_crop_into_the_sinks_is_exact(n, kv):
    k, v, _ = kv
    cache = fed(MIXED, k, v, [75])
    cache.crop(n)
    cache.append(k[:, n:], v[:, n:])
    same_contents(cache, fed(MIXED, k, v, [75]))


@pytest.mark.parametrize("n", range(4, 75, 7))
def test_a_cropped_cache_grows_on_in_the_same_layout(n, kv):
    k, v, _ = kv
    cache = fed(MIXED, k, v, [75])
    cache.crop(n)
    prefix = cache.keys()
    for t in range(n, 75):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
    assert cache.rows[0][0].lengths == MIXED.split(75)
    np.testing.assert_array_equal(cache.keys()[:, 67:], k[:, 67:])
    whole = n - (n - 3) % 4
    np.testing.assert_array_equal(cache.keys()[:, :whole], prefix[:, :whole])
    again = np.abs(cache.keys()[:, :n] - prefix)
    step = np.ptp(k, axis=1, keepdims=True) / 15
    assert (again <= step).all()


def test_crop_takes_one_length_per_sequence(kv):
    k, v, _ = kv
    cache = fed(MIXED, np.stack([k, k[::-1], -k]), np.stack([v] * 3), [75])
    before = views(cache)
    cache.crop([75, 0, 34])
    assert cache.lengths == [75, 0, 34]
    lengths = zip(before, [75, 0, 34], strict=True)
    same_views(views(cache), [(x[:, :n], y[:, :n]) for (x, y), n in lengths])


@pytest.mark.parametrize("order", [[2, 0, 0], [1], [0, 1, 2, 0], [], np.array([2, 1])])
def test_select_is_indexing(order, kv):
    k, v, _ = kv
    cache = fed(MIXED, np.stack([k, k[::-1], -k]), np.stack([v] * 3), [75])
    before = views(cache)
    cache.select(order)
    same_views(views(cache), [before[i] for i in order])


def test_rows_that_share_history_go_their_own_ways(kv):
    k, v, _ = kv
    cache = fed(MIXED, np.stack([k, -k]), np.stack([v, v]), [75])
    single = cache.nbytes // 2
    cache.reorder([1, 1])
    assert cache.nbytes == single
    cache.append(np.stack([k, -k]), np.stack([v, v]))
    assert len(cache) == 150
    for row, tail in ((0, k), (1, -k)):
        alone = fed(
            MIXED,
            np.concatenate([-k, tail], axis=1),
            np.concatenate([v, v], axis=1),
            [150],
        )
        same_contents(cache, alone, row, 0)


def test_a_shallow_copy_is_a_snapshot(kv):
    k, v, q = kv
    cache = fed(MIXED, k, v, [75])
    out = cache.attend(q)
    for suffix in (k[:, :9], -k[:, :9]):
        other = copy.copy(cache)
        other.append(suffix, v[:, :9])
        both = (
            np.concatenate([k, suffix], axis=1),
            np.concatenate([v, v[:, :9]], axis=1),
        )
        same_contents(other, fed(MIXED, *both, [84]))
        other.crop(3)
    np.testing.assert_array_equal(cache.attend(q), out)


# --- latent caches --------------------------------------------------------------------
@pytest.mark.parametrize("chunks", [[75], [1] * 75, [40, 35]])
def test_latent_values_are_columns_of_the_keys_and_stored_once(chunks):
    k, q = uneven((1, 75, 24)), uneven((6, 3, 24), 1)
    cache = fed(LATENT, k, None, chunks, value_dim=16)
    keys_only = sum(a.nbytes for a in cache.rows[0][0].arrays)
    assert cache.nbytes == keys_only == LATENT.key.nbytes(1, 71, 24) + 4 * 24 * 4
    np.testing.assert_array_equal(cache.values(), cache.keys()[..., :16])
    expected = attend(q, cache.keys(), cache.values(), causal=True)
    np.testing.assert_allclose(cache.attend(q, tile=9), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("policy", "value_dim"),
    [
        (LATENT, None),
        (LATENT, 0),
        (LATENT, -1),
        (LATENT, 2.5),
        (LATENT, True),
        (MIXED, 8),
    ],
)
def test_value_dim_is_checked_at_construction(policy, value_dim):
    with pytest.raises(ValueError, match="value_dim="):
        KVCache(policy, value_dim=value_dim)


def test_a_latent_cache_takes_no_values_and_no_narrow_keys():
    k = uneven((1, 5, 24))
    with pytest.raises(ValueError, match="takes no values"):
        KVCache(LATENT, value_dim=16).append(k, k)
    with pytest.raises(ValueError, match=r"value_dim=25; valid: 1\.\.24"):
        KVCache(LATENT, value_dim=25).append(k)
    with pytest.raises(ValueError, match="takes keys and values"):
        KVCache(MIXED).append(k)


# --- bytes ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_nbytes_is_the_sum_of_what_is_stored_and_of_the_schemes(name, chunking, kv):
    k, _, _ = kv
    policy = PRESETS[name]
    cache = fed(name, k, k, CHUNKINGS[chunking])
    sinks, quantized, window = policy.split(75)
    expected = sum(s.nbytes(2, quantized, 16) for s in policy.schemes)
    expected += (sinks + window) * 2 * 2 * 16 * 4
    assert cache.nbytes == expected
    report = cache.report()[0]
    assert report["full_precision_bytes"] + report["quantized_bytes"] == expected


def owned(a):
    """Bytes that an array keeps alive."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a.nbytes


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("cropped", [75, 58, 2])
def test_no_stored_array_is_a_view_into_something_larger(chunking, cropped, kv):
    k, v, _ = kv
    cache = fed(MIXED, k, v, CHUNKINGS[chunking])
    cache.crop(cropped)
    for stream in cache.rows[0]:
        for a in stream.arrays:
            assert owned(a) == a.nbytes
            assert not np.shares_memory(a, k)
            assert not np.shares_memory(a, v)


def test_nothing_of_the_input_stays_alive(kv):
    cache = KVCache(MIXED)
    k, v = (x.copy() for x in kv[:2])
    watched = [weakref.ref(k), weakref.ref(v)]
    cache.append(k, v)
    del k, v
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_small_blocks_are_merged_and_no_token_is_copied_often(monkeypatch):
    import kvq.cache

    copied = []

    def spy(tensors):
        copied.append(sum(t.tokens for t in tensors))
        return concatenate(tensors)

    concatenate = kvq.cache.concatenate
    monkeypatch.setattr(kvq.cache, "concatenate", spy)
    k = uneven((1, 2100, 4))
    cache = fed(Policy(Scheme(4, "token", 4), None), k, None, [1] * 2100, value_dim=4)
    chunks = [c.tokens for c in cache.rows[0][0].chunks]
    assert chunks == [1024, 1024, 32, 16, 4]
    assert sum(copied) <= 2100 * np.log2(CHUNK)


# --- refusals -------------------------------------------------------------------------
K, V = uneven((2, 2, 10, 16)), uneven((2, 2, 10, 12), 1)
NEVER = {
    "other tokens": (K, V[:, :, :5]),
    "a flat array": (K[0, 0], V[0, 0]),
    "integers": (K.astype(np.int32), V),
    "a NaN": (np.where(K > 20, np.nan, K), V),
    "an infinity": (K, np.where(V > 20, np.inf, V)),
    "no values": (K,),
    "a mask of another shape": (K, V, np.ones((2, 9), bool)),
    "a mask of numbers": (K, V, np.ones((2, 10))),
    "no sequence": (K[:0], V[:0]),
    "no head": (K[:, :0], V[:, :0]),
}
NOT_AFTER_THE_FIRST = {
    "another batch": (K[:1], V[:1]),
    "a single sequence": (K[0], V[0]),
    "another head": (K[:, :1], V[:, :1]),
    "another key width": (K[..., :8], V),
    "another value width": (K, V[..., :8]),
    "another dtype": (K.astype(np.float16), V.astype(np.float16)),
}


@pytest.mark.parametrize("what", NEVER)
def test_a_refused_first_append_leaves_the_cache_empty(what):
    cache = KVCache(MIXED)
    with pytest.raises((ValueError, TypeError), match=r"shape|dtype|holds|takes|mask"):
        cache.append(*NEVER[what])
    assert cache.rows == []
    cache.append(K, V)


@pytest.mark.parametrize("what", [*NEVER, *NOT_AFTER_THE_FIRST])
def test_a_refused_append_changes_nothing(what):
    cache = KVCache(MIXED)
    cache.append(K, V)
    rows, before = list(cache.rows), views(cache)
    with pytest.raises((ValueError, TypeError), match=r"shape|dtype|holds|takes|mask"):
        cache.append(*{**NEVER, **NOT_AFTER_THE_FIRST}[what])
    assert cache.rows == rows
    same_views(views(cache), before)


def test_a_rotation_is_refused_before_anything_is_stored():
    cache = KVCache(Policy(Scheme(4, transform="hadamard"), Scheme(4), residual=64))
    with pytest.raises(ValueError, match="power of two, not 12"):
        cache.append(V, K)
    assert cache.rows == []


@pytest.mark.parametrize(
    "lengths", [-1, 11, 2.5, True, "3", None, [1], [1, 2, 3], [3, 11]]
)
def test_a_refused_crop_changes_nothing(lengths):
    cache = KVCache(MIXED)
    cache.append(K, V)
    before = views(cache)
    with pytest.raises(ValueError, match=r"cannot crop 10 tokens|lengths for 2 seq"):
        cache.crop(lengths)
    same_views(views(cache), before)


@pytest.mark.parametrize(
    "indices", [[2], [-1], [0, 5], [True, False], [0.5], [0.0, 1.0], "01"]
)
def test_a_refused_select_changes_nothing(indices):
    cache = KVCache(MIXED)
    cache.append(K, V)
    with pytest.raises((ValueError, TypeError), match=r"no sequence|expected integers"):
        cache.select(indices)
    assert len(cache.rows) == 2


def test_reorder_keeps_the_number_of_sequences():
    cache = KVCache(MIXED)
    cache.append(K, V)
    with pytest.raises(ValueError, match="1 indices for 2 sequences"):
        cache.reorder([0])


@pytest.mark.parametrize("tile", [0, -1, 2.5, True, "all"])
def test_a_tile_is_a_positive_integer_or_none(tile):
    cache = KVCache(MIXED)
    cache.append(K, V)
    with pytest.raises(ValueError, match="tile="):
        cache.attend(uneven((2, 4, 1, 16)), tile=tile)


@pytest.mark.parametrize(
    "shape",
    [(4, 1, 16), (1, 4, 1, 16), (3, 4, 1, 16), (2, 3, 1, 16), (2, 4, 1, 8), (16,)],
)
def test_queries_that_do_not_fit_are_refused(shape):
    cache = KVCache(MIXED)
    cache.append(K, V)
    with pytest.raises(ValueError, match=r"expected|share"):
        cache.attend(np.ones(shape, np.float32))


@pytest.mark.parametrize("shape", [(4, 1, 16), (0, 4, 1, 16), (1, 4, 1, 16)])
def test_a_cache_without_sequences_cannot_attend(shape):
    with pytest.raises(ValueError, match="append first"):
        KVCache(MIXED).attend(np.ones(shape, np.float32))


def test_an_unknown_option_is_refused():
    cache = KVCache(MIXED)
    cache.append(K, V)
    with pytest.raises(TypeError, match="soft_cap"):
        cache.attend(uneven((2, 4, 1, 16)), soft_cap=3)
    with pytest.raises(ValueError, match="unknown policy 'kivi-9'"):
        KVCache("kivi-9")
    with pytest.raises(ValueError, match="group=None needs all tokens"):
        KVCache(Policy(Scheme(4, "head", None), Scheme(4)))
