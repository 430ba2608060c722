"""No modifier is ignored silently: those without effect are listed, others raise."""

from pathlib import Path

import numpy as np
import pytest
from snippets import run_snippet

from kvq.kernels import ptxsim
from kvq.kernels.ptxsim import modifiers
from kvq.kernels.ptxsim.meaning import OPCODES

README = Path(ptxsim.__file__).with_name("README.md")

# One instruction per opcode; {m} is where the modifier goes, {h} where the operand of
# `.L2::cache_hint`. %a, %b are float32, %k is the address of four of them.
FLOAT = {name: f"{name}{{m}}.f32 %d, %a;" for name in modifiers.ONE_FLOAT}
FLOAT |= {name: f"{name}.approx{{m}}.f32 %d, %a;" for name in modifiers.APPROXIMATE}
FLOAT |= {name: f"{name}{{m}}.f32 %d, %a, %b;" for name in modifiers.SEVERAL_FLOATS}
FLOAT |= {
    "fma": "fma.rn{m}.f32 %d, %a, %b, %a;",
    "mad": "mad.rn{m}.f32 %d, %a, %b, %a;",
    "div": "div.rn{m}.f32 %d, %a, %b;",
    "rcp": "rcp.rn{m}.f32 %d, %a;",
    "sqrt": "sqrt.rn{m}.f32 %d, %a;",
    "set": "set.lt{m}.f32.f32 %d, %a, %b;",
    "setp": "setp.lt{m}.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p;",
    "slct": "slct{m}.f32.f32 %d, %a, %b, %a;",
    "cvt": "cvt.rni{m}.f32.f32 %d, %a;",
    "ld": "ld.global{m}.f32 %d, [%k+4]{h};",
    "st": "st.global{m}.f32 [%k+4], %a{h}; ld.global.f32 %d, [%k+4];",
    "atom": "atom.global{m}.add.f32 %d, [%k+4], %a{h};",
    "red": "red.global{m}.add.f32 [%k+4], %a{h}; ld.global.f32 %d, [%k+4];",
    "cp": "cp.async{m}.ca.shared.global [%shared], [%k], 4{h}; cp.async.wait_all;"
    "ld.shared.f32 %d, [%shared];",
    "prefetch": "prefetch.global{m} [%k]; mov.f32 %d, %a;",
    "fence": "fence{m}.gpu; mov.f32 %d, %a;",
    "membar": "membar{m}; mov.f32 %d, %a;",
    "bra": "bra{m} L; mov.f32 %a, %b; L: mov.f32 %d, %a;",
    "ret": "mov.f32 %d, %a; setp.ne.f32 %p, %a, %a; @%p ret{m};",
}
LISTED = [
    (name, opcode)
    for name, opcodes in modifiers.WITHOUT_EFFECT.items()
    for opcode in opcodes
    if opcode != "call"
]


def run(text):
    a = np.array([2.5, -1.25, 0.75, 3.0], np.float32)
    buffers = {"k": np.array([1.5, 2.5, -3.5, 4.5], np.float32)}
    declare = ".reg .pred %p; .reg .b64 %h;"
    return run_snippet(
        text,
        np.float32,
        a=a,
        b=a[::-1],
        buffers=buffers,
        shared=16,
        declare=declare,
    )


@pytest.mark.parametrize(("modifier", "opcode"), LISTED)
def test_a_listed_modifier_changes_nothing(modifier, opcode):
    hint = ", %h" if modifier == "L2::cache_hint" else ""
    plain = FLOAT[opcode].format(m="", h="")
    with_it = FLOAT[opcode].format(m=f".{modifier}", h=hint)
    if modifier in ("approx", "full"):
        with_it = with_it.replace(".rn", "").replace(".approx.approx", ".approx")
    assert np.array_equal(run(plain), run(with_it), equal_nan=True)


@pytest.mark.parametrize("opcode", sorted(FLOAT))
def test_an_unknown_modifier_raises_with_its_line(opcode):
    with pytest.raises(ptxsim.UnsupportedPTX, match=r"line \d+: .*\.strange"):
        run(FLOAT[opcode].format(m=".strange", h=""))


@pytest.mark.parametrize("opcode", sorted(FLOAT))
def test_a_modifier_of_another_opcode_raises(opcode):
    wrong = "ftz" if "ftz" not in _allowed(opcode) else "nc"
    with pytest.raises(ptxsim.UnsupportedPTX, match=rf"\.{wrong} is not modelled"):
        run(FLOAT[opcode].format(m=f".{wrong}", h=""))


def _allowed(opcode):
    return {m for m, opcodes in modifiers.WITHOUT_EFFECT.items() if opcode in opcodes}


def test_the_listed_opcodes_exist():
    jumps = {"bra", "ret", "call"}
    assert {opcode for _, opcode in LISTED} <= set(OPCODES) | jumps


def test_the_readme_shows_the_table():
    text = README.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- modifiers: begin -->\n")
    shown, end, _ = rest.partition("\n<!-- modifiers: end -->")
    assert end
    assert shown == modifiers.table()
