"""Executor: the Numba twins in Numba's own CUDA simulator, one Python thread each.

The simulator must be chosen before Numba is first imported, so that the kernels run in
a Python process of their own. It is slow and has no warp shuffles: use it to step
through a small case.

`python -m kvq.kernels.launch.numba_sim FOLDER` is that process: it reads launches.json
and arrays.npz, and writes results.npz.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

MAX_TOKENS = 64


def unavailable():
    """None, or why Numba's simulator cannot run here."""
    import numba  # noqa: F401 (a failure to import it is the reason)


def unsupported(version, T):
    """None, or why a `Version` of a kernel cannot be run on T tokens (None: any)."""
    if version.shuffles:
        return f"{version.name}: Numba's simulator has no warp shuffles; valid: v1"
    if T is not None and T > MAX_TOKENS:
        return f"T={T}, which would take minutes; valid: 0..{MAX_TOKENS}"
    return None


def run(launches):
    """Run them in a new process; outputs are written back in place.

    Raises RuntimeError with the last line of what that process said if it failed.
    """
    arrays = {}  # id -> (name, array): the same array is the same buffer
    for launch in launches:
        for a in launch.args:
            if isinstance(a, np.ndarray):
                arrays.setdefault(id(a), (f"array{len(arrays)}", a))
    with tempfile.TemporaryDirectory(prefix="kvq-") as name:
        folder = Path(name)
        np.savez(folder / "arrays.npz", **dict(arrays.values()))
        described = [_describe(launch, arrays) for launch in launches]
        (folder / "launches.json").write_text(json.dumps(described))
        _subprocess(folder)
        written = {id(launch.args[i]) for launch in launches for i in launch.outputs}
        with np.load(folder / "results.npz", allow_pickle=False) as results:
            for key in written:
                name, array = arrays[key]
                array[:] = results[name]


def _describe(launch, arrays):
    """A launch as JSON: an argument is an array's name or [dtype, number]."""
    args = [
        arrays[id(a)][0] if isinstance(a, np.ndarray) else [a.dtype.name, a.item()]
        for a in launch.args
    ]
    return {**vars(launch), "args": args}


def _subprocess(folder):
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"Numba's simulator failed: {lines[-1]}")


# --- in the process of the simulator --------------------------------------------------
def _main(folder):
    with np.load(folder / "arrays.npz", allow_pickle=False) as stored:
        arrays = dict(stored)
    for launch in json.loads((folder / "launches.json").read_text()):
        _simulate(SimpleNamespace(**launch), arrays)
    np.savez(folder / "results.npz", **arrays)


def _simulate(launch, arrays):
    from numba import cuda
    from numba.cuda.simulator import kernel as running

    # The simulator takes the place of a *global* called cuda while a kernel runs. The
    # twins import it in a function: let the module ask for the running kernel itself.
    cuda.__getattr__ = lambda name: getattr(running._get_kernel_context(), name)
    twin = importlib.import_module("kvq.kernels." + launch.source.replace("/", "."))
    kernel = twin.kernels(SimpleNamespace(**launch.constants))[launch.kernel]
    args = [
        arrays[a] if isinstance(a, str) else np.dtype(a[0]).type(a[1])
        for a in launch.args
    ]
    cuda.jit(kernel)[launch.grid, launch.block](*args)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
