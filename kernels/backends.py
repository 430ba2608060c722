"""One interface, several backends: the same three operations, the same results.

Every backend has

    name                    its key in `BACKENDS`
    unavailable()           None, or the reason why it cannot run on this machine
    unsupported(op, case)   None, or the reason why it cannot do this: `op` is one of
                            `OPS`, `case` the Scheme (pack, dequant) or Policy (decode)
    pack(x, scheme)         QuantizedTensor: what `kvq.quantize` gives
    dequant(qt)             float32 of the shape of qt: what `qt.dequantize()` gives
    decode(q, cache, ...)   attention, with the options of `cache.attend(q, ...)`

Backends of GPU kernels take `version="v1"`, ... as well; without it they use the newest
version that knows the case and computes in float32. Versions that use tensor cores are
there by name: they are CUDA C alone, and agree as binary16 products do. What depends
on the shape (the head dimension, the number of queries, a mask) they can only refuse
at the call.

An operation on an unsupported case raises ValueError with that reason; no backend
hands it to another one. Results agree in three classes: codes exactly, dequantized
values within 1 unit in the last place, attention within twice the error of the same
computation done naively in the precision of the result (float64 from "numpy",
float32 from the others).
"""

import importlib
import textwrap
from functools import lru_cache

import numpy as np

from kvq.kernels.host import first_invalid, no_reason, operation
from kvq.scheme import UNIFORM
from kvq.tensor import quantize

OPS = ("pack", "dequant", "decode")


def backend(name="auto", op=None, case=None):
    """A backend by its name; "auto" is the fastest that can run, never a simulator.

    op, case : with "auto", the fastest that can also do this operation on this case.
    Raises ValueError for an unknown name, RuntimeError for a backend that cannot run.
    """
    if name == "auto":
        return next(
            b
            for b in map(BACKENDS.get, AUTO)
            if not b.unavailable() and (op is None or not b.unsupported(op, case))
        )
    if name not in BACKENDS:
        raise ValueError(
            f"unknown backend {name!r}; valid: auto, {', '.join(BACKENDS)}"
        )
    reason = BACKENDS[name].unavailable()
    if reason:
        raise RuntimeError(f"backend {name!r} cannot run here: {reason}")
    return BACKENDS[name]


class NumPyBackend:
    """The reference itself: everything, everywhere, and slower."""

    name = "numpy"

    def unavailable(self):
        return None

    def unsupported(self, op, case):
        return None

    def pack(self, x, scheme):
        return quantize(x, scheme)

    def dequant(self, qt):
        return qt.dequantize()

    def decode(self, q, cache, **options):
        return cache.attend(q, **options)


class NumbaCPUBackend:
    """Loops compiled by Numba: `kernels/cpu/`."""

    name = "numba-cpu"

    def unavailable(self):
        return import_problem("kvq.kernels.cpu.decode")

    def unsupported(self, op, case):
        if op == "decode":  # full precision is read as it is
            coded = [s for s in case.schemes if not s.full_precision]
            return next(filter(None, map(_uniform_only, coded)), None)
        return _uniform_only(case)

    def pack(self, x, scheme):
        from kvq.kernels.cpu.codes import pack

        self._require("pack", scheme)
        return pack(x, scheme)

    def dequant(self, qt):
        from kvq.kernels.cpu.codes import dequant

        self._require("dequant", qt.scheme)
        return dequant(qt)

    def decode(self, q, cache, version=None, *, mask=None, causal=True, **options):
        """version : "v1" and "v2" take tiles of numbers; "v3" and "v4" blocks of codes
        (`cpu/fast.py`, which has options of its own), one query token and no mask. v4
        also rounds queries and weights to 8 bits. None: blocks where the cache has
        them, with the version that is right for its bits; v2 otherwise.
        """
        if version not in (None, "v1", "v2", "v3", "v4"):
            raise ValueError(f"unknown version {version!r}; valid: v1, v2, v3, v4")
        in_blocks = getattr(cache, "layout", None) == "blocks"
        if (
            version is None
            and in_blocks
            and mask is None
            and np.shape(q)[-2:-1] == (1,)
        ):
            from kvq.kernels.cpu.fast import version_for

            version = version_for(cache.policy)
        if version in ("v3", "v4"):
            return self._decode_blocks(q, cache, version, mask, options)
        from kvq.kernels.cpu.decode import decode

        self._require("decode", cache.policy)
        version = version or "v2"
        return decode(q, cache, version=version, mask=mask, causal=causal, **options)

    def _decode_blocks(self, q, cache, version, mask, options):
        from kvq.kernels.cpu import fast

        if reason := fast.unavailable(version):
            raise RuntimeError(
                f"backend {self.name!r}: {version} cannot run here: {reason}"
            )
        if mask is not None:
            raise _refusal(self, f"decode {version}", "a mask; valid: mask=None")
        return fast.decode(q, cache, version=version, **options)

    def _require(self, op, case):
        reason = self.unsupported(op, case)
        if reason:
            raise _refusal(self, op, reason)


def _uniform_only(scheme):
    """Why the compiled loops do not know this scheme, or None."""
    return first_invalid(
        scheme,
        {
            "levels": UNIFORM,
            "per": ("token", "channel", "head"),
            "transform": (None,),
            "rounding": ("half-even",),
        },
    )


def _refusal(backend, op, reason):
    return ValueError(f"backend {backend.name!r}: {op} does not support {reason}")


class KernelBackend:
    """The kernels of `kernels/pack`, `dequant` and `decode`, run by one executor.

    executor : a module of `kernels/launch/`.
    options : what its `run` is told, such as the language.
    """

    def __init__(self, name, executor, **options):
        self.name, self.executor, self.options = name, executor, options
        self.numba = "numba" in (executor.split("_")[0], options.get("language"))

    def _executor(self):
        return _executor(self.executor)

    def unavailable(self):
        return _executor_problem(self.executor)

    def unsupported(self, op, case):
        return no_reason([self._reason(op, case, v) for v in operation(op).VERSIONS])

    def pack(self, x, scheme, version=None):
        _, T, D = (1, 1, 1, *np.shape(x))[-3:]
        return self._do("pack", (x, scheme), version, (scheme, D, T))

    def dequant(self, qt, version=None):
        return self._do("dequant", (qt,), version, (qt.scheme, qt.shape[-1], qt.tokens))

    def decode(self, q, cache, version=None, *, causal=True, mask=None, **options):
        """causal : no matter; the one query that a kernel takes sees all tokens."""
        if mask is not None:
            raise _refusal(self, "decode", "a mask; valid: mask=None")
        if version is None and hasattr(cache, "version"):  # prepared for this one
            version = cache.version.name
        case = cache.policy, (1, *np.shape(q))[-1], len(cache)
        return self._do("decode", (q, cache), version, case, options)

    def prepare(self, cache, version=None):
        """The cache gathered once, to be given to `decode` in its place."""
        D = cache.rows[0][0].window.shape[-1] if cache.rows else None
        case = cache.policy, D, len(cache)
        newest = self._candidates("decode", version, case)[0]
        return operation("decode").prepare(cache, newest)

    def _do(self, op, inputs, version, case, options=None):
        """Run the newest version that knows the case and whose kernels can be had."""
        executor = self._executor()
        missing = getattr(executor, "missing", lambda launches, **options: None)
        for name in self._candidates(op, version, case):
            launches, collect = operation(op).launches(*inputs, name, **(options or {}))
            reason = missing(launches, **self.options)
            if reason is None:
                executor.run(launches, **self.options)
                return collect()
        raise RuntimeError(f"backend {self.name!r}: {reason}")

    def _candidates(self, op, version, case):
        """The versions to try, the newest first. Raises ValueError if there is none."""
        names = [version] if version else list(operation(op).VERSIONS)
        scheme, D, T = case
        reasons = {name: self._reason(op, scheme, name, D, T) for name in names}
        known = [name for name in reversed(names) if reasons[name] is None]
        if not known:
            raise _refusal(self, op, f"{reasons[names[0]]} ({names[0]})")
        return known

    def _reason(self, op, case, version, D=None, T=None):
        """None, or why `version` cannot do it, in the kernels or in the executor."""
        host = operation(op)
        tensor_cores = getattr(host, "TENSOR_CORES", {})
        if version in tensor_cores and self.numba:
            return f"{version}: it is CUDA C alone; valid: {', '.join(host.VERSIONS)}"
        limits = getattr(self._executor(), "unsupported", lambda version, T: None)
        reason = host.unsupported(case, version, D)
        return reason or limits({**host.VERSIONS, **tensor_cores}[version], T)


# The fastest first; after the reference come simulators, for study and for tests.
BACKENDS = {
    b.name: b
    for b in (
        KernelBackend("cupy", "cupy"),
        KernelBackend("numba-cuda", "numba_cuda"),
        NumbaCPUBackend(),
        NumPyBackend(),
        KernelBackend("ptxsim-c", "ptxsim", language="c"),
        KernelBackend("ptxsim-numba", "ptxsim", language="numba"),
        KernelBackend("gxx", "gxx"),
        KernelBackend("numba-sim", "numba_sim"),
    )
}
AUTO = ("cupy", "numba-cuda", "numba-cpu", "numpy")


def _executor(name):
    return importlib.import_module(f"kvq.kernels.launch.{name}")


@lru_cache  # no GPU comes while a program runs, and to look for a package takes long
def _executor_problem(name):
    """None, or why an executor cannot run here."""
    try:
        return _executor(name).unavailable()
    except Exception as error:  # any kind: see `import_problem`
        return one_line(error)


def import_problem(module):
    """None, or in one line why `module` cannot be imported.

    A package that is installed may still fail, with any kind of error: a missing
    library, a driver too old. So it is tried, not looked up.
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        return one_line(error)
    return None


def one_line(error):
    """An exception's message on one line, or its kind where it has none."""
    return textwrap.shorten(str(error), 120, placeholder="...") or type(error).__name__


def gpu_status():
    """(available, text): the first GPU's name, or why there is none to use."""
    reasons = []
    for package, find in (("cupy", _cupy_device), ("numba-cuda", _numba_device)):
        try:
            return True, f"{find()} (through {package})"
        except Exception as error:  # any kind: see `import_problem`
            reasons.append(f"{package}: {one_line(error)}")
    return False, "; ".join(reasons)


def _cupy_device():
    from cupy.cuda import runtime

    if runtime.getDeviceCount() < 1:
        raise RuntimeError("no CUDA device")
    return runtime.getDeviceProperties(0)["name"].decode()


def _numba_device():
    from numba import config, cuda

    if config.ENABLE_CUDASIM:
        raise RuntimeError("NUMBA_ENABLE_CUDASIM is set: a simulator, not a GPU")
    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else name
