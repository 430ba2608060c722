r"""One step of HQQ's refinement, compiled by Numba: `huggingface.Hqq.step`, faster.

    code = rne(s x + z),    e = x - (code - z) / s
    e' = sign(e) max(|e| - |e|^(p - 1) / beta, 0)
    z <- mean(code - (x - e') s)

Every operation rounds as NumPy's does, and the numbers of a group are added in NumPy's
order. Only the power differs, in its last place: NumPy's own depends on the processor.
What is computed on the way stays in the processor's first cache. The loops are short
and each does one thing, so that the compiler takes several numbers by one instruction.

Import it where it is used: it needs Numba.
"""

import numpy as np
from numba import njit

f32, i32 = np.float32, np.int32

GROUP = 64  # numbers in a group
WIDTH = 512  # columns at a time: memory is read in long runs, and they fit the cache
INVERSE_BETA = f32(1 / 10)
# Below 0.17, |e|^(p - 1) / beta is larger than |e|, and e' is 0 whatever it is.
SMALL = f32(2**-3)

# A division by 0 gives inf, as in NumPy: to look for it takes a branch in every loop.
OPTIONS = {"cache": True, "error_model": "numpy"}


def step(x, s, z, along, top):
    """(the next z, mean |e|) of each group: float32 (groups,).

    x : float32, groups of 64 numbers along axis `along`, 0 or 1.
    s, z : float32 (groups,). top : the largest code.
    """
    x = np.ascontiguousarray(x)
    z_next, size = np.empty_like(z), np.empty_like(z)
    kernel = rows if along == 1 else columns
    kernel(x, s, z, f32(top), z_next, size)
    return z_next, size


# --- one number -----------------------------------------------------------------------
@njit(**OPTIONS)
def level(x, s, z, top):
    """code = rne(s x + z), within 0 .. top."""
    code = np.rint(x * s + z)
    code = code if code > 0 else f32(0)
    return code if code < top else top


# x^-0.3 = y (1 - k)^-0.1,  k = 1 - x^3 y^10, for every y. The bits of a float, as an
# integer, are its logarithm but for a bend: -0.3 times them gives a y within 4 %.
@njit(fastmath={"contract"}, **OPTIONS)
def power(x):
    """x^(p - 1), p = 0.7, of float32 x >= 2^-3, within 1.5 units in the last place."""
    y = i32(i32(1384371180) - i32(f32(f32(x).view(i32)) * f32(0.3))).view(f32)
    r = x * y * (y * y)
    k = f32(1) - r * r * (r * y)
    # ((1 - k)^-0.1 - 1) / k for |k| < 0.34: the polynomial through 8 Chebyshev nodes.
    k2 = k * k
    a = f32(0.09999998) + f32(0.05499995) * k
    b = f32(0.03850643) + f32(0.02984582) * k
    c = f32(0.02418814) + f32(0.02049053) * k
    d = f32(0.02189233) + f32(0.01982831) * k
    return y + y * (k * (a + b * k2 + (c + d * k2) * (k2 * k2)))


@njit(**OPTIONS)
def dropped(e):
    """|e|^(p - 1) / beta: the part of |e| that e' is smaller by."""
    size = abs(e)
    return power(size if size > SMALL else SMALL) * INVERSE_BETA


@njit(**OPTIONS)
def shrunk(e, less):
    """e' = sign(e) max(|e| - less, 0): e without its part in [-less, less]."""
    part = e if e < less else less
    part = part if part > -less else -less
    return e - part


# --- groups ---------------------------------------------------------------------------
@njit(**OPTIONS)
def pairwise_sum(a):
    """The sum of 64 numbers in NumPy's order: eight partial sums, then theirs."""
    r0, r1, r2, r3, r4, r5, r6, r7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    for i in range(8, GROUP, 8):
        r0 += a[i]
        r1 += a[i + 1]
        r2 += a[i + 2]
        r3 += a[i + 3]
        r4 += a[i + 4]
        r5 += a[i + 5]
        r6 += a[i + 6]
        r7 += a[i + 7]
    return ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))


@njit(**OPTIONS)
def room(n):
    """An array of its own. (Parts of one array might overlap, for all that the compiler
    knows, and it would look at every loop.)"""
    return np.empty(n, f32)


@njit(**OPTIONS)
def rows(x, s, z, top, z_next, mean_size):
    """`step` where groups are the rows of x."""
    code, e, less, term = room(GROUP), room(GROUP), room(GROUP), room(GROUP)
    for g in range(len(x)):
        xg, sg, zg = x[g], s[g], z[g]
        for i in range(GROUP):
            code[i] = level(xg[i], sg, zg, top)
            e[i] = xg[i] - (code[i] - zg) / sg
        for i in range(GROUP):
            less[i] = dropped(e[i])
        for i in range(GROUP):
            term[i] = code[i] - (xg[i] - shrunk(e[i], less[i])) * sg
        for i in range(GROUP):
            e[i] = abs(e[i])
        z_next[g] = pairwise_sum(term) / f32(GROUP)
        mean_size[g] = pairwise_sum(e) / f32(GROUP)


@njit(**OPTIONS)
def columns(x, s, z, top, z_next, mean_size):
    """`step` where groups are the columns of x, added up row after row."""
    code, e, less = room(WIDTH), room(WIDTH), room(WIDTH)
    term_sum, size_sum = room(WIDTH), room(WIDTH)
    for j in range(0, x.shape[1], WIDTH):
        n = min(WIDTH, x.shape[1] - j)
        sj, zj = s[j : j + n], z[j : j + n]
        term_sum[:] = 0
        size_sum[:] = 0
        for k in range(GROUP):
            xk = x[k, j : j + n]
            for i in range(n):
                code[i] = level(xk[i], sj[i], zj[i], top)
                e[i] = xk[i] - (code[i] - zj[i]) / sj[i]
            for i in range(n):
                less[i] = dropped(e[i])
            for i in range(n):
                term_sum[i] += code[i] - (xk[i] - shrunk(e[i], less[i])) * sj[i]
            for i in range(n):
                size_sum[i] += abs(e[i])
        for i in range(n):
            z_next[j + i] = term_sum[i] / f32(GROUP)
            mean_size[j + i] = size_sum[i] / f32(GROUP)
