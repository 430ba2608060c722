"""What holds for every scheme, shape and data that hypothesis can think of."""

import itertools

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from plain import LARGEST, attend, check_packing, check_quantized

from kvq.attention import attention, decode, empty_partial, merge, partial_attention
from kvq.cache import KVCache
from kvq.packing import pack, unpack
from kvq.scheme import CODEBOOKS, PER, SCALE_DTYPES, UNIFORM, Policy, Scheme
from kvq.tensor import concatenate, quantize

BITS = {"nf4": [4], "iq4_nl": [4], "e2m1": [4], "e4m3": [8], "e5m2": [8]}
FULL = [Scheme(16, levels="float16"), Scheme(16, levels="bfloat16")]


@st.composite
def schemes(draw, groups=(None, 1, 2, 3, 5, 8, 64), transforms=(None,)):
    levels = draw(st.sampled_from([*UNIFORM, *CODEBOOKS]))
    low = 1 if levels in ("asymmetric", "lloyd-max") else 2
    uses_half_even = levels not in UNIFORM
    no_e8m0 = levels in ("asymmetric", "signed-extreme")
    return Scheme(
        draw(st.sampled_from(BITS.get(levels, range(low, 9)))),
        draw(st.sampled_from(PER)),
        draw(st.sampled_from(groups)),
        levels,
        draw(
            st.sampled_from([d for d in SCALE_DTYPES if not (no_e8m0 and d == "e8m0")])
        ),
        draw(st.sampled_from(transforms)),
        "half-even"
        if uses_half_even
        else draw(st.sampled_from(["half-even", "half-away", "toward-zero"])),
    )


@st.composite
def tensors(draw, widths=(1, 2, 3, 7, 8, 13), heads=(1, 2, 3), dtype=np.float32):
    """(H, T, D) of many kinds: sparse, tiny, huge, constant, shifted, on a grid."""
    H, T, D = (
        draw(st.sampled_from(heads)),
        draw(st.integers(1, 12)),
        draw(st.sampled_from(widths)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((H, T, D))
    sizes = draw(st.sampled_from([(1, 1, 1), (1, 1, D), (1, T, 1), (H, 1, 1)]))
    x *= 2.0 ** rng.integers(
        *draw(st.sampled_from([(0, 1), (-150, -100), (-20, 20), (-150, 98)])), sizes
    )
    x += draw(st.sampled_from([0, 0, 0, 100, -1000, 1e6]))
    x *= rng.random(x.shape) < draw(st.sampled_from([1, 1, 0.3, 0]))
    if draw(st.booleans()):
        x[-1, :, D // 2] = x[0, 0, 0]
    x = np.clip(x, -(2.0**100), 2.0**100)
    if np.abs(x).max() < 2**20 and draw(st.booleans()):
        x = np.round(2 * x) / 2
    return x.astype(dtype)


# --- one tensor -----------------------------------------------------------------------
@given(schemes(), tensors())
def test_every_group_is_within_its_bounds_and_finite(scheme, x):
    check_quantized(x, quantize(x, scheme))


@given(
    schemes(transforms=(None, "hadamard", "signed-hadamard")),
    tensors(widths=(1, 2, 8, 16)),
)
def test_bytes_are_what_the_scheme_says(scheme, x):
    t = quantize(x, scheme)
    H, T, D = x.shape
    assert t.nbytes == sum(a.nbytes for a in t.arrays) == scheme.nbytes(H, T, D)
    bits = scheme.bits_per_element(T, D, H)
    assert t.bits_per_element == bits
    assert t.nbytes == round(bits * x.size / 8)


@given(
    schemes(transforms=("hadamard", "signed-hadamard")), tensors(widths=(1, 2, 8, 16))
)
def test_a_rotated_error_is_the_error_in_the_rotated_basis(scheme, x):
    """A rotation keeps norms: none is gained or lost on the way back."""
    from dataclasses import replace

    from kvq import transforms

    t = quantize(x, scheme)
    y = transforms.apply(scheme.transform, x)
    y_hat = quantize(y, replace(scheme, transform=None)).dequantize()
    assert np.isfinite(t.dequantize()).all()
    error, rotated = t.dequantize().astype(np.float64) - x, y_hat.astype(np.float64) - y
    tolerance = (
        1e-5 * (np.linalg.norm(x.astype(np.float64)) + np.linalg.norm(rotated)) + 1e-40
    )
    assert abs(np.linalg.norm(error) - np.linalg.norm(rotated)) <= tolerance


@given(schemes(), tensors(dtype=np.float64))
def test_full_input_range_stays_finite_in_every_dtype(scheme, x):
    for dtype in (np.float32, np.float64):
        t = quantize(x.astype(dtype), scheme)
        for a in (t.scale, t.zero, t.dequantize()):
            assert a is None or np.isfinite(a.astype(np.float64)).all()


@given(tensors(), st.sampled_from(FULL))
def test_stored_numbers_saturate_and_are_otherwise_rounded_once(x, scheme):
    limit = LARGEST[scheme.levels]
    expected = np.clip(x, -limit, limit).astype(quantize(x, scheme).codes.dtype)
    np.testing.assert_array_equal(
        quantize(x, scheme).dequantize(), expected.astype(np.float32)
    )


@given(
    st.sampled_from(PER),
    st.sampled_from([None, 3, 8]),
    st.integers(2, 8),
    st.integers(0, 99),
)
def test_quantizing_twice_changes_nothing_where_the_largest_code_is_kept(
    per, G, bits, seed
):
    """Symmetric levels: max|x_hat| = Q s again, and s is exact in its own format."""
    x = np.random.default_rng(seed).standard_normal((2, 7, 5)).astype(np.float32)
    for levels, dtype in [("symmetric", "float16"), ("symmetric", "bfloat16")]:
        once = quantize(x, Scheme(bits, per, G, levels, dtype))
        twice = quantize(once.dequantize(), once.scheme)
        for a, b in zip(once.arrays, twice.arrays, strict=True):
            np.testing.assert_array_equal(a, b)


@given(tensors(), st.sampled_from(["e2m1", "e4m3"]))
def test_microscaling_is_idempotent(x, levels):
    assume(np.abs(x).max() > 2.0**-100)
    once = quantize(x, Scheme(8 if levels == "e4m3" else 4, "token", 8, levels, "e8m0"))
    twice = quantize(once.dequantize(), once.scheme)
    np.testing.assert_array_equal(once.dequantize(), twice.dequantize())


@given(st.sampled_from([-50, -1, 0, 1, 50]), st.integers(0, 99), st.integers(1, 8))
def test_a_shift_moves_the_zero_and_no_code(c, seed, bits):
    """Quarters in [-2, 2] and their shifts are exact, so the scale stays as it is."""
    x = np.random.default_rng(seed).integers(-8, 9, (1, 4, 16)).astype(np.float32) / 4
    scheme = Scheme(bits, "token", 8, "asymmetric", "float32")
    a, b = quantize(x, scheme), quantize(x + np.float32(c), scheme)
    np.testing.assert_array_equal(a.scale, b.scale)
    np.testing.assert_array_equal(a.codes, b.codes)
    np.testing.assert_allclose(
        b.dequantize(), a.dequantize() + c, rtol=2**-22, atol=2**-22
    )


@given(st.integers(1, 8), st.integers(1, 70), st.sampled_from([-1, -2]))
def test_packing_of_any_length_is_the_documented_bit_string(bits, n, axis):
    check_packing(pack, unpack, bits, n, axis)


@given(schemes(groups=(1, 2, 3, 5)), tensors(), st.data())
def test_pieces_of_whole_groups_equal_the_whole(scheme, x, data):
    block, T = scheme.token_block, x.shape[1]
    cut = data.draw(st.integers(0, T // block)) * block
    joined = concatenate([quantize(x[:, :cut], scheme), quantize(x[:, cut:], scheme)])
    whole = quantize(x, scheme)
    for a, b in zip(joined.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    a, b = sorted(data.draw(st.lists(st.integers(0, T), min_size=2, max_size=2)))
    np.testing.assert_array_equal(whole.dequantize(a, b), whole.dequantize()[:, a:b])
    np.testing.assert_array_equal(
        whole.crop(cut).dequantize(), whole.dequantize()[:, :cut]
    )


# --- attention ------------------------------------------------------------------------
@st.composite
def attention_cases(draw):
    H, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    T, T_q, D, D_v = (
        draw(st.integers(a, b)) for a, b in [(0, 9), (0, 3), (1, 5), (1, 4)]
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1, 30]))
    q = rng.standard_normal((H * ratio, T_q, D)) * size
    k, v = rng.standard_normal((H, T, D)), rng.standard_normal((H, T, D_v))
    mask = rng.random((H * ratio, T_q, T)) < draw(st.sampled_from([0, 0.3, 1]))
    return (
        q,
        k,
        v,
        {
            "scale": draw(st.sampled_from([None, 0.3])),
            "causal": draw(st.booleans()),
            "mask": draw(st.sampled_from([None, mask])),
            "softcap": draw(st.sampled_from([None, 4.0])),
            "sink_logits": draw(
                st.sampled_from([None, rng.standard_normal(H * ratio)])
            ),
        },
    )


@given(attention_cases(), st.lists(st.integers(0, 9), max_size=4))
def test_attention_whole_in_tiles_and_in_plain_loops_agree(case, cuts):
    q, k, v, options = case
    T = k.shape[1]
    plain = {**options, "sinks": options["sink_logits"]}
    plain.pop("sink_logits")
    expected = attend(q, k, v, **plain)
    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(attention(q, k, v, **options), expected, **close)
    edges = [0, *sorted(min(c, T) for c in cuts), T]
    tiles = [(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)]
    state = decode(q, tiles, T, v.shape[-1], **options)
    np.testing.assert_allclose(state.out, expected, **close)


@given(attention_cases(), st.permutations(range(4)))
def test_merging_in_any_order_and_nesting_is_the_whole(case, order):
    q, k, v, options = case
    keep = options["mask"]
    parts = [
        partial_attention(
            q, k[:, i::4], v[:, i::4], keep=None if keep is None else keep[..., i::4]
        )
        for i in order
    ]
    nothing = empty_partial(q.shape[:-1], v.shape[-1])
    left = merge(merge(merge(parts[0], parts[1]), parts[2]), parts[3])
    right = merge(parts[0], merge(parts[1], merge(merge(parts[2], nothing), parts[3])))
    whole = partial_attention(q, k, v, keep=keep)
    for one in (left, right):
        np.testing.assert_allclose(one.m, whole.m, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one.l, whole.l, rtol=1e-12)
        np.testing.assert_allclose(one.o, whole.o, rtol=1e-9, atol=1e-12)
    for one, other in [(merge(left, nothing), left), (merge(nothing, left), left)]:
        for name in ("m", "l", "o"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# --- the cache ------------------------------------------------------------------------
@st.composite
def policies(draw):
    one = schemes(groups=(1, 2, 3, 4), transforms=(None, "hadamard", "signed-hadamard"))
    scheme = st.one_of(one, one, st.sampled_from(FULL))
    return Policy(
        draw(scheme), draw(scheme), draw(st.integers(0, 9)), draw(st.integers(0, 3))
    )


def joined(cache, row):
    for stream in cache.rows[row]:
        yield stream.sinks
        yield stream.window
        for arrays in zip(*(c.arrays for c in stream.chunks), strict=True):
            yield np.concatenate(arrays, axis=-2)


def same_bytes(a, b, row_a=0, row_b=0):
    for x, y in itertools.zip_longest(joined(a, row_a), joined(b, row_b)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def random_kv(seed, B, T, D=8, D_v=4, dtype=np.float32):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((B, 2, T, D)), rng.standard_normal((B, 2, T, D_v))
    k[..., 1] *= 30
    k[0, 0, : T // 2] = 0.5
    return k.astype(dtype), v.astype(dtype)


@given(
    policies(),
    st.lists(st.integers(0, 17), max_size=6),
    st.integers(0, 99),
    st.sampled_from([np.float16, np.float32]),
)
def test_the_stored_bytes_do_not_depend_on_the_chunks(policy, chunks, seed, dtype):
    T = sum(chunks)
    k, v = random_kv(seed, 1, T, dtype=dtype)
    whole, pieces = KVCache(policy), KVCache(policy)
    whole.append(k, v)
    pieces.append(k[:, :, :0], v[:, :, :0])
    for start, n in zip(np.cumsum([0, *chunks]), chunks, strict=False):
        pieces.append(k[:, :, start : start + n], v[:, :, start : start + n])
    same_bytes(whole, pieces)
    assert pieces.rows[0][0].lengths == policy.split(T)
    assert pieces.nbytes == sum(a.nbytes for s in pieces.rows[0] for a in s.arrays)
    q = np.random.default_rng(seed).standard_normal((1, 4, 2, 8))
    out = whole.attend(q, tile=5)
    np.testing.assert_allclose(pieces.attend(q, tile=5), out, rtol=1e-12)
    expected = attention(q[0], whole.keys(), whole.values(), causal=True)
    tolerance = 1e-9 if dtype == np.float32 else 0.3
    np.testing.assert_allclose(
        out[0], expected, rtol=0, atol=tolerance * (1 + np.abs(expected).max())
    )


@given(
    policies(), st.integers(0, 99), st.lists(st.integers(0, 30), min_size=3, max_size=3)
)
def test_padded_batches_store_what_each_row_stores_alone(policy, seed, lengths):
    k, v = random_kv(seed, 3, 30)
    mask = np.random.default_rng(seed).permuted(
        np.arange(30) < np.array(lengths)[:, None], axis=1
    )
    batch = KVCache(policy)
    batch.append(k, v, mask=mask)
    assert batch.lengths == lengths
    for b in range(3):
        alone = KVCache(policy)
        alone.append(k[b][:, mask[b]], v[b][:, mask[b]])
        same_bytes(batch, alone, b, 0)


steps = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 12)),
    st.tuples(st.just("crop"), st.lists(st.floats(0, 1), min_size=4, max_size=4)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
)


@given(policies(), st.lists(steps, max_size=7), st.integers(0, 99))
def test_any_history_of_calls_is_numpy_indexing_on_the_view(policy, history, seed):
    k, v = random_kv(seed, 2, 21)
    cache = KVCache(policy)
    cache.append(k, v)
    for number, (call, argument) in enumerate(history):
        view = [(cache.keys(b), cache.values(b)) for b in range(len(cache.rows))]
        quantized = [sum(row[0].lengths[:2]) for row in cache.rows]
        if call == "append":
            k, v = random_kv(seed + number, len(view), argument)
            cache.append(k, v)
            for b, (x, y) in enumerate(view):
                n = quantized[b]
                np.testing.assert_array_equal(cache.keys(b)[:, :n], x[:, :n])
                np.testing.assert_array_equal(cache.values(b)[:, :n], y[:, :n])
                exact = min(argument, cache.rows[b][0].lengths[2])
                np.testing.assert_array_equal(
                    cache.keys(b)[:, -exact or 999 :], k[b][:, argument - exact :]
                )
            continue
        if call == "crop":
            lengths = [
                int(f * T) for f, T in zip(argument, cache.lengths, strict=False)
            ]
            cache.crop(lengths)
            view = [
                (x[:, :n], y[:, :n]) for (x, y), n in zip(view, lengths, strict=True)
            ]
        else:
            order = [i % len(view) for i in argument]
            cache.select(order)
            view = [view[i] for i in order]
        for b, (x, y) in enumerate(view):
            np.testing.assert_array_equal(cache.keys(b), x)
            np.testing.assert_array_equal(cache.values(b), y)
    held = {id(a): a.nbytes for row in cache.rows for s in row for a in s.arrays}
    assert cache.nbytes == sum(held.values())
