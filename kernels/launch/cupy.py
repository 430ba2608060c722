"""Executor: the CUDA C kernels on an NVIDIA GPU, through CuPy's RawModule.

The CUBIN comes from `launch/nvrtc.py`, with the options that the simulator's PTX was
compiled with. CuPy could compile the source itself, but it always adds -ftz=true, and a
scale below 2^-126 would then be 0.
"""

import functools
import tempfile

import numpy as np

from kvq.kernels.launch import nvrtc


def unavailable():
    """None, or why CuPy cannot run kernels here."""
    import cupy
    from cupy.cuda import runtime

    if runtime.getDeviceCount() < 1:
        return "no CUDA device"
    cupy.RawModule  # noqa: B018 (a CuPy without it raises the reason)
    return nvrtc.unavailable()


def run(launches):
    """Run them on the current device and stream; outputs are written back in place.

    Raises nvrtc.CompileError for a source that does not compile, and RuntimeError that
    names the kernel for one that cannot be launched or that fails.
    """
    from cupy.cuda import driver, get_current_stream, runtime

    loaded = load(launches)
    for launch, args in loaded:
        try:
            start(launch, args)
            get_current_stream().synchronize()
        except (driver.CUDADriverError, runtime.CUDARuntimeError) as error:
            raise RuntimeError(f"{launch.kernel} failed on the GPU: {error}") from error
    fetch(loaded)


def load(launches):
    """[(launch, its arguments on the device)]: each array is copied there once.

    They stay there: to start a kernel again copies nothing.
    """
    import cupy

    arrays = {id(a): a for one in launches for a in one.args if np.ndim(a)}
    buffers = {key: cupy.asarray(a) for key, a in arrays.items()}
    return [(one, [buffers.get(id(a), a) for a in one.args]) for one in launches]


def fetch(loaded):
    """Copy the outputs back into the arrays of the launches."""
    for launch, args in loaded:
        for i in launch.outputs:
            args[i].get(out=launch.args[i])


def start(launch, args):
    """Start one kernel on arguments that are on the device; does not wait.

    args : device arrays, and NumPy scalars, which CuPy passes in their own type.
    """
    from cupy.cuda import Device

    device = Device()
    constants = tuple(sorted(launch.constants.items()))
    arch = int(device.compute_capability)
    module = _module(launch.source, constants, arch, device.id)
    function = module.get_function(launch.kernel)
    function((launch.grid,), (launch.block,), tuple(args))


@functools.cache
def _module(source, constants, arch, device):
    """The RawModule of a source, loaded on one device."""
    import cupy

    cubin = nvrtc.compile_cubin(source, dict(constants), arch)
    handle, path = tempfile.mkstemp(suffix=".cubin", dir=_folder().name)
    with open(handle, "wb") as file:
        file.write(cubin)
    return cupy.RawModule(path=path)


@functools.cache
def _folder():
    """Where the CUBINs lie while this process runs: CuPy loads them on first use."""
    return tempfile.TemporaryDirectory(prefix="kvq-cupy-")
