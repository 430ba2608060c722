"""What a compiled kernel costs, read from its CUBIN: no GPU, nothing is run.

`facts(cubin)` reads registers, shared memory and stack with cuobjdump and the machine
code (SASS) with nvdisasm; both come from NVIDIA's wheels. They say what a kernel
needs, never how long it takes.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PLACE = re.compile(r'//## File "([^"]+)", line (\d+)')
SECTION = re.compile(r"\n\.text\.(\w+):\n(.*?)(?=\n\t?\.section|\Z)", re.S)
LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
FUNCTION = re.compile(r"Function (\w+):\n(.*)")
RESOURCE = re.compile(r"(REG|STACK|SHARED|LOCAL):(\d+)")


@dataclass(frozen=True)
class Facts:
    """One kernel of a CUBIN.

    registers : of a thread. stack, shared : bytes of a thread, of a block.
    code : its instructions in order, as opcodes: ("S2R", "LDG.E.128", ...).
    places : (file, line) of the source for each of them.
    loops : (start, stop) in `code` of every loop before the first unconditional EXIT.
        What comes later is slow paths, such as a division's.
    """

    registers: int
    stack: int
    shared: int
    code: tuple[str, ...]
    places: tuple[tuple[str, int], ...]
    loops: tuple[tuple[int, int], ...]

    @property
    def spills(self):
        """Instructions that move registers to and from local memory."""
        return count(self.code, "LDL", "STL")

    @property
    def wide_loads(self):
        """Loads of 16 bytes from global memory, into registers or shared memory."""
        return sum(op.startswith("LDG") and "128" in op.split(".") for op in self.code)

    @property
    def matrix(self):
        """Instructions of the tensor cores."""
        return count(self.code, "HMMA", "IMMA", "QMMA")

    @property
    def main_loop(self):
        """The opcodes of the longest loop, () where there is none."""
        start, stop = max(
            self.loops, key=lambda loop: loop[1] - loop[0], default=(0, 0)
        )
        return self.code[start:stop]

    @property
    def barriers(self):
        """Barriers of the whole block in the main loop."""
        return count(self.main_loop, "BAR")


def count(opcodes, *starts):
    """How many opcodes are one of `starts`, or a form of one: LDG, LDG.E.128."""
    return sum(any(f"{op}.".startswith(f"{s}.") for s in starts) for op in opcodes)


def facts(cubin):
    """{kernel: Facts} of a CUBIN (bytes). Raises RuntimeError without the tools."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", path)
        sass = _run("nvdisasm", "-c", "-g", path)
    resources = {
        name: {key: int(value) for key, value in RESOURCE.findall(line)}
        for name, line in FUNCTION.findall(usage)
    }
    return {
        name: Facts(r["REG"], r["STACK"], r["SHARED"], *_code(text))
        for name, text in SECTION.findall(sass)
        for r in [resources[name]]
    }


def _code(text):
    """(opcodes, places, loops) of one kernel's SASS."""
    code, places, loops, labels = [], [], [], {}
    place, finished = ("", 0), False
    for line in text.splitlines():
        if found := PLACE.search(line):
            place = Path(found[1]).name, int(found[2])
        elif found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            predicate, opcode, operands = found.groups()
            code.append(opcode)
            places.append(place)
            start = _start(opcode, operands, labels)
            if start is not None and not finished:
                loops.append((start, len(code)))
            finished |= opcode == "EXIT" and not predicate
    return tuple(code), tuple(places), tuple(loops)


def _start(opcode, operands, labels):
    """Where a branch backwards goes, or None for anything else."""
    target = TARGET.search(operands)
    return labels.get(target[1]) if target and opcode.startswith("BRA") else None


# --- the tools ------------------------------------------------------------------------
def unavailable():
    """None, or in one line which tool is missing."""
    missing = [name for name in ("cuobjdump", "nvdisasm") if not tool(name)]
    return f"needs nvidia-cuda-{missing[0]}" if missing else None


def tool(name):
    """The path of a program of NVIDIA, in its wheel or on the PATH, or None."""
    spec = importlib.util.find_spec("nvidia")
    for wheel in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(wheel).glob(f"*/bin/{name}")):
            return str(path)
    return shutil.which(name)


def _run(name, *options):
    program = tool(name)
    if program is None:
        raise RuntimeError(f"{name} is not here: pip install nvidia-cuda-{name}")
    done = subprocess.run([program, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()}")
    return done.stdout
