"""The vocabulary: how one tensor is quantized (`Scheme`), how a cache is (`Policy`).

Every format and every paper in this project is a setting of these few words.
Symbols used everywhere: `H` KV heads, `T` tokens, `D` head dimension, `G` group
size, `b` bits, `s` scale, `z` zero (the float minimum), `R` residual window.
"""

import math
from dataclasses import dataclass

from kvq.dtypes import itemsize

PER = ("token", "channel", "head", "tensor")
UNIFORM = ("symmetric", "asymmetric", "full-range", "signed-extreme")
CODEBOOKS = ("lloyd-max", "nf4", "e2m1", "e4m3", "e5m2", "iq4_nl")
FLOATS = {"float16": 16, "bfloat16": 16, "float32": 32}
SCALE_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "e8m0")
TRANSFORMS = (None, "hadamard", "signed-hadamard")
ROUNDINGS = ("half-even", "half-away", "toward-zero")

# Codebooks whose number of levels is part of their definition.
_CODEBOOK_BITS = {"nf4": 4, "e2m1": 4, "e4m3": 8, "e5m2": 8, "iq4_nl": 4}


def _one_of(name, value, valid):
    if value not in valid:
        raise ValueError(f"{name}={value!r}; valid: {', '.join(map(str, valid))}")


def _check_int(name, value, low, what=""):
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r}; valid: an integer >= {low}{what}")


@dataclass(frozen=True)
class Scheme:
    """How one tensor (H, T, D) is stored.

    bits : 1..8 bits per code (2..8 for the levels with a sign); 16 or 32 with
        `levels` "float16", "bfloat16" or "float32", which store numbers as they
        are, without a scale.
    per : which numbers share a scale.
        "token": `group` consecutive channels of one token (and head).
        "channel": `group` consecutive tokens of one channel (KIVI's keys).
        "head": `group` consecutive tokens of one head, all of its channels.
        "tensor": `group` consecutive tokens, all heads, all channels.
    group : numbers (or tokens) per scale; None is the whole extent. The last
        group of an extent that `group` does not divide is smaller.
    levels : the values that codes stand for, x_hat = s * level(code) + z.
        "symmetric": s = max|x| / Q, integers -Q..Q, Q = 2^(b-1) - 1.
        "asymmetric": s = (max - min) / (2^b - 1), z = min, integers 0..2^b - 1.
        "full-range": s = max|x| / ((2^b - 1) / 2), integers -2^(b-1)..2^(b-1)-1
        (compressed-tensors).
        "signed-extreme": s = (the x of largest |x|) / -2^(b-1), same integers
        (llama.cpp's q4_0 and q5_0 use this scale).
        A codebook: "lloyd-max" (optimal for Gaussian data, scaled by the RMS),
        "nf4", "e2m1", "e4m3", "e5m2", "iq4_nl" (scaled by the largest |x|).
    scale_dtype : how scales and zeros are stored.
    transform : None, "hadamard" (orthonormal rotation of the head dimension) or
        "signed-hadamard" (random signs first).
    rounding : how x / s becomes an integer; codebooks take the nearest level.

    Raises ValueError at construction, naming the value and the valid ones.
    """

    bits: int = 4
    per: str = "token"
    group: int | None = 64
    levels: str = "symmetric"
    scale_dtype: str = "float16"
    transform: str | None = None
    rounding: str = "half-even"

    def __post_init__(self):
        _one_of("per", self.per, PER)
        _one_of("levels", self.levels, (*UNIFORM, *CODEBOOKS, *FLOATS))
        _one_of("scale_dtype", self.scale_dtype, SCALE_DTYPES)
        _one_of("transform", self.transform, TRANSFORMS)
        _one_of("rounding", self.rounding, ROUNDINGS)
        self._check_bits()
        self._check_ignored()
        if self.group is not None:
            _check_int("group", self.group, 1, " or None")
        if self.scale_dtype == "e8m0" and self.levels in (
            "asymmetric",
            "signed-extreme",
        ):
            raise ValueError(
                f"scale_dtype='e8m0' holds positive powers of two; {self.levels!r} "
                "stores zeros or negative scales. valid levels: symmetric, "
                f"full-range, {', '.join(CODEBOOKS)}"
            )

    def _check_bits(self):
        if self.levels in FLOATS:
            valid = (FLOATS[self.levels],)
        elif self.levels in _CODEBOOK_BITS:
            valid = (_CODEBOOK_BITS[self.levels],)
        elif self.levels in ("asymmetric", "lloyd-max"):
            valid = tuple(range(1, 9))
        else:
            valid = tuple(range(2, 9))  # one bit has no level beside zero
        if type(self.bits) is not int or self.bits not in valid:
            raise ValueError(
                f"bits={self.bits!r} with levels={self.levels!r}; "
                f"valid: {', '.join(map(str, valid))}"
            )

    def _check_ignored(self):
        """Refuse an option that these levels would have to ignore."""
        if self.full_precision and self.transform:
            raise ValueError(
                f"transform={self.transform!r} with levels={self.levels!r}, which "
                "stores numbers as they are; valid: None"
            )
        if self.levels not in UNIFORM and self.rounding != "half-even":
            raise ValueError(
                f"rounding={self.rounding!r} with levels={self.levels!r}, which takes "
                "the nearest level; valid: half-even"
            )

    @property
    def full_precision(self):
        """True where numbers are stored as they are: no codes, no scales."""
        return self.levels in FLOATS

    @property
    def has_zero(self):
        """True where each group stores a zero `z` beside its scale."""
        return self.levels == "asymmetric"

    @property
    def token_block(self):
        """Tokens that must be quantized together; None where it is all of them."""
        if self.full_precision or self.per == "token":
            return 1
        return self.group

    def group_shape(self, H, T, D):
        """(heads, tokens, channels) that share one scale, for a tensor (H, T, D)."""
        G = self.group
        if self.per == "token":
            return 1, 1, G or max(D, 1)
        tokens = G or max(T, 1)
        return {
            "channel": (1, tokens, 1),
            "head": (1, tokens, max(D, 1)),
            "tensor": (max(H, 1), tokens, max(D, 1)),
        }[self.per]

    def metadata_shape(self, H, T, D):
        """Shape of the scales (and of the zeros) of a tensor (H, T, D)."""
        if self.full_precision:
            return 0, 0, 0
        group = self.group_shape(H, T, D)
        return tuple(math.ceil(n / g) for n, g in zip((H, T, D), group, strict=True))

    def row_bytes(self, D):
        """Bytes of one token's packed codes: whole bytes per row."""
        return math.ceil(D * self.bits / 8)

    def nbytes(self, H, T, D):
        """Bytes of a stored tensor (H, T, D): packed codes, scales, zeros."""
        numbers = math.prod(self.metadata_shape(H, T, D)) * (2 if self.has_zero else 1)
        return H * T * self.row_bytes(D) + numbers * itemsize(self.scale_dtype)

    def bits_per_element(self, T, D, H=1):
        """Stored bits per number, everything counted: 8 * nbytes / (H * T * D)."""
        if min(H, T, D) < 1:
            raise ValueError(f"H={H}, T={T}, D={D}; valid: integers >= 1")
        return 8 * self.nbytes(H, T, D) / (H * T * D)

    def check_head_dim(self, D):
        """Raise ValueError if this scheme cannot store heads of dimension `D`."""
        _check_int("head_dim", D, 1)
        if self.transform and D & (D - 1):
            raise ValueError(
                f"transform={self.transform!r} needs a head_dim that is a power of "
                f"two, not {D}; valid: 32, 64, 128, 256, ... or transform=None"
            )


@dataclass(frozen=True)
class Policy:
    """How a cache is stored: one scheme for keys, one for values, and a window.

    key, value : Schemes. `value=None` is a latent cache (MLA): the values are the
        leading columns of the keys and are not stored a second time.
    residual : R, the newest tokens kept in full precision. Tokens leave the window
        in whole blocks, so it holds R..R+block-1 of them.
    sinks : the first tokens of a sequence, kept in full precision for good.
    name : the preset's name, for tables.

    Raises ValueError at construction, naming the value and the valid ones.
    """

    key: Scheme
    value: Scheme | None
    residual: int = 0
    sinks: int = 0
    name: str = ""

    def __post_init__(self):
        if not isinstance(self.key, Scheme):
            raise ValueError(f"key={self.key!r}; valid: a Scheme")
        if self.value is not None and not isinstance(self.value, Scheme):
            raise ValueError(f"value={self.value!r}; valid: a Scheme or None (latent)")
        _check_int("residual", self.residual, 0)
        _check_int("sinks", self.sinks, 0)

    @property
    def schemes(self):
        """The schemes of what is stored: keys and, unless latent, values."""
        return (self.key,) if self.value is None else (self.key, self.value)

    @property
    def block(self):
        """Tokens that are quantized together, keys and values alike.

        Raises ValueError for a scheme whose groups span all tokens: a cache that
        grows one token at a time never knows the last of them.
        """
        blocks = [scheme.token_block for scheme in self.schemes]
        if None in blocks:
            scheme = self.schemes[blocks.index(None)]
            raise ValueError(
                f"per={scheme.per!r} with group=None needs all tokens at once; a "
                "growing cache needs a token group, such as group=32"
            )
        return math.lcm(*blocks)

    def split(self, T):
        """(sinks, quantized, window): where the T tokens of one sequence are.

        A function of T alone, so that it does not matter how the tokens came.
        """
        sinks = min(T, self.sinks)
        quantized = max(T - sinks - self.residual, 0) // self.block * self.block
        return sinks, quantized, T - sinks - quantized


FP16 = Scheme(16, levels="float16", group=None)


def _both(scheme, **policy):
    return Policy(scheme, scheme, **policy)


def _kivi(bits):
    return Policy(
        key=Scheme(bits, "channel", 32, "asymmetric"),
        value=Scheme(bits, "token", 32, "asymmetric"),
        residual=128,
    )


_PRESETS = {
    "fp16": _both(FP16),
    "bf16": _both(Scheme(16, levels="bfloat16", group=None)),
    "fp32": _both(Scheme(32, levels="float32", group=None)),
    "int8-token": _both(Scheme(8, "token", None, "symmetric")),
    "int4-token-g64": _both(Scheme(4, "token", 64, "symmetric")),
    "int4-token-g64-asym": _both(Scheme(4, "token", 64, "asymmetric")),
    "int4-token-g32-asym": _both(Scheme(4, "token", 32, "asymmetric")),
    "int4-channel-g32": _both(Scheme(4, "channel", 32, "asymmetric")),
    "int2-token-g32": _both(Scheme(2, "token", 32, "asymmetric")),
    # KIVI (arXiv 2402.02750): keys per channel, values per token, a window.
    "kivi-4": _kivi(4),
    "kivi-3": _kivi(3),
    "kivi-2": _kivi(2),
    # QLoRA's normal-float levels (arXiv 2305.14314).
    "nf4-g64": _both(Scheme(4, "token", 64, "nf4")),
    "lloyd-max-3": _both(Scheme(3, "token", 64, "lloyd-max")),
    "lloyd-max-4": _both(Scheme(4, "token", 64, "lloyd-max")),
    # TurboQuant (arXiv 2504.19874), the MSE form: rotate, one norm per token,
    # Gaussian levels. RMS = norm / sqrt(D), so "lloyd-max" stores that norm.
    "turboquant-4": _both(Scheme(4, "token", None, "lloyd-max", transform="hadamard")),
    "rotated-int4": _both(Scheme(4, "token", 32, "asymmetric", transform="hadamard")),
    # OCP Microscaling: 32 numbers share one power of two.
    "mxfp4": _both(Scheme(4, "token", 32, "e2m1", "e8m0")),
    "mxfp8": _both(Scheme(8, "token", 32, "e4m3", "e8m0")),
}

PRESETS = {
    name: Policy(p.key, p.value, p.residual, p.sinks, name)
    for name, p in _PRESETS.items()
}


def policy(name_or_policy):
    """A `Policy`, given itself or the name of a preset. Raises ValueError."""
    if isinstance(name_or_policy, Policy):
        return name_or_policy
    if not isinstance(name_or_policy, str) or name_or_policy not in PRESETS:
        raise ValueError(
            f"unknown policy {name_or_policy!r}; valid: {', '.join(PRESETS)}"
        )
    return PRESETS[name_or_policy]
