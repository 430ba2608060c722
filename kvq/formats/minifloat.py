r"""FP8, FP4 and the block formats made of them: MXFP8, MXFP4, NVFP4.

A small float has a sign, E exponent bits and M mantissa bits. Its code is the bit
pattern; increasing codes are increasing magnitudes.

    value = (-1)^sign 2^(max(e, 1) - bias) ([e > 0] + m / 2^M)

Block formats divide by a shared scale first: MX by a power of two per 32 numbers,
NVFP4 by an E4M3 number per 16 and one float32 per tensor. Two codes of four bits
share a byte, the even number in the low half.

Sources: OCP 8-bit Floating Point v1.0; OCP Microscaling Formats v1.0; CUDA's
`cvt.rn.satfinite`; csrc/nvfp4_kv_cache_kernels.cu of vLLM. Oracle: ml_dtypes.
"""

from dataclasses import dataclass

import numpy as np

from kvq.codebooks import levels
from kvq.formats.base import BlockFormat, Facts, Format
from kvq.formats.rounding import f32, inverse, rne
from kvq.packing import pack, unpack
from kvq.scheme import Scheme

VERSION = "OCP MX v1.0"
NVFP4_VERSION = "vLLM 0.33.0"
# Scales below this would have reciprocals that overflow float32.
SMALLEST_SCALE = 2.0**-100


# --- single numbers -------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Minifloat:
    """A small float with round-to-nearest-even. Made by `minifloat`.

    name : "e4m3", "e5m2", "e2m1" or "ue4m3" (E4M3 without a sign).
    values : float32, the value of every code. top : the code of the largest number.
    nan : the code of NaN, or None where the format has none.
    """

    name: str
    mantissa: int
    bias: int
    values: np.ndarray
    top: int
    nan: int | None
    sign: int

    @property
    def largest(self):
        """The largest finite value, float32."""
        return self.values[self.top]

    @property
    def largest_exponent(self):
        """floor(log2 largest): e_max of the OCP scale rule."""
        return int(np.frexp(self.largest)[1]) - 1

    # e = max(floor(log2 |x|), 1 - bias)
    # code = (e + bias - 1) 2^M + rne(|x| 2^(M - e))
    def encode(self, x, saturate=True):
        """The code of the nearest value: float32 of any shape -> uint8.

        Halfway goes to the even mantissa. Numbers beyond the largest (also inf) take
        it with `saturate`, as CUDA's satfinite; without, those that round beyond it
        become NaN (e4m3) or inf (e5m2), as in ml_dtypes and PyTorch. NaN stays NaN,
        -0 stays -0. Raises ValueError for NaN or saturate=False in a format without
        NaN, and for negative numbers in one without a sign.
        """
        x = np.asarray(x, f32)
        is_nan = self._check(x, saturate)
        limit = self.largest if saturate else f32(2.0 ** (self.largest_exponent + 1))
        a = np.fmin(np.abs(x), limit)
        e = np.maximum((a.view(np.int32) >> 23) - 127, 1 - self.bias)
        step = ((127 + self.mantissa - e) << 23).view(f32)  # 2^(M - e)
        code = ((e + self.bias - 1) << self.mantissa) + rne(a * step).astype(np.int32)
        if not saturate:
            code = np.minimum(code, self.top + 1)
        code = code.astype(np.uint8)
        if is_nan.any():
            code[is_nan] = self.nan
        return code | (np.signbit(x).view(np.uint8) << self.sign if self.sign else 0)

    def decode(self, codes):
        """The value of each code: uint8 of any shape -> float32."""
        return self.values[codes]

    def _check(self, x, saturate):
        is_nan = np.isnan(x)
        if self.nan is None and (is_nan.any() or not saturate):
            raise ValueError(f"{self.name} has no NaN and no inf; it must saturate")
        if not self.sign and (x < 0).any():
            raise ValueError(f"{self.name} has no sign; it cannot hold {x.min()}")
        return is_nan


def minifloat(name):
    """The `Minifloat` called e4m3, e5m2, e2m1 or ue4m3. Raises ValueError."""
    if name not in MINIFLOATS:
        raise ValueError(f"minifloat={name!r}; valid: {', '.join(MINIFLOATS)}")
    return MINIFLOATS[name]


def _minifloat(name, mantissa, bias, nan, sign):
    values = levels(name.removeprefix("u"), 8 if sign != 3 else 4).astype(f32)
    values = values[: 2 ** (sign or 7)] if not sign else values
    values.setflags(write=False)
    top = int(np.nanargmax(np.where(np.isinf(values), -1, values)))
    return Minifloat(name, mantissa, bias, values, top, nan, sign)


MINIFLOATS = {
    "e4m3": _minifloat("e4m3", 3, 7, 0x7F, 7),
    "e5m2": _minifloat("e5m2", 2, 15, 0x7E, 7),
    "e2m1": _minifloat("e2m1", 1, 1, None, 3),
    "ue4m3": _minifloat("ue4m3", 3, 7, 0x7F, 0),
}
E4M3, E5M2, E2M1 = (MINIFLOATS[name] for name in ("e4m3", "e5m2", "e2m1"))
