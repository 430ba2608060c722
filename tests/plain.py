"""Slow, plain loops that the tests compare the package with.

Nothing here uses the package's arithmetic: groups are cut by hand, bits are counted
one by one, attention visits one query of one head at a time. The `check_*` functions
are used on the package, and on wrong versions of it that they must reject.
"""

import itertools
import math

import numpy as np

EPS = 2.0**-23  # of float32, in which codes and values are computed
SIGNIFICAND_BITS = {"float32": 24, "bfloat16": 8, "float16": 11, "float8_e4m3fn": 4}
SMALLEST = {
    "float32": 2.0**-149,
    "bfloat16": 2.0**-133,
    "float16": 2.0**-24,
    "float8_e4m3fn": 2.0**-9,
    "e8m0": 2.0**-127,
}
LARGEST = {
    "float32": (2 - 2.0**-23) * 2.0**127,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "e8m0": 2.0**127,
}
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343]
NF4 += [-0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983]
NF4 += [0.562617, 0.72295684, 1.0]
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


# --- data -----------------------------------------------------------------------------
def uneven(shape, seed=0, dtype=np.float32):
    """Gaussian numbers with an outlier channel, a shifted channel, a constant channel.

    shape : (..., T, D). The first 4 tokens of the last head are constant as well.
    """
    x = np.random.default_rng(seed).standard_normal(shape)
    D = shape[-1]
    x[..., 1 % D] *= 20
    x[..., 2 % D] += 7
    x[..., 3 % D] = -1.5
    x.reshape(-1, *shape[-2:])[-1, :4] = 0.625
    return x.astype(dtype)


# --- packing --------------------------------------------------------------------------
def pack_row(codes, bits):
    """The bit string sum_i code_i * 2^(b*i), as whole little-endian bytes."""
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    return list(number.to_bytes(math.ceil(len(codes) * bits / 8), "little"))


def check_packing(pack, unpack, bits, n, axis=-1):
    """pack and unpack agree with `pack_row` on every row, and with each other."""
    rng = np.random.default_rng(n * 8 + bits)
    codes = rng.integers(0, 2**bits, (2, 3, n), dtype=np.uint8)
    codes.flat[: 2**bits] = np.arange(min(2**bits, codes.size), dtype=np.uint8)
    laid = np.ascontiguousarray(np.moveaxis(codes, -1, axis))
    packed = pack(laid, bits, axis)
    assert packed.dtype == np.uint8
    rows = np.moveaxis(packed, axis, -1).reshape(6, -1).tolist()
    assert rows == [pack_row(row, bits) for row in codes.reshape(6, n)]
    unpacked = unpack(packed, bits, n, axis)
    assert unpacked.dtype == np.uint8
    np.testing.assert_array_equal(unpacked, laid)


# --- groups, levels, scales -----------------------------------------------------------
def cuts(n, size):
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def groups(scheme, H, T, D):
    """{metadata index: the slices of the numbers that share it}."""
    G = scheme.group
    heads = cuts(H, H if scheme.per == "tensor" else 1)
    tokens = cuts(T, 1 if scheme.per == "token" else (G or T or 1))
    whole = {"token": G or D, "channel": 1, "head": D, "tensor": D}[scheme.per]
    axes = (heads, tokens, cuts(D, whole))
    return {
        tuple(i for i, _ in cell): tuple(s for _, s in cell)
        for cell in itertools.product(*map(enumerate, axes))
    }


def _floats(exponent_bits, mantissa_bits, bias, top):
    """Levels of a small float by its definition; None where a code is inf or NaN."""
    values = []
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        e = (code >> mantissa_bits) & (2**exponent_bits - 1)
        m = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        x = sign * (math.ldexp(m, 1 - bias) if e == 0 else math.ldexp(1 + m, e - bias))
        values.append(x if abs(x) <= top else None)
    return values


def level_values(scheme):
    """The level of each code, float64 (2^bits,), NaN where a code is never used."""
    half = 2 ** (scheme.bits - 1)
    if scheme.levels == "lloyd-max":
        from kvq.codebooks import lloyd_max

        return lloyd_max(scheme.bits)
    values = {
        "symmetric": [None, *range(1 - half, half)],
        "asymmetric": range(2 * half),
        "full-range": range(-half, half),
        "signed-extreme": range(-half, half),
        "nf4": NF4,
        "iq4_nl": IQ4_NL,
        "e2m1": _floats(2, 1, 1, 6),
        "e4m3": _floats(4, 3, 7, 448),
        "e5m2": _floats(5, 2, 15, 57344),
    }[scheme.levels]
    return np.array([np.nan if v is None else v for v in values])


def exact_scale(x, scheme):
    """(s, z) of one group x by the definition, before they are stored; float64.

    Signs are those of the definition: s of a signed extreme may be negative.
    """
    x = x.astype(np.float64)
    top, half = np.abs(x).max(), 2 ** (scheme.bits - 1)
    if scheme.levels == "asymmetric":
        x = np.clip(x, -LARGEST[scheme.scale_dtype], LARGEST[scheme.scale_dtype])
        return (x.max() - x.min()) / (2 * half - 1), x.min()
    if scheme.levels == "lloyd-max":
        return math.sqrt(np.mean(x**2)), None
    largest = np.nanmax(np.abs(level_values(scheme)))
    if scheme.levels == "full-range":
        largest = half - 0.5  # -half alone would let every positive extreme saturate
    if scheme.scale_dtype == "e8m0":
        exponent = math.frexp(top)[1] - math.frexp(largest)[1]
        return (math.ldexp(1.0, exponent) if top else 0.0), None
    extreme = x.flat[np.abs(x).argmax()]
    return {
        "signed-extreme": extreme / -half,
        "iq4_nl": extreme / -127,
    }.get(scheme.levels, top / largest), None


def check_scale(stored, exact, dtype):
    """The scale `stored` is `exact` in `dtype`; too small a one is the smallest there.

    Below 2^-148 float32, in which scales are computed, may lose it.
    """
    if dtype == "e8m0":
        assert math.frexp(stored)[0] == 0.5
        low, high = max(exact / 1.5, SMALLEST[dtype]), max(exact * 1.5, SMALLEST[dtype])
        assert low * (1 - EPS) <= stored <= high * (1 + EPS)
        return
    if abs(exact) < 2.0**-148:
        assert abs(stored) <= max(SMALLEST[dtype], 2.0**-148)
    else:
        exact = math.copysign(max(abs(exact), SMALLEST[dtype]), exact)
        check_rounded(stored, exact, dtype)


def check_rounded(stored, exact, dtype):
    """`stored` is `exact` rounded to nearest in `dtype`, saturating."""
    exact = min(max(exact, -LARGEST[dtype]), LARGEST[dtype])
    step = max(abs(exact) * 2.0 ** (1 - SIGNIFICAND_BITS[dtype]), SMALLEST[dtype])
    assert abs(stored - exact) <= 0.5 * step + 2 * EPS * abs(exact) + 2.0**-149


def check_quantized(x, t):
    """Every group of the stored tensor `t` of x, against the definition.

    Shapes and bytes; the scale and the zero; each value is a level, and (except for
    toward-zero) the level nearest to x. Needs a scheme without a transform.
    """
    scheme, (H, T, D) = t.scheme, x.shape[-3:]
    x32 = x.astype(np.float32).astype(np.float64)
    x_hat, codes = t.dequantize(), t.unpack()
    assert x_hat.dtype == np.float32
    assert x_hat.shape == codes.shape == x.shape
    assert np.isfinite(x_hat).all()
    assert t.nbytes == sum(a.nbytes for a in t.arrays) == scheme.nbytes(H, T, D)
    levels = level_values(scheme)
    cells = groups(scheme, H, T, D)
    assert t.scale.shape == tuple(np.max(list(cells), axis=0) + 1)
    for index, cell in cells.items():
        _check_group(x32[cell], codes[cell], x_hat[cell], index, levels, t)


def _check_group(x, codes, x_hat, index, levels, t):
    scheme, s = t.scheme, float(t.scale[index])
    z = 0.0 if t.zero is None else float(t.zero[index])
    exact_s, exact_z = exact_scale(x, scheme)
    if scheme.levels in ("signed-extreme", "iq4_nl") and x.max() == -x.min():
        exact_s = math.copysign(exact_s, s)  # either extreme will do
    check_scale(s, exact_s, scheme.scale_dtype)
    if exact_z is not None:
        check_rounded(z, exact_z, scheme.scale_dtype)
    assert not np.isnan(levels[codes]).any()
    tiny = 4 * EPS * (np.abs(x) + np.abs(levels[codes] * s) + abs(z)) + 2.0**-148
    assert (np.abs(levels[codes] * s + z - x_hat) <= tiny).all()
    candidates = levels[~np.isnan(levels)] * s + z
    nearest = np.abs(x[..., None] - candidates).min(axis=-1)
    slack = abs(s) if scheme.rounding == "toward-zero" else 0
    assert (np.abs(x - x_hat) <= nearest + slack + tiny).all()
    if scheme.levels == "asymmetric":
        limit = LARGEST[scheme.scale_dtype]
        bound = exact_s / 2 + (2**scheme.bits - 1) * abs(s - exact_s)
        bound += abs(z - exact_z) + np.abs(x - np.clip(x, -limit, limit))
        assert (np.abs(x - x_hat) <= bound + slack + tiny).all()


# --- attention ------------------------------------------------------------------------
def attend(q, k, v, scale=None, causal=False, mask=None, softcap=None, sinks=None):
    """One query of one head at a time; q (H_q, T_q, D), k (H, T, D), v (H, T, D_v).

    mask : bool (H_q, T_q, T) or None.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (H_q, T_q, D), (H, T, _) = q.shape, k.shape
    out = np.zeros((H_q, T_q, v.shape[-1]))
    for h, i in itertools.product(range(H_q), range(T_q)):
        last = T - T_q + i if causal else T - 1
        seen = [j for j in range(T) if j <= last and (mask is None or mask[h, i, j])]
        weights = [] if sinks is None else [float(sinks[h])]
        for j in seen:
            score = float(q[h, i] @ k[h // (H_q // H), j]) * (scale or D**-0.5)
            weights.append(softcap * math.tanh(score / softcap) if softcap else score)
        top = max(weights, default=0.0)
        weights = [math.exp(w - top) for w in weights]
        for w, j in zip(weights[len(weights) - len(seen) :], seen, strict=True):
            out[h, i] += w / sum(weights) * v[h // (H_q // H), j]
    return out
