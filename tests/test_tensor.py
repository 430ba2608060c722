import numpy as np
import pytest
from plain import uneven

from kvq.dtypes import numpy_dtype
from kvq.scheme import PER, PRESETS, Scheme
from kvq.tensor import concatenate, quantize

SCHEMES = [
    Scheme(4, "token", 8, "asymmetric"),
    Scheme(3, "channel", 8, "asymmetric"),
    Scheme(5, "head", 8, "full-range", "bfloat16"),
    Scheme(2, "tensor", 8, "symmetric", "float32"),
    Scheme(8, "token", None, "e4m3", "e8m0"),
    Scheme(3, "token", 8, "lloyd-max", transform="signed-hadamard"),
    Scheme(4, "channel", 8, "signed-extreme", transform="hadamard"),
    Scheme(16, levels="bfloat16"),
    Scheme(32, levels="float32"),
]
ROTATED = uneven((2, 37, 16))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("T", [0, 1, 7, 8, 9, 37])
def test_stored_shapes_and_bytes_are_the_schemes(scheme, T):
    x = ROTATED[:, :T]
    t = quantize(x, scheme)
    H, _, D = t.shape
    assert t.shape == x.shape
    assert t.tokens == T
    assert t.nbytes == sum(a.nbytes for a in t.arrays) == scheme.nbytes(H, T, D)
    assert t.codes.shape[:2] == (H, T)
    if scheme.full_precision:
        assert t.codes.dtype == numpy_dtype(scheme.levels)
        assert t.scale is t.zero is None
    else:
        assert t.codes.dtype == np.uint8
        assert t.codes.shape[2] == scheme.row_bytes(D)
        assert t.scale.shape == scheme.metadata_shape(H, T, D)
        assert t.scale.dtype == numpy_dtype(scheme.scale_dtype)
        assert (t.zero is not None) == scheme.has_zero
    if T:
        assert t.bits_per_element == scheme.bits_per_element(T, D, H)


def test_a_tensor_without_numbers_has_no_bits_per_element():
    with pytest.raises(ValueError, match=r"shape \(2, 0, 16\) holds no numbers"):
        _ = quantize(ROTATED[:, :0], Scheme()).bits_per_element


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reading_a_part_is_part_of_reading_it_all(scheme):
    t = quantize(ROTATED, scheme)
    whole = t.dequantize()
    assert whole.dtype == np.float32
    for part in [
        (0, 37),
        (5, 6),
        (8, 16),
        (15, 33),
        (-3, None),
        (7, 7),
        (9, 3),
        (30, 99),
    ]:
        np.testing.assert_array_equal(t.dequantize(*part), whole[:, slice(*part)])
        if not scheme.full_precision:
            codes = t.unpack()[:, slice(*part)]
            np.testing.assert_array_equal(t.unpack(*part), codes)


def test_stored_numbers_have_no_codes():
    with pytest.raises(ValueError, match="levels='float16' has no codes"):
        quantize(ROTATED, PRESETS["fp16"].key).unpack()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", [0, 8, 24, 32, 37])
def test_crop_keeps_the_first_tokens_and_nothing_else(scheme, n):
    t = quantize(ROTATED, scheme)
    cropped = t.crop(n)
    np.testing.assert_array_equal(cropped.dequantize(), t.dequantize(0, n))
    assert cropped.nbytes == scheme.nbytes(2, n, 16)
    assert all(a.base is None for a in cropped.arrays)


@pytest.mark.parametrize("n", [-8, -1, 7, 36, 38, 40])
def test_crop_refuses_parts_of_groups_and_what_is_not_there(n):
    t = quantize(ROTATED, Scheme(4, "channel", 8))
    with pytest.raises(
        ValueError, match=f"to {n} tokens; valid: multiples of 8 up to 37"
    ):
        t.crop(n)


@pytest.mark.parametrize("n", [-1, 38])
def test_crop_refuses_what_is_not_there_per_token_too(n):
    with pytest.raises(
        ValueError, match=f"to {n} tokens; valid: multiples of 1 up to 37"
    ):
        quantize(ROTATED, Scheme(4, "token", 8)).crop(n)


def test_crop_of_groups_that_span_all_tokens_keeps_all_or_fails():
    t = quantize(ROTATED, Scheme(4, "channel", None))
    np.testing.assert_array_equal(t.crop(37).dequantize(), t.dequantize())
    with pytest.raises(ValueError, match="cannot crop to 8 tokens"):
        t.crop(8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_concatenated_pieces_equal_the_whole(scheme):
    pieces = [ROTATED[:, a:b] for a, b in [(0, 8), (8, 8), (8, 32), (32, 37)]]
    t = concatenate([quantize(p, scheme) for p in pieces])
    whole = quantize(ROTATED, scheme)
    assert t.shape == whole.shape
    for a, b in zip(t.arrays, whole.arrays, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_concatenate_refuses_a_broken_group_and_another_scheme():
    scheme = Scheme(4, "channel", 8)
    odd, even = quantize(ROTATED[:, :7], scheme), quantize(ROTATED[:, :8], scheme)
    with pytest.raises(ValueError, match="7 tokens are not whole groups of 8"):
        concatenate([odd, even])
    with pytest.raises(ValueError, match="different schemes"):
        concatenate([even, quantize(ROTATED, Scheme(4, "token", 8))])
    whole = quantize(ROTATED, Scheme(4, "channel", None))
    with pytest.raises(ValueError, match="not whole groups"):
        concatenate([whole, whole])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", ">f4"])
def test_every_float_dtype_is_quantized_by_its_values(dtype):
    x = ROTATED.astype(numpy_dtype(dtype) if dtype == "bfloat16" else dtype)
    for scheme in SCHEMES:
        a, b = quantize(x, scheme), quantize(x.astype(np.float32), scheme)
        np.testing.assert_array_equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize("shape", [(20,), (37, 20), (2, 37, 20), (3, 2, 37, 20)])
def test_missing_axes_count_as_one(shape):
    x = uneven((3, 2, 37, 20))[(0,) * (4 - len(shape))]
    t = quantize(x, Scheme(4, "channel", 8))
    assert t.shape == (1,) * (3 - len(shape)) + shape
    assert t.dequantize().shape == t.shape


def test_views_of_any_layout_give_the_same_bytes_and_stay_as_they_were():
    base = uneven((4, 12, 20))
    base.flags.writeable = False
    for view in (
        base[:, ::2],
        base[::-1],
        base.swapaxes(0, 1),
        np.asfortranarray(base),
    ):
        for scheme in (SCHEMES[0], SCHEMES[1], SCHEMES[7]):
            a, b = quantize(view, scheme), quantize(view.copy(), scheme)
            for one, other in zip(a.arrays, b.arrays, strict=True):
                np.testing.assert_array_equal(one, other)
                assert not np.shares_memory(one, base)


@pytest.mark.parametrize("per", PER)
def test_float16_overflow_saturates_in_stored_numbers_and_scales(per):
    x = np.float32([[[1e6, -3e5, 12.0, 0.5]]])
    stored = quantize(x, Scheme(16, levels="float16")).dequantize()
    assert stored[0, 0].tolist() == [65504, -65504, 12, 0.5]
    assert np.isfinite(
        quantize(x, Scheme(4, per, None, "asymmetric")).dequantize()
    ).all()


@pytest.mark.parametrize(
    ("x", "scheme", "error", "message"),
    [
        (np.zeros((2, 3), np.int8), Scheme(), TypeError, "x has dtype int8"),
        (np.float32([[1, np.nan]]), Scheme(), ValueError, "x holds nan"),
        (np.float32(1), Scheme(), ValueError, r"x has shape \(\)"),
        (np.zeros((2, 3, 0), np.float32), Scheme(), ValueError, "D >= 1"),
        (np.zeros((2, 3, 96), np.float32), SCHEMES[5], ValueError, "power of two"),
        (np.zeros((2, 3), np.float32), "int4-token-g64", TypeError, "a Scheme"),
        (np.zeros((2, 3), np.float32), PRESETS["kivi-2"], TypeError, "a Scheme"),
    ],
)
def test_wrong_input_is_named(x, scheme, error, message):
    with pytest.raises(error, match=message):
        quantize(x, scheme)
