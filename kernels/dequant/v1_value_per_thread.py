"""dequant v1 in Numba: one thread per value.

    x_hat = s * (code - offset) + z

The twin of `v1_value_per_thread.cu`: same arrays, same constant S, line by line the
same algorithm.
"""

import numpy as np

from kvq.kernels.device import array_of, functions, x_and_s


def kernels(c):
    """The kernel as a plain function, by name."""
    from numba import float32, int64

    f = functions(c.S)
    thread_index, ceil_div = f.thread_index, f.ceil_div
    read_code, code_offset, affine = f.read_code, f.code_offset, f.affine

    def dequant_v1(codes, scale, zero, y, N, T, D, gt, gc, bits, asymmetric):
        index = thread_index()
        if index >= int64(N) * T * D:
            return

        row, c = index // D, index % D
        n, t = row // T, row % T
        group = (n * ceil_div(int64(T), gt) + t // gt) * ceil_div(
            int64(D), gc
        ) + c // gc
        code = read_code(codes, row * ceil_div(int64(D) * bits, 32), c, bits)
        level = float32(code - code_offset(bits, asymmetric))
        z = float32(zero[group]) if asymmetric else float32(0)
        y[index] = affine(scale[group], level, z)

    return {"dequant_v1": dequant_v1}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import int32

    _, s = x_and_s(c)
    arrays = (array_of(np.uint32), s, s, array_of(np.float32))
    return {"dequant_v1": (*arrays, *(int32,) * 7)}
