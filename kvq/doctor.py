"""What `kvq doctor` finds: versions, processor, GPU, and which backends can run."""

import os
import platform
from importlib import metadata

import kvq
from kvq.tables import provenance

PACKAGES = (
    *("numpy", "ml_dtypes", "joblib", "matplotlib", "safetensors", "tqdm"),
    *("numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "jupytext", "nbclient"),
)


def examine():
    """A dict: versions (None where absent), cpu, cores, gpu, backends.

    gpu : {"available": bool, "what": its name, or the reason why there is none}.
    backends : {name: None, or the reason why it cannot run}.
    """
    available, what, backends = False, "kvq.kernels is not installed", {}
    try:
        from kvq import kernels
    except ImportError:
        pass  # kvq as a plain folder on sys.path: `pip install .` maps kernels/ as well
    else:
        available, what = kernels.gpu_status()
        backends = {name: b.unavailable() for name, b in kernels.BACKENDS.items()}
    versions = {"kvq": kvq.__version__, "python": platform.python_version()}
    return {
        "versions": versions | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": provenance("kvq doctor").get("cpu", platform.machine()),
        "cores": _cores(),
        "gpu": {"available": available, "what": what},
        "backends": backends,
    }


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cores():
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def lines(report):
    """The report of `examine` as lines of text."""
    for name, version in report["versions"].items():
        yield f"{name:<14} {version or 'not installed'}"
    yield f"{'platform':<14} {report['platform']}"
    yield f"{'CPU':<14} {report['cpu']}, {report['cores']} cores"
    gpu = report["gpu"]
    yield f"{'GPU':<14} {gpu['what'] if gpu['available'] else 'none: ' + gpu['what']}"
    yield ""
    yield "backends, the fastest first, simulators last:"
    for name, reason in report["backends"].items():
        yield f"  {name:<12} {'cannot run: ' + reason if reason else 'can run'}"
