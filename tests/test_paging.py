"""Blocks, tables and the prefix index, beside one contiguous KVCache per layer.

Tests called A41 and so on are faults that people reported in systems like this one;
their docstrings name the report as repository#number on GitHub.
"""

import gc
import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from plain import attend, uneven

import kvq.paging
from kvq.cache import KVCache
from kvq.dtypes import numpy_dtype
from kvq.paging import (
    BlockPool,
    BlockTable,
    PoolFull,
    PrefixIndex,
    encode_key,
    open_sequence,
    reorder,
)
from kvq.scheme import PRESETS, Policy, Scheme
from kvq.tensor import quantize

L, H, D, D_V, T = 2, 2, 16, 8, 200
K, V = uneven((L, H, T, D)), uneven((L, H, T, D_V), 1)
Q = uneven((6, 3, D), 2)
TOKENS = [(7 * i) % 50 for i in range(T)]


def stored_by(name, residual=0, sinks=0):
    return replace(PRESETS[name], residual=residual, sinks=sinks)


POLICIES = {
    "kivi-2": stored_by("kivi-2", 20, 3),
    "int4-token-g64": stored_by("int4-token-g64", 5, 0),
    "fp16": stored_by("fp16", 0, 4),
    "int4-channel-g32": stored_by("int4-channel-g32", 0, 0),
    "rotated-int4": stored_by("rotated-int4", 40, 1),
    "nf4-g64": stored_by("nf4-g64", 0, 2),
    "mxfp8": stored_by("mxfp8", 3, 0),
    "lloyd-max-3": stored_by("lloyd-max-3", 8, 5),
    "per head and tensor": Policy(
        Scheme(3, "head", 16, "full-range"), Scheme(5, "tensor", 8), 11, 2
    ),
    "mixed": Policy(Scheme(16, levels="float16"), Scheme(4, "channel", 16), 6, 3),
}
KIVI = POLICIES["kivi-2"]
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def new_index(policy=KIVI, blocks=32, **options):
    shape = {"block": 32, "layers": L, "kv_heads": H, "head_dim": D, "value_dim": D_V}
    options = {**shape, "window_dtype": "float32", **options}
    return PrefixIndex(BlockPool(policy, blocks, **options), "model")


def feed(table, start, stop, chunk=None, k=K, v=V, tokens=TOKENS):
    """Append the tokens start..stop-1, `chunk` at a time."""
    for a in range(start, stop, chunk or max(stop - start, 1)):
        b = min(a + (chunk or stop), stop)
        table.append(tokens[a:b], k[:, :, a:b], v[:, :, a:b])
    return table


def new_table(index, stop=T, chunk=None, tenant="a", **data):
    """A sequence computed from its first token on, whatever the index has."""
    return feed(BlockTable(index, tenant), 0, stop, chunk, **data)


def resumed(index, stop=T, tenant="a", tokens=TOKENS, **data):
    """(table, matched): a sequence that uses what the index has."""
    table, matched = open_sequence(index, tokens[:stop], tenant)
    return feed(table, matched, stop, tokens=tokens, **data), matched


def twins(policy, stop=T, k=K, v=V):
    """Per layer, the contiguous cache of the same tokens."""
    caches = [KVCache(policy) for _ in range(L)]
    for layer, cache in enumerate(caches):
        cache.append(k[layer, :, :stop], v[layer, :, :stop])
    return caches


def read(table):
    """What attention sees: (layers, H, T, D) of keys and of values."""
    T, dtype = len(table), table.window[0].dtype
    return [
        np.stack([table.stream(n, side).read(0, T, dtype) for n in range(L)])
        for side in (0, 1)
    ]


def same_as(table, caches, q=Q, tiles=(50,)):
    """The same layout, numbers and outputs, bit for bit."""
    k, v = read(table)
    for layer, cache in enumerate(caches):
        assert table.stream(layer, 0).lengths == cache.rows[0][0].lengths
        np.testing.assert_array_equal(k[layer], cache.keys())
        np.testing.assert_array_equal(v[layer], cache.values())
        for tile in tiles:
            out = table.attend(layer, q, tile=tile)
            np.testing.assert_array_equal(out, cache.attend(q, tile=tile))


def pool_arrays(pool):
    """Every array that is reachable from the pool, found without its help."""
    found, stack, seen = [], [pool], set()
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, type):
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            found.append(x)
        else:
            children = x if isinstance(x, (list, tuple)) else ()
            children = x.values() if isinstance(x, dict) else children
            stack += [*children, *getattr(x, "__dict__", {}).values()]
    return found


def contents(pool, i):
    return [a[i].tobytes() for side in pool.arrays for a in side.values()]


def poison(pool, blocks):
    """Overwrite blocks with 0xFF: NaN scales and the largest codes."""
    for array in pool_arrays(pool):
        for i in blocks:
            array[i] = np.full(array.itemsize, 0xFF, np.uint8).view(array.dtype)


def holders(index, tables):
    """References by block, counted from those who hold them."""
    refs = [0] * len(index.pool.refs)
    for block in itertools.chain(*(table.blocks for table in tables)):
        refs[block] += 1
    for entry in index:
        refs[entry.block] += 1
    return refs


def check(index, tables):
    """References are those of the holders; a block is free if there are none."""
    pool = index.pool
    assert pool.refs == holders(index, tables)
    assert sorted(pool.free) == [i for i, refs in enumerate(pool.refs) if refs == 0]
    assert all(pool.owner[i] is None for i in pool.free)


def evict_all(index):
    while index.evict():
        pass


# --- decode over a table --------------------------------------------------------------
@every_policy
@pytest.mark.parametrize("chunk", [None, 37])
def test_a_table_is_the_contiguous_cache_bit_for_bit(policy, chunk):
    index = new_index(policy)
    table = new_table(index, chunk=chunk)
    same_as(table, twins(policy), tiles=(13, 64, None))
    check(index, [table])


@pytest.mark.parametrize("name", ["kivi-2", "fp16", "per head and tensor"])
def test_tokens_may_come_one_by_one(name):
    same_as(new_table(new_index(POLICIES[name]), chunk=1), twins(POLICIES[name]))


@every_policy
@pytest.mark.parametrize("stop", [0, 1, 5, 36, 68, 100])
def test_short_tables_are_the_contiguous_cache_too(policy, stop):
    same_as(new_table(new_index(policy), stop), twins(policy, stop))


@pytest.mark.parametrize("tile", [1, 7, 32, 256])
def test_the_size_of_the_tiles_does_not_matter(tile):
    same_as(new_table(new_index()), twins(KIVI), tiles=(tile,))


@pytest.mark.parametrize("block", [32, 64, 96])
def test_the_size_of_the_blocks_does_not_matter(block):
    table = new_table(new_index(block=block))
    same_as(table, twins(KIVI))
    _, quantized, _ = KIVI.split(T)
    assert len(table.blocks) == -(-quantized // block)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sinks_and_window_keep_the_dtype_that_came_in(dtype):
    k, v = (x.astype(numpy_dtype(dtype)) for x in (K, V))
    table = new_table(new_index(window_dtype=dtype), k=k, v=v)
    assert table.window[0].dtype == table.sinks[1].dtype == numpy_dtype(dtype)
    same_as(table, twins(KIVI, k=k, v=v))


def test_float64_counts_as_float32():
    table = new_table(new_index(), k=K.astype(np.float64), v=V.astype(np.float64))
    same_as(table, twins(KIVI))


def test_options_reach_the_attention():
    table, (cache, _) = new_table(new_index()), twins(KIVI)
    mask = np.random.default_rng(0).random((6, 3, T)) < 0.5
    for options in (
        {"causal": False},
        {"scale": 0.2, "softcap": 3.0, "sink_logits": np.arange(6.0)},
        {"mask": mask},
    ):
        out = table.attend(0, Q, tile=40, **options)
        np.testing.assert_array_equal(out, cache.attend(Q, tile=40, **options))


def test_nothing_is_copied_to_read_a_block():
    table = new_table(new_index())
    for side in (0, 1):
        for chunk in table.stream(1, side).chunks:
            for a in chunk.arrays:
                owners = [p for p in pool_arrays(table.pool) if np.shares_memory(a, p)]
                assert len(owners) == 1


# --- blocks (PGE) ---------------------------------------------------------------------
def test_A41_a_reused_table_has_no_stale_blocks_and_nothing_leaks():
    """gittensor-ai-lab/sparkinfer#146: the tail of a row keeps old block ids."""
    k, v = uneven((L, H, 1280, D)), uneven((L, H, 1280, D_V))
    tokens = list(range(1280))
    index = new_index(POLICIES["int4-channel-g32"], blocks=64)
    table = new_table(index, 1280, k=k, v=v, tokens=tokens)
    assert len(table.blocks) == 40
    table.close()
    evict_all(index)
    assert len(index.pool.free) == 64
    feed(table, 0, 128, k=k, v=v, tokens=tokens[::-1])
    assert len(table.blocks) == 4
    for _ in range(2):
        table.append([], k[:, :, :0], v[:, :, :0])
        assert len(table.blocks) == 4
    assert [c.tokens for c in table.stream(0, 0).chunks] == [32] * 4
    for past in (33, -1):
        with pytest.raises(ValueError, match=r"valid: 0\.\.32"):
            index.pool.view(table.blocks[-1], 0, 0, past)
    for not_ours in (index.pool.free[0], 64, -1):
        with pytest.raises(ValueError, match="is not in use"):
            index.pool.view(not_ours, 0, 0, 1)
    table.close()
    evict_all(index)
    assert len(index.pool.free) == 64
    assert index.pool.used == 0


def test_A42_a_full_last_block_has_all_its_tokens_and_references_are_counted():
    """Wenyueh/MinivLLM#87: 0 tokens in a full block, references that go below 0."""
    policy = stored_by("int4-token-g64")
    for stop, sizes in ((0, []), (3, [3]), (4, [4]), (8, [4, 4]), (9, [4, 4, 1])):
        table = new_table(new_index(policy, block=4), stop)
        assert [c.tokens for c in table.stream(0, 0).chunks] == sizes
    pool = new_index(policy).pool
    i = pool.allocate("a")
    assert pool.refs[i] == 1
    pool.share(i, "a")
    assert pool.refs[i] == 2
    pool.release(i)
    pool.release(i)
    assert pool.refs[i] == 0
    for call in (pool.release, pool.save, lambda i: pool.share(i, "a")):
        with pytest.raises(ValueError, match=f"block {i} is not in use"):
            call(i)


def test_A42_an_evicted_block_is_not_found_under_its_old_key():
    """Wenyueh/MinivLLM#87: hash A points to a block with content B."""
    index = new_index(blocks=5)
    new_table(index).close()
    assert len(index.lookup(TOKENS, "a")) == 5
    other = [t + 100 for t in TOKENS]
    table = new_table(index, 100, k=K[..., ::-1], tokens=other)
    assert len(table.blocks) == 2
    found = index.lookup(TOKENS, "a")
    assert len(found) == 3
    assert not set(table.blocks) & {entry.block for entry in found}
    check(index, [table])


@pytest.mark.parametrize("block", [0, 33, 16, -32, 32.0, True])
def test_blocks_that_are_not_whole_quantization_blocks_are_refused(block):
    with pytest.raises(ValueError, match=f"block={block}"):
        new_index(block=block)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 0}, "blocks=0; valid: an integer >= 1"),
        ({"layers": 0}, "layers=0"),
        ({"value_dim": 0}, "value_dim=0"),
        ({"head_dim": "16"}, "head_dim='16'"),
        ({"window_dtype": "int8"}, "window_dtype='int8'; valid: float16"),
        ({"policy": "kivi-9"}, "unknown policy 'kivi-9'"),
        ({"policy": Policy(Scheme(4, group=16), None)}, "latent policy"),
        ({"policy": Policy(Scheme(4, "head", None), Scheme(4))}, "group=None needs"),
        ({"policy": "rotated-int4", "head_dim": 12}, "power of two, not 12"),
    ],
)
def test_A63_what_cannot_be_honoured_is_refused_at_construction(options, message):
    """ollama/ollama#8921: a setting without effect."""
    with pytest.raises(ValueError, match=message):
        new_index(**options)


def test_a_block_that_is_shared_is_never_written():
    table = new_table(new_index())
    pool, i = table.pool, table.blocks[0]
    spare = pool.allocate("a")
    tensors = [
        quantize(x[:, :, :32], s) for x, s in zip((K, V), KIVI.schemes, strict=True)
    ]
    for call in (
        lambda: pool.write(i, 0, tensors, 0, 32),
        lambda: pool.copy(spare, i),
        lambda: pool.restore(i, pool.save(spare)),
    ):
        with pytest.raises(ValueError, match=f"block {i} is shared"):
            call()


# --- fork, copy on write, crop, reorder (ROL) -----------------------------------------
@every_policy
def test_forks_share_their_blocks_and_go_their_own_ways(policy):
    index = new_index(policy, block=64)
    table = new_table(index, 120)
    used = index.pool.used
    child = table.fork()
    assert index.pool.used == used
    assert child.blocks == table.blocks
    k, v = (np.concatenate([x[:, :, :120], -x[:, :, :80]], axis=2) for x in (K, V))
    tokens = TOKENS[:120] + TOKENS[80::-1]
    for step in range(120, T, 7):
        stop = min(step + 7, T)
        feed(table, step, stop)
        feed(child, step, stop, k=k, v=v, tokens=tokens)
        check(index, [table, child])
    same_as(table, twins(policy))
    same_as(child, twins(policy, k=k, v=v))
    both = {*table.blocks, *child.blocks}
    assert len(both) < len(table.blocks) + len(child.blocks)


def test_only_the_partial_block_is_copied_on_write():
    index = new_index(POLICIES["int4-token-g64"], block=64)
    table = new_table(index, 105)  # 64 + 36 quantized
    child = table.fork()
    first, last = table.blocks
    feed(table, 105, 106)
    assert table.blocks[0] == child.blocks[0] == first
    assert child.blocks[1] == last != table.blocks[1]
    feed(child, 105, 106)
    assert child.blocks[1] == last  # nobody else holds it any more
    check(index, [table, child])


@every_policy
@pytest.mark.parametrize("stop", [199, 164, 131, 100, 36, 34, 2, 0])
def test_A28_crop_keeps_what_was_stored_and_grows_on_like_a_cache(policy, stop):
    """huggingface/transformers#45510: only the window is cropped."""
    index = new_index(policy)
    table, caches = new_table(index), twins(policy)
    k, v = read(table)
    table.crop(stop)
    for cache in caches:
        cache.crop(stop)
    assert len(table) == len(table.tokens) == stop
    same_as(table, caches)
    np.testing.assert_array_equal(read(table)[0], k[:, :, :stop])
    np.testing.assert_array_equal(read(table)[1], v[:, :, :stop])
    check(index, [table])
    for a, b in ((stop, stop + 1), (stop + 1, T)):
        feed(table, a, b, k=-K, v=-V)
        for layer, cache in enumerate(caches):
            cache.append(-K[layer, :, a:b], -V[layer, :, a:b])
    same_as(table, caches)
    check(index, [table])


def test_a_crop_does_not_change_the_blocks_that_others_hold():
    index = new_index(block=64)
    table = new_table(index)
    child, before = table.fork(), read(table)
    for stop in (150, 90, 40, 0):
        child.crop(stop)
        feed(child, stop, stop + 50, k=-K, v=-V)
        check(index, [table, child])
    for now, then in zip(read(table), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_A28_reorder_picks_repeats_and_drops_sequences():
    """huggingface/transformers#45510: beams read each other's history."""
    index = new_index()
    data = [(K, V), (-K, V), (K[..., ::-1], -V)]
    tables = [
        new_table(index, 100 + n, k=k, v=v, tokens=[t + 50 * n for t in TOKENS])
        for n, (k, v) in enumerate(data)
    ]
    for bad in ([3], [-1], [0, 5]):
        with pytest.raises(ValueError, match=r"valid: 0\.\.2"):
            reorder(tables, bad)
    picked = reorder(tables, [2, 0, 0])
    assert [len(table) for table in tables] == [0, 0, 0]
    for table, n in zip(picked, [2, 0, 0], strict=True):
        k, v = data[n]
        same_as(table, twins(KIVI, 100 + n, k=k, v=v))
    feed(picked[1], 100, T, k=-K)
    same_as(picked[2], twins(KIVI, 100))
    check(index, picked)


def test_A29_every_layer_is_trimmed_and_gives_its_blocks_back():
    """waybarrios/vllm-mlx#69: quantized layers are skipped."""
    for policy in POLICIES.values():
        index = new_index(policy)
        table = new_table(index)
        evict_all(index)
        before = index.pool.used
        table.crop(17)
        evict_all(index)
        assert {table.stream(n, side).lengths for n in (0, 1) for side in (0, 1)} == {
            table.stream(0, 0).lengths
        }
        assert sum(table.stream(0, 0).lengths) == 17
        assert index.pool.used <= 1 < before


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("stop", [60, 63, 64, 70, 72])
def test_A30_a_draft_that_is_taken_back_leaves_no_trace(stop, accepted):
    """Blaizzy/mlx-vlm#1155: rejected tokens stay in the tail."""
    policy = replace(KIVI, residual=8, sinks=0)
    draft_k, draft_v = K.copy(), V.copy()
    draft_k[:, :, stop : stop + 4] *= 3
    table = new_table(new_index(policy), stop + 4, k=draft_k, v=draft_v)
    table.crop(stop + accepted)
    feed(table, stop + accepted, T)
    right_k, right_v = K.copy(), V.copy()
    right_k[:, :, stop : stop + accepted] *= 3
    same_as(table, twins(policy, k=right_k, v=right_v))


@pytest.mark.parametrize("stop", [-1, 201, 2.0, True, None, "3"])
def test_a_crop_that_is_no_length_changes_nothing(stop):
    table = new_table(new_index())
    with pytest.raises(ValueError, match="cannot crop 200 tokens"):
        table.crop(stop)
    same_as(table, twins(KIVI))


# --- swapping (SCL) -------------------------------------------------------------------
@every_policy
def test_A50_swapping_moves_every_byte_of_a_block(policy):
    """sgl-project/sglang#36121: codes without their scales, and a wrong size."""
    index = new_index(policy)
    table, caches = new_table(index), twins(policy)
    pool, blocks = index.pool, list(table.blocks)
    table.swap_out()
    saved = sum(a.nbytes for block in table.saved for s in block for a in s.values())
    assert saved == len(blocks) * pool.block_bytes
    evict_all(index)
    assert pool.used == 0
    poison(pool, range(len(pool.refs)))
    others = [new_table(index, 100, tenant=name) for name in "bc"]
    table.swap_in()
    same_as(table, caches)
    assert table.blocks != blocks
    check(index, [table, *others])
    feed(table, T, T)
    same_as(table, caches)


def test_A50_every_array_of_the_pool_takes_part_in_copy_save_and_same():
    """sgl-project/sglang#36121: a buffer that is added later and forgotten."""
    for policy in POLICIES.values():
        index = new_index(policy, blocks=3)
        pool = index.pool
        a, b = pool.allocate("a"), pool.allocate("a")
        arrays = pool_arrays(pool)
        known = [x for side in pool.arrays for x in side.values()]
        assert {id(x) for x in arrays} == {id(x) for x in known}
        assert all(len(x) == 3 for x in arrays)
        assert pool.block_bytes * 3 == sum(x.nbytes for x in arrays)
        sizes = [
            s.nbytes(H, 32, n) for s, n in zip(policy.schemes, (D, D_V), strict=True)
        ]
        assert pool.block_bytes == L * sum(sizes)
        for n, array in enumerate(arrays):
            assert pool.same(a, b)
            array[a] = n + 1
            assert not pool.same(a, b)
            pool.copy(a, b)
            assert pool.same(a, b)
        saved = pool.save(a)
        poison(pool, [a])
        assert not pool.same(a, b)
        pool.restore(a, saved)
        assert pool.same(a, b)


def test_a_sequence_that_is_swapped_out_can_only_come_back_or_close():
    index = new_index()
    table = new_table(index)
    table.swap_out()
    for call in (
        lambda: feed(table, 0, 1),
        lambda: table.crop(3),
        table.fork,
        table.swap_out,
        lambda: table.attend(0, Q),
        lambda: reorder([table], [0]),
    ):
        with pytest.raises(ValueError, match="swapped out; swap it in first"):
            call()
    table.close()
    with pytest.raises(ValueError, match="not swapped out"):
        table.swap_in()
    evict_all(index)
    assert index.pool.used == 0
    same_as(feed(table, 0, T), twins(KIVI))


def test_a_sequence_that_comes_back_shares_again_what_the_index_still_has():
    index = new_index()
    table = new_table(index)
    used = index.pool.used
    table.swap_out()
    assert index.pool.used == used  # the index holds them
    table.swap_in()
    assert index.pool.used == used
    check(index, [table])


def every_second(shape, dtype):
    """Every second block of a larger array; the others are NaN or 255."""
    big = np.full((2 * shape[0] + 1, *shape[1:]), fill(dtype), dtype)
    return big[1::2]


def padded_rows(shape, dtype):
    """Rows with 64 more numbers than they show."""
    return np.full((*shape[:-1], shape[-1] + 64), fill(dtype), dtype)[..., :-64]


def reversed_blocks(shape, dtype):
    return np.full(shape, fill(dtype), dtype)[::-1]


def poisoned(shape, dtype):
    return np.full(shape, fill(dtype), dtype)


def fill(dtype):
    return 255 if dtype == np.uint8 else np.nan


@pytest.mark.parametrize(
    "allocate", [every_second, padded_rows, reversed_blocks, poisoned]
)
@pytest.mark.parametrize("name", ["kivi-2", "fp16", "rotated-int4", "nf4-g64"])
def test_A49_strides_and_what_lies_between_do_not_matter(name, allocate):
    """vllm-project/vllm#49716: strides derived from the shape."""
    policy = POLICIES[name]
    index = new_index(policy, blocks=18, allocate=allocate)
    tables = [new_table(index, tenant=tenant) for tenant in "ab"]
    assert index.pool.used > 9
    for table in tables:
        same_as(table, twins(policy))
        child = table.fork()
        child.crop(99)
        table.swap_out()
        table.swap_in()
        same_as(table, twins(policy))
        child.close()
    check(index, tables)


def test_A51_every_scale_is_used_and_none_has_a_default():
    """sgl-project/sglang#20705: scales that are not loaded count as 1.0."""
    for name in ("kivi-2", "int4-token-g64", "nf4-g64", "rotated-int4", "mxfp8"):
        table = new_table(new_index(POLICIES[name]))
        for side, arrays in enumerate(table.pool.arrays):
            before = table.attend(1, Q)
            scale, one = arrays["scale"], table.blocks[2]
            kept = scale[one].copy()
            scale[one, 1, 1] = 4
            after = table.attend(1, Q)
            np.testing.assert_array_equal(after[:3], before[:3])  # KV head 0
            assert (after[3:] != before[3:]).any()
            scale[one] = kept
            stream = table.stream(0, side)
            bare = replace(stream.chunks[0], scale=None)
            with pytest.raises(AttributeError):
                bare.dequantize()


def test_A52_offsets_beyond_two_gigabytes_are_computed_in_64_bits():
    """vllm-project/vllm#47671: block 7,768 of 276,480 bytes overflows int32."""
    policy = Policy(Scheme(8, "token", None), Scheme(2, "tensor", 480))
    pool = BlockPool(policy, 7770, block=480, kv_heads=1, head_dim=576, value_dim=1)
    codes = pool.arrays[0]["codes"]  # untouched pages take no memory
    assert codes.strides[0] == 480 * 576 == 276_480
    while pool.free[-1] != 7768:
        pool.free.pop()
    i = np.int32(pool.allocate("a"))
    x = uneven((1, 1, 480, 576)), uneven((1, 1, 480, 1))
    tensors = [quantize(a, s) for a, s in zip(x, policy.schemes, strict=True)]
    pool.write(i, 0, tensors, 0, 480)
    view = pool.view(i, 0, 0, 480).codes
    offset = view.__array_interface__["data"][0] - codes.__array_interface__["data"][0]
    assert offset == 2_147_696_640
    np.testing.assert_array_equal(codes[7768, 0], tensors[0].codes[0])


# --- query groups ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("H_q", "H"), [(28, 4), (56, 8), (24, 4), (40, 8), (9, 3), (8, 1), (3, 3)]
)
def test_A34_every_ratio_of_heads_decodes(H_q, H):
    """flashinfer-ai/flashinfer#996: ratios 5, 6 and 7."""
    k, v, q = uneven((L, H, 90, D)), uneven((L, H, 90, D_V), 1), uneven((H_q, 1, D), 2)
    table = new_table(new_index(kv_heads=H), 90, k=k, v=v)
    k_hat, v_hat = read(table)
    right = attend(q, k_hat[1], v_hat[1])
    np.testing.assert_allclose(table.attend(1, q), right, rtol=1e-9, atol=1e-12)


def test_A35_query_head_h_reads_kv_head_h_over_the_ratio():
    """quantumaikr/quant.cpp#61: h % H_kv in place of h // ratio."""
    n = 16
    k = np.broadcast_to(1e4 * np.eye(n, dtype=np.float32), (L, 3, n, n))
    v = np.arange(3, dtype=np.float32)[:, None, None] + np.zeros((L, 3, n, D_V))
    v = v + 10 * np.arange(n, dtype=np.float32)[:, None]
    index = new_index("fp32", kv_heads=3, block=4)
    table = new_table(index, n, k=k, v=v)
    picks = [7, 2, 0, 11, 5, 15, 1, 10, 3]
    q = np.eye(n, dtype=np.float32)[picks][:, None]
    out = table.attend(1, q, tile=5)
    assert out[:, 0, 0].tolist() == [10 * t + h // 3 for h, t in enumerate(picks)]


def test_A36_only_kv_heads_are_quantized_and_only_once(monkeypatch):
    """microsoft/onnxruntime#31726: the cache is built once per query head."""
    shapes = []

    def spy(x, scheme):
        shapes.append(x.shape)
        return quantize(x, scheme)

    monkeypatch.setattr(kvq.paging, "quantize", spy)
    table = new_table(new_index())
    for H_q in (2, 8, 32):
        table.attend(0, uneven((H_q, 1, D)))
    assert shapes == [(L, H, 160, D), (L, H, 160, D_V)]


# --- prefixes (PFX) -------------------------------------------------------------------
@every_policy
@pytest.mark.parametrize("stop", [200, 131, 101, 40])
def test_A46_a_hit_never_changes_a_bit(policy, stop):
    """sgl-project/sglang#24198: right when cold, garbage when warm."""
    index = new_index(policy)
    cold, missed = resumed(index, stop)
    assert missed == 0
    warm, matched = resumed(index, stop)
    sinks, quantized, _ = policy.split(stop)
    usable = min(quantized, stop - 1 - sinks) // 32 * 32
    assert matched == (sinks + usable if usable else 0)
    for table in (cold, warm):
        same_as(table, twins(policy, stop))
    cold.close()
    warm.close()
    evict_all(index)
    assert index.pool.used == 0
    poison(index.pool, index.pool.free)
    again, missed = resumed(index, stop)
    assert missed == 0
    chunked, start = open_sequence(index, TOKENS[:stop], "a")
    feed(chunked, start, stop, chunk=3)
    for table in (again, chunked):
        same_as(table, twins(policy, stop))
    check(index, [again, chunked])


def test_A48_every_storage_works_in_every_state():
    """kekzl/imp#1349: the first request is answered, every later one dies."""
    for name in PRESETS:
        policy = stored_by(name, 4, 2)
        index = new_index(policy)
        stop = policy.residual + policy.sinks + 70
        cold, _ = resumed(index, stop)
        hit, matched = resumed(index, stop)
        cropped, chunked = cold.fork(), new_table(index, stop, chunk=11)
        cropped.crop(stop - 2)
        feed(cropped, stop - 2, stop)
        swapped = hit.fork()
        swapped.swap_out()
        swapped.swap_in()
        assert matched == 66
        for table in (cold, hit, cropped, chunked, swapped):
            same_as(table, twins(policy, stop))


def test_A43_equal_digests_do_not_share(monkeypatch):
    """vllm-project/vllm#12621: a hash that collides gives another tenant's block."""
    monkeypatch.setattr(kvq.paging, "digest", lambda data: b"the same for all")
    index = new_index()
    new_table(index, tenant="a")
    others = {
        "tenant": ({"tenant": "b"}, TOKENS),
        "no tenant": ({"tenant": None}, TOKENS),
        "adapter": ({"tenant": "a", "adapter": "x"}, TOKENS),
        "tokens": ({"tenant": "a"}, [t + 1 for t in TOKENS]),
        "first token": ({"tenant": "a"}, [1, *TOKENS[1:]]),
    }
    for who, tokens in others.values():
        table, matched = open_sequence(index, tokens, **who)
        assert matched == 0
        feed(table, 0, T, k=-K, tokens=tokens)
        same_as(table, twins(KIVI, k=-K))
    assert len(index.entries) == 1  # one key, six sequences
    again, matched = resumed(index)
    assert matched == 163
    same_as(again, twins(KIVI))


def test_A43_the_key_covers_everything_that_decides_a_block():
    """vllm-project/vllm#12621: keys that leave something out."""
    base = {"policy": Policy(Scheme(4, "channel", 8), Scheme(4), 4, 2), "block": 16}
    policy = base["policy"]
    key_scheme = policy.key
    variants = {
        "base": {},
        "bits": {"policy": replace(policy, key=replace(key_scheme, bits=2))},
        "bits of V": {"policy": replace(policy, value=Scheme(2))},
        "group": {"policy": replace(policy, key=replace(key_scheme, group=16))},
        "axis": {"policy": replace(policy, key=replace(key_scheme, per="head"))},
        "levels": {"policy": replace(policy, value=Scheme(4, levels="nf4"))},
        "scale dtype": {
            "policy": replace(policy, value=Scheme(4, scale_dtype="float32"))
        },
        "rotation": {"policy": replace(policy, value=Scheme(4, transform="hadamard"))},
        "rounding": {"policy": replace(policy, value=Scheme(4, rounding="half-away"))},
        "K and V swapped": {"policy": replace(policy, key=Scheme(4), value=key_scheme)},
        "window": {"policy": replace(policy, residual=5)},
        "sinks": {"policy": replace(policy, sinks=3)},
        "dtype": {"window_dtype": "float16"},
        "block": {"block": 32},
        "layers": {"layers": 3},
        "heads": {"kv_heads": 3},
        "D": {"head_dim": 32},
        "D_v": {"value_dim": 16},
    }
    keys = {}
    for name, options in variants.items():
        index = new_index(**{**base, **options})
        keys[name] = index.key(None, index.content([1, 23], "a"))
    index = new_index(**base)
    index.model = "another"
    keys["model"] = index.key(None, index.content([1, 23], "a"))
    index = new_index(**base)
    for name, who in {
        "other tokens": ([12, 3], "a"),
        "more tokens": ([1, 23, 0], "a"),
        "no tokens": ([], "a"),
        "tenant": ([1, 23], "b"),
        "no tenant": ([1, 23], None),
        "the tenant's name as an adapter": ([1, 23], None, "a"),
        "adapter": ([1, 23], "a", "a"),
        "an adapter with the model's name": ([1, 23], "a", "model"),
    }.items():
        keys[name] = index.key(None, index.content(*who))
    assert len(set(keys.values())) == len(keys)
    renamed = new_index(**{**base, "policy": replace(policy, name="a name")})
    assert renamed.key(None, renamed.content([1, 23], "a")) == keys["base"]


def test_A43_the_same_tokens_after_another_beginning_are_another_block():
    """vllm-project/vllm#12621: the chain of parents."""
    index = new_index(stored_by("int4-token-g64"))
    new_table(index)
    other = [99, *TOKENS[1:]]
    new_table(index, k=-K, tokens=other)
    mine, theirs = index.lookup(TOKENS, "a"), index.lookup(other, "a")
    assert mine[1].content == theirs[1].content
    assert mine[1].key != theirs[1].key
    assert mine[1].block != theirs[1].block


def test_A44_keys_are_typed_and_prefixed_with_their_length():
    """vllm-project/vllm#44701: a name and a salt that meet."""
    different = [
        (),
        (None,),
        ("",),
        (b"",),
        ("a", None),
        (None, "a"),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("a", "b"),
        ("asb",),
        (1, 23),
        (12, 3),
        (123,),
        (1,),
        ("1",),
        (b"1",),
        (True,),
        ("True",),
        ("n",),
        (-1,),
        ("i1",),
        (2**70,),
        ("é",),
        ("é".encode(),),
    ]
    assert len({encode_key(*parts) for parts in different}) == len(different)
    for other in (1.0, (1,), np.int64(1), [1], object()):
        with pytest.raises(TypeError, match="cannot be part of a key"):
            encode_key(other)


@pytest.mark.parametrize(
    ("prompt", "matched"),
    [
        (0, 0),
        (1, 0),
        (15, 0),
        (16, 0),
        (17, 16),
        (31, 16),
        (32, 16),
        (33, 32),
        (48, 32),
    ],
)
def test_A45_at_least_one_token_is_computed(prompt, matched):
    """vllm-project/vllm#9972: a prompt that is cached whole leaves nothing to do."""
    index = new_index(stored_by("int4-token-g64"), block=16)
    assert resumed(index, prompt)[1] == 0
    for _ in range(3):
        table, found = resumed(index, prompt)
        assert found == matched
        assert len(table) == prompt


def test_A47_dtypes_are_not_taken_for_one_another():
    """vllm-project/vllm#54338: bfloat16 read as float16, without a warning."""
    k, v = (x.astype(numpy_dtype("bfloat16")) for x in (K, V))
    k[0, 0, :3, 0] = [0.1621, 188, 436]
    index = new_index(replace(KIVI, sinks=3), window_dtype="bfloat16")
    table = new_table(index, k=k, v=v)
    np.testing.assert_array_equal(read(table)[0][0, 0, :3, 0], k[0, 0, :3, 0])
    with pytest.raises(TypeError, match="float32; this pool takes bfloat16"):
        feed(table, 0, 1)
    with pytest.raises(TypeError, match="uint16"):
        feed(table, 0, 1, k=k.view(np.uint16), v=v)
    swapped = [x.astype(">f4") for x in (K, V)]
    native = new_table(new_index(), k=swapped[0], v=swapped[1])
    same_as(native, twins(KIVI))


def test_a_short_prompt_finds_no_more_than_it_would_store_itself():
    """Its window would be full precision: a hit must not make it quantized."""
    index = new_index(stored_by("int4-token-g64", residual=50))
    new_table(index)
    assert len(index.lookup(TOKENS, "a")) == 4
    assert len(index.lookup(TOKENS[:83], "a")) == 1
    assert len(index.lookup(TOKENS[:81], "a")) == 0


@pytest.mark.parametrize("stop", [150, 140, 99])
def test_what_a_lossy_crop_leads_to_is_never_shared(stop):
    index = new_index(block=64)
    table = new_table(index)
    table.crop(stop)
    feed(table, stop, T)
    table.close()
    fresh, matched = resumed(index)
    assert matched == 131  # of the time before the crop
    same_as(fresh, twins(KIVI))


def test_after_a_lossy_crop_nothing_is_added_to_the_index():
    index = new_index(block=64)
    table = new_table(index, 70)  # 32 of them quantized
    table.crop(30)
    feed(table, 30, T)
    assert not table.exact
    assert list(index) == []
    assert resumed(index)[1] == 0


def test_a_crop_between_blocks_is_exact_and_shared():
    policy = stored_by("int4-channel-g32")
    index = new_index(policy)
    table = new_table(index)
    table.crop(96)
    other = {"k": K.copy(), "tokens": TOKENS[:96] + [7] * 104}
    other["k"][:, :, 96:] *= -1
    feed(table, 96, T, **other)
    assert table.exact
    for data in ({}, other):
        again, matched = resumed(index, **data)
        assert matched == 192
        same_as(again, twins(policy, k=data.get("k", K)))


def test_two_that_computed_the_same_prompt_end_up_with_the_same_blocks():
    index = new_index()
    first, second = (BlockTable(index, "a") for _ in range(2))
    for stop in range(50, T + 1, 50):
        feed(first, stop - 50, stop)
        feed(second, stop - 50, stop)
    assert first.blocks == second.blocks
    assert index.pool.used == len(first.blocks)
    first.close()
    evict_all(index)  # what the second holds stays
    assert resumed(index)[1] == 163
    same_as(second, twins(KIVI))


@pytest.mark.parametrize("where", ["keys", "sinks"])
def test_the_same_tokens_with_other_numbers_are_not_shared(where):
    """Another batch size may change a sum's last bit: then nothing is replaced."""
    index = new_index()
    first = new_table(index)
    k = K.copy()
    at = 1 if where == "sinks" else 40
    k[:, :, at] += 1
    second = new_table(index, k=k)
    assert not set(first.blocks[1:]) & set(second.blocks)
    same_as(first, twins(KIVI))
    same_as(second, twins(KIVI, k=k))
    third, matched = resumed(index)
    assert matched == 163
    same_as(third, twins(KIVI))
    check(index, [first, second, third])


# --- tenants --------------------------------------------------------------------------
@pytest.mark.parametrize("collide", [False, True])
def test_100_tenants_with_shared_prompts_never_share(monkeypatch, collide):
    if collide:
        monkeypatch.setattr(kvq.paging, "digest", lambda data: b"")
    policy = stored_by("int4-token-g64", sinks=2)
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 4, "value_dim": 4, "block": 8}
    index = new_index(policy, blocks=610, **shape)
    prompts = [[p, *range(30)] for p in range(2)]
    k = uneven((100, 2, 1, 1, 31, 4))  # as if each tenant had weights of its own
    matched, blocks = {}, {}
    for visit, tenant, p in itertools.product(range(2), range(100), range(2)):
        table, start = open_sequence(index, prompts[p], f"tenant {tenant}")
        matched.setdefault(visit, []).append(start)
        feed(table, start, 31, k=k[tenant, p], v=k[tenant, p], tokens=prompts[p])
        assert {index.pool.owner[i] for i in table.blocks} == {f"tenant {tenant}"}
        blocks.setdefault((tenant, p), set()).add(tuple(table.blocks[:3]))
        if visit and tenant % 10 == 0:
            cache = KVCache(policy)
            cache.append(k[tenant, p, 0], k[tenant, p, 0])
            stored = table.stream(0, 0).read(0, 31, np.float32)
            np.testing.assert_array_equal(stored, cache.keys())
        table.close()
    assert matched == {0: [0] * 200, 1: [26] * 200}
    assert all(len(found) == 1 for found in blocks.values())
    assert len({i for (found,) in blocks.values() for i in found}) == 600


def test_blocks_are_counted_for_their_tenant():
    index = new_index()
    tables = [new_table(index, tenant="a"), new_table(index, 100, tenant="b")]
    tables += [tables[0].fork(), resumed(index, tenant="a")[0]]
    tables += [new_table(index, 70, tenant=None)]
    pool = index.pool
    assert [pool.used_by(tenant) for tenant in ("a", "b", None, "c")] == [5, 2, 1, 0]
    assert pool.used == 8
    private = sum(x.nbytes for x in (*tables[0].sinks, *tables[0].window))
    assert private == L * H * (D + D_V) * 40 * 4
    assert tables[0].nbytes == 5 * pool.block_bytes + private
    assert index.nbytes == 3 * L * H * (D + D_V) * 3 * 4  # sinks of three prompts
    for table in tables:
        table.close()
    assert pool.used_by("a") == 5  # the index holds them
    evict_all(index)
    assert pool.used == index.nbytes == 0


def test_a_tenant_cannot_take_a_reference_to_another_tenants_block():
    table = new_table(new_index(), tenant="a")
    for other in ("b", None, "A"):
        with pytest.raises(ValueError, match="belongs to another tenant"):
            table.pool.share(table.blocks[0], other)


@pytest.mark.parametrize("bad", [1, True, b"a", ("a",), 1.0])
def test_tenants_and_adapters_are_strings_or_none(bad):
    index = new_index()
    for call in (
        lambda: open_sequence(index, TOKENS, bad),
        lambda: open_sequence(index, TOKENS, "a", bad),
        lambda: BlockTable(index, bad),
    ):
        with pytest.raises(TypeError, match="valid: a str or None"):
            call()


# --- a full pool ----------------------------------------------------------------------
def snapshot(index, tables):
    pool = index.pool
    return (
        list(pool.refs),
        sorted(pool.free),
        list(pool.owner),
        [contents(pool, i) for i in range(len(pool.refs))],
        [id(entry) for entry in index],
        [
            (list(t.tokens), list(t.blocks), t.quantized, t.indexed, t.exact)
            for t in tables
        ],
        [[x.tobytes() for x in (*t.sinks, *t.window)] for t in tables],
    )


@pytest.mark.parametrize("held", [True, False])
def test_a_full_pool_refuses_and_nothing_changes(held):
    index = new_index(blocks=6)
    tables = [new_table(index, tenant="a"), BlockTable(index, "b")]
    if not held:
        tables[0].crop(100)  # 3 blocks are only in the index now
    before = snapshot(index, tables)
    k, v = uneven((L, H, 200, D)), uneven((L, H, 200, D_V))
    with pytest.raises(PoolFull, match="can be evicted"):
        feed(tables[1], 0, T, k=k, v=v)
    assert snapshot(index, tables) == before
    tables[0].swap_out()
    other = new_table(index, 190, tenant="c")
    before = snapshot(index, [*tables, other])
    with pytest.raises(PoolFull, match="blocks needed"):
        tables[0].swap_in()
    assert snapshot(index, [*tables, other]) == before
    other.close()
    tables[0].swap_in()
    check(index, tables)
    feed(tables[0], len(tables[0]), T)


def test_copy_on_write_in_a_full_pool_refuses_and_nothing_changes():
    index = new_index(stored_by("int4-token-g64"), blocks=4)
    table = new_table(index, 100)
    child = table.fork()
    before = snapshot(index, [table, child])
    with pytest.raises(PoolFull, match="1 blocks needed; 0 are free"):
        feed(child, 100, 101)
    assert snapshot(index, [table, child]) == before
    table.close()
    feed(child, 100, 101)
    same_as(child, twins(stored_by("int4-token-g64"), 101))


def test_the_least_recently_used_leaf_that_nobody_holds_goes_first():
    policy = stored_by("int4-token-g64")
    index = new_index(policy)
    beginning = TOKENS[:64]
    prompts = {name: beginning + [n] * 40 for n, name in enumerate("pqr", 100)}
    tables = {}
    for name, tokens in prompts.items():
        tables[name], _ = open_sequence(index, tokens, "a")
        feed(tables[name], len(tables[name]), 104, tokens=tokens)
    assert len(list(index)) == 2 + 3  # two blocks in common, one leaf each
    for name in "pqr":
        tables[name].close()
    open_sequence(index, prompts["p"], "a")[0].close()  # p was used last
    for left in ("pr", "p", ""):
        assert index.evict()
        there = {entry.content for entry in index}
        leaves = {n: index.content(prompts[n][64:96], "a") for n in "pqr"}
        assert [n for n in "pqr" if leaves[n] in there] == list(left)
    assert len(list(index)) == 2  # shared blocks outlive their leaves
    assert index.evict()
    assert index.evict()
    assert not index.evict()
    assert index.entries == {}


def test_what_a_sequence_holds_is_not_evicted():
    index = new_index(blocks=5)
    table = new_table(index)
    assert not index.evict()
    assert index.evictable == 0
    child = table.fork()
    table.close()
    assert not index.evict()
    child.crop(100)
    assert index.evictable == 2
    evict_all(index)
    assert index.pool.used == 3


def test_many_prompts_run_through_a_small_pool():
    """Older prompts make room for newer ones, and results stay right."""
    index = new_index(blocks=7)
    for n in range(12):
        tokens, k = [t + 50 * n for t in TOKENS], np.roll(K, n, axis=2)
        table, matched = resumed(index, tokens=tokens, k=k)
        assert matched == 0
        same_as(table, twins(KIVI, k=k), tiles=(64,))
        check(index, [table])
        table.close()
    assert index.pool.used == 7


# --- wrong input ----------------------------------------------------------------------
BAD_INPUT = {
    "too few tokens": (TOKENS[:9], K[:, :, :10], V[:, :, :10]),
    "no layers": (TOKENS[:10], K[0, :, :10], V[0, :, :10]),
    "another layer": (TOKENS[:10], K[:1, :, :10], V[:1, :, :10]),
    "other heads": (TOKENS[:10], K[:, :1, :10], V[:, :1, :10]),
    "other keys": (TOKENS[:10], K[:, :, :10, :8], V[:, :, :10]),
    "other values": (TOKENS[:10], K[:, :, :10], V[:, :, :10, :4]),
    "another dtype": (TOKENS[:10], K[:, :, :10].astype(np.float16), V[:, :, :10]),
    "integers": (TOKENS[:10], K[:, :, :10].astype(int), V[:, :, :10]),
    "a NaN": (TOKENS[:10], K[:, :, :10], np.full_like(V[:, :, :10], np.nan)),
    "tokens that are floats": ([0.5] * 10, K[:, :, :10], V[:, :, :10]),
    "tokens that are text": ("0123456789", K[:, :, :10], V[:, :, :10]),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_refused_input_changes_nothing(what):
    index = new_index()
    table = new_table(index, 190)
    before = snapshot(index, [table])
    message = r"shape|dtype|holds|interpreted as an integer"
    with pytest.raises((ValueError, TypeError), match=message):
        table.append(*BAD_INPUT[what])
    assert snapshot(index, [table]) == before
    same_as(feed(table, 190, T), twins(KIVI))


def test_token_ids_may_be_any_integers():
    index = new_index()
    new_table(index, tokens=np.array(TOKENS, np.int32))
    table, matched = open_sequence(index, np.array(TOKENS, np.uint16), "a")
    assert matched == 163
    assert all(type(t) is int for t in table.tokens)


@pytest.mark.parametrize("tile", [0, -1, 2.5, True, "all"])
def test_a_tile_is_a_positive_integer_or_none(tile):
    with pytest.raises(ValueError, match="tile="):
        new_table(new_index()).attend(0, Q, tile=tile)


@pytest.mark.parametrize("layer", [-1, 2, 0.5, None])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(ValueError, match=r"layer=.*; valid: 0\.\.1"):
        new_table(new_index()).attend(layer, Q)


# --- claims (CLM) ---------------------------------------------------------------------
def test_A61_bytes_are_those_of_the_arrays_and_nothing_else_is_kept():
    """jy-yuan/KIVI#17: compression on paper only."""
    k, v = (x.astype(np.float16) for x in (K, V))
    index = new_index("kivi-2", blocks=3, window_dtype="float16")
    table = new_table(index, k=k, v=v)
    assert table.stream(0, 0).lengths == (0, 64, 136)
    del k, v
    gc.collect()
    of_the_pool = {id(a) for a in pool_arrays(index.pool)}
    full = [a for a in pool_arrays(table) if id(a) not in of_the_pool]
    assert sum(a.nbytes for a in full) == L * H * 136 * (D + D_V) * 2  # the window
    assert all(a.base is None for a in full)
    stored = sum(a.nbytes for a in pool_arrays(index.pool))
    assert 3 * index.pool.block_bytes == stored
    assert table.nbytes == 2 * index.pool.block_bytes + sum(a.nbytes for a in full)


def test_A62_reading_needs_one_tile_and_not_the_context():
    """ml-explore/mlx-lm#1587: a quantized cache that peaks above float16."""
    peaks, tile = {}, 64
    for n in (512, 2048):
        k = uneven((1, 2, n, 64)).astype(np.float16)
        pool = BlockPool("int4-token-g64", n // 32, kv_heads=2, head_dim=64)
        table = BlockTable(PrefixIndex(pool), "a")
        table.append(range(n), k, k)
        q = uneven((4, 1, 64))
        table.attend(0, q, tile=tile)
        gc.collect()
        tracemalloc.start()
        table.attend(0, q, tile=tile)
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[2048] < peaks[512] + 1536 * 64  # views of blocks, no numbers
    assert peaks[2048] < 2 * 2048 * 2 * 64 * 2 / 2  # half of the float16 cache
