"""CUDA C to PTX and to CUBIN by NVRTC: no driver, no GPU, no toolkit.

    compile_ptx("decode/v1_two_pass", {"X": "__half", "S": "__half"})    text
    compile_cubin("decode/v1_two_pass", constants, arch=90)              bytes

The compiler and its headers come from NVIDIA's wheels (`unavailable()` names the one
that is missing). Paths in the PTX are shortened to `decode/v1_two_pass.cu`, `kvq.cuh`
and `cuda_fp16.hpp`, so that every machine gives the same text.
"""

import functools
import importlib.util
import os
import posixpath
import re
from pathlib import Path

from kvq.kernels.launch import cache

KERNELS = Path(__file__).resolve().parents[1]
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
PTX_ARCHITECTURE = 80  # what the committed PTX and the simulator use
OPTIONS = ("-std=c++17", "-default-device", "-lineinfo")
QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
FILE_LINE = re.compile(r'^(\s*\.file\s+\d+\s+)"([^"]+)"', re.M)


class CompileError(ValueError):
    """What NVRTC said about a source: each line begins with file(line)."""


def compile_ptx(source, constants=None, arch=PTX_ARCHITECTURE):
    """PTX text, with the source's lines in it.

    source : a kernel's name ("pack/v1_word_per_thread"), or the path of a .cu file.
    constants : {name: int or str}, given to the compiler as -Dname=value.
    arch : compute capability, such as 80.
    Raises CompileError; ValueError for an unknown source or architecture.
    """
    return _compile(source, constants, f"compute_{arch}").decode()


def compile_cubin(source, constants=None, arch=PTX_ARCHITECTURE):
    """The bytes of a CUBIN: machine code (SASS) for one architecture.

    Arguments and errors as for `compile_ptx`.
    """
    return _compile(source, constants, f"sm_{arch}")


def unavailable():
    """None, or in one line what to install before anything can be compiled."""
    try:
        version()
    except Exception as error:  # ImportError, or any kind where a library is missing
        detail = " ".join(str(error).split())[:120]
        return f"needs nvidia-cuda-nvrtc and cuda-bindings, same version: {detail}"
    if not any((folder / "cuda_fp16.h").exists() for folder in include_folders()):
        return "needs nvidia-cuda-runtime: its header cuda_fp16.h is not here"
    return None


@functools.cache
def version():
    """The version of NVRTC, such as "13.5"."""
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


@functools.cache
def include_folders():
    """Where CUDA's headers can be: the wheels of this NVRTC first, then a toolkit."""
    major = version().partition(".")[0]
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in spec.submodule_search_locations] if spec else []
    layouts = (f"cu{major}", "cuda_runtime", "cuda_nvcc")  # the last two: CUDA 12
    folders = [wheel / layout / "include" for wheel in wheels for layout in layouts]
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(name):
            folders.append(Path(os.environ[name]) / "include")
    folders.append(Path("/usr/local/cuda/include"))
    return tuple(folder for folder in folders if folder.is_dir())


def sources():
    """The names of this package's kernel sources, such as "pack/v1_word_per_thread"."""
    files = KERNELS.glob("*/v[0-9]*.cu")
    return sorted(f.relative_to(KERNELS).with_suffix("").as_posix() for f in files)


def source_path(source):
    """The .cu file of a kernel's name, or of a path. Raises ValueError."""
    path = Path(source)
    if path.suffix != ".cu":
        path = KERNELS / f"{source}.cu"
    if not path.is_file():
        valid = ", ".join(sources())
        raise ValueError(f"no source {str(source)!r}; valid: a .cu file, or {valid}")
    return path.resolve()


def source_text(source):
    """A source and every file that it includes by quotes: what a result depends on."""
    texts, pending = {}, [source_path(source)]
    while pending:
        path = pending.pop()
        if path in texts or not path.is_file():
            continue
        texts[path] = path.read_text(encoding="utf-8")
        for name in QUOTED.findall(texts[path]):
            pending += [path.parent / name, KERNELS / name]
    return "\n".join(texts.values())


# --- the compiler -----------------------------------------------------------------
def _compile(source, constants, architecture):
    path = source_path(source)
    defines = [f"-D{name}={value}" for name, value in sorted((constants or {}).items())]
    options = [f"--gpu-architecture={architecture}", *OPTIONS, *defines]
    name = short_name(path, path.parent)
    facts = [*_wheels(), name, *options, source_text(path)]
    return cache.kept("nvrtc", [__file__], facts, lambda: _nvrtc(path, options))


@functools.cache
def _wheels():
    """The exact versions of the compiler and of its headers."""
    names = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
    wheels = [cache.wheel(name + suffix) for name in names for suffix in ("", "-cu12")]
    return [version(), *wheels]


def _nvrtc(path, options):
    """One run of NVRTC. Returns bytes: PTX text, or a CUBIN for an sm_ target."""
    from cuda.bindings import nvrtc

    folders = (path.parent, KERNELS, *include_folders())
    options = [*options, *(f"-I{folder}" for folder in folders)]
    text, name = path.read_bytes(), short_name(path, path.parent).encode()
    program = _checked(nvrtc.nvrtcCreateProgram(text, name, 0, [], []))
    try:
        _run(program, options)
        if "sm_" in options[0]:
            return _output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        ptx = _output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        return _with_short_names(ptx.rstrip(b"\0").decode(), path.parent).encode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _run(program, options):
    from cuda.bindings import nvrtc

    encoded = [option.encode() for option in options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if result == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    get = nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog
    log = _output(program, *get).rstrip(b"\0").decode().strip()
    if result == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION and "arch" in log:
        valid = ", ".join(map(str, _checked(nvrtc.nvrtcGetSupportedArchs())))
        raise ValueError(
            f"{options[0]} is unknown to NVRTC {version()}; valid: {valid}"
        )
    raise CompileError(log or result.name)


def _output(program, size, get):
    data = b" " * _checked(size(program))
    _checked(get(program, data))
    return data


def _checked(returned):
    """The value of a call, without its status. Raises RuntimeError."""
    status, *values = returned
    if int(status) != 0:
        raise RuntimeError(status.name)
    return values[0] if len(values) == 1 else values


def short_name(path, home):
    """A path without the folders that differ between machines.

    home : the folder of the source; its files are named from there, this package's
        from `kernels/`, CUDA's from `include/`.
    """
    name = posixpath.normpath(Path(path).as_posix())
    here = Path.cwd()  # NVRTC puts it before a relative name
    for folder in (KERNELS, home, here):
        name = name.removeprefix(folder.as_posix().rstrip("/") + "/")
    return name.rpartition("/include/")[2]


def _with_short_names(ptx, home):
    return FILE_LINE.sub(lambda m: f'{m[1]}"{short_name(m[2], home)}"', ptx)
