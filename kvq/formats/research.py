r"""Methods of papers, each measured beside the others on one sample.

A method that is a setting of our vocabulary is a `Policy` in SETTINGS. KIVI and FlexGen
also have bytes of their own: the formats in FORMATS. The others are short classes:

    research_rotation.py    QJL, TurboQuant (both forms), PolarQuant (angles)
    research_outliers.py    KVQuant, GEAR, PolarQuant (RoPE pairs)

`measure(sample)` stores keys and values of a sample with each of them.
"""

from dataclasses import dataclass

import numpy as np

from kvq.attention import attention
from kvq.formats.base import Facts
from kvq.formats.grouped import (
    GroupedFormat,
    minmax_decode,
    minmax_encode,
    reciprocal_times,
    rounded,
)
from kvq.formats.research_base import stored_bits
from kvq.formats.research_outliers import (
    Gear,
    Nuq,
    PolarPairs,
    mean_over_rope_pairs,
    sensitivity,
)
from kvq.formats.research_rotation import (
    PolarAngles,
    Qjl,
    TurboQuant,
    TurboQuantProduct,
)
from kvq.formats.rounding import f32, rne
from kvq.metrics import nmse, output_error
from kvq.packing import pack, unpack
from kvq.samples import ROPE_BASE, before_rope
from kvq.scheme import PRESETS, Policy, Scheme
from kvq.tensor import quantize
from kvq.transforms import rope

KIVI_VERSION = "KIVI 876b4d2"
FLEXGEN_VERSION = "FlexLLMGen 004ffef"


# --- KIVI -----------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Kivi(GroupedFormat):
    """s = (max - min) / (2^b - 1),  code = rne(clip((x - min) / s)),  as int32 words.

    per "channel" (keys): a group is G tokens of a channel, a word holds 32 / b tokens.
    per "token" (values): a group is G channels of a token, a word holds 32 / b of them.
    The first code is in the low bits. `axis` is the axis of the group.
    (KIVI, arXiv 2402.02750; quant/new_pack.py.)
    """

    groups_along = 1

    @property
    def _across(self):
        """Whether groups run along the tokens."""
        return self.axis == -2

    def check_layout(self, shape):
        if len(shape) < 2 or shape[self.axis] % self.group:
            what = "tokens" if self._across else "channels"
            self.refuse(f"shape {tuple(shape)}", f"multiples of {self.group} {what}")
        if self.group * self.bits % 32:
            self.refuse(f"group={self.group}", "whole int32 words of codes")

    def to_matrix(self, x):
        x = x.swapaxes(-1, -2) if self._across else x
        return x.reshape(-1, self.group)

    def from_matrix(self, m, shape):
        if not self._across:
            return m.reshape(shape)
        *lead, T, D = shape
        return m.reshape(*lead, D, T).swapaxes(-1, -2)

    def quantize(self, m):
        return minmax_encode(m, 1, self.bits, self.dtype)

    def dequantize(self, codes, scale, offset):
        return minmax_decode(codes, scale, offset, self.dtype)

    def packed_bytes(self, shape):
        return int(np.prod(shape)) * self.bits // 8

    def pack(self, codes, shape):
        codes = codes.reshape(-1, shape[self.axis])
        words = pack(codes, self.bits).view("<u4")
        if not self._across:
            return words
        return words.reshape(-1, shape[-1], words.shape[-1]).swapaxes(-1, -2)

    def unpack(self, data, shape):
        n = shape[self.axis]
        words = np.ascontiguousarray(data).view("<u4")
        if self._across:
            words = words.reshape(-1, n * self.bits // 32, shape[-1]).swapaxes(-1, -2)
        words = np.ascontiguousarray(words).reshape(-1, n * self.bits // 32)
        return unpack(words.view(np.uint8), self.bits, n).reshape(-1, self.group)


# --- FlexGen --------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class FlexGen(GroupedFormat):
    """S = 15 / (max - min),  code = rne((x - min) S),  x_hat = code / S + min.

    Groups of 64 channels; the inverse scale S is what is stored, float32 arithmetic
    before. Two codes share a byte, the first in the high half. S is 1 in a constant
    group (FlexGen has inf there), and at most what the tensor's dtype holds.
    (FlexGen, arXiv 2303.06865; flexllmgen/compression.py.)
    """

    groups_along = 1

    def check_layout(self, shape):
        if shape[-1] % self.group:
            self.refuse(f"{shape[-1]} channels", f"multiples of {self.group}")

    def to_matrix(self, x):
        return x.reshape(-1, self.group)

    def from_matrix(self, m, shape):
        return m.reshape(shape)

    def quantize(self, m):
        M = 2**self.bits - 1
        low = m.min(axis=1, keepdims=True)
        width = m.max(axis=1, keepdims=True) - low
        S = np.minimum(reciprocal_times(M, width), self.largest)
        S = np.where(width == 0, f32(1), S)
        codes = rne(np.clip((m - low) * S, 0, M)).astype(np.uint8)
        return codes, rounded(S, self.dtype), low

    def dequantize(self, codes, scale, offset):
        return rounded(rounded(codes / scale, self.dtype) + offset, self.dtype)

    def packed_bytes(self, shape):
        return int(np.prod(shape)) // 2

    def pack(self, codes, shape):
        return codes[:, 0::2] << 4 | codes[:, 1::2]

    def unpack(self, data, shape):
        pairs = np.stack([data >> 4, data & 15], axis=-1)
        return pairs.reshape(-1, self.group)


# --- the table of formats -------------------------------------------------------------
def _kivi(kind, bits):
    keys = kind == "key"
    facts = Facts(
        str(bits),
        "32 tokens of a channel" if keys else "32 channels of a token",
        "the tensor's dtype",
        "minimum, the tensor's dtype",
        "half-even, each operation in the tensor's dtype",
        "the newest 128 tokens (all at once)" if keys else "the newest 128 tokens",
        "codes of the repository on a CPU; the order of the parts is ours",
        "quant/new_pack.py",
    )
    scheme = Scheme(bits, "channel" if keys else "token", 32, "asymmetric")
    axis = -2 if keys else -1
    name = f"kivi:{kind}-{bits}"
    return Kivi(name, KIVI_VERSION, facts, scheme, bits=bits, axis=axis, group=32)


_FLEXGEN = FlexGen(
    "flexgen:int4",
    FLEXGEN_VERSION,
    Facts(
        "4",
        "64 channels of a token",
        "inverse, the tensor's dtype",
        "minimum, the tensor's dtype",
        "half-even, float32",
        "none",
        "codes of the repository on a CPU; the order of the parts is ours",
        "flexllmgen/compression.py",
    ),
    Scheme(4, "token", 64, "asymmetric"),
    bits=4,
    axis=-1,
)

FORMATS = {
    f.name: f
    for f in (*(_kivi(k, b) for k in ("key", "value") for b in (2, 4)), _FLEXGEN)
}


# --- methods that are settings of our vocabulary --------------------------------------
def _both(scheme):
    return Policy(scheme, scheme)


# name -> (policy, where it is from). What the vocabulary leaves out is said beside it.
SETTINGS = {
    "kivi-4": (PRESETS["kivi-4"], "KIVI, arXiv 2402.02750"),
    "kivi-2": (PRESETS["kivi-2"], "KIVI, arXiv 2402.02750"),
    "flexgen-4": (
        _both(Scheme(4, "token", 64, "asymmetric")),
        "FlexGen, arXiv 2303.06865",
    ),
    "atom-4": (
        _both(Scheme(4, "token", None, "asymmetric")),
        "Atom, arXiv 2310.19102; QServe's KV4, arXiv 2405.04532",
    ),
    "quarot-4": (
        _both(Scheme(4, "token", None, "asymmetric", transform="hadamard")),
        "QuaRot, arXiv 2404.00456, without its clip ratio 0.95",
    ),
    "quarot-k4v2": (
        Policy(
            Scheme(4, "token", None, "asymmetric", transform="hadamard"),
            Scheme(2, "token", None, "asymmetric", transform="hadamard"),
        ),
        "QuaRot, arXiv 2404.00456, without its clip ratio 0.95",
    ),
    "turboquant-4 (hadamard)": (
        PRESETS["turboquant-4"],
        "TurboQuant, arXiv 2504.19874, as vLLM and llama.cpp forks build it",
    ),
}


# --- measured rows --------------------------------------------------------------------
def measure(sample, rope_base=ROPE_BASE):
    """Every method on one sample: a list of rows.

    All tokens are quantized: no window and no sinks, so that methods are compared and
    not their windows. Columns: method; source; bits_key, bits_value: stored bits per
    number; nmse_key, nmse_value; output_error, ||o_hat - o|| / ||o||, causal.
    KVQuant's codebooks are fitted to the first half of the tokens, with the
    sensitivity of the attention output in place of the model's Fisher information.

    sample : a `Sample` with queries, keys after RoPE of `rope_base`, 2 tokens or more.
    Raises ValueError without queries, or where D is no multiple of 16 or no power of
    two, which some of the methods need.
    """
    if sample.q is None:
        raise ValueError(f"{sample.name} has no queries; measure needs q (H_q, T_q, D)")
    o = attention(sample.q, sample.k, sample.v, causal=True)
    methods = *_settings(), *_kvquant(sample, rope_base), *_methods()
    return [_row(sample, o, *method) for method in methods]


def _row(sample, o, name, source, store_key, store_value):
    """store_key, store_value : functions x -> (bits per number, x_hat)."""
    bits_key, k_hat = store_key(sample.k)
    bits_value, v_hat = store_value(sample.v)
    o_hat = attention(sample.q, k_hat, v_hat, causal=True)
    return {
        "method": name,
        "source": source,
        "bits_key": bits_key,
        "bits_value": bits_value,
        "nmse_key": nmse(sample.k, k_hat),
        "nmse_value": nmse(sample.v, v_hat),
        "output_error": output_error(o, o_hat),
    }


def _by(method):
    """x -> (bits per number, x_hat), by a Scheme or a Method."""

    def store(x):
        if isinstance(method, Scheme):
            qt = quantize(x, method)
            return qt.bits_per_element, qt.dequantize()
        stored = method.encode(x)
        return stored_bits(stored, x.size), method.decode(stored, x.shape)

    return store


def _before_rope(method, base):
    """The same for keys that are stored before RoPE and turned when they are read."""

    def store(k):
        bits, k_hat = _by(method)(before_rope(k, base))
        return bits, rope(k_hat, np.arange(k.shape[-2]), base)

    return store


def _settings():
    for name, (policy, source) in SETTINGS.items():
        yield name, source, _by(policy.key), _by(policy.value)


def _kvquant(sample, rope_base):
    """Without and with outliers, codebooks fitted to the first half of the tokens."""
    source = "KVQuant, arXiv 2401.18079; keys before RoPE"
    n = sample.k.shape[1] // 2
    F_k, F_v = sensitivity(sample)
    F_k = mean_over_rope_pairs(F_k)
    k = before_rope(sample.k, rope_base)
    for bits in (2, 3, 4):
        for outliers in (0.0, 0.01):
            key = Nuq.fit(k[:, :n], F_k[:, :n], bits, "channel", outliers)
            value = Nuq.fit(sample.v[:, :n], F_v[:, :n], bits, "token", outliers)
            name = f"kvquant-nuq{bits}" + (" 1%" if outliers else "")
            yield name, source, _before_rope(key, rope_base), _by(value)


def _methods():
    kivi = {bits: PRESETS[f"kivi-{bits}"] for bits in (2, 4)}
    for m in (256, 512):
        source = "QJL, arXiv 2406.03482; values as kivi-2"
        yield f"qjl-m{m}", source, _by(Qjl(m)), _by(kivi[2].value)
    for bits in (2, 3, 4):
        source = "TurboQuant, arXiv 2504.19874"
        mse, product = _by(TurboQuant(bits)), _by(TurboQuantProduct(bits))
        yield f"turboquant-{bits} mse", source, mse, mse
        yield f"turboquant-{bits} product", source + "; values mse", product, mse
    polar = _by(PolarAngles())
    yield "polarquant (angles)", "PolarQuant, arXiv 2502.02617", polar, polar
    source = "PolarQuant, arXiv 2502.00527; values as kivi-4"
    yield "polarquant (pairs)", source, _by(PolarPairs()), _by(kivi[4].value)
    for bits, policy in kivi.items():
        source = "GEAR, arXiv 2403.05527, on KIVI's groups"
        key, value = Gear(policy.key), Gear(policy.value)
        yield f"gear-{bits}", source, _by(key), _by(value)
