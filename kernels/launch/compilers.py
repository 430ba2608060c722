"""The compiler of each language: a kernel's source -> PTX, without a driver."""

from kvq.kernels.launch import numba_ptx, nvrtc

COMPILERS = {"c": nvrtc, "numba": numba_ptx}


def compile_ptx(language, source, kernel, constants):
    """PTX of `source`: of all its kernels ("c"), or of `kernel` alone ("numba").

    source : a kernel's file without its suffix. constants : {name: int or str}.
    Raises what the compiler raises; `COMPILERS[language].unavailable()` says whether
    there is one.
    """
    if language == "c":
        return nvrtc.compile_ptx(source, constants)
    return numba_ptx.compile_ptx(source, kernel, constants)
