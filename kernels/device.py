"""What the Numba twins share: the functions of `kvq.cuh`, in Python.

    x_hat = s * level + z,   level = code - offset,   offset = 2^(b-1), or 0 asymmetric

They are device functions: kernels call them, nobody else. `functions()` makes them, so
that importing this module needs no Numba. Arrays are flat; rows are given by an offset.

Numba has no arithmetic on 16-bit numbers here, no vector types and no 16-byte loads: a
number becomes float32 as it is read, and the twins read one number at a time.
"""

import functools
import operator
from types import SimpleNamespace

import numpy as np

# C name -> NumPy dtype of x (X) and of scales and zeros (S).
DTYPES = {"__half": np.float16, "float": np.float32}

# The largest and the smallest positive number of a stored format: kvq/dtypes.py.
LARGEST = {"__half": 65504.0, "float": float(np.finfo(np.float32).max)}
SMALLEST = {"__half": 2.0**-24, "float": 2.0**-149}


def array_of(dtype):
    """The Numba type of a flat, contiguous array of `dtype`."""
    from numba import from_dtype, types

    return types.Array(from_dtype(np.dtype(dtype)), 1, "C")


def x_and_s(c):
    """The Numba types of an array of x and of an array of scales, by c.X and c.S."""
    return tuple(array_of(DTYPES[name]) for name in (getattr(c, "X", "float"), c.S))


@functools.cache
def functions(S):
    """The device functions, for scales stored as `S` ("__half" or "float")."""
    from numba import config, cuda, float32, int32, int64, uint32

    largest, smallest = float32(LARGEST[S]), float32(SMALLEST[S])

    @cuda.jit(device=True)
    def thread_index():
        """Of the whole grid, in 64 bits."""
        return int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x

    @cuda.jit(device=True)
    def ceil_div(a, b):
        return (a + b - 1) // b

    @cuda.jit(device=True)
    def clip(x, low, high):
        return min(max(x, low), high)

    @cuda.jit(device=True)
    def scale_and_zero(low, high, bits, asymmetric):
        """(s, z) of a group from its extremes, not rounded to S yet.

        s = (max - min) / (2^b - 1),   z = min      asymmetric
        s = max|x| / (2^(b-1) - 1),    z = 0        symmetric
        """
        if asymmetric:
            z = clip(low, -largest, largest)
            s = (clip(high, -largest, largest) - z) / float32((1 << bits) - 1)
        else:
            z = float32(0)
            s = max(abs(low), abs(high)) / float32((1 << (bits - 1)) - 1)
        if s != float32(0) and s < smallest:
            s = smallest
        return min(s, largest), z

    @cuda.jit(device=True)
    def code_offset(bits, asymmetric):
        return 0 if asymmetric else 1 << (bits - 1)

    @cuda.jit(device=True)
    def to_code(x, s, z, bits, asymmetric):
        """code = clip(round((x - z) / s), lowest, highest) + offset

        A scale of 0 belongs to a group of one level: any s will do.
        """
        half = 1 << (bits - 1)
        lowest = 0 if asymmetric else 1 - half
        highest = 2 * half - 1 if asymmetric else half - 1
        y = (x - z) / (float32(1) if s == float32(0) else s)
        # Clipped before it is rounded, so that the integer cannot overflow.
        y = clip(y, float32(lowest), float32(highest))
        return uint32(round(y) + code_offset(bits, asymmetric))

    if config.ENABLE_CUDASIM:  # it rounds every product, and has no libdevice
        rounded_product = operator.mul
    else:
        rounded_product = cuda.libdevice.fmul_rn

    @cuda.jit(device=True)
    def affine(s, level, z):
        """x_hat = s * level + z, rounded twice: the compiler must not fuse the two."""
        return rounded_product(float32(s), level) + float32(z)

    @cuda.jit(device=True)
    def read_code(words, row, i, bits):
        """Code i of the row that begins at words[row]; canonical words."""
        bit = i * bits
        word, shift = row + (bit >> 5), bit & 31
        code = words[word] >> uint32(shift)
        if shift + bits > 32:  # it straddles two words
            code |= words[word + 1] << uint32(32 - shift)
        return int32(code & uint32((1 << bits) - 1))

    @cuda.jit(device=True)
    def pair_of_codes(word, p, bits):
        """Elements 2p and 2p + 1 of a paired word, 16 bits apart."""
        return (word >> uint32(bits * p)) & uint32(0x10001 * ((1 << bits) - 1))

    @cuda.jit(device=True)
    def level(code, offset):
        """code - offset without an integer-to-float conversion, exactly.

        In binary32, the bits 0x4B000000 | code are the number 2^23 + code.
        """
        magic = int32(uint32(code) | uint32(0x4B000000)).view(np.float32)
        return magic - float32(2**23 + offset)

    return SimpleNamespace(
        thread_index=thread_index,
        ceil_div=ceil_div,
        scale_and_zero=scale_and_zero,
        code_offset=code_offset,
        to_code=to_code,
        affine=affine,
        read_code=read_code,
        pair_of_codes=pair_of_codes,
        level=level,
    )
