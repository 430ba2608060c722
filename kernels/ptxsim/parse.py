"""PTX text -> a `Program`: variables, functions and kernels with their instructions.

The grammar that compilers use is small: statements end in `;`, scopes are `{ }`, every
operand is a register, a literal, a symbol, an `[address]` or a `{vector}`. Names are
resolved here: a register or a parameter of an inner scope is an object of its own.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from kvq.kernels.ptxsim.errors import PTXError, UnsupportedPTX
from kvq.kernels.ptxsim.types import NUMPY, SIZE

STATE_SPACES = ("global", "shared", "local", "const", "param")


@dataclass(eq=False)
class Register:
    name: str
    type: str  # as declared, without the dot


@dataclass(frozen=True)
class Immediate:
    value: object  # int, np.float32 or np.float64


@dataclass(frozen=True)
class Special:
    name: str  # "%tid.x"


@dataclass(frozen=True)
class Symbol:
    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    base: object  # Register, Symbol or Immediate
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    parts: tuple


@dataclass(frozen=True)
class Pair:
    first: object  # the two results of `shfl` and `setp`: d|p
    second: object


@dataclass(frozen=True)
class Not:
    register: Register


@dataclass(frozen=True)
class Sink:
    """The operand `_`: a result that nobody wants."""


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Instruction:
    opcode: str
    modifiers: tuple
    operands: tuple
    guard: Register | Not | None = None
    line: int = 0  # of the PTX text
    source: tuple = (None, 0)  # (file, line) of the innermost `.loc`
    kernel_line: int = 0  # the line of the kernel's own file that led here, 0 = unknown
    text: str = ""
    counted: bool = True  # False for jumps that the machine itself adds

    def __str__(self):
        return f"line {self.line}: {self.text}"

    @property
    def kind(self):
        """The opcode, of an access with its state space: "ld.global"."""
        spaces = (m.split("::")[0] for m in self.modifiers)
        space = next((s for s in spaces if s in STATE_SPACES), None)
        wanted = self.opcode in ("ld", "st", "atom", "red") and space
        return f"{self.opcode}.{space}" if wanted else self.opcode


@dataclass
class Variable:
    space: str  # global, const, shared or local
    name: str
    align: int
    size: int  # bytes; 0 for the dynamic shared array
    dynamic: bool = False
    data: bytes | None = None
    line: int = 0


@dataclass
class Parameter:
    name: str
    type: str
    align: int
    size: int  # bytes


@dataclass
class Function:
    name: str
    parameters: list
    returns: list = field(default_factory=list)
    items: list = field(default_factory=list)  # of Label and Instruction
    variables: list = field(default_factory=list)
    targets: dict = field(default_factory=dict)  # .branchtargets lists by label


@dataclass
class Program:
    kernels: dict = field(default_factory=dict)
    functions: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)  # index -> path, of `.file`


def parse(text):
    """The `Program` of a PTX text. Raises PTXError with the line."""
    text, files = _prepare(text)
    program = Program(files=files)
    statements = _statements(text)
    for line, statement in statements:
        if statement.startswith(".section"):
            _skip_block(statements)
        elif re.match(r"(\.\w+\s+)*\.(entry|func)\b", statement):
            _function(program, statements, line, statement)
        elif variable := _variable(line, statement):
            program.variables[variable.name] = variable
        elif not re.match(r"\.(version|target|address_size|pragma|alias)\b", statement):
            raise PTXError(f"line {line}: cannot read {_short(statement)!r}")
    return program


# ---- text -> statements


def _prepare(text):
    """Comments away; a `;` after labels and after directives that end with a line."""
    blank = lambda m: re.sub(r"[^\n]", " ", m[0])  # noqa: E731  lines must keep their number
    text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    files = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.M)
    text = re.sub(r"^\s*\.file\b[^\n]*", "", text, flags=re.M)
    line_directive = r"^(\s*\.(?:loc|version|target|address_size)\b[^\n;]*);?[ \t]*$"
    text = re.sub(line_directive, r"\1;", text, flags=re.M)
    label = r"(?<![\w$%:.])([$%A-Za-z_][\w$%]*)[ \t]*:(?!:)"
    text = re.sub(label, r"\1:;", text)
    return text, {int(index): path for index, path in files}


def _statements(text):
    """(line, statement) in order. `{` ends a header or stands alone, as `}` does."""
    line, start, depth = 1, 0, 0
    last = 0
    for match in re.finditer(r"[{};]", text):
        at, char = match.start(), match[0]
        pending = text[start:at].strip()
        scope = char == "{" and (not pending or re.match(_OPENS_SCOPE, pending))
        if depth or (char == "{" and not scope):  # a vector or an initializer
            depth += {"{": 1, "}": -1, ";": 0}[char]
            continue
        begin = start + len(text[start:at]) - len(text[start:at].lstrip())
        line += text.count("\n", last, begin)
        last = begin
        if char == "}" and pending and not re.match(r"\.b8\b|\.b\d+\b", pending):
            raise PTXError(f"line {line}: no ';' after {_short(pending)!r}")
        if char == "{":
            yield line, pending + "{"
        elif char == ";" and pending:
            yield line, pending
        elif char == "}":
            yield line, "}"
        start = at + 1
    if depth or text[start:].strip():
        raise PTXError(f"line {line}: the text ends inside a statement")


_OPENS_SCOPE = re.compile(r"(\.\w+\s+)*\.(entry|func)\b|\.section\b")


def _skip_block(statements):
    depth = 1
    while depth:
        _, statement = next(statements)
        depth += statement.endswith("{") - (statement == "}")


def _short(text):
    return " ".join(text.split())[:90]


# ---- functions and variables


def _function(program, statements, line, header):
    """Read `.entry name(params)` or `.func (returns) name(params)` and its body."""
    match = re.match(
        r"(?:\.\w+\s+)*\.(entry|func)\s*"
        r"(?:\(([^)]*)\))?\s*([$%\w]+)\s*(?:\(([^)]*)\))?",
        header,
    )
    if not match:
        raise PTXError(f"line {line}: cannot read {_short(header)!r}")
    if "cluster" in header[match.end() :]:
        raise UnsupportedPTX(f"line {line}: thread block clusters")
    if not header.endswith("{"):  # a declaration without a body
        return
    kind, returns, name, parameters = match.groups()
    function = Function(name, _parameters(line, parameters), _parameters(line, returns))
    _Body(program, function, statements).read()
    (program.kernels if kind == "entry" else program.functions)[name] = function


def _parameters(line, text):
    result = []
    for part in _split(text or ""):
        match = re.fullmatch(
            r"\.(?:param|reg)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
            r"(?:\.ptr\b.*?\s)?([$%\w]+)\s*(?:\[(\d*)\])?",
            part,
            flags=re.S,
        )
        if not match or match[2] not in SIZE:
            raise PTXError(f"line {line}: cannot read the parameter {_short(part)!r}")
        align, type_, name, count = match.groups()
        size = SIZE[type_] * int(count or 1)
        result.append(Parameter(name, type_, int(align or SIZE[type_]), size))
    return result


_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(global|const|shared|local)\s+"
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([$%\w]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?",
    flags=re.S,
)


def _variable(line, statement):
    match = _VARIABLE.fullmatch(statement)
    if not match:
        return None
    space, align, type_, name, dims, data = match.groups()
    if type_ not in SIZE:
        raise PTXError(f"line {line}: unknown type .{type_}")
    count = 1
    for extent in re.findall(r"\[(\d*)\]", dims):
        count *= int(extent or 0)
    if data is not None:
        data = _initial(line, data, type_)
        count = max(count, len(data) // SIZE[type_])
    align = int(align or SIZE[type_])
    dynamic = space == "shared" and count == 0
    return Variable(space, name, align, count * SIZE[type_], dynamic, data, line)


def _initial(line, text, type_):
    """The bytes of an initializer such as {1, 2, 0f3F800000}."""
    values = [_literal(x) for x in re.split(r"[{},\s]+", text) if x]
    if any(v is None for v in values):
        raise UnsupportedPTX(f"line {line}: initial value {_short(text)!r}")
    bits = [
        v if isinstance(v, int) else int(v.view(f"u{v.dtype.itemsize}")) for v in values
    ]
    width = SIZE[type_]
    return b"".join(
        (b & (2 ** (8 * width) - 1)).to_bytes(width, "little") for b in bits
    )


# ---- the body of a function


class _Body:
    """Reads the statements of one body; knows its scopes and the current `.loc`."""

    def __init__(self, program, function, statements):
        self.program, self.function = program, function
        self.statements = statements
        self.scopes = [{}]
        self.places = {}  # (file, line) -> the place it was inlined at
        self.place = None
        self.home = None  # the file of the first .loc: the kernel's own
        self.label = None

    def read(self):
        for line, statement in self.statements:
            if statement == "{":
                self.scopes.append({})
            elif statement == "}":
                self.scopes.pop()
                if not self.scopes:
                    return
            elif statement.endswith(":"):
                self.label = statement[:-1].strip()
                self.function.items.append(Label(self.label))
            elif statement.startswith("."):
                self._directive(line, statement)
            else:
                self.function.items.append(self._instruction(line, statement))
        raise PTXError(f"the body of {self.function.name} does not end")

    def _directive(self, line, statement):
        name = re.match(r"\.(\w*)", statement)[1]
        if name == "loc":
            self._loc(line, statement)
        elif name == "reg":
            self._registers(line, statement)
        elif name == "param":
            for p in _parameters(line, statement):
                self.scopes[-1][p.name] = Symbol(f"{p.name}@{line}")
        elif name == "branchtargets":
            names = _split(statement[len(".branchtargets") :])
            self.function.targets[self.label] = names
        elif variable := _variable(line, statement):
            self.function.variables.append(variable)
        elif name not in ("pragma", "callprototype"):
            raise PTXError(f"line {line}: cannot read {_short(statement)!r}")

    def _loc(self, line, statement):
        """`.loc file line column [, function_name f, inlined_at file line column]`"""
        match = re.match(r"\.loc\s+(\d+)\s+(\d+)\s+\d+", statement)
        if not match:
            raise PTXError(f"line {line}: cannot read {_short(statement)!r}")
        file, row = map(int, match.groups())
        self.place = (file, row)
        self.home = file if self.home is None else self.home
        at = re.search(r"inlined_at\s+(\d+)\s+(\d+)", statement)
        if at:
            self.places[self.place] = (int(at[1]), int(at[2]))
        else:
            self.places.pop(self.place, None)

    def _kernel_line(self):
        """The line of the kernel's own file: from a header, go out to the caller."""
        place, seen = self.place, set()
        while place and place[0] != self.home and place not in seen:
            seen.add(place)
            place = self.places.get(place)
        return place[1] if place and place[0] == self.home else 0

    def _registers(self, line, statement):
        match = re.match(r"\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)", statement, re.S)
        if not match or match[1] not in NUMPY:
            raise PTXError(f"line {line}: cannot read {_short(statement)!r}")
        for name in _split(match[2]):
            many = re.fullmatch(r"([%$\w]+)<(\d+)>", name)
            names = [f"{many[1]}{k}" for k in range(int(many[2]))] if many else [name]
            for each in names:
                self.scopes[-1][each] = Register(each, match[1])

    def _instruction(self, line, statement):
        match = _INSTRUCTION.fullmatch(statement)
        if not match:
            raise PTXError(f"line {line}: cannot read {_short(statement)!r}")
        guard, opcode, modifiers, operands = match.groups()
        file, row = self.place or (None, 0)
        return Instruction(
            opcode,
            tuple(modifiers.split(".")[1:]),
            tuple(self._operand(line, x) for x in _split(operands)),
            self._operand(line, guard) if guard else None,
            line,
            (self.program.files.get(file), row),
            self._kernel_line(),
            _short(statement),
        )

    def _operand(self, line, text):
        text = text.strip()
        first = text[:1]
        if first in ("{", "("):
            return Vector(tuple(self._operand(line, x) for x in _split(text[1:-1])))
        if first == "[":
            return self._address(line, text)
        if "|" in text:
            return Pair(*(self._operand(line, x) for x in text.split("|", 1)))
        if first == "!":
            return Not(self._operand(line, text[1:]))
        if text == "_":
            return Sink()
        if first in "-.0123456789" and (value := _literal(text)) is not None:
            return Immediate(value)
        return self._name(line, text)

    def _name(self, line, text):
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        match = re.fullmatch(r"([%$\w.]+?)\s*(?:\+\s*(-?\w+))?", text)
        if not match:
            raise PTXError(f"line {line}: cannot read the operand {text!r}")
        name, offset = match[1], self._offset(line, match[2])
        if name[0] == "%" or name == "WARP_SZ":
            return Special(name)
        return Symbol(name, offset)

    def _address(self, line, text):
        match = re.fullmatch(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if not match:
            raise PTXError(f"line {line}: cannot read the address {text!r}")
        base = self._operand(line, match[1])
        return Address(base, self._offset(line, match[2]))

    def _offset(self, line, text):
        value = _literal(text or "0")
        if not isinstance(value, int):
            raise PTXError(f"line {line}: the offset {text!r} is not an integer")
        return value


_INSTRUCTION = re.compile(
    r"(?:@(!?\s*[%$\w]+)\s+)?"  # the guard
    r"([a-z]\w*)((?:[.:]+\w+)*)\s*(.*)",  # opcode, modifiers, operands
    flags=re.S,
)


def _split(text):
    """The parts between commas that stand outside brackets."""
    if not re.search(r"[{[(]", text):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [*parts, current.strip()] if current.strip() else parts


def _literal(text):
    """The value of a PTX number, or None when it is not one."""
    text = text.strip()
    if match := _FLOAT_BITS.fullmatch(text):
        single, double = match[2], match[3]
        bits = np.uint32(int(single, 16)) if single else np.uint64(int(double, 16))
        value = bits.view(np.float32 if single else np.float64)
        return -value if match[1] else value
    if match := _INTEGER.fullmatch(text):
        return int(match[1], 8 if match[2] else 0)
    return np.float64(text) if _DECIMAL.fullmatch(text) else None


_FLOAT_BITS = re.compile(r"(-?)0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))")
_INTEGER = re.compile(r"(-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|(0[0-7]+)|0|[1-9]\d*))U?")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
