"""Instructions -> basic blocks: runs of instructions that are entered at the top only.

A block ends at a label, a jump, an exit or a barrier. A guarded instruction such as
`@p st.global ...` becomes a jump around it: lanes without `p` skip the block that holds
it.
"""

from dataclasses import dataclass, field, replace

from kvq.kernels.ptxsim.errors import PTXError
from kvq.kernels.ptxsim.parse import Instruction, Label, Not, Symbol

JUMPS = ("bra", "brx", "ret", "exit")
GUARDED = ("bra", "ret", "exit")  # those that take the guard as their condition
BARRIERS = ("bar", "barrier")


@dataclass
class Block:
    instructions: list = field(default_factory=list)
    first: int = 0  # index of its first instruction in the kernel


def is_control(instruction):
    """Does a block end here?"""
    return instruction.opcode in JUMPS or is_barrier(instruction)


def is_barrier(instruction):
    """A barrier of the thread block; `bar.warp.sync` is none."""
    return instruction.opcode in BARRIERS and instruction.modifiers[:1] != ("warp",)


def basic_blocks(items):
    """(blocks, labels): `labels` maps a name to the index of the block it stands at."""
    blocks, labels, current = [], {}, Block()

    def close():
        nonlocal current
        if current.instructions:
            blocks.append(current)
            current = Block()

    for item in _without_guards(items):
        if isinstance(item, Label):
            close()
            labels[item.name] = len(blocks)
        else:
            current.instructions.append(item)
            if is_control(item):
                close()
    close()
    count = 0
    for block in blocks:
        block.first = count
        count += len(block.instructions)
    return blocks, labels


def _without_guards(items):
    """Guards left on `bra`, `ret` and `exit` only."""
    for number, item in enumerate(items):
        if isinstance(item, Label) or item.guard is None or item.opcode in GUARDED:
            yield item
            continue
        around = f"around#{number}"
        yield Instruction(
            "bra",
            (),
            (Symbol(around),),
            _opposite(item.guard),
            item.line,
            item.source,
            item.kernel_line,
            item.text,
            counted=False,
        )
        yield replace(item, guard=None)
        yield Label(around)


def _opposite(guard):
    return guard.register if isinstance(guard, Not) else Not(guard)


def target_of(instruction, name, labels):
    """The block at the label `name`."""
    if name not in labels:
        raise PTXError(f"{instruction}: there is no label {name}")
    return labels[name]
