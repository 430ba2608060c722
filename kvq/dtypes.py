"""The number formats that scales, zeros and full-precision rows are stored in.

Everything that is stored passes through `cast`, which saturates: a finite
number never becomes inf or NaN on its way into a narrower format.
"""

import numpy as np

# name -> (bytes per number, largest finite value, smallest positive value)
DTYPES = {
    "float32": (4, float(np.finfo(np.float32).max), 2.0**-149),
    "bfloat16": (2, float(np.float32(3.3895313892515355e38)), 2.0**-133),
    "float16": (2, 65504.0, 2.0**-24),
    "float8_e4m3fn": (1, 448.0, 2.0**-9),
    "e8m0": (1, 2.0**127, 2.0**-127),
}

# Larger inputs are refused: up to here, nothing this package computes overflows.
# (A rotation and its inverse add up D numbers twice before they divide by sqrt(D).)
LARGEST_INPUT = 2.0**100

# What NumPy does not have comes from ml_dtypes, imported only when it is used.
_ML_DTYPES = {
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "e8m0": "float8_e8m0fnu",
}


def numpy_dtype(name):
    """The NumPy dtype called `name`, a key of `DTYPES`. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; valid: {', '.join(DTYPES)}")
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return np.dtype(name)


def itemsize(name):
    """Bytes per number of the format `name`."""
    return DTYPES[name][0]


def cast(x, dtype):
    """`x` rounded to nearest-even in `dtype` (a name or a NumPy dtype), saturating.

    e8m0 holds powers of two only and has no zero: it rounds to the nearest
    power and takes zero to 2^-127. (Scales follow the floor rule of the OCP MX
    specification, which `quantizer` applies before it casts.) float64 is rounded to
    float32 first on its way into the formats of ml_dtypes.
    """
    name = dtype if isinstance(dtype, str) else _name(dtype)
    if name == "float64":
        return np.asarray(x, dtype=np.float64)
    _, largest, smallest = DTYPES[name]
    low = smallest if name == "e8m0" else -largest
    x = np.asarray(x)
    if x.dtype.itemsize < 4:  # where `largest` may be inf
        x = x.astype(np.float32)
    return np.clip(x, low, largest).astype(numpy_dtype(name))


def _name(dtype):
    """`float8_e8m0fnu` is called e8m0 here; every other format keeps its name."""
    name = np.dtype(dtype).name
    return "e8m0" if name == "float8_e8m0fnu" else name


def as_float_array(x, what="x", finite=True):
    """`x` as a native-endian array of float16, bfloat16, float32 or float64.

    Raises TypeError for any other kind of number: an integer array may well be
    half-precision bits whose meaning was lost on the way. Raises ValueError, unless
    finite=False, for inf, NaN and numbers beyond 2^100.
    """
    x = np.asarray(x)
    if x.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(
            f"{what} has dtype {x.dtype}; expected float16, bfloat16, float32 or "
            "float64 (convert integers yourself: they may be raw 16-bit floats)"
        )
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    # min and max carry every NaN and inf, and need no array as large as x.
    if finite and x.size:
        with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
            extremes = np.array([x.min(), x.max()], dtype=np.float64)
        if not np.all(np.abs(extremes) <= LARGEST_INPUT):
            raise ValueError(
                f"{what} holds {_first_bad(x)!r}; valid: finite numbers up to 2^100"
            )
    return x


def _first_bad(x):
    bad = ~(np.abs(x.astype(np.float64)) <= LARGEST_INPUT)
    return float(x[bad][0])
