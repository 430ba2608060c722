"""`kvq kernels`: what the kernels cost, line by line, and a check of your own."""

import re
from pathlib import Path

from kvq.commands.common import UsageError, integers, note, print_json, table

TYPES = {
    f"{word[0]}{bits}": f"{word}{bits}"
    for word, widths in (
        ("float", (16, 32, 64)),
        ("int", (8, 16, 32, 64)),
        ("uint", (8, 16, 32, 64)),
    )
    for bits in widths
}
ARGUMENT = re.compile(r"(?P<name>\w+):(?P<type>\w+)(\[(?P<size>\d+)\])?=(?P<value>.+)")
SYNTAX = "NAME:TYPE[SIZE]=random|arange|NUMBER|FILE.npy, or NAME:TYPE=NUMBER"
REPORT_NOTES = (
    "registers: of a thread. shared: bytes of a block. 16 B: loads of 16 bytes. mma: "
    "tensor-core instructions. loop: instructions of the longest loop.",
    "instr/byte: machine instructions of a lane for each byte that must move; an "
    "estimate from the PTX executed.",
    "sectors, wavefronts: counted in the simulator, over the ideal.",
)
TENSOR_CORE_NOTES = (
    "Tensor cores, as recorded: D = 128, keys per channel, G = 64, 4 query heads a KV "
    "head; 16 bits: full precision. 16 B: loads of 16 bytes in the main loop.",
    "Of a device: the share of its issue slots that the loop needs while the memory "
    "delivers its bytes, and what binds. Predicted, not measured.",
)
BITS = (8, 4, 3, 2)
COUNTERS = (
    *("instructions", "sectors", "ideal_sectors"),
    *("wavefronts", "ideal_wavefronts", "divergent"),
)


def add(commands):
    p = commands.add_parser("kernels", help="what the kernels cost; check your own")
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_report(actions)
    _add_explain(actions)
    _add_check(actions)


def _add_report(actions):
    p = actions.add_parser("report", help="a table: every kernel, every architecture")
    p.add_argument(
        "--arch", type=integers, metavar="A,B,...", help="such as 80,90 (default: all)"
    )
    p.add_argument(
        "--bits", type=int, default=4, choices=BITS, help="of a code (default: 4)"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=report)


def _add_explain(actions):
    p = actions.add_parser("explain", help="a kernel's source with its counters")
    p.add_argument("kernel", metavar="KERNEL", help="such as decode/v2")
    p.add_argument(
        "--bits", type=int, default=4, choices=BITS, help="of a code (default: 4)"
    )
    p.add_argument("--language", default="c", choices=("c", "numba"), help="default: c")
    p.add_argument("--html", type=Path, metavar="FILE", help="write a page as well")
    p.set_defaults(run=explain)


def _add_check(actions):
    p = actions.add_parser(
        "check",
        help="run a kernel of yours in the simulator, every access checked",
        description="Run a kernel of yours in the simulator, every access checked.",
        epilog=f"ARG: {SYNTAX}; types {', '.join(TYPES)}. Example: kvq kernels check "
        "scale.cu scale 'x:f32[1000]=random' 'out:f32[1000]=0' n:i32=1000 --grid 8 "
        "--block 128",
    )
    p.add_argument("file", type=Path, metavar="FILE", help="FILE.cu, or FILE.ptx")
    p.add_argument("kernel", metavar="KERNEL", help='its name, extern "C"')
    p.add_argument("args", nargs="*", metavar="ARG", help="its arguments, in order")
    p.add_argument("--grid", type=int, default=1, metavar="N", help="blocks")
    p.add_argument("--block", type=int, default=32, metavar="N", help="threads of each")
    p.add_argument(
        "-D",
        dest="defines",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a constant for the compiler",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=check)


# --- report ---------------------------------------------------------------------------
def report(options):
    """Print what every kernel costs on every architecture."""
    from kvq.kernels import report as kernels
    from kvq.kernels.budgets import tensor_cores
    from kvq.kernels.launch import nvrtc

    archs = options.arch or nvrtc.ARCHITECTURES
    found = kernels.rows(archs, options.bits)
    if options.json:
        print_json(found)
        return
    titles = [
        *("kernel", "arch", "registers", "spills", "shared", "16 B", "mma", "loop"),
        *("instr/byte", "sectors", "wavefronts"),
    ]
    print(*table([titles, *map(_report_cells, found)]), sep="\n")
    print(*REPORT_NOTES, sep="\n")
    bits = [b for b in (16, *tensor_cores.BITS) if b in (16, options.bits)]
    archs = [arch for arch in tensor_cores.ARCHITECTURES if arch in archs]
    lines = tensor_cores.cells(bits, archs)
    print("", *table(lines), *TENSOR_CORE_NOTES, sep="\n")


def _report_cells(row):
    fields = ("arch", "registers", "spills", "shared_bytes", "wide_loads", "matrix")
    return [
        row["kernel"],
        *(str(row[field]) for field in (*fields, "loop_instructions")),
        f"{row['instructions_per_byte']:.1f}",
        *(
            _ratio(row[what], row[f"ideal_{what}"])
            for what in ("sectors", "wavefronts")
        ),
    ]


def _ratio(count, ideal):
    return f"{count / ideal:.2f}" if ideal else "-"


# --- explain --------------------------------------------------------------------------
def explain(options):
    """Print a kernel's source with its counters, the worst lines first."""
    from kvq.kernels import explain, report

    case = report.case_of(*_version(options.kernel), options.bits)
    lines = explain.source_lines(report.run(case, options.language))
    print(str(case), "", "the worst lines:", *explain.summary(lines), "", sep="\n")
    print(*table(explain.text(lines), left=(7,)), sep="\n")
    if options.html is not None:
        options.html.write_text(explain.page(str(case), lines), encoding="utf-8")
        note(f"wrote {options.html}")


def _version(name):
    """("decode", "v2") of decode/v2, or of its source's whole name."""
    from kvq.kernels.cases import tensor_core_versions, versions

    pairs = [*versions(), *tensor_core_versions()]
    known = {f"{op}/{version}": (op, version) for op, version in pairs}
    for short, pair in known.items():
        if name == short or name.startswith(f"{short}_"):
            return pair
    raise ValueError(f"no kernel {name!r}; valid: {', '.join(known)}")


# --- check ----------------------------------------------------------------------------
def check(options):
    """Run the kernel of a file in the simulator; print what it did and its counters.

    Raises ValueError for a fault: what happened, to which buffer, thread and line.
    """
    import numpy as np

    from kvq.kernels.explain import waste

    arguments = [parse(text, seed) for seed, text in enumerate(options.args)]
    names, values = [name for name, _ in arguments], [value for _, value in arguments]
    before = [np.copy(value) for value in values]
    report = _launch(options, names, values)
    changed = {
        name: int(np.count_nonzero(_bits(new) != _bits(old)))
        for name, old, new in zip(names, before, values, strict=True)
        if isinstance(new, np.ndarray)
    }
    if options.json:
        counters = {name: getattr(report, name) for name in COUNTERS}
        print_json({**counters, "changed": changed})
        return
    print(f"{options.kernel}: {options.grid} x {options.block} threads, no fault")
    for name, value in zip(names, values, strict=True):
        if changed.get(name):
            first = ", ".join(f"{v:.6g}" for v in value[:4].tolist())
            print(f"{name}: {changed[name]} of {value.size} changed; it begins {first}")
    print(*table([COUNTERS, [f"{getattr(report, c):,}" for c in COUNTERS]]), sep="\n")
    for line, counts in report.lines.items():
        if remarks := list(waste(counts)):
            print(f"line {line}: {', '.join(remarks)}")


def parse(text, seed=0):
    """(name, NumPy array or scalar) of one argument, such as x:f32[1000]=random.

    seed : of random numbers. Raises ValueError that names the argument.
    """
    import numpy as np

    found = ARGUMENT.fullmatch(text)
    if not found or found["type"] not in TYPES:
        valid = f"{SYNTAX}; types {', '.join(TYPES)}"
        raise UsageError(f"argument {text!r}; valid: {valid}")
    dtype, value = np.dtype(TYPES[found["type"]]), found["value"]
    if value.endswith(".npy"):
        return found["name"], _from_file(text, value, dtype, found["size"])
    if found["size"] is None:
        return found["name"], _number(text, value, dtype)
    return found["name"], _filled(text, value, dtype, int(found["size"]), seed)


def _from_file(text, path, dtype, size):
    """The numbers of a .npy file, of any shape, one after the other."""
    import numpy as np

    array = np.load(path).reshape(-1)
    if array.dtype != dtype or (size is not None and array.size != int(size)):
        raise UsageError(f"argument {text!r}: {path} has {array.size} of {array.dtype}")
    return array


def _filled(text, value, dtype, size, seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    if value == "arange":
        return np.arange(size).astype(dtype)
    if value != "random":
        return np.full(size, _number(text, value, dtype))
    if dtype.kind == "f":
        return rng.standard_normal(size).astype(dtype)
    return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).copy()


def _number(text, value, dtype):
    import numpy as np

    try:
        return np.array(float(value) if dtype.kind == "f" else int(value, 0), dtype)[()]
    except (ValueError, OverflowError):
        message = f"argument {text!r}: {value!r} is not {dtype}; valid: {SYNTAX}"
        raise UsageError(message) from None


def _bits(array):
    return array.view(f"u{array.itemsize}")


def _launch(options, names, values):
    """The simulator's report. Raises ValueError in one line."""
    from kvq.kernels import ptxsim

    try:
        kernel = ptxsim.Module(_ptx(options)).kernel(options.kernel)
        return kernel.launch(options.grid, options.block, values, names=names)
    except (ptxsim.KernelFault, ptxsim.UnsupportedPTX, TypeError) as error:
        raise ValueError(f"{options.file.name}: {error}") from None


def _ptx(options):
    """The text of FILE.ptx, or FILE.cu compiled."""
    from kvq.kernels.launch import nvrtc

    if options.file.suffix not in (".cu", ".ptx"):
        raise UsageError(f"file {str(options.file)!r}; valid: FILE.cu, FILE.ptx")
    if options.file.suffix == ".ptx":
        return options.file.read_text(encoding="utf-8")
    if reason := nvrtc.unavailable():
        raise ValueError(
            f"{options.file} cannot be compiled: {reason}; valid: FILE.ptx"
        )
    pairs = [text.partition("=") for text in options.defines]
    constants = {name: value if equals else 1 for name, equals, value in pairs}
    return nvrtc.compile_ptx(options.file, constants)
