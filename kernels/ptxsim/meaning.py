"""What an instruction means: a function from source values to result values.

`OPCODES` maps an opcode to a function that reads the instruction's `Form` (modifiers
and operands) and returns its `Meaning`. The modules of `opcodes/` fill it, with one
`@opcode` each. Example: `add.s32` means `operator.add` on two int32 arrays.

A value is a NumPy array with one element per active lane or, where all lanes agree, a
NumPy scalar.
"""

from dataclasses import dataclass

from kvq.kernels.ptxsim.errors import UnsupportedPTX
from kvq.kernels.ptxsim.modifiers import WITHOUT_EFFECT
from kvq.kernels.ptxsim.parse import Immediate, Pair, Vector
from kvq.kernels.ptxsim.types import SIZE

OPCODES = {}

# Opcodes whose first operand is a source, not a destination.
NO_RESULT = (
    *("st", "red", "cp", "prefetch", "membar", "fence", "trap"),
    *("bra", "brx", "ret", "exit", "bar", "barrier"),
)


@dataclass(frozen=True)
class Meaning:
    """`function(*sources)` gives the result, or a tuple of them when there are several.

    `results` and `sources` are PTX types, one per operand. The source type "address" is
    that of a memory operand. With `on_machine` the function is called as
    `function(machine, site, *sources)`: memory, shuffles and special registers need
    more than their operands; `site` is the index of the instruction in the kernel.
    """

    function: object
    results: tuple
    sources: tuple
    on_machine: bool = False


def opcode(*names):
    """Register a function `form -> Meaning` for the opcodes `names`."""

    def register(function):
        OPCODES.update({name: function for name in names})
        return function

    return register


def meaning_of(instruction):
    """(meaning, destinations, sources) of an instruction.

    Raises UnsupportedPTX for an opcode, type, modifier or operand without a meaning.
    """
    form = Form(instruction)
    if instruction.opcode not in OPCODES:
        raise form.unsupported("unknown opcode")
    meaning = OPCODES[instruction.opcode](form)
    form.finish()
    if len(form.destinations) > len(meaning.results):
        raise form.unsupported(f"more than {len(meaning.results)} results")
    if len(form.sources) != len(meaning.sources):
        raise form.unsupported(f"{len(meaning.sources)} sources are wanted")
    return meaning, form.destinations, form.sources


class Form:
    """The modifiers and operands of one instruction, taken one by one.

    Whatever a meaning does not take must be in the table `WITHOUT_EFFECT`.
    """

    def __init__(self, instruction):
        self.instruction = instruction
        self.opcode = instruction.opcode
        self.left = list(instruction.modifiers)
        operands = list(instruction.operands)
        first = [] if self.opcode in NO_RESULT or not operands else [operands.pop(0)]
        self.destinations = [x for o in first for x in _parts(o)]
        self.sources = operands

    def unsupported(self, reason):
        return UnsupportedPTX(f"{self.instruction}: {reason}")

    def flag(self, name):
        """Take the modifier `name` if it is there; was it?"""
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def choice(self, *names, default=None):
        """Take the one of `names` that is there."""
        found = next((n for n in names if n in self.left), default)
        if found is None:
            raise self.unsupported(f"one of {', '.join(names)} is wanted")
        self.flag(found)
        return found

    def exact_or(self, *approximations):
        """Take `.rn`, or leave one of the approximations where it is: the table of
        modifiers without effect says what it means here."""
        known = ("rn", *approximations)
        if len(set(known) & set(self.left)) != 1:
            raise self.unsupported(f"one of {', '.join(known)} is wanted")
        self.flag("rn")

    def type(self, allowed):
        """Take the last modifier that is a type; it must be one of `allowed`."""
        found = next((m for m in reversed(self.left) if m in SIZE or m == "pred"), None)
        if found not in allowed:
            raise self.unsupported(
                f"type .{found}, where .{', .'.join(allowed)} are known"
            )
        del self.left[len(self.left) - 1 - self.left[::-1].index(found)]
        return found

    def immediate(self, index):
        """Take the source `index`, which must be a literal integer."""
        if index >= len(self.sources):
            raise self.unsupported("an operand is missing")
        operand = self.sources.pop(index)
        if not isinstance(operand, Immediate) or not isinstance(operand.value, int):
            raise self.unsupported("a literal integer is wanted")
        return operand.value

    def spread(self):
        """Replace every vector among the sources by its parts; their counts."""
        counts = [len(_parts(s)) for s in self.sources]
        self.sources = [part for s in self.sources for part in _parts(s)]
        return counts

    def finish(self):
        for modifier in self.left:
            if self.opcode not in WITHOUT_EFFECT.get(modifier, ()):
                raise self.unsupported(f"the modifier .{modifier} is not modelled")


def _parts(operand):
    if isinstance(operand, Vector):
        return list(operand.parts)
    if isinstance(operand, Pair):
        return [operand.first, operand.second]
    return [operand]
