"""The Numba twins to PTX: no driver, no GPU.

    compile_ptx("pack/v1_word_per_thread", "pack_v1", {"X": "__half", "S": "__half"})

A twin is the module `kernels/NAME.py` beside `kernels/NAME.cu`. It has two functions
of the constants `c` (a namespace: c.BITS is -DBITS of the CUDA C):

    kernels(c)       {kernel's name: plain Python function}
    signatures(c)    {kernel's name: tuple of Numba types}

and imports what it shares with other twins by `from kvq.kernels.MODULE import`. The
PTX has the kernel's plain name as its entry, and the same text on every machine.
"""

import contextlib
import importlib
import re
from types import SimpleNamespace
from unittest import mock

from kvq.kernels.launch import cache
from kvq.kernels.launch.nvrtc import FILE_LINE, KERNELS, PTX_ARCHITECTURE, short_name

ENTRY = re.compile(r"^\.visible \.entry (\w+)", re.M)
# Numba's pointers to its own environment: declared, never used.
ENVIRONMENT = re.compile(r"^\.common \.global .* _ZN08NumbaEnv\w+;\n", re.M)
IMPORT = re.compile(r"^\s*from kvq\.kernels\.([\w.]+) import", re.M)
MANGLED = re.compile(r"\b_ZN\w+")


def compile_ptx(source, kernel, constants=None, arch=PTX_ARCHITECTURE):
    """PTX text of one kernel, with the source's lines in it.

    source : a twin's name, such as "pack/v1_word_per_thread".
    constants : {name: int or str}, as for the CUDA C.
    Raises ValueError for an unknown source or kernel, Numba's errors for the rest.
    """
    constants = constants or {}
    defines = [f"{name}={value}" for name, value in sorted(constants.items())]
    versions = [cache.wheel(name) for name in ("numba-cuda", "numba", "nvidia-nvvm")]
    return cache.kept(
        "numba",
        [__file__],
        [*versions, source, kernel, str(arch), *defines, source_text(source)],
        lambda: _compile(source, kernel, constants, divmod(arch, 10)).encode(),
    ).decode()


def unavailable():
    """None, or in one line why the twins cannot be compiled here."""
    try:
        from numba import config, cuda
        from numba.cuda.cudadrv.nvvm import NVVM

        if config.ENABLE_CUDASIM:
            return "NUMBA_ENABLE_CUDASIM is set: the simulator compiles nothing"
        if not hasattr(cuda, "compile_ptx"):
            return "needs numba-cuda"
        NVVM()
    except Exception as error:  # ImportError, or any kind where a library is missing
        detail = " ".join(str(error).split())[:120]
        return f"needs numba-cuda and nvidia-nvvm: {detail}"
    return None


def twins():
    """The names of the kernels that have a Numba twin."""
    files = KERNELS.glob("*/v[0-9]*.py")
    return sorted(f.relative_to(KERNELS).with_suffix("").as_posix() for f in files)


def source_text(source):
    """A twin and every module of this package that it imports.

    Raises ValueError for an unknown source.
    """
    if not (KERNELS / f"{source}.py").is_file():
        raise ValueError(f"no Numba twin {source!r}; valid: {', '.join(twins())}")
    texts, pending = {}, [f"{source}.py"]
    while pending:
        name = pending.pop()
        if name not in texts and (KERNELS / name).is_file():
            texts[name] = (KERNELS / name).read_text(encoding="utf-8")
            modules = IMPORT.findall(texts[name])
            pending += [f"{module.replace('.', '/')}.py" for module in modules]
    return "\n".join(texts.values())


def _compile(source, kernel, constants, capability):
    from numba import cuda

    module = importlib.import_module("kvq.kernels." + source.replace("/", "."))
    c = SimpleNamespace(**constants)
    functions, signatures = module.kernels(c), module.signatures(c)
    if kernel not in functions:
        valid = ", ".join(functions)
        raise ValueError(f"no kernel {kernel!r} in {source}; valid: {valid}")
    with _device_of(capability):
        options = {"cc": capability, "lineinfo": True}
        ptx, _ = cuda.compile_ptx(functions[kernel], signatures[kernel], **options)
    return _plain(ptx, kernel)


@contextlib.contextmanager
def _device_of(capability):
    """Numba asks the driver for what a device function is compiled; answer instead."""
    from numba.cuda import dispatcher

    device = SimpleNamespace(compute_capability=capability)
    with mock.patch.object(dispatcher, "get_current_device", return_value=device):
        yield


def _plain(ptx, kernel):
    """PTX without what differs from run to run: mangled names, counters, folders."""
    ptx = ENVIRONMENT.sub("", ptx).replace(ENTRY.search(ptx)[1], kernel)
    names = {name: f"device_{i}" for i, name in enumerate(_unique(MANGLED, ptx))}
    ptx = MANGLED.sub(lambda m: names[m[0]], ptx)
    return FILE_LINE.sub(lambda m: f'{m[1]}"{short_name(m[2], KERNELS)}"', ptx)


def _unique(pattern, text):
    return dict.fromkeys(pattern.findall(text))
