import ml_dtypes
import numpy as np
import pytest

from kvq.dtypes import DTYPES, as_float_array, cast, itemsize, numpy_dtype

FLOATS = ["float16", "bfloat16", "float32", "float64"]
STORED = ["float32", "bfloat16", "float16", "float8_e4m3fn"]


@pytest.mark.parametrize("name", STORED)
def test_table_agrees_with_the_formats_own_limits(name):
    info = ml_dtypes.finfo(numpy_dtype(name))
    size, largest, smallest = DTYPES[name]
    assert itemsize(name) == size == info.bits // 8
    assert largest == float(info.max)
    assert smallest == float(info.smallest_subnormal)


def test_e8m0_holds_the_powers_of_two_from_minus_127_to_127():
    values = np.arange(255, dtype=np.uint8).view(numpy_dtype("e8m0"))
    np.testing.assert_array_equal(
        values.astype(np.float64), 2.0 ** np.arange(-127, 128)
    )
    assert DTYPES["e8m0"] == (1, 2.0**127, 2.0**-127)


def test_unknown_format_is_named_with_the_valid_ones():
    with pytest.raises(ValueError, match="'int8'; valid: float32, bfloat16"):
        numpy_dtype("int8")


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("bfloat16", [1 + 2**-8, 1 + 3 * 2**-8], [1, 1 + 2**-6]),
        (
            "float16",
            [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3e-8],
            [1, 1 + 2**-9, 0, 2**-24],
        ),
        ("float8_e4m3fn", [1 + 2**-4, 1 + 3 * 2**-4, 17, 19], [1, 1.25, 16, 20]),
        ("e8m0", [1.4, 1.6, 0.7, 0.8], [1, 2, 0.5, 1]),
    ],
)
def test_cast_rounds_to_nearest_even(name, x, expected):
    np.testing.assert_array_equal(
        cast(np.float32(x), name).astype(np.float64), expected
    )


@pytest.mark.parametrize("name", STORED)
def test_cast_saturates_where_the_plain_conversion_gives_inf_or_nan(name):
    _, largest, _ = DTYPES[name]
    huge = np.array([1e300, -1e300, np.nextafter(largest, np.inf), 1.04 * largest])
    np.testing.assert_array_equal(
        cast(huge, name).astype(np.float64), np.array([1, -1, 1, 1]) * largest
    )


@pytest.mark.parametrize("x", [0.0, -3.0, -0.0, 1e-300])
def test_e8m0_has_neither_zero_nor_sign(x):
    assert float(cast(np.array([x]), "e8m0")[0]) == 2.0**-127


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", [*STORED, "e8m0"])
def test_every_format_casts_into_every_other_without_a_warning(source, target):
    x = np.array([0.5, 1.0, 4.0]).astype(
        numpy_dtype(source) if source in DTYPES else source
    )
    y = cast(x, target)
    assert y.dtype == numpy_dtype(target)
    np.testing.assert_array_equal(y.astype(np.float64), [0.5, 1, 4])


@pytest.mark.parametrize("name", [*STORED, "e8m0"])
def test_a_numpy_dtype_means_the_same_as_its_name(name):
    x = np.float32([0.3, 5.7])
    np.testing.assert_array_equal(cast(x, numpy_dtype(name)), cast(x, name))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_arrays_are_taken_as_they_are(dtype):
    x = np.arange(6.0).reshape(2, 3).astype(dtype)
    assert as_float_array(x) is x or np.shares_memory(as_float_array(x), x)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", "<f4"])
def test_either_byte_order_is_read_and_native_order_comes_back(dtype):
    x = np.array([1.5, -2.25]).astype(dtype)
    y = as_float_array(x)
    assert y.dtype.isnative
    np.testing.assert_array_equal(y, [1.5, -2.25])


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(3, np.int32),
        np.zeros(3, np.uint16),
        np.zeros(3, bool),
        np.zeros(3, complex),
        np.zeros(3, ml_dtypes.float8_e4m3fn),
        np.array(["a"]),
        None,
        [1, 2],
    ],
)
def test_other_kinds_of_numbers_are_refused(x):
    with pytest.raises(TypeError, match=r"keys has dtype .*; expected float16"):
        as_float_array(x, "keys")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_are_named_wherever_they_are(dtype, bad):
    for i in range(3):
        x = np.ones(3).astype(dtype)
        x[i] = bad
        with pytest.raises(ValueError, match=f"x holds {bad!r}; valid: finite"):
            as_float_array(x)


def test_the_largest_input_is_two_to_the_hundred():
    as_float_array(np.float32([2.0**100, -(2.0**100)]))
    for x in (np.float32([-(2.0**101)]), np.array([np.nextafter(2.0**100, np.inf)])):
        with pytest.raises(ValueError, match=r"valid: finite numbers up to 2\^100"):
            as_float_array(x)


def test_an_empty_array_is_ordinary_input():
    assert as_float_array(np.zeros((2, 0, 5), np.float16)).shape == (2, 0, 5)
