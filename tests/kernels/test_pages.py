"""Pages: every code, scale and zero has one place, and it is the documented one."""

import numpy as np
import pytest

from kvq.kernels.pages import (
    BITS,
    HEAD_DIMS,
    PageLayout,
    code_places,
    row_order,
    unsupported,
    vector_order,
)
from kvq.scheme import FP16, Scheme
from kvq.tensor import quantize

LAYOUTS = {
    "4 and 2 bits": (
        Scheme(4, "channel", 32, "asymmetric"),
        Scheme(2, "token", 32),
        64,
    ),
    "8 and 4 bits": (
        Scheme(8, "channel", 64),
        Scheme(4, "token", 64, "asymmetric"),
        128,
    ),
    "128 tokens": (
        Scheme(2, "channel", 128, "asymmetric"),
        Scheme(8, "token", None, "asymmetric"),
        128,
    ),
    "keys per token": (
        Scheme(2, "token", 64, "asymmetric"),
        Scheme(4, "token", 128),
        256,
    ),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return PageLayout(*LAYOUTS[request.param])


def whole_pages(layout, pages=3, heads=2, seed=0):
    """((codes, scale, zero) of keys, of values) of some pages, all numbers random."""
    rng = np.random.default_rng(seed)
    T, sides = pages * layout.tokens, []
    for scheme in (layout.key, layout.value):
        shape = scheme.metadata_shape(heads, T, layout.D)
        codes = rng.integers(0, 2**scheme.bits, (heads, T, layout.D), np.uint8)
        scale, zero = rng.standard_normal((2, *shape)).astype(np.float16)
        sides.append((codes, scale, zero if scheme.has_zero else None))
    return tuple(sides)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_every_code_has_a_place_of_its_own(bits, D, values):
    places = code_places(64, D, bits, values)
    np.testing.assert_array_equal(np.sort(places, axis=None), bits * np.arange(64 * D))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_16_bytes_of_a_lane_are_whole_fragments(bits, values):
    """Lane 4g + t: rows g, g + 8 and columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16 x 16."""
    lane_of = code_places(64, 128, bits, values) // 128 % 32
    for lane in range(32):
        g, t = divmod(lane, 4)
        token, channel = np.nonzero(lane_of == lane)
        row, column = (channel, token) if values else (token, channel)
        assert set(row % 16) == {g, g + 8}
        assert set(column % 16) == {2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9}
        assert len(row) == 64 * 128 / 32


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_512_bytes_are_neighbouring_blocks(bits, values):
    unit = code_places(128, 64, bits, values) // (128 * 32)
    token, channel = np.nonzero(unit == 0)
    blocks = sorted(set(zip(token // 16, channel // 16, strict=True)))
    in_order = [(t, c) for t in range(8) for c in range(4)]
    assert blocks == in_order[: 16 // bits]


def test_4_bits_by_hand():
    places = code_places(64, 64, 4)
    # lane 0, first block: rows 0 and 8, columns 0, 1, 8, 9
    by_hand = {(0, 0): 0, (8, 0): 4, (0, 8): 8, (8, 8): 12, (0, 1): 16, (8, 9): 28}
    assert {at: places[at] for at in by_hand} == by_hand
    assert places[0, 16] == 32  # the next block of channels
    assert places[1, 0] == 128 * 4  # the next row: lane 4
    values = code_places(64, 64, 4, values=True)
    assert values[0, 8] == 4  # rows are channels
    assert values[1, 0] == 16


def test_2_bits_by_hand():
    """Place k = 1 .. 4 of a half is at bit 10 - 2k; or so with its bytes swapped."""
    places = code_places(64, 64, 2)
    by_hand = {(0, 0): 8, (8, 0): 0, (0, 8): 6, (8, 8): 14, (0, 16): 4, (8, 16): 12}
    assert {at: places[at] for at in by_hand} == by_hand
    assert places[0, 1] == 16 + 8
    values = code_places(64, 64, 2, values=True)
    # channel 8 is in row g + 8 of A, token 8 in the right half
    assert [values[0, 0], values[8, 0], values[0, 8], values[8, 8]] == [8, 0, 6, 14]


def test_numbers_of_columns_by_hand():
    """Two blocks, 16 bytes for each t: columns 2t, 2t + 1 of both; 2t + 8, 2t + 9."""
    first = [0, 1, 16, 17, 8, 9, 24, 25]
    np.testing.assert_array_equal(vector_order(2).reshape(4, 8)[0], first)
    np.testing.assert_array_equal(vector_order(2).reshape(4, 8)[3], np.add(first, 6))
    assert sorted(vector_order(8)) == list(range(128))


def test_numbers_of_rows_by_hand():
    """Lane group g: rows g, g + 8 of the four blocks of 16 tokens; group by group."""
    order = row_order(2, 3).reshape(2, 3, 8, 8)
    rows = np.array([5, 13, 21, 29, 37, 45, 53, 61])
    np.testing.assert_array_equal(order[0, 2, 5], 3 * rows + 2)
    np.testing.assert_array_equal(order[1, 0, 5], 3 * (64 + rows))
    assert sorted(order.ravel()) == list(range(2 * 64 * 3))


def test_pages_give_everything_back(layout):
    sides = whole_pages(layout)
    pages = layout.to_pages(*sides)
    assert pages.shape == (2, 3, layout.words)
    assert pages.dtype == np.uint32
    for side, back in zip(sides, layout.from_pages(pages), strict=True):
        for a, b in zip(side, back, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


def test_a_page_is_as_long_as_what_is_stored_in_it(layout):
    """No padding: bytes of codes, scales and zeros, in 16-byte pieces."""
    stored = sum(
        s.nbytes(1, layout.tokens, layout.D) for s in (layout.key, layout.value)
    )
    assert 4 * layout.words == stored
    assert layout.words % 4 == 0
    assert [n % 4 for n in (*layout.head, *layout.step)] == [0] * 6
    assert layout.tokens % 64 == 0


def test_the_reference_reads_pages():
    key, value, D = LAYOUTS["4 and 2 bits"]
    layout = PageLayout(key, value, D)
    x = np.random.default_rng(3).standard_normal((2, 2, 192, D)).astype(np.float32)
    k, v = quantize(x[0], key), quantize(x[1], value)
    pages = layout.to_pages(*((t.unpack(), t.scale, t.zero) for t in (k, v)))
    (codes, scale, zero), _ = layout.from_pages(pages)
    s, z = (a.astype(np.float32).repeat(32, axis=1) for a in (scale, zero))
    np.testing.assert_array_equal(codes * s + z, k.dequantize())


def test_numbers_in_full_precision():
    layout = PageLayout(FP16, FP16, 64)
    k, v = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float16)
    pages = layout.to_pages((k, None, None), (v, None, None))
    assert pages.nbytes == k.nbytes + v.nbytes
    (k_back, *nothing), (v_back, *_) = layout.from_pages(pages)
    np.testing.assert_array_equal(k_back, k)
    np.testing.assert_array_equal(v_back, v)
    assert nothing == [None, None]


@pytest.mark.parametrize(
    ("key", "value", "D", "reason"),
    [
        (Scheme(3), Scheme(4), 64, "key: bits=3; valid: 16, 8, 4, 2"),
        (Scheme(4), Scheme(4, "channel", 32), 64, "value: per='channel'; valid: token"),
        (Scheme(4, "channel", 48), Scheme(4), 64, "key: group=48; valid: 32, 64, 128"),
        (Scheme(4, "token", 48), Scheme(4), 64, "key: group=48; valid: a multiple of"),
        (Scheme(4), Scheme(4), 80, "D=80; valid: 64, 128, 256"),
        (Scheme(4), Scheme(4, levels="nf4"), 64, "value: levels='nf4'; valid: symm"),
        (Scheme(4), FP16, 64, "keys or values alone in full precision"),
        (
            Scheme(4, scale_dtype="float32"),
            Scheme(4),
            64,
            "key: scale_dtype='float32'; valid: float16",
        ),
    ],
)
def test_what_no_page_holds_is_refused_with_the_reason(key, value, D, reason):
    assert unsupported(key, value, D).startswith(reason)
    with pytest.raises(ValueError, match=f"^{reason[:20]}"):
        PageLayout(key, value, D)


def test_other_shapes_are_refused():
    layout = PageLayout(*LAYOUTS["128 tokens"])
    k, v = whole_pages(layout)
    with pytest.raises(ValueError, match=r"T a multiple of 128"):
        layout.to_pages((k[0][:, :64], *k[1:]), v)
    with pytest.raises(ValueError, match=rf"expected \(..., pages, {layout.words}\)"):
        layout.from_pages(np.zeros((2, layout.words - 1), np.uint32))
