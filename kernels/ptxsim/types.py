"""PTX types, and the NumPy types that hold their values.

Floating-point numbers of 16 bits, and pairs of them, are held as their bits. A register
is declared with a type but PTX only fixes its width: instructions choose how they read
it.
"""

import numpy as np

NUMPY = {
    "pred": np.bool_,
    "b8": np.uint8,
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "f32": np.float32,
    "f64": np.float64,
}
SIZE = {name: np.dtype(dtype).itemsize for name, dtype in NUMPY.items()}

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
BITS = ("b16", "b32", "b64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
FLOATS = ("f32", "f64")


def bits_of(type_):
    """The unsigned NumPy type as wide as a PTX type."""
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[SIZE[type_]]


def constant(value, type_):
    """A PTX immediate as the NumPy scalar that an instruction of this type reads.

    `value` is an int, or the np.float32 or np.float64 of a literal like 0f3F800000.
    """
    dtype = NUMPY[type_]
    if type_ == "pred":
        return np.bool_(value)
    if isinstance(value, np.floating):
        if np.dtype(dtype).kind == "f":
            return dtype(value)
        value = int(value.view(np.uint32 if value.dtype.itemsize == 4 else np.uint64))
    bits = value & (2 ** (8 * SIZE[type_]) - 1)
    return bits_of(type_)(bits).view(dtype)
