import math

import numpy as np
import pytest
from plain import check_packing

from kvq.packing import pack, unpack

BITS = range(1, 9)
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 16, 20, 63, 65, 100]


# --- versions with a known fault ------------------------------------------------------
def big_nibble_first(codes, bits, axis):
    swapped = pack(codes, bits, axis)
    return swapped >> 4 | swapped << 4


def swapped_back(packed, bits, n, axis):
    return unpack(packed >> 4 | packed << 4, bits, n, axis)


def across_rows(codes, bits, axis):
    """Rows without padding: the bits run on into the next row."""
    return np.packbits(
        codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1, bitorder="little"
    )


def two_bit_mask(packed, bits, n, axis):
    return unpack(packed, bits, n, axis) & 0x3


def other_axis(codes, bits, axis):
    return pack(codes, bits, {-1: -2, -2: -1}[axis])


def big_endian_bits(codes, bits, axis):
    bitplanes = np.moveaxis(codes, axis, -1)[..., None]
    bitplanes = bitplanes >> np.arange(bits, dtype=np.uint8)[::-1] & 1
    flat = bitplanes.reshape(*bitplanes.shape[:-2], -1)
    return np.moveaxis(np.packbits(flat, axis=-1), -1, axis)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_packing_is_the_documented_bit_string(bits, axis):
    for n in LENGTHS:
        check_packing(pack, unpack, bits, n, axis)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("wrong_pack", "wrong_unpack"),
    [
        (big_nibble_first, unpack),
        (big_nibble_first, swapped_back),  # consistent with itself, and still wrong
        (pack, swapped_back),
        (across_rows, unpack),
        (pack, two_bit_mask),
        (other_axis, unpack),
        (big_endian_bits, unpack),
    ],
)
def test_a_wrong_packing_fails_the_same_check(wrong_pack, wrong_unpack, axis):
    with pytest.raises((AssertionError, ValueError)):
        check_packing(wrong_pack, wrong_unpack, 4, 7, axis)


def test_documented_examples():
    assert pack(np.uint8([0x3, 0xA]), 4).tolist() == [0xA3]
    codes = np.uint8([1, 2, 3, 4, 5, 6, 7, 0])
    value = sum(int(c) << 3 * i for i, c in enumerate(codes))
    assert pack(codes, 3).tolist() == [value & 255, value >> 8 & 255, value >> 16]
    assert pack(np.uint8([1, 0, 1, 1]), 1).tolist() == [0b1101]
    assert pack(np.uint8([255, 7]), 8).tolist() == [255, 7]


def test_all_pairs_of_nibbles():
    low, high = np.divmod(np.arange(256, dtype=np.uint8), 16)[::-1]
    packed = pack(np.stack([low, high], axis=-1), 4)
    np.testing.assert_array_equal(packed[:, 0], np.arange(256))


@pytest.mark.parametrize("bits", BITS)
def test_padding_bits_are_zero_and_are_ignored(bits):
    codes = np.full((1, 3), 2**bits - 1, np.uint8)
    packed = pack(codes, bits)
    used = 3 * bits
    assert int.from_bytes(packed.tobytes(), "little") == 2**used - 1
    padding = np.unpackbits(packed, axis=-1, bitorder="little")
    padding[:, used:] = 1
    dirty = np.packbits(padding, axis=-1, bitorder="little")
    np.testing.assert_array_equal(unpack(dirty, bits, 3), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 8), (2, 3, 0), (0, 0)])
def test_nothing_packs_to_nothing(bits, shape):
    codes = np.zeros(shape, np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], math.ceil(shape[-1] * bits / 8))
    assert packed.size == 0
    np.testing.assert_array_equal(unpack(packed, bits, shape[-1]), codes)


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, 4.0, True, "4", None])
def test_unsupported_widths_are_named(bits):
    for call in (
        lambda: pack(np.zeros(4, np.uint8), bits),
        lambda: unpack(np.zeros(4, np.uint8), bits, 4),
    ):
        with pytest.raises(ValueError, match="valid: 1, 2, 3, 4, 5, 6, 7, 8"):
            call()


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_code_that_does_not_fit_is_named(bits):
    codes = np.zeros((2, 5), np.uint8)
    codes[1, 3] = 2**bits
    with pytest.raises(ValueError, match=f"code {2**bits} does not fit in {bits} bits"):
        pack(codes, bits)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.float32, bool])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="expected uint8"):
        pack(np.ones(4, dtype), 4)
    with pytest.raises(TypeError, match="expected uint8"):
        unpack(np.ones(4, dtype), 4, 8)


@pytest.mark.parametrize("n", [0, 5, 6, 9, 16])
def test_a_length_that_does_not_match_is_refused(n):
    with pytest.raises(ValueError, match="bytes, not 4"):
        unpack(np.zeros(4, np.uint8), 4, n)


def test_views_of_any_layout_pack_alike_and_stay_as_they_were():
    base = np.random.default_rng(0).integers(0, 8, (4, 6, 10), dtype=np.uint8)
    base.flags.writeable = False
    for view in (
        base[:, ::2],
        base[::-1],
        base.swapaxes(0, 1),
        np.asfortranarray(base),
    ):
        copy = np.ascontiguousarray(view)
        np.testing.assert_array_equal(pack(view, 3), pack(copy, 3))
        np.testing.assert_array_equal(unpack(pack(view, 3), 3, 10), copy)
        assert pack(view, 3).flags.c_contiguous
