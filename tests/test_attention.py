import itertools
import math
import weakref

import numpy as np
import pytest
from plain import attend, uneven

from kvq.attention import (
    Partial,
    attention,
    attention_weights,
    decode,
    empty_partial,
    merge,
    partial_attention,
    scores,
    sink_partial,
    softmax,
    visible,
)

RATIOS = [(28, 4), (9, 3), (8, 1), (3, 3), (40, 8), (56, 8), (24, 4), (1, 1)]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def qkv(H_q, H, T_q=3, T=11, D=6, D_v=5):
    return uneven((H_q, T_q, D), 2), uneven((H, T, D)), uneven((H, T, D_v), 1)


# --- versions with a known fault ------------------------------------------------------
def modulo_heads(q, k, v):
    """Query head h reads KV head h % H_kv, where h // ratio is right."""
    order = np.arange(len(q)) % len(k)
    return attention(q, k[order], v[order])


def unscaled(q, k, v):
    return attention(q, k, v, scale=1.0)


def scaled_by_value_width(q, k, v):
    return attention(q, k, v, scale=v.shape[-1] ** -0.5)


def causal_from_the_start(q, k, v):
    """Query i sees tokens 0..i, as if the queries were the oldest tokens."""
    mask = np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None]
    return attention(q, k, v, mask=mask[None])


def check_attention(f, H_q, H, **options):
    q, k, v = qkv(H_q, H)
    np.testing.assert_allclose(f(q, k, v), attend(q, k, v, **options), **CLOSE)


@pytest.mark.parametrize(("H_q", "H"), RATIOS)
def test_attention_equals_the_plain_loops_for_every_head_ratio(H_q, H):
    check_attention(attention, H_q, H)
    check_attention(
        lambda q, k, v: attention(q, k, v, causal=True), H_q, H, causal=True
    )


@pytest.mark.parametrize("wrong", [modulo_heads, unscaled, scaled_by_value_width])
def test_wrong_attention_fails_the_same_check(wrong):
    with pytest.raises(AssertionError):
        check_attention(wrong, 9, 3)


def test_a_wrong_causal_mask_fails_the_same_check():
    with pytest.raises(AssertionError):
        check_attention(causal_from_the_start, 9, 3, causal=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_everything_is_computed_in_float64(dtype):
    q, k, v = (x.astype(dtype) for x in qkv(4, 2))
    out = attention(q, k, v)
    assert out.dtype == np.float64
    wide = attention(*(x.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_array_equal(out, wide)


OPTIONS = [
    {},
    {"causal": True},
    {"scale": 0.7},
    {"softcap": 2.5},
    {"sinks": np.array([5.0, -3, 0, 1, 2, -40])},
    {"scale": 0.3, "causal": True, "softcap": 9.0, "sinks": np.arange(6.0)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_options_equal_the_plain_loops_whole_and_in_tiles(options, masked):
    q, k, v = qkv(6, 2, T_q=4, T=13)
    mask = np.random.default_rng(3).random((6, 4, 13)) < 0.6 if masked else None
    if masked:
        mask[1, 2] = False
    expected = attend(q, k, v, mask=mask, **options)
    options = {**options, "mask": mask}
    options["sink_logits"] = options.pop("sinks", None)
    np.testing.assert_allclose(attention(q, k, v, **options), expected, **CLOSE)
    options.setdefault("causal", False)
    for size in (1, 4, 13, 50):
        tiles = [(k[:, i : i + size], v[:, i : i + size]) for i in range(0, 13, size)]
        state = decode(q, iter(tiles), 13, 5, **options)
        np.testing.assert_allclose(state.out, expected, **CLOSE)


def test_decode_is_causal_unless_told_otherwise():
    q, k, v = qkv(4, 2)
    np.testing.assert_allclose(
        decode(q, [(k, v)], 11, 5).out, attention(q, k, v, causal=True), **CLOSE
    )


# --- heads and masks ------------------------------------------------------------------
def test_query_head_h_reads_kv_head_h_over_the_ratio():
    v = np.broadcast_to(np.arange(3.0)[:, None, None], (3, 5, 2))
    out = attention(np.zeros((9, 1, 4)), np.zeros((3, 5, 4)), v)
    assert out[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_hot_keys_pick_known_tokens():
    k = 1e5 * np.eye(4)[None]
    v = np.arange(4.0)[None, :, None]
    q = np.eye(4)[[2, 0, 3, 1]][:, None]
    assert attention(q, k, v)[:, 0, 0].tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize("H", [8, 1])
@pytest.mark.parametrize("shape", [(7,), (2, 1, 1, 7), (2, 16, 1, 7), (1, 16, 3, 7)])
def test_batched_masks_equal_a_loop_over_rows_and_heads(H, shape):
    q, k, v = uneven((2, 16, 3, 6), 2), uneven((2, H, 7, 6)), uneven((2, H, 7, 5), 1)
    mask = np.random.default_rng(1).random(shape) < 0.5
    full = np.broadcast_to(mask, (2, 16, 3, 7))
    out = attention(q, k, v, mask=mask)
    assert out.shape == (2, 16, 3, 5)
    for b in range(2):
        expected = attend(q[b], k[b], v[b], mask=full[b])
        np.testing.assert_allclose(out[b], expected, **CLOSE)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 7),
        (3, 7),
        (2, 1, 7),
        (2, 1, 1, 66),
        (8,),
        (2, 1, 1, 1, 7),
        (),
        (4, 16, 3, 7),
    ],
)
def test_a_mask_of_another_rank_or_size_is_refused(shape):
    with pytest.raises(ValueError, match="does not broadcast to"):
        visible((2, 16, 3, 7), mask=np.ones(shape, bool))


@pytest.mark.parametrize("dtype", [float, int, np.float16])
def test_only_bool_masks_are_taken(dtype):
    with pytest.raises(TypeError, match="expected bool"):
        attention(*qkv(2, 2), mask=np.zeros(11, dtype))


def test_causal_queries_are_the_newest_tokens():
    seen = visible((1, 2, 5), causal=True)[0]
    assert seen.astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    early = visible((1, 3, 2), causal=True)[0]
    assert early.astype(int).tolist() == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((5, 1, 4), (2, 3, 4), (2, 3, 4)),
        ((4, 1, 4), (2, 3, 5), (2, 3, 4)),
        ((4, 1, 4), (2, 3, 4), (1, 3, 4)),
        ((4, 1, 4), (2, 3, 4), (2, 1, 4)),
        ((1, 4), (3, 4), (3, 4)),
        ((2, 4, 1, 4), (2, 3, 4), (2, 3, 4)),
        ((4, 1, 4), (2, 2, 3, 4), (2, 2, 3, 4)),
        ((2, 4, 1, 4), (3, 2, 3, 4), (3, 2, 3, 4)),
        ((2, 4, 1, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
        ((0, 1, 4), (0, 3, 4), (0, 3, 4)),
    ],
)
def test_shapes_that_do_not_match_are_refused(q, k, v):
    arrays = [np.zeros(shape) for shape in (q, k, v)]
    for call in (
        lambda: attention(*arrays),
        lambda: partial_attention(*arrays),
        lambda: decode(arrays[0], [arrays[1:]], k[-2], v[-1]),
    ):
        with pytest.raises(ValueError, match=r"match|share|differ"):
            call()


@pytest.mark.parametrize("softcap", [0, 0.0, -1, math.nan])
def test_a_soft_cap_is_positive(softcap):
    with pytest.raises(ValueError, match=r"softcap=.*; valid: a number > 0"):
        scores(*qkv(2, 2)[:2], softcap=softcap)


def test_sink_logits_are_one_per_query_head():
    with pytest.raises(ValueError, match=r"sink_logits \(3,\); expected .*\(4,\)"):
        attention(*qkv(4, 2), sink_logits=np.zeros(3))


def test_a_sink_takes_part_in_the_softmax_and_has_no_value():
    q, k, v = np.zeros((1, 1, 2)), np.zeros((1, 4, 2)), np.full((1, 4, 3), 7.0)
    p = 1 / (4 + math.exp(5))
    weights = attention_weights(q, k, sink_logits=[5])
    np.testing.assert_allclose(weights, np.full((1, 1, 4), p), rtol=1e-14)
    np.testing.assert_allclose(attention(q, k, v, sink_logits=[5]), 4 * p * 7)
    assert p == pytest.approx(0.00656, abs=5e-6)
    none = attention(q, k, v, sink_logits=[-math.inf])
    np.testing.assert_array_equal(none, attention(q, k, v))


# --- nothing to see -------------------------------------------------------------------
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sink_logits": np.zeros(4)}]
)
def test_no_tokens_give_zeros_and_no_queries_give_nothing(batch, options):
    q, k, v = (
        np.ones((*batch, 4, 3, 6)),
        np.ones((*batch, 2, 0, 6)),
        np.ones((*batch, 2, 0, 5)),
    )
    with np.errstate(all="raise"):
        out = attention(q, k, v, **options)
        assert decode(q, [], 0, 5, **options).out.shape == out.shape
    np.testing.assert_array_equal(out, np.zeros((*batch, 4, 3, 5)))
    full = np.ones((*batch, 2, 7, 6))
    assert attention(q[..., :0, :], full, full, **options).shape == (*batch, 4, 0, 6)


def test_a_query_that_sees_nothing_gives_zeros_and_disturbs_no_other():
    q, k, v = qkv(6, 2)
    mask = np.ones((6, 3, 11), bool)
    mask[2, 1] = mask[5, 0] = False
    with np.errstate(all="raise", under="ignore"):
        out = attention(q, k, v, mask=mask)
        part = partial_attention(q, k, v, keep=mask)
    expected = attention(q, k, v)
    expected[2, 1] = expected[5, 0] = 0
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(part.out, expected, **CLOSE)
    assert part.lse[2, 1] == part.lse[5, 0] == -np.inf
    assert np.isfinite(np.delete(part.lse[2], 1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_no_query_sees_may_hold_anything(bad):
    q, k, v = qkv(6, 2)
    seen = np.arange(11) < 7
    expected = attention(q, k[:, :7], v[:, :7])
    k[:, 7:] = v[:, 7:] = bad
    np.testing.assert_allclose(attention(q, k, v, mask=seen), expected, **CLOSE)
    keep = np.broadcast_to(seen, (6, 3, 11))
    np.testing.assert_allclose(
        partial_attention(q, k, v, keep=keep).out, expected, **CLOSE
    )


def test_softmax_of_huge_scores_is_finite():
    with np.errstate(all="raise"):
        p = softmax(np.array([[1e300, 1e300, -1e300], [-np.inf, -1e308, -np.inf]]))
    assert p.tolist() == [[0.5, 0.5, 0], [0, 1, 0]]
    assert softmax(np.full((2, 3), -np.inf)).tolist() == [[0] * 3] * 2


# --- partials -------------------------------------------------------------------------
def split(q, k, v, cuts):
    edges = [0, *cuts, k.shape[1]]
    return [
        partial_attention(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)
    ]


def test_a_partial_is_its_definition():
    q, k, v = qkv(4, 2)
    part, S = partial_attention(q, k, v), scores(q, k)
    np.testing.assert_array_equal(part.m, S.max(axis=-1))
    weights = np.exp(S - S.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(part.l, weights.sum(axis=-1))
    np.testing.assert_allclose(part.o, weights @ np.repeat(v, 2, axis=0), **CLOSE)
    np.testing.assert_allclose(part.lse, np.log(np.exp(S).sum(axis=-1)))


def same(a, b):
    for name in ("m", "l", "o"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("D_v", [1, 5])
def test_the_empty_partial_is_neutral_in_both_orders(D_v):
    state = partial_attention(*qkv(4, 2, D_v=D_v))
    nothing = empty_partial((4, 3), D_v)
    masked = partial_attention(*qkv(4, 2, D_v=D_v), keep=np.zeros((4, 3, 11), bool))
    same(nothing, masked)
    with np.errstate(all="raise"):
        for neutral in (nothing, masked):
            same(merge(state, neutral), state)
            same(merge(neutral, state), state)
        same(merge(nothing, nothing), nothing)
        assert (nothing.out == 0).all()
        assert (nothing.lse == -np.inf).all()


def test_merging_is_associative_and_commutative():
    a, b, c = split(*qkv(4, 2), [3, 4])
    for x, y in [
        (merge(merge(a, b), c), merge(a, merge(b, c))),
        (merge(a, b), merge(b, a)),
        (merge(merge(a, b), c), partial_attention(*qkv(4, 2))),
    ]:
        np.testing.assert_allclose(x.m, y.m, **CLOSE)
        np.testing.assert_allclose(x.l, y.l, **CLOSE)
        np.testing.assert_allclose(x.o, y.o, **CLOSE)


def test_adding_partials_without_their_maxima_fails():
    q, k, v = qkv(4, 2)
    a, b = split(30 * q, k, v, [4])
    wrong = Partial(np.maximum(a.m, b.m), a.l + b.l, a.o + b.o)
    whole = partial_attention(30 * q, k, v)
    np.testing.assert_allclose(merge(a, b).out, whole.out, **CLOSE)
    assert np.abs(wrong.out - whole.out).max() > 0.1


def test_merging_far_apart_scores_neither_overflows_nor_warns():
    q = np.ones((1, 1, 1))
    high = partial_attention(q, np.full((1, 1, 1), 1e4), np.full((1, 1, 1), 3.0))
    low = partial_attention(q, np.full((1, 2, 1), -1e4), np.full((1, 2, 1), 8.0))
    with np.errstate(all="raise"):
        same(merge(high, low), high)
        same(merge(low, high), high)


def test_a_sink_is_a_partial_without_a_value():
    q, k, v = qkv(4, 2)
    logits = np.array([5.0, 0, -2, 1])
    merged = merge(partial_attention(q, k, v), sink_partial(logits, (4, 3), 5))
    np.testing.assert_allclose(
        merged.out, attention(q, k, v, sink_logits=logits), **CLOSE
    )


@pytest.mark.parametrize("tokens", [0, 4, 10, 12])
def test_tiles_that_hold_other_than_the_promised_tokens_are_refused(tokens):
    q, k, v = qkv(4, 2)
    with pytest.raises(ValueError, match=r"tiles hold 11 tokens|broadcast"):
        decode(q, [(k[:, :5], v[:, :5]), (k[:, 5:], v[:, 5:])], tokens, 5)


def test_decode_drops_each_tile_before_it_asks_for_the_next_but_one():
    q, k, v = qkv(4, 2)
    tiles_seen = []

    def tiles():
        for i in range(11):
            assert sum(tile() is not None for tile in tiles_seen) <= 1
            tile = k[:, i : i + 1].copy()
            tiles_seen.append(weakref.ref(tile))
            yield tile, v[:, i : i + 1]
            del tile

    decode(q, tiles(), 11, 5)
    assert len(tiles_seen) == 11
    tiles_seen.clear()
    with pytest.raises(AssertionError):
        list(tiles())  # what a decode that keeps the tiles would do
