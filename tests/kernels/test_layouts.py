"""Word layouts: every bit has one place, and the place is the documented one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.kernels.layouts import (
    LAYOUTS,
    PAIRED_BITS,
    bit_positions,
    from_words,
    row_words,
    to_words,
)
from kvq.packing import pack

CASES = [("canonical", b) for b in range(1, 9)] + [("paired", b) for b in PAIRED_BITS]


def words_of(*fields):
    """One word from (lowest bit, code) pairs."""
    return sum(code << bit for bit, code in fields)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("D", [1, 31, 80])
def test_canonical_words_are_the_bytes_of_the_reference(bits, D):
    codes = np.random.default_rng(D).integers(0, 2**bits, (2, 3, D), dtype=np.uint8)
    words = to_words(codes, bits)
    packed = pack(codes, bits)
    got = words.astype("<u4").view(np.uint8)
    np.testing.assert_array_equal(got[..., : packed.shape[-1]], packed)
    assert not got[..., packed.shape[-1] :].any()


@pytest.mark.parametrize(("layout", "bits"), CASES)
@pytest.mark.parametrize("D", [1, 33, 80, 128])
def test_every_bit_has_a_place_of_its_own(layout, bits, D):
    where = bit_positions(D, bits, layout)
    assert where.shape == (D, bits)
    assert len(np.unique(where)) == D * bits
    assert where.min() >= 0
    assert where.max() < 32 * row_words(D, bits, layout)
    if D % 32 == 0:  # no padding: a permutation of the row's bits
        assert 32 * row_words(D, bits, layout) == D * bits


@given(
    st.sampled_from(CASES),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_words_give_the_codes_back(case, D, tokens, seed):
    layout, bits = case
    codes = np.random.default_rng(seed).integers(0, 2**bits, (tokens, D), np.uint8)
    words = to_words(codes, bits, layout)
    assert words.dtype == np.uint32
    assert words.shape == (tokens, row_words(D, bits, layout))
    np.testing.assert_array_equal(from_words(words, bits, D, layout), codes)


def test_paired_4_bits_by_hand():
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 15]], np.uint8)
    first = words_of(
        (0, 1), (16, 2), (4, 3), (20, 4), (8, 5), (24, 6), (12, 7), (28, 8)
    )
    np.testing.assert_array_equal(to_words(codes, 4, "paired"), [[first, 15]])


def test_paired_8_bits_by_hand():
    codes = np.array([[0x11, 0x22, 0x33, 0x44]], np.uint8)
    np.testing.assert_array_equal(to_words(codes, 8, "paired"), [[0x44223311]])


def test_paired_3_bits_are_two_words_of_low_bits_and_one_of_high_bits():
    codes = np.zeros((1, 35), np.uint8)
    codes[0, [3, 17, 30, 34]] = [0b110, 0b001, 0b111, 0b101]
    low_first = words_of((16 + 2, 0b10))  # code 3 = 2p + h with p = 1, h = 1
    low_second = words_of((16, 0b01), (14, 0b11))  # codes 17 and 30, from 16 on
    high = words_of((16 + 1, 1), (15, 1))  # codes 3 and 30
    expected = [
        low_first,
        low_second,
        high,
        words_of((2 * 1, 0b01)),
        0,
        words_of((1, 1)),
    ]
    np.testing.assert_array_equal(to_words(codes, 3, "paired"), [expected])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_paired_neighbours_are_16_bits_apart(bits):
    where = bit_positions(64, bits, "paired")
    np.testing.assert_array_equal(where[1::2], where[::2] + 16)
    assert (where[::2] % 32 < 16).all()


@pytest.mark.parametrize(("D", "bits", "words"), [(80, 3, 9), (80, 4, 10), (13, 2, 1)])
def test_a_paired_row_is_whole_words(D, bits, words):
    assert row_words(D, bits, "paired") == words


def test_wrong_input_is_named():
    codes = np.zeros((2, 8), np.uint8)
    with pytest.raises(ValueError, match="layout='row'; valid: canonical, paired"):
        to_words(codes, 4, "row")
    with pytest.raises(
        ValueError, match="bits=5 in the paired layout; valid: 2, 3, 4, 8"
    ):
        row_words(8, 5, "paired")
    with pytest.raises(ValueError, match="bits=9 in the canonical layout"):
        bit_positions(8, 9)
    with pytest.raises(ValueError, match="code 4 does not fit in 2 bits"):
        to_words(codes + 4, 2)
    with pytest.raises(TypeError, match="codes have dtype int64; expected uint8"):
        to_words(codes.astype(np.int64), 4)
    with pytest.raises(TypeError, match="words have dtype int32; expected uint32"):
        from_words(np.zeros((2, 1), np.int32), 4, 8)
    with pytest.raises(ValueError, match="9 codes of 4 bits are 2 words"):
        from_words(np.zeros((2, 1), np.uint32), 4, 9)
    assert LAYOUTS == ("canonical", "paired")
