"""Accelerated versions of `pack`, `dequant` and `decode`; imported as `kvq.kernels`.

    kvq.kernels.backend("auto")      the fastest backend that can run here
    kvq.kernels.BACKENDS             all of them, by name
    kvq.kernels.gpu_status()         is there a GPU, and if not, why

Importing this module imports nothing, under whatever name: `kernels` is also the
name of a package on PyPI, and other libraries probe for it.
"""

__all__ = ["BACKENDS", "backend", "gpu_status"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvq.kernels import backends

    return getattr(backends, name)
