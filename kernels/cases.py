"""The cases that tables, budgets and the committed PTX are made of.

A `Case` is one kernel of the ladder on ordinary data. `launches(case)` asks the host
side for it, so that grid, constants and arguments are those of real use.
"""

from dataclasses import dataclass

import numpy as np

from kvq.cache import KVCache
from kvq.kernels.host import operation
from kvq.scheme import FP16, Policy, Scheme
from kvq.tensor import quantize

OPS = ("pack", "dequant", "decode")


@dataclass(frozen=True)
class Case:
    """One version of one operation, and what it works on.

    bits, group : of every group of numbers; 16 bits are float16, without groups. per :
    "token" or "channel", of what is packed and dequantized, and of the keys of decode;
    its values are per token.
    T : tokens. ratio : query heads of each of the H_kv heads. residual : tokens that
    decode finds in full precision. dtype : of what is not quantized.
    """

    op: str
    version: str
    bits: int = 4
    per: str = "token"
    group: int = 64
    levels: str = "asymmetric"
    dtype: str = "float16"
    D: int = 128
    T: int = 1024
    H_kv: int = 2
    ratio: int = 4
    residual: int = 64

    def __str__(self):
        which = "keys " if self.op == "decode" else ""
        return (
            f"{self.op} {self.version}, {self.bits} bits, {which}per {self.per}, "
            f"G={self.group}, T={self.T}, H_kv={self.H_kv}, D={self.D}, {self.dtype}"
        )

    @property
    def scheme(self):
        return self._scheme(self.per)

    def _scheme(self, per):
        if self.bits == 16:
            return FP16
        return Scheme(self.bits, per, self.group, self.levels)

    @property
    def policy(self):
        """Of the cache that decode reads."""
        return Policy(self.scheme, self._scheme("token"), self.residual)


def inputs(case):
    """What the operation takes: (x, scheme), (qt,) or (q, cache).

    The data is random, and always the same.
    """
    x = _random((case.H_kv, case.T, case.D), case.dtype)
    if case.op == "pack":
        return x, case.scheme
    if case.op == "dequant":
        return (quantize(x, case.scheme),)
    cache = KVCache(case.policy)
    cache.append(x, _random(x.shape, case.dtype, seed=1))
    return _random((case.H_kv * case.ratio, 1, case.D), case.dtype, seed=2), cache


def launches(case):
    """The Launches of a case, in order."""
    host = operation(case.op)
    return host.launches(*inputs(case), case.version)[0]


def supported(case):
    """Does the version know the case?"""
    host = operation(case.op)
    what = case.policy if case.op == "decode" else case.scheme
    return host.unsupported(what, case.version, case.D) is None


def versions():
    """(operation, version) of the whole ladder, in the order of teaching."""
    for op in OPS:
        host = operation(op)
        yield from ((op, version) for version in host.VERSIONS)


def tensor_core_versions():
    """Likewise of the kernels that use tensor cores: CUDA C alone."""
    yield from (("decode", version) for version in operation("decode").TENSOR_CORES)


def _random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
