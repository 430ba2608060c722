r"""FP8, FP4 and the block formats made of them: MXFP8, MXFP4, NVFP4.

A small float has a sign, exponent bits e and M mantissa bits m. Its code is the bit
pattern, so larger codes are larger magnitudes.

    value = (-1)^sign 2^(max(e, 1) - bias) ([e > 0] + m / 2^M)

Block formats divide by a shared scale first: MX by a power of two per 32 numbers,
NVFP4 by an E4M3 number per 16 and one float32 per tensor. Two 4-bit codes share a
byte, the even number in the low half.

Sources: OCP 8-bit Floating Point v1.0; OCP Microscaling Formats v1.0; CUDA's
`cvt.rn.satfinite`; csrc/nvfp4_kv_cache_kernels.cu of vLLM. Oracle: ml_dtypes.
"""

from dataclasses import dataclass

import numpy as np

from kvq.codebooks import levels
from kvq.formats.base import CHUNK, BlockFormat, Facts, Format
from kvq.formats.rounding import f32, rne
from kvq.packing import pack, unpack
from kvq.scheme import Scheme

# The smallest scale that `check_scale` takes: reciprocals must not overflow float32.
SMALLEST_SCALE = 2.0**-100


# --- single numbers -------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Minifloat:
    """A small float, rounded to nearest-even.

    values : float32, the value of every code. top : the code of the largest number.
    nan : the code of NaN; None where the format has none.
    sign : the position of the sign bit; None where the format has none.
    """

    name: str
    mantissa: int
    bias: int
    values: np.ndarray
    top: int
    nan: int | None
    sign: int | None

    @property
    def largest(self):
        """The largest finite value, float32."""
        return self.values[self.top]

    @property
    def largest_exponent(self):
        """floor(log2 largest), the e_max of the OCP scale rule."""
        return int(np.frexp(self.largest)[1]) - 1

    def encode(self, x, saturate=True):
        r"""The code of the nearest value: float32 of any shape -> uint8.

            e = max(floor(log2 |x|), 1 - bias)
            code = (e + bias - 1) 2^M + rne(|x| 2^(M - e))

        Halfway goes to the even mantissa. With `saturate`, numbers beyond the largest
        (and inf) take it: CUDA's satfinite. Without, those that round beyond it become
        NaN (e4m3) or inf (e5m2): a cast of ml_dtypes or PyTorch. NaN stays NaN, and
        -0 stays -0. Raises ValueError for what the format does not have: NaN and
        saturate=False in e2m1, numbers below 0 in ue4m3.
        """
        x = np.asarray(x, f32)
        self._check(x, saturate)
        limit = self.largest if saturate else f32(2.0 ** (self.largest_exponent + 1))
        a = np.fmin(np.abs(x), limit)  # fmin: NaN gives the limit, and is set below
        e = np.maximum((a.view(np.int32) >> 23) - 127, 1 - self.bias)
        step = ((self.mantissa - e + 127) << 23).view(f32)  # 2^(M - e)
        code = ((e + self.bias - 1) << self.mantissa) + rne(a * step).astype(np.int32)
        code = np.minimum(code, self.top if saturate else self.top + 1).astype(np.uint8)
        if self.nan is not None:
            code = np.where(np.isnan(x), np.uint8(self.nan), code)
        if self.sign is not None:
            code = code | np.signbit(x).astype(np.uint8) << self.sign
        return code

    def decode(self, codes):
        """The value of each code: uint8 of any shape -> float32."""
        return self.values[codes]

    def _check(self, x, saturate):
        if self.nan is None and not saturate:
            raise ValueError(f"saturate=False; {self.name} has no inf and no NaN")
        if self.nan is None and np.isnan(x).any():
            raise ValueError(f"{self.name} has no NaN; valid: numbers")
        if self.sign is None and (x < 0).any():
            raise ValueError(f"{self.name} has no sign; valid: numbers >= 0")


def _make(name, mantissa, bias, values, nan, sign):
    values = values.astype(f32)
    values.setflags(write=False)
    top = int(np.nanargmax(np.where(np.isinf(values), np.nan, values)))
    return Minifloat(name, mantissa, bias, values, top, nan, sign)


E4M3 = _make("e4m3", 3, 7, levels("e4m3", 8), nan=0x7F, sign=7)
E5M2 = _make("e5m2", 2, 15, levels("e5m2", 8), nan=0x7E, sign=7)
E2M1 = _make("e2m1", 1, 1, levels("e2m1", 4), nan=None, sign=3)
# E4M3 without its sign. (ggml reads the NaN code of its nvfp4 scales as 0.)
UE4M3 = _make("ue4m3", 3, 7, levels("e4m3", 8)[:128], nan=0x7F, sign=None)
MINIFLOATS = {f.name: f for f in (E4M3, E5M2, E2M1, UE4M3)}


# --- powers of two --------------------------------------------------------------------
_POWERS = np.append(2.0 ** np.arange(-127, 128), np.nan).astype(f32)


def e8m0_decode(codes):
    """2^(code - 127), and NaN for 255: uint8 -> float32."""
    return _POWERS[codes]


def e8m0_floor(absmax, largest_exponent):
    """The OCP scale: floor(log2 absmax) - e_max + 127, within 0..254; 0 for absmax 0.

    absmax : finite float32 >= 0 of any shape. Returns uint8 of that shape.
    """
    exponent = np.frexp(absmax)[1] - 1 - largest_exponent
    code = np.where(absmax > 0, np.clip(exponent + 127, 0, 254), 0)
    return code.astype(np.uint8)


def e8m0_nearest(x):
    """The code of the nearest power of two, 1.5 * 2^n up: a cast of ml_dtypes.

    Zero, negative numbers, NaN and what rounds beyond 2^127 become 255, NaN.
    (ml_dtypes itself takes all between 2^-127 and 2^-126 to the latter.)
    """
    x = np.asarray(x, f32)
    with np.errstate(invalid="ignore"):
        fraction, exponent = np.frexp(x)  # x = fraction 2^exponent, fraction in [.5, 1)
        code = exponent - 1 + (fraction >= 0.75) + 127
        valid = np.isfinite(x) & (x > 0) & (code < 255)
    return np.where(valid, np.maximum(code, 0), 255).astype(np.uint8)


# --- MX: 32 numbers share a power of two ----------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Mx(BlockFormat):
    """X = 2^(floor(log2 max|x|) - e_max),  code = element(x / X),  x_hat = X value.

    Numbers between the largest value and 2^(e_max + 1) saturate. The OCP document
    leaves the order of the bytes open: here the scale stands before its 32 codes.
    """

    element: Minifloat
    block = 32

    @property
    def bits(self):
        """Bits of one code."""
        return 4 if self.element is E2M1 else 8

    @property
    def block_bytes(self):
        return 1 + self.block * self.bits // 8

    def encode_blocks(self, x):
        absmax = np.abs(x).max(axis=-1, keepdims=True)
        X = e8m0_floor(absmax, self.element.largest_exponent)
        codes = self.element.encode(x / e8m0_decode(X))
        return np.concatenate([X, pack(codes, self.bits)], axis=-1)

    def decode_blocks(self, data):
        codes = unpack(np.ascontiguousarray(data[:, 1:]), self.bits, self.block)
        return e8m0_decode(data[:, :1]) * self.element.decode(codes)


def chunks(rows, width):
    """Slices of rows of `width` numbers that stay in the processor's cache."""
    step = max(CHUNK // width, 1)
    return [slice(i, i + step) for i in range(0, rows, step)]


# --- NVFP4: 16 numbers share an E4M3 scale, all share a float32 -----------------------
def check_scale(name, scale):
    """`scale` as float32. Raises ValueError unless it lies in [2^-100, 2^100]."""
    if not SMALLEST_SCALE <= scale <= 1 / SMALLEST_SCALE:
        raise ValueError(f"{name}={scale!r}; valid: 2^-100 to 2^100")
    return f32(scale)


def calibrated_scale(absmax):
    """absmax / 448: the scale that ModelOpt and llm-compressor export for a cache.

    ModelOpt exports it for NVFP4 too, whose block scales then stay below
    448 / 6 = 74.7. Returns float32, at least 2^-100.
    """
    return np.maximum(f32(absmax) / E4M3.largest, f32(SMALLEST_SCALE))


def nvfp4_encode(x, scale, four_over_six=False):
    r"""Codes and block scales of x (..., D), D a multiple of 16, as CUDA writes them.

        g = 1 / scale
        S = e4m3(g max|x| / 6)          m = 1 / (S / g), 0 where S = 0
        code = e2m1(x m)

    scale : float32, of the whole tensor. four_over_six : also try max|x| / 4, and keep
    it where the sum of squared errors is smaller. The GPU takes approximate
    reciprocals; these are exact. Returns uint8 (..., D/2) and uint8 (..., D/16).
    """
    x = np.asarray(x, f32)
    *lead, D = x.shape
    if D % 16:
        raise ValueError(f"nvfp4: rows of {D}; valid: multiples of 16")
    blocks = x.reshape(-1, 16)
    codes = np.empty((len(blocks), 8), np.uint8)
    S = np.empty(len(blocks), np.uint8)
    with np.errstate(over="ignore"):  # beyond float32: saturates
        for n in chunks(len(blocks), 16):
            codes[n], S[n] = _nvfp4_blocks(blocks[n], scale, four_over_six)
    return codes.reshape(*lead, D // 2), S.reshape(*lead, D // 16)


def _nvfp4_blocks(blocks, scale, four_over_six):
    """(packed codes, S) of blocks (n, 16)."""
    codes, S, step = _nvfp4_try(blocks, scale, 6)
    if four_over_six:
        codes4, S4, step4 = _nvfp4_try(blocks, scale, 4)
        error = _squared_error(blocks, codes, step)
        better = _squared_error(blocks, codes4, step4) < error
        codes = np.where(better[:, None], codes4, codes)
        S = np.where(better, S4, S)
    return pack(codes, 4), S


def _nvfp4_try(blocks, scale, top):
    """Codes, S and S / g of blocks (n, 16), whose max|x| becomes `top`."""
    g = f32(1) / f32(scale)
    absmax = np.abs(blocks).max(axis=-1)
    S = E4M3.encode(g * (absmax * (f32(1) / f32(top))))
    step = E4M3.decode(S) * (f32(1) / g)
    m = np.divide(f32(1), step, out=np.zeros_like(step), where=step > 0)
    return E2M1.encode(blocks * m[:, None]), S, step


def _squared_error(blocks, codes, step):
    """Sum of squared errors of each block, added pair by pair as the kernel does."""
    squares = np.square(E2M1.decode(codes) * step[:, None] - blocks)
    pairs = squares[:, 0::2] + squares[:, 1::2]
    return np.add.accumulate(pairs, axis=-1)[:, -1]


def nvfp4_decode(codes, S, scale):
    """value(code) S scale: the inverse of `nvfp4_encode`, float32 (..., D)."""
    D = 2 * codes.shape[-1]
    values = E2M1.decode(unpack(codes, 4, D))
    step = E4M3.decode(S) * f32(scale)
    return values * np.repeat(step, 16, axis=-1)


# The order of V scales that Blackwell's attention kernels read: four tokens together.
def swizzle_scales(S):
    """Byte (t // 4) 4 n + 4 s + t % 4 holds scale s of token t, n scales per token.

    S : (..., T, n), T a multiple of 4. Returns the same shape, reordered. Raises
    ValueError. (vLLM's kernel writes this order where n is a multiple of 4.)
    """
    *lead, T, n = S.shape
    if T % 4:
        raise ValueError(f"{T} tokens; valid: multiples of 4")
    return S.reshape(*lead, T // 4, 4, n).swapaxes(-1, -2).reshape(S.shape)


def unswizzle_scales(S):
    """The inverse of `swizzle_scales`."""
    *lead, T, n = S.shape
    return S.reshape(*lead, T // 4, n, 4).swapaxes(-1, -2).reshape(S.shape)


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Format):
    """A tensor with its own scale, max|x| / (448 * 6): the recipe for weights.

    No document fixes the bytes of a tensor: here float32 scale, block scales, codes.
    """

    four_over_six: bool = False

    def nbytes(self, shape):
        if shape[-1] % 16:
            raise ValueError(
                f"{self.name}: rows of {shape[-1]} numbers; valid: multiples of 16"
            )
        n = int(np.prod(shape))
        return 4 + n // 16 + n // 2

    def encode(self, x):
        x = self.check(x).astype(f32, copy=False)
        self.nbytes(x.shape)
        scale = np.maximum(np.abs(x).max() / f32(448 * 6), f32(SMALLEST_SCALE))
        codes, S = nvfp4_encode(x, scale, self.four_over_six)
        return scale.astype("<f4").tobytes() + S.tobytes() + codes.tobytes()

    def decode(self, data, shape):
        data = self.check_bytes(data, shape)
        *lead, D = shape
        end = 4 + int(np.prod(shape)) // 16
        S = data[4:end].reshape(*lead, D // 16)
        codes = data[end:].reshape(*lead, D // 2)
        return nvfp4_decode(codes, S, data[:4].view("<f4")[0])


# --- the table ------------------------------------------------------------------------
_MX_SOURCE = "OCP Microscaling Formats v1.0"
_ORDER = "values; the order of bytes is ours"


def _mx(name, element, scheme):
    facts = Facts(
        str(scheme.bits),
        "32 channels of a token",
        "E8M0, floor rule",
        "none",
        "half-even, saturating",
        "none",
        _ORDER,
        _MX_SOURCE,
    )
    return Mx(name, "OCP MX v1.0", facts, scheme, element=element)


def _nvfp4(name, four_over_six, rule):
    facts = Facts(
        "4",
        "16 channels of a token",
        f"E4M3 from {rule}, float32 per tensor",
        "none",
        "half-even, saturating",
        "none",
        _ORDER,
        "csrc/nvfp4_kv_cache_kernels.cu",
    )
    return Nvfp4(name, "vLLM 0.33.0", facts, four_over_six=four_over_six)


FORMATS = {
    f.name: f
    for f in (
        _mx("ocp:mxfp8_e4m3", E4M3, Scheme(8, "token", 32, "e4m3", "e8m0")),
        _mx("ocp:mxfp8_e5m2", E5M2, Scheme(8, "token", 32, "e5m2", "e8m0")),
        _mx("ocp:mxfp4", E2M1, Scheme(4, "token", 32, "e2m1", "e8m0")),
        _nvfp4("nvidia:nvfp4", False, "max / 6"),
        _nvfp4("nvidia:nvfp4_4over6", True, "max / 6 or max / 4"),
    )
}
