"""Executor: the Numba twins on an NVIDIA GPU."""

import functools
import importlib
import warnings
from types import SimpleNamespace

import numpy as np


def unavailable():
    """None, or why Numba cannot run kernels on a GPU here."""
    from numba import config, cuda

    if config.ENABLE_CUDASIM:
        return "NUMBA_ENABLE_CUDASIM is set: a simulator, not a GPU"
    cuda.get_current_device()  # raises the reason
    return None


def run(launches):
    """Run them on the current device; outputs are written back in place.

    Raises Numba's errors for a kernel that does not compile, and RuntimeError for one
    that fails.
    """
    from numba import cuda

    buffers = {}
    for launch in launches:
        for a in launch.args:
            if isinstance(a, np.ndarray) and id(a) not in buffers:
                buffers[id(a)] = cuda.to_device(a)
    for launch in launches:
        start(launch, [buffers.get(id(a), a) for a in launch.args])
    for launch in launches:
        for i in launch.outputs:
            buffers[id(launch.args[i])].copy_to_host(launch.args[i])


def start(launch, args):
    """Start one kernel on arguments that are on the device; does not wait."""
    from numba import cuda

    capability = cuda.get_current_device().compute_capability
    constants = tuple(sorted(launch.constants.items()))
    kernel = _compiled(launch.source, launch.kernel, constants, capability)
    with warnings.catch_warnings():  # a small case leaves most of the GPU idle
        warnings.filterwarnings("ignore", message="Grid size")
        kernel[launch.grid, launch.block](*args)


@functools.cache
def _compiled(source, kernel, constants, capability):
    """The kernel, compiled for the current device."""
    from numba import cuda

    twin = importlib.import_module("kvq.kernels." + source.replace("/", "."))
    c = SimpleNamespace(**dict(constants))
    return cuda.jit(twin.signatures(c)[kernel])(twin.kernels(c)[kernel])
