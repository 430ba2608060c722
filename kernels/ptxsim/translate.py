"""Basic blocks -> Python functions.

Each instruction becomes one line, `r5 = f12(r3, k0)`, where `f12` is its meaning: a
NumPy function over all lanes that run. A block reads the registers it needs from the
machine, keeps them in local variables, and writes back those that another block reads.
It returns the condition of its last jump, if that has one.
"""

from dataclasses import dataclass

import numpy as np

from kvq.kernels.ptxsim.blocks import basic_blocks, is_barrier, is_control, target_of
from kvq.kernels.ptxsim.errors import UnsupportedPTX
from kvq.kernels.ptxsim.meaning import Form, meaning_of
from kvq.kernels.ptxsim.parse import (
    Address,
    Immediate,
    Not,
    Register,
    Sink,
    Special,
    Symbol,
)
from kvq.kernels.ptxsim.types import NUMPY, SIZE, bits_of, constant

SPECIALS = {
    *(f"%{n}.{d}" for n in ("tid", "ntid", "ctaid", "nctaid") for d in "xyz"),
    *("%laneid", "%warpid", "%nwarpid", "%dynamic_smem_size", "%total_smem_size"),
    *(f"%lanemask_{c}" for c in ("eq", "lt", "le", "gt", "ge")),
    "WARP_SZ",
}


@dataclass(frozen=True)
class End:
    """How a block ends: kind next, branch, exit, barrier or switch."""

    kind: str
    target: object = None  # block index; of a switch the list of them


@dataclass
class Code:
    """A translated kernel, ready for the machine."""

    name: str
    instructions: list
    ranges: list  # per block: slice of its instructions
    functions: list  # per block: function(machine) -> condition
    ends: list
    registers: list
    text: str  # the generated Python, to look at


def translate(name, items, targets):
    """The `Code` of a kernel whose calls are inlined. Raises UnsupportedPTX."""
    blocks, labels = basic_blocks(items)
    meanings = {}
    for block in blocks:
        for k, instruction in enumerate(block.instructions):
            if not is_control(instruction):
                meanings[block.first + k] = meaning_of(instruction)
    shared = _read_elsewhere(blocks, meanings)
    writer = _Writer(shared, meanings)
    text = "\n".join(writer.block(number, block) for number, block in enumerate(blocks))
    exec(compile(text, f"<ptx {name}>", "exec"), writer.names)
    return Code(
        name,
        [i for block in blocks for i in block.instructions],
        [slice(b.first, b.first + len(b.instructions)) for b in blocks],
        [writer.names[f"block_{n}"] for n in range(len(blocks))],
        [_end(block, labels, targets) for block in blocks],
        writer.registers,
        text,
    )


def _end(block, labels, targets):
    last = block.instructions[-1]
    if not is_control(last):
        return End("next")
    form = Form(last)
    if last.opcode == "bra":
        form.finish()
        return End("branch", target_of(last, last.operands[0].name, labels))
    if last.opcode == "brx":
        form.choice("idx")
        form.finish()
        names = targets.get(last.operands[-1].name, [])
        return End("switch", [target_of(last, n, labels) for n in names])
    if last.opcode in ("ret", "exit"):
        form.finish()
        return End("exit")
    _check_barrier(form)
    return End("barrier")


def _check_barrier(form):
    """Only `bar.sync` of the whole block is known."""
    form.flag("cta")
    form.choice("sync")
    form.flag("aligned")
    form.finish()
    operands = form.sources
    if len(operands) > 1 or (operands and not isinstance(operands[0], Immediate)):
        raise form.unsupported("a barrier for a part of the block")


def _read_elsewhere(blocks, meanings):
    """The registers that some block reads before it writes them."""
    exposed = set()
    for block in blocks:
        written = set()
        for k, instruction in enumerate(block.instructions):
            _, results, sources = meanings.get(block.first + k, (None, (), None))
            sources = instruction.operands if sources is None else sources
            read = {*_registers(sources), *_registers([instruction.guard])}
            exposed |= read - written
            written |= set(_registers(results))
    return exposed


def _registers(operands):
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Not):
            yield operand.register
        elif isinstance(operand, Address) and isinstance(operand.base, Register):
            yield operand.base


class _Writer:
    """Writes the Python text of blocks and collects the names that it uses."""

    def __init__(self, shared, meanings):
        self.shared, self.meanings = shared, meanings
        self.registers = []  # all that blocks read from or write to the machine
        self.numbers = {}
        self.constants = {}
        self.names = {d.__name__: d for d in NUMPY.values()} | {"np": np}

    def block(self, number, block):
        self.lines, self.held, self.written = [], {}, {}
        for k, instruction in enumerate(block.instructions):
            if block.first + k in self.meanings:
                self._instruction(block.first + k, instruction)
        condition = self._condition(block.instructions[-1])
        for register in self.written:
            if register in self.shared:
                value = self._read(register, NUMPY[register.type])
                self.lines.append(f"m.write({self._number(register)}, {value})")
        self.lines.append(f"return {condition}")
        return f"def block_{number}(m):\n    " + "\n    ".join(self.lines) + "\n"

    def _condition(self, last):
        if not is_control(last):
            return "None"
        if last.opcode == "brx":
            return self._source(last, last.operands[0], "u32")
        if last.guard is None or is_barrier(last):
            return "None"
        return self._source(last, last.guard, "pred")

    def _instruction(self, site, instruction):
        meaning, destinations, operands = self.meanings[site]
        self.names[f"f{site}"] = meaning.function
        arguments = ["m", str(site)] if meaning.on_machine else []
        for operand, type_ in zip(operands, meaning.sources, strict=True):
            arguments.append(self._source(instruction, operand, type_))
        call = f"f{site}({', '.join(arguments)})"
        if len(meaning.results) == 0:
            self.lines.append(call)
        elif len(meaning.results) == 1:
            self._assign(instruction, destinations[0], meaning.results[0], call)
        else:
            self.lines.append(f"t = {call}")
            for k, destination in enumerate(destinations):
                self._assign(instruction, destination, meaning.results[k], f"t[{k}]")

    # ---- sources

    def _source(self, instruction, operand, type_):
        """The Python expression of a source operand, read as a PTX type."""
        if type_ == "address":
            return self._address(instruction, operand)
        dtype = NUMPY[type_]
        if isinstance(operand, Register):
            if SIZE[operand.type] < SIZE[type_] or (type_ == "pred") != (
                operand.type == "pred"
            ):
                reason = f"{operand.name} is .{operand.type}, read as .{type_}"
                raise UnsupportedPTX(f"{instruction}: {reason}")
            return self._read(operand, dtype)
        if isinstance(operand, Not):
            return f"(~{self._source(instruction, operand.register, 'pred')})"
        if isinstance(operand, Immediate):
            return self._constant(constant(operand.value, type_))
        if isinstance(operand, Special):
            if operand.name not in SPECIALS:
                raise UnsupportedPTX(f"{instruction}: {operand.name} is not modelled")
            return _cast(f"m.special({operand.name!r})", np.uint32, dtype)
        if isinstance(operand, Symbol):
            return _cast(self._symbol(operand), np.uint64, dtype)
        raise UnsupportedPTX(f"{instruction}: an operand that it does not take")

    def _address(self, instruction, operand):
        if not isinstance(operand, Address):
            raise UnsupportedPTX(f"{instruction}: an address is wanted")
        base, offset = operand.base, operand.offset
        if not isinstance(base, Symbol | Immediate | Register):
            raise UnsupportedPTX(f"{instruction}: an address in {base}")
        if isinstance(base, Symbol):
            return self._symbol(Symbol(base.name, base.offset + offset))
        if isinstance(base, Immediate):
            return self._constant(np.uint64(base.value + offset))
        type_ = "u64" if SIZE[base.type] == 8 else "u32"
        text = self._source(instruction, base, type_)
        if offset:
            text = f"{text} + {self._constant(constant(offset, type_))}"
        return text

    def _symbol(self, symbol):
        return f"m.symbol({symbol.name!r}, {symbol.offset})"

    def _read(self, register, dtype):
        if register not in self.held:
            self.held[register] = NUMPY[register.type]
            number = self._number(register)
            self.lines.append(f"r{number} = m.read({number})")
        return _cast(f"r{self._number(register)}", self.held[register], dtype)

    def _number(self, register):
        if register not in self.numbers:
            self.numbers[register] = len(self.registers)
            self.registers.append(register)
        return self.numbers[register]

    def _constant(self, value):
        key = (value.dtype, value.tobytes())
        if key not in self.constants:
            self.constants[key] = f"k{len(self.constants)}"
            self.names[self.constants[key]] = value
        return self.constants[key]

    # ---- results

    def _assign(self, instruction, destination, type_, text):
        """Put a result into a register; a narrower one is extended by its sign."""
        if isinstance(destination, Sink):
            self.lines.append(text)
            return
        if not isinstance(destination, Register):
            raise UnsupportedPTX(f"{instruction}: a register is wanted for the result")
        want, have = SIZE[destination.type], SIZE[type_]
        if want < have or (type_ == "pred") != (destination.type == "pred"):
            reason = f"{destination.name} is .{destination.type}, the result .{type_}"
            raise UnsupportedPTX(f"{instruction}: {reason}")
        dtype = NUMPY[type_]
        if want > have:
            dtype = bits_of(destination.type)
            text = f"({text}).astype({dtype.__name__})"
        number = self._number(destination)
        self.lines.append(f"r{number} = {text}")
        self.held[destination] = dtype
        self.written[destination] = True


def _cast(text, have, want):
    """The bits of `have` as `want`: the same bits, or the low ones of them."""
    if have is want:
        return text
    have_size, want_size = np.dtype(have).itemsize, np.dtype(want).itemsize
    if have_size == want_size:
        return f"{text}.view({want.__name__})"
    have_bits, want_bits = (f"uint{8 * s}" for s in (have_size, want_size))
    text = f"{text}.view({have_bits}).astype({want_bits})"
    return text if want.__name__ == want_bits else f"{text}.view({want.__name__})"
