"""Run CUDA C kernels on the CPU: g++ compiles them, a fiber plays each thread.

A second, independent executor beside the PTX machine: it needs a C++ compiler and
nothing of CUDA's (`cuda_cpu.h` stands in for the headers). It finds threads that wait
for ever, shuffles that read lanes which are not there, and writes beside an array;
with `sanitize=True` also every read outside of an array, misaligned access and integer
overflow, with the source line. It does not see races: one thread runs at a time.

Floats are IEEE 754 with one rounding for each operation (`-ffp-contract=off`): a*b + c
is rounded twice, where CUDA fuses it unless told otherwise. `fmaf` rounds once in both.
"""

import ctypes
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvq.kernels.launch import cache
from kvq.kernels.launch.nvrtc import KERNELS, CompileError, source_path, source_text
from kvq.kernels.ptxsim.errors import KernelFault

HEADER = Path(__file__).with_name("cuda_cpu.h")
OLDEST = 9  # C++17, and __builtin_LINE as a default argument
OPTIONS = (
    "-std=c++17",
    "-O2",
    "-w",  # warnings of a kernel are NVRTC's business
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fwrapv",  # integers wrap, as on a GPU
    "-fno-strict-aliasing",  # kernels read arrays of numbers as words
    "-U_FORTIFY_SOURCE",  # it forbids to leave a signal handler for another stack
)
LIBRARY = ("-shared", "-fPIC", "-fno-gnu-unique")  # each library its own statics
SANITIZERS = (
    "-O0",
    "-g",
    "-fno-wrapv",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
NAME = (
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^{;]*?\)\s*)?(\w+)'
)
KERNEL = re.compile(NAME + r"\s*\(")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
ALIGN = 256  # bytes: where a GPU's allocator puts arrays
GUARD = 4096  # bytes on both sides of an array, all bits set, checked after a run
LARGE = 2**28  # bytes: arrays beyond this are used where they are, without guards


def unavailable():
    """None, or in one line why kernels cannot be compiled by g++ here."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux; this is {sys.platform}"
    if shutil.which("g++") is None:
        return "needs g++: no such command"
    if "Free Software Foundation" not in compiler():
        return f"needs GNU g++; `g++` is {compiler().splitlines()[0]}"
    version = _g("-dumpversion").strip()
    if int(version.partition(".")[0]) < OLDEST:
        return f"needs g++ {OLDEST} or newer; here is {version}"
    return None


def missing(launches):
    """None, or why these launches cannot be run by this executor."""
    for source in dict.fromkeys(launch.source for launch in launches):
        reason = inline_ptx(source)
        if reason:
            return reason
    return None


def inline_ptx(source):
    """None, or where a source has PTX inside, which a CPU cannot run."""
    text = source_text(source)
    code = COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    found = re.search(r"\basm\b", code)
    if found is None:
        return None
    line = text.splitlines()[code[: found.start()].count("\n")].strip()
    return f"{source} has inline PTX, which g++ cannot compile: {line}"


def run(launches, sanitize=False):
    """Run launches one after the other; outputs are written back in place.

    sanitize : compile with AddressSanitizer and UndefinedBehaviorSanitizer, and run in
        a process of its own. Slower by far; what the launches before a fault have
        written stays.
    Raises KernelFault, CompileError; TypeError for arguments of a wrong type;
        ValueError for inline PTX and for a kernel that is not in its source.
    """
    reason = missing(launches)
    if reason:
        raise ValueError(reason)
    if sanitize:
        for launch in launches:
            _run_process(launch)
        return
    buffers = {}
    for launch in launches:
        _run_library(launch, buffers)
    for launch in launches:
        for i in launch.outputs:
            buffers[id(launch.args[i])].copy_back()


# --- in this process ----------------------------------------------------------------
class _Buffer:
    """An array as the kernel sees it: aligned, between guards that must not change."""

    def __init__(self, array):
        self.array, self.guards = array, ()
        self.bytes = array.view(np.uint8)
        if array.nbytes <= LARGE:
            raw = np.empty(array.nbytes + 2 * GUARD + ALIGN, np.uint8)
            start = GUARD + -(raw.ctypes.data + GUARD) % ALIGN
            stop = start + array.nbytes
            self.guards = raw[start - GUARD : start], raw[stop : stop + GUARD]
            for guard in self.guards:
                guard.fill(0xFF)
            self.bytes = raw[start:stop]
            self.bytes[:] = array.view(np.uint8)

    def copy_back(self):
        self.array.view(np.uint8)[:] = self.bytes

    def guards_changed(self):
        return any((guard != 0xFF).any() for guard in self.guards)


def _run_library(launch, buffers):
    library = load(launch.source, launch.constants)
    _check_types(library, launch)
    args = [_pointer(a, buffers) for a in launch.args]
    places = [ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in args]
    call = _function(library, "launch", launch)
    values = (ctypes.c_void_p * len(places))(*places)
    wrong = call(launch.grid, launch.block, values)
    if wrong:
        raise KernelFault(f"{launch.kernel}: {wrong.decode()}")
    for i, a in enumerate(launch.args):
        if isinstance(a, np.ndarray) and buffers[id(a)].guards_changed():
            raise KernelFault(f"{launch.kernel}: a write beside argument {i}")


def _pointer(a, buffers):
    """A C value: the address of an array's buffer, or the scalar's bytes."""
    if not isinstance(a, np.ndarray):
        return (ctypes.c_char * a.nbytes).from_buffer_copy(a.tobytes())
    if id(a) not in buffers:
        buffers[id(a)] = _Buffer(a)
    return ctypes.c_void_p(buffers[id(a)].bytes.ctypes.data)


def _check_types(library, launch):
    """Raises TypeError unless the arguments fit the kernel's parameters."""
    text = _function(library, "types", launch)().decode()
    expected = [text[i : i + 2] for i in range(0, len(text), 2)]
    given = [_type(a) for a in launch.args]
    if given != expected:
        raise TypeError(
            f"{launch.kernel} takes ({', '.join(expected)}), *2 an array of 2-byte "
            f"numbers; given ({', '.join(given)})"
        )


def _function(library, what, launch):
    """`launch_NAME` or `types_NAME` of the library; both return a string."""
    function = getattr(library, f"{what}_{launch.kernel}", None)
    if function is None:
        raise ValueError(f"{launch.source} has no kernel {launch.kernel!r}")
    function.restype = ctypes.c_char_p
    return function


def _type(a):
    kind = "*" if isinstance(a, np.ndarray) else a.dtype.kind
    return f"{kind}{a.dtype.itemsize}"


def load(source, constants):
    """The library that holds a source's kernels, with these constants.

    PyDLL, not CDLL: a library's threads live in static variables, so Python's own lock
    is kept during a call.
    """
    return _load(_compile(source, constants, LIBRARY))


@functools.cache
def _load(data):
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.PyDLL(file.name)  # stays mapped when the file is gone


# --- in a process of its own --------------------------------------------------------
def _run_process(launch):
    _check_types(load(launch.source, launch.constants), launch)
    program = _compile(launch.source, launch.constants, SANITIZERS)
    with tempfile.TemporaryDirectory() as folder:
        path, data = Path(folder, "kernel"), Path(folder, "data")
        path.write_bytes(program)
        path.chmod(0o700)
        data.write_bytes(_to_file(launch))
        done = subprocess.run(
            [path, launch.kernel, data],
            env={"ASAN_OPTIONS": "detect_leaks=0:redzone=2048", "PATH": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise KernelFault(f"{launch.kernel}: {_fault(done.stderr)}")
        _from_file(launch, data.read_bytes())


def _to_file(launch):
    head = np.array([launch.grid, launch.block, len(launch.args)], np.int64)
    parts = [head.tobytes()]
    for a in launch.args:
        parts += [np.int64(a.nbytes).tobytes(), a.tobytes()]
    return b"".join(parts)


def _from_file(launch, data):
    at = 0
    for i, a in enumerate(launch.args):
        if i in launch.outputs:
            a[:] = np.frombuffer(data, a.dtype, a.size, at)
        at += a.nbytes


def _fault(report):
    """One line from what the sanitizers print."""
    for pattern in (
        r"^fault: (.*)",
        r"AddressSanitizer: ([\w-]+)",
        r"runtime error: (.*)",
    ):
        what = re.search(pattern, report, re.M)
        if what:
            break
    else:
        return report.strip()[-300:]
    parts = [what[1]]
    line = re.search(r"([\w.-]+\.cuh?:\d+)", report)
    if line and line[1] not in what[1]:
        parts.append(f"at {line[1]}")
    parts += re.findall(r"^(?:where|thread): (.*)", report, re.M)
    return ", ".join(parts)


# --- the compiler ---------------------------------------------------------------------
@functools.cache
def compiler():
    """What `g++ --version` says."""
    return _g("--version")


def _g(option):
    return subprocess.run(["g++", option], capture_output=True, text=True).stdout


def _compile(source, constants, options):
    """The bytes of a library or of a program. Raises CompileError, ValueError."""
    path = source_path(source)
    options = [*OPTIONS, *options, *(f"-D{k}={v}" for k, v in constants.items())]
    facts = [compiler(), path.name, *options, source_text(source)]
    return cache.kept("gxx", [__file__, HEADER], facts, lambda: _gxx(path, options))


def _gxx(path, options):
    """One run of g++."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cuda_fp16.h", "cuda_bf16.h"):  # everything is in our header
            Path(folder, name).touch()
        main, output = Path(folder, "main.cpp"), Path(folder, "output")
        main.write_text(_main(path), encoding="utf-8")
        includes = [f"-I{i}" for i in (path.parent, KERNELS, folder)]
        command = ["g++", *options, *includes, main, "-o", output]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(_errors(done.stderr))
        return output.read_bytes()


def _main(path):
    """The C++ file that is compiled: the header, the source, a door to each kernel."""
    kernels = dict.fromkeys(KERNEL.findall(path.read_text(encoding="utf-8")))
    lines = [f'#include "{HEADER}"', f'#include "{path}"']
    lines += [f"CUDA_CPU_EXPORT({kernel})" for kernel in kernels]
    runs = [f"    CUDA_CPU_RUN({kernel}, argv)" for kernel in kernels]
    lines += ["int main(int, char** argv) {", *runs, "    return 2;", "}", ""]
    return "\n".join(lines)


def _errors(report):
    """The lines of g++'s errors, without their folders."""
    errors = [line for line in report.splitlines() if ": error: " in line]
    return "\n".join(re.sub(r"^.*/", "", line) for line in errors) or report[-500:]
