"""Calls -> the body of the called function, in place; and parameters -> registers.

A GPU kernel has no recursion, so every call can be replaced by the function's
instructions. A parameter of a function is a row of bytes that the caller fills with
`st.param` and the function reads with `ld.param`: each (parameter, offset) becomes a
register. The registers of a function are shared by its copies: each thread runs through
one copy at a time.
"""

from dataclasses import replace

from kvq.kernels.ptxsim.errors import UnsupportedPTX
from kvq.kernels.ptxsim.modifiers import WITHOUT_EFFECT
from kvq.kernels.ptxsim.parse import (
    Address,
    Label,
    Register,
    Symbol,
    Vector,
)
from kvq.kernels.ptxsim.types import SIZE

MAX_DEPTH = 16


def inline(kernel, functions):
    """(items, variables, targets) of a kernel with every call replaced."""
    return _Inliner(kernel, functions).result()


class _Inliner:
    def __init__(self, kernel, functions):
        self.kernel, self.functions = kernel, functions
        self.copies = 0
        self.slots = {}  # parameter name -> {offset: register}
        self.own = {p.name for p in kernel.parameters}
        self.variables = list(kernel.variables)
        self.targets = dict(kernel.targets)

    def result(self):
        items = list(self._expand(self.kernel.items, "", 0))
        return items, self.variables, self.targets

    def _expand(self, items, suffix, depth):
        """The items with labels renamed by `suffix`, so that copies do not collide."""
        for item in items:
            if isinstance(item, Label):
                yield Label(item.name + suffix)
            elif item.opcode == "call":
                yield from self._call(item, depth)
            elif item.opcode in ("bra", "brx"):
                yield self._jump(item, suffix)
            elif item.opcode == "ret" and suffix:
                yield _jump_to("return" + suffix, item)
            elif item.opcode in ("ld", "st") and self._is_slot(item):
                yield from self._move(item)
            else:
                yield item

    def _call(self, call, depth):
        """The call `(returns), name, (arguments)`: copy in, the body, copy out."""
        function, given, wanted = self._callee(call)
        if depth == MAX_DEPTH:
            raise UnsupportedPTX(f"{call}: calls deeper than {MAX_DEPTH}, or recursion")
        self.copies += 1
        suffix = f"#{self.copies}"
        for formal, actual in zip(function.parameters, given, strict=True):
            yield from self._copy(formal.name, actual.name, call)
        if not any(v in self.variables for v in function.variables):
            self.variables += function.variables
        for label, targets in function.targets.items():
            self.targets[label + suffix] = [t + suffix for t in targets]
        yield from self._expand(function.items, suffix, depth + 1)
        yield Label("return" + suffix)
        for formal, actual in zip(function.returns, wanted, strict=True):
            yield from self._copy(actual.name, formal.name, call)

    def _callee(self, call):
        """(function, argument operands, result operands)"""
        unknown = [m for m in call.modifiers if "call" not in WITHOUT_EFFECT.get(m, ())]
        if call.guard is not None or unknown:
            raise UnsupportedPTX(f"{call}: a call under a guard, or with .{unknown}")
        name = next((o for o in call.operands if isinstance(o, Symbol)), None)
        function = self.functions.get(name.name) if name else None
        vectors = [o.parts for o in call.operands if isinstance(o, Vector)]
        wanted = vectors.pop(0) if isinstance(call.operands[0], Vector) else ()
        given = vectors.pop(0) if vectors else ()
        if function is None:
            raise UnsupportedPTX(
                f"{call}: a call to a function that is not in the text"
            )
        if (len(given), len(wanted)) != (
            len(function.parameters),
            len(function.returns),
        ):
            raise UnsupportedPTX(f"{call}: other parameters than the function has")
        return function, given, wanted

    def _copy(self, to, source, call):
        """`to` takes all that was stored in the parameter `source`."""
        for offset, register in self.slots.get(source, {}).items():
            target = self._slot(to, offset, register.type, call)
            yield _mov(target, register, register.type, call)

    def _jump(self, jump, suffix):
        target = jump.operands[-1] if jump.operands else None
        if not isinstance(target, Symbol):
            raise UnsupportedPTX(f"{jump}: a jump without a label")
        renamed = replace(target, name=target.name + suffix)
        return replace(jump, operands=(*jump.operands[:-1], renamed))

    def _is_slot(self, item):
        address = next((o for o in item.operands if isinstance(o, Address)), None)
        return (
            any(m.split("::")[0] == "param" for m in item.modifiers)
            and address is not None
            and isinstance(address.base, Symbol)
            and address.base.name not in self.own
        )

    def _move(self, item):
        """`ld.param` and `st.param` of a function's parameter: moves of registers."""
        type_ = item.modifiers[-1]
        others = {m.split("::")[0] for m in item.modifiers[:-1]} - {"param", "v2", "v4"}
        if type_ not in SIZE or others or len(item.operands) != 2:
            raise UnsupportedPTX(f"{item}: how a parameter is moved is not modelled")
        store = item.opcode == "st"
        address, value = item.operands if store else item.operands[::-1]
        values = value.parts if isinstance(value, Vector) else (value,)
        for k, register in enumerate(values):
            offset = address.offset + address.base.offset + k * SIZE[type_]
            slot = self._slot(address.base.name, offset, type_, item)
            pair = (slot, register) if store else (register, slot)
            yield _mov(*pair, type_, item)

    def _slot(self, name, offset, type_, where):
        slots = self.slots.setdefault(name, {})
        width = f"b{8 * max(2, SIZE[type_])}"  # the narrowest register has 16 bits
        register = slots.setdefault(offset, Register(f"{name}+{offset}", width))
        if register.type != width:
            raise UnsupportedPTX(
                f"{where}: a parameter read in another width than stored"
            )
        return register


def _mov(to, value, type_, like):
    """A move; of a byte, its extension by the sign or by zeros."""
    opcode, modifiers = "mov", (type_,)
    if SIZE[type_] == 1:
        kind = "s" if type_[0] == "s" else "u"
        opcode, modifiers = "cvt", (f"{kind}16", f"{kind}8")
    return replace(like, opcode=opcode, modifiers=modifiers, operands=(to, value))


def _jump_to(label, like):
    return replace(like, opcode="bra", modifiers=(), operands=(Symbol(label),))
