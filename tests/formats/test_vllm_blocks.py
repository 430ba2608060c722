"""Where vLLM's slots lie, and the hashes of its blocks (recorded from vLLM)."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain import uneven

from kvq.formats.vllm_blocks import (
    ORDERS,
    block_hashes,
    blocks_to_slots,
    cbor,
    flash_attention_cache,
    from_physical,
    paged_attention_keys,
    paged_attention_values,
    slots_to_blocks,
    to_physical,
)

# --- paged layouts --------------------------------------------------------------------
SHAPE = dict(zip("LBHNC", (2, 5, 3, 4, 7), strict=True))


def numbered_cache():
    return np.arange(np.prod(list(SHAPE.values()))).reshape(*SHAPE.values())


@pytest.mark.parametrize("order", ORDERS)
def test_physical_order_places_every_byte(order):
    cache = numbered_cache()
    physical = to_physical(cache, order)
    assert physical.flags.c_contiguous
    at = {"L": 1, "B": 4, "H": 2, "N": 3, "C": 5}
    offset = 0
    for axis in order:
        offset = offset * SHAPE[axis] + at[axis]
    assert physical.ravel()[offset] == cache[1, 4, 2, 3, 5]
    view = from_physical(physical, order)
    np.testing.assert_array_equal(view, cache)
    assert np.shares_memory(view, physical)


def test_aliases_and_unknown_orders():
    cache = numbered_cache()
    np.testing.assert_array_equal(to_physical(cache, "HND"), cache)
    assert to_physical(cache, "NHD").shape == (2, 5, 4, 3, 7)
    with pytest.raises(ValueError, match="order='NHL'; valid: LBHNC"):
        to_physical(cache, "NHL")


def test_slots_fill_blocks_and_the_rest_is_zero():
    slots = uneven((3, 37, 5)).astype(np.int8) | 1
    blocks = slots_to_blocks(slots, 16)
    assert blocks.shape == (3, 3, 16, 5)
    np.testing.assert_array_equal(blocks[1, 2, 4], slots[2, 20])
    assert not blocks[2, :, 5:].any()
    np.testing.assert_array_equal(blocks_to_slots(blocks, 37), slots)
    with pytest.raises(ValueError, match="block_size=0"):
        slots_to_blocks(slots, 0)


def test_layouts_of_earlier_versions():
    k = np.arange(5 * 3 * 4 * 32, dtype=np.float16).reshape(5, 3, 4, 32)
    v = -k
    cache = flash_attention_cache(k, v)
    assert cache.shape == (2, 5, 4, 3, 32)
    assert cache[1, 4, 2, 1, 9] == v[4, 1, 2, 9]
    keys = paged_attention_keys(k)
    assert keys.shape == (5, 3, 4, 4, 8)
    assert keys[4, 1, 19 // 8, 2, 19 % 8] == k[4, 1, 2, 19]
    assert paged_attention_values(v)[4, 1, 19, 2] == v[4, 1, 2, 19]
    with pytest.raises(ValueError, match="multiples of 16"):
        paged_attention_keys(np.zeros((1, 1, 4, 40), np.uint8))


# --- block hashes ---------------------------------------------------------------------
TOKENS = [(i * 7919 + 13) % 152_064 for i in range(300)]


def hexes(*args, **options):
    return [h.hex() for h in block_hashes(*args, algorithm="sha256_cbor", **options)]


def test_vllm_29bf597539_sha256_cbor_chain():
    # From vLLM's hash_block_tokens, as recorded in NVIDIA Dynamo's tests. 300 tokens
    # are two full blocks; the third is never hashed.
    assert hexes(TOKENS, 128) == [
        "3c922374e6fe67f3c64e75b88a3b8bd6185b538f7019674b72aefbf8dd8754f8",
        "2e69fa8c8aebe362593b51b8b212f1aeb45f9bb56c4258c0bf2a94f1e384e2a5",
    ]


def test_vllm_29bf597539_sha256_cbor_with_extra_keys():
    tokens = range(1000, 1128)
    item = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
    for expected, options in {
        "199e2f20e73a6e2cc3e0e6fdf521eff7b636122d5e122320c22c380d95e5863e": {},
        "84611d254438937d076c5739d973f17e1febd6a252387f535357a817319908b0": {
            "salt": "my-salt"
        },
        "3597444c4db23e603150784eeb8467b6895e64d29667e2496941709e6bad8adb": {
            "extra": lambda i: ((item, 5),)
        },
        "3f56ea40d074550a58b6ddadba236109d86356a3cc0aeca8a0c70c4be0df5cc0": {
            "extra": lambda i: (("aaaa", 3),),
            "salt": "my-salt",
        },
        "c914451f83e397a290b4a1749465eb9a832fc78ef98f8e32dace9514242864f2": {
            "extra": lambda i: (("aaaa", -3),)
        },
    }.items():
        assert hexes(tokens, 128, seed="0", **options) == [expected]
    two = [*tokens, *tokens]
    second = hexes(
        two, 128, seed="0", extra=lambda i: (("aaaa", 0), ("bbbb", 64)) if i else ()
    )[1]
    assert second == "2ea9f0275be48f4499ccdd95ca2d8cd26c5a995c2a9b08d7aa4ef2a5902569fc"


def test_vllm_default_hash_is_over_a_protocol_5_pickle():
    def pickled(body):
        return b"\x80\x05\x95" + struct.pack("<Q", len(body)) + body

    seed = b"\x8c\x0evllm-none-hash\x94."
    root = hashlib.sha256(pickled(seed)).digest()
    tokens = b"K\x07M\x2c\x01\x86\x94"  # BININT1 7, BININT2 300, TUPLE2, MEMOIZE
    salt = b"\x8c\x04abcd\x94\x85\x94"  # SHORT_BINUNICODE, TUPLE1
    body = b"C\x20" + root + b"\x94" + tokens + salt + b"\x87\x94."
    expected = hashlib.sha256(pickled(body)).digest()
    assert block_hashes([7, 300], 2, salt="abcd") == [expected]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_salt_separates_every_block_and_a_prefix_is_shared_without_one(algorithm):
    def chain(tokens, salt=None):
        return block_hashes(tokens, 16, salt, algorithm=algorithm)

    plain, a, b = (chain(TOKENS, salt) for salt in (None, "tenant a", "tenant b"))
    assert len(plain) == 18
    assert not set(a) & set(b)
    assert not set(a) & set(plain)
    other = [*TOKENS[:100], 5, *TOKENS[101:]]
    assert chain(other)[:6] == plain[:6]
    assert not set(chain(other)[6:]) & set(plain)
    assert chain(np.array(TOKENS, np.int32)) == plain


def test_cbor_examples_of_rfc_8949():
    examples = {
        0: "00",
        23: "17",
        24: "1818",
        1000: "1903e8",
        1000000: "1a000f4240",
        18446744073709551615: "1bffffffffffffffff",
        -1: "20",
        -100: "3863",
        "IETF": "6449455446",
        "\u00fc": "62c3bc",
        b"\x01\x02\x03\x04": "4401020304",
        None: "f6",
        (1, (2, 3), (4, 5)): "8301820203820405",
        (): "80",
    }
    for value, expected in examples.items():
        assert cbor(value).hex() == expected
    assert cbor(list(range(1, 26))).hex().startswith("98190102")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_cbor_integers_differ_unless_they_are_equal(a, b):
    assert (cbor(a) == cbor(b)) == (a == b)


def test_wrong_hash_input_is_named():
    with pytest.raises(
        ValueError, match="algorithm='xxhash'; valid: sha256, sha256_cbor"
    ):
        block_hashes(TOKENS, 16, algorithm="xxhash")
    with pytest.raises(ValueError, match="block_size=0"):
        block_hashes(TOKENS, 0)
    with pytest.raises(TypeError, match="float"):
        cbor((1, 2.5))
    with pytest.raises(ValueError, match="below 2"):
        cbor(2**64)
