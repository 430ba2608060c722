"""Kernels compiled from today's sources, for the PTX machine."""

import functools

import pytest

from kvq.kernels import ptxsim
from kvq.kernels.launch.compilers import COMPILERS, compile_ptx


@functools.cache
def compiled(language, source, kernel, constants):
    """A `ptxsim.Kernel`. constants : sorted (name, value) pairs. Skips without it."""
    reason = COMPILERS[language].unavailable()
    if reason:
        pytest.skip(reason)
    text = compile_ptx(language, source, kernel, dict(constants))
    return ptxsim.Module(text).kernel(kernel)
