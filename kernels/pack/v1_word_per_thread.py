"""pack v1 in Numba: one thread per group for its scale, one thread per word for codes.

    s = (max - min) / (2^b - 1),  z = min          or s = max|x| / (2^(b-1) - 1),  z = 0
    code = clip(round((x - z) / s), lowest, highest) + offset

The twin of `v1_word_per_thread.cu`: same arrays, same constants X and S (X is `__half`
or `float` here), line by line the same algorithm.
"""

import numpy as np

from kvq.kernels.device import array_of, functions, x_and_s


def kernels(c):
    """The two kernels as plain functions, by name."""
    from numba import float32, int64, uint32

    f = functions(c.S)
    thread_index, ceil_div = f.thread_index, f.ceil_div
    scale_and_zero, to_code = f.scale_and_zero, f.to_code

    def pack_v1_scales(x, scale, zero, N, T, D, gt, gc, bits, asymmetric):
        group = thread_index()
        across, along = ceil_div(int64(D), gc), ceil_div(int64(T), gt)
        if group >= N * along * across:
            return

        c0, t0 = group % across * gc, group // across % along * gt
        head = group // (across * along) * T * D
        low, high = float32(np.inf), float32(-np.inf)
        for t in range(t0, min(t0 + gt, T)):
            for c in range(c0, min(c0 + gc, D)):
                value = float32(x[head + t * D + c])
                low, high = min(low, value), max(high, value)
        s, z = scale_and_zero(low, high, bits, asymmetric)
        scale[group] = s
        if asymmetric:
            zero[group] = z

    def pack_v1(x, scale, zero, codes, N, T, D, gt, gc, bits, asymmetric):
        index = thread_index()
        W = ceil_div(int64(D) * bits, 32)
        if index >= N * T * W:
            return

        row = index // W
        n, t = row // T, row % T
        groups = (n * ceil_div(int64(T), gt) + t // gt) * ceil_div(int64(D), gc)
        first_bit = index % W * 32  # of the row, in this word
        word = uint32(0)
        for c in range(first_bit // bits, min(ceil_div(first_bit + 32, bits), D)):
            s, z = float32(scale[groups + c // gc]), float32(0)
            if asymmetric:
                z = float32(zero[groups + c // gc])
            code = to_code(float32(x[row * D + c]), s, z, bits, asymmetric)
            # The first code may have begun in the word before, the last may end in
            # the next.
            shift = c * bits - first_bit
            if shift < 0:
                word |= code >> uint32(-shift)
            else:
                word |= code << uint32(shift)
        codes[index] = word

    return {"pack_v1_scales": pack_v1_scales, "pack_v1": pack_v1}


def signatures(c):
    """The Numba types of the arguments, by kernel."""
    from numba import int32

    x, s = x_and_s(c)
    numbers = (int32,) * 7
    return {
        "pack_v1_scales": (x, s, s, *numbers),
        "pack_v1": (x, s, s, array_of(np.uint32), *numbers),
    }
