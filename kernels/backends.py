"""One interface, several backends: the same three operations, the same results.

Every backend has

    name                    its key in `BACKENDS`
    unavailable()           None, or the reason why it cannot run on this machine
    unsupported(op, case)   None, or the reason why it cannot do this: `op` is one of
                            `OPS`, `case` the Scheme (pack, dequant) or Policy (decode)
    pack(x, scheme)         QuantizedTensor: what `kvq.quantize` gives
    dequant(qt)             float32 of the shape of qt: what `qt.dequantize()` gives
    decode(q, cache, ...)   attention, with the options of `cache.attend(q, ...)`

An operation on an unsupported case raises ValueError with that reason; no backend
hands it to another one. Results agree in three classes: codes exactly, dequantized
values within 1 unit in the last place, attention within twice the error of the same
computation done naively in the precision of the result (float64 from "numpy",
float32 from the others).
"""

import importlib
import textwrap

from kvq.scheme import UNIFORM
from kvq.tensor import quantize

OPS = ("pack", "dequant", "decode")


def backend(name="auto", op=None, case=None):
    """A backend by its name; "auto" is the fastest that can run.

    op, case : with "auto", the fastest that can also do this operation on this case.
    Raises ValueError for an unknown name, RuntimeError for a backend that cannot run.
    """
    if name == "auto":
        return next(
            b
            for b in BACKENDS.values()
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

    def decode(self, q, cache, **options):
        from kvq.kernels.cpu.decode import decode

        self._require("decode", cache.policy)
        return decode(q, cache, **options)

    def _require(self, op, case):
        reason = self.unsupported(op, case)
        if reason:
            raise ValueError(f"backend {self.name!r}: {op} does not support {reason}")


def _uniform_only(scheme):
    """Why the compiled loops do not know this scheme, or None."""
    for field, valid in (
        ("levels", UNIFORM),
        ("per", ("token", "channel", "head")),
        ("transform", (None,)),
        ("rounding", ("half-even",)),
    ):
        value = getattr(scheme, field)
        if value not in valid:
            return f"{field}={value!r}; valid: {', '.join(map(str, valid))}"
    return None


# The fastest first.
BACKENDS = {b.name: b for b in (NumbaCPUBackend(), NumPyBackend())}


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
