"""PTX text -> instructions: names, numbers, lines, calls, and clear errors."""

import numpy as np
import pytest
from snippets import HEADER, run_snippet

from kvq.kernels import ptxsim
from kvq.kernels.ptxsim.parse import parse

ONES = np.ones(5, np.int32)


def kernel_of(body, before="", params=""):
    text = f"{HEADER}{before}\n.visible .entry k({params})\n{{\n{body}\n}}\n"
    return ptxsim.Module(text).kernel("k")


def instructions(body):
    text = f"{HEADER}.entry k()\n{{\n{body}\n}}"
    return [i for i in parse(text).kernels["k"].items if hasattr(i, "opcode")]


# ---- errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n\n.visible .entry k(.param .u99 p)\n{\nret;\n}",
            r"line 3: .*\.param .u99 p",
        ),
        (".entry k()\n{\nret\n}", r"line 3: no ';' after 'ret'"),
        (".entry k()\n{\nret;", "body of k does not end"),
        (".entry k()\n{\n.reg .u99 %a;\n}", r"line 3: cannot read '\.reg \.u99 %a'"),
        (".entry k()\n{\n\n?add %a;\n}", r"line 4: cannot read"),
        ("mov.u32 %a, 1;", "line 1: cannot read 'mov.u32 %a, 1'"),
        (".global .u32 x = {1, 2", "the text ends inside a statement"),
        (
            ".entry k()\n{\nld.global.u32 %a, [%b*2];\n}",
            r"line 3: .*address '\[%b\*2\]'",
        ),
    ],
)
def test_text_that_is_not_ptx_names_its_line(text, message):
    with pytest.raises(ptxsim.PTXError, match=message):
        ptxsim.Module(text)


def test_comments_keep_the_line_numbers():
    body = "/* two\nlines */ // and one\nbogus.u32 %i, 1;"
    with pytest.raises(
        ptxsim.UnsupportedPTX, match=r"line 10: bogus.u32 %i, 1: unknown"
    ):
        kernel_of(".reg .b32 %i;\n" + body)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tex.2d.v4.f32.f32 %d, %a;", "unknown opcode"),
        ("add.u8 %d, %a, %a;", r"type \.u8, where"),
        ("add.cc.u32 %d, %a, %a;", r"the modifier \.cc is not modelled"),
        ("add.s32 %d, %a;", "2 sources are wanted"),
        ("add.s64 %d, %a, %a;", r"%a is \.b32, read as \.s64"),
        ("mul.wide.s32 %d, %a, %a;", r"%d is \.b32, the result \.s64"),
        ("mov.u32 %d, %clock;", "%clock is not modelled"),
        ("lop3.b32 %d, %a, %a, %a, %a;", "a literal integer is wanted"),
        ("mov.u32 5, %a;", "a register is wanted for the result"),
        ("bar.sync 0, 64;", "a barrier for a part of the block"),
        ("bar.red.popc.u32 %d, 0, %p;", "one of sync is wanted"),
        (
            "mma.sync.aligned.m16n8k4.row.col.f32.f16.f16.f32 {%d},{%a},{%a},{%a};",
            "m16",
        ),
        ("ld.param.u32 %d, [%a];", "a parameter read through a register"),
        ("call outside, (%a);", "a function that is not in the text"),
        ("mov.u32 %d, nowhere;", "nowhere is not in the text"),
        ("atom.global.max.f32 %d, [%a], 1;", r"type \.f32, where \.u32"),
        ("cp.async.bulk.shared.global [%a], [%a], 16;", "is not modelled"),
    ],
)
def test_what_is_not_modelled_raises_at_translation(line, message):
    with pytest.raises(ptxsim.UnsupportedPTX, match=message):
        kernel_of(f".reg .b32 %a, %d; .reg .pred %p;\n{line}")


def test_a_jump_to_nowhere_names_the_label():
    with pytest.raises(ptxsim.PTXError, match="line 7: bra L: there is no label L"):
        kernel_of("bra L;")


def test_unknown_kernels_are_named():
    module = ptxsim.Module(HEADER + ".entry one() { ret; } .entry two() { ret; }")
    assert module.names == ("one", "two")
    with pytest.raises(ValueError, match="kernel 'three': not one of one, two"):
        module.kernel("three")
    with pytest.raises(ValueError, match="kernel None: not one of one, two"):
        module.kernel()


def test_a_mangled_numba_kernel_is_found_by_its_own_name():
    name = "_ZN13_3cdynamic_3e7pack_v1B2v1B38c8tJTIcFE5ArrayIhLi1E1C"
    other = name.replace("7pack_v1", "14pack_v1_scales")
    module = ptxsim.Module(f".entry {other}() {{ ret; }} .entry {name}() {{ ret; }}")
    assert module.kernel("pack_v1").name == name
    assert module.kernel("pack_v1_scales").name == other


# ---- names and numbers


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("017", 15),
        ("0x1F", 31),
        ("0b101", 5),
        ("-3", -3),
        ("7U", 7),
        ("0x7fffffff", 2**31 - 1),
    ],
)
def test_integer_literals(literal, value):
    assert (run_snippet(f"mov.u32 %d, {literal};", np.int32, a=ONES) == value).all()


@pytest.mark.parametrize(
    ("literal", "value"),
    [("0f3FC00000", 1.5), ("0d4004000000000000", 2.5), ("-0.25", -0.25)],
)
def test_float_literals(literal, value):
    x = np.array([1, -2, 4], np.float64)
    assert (
        run_snippet(f"mul.f64 %d, %a, {literal};", np.float64, a=x) == x * value
    ).all()
    x = x.astype(np.float32)
    assert (
        run_snippet(f"mul.f32 %d, %a, {literal};", np.float32, a=x) == x * value
    ).all()


def test_a_register_of_an_inner_scope_hides_the_outer():
    body = "{ .reg .b32 %a; mov.u32 %a, 9; mov.u32 %d, %a; } add.u32 %d, %d, %a;"
    assert (run_snippet(body, np.int32, a=ONES * 4) == 13).all()


def test_labels_may_stand_in_the_middle_of_a_line():
    body = "mov.u32 %d, %a; bra L1; mov.u32 %d, 7; L1: add.u32 %d, %d, 1;"
    assert (run_snippet(body, np.int32, a=ONES) == 2).all()


def test_constant_and_global_variables_hold_their_initial_values():
    before = (
        ".const .align 4 .b8 bytes[8] = {1, 2, 0, 0, 255};\n"
        ".visible .global .align 4 .f32 reals[2] = {0f40200000, 0fBF800000};\n"
        ".common .global .align 8 .u64 unused;"
    )
    body = (
        ".reg .b64 %o, %p; .reg .b32 %c; .reg .f32 %f; ld.param.u64 %o, [out];"
        "ld.const.u32 %c, [bytes]; st.global.u32 [%o], %c;"
        "ld.const.u8 %c, [bytes+4]; st.global.u32 [%o+4], %c;"
        "mov.u64 %p, reals; ld.global.f32 %f, [%p+4]; st.global.f32 [%o+8], %f; ret;"
    )
    out = np.zeros(3, np.uint32)
    kernel_of(body, before, ".param .u64 out").launch(1, 1, (out,))
    assert out.tolist() == [513, 255, 0xBF800000]


def test_an_address_as_an_initial_value_raises():
    with pytest.raises(ptxsim.UnsupportedPTX, match="line 4: initial value 'there'"):
        kernel_of("ret;", ".global .u64 here = there;")


# ---- lines


def test_lines_of_a_header_lead_back_to_the_kernel():
    body = (
        '.file 4 "dir/k.cu"\n.file 2 "h.cuh"\n.loc 4 7 3\nmov.u32 %a, 1;\n'
        ".loc 4 9 1, function_name $i, inlined_at 4 8 5\nmov.u32 %a, 2;\n"
        ".loc 2 100 1, function_name $i, inlined_at 4 9 1\nmov.u32 %a, 3;\n"
        ".loc 2 100 1\nmov.u32 %a, 4;"
    )
    found = instructions(".reg .b32 %a;\n" + body)
    assert [i.kernel_line for i in found] == [7, 9, 9, 0]
    assert [i.source for i in found] == [
        ("dir/k.cu", 7),
        ("dir/k.cu", 9),
        ("h.cuh", 100),
        ("h.cuh", 100),
    ]
    assert [i.line for i in found] == [10, 12, 14, 16]


def test_modifiers_keep_their_colons():
    (load,) = instructions("ld.global.L1::no_allocate.v4.u32 {%a,%b,%c,%d}, [%p+-16];")
    assert load.modifiers == ("global", "L1::no_allocate", "v4", "u32")
    assert load.operands[1].offset == -16
    assert load.kind == "ld.global"


# ---- calls

SQUARE = """
.func (.param .b32 r) square(.param .b32 x, .param .b32 n)
{
    .reg .b32 %v, %n; .reg .pred %p;
    ld.param.b32 %v, [x]; ld.param.b32 %n, [n];
    setp.eq.s32 %p, %n, 0; @%p bra DONE;
    mul.lo.s32 %v, %v, %v;
DONE:
    st.param.b32 [r], %v;
    ret;
}
"""


def call(value, flag, result):
    return (
        "{ .param .b32 p0; .param .b32 p1; .param .b32 back;"
        f"st.param.b32 [p0+0], {value}; st.param.b32 [p1+0], {flag};"
        f"call.uni (back), square, (p0, p1); ld.param.b32 {result}, [back+0]; }}"
    )


def test_calls_are_inlined_each_with_its_own_labels():
    body = (
        ".reg .b32 %i, %f, %d; .reg .b64 %o, %w;"
        "ld.param.u64 %o, [out]; mov.u32 %i, %tid.x; and.b32 %f, %i, 1;"
        + call("%i", "%f", "%d")
        + call("%d", "%i", "%d")
        + "mul.wide.u32 %w, %i, 4; add.s64 %o, %o, %w; st.global.u32 [%o], %d; ret;"
    )
    out = np.zeros(6, np.int32)
    kernel_of(body, SQUARE, ".param .u64 out").launch(1, 6, (out,))
    odd_squared = [i * i if i % 2 else i for i in range(6)]
    assert out.tolist() == [x * x if i else x for i, x in enumerate(odd_squared)]


def test_parameters_of_one_byte_keep_or_extend_their_sign():
    function = (
        ".func (.param .b32 r) both(.param .b8 x) { .reg .b32 %s, %u;"
        "ld.param.s8 %s, [x]; ld.param.u8 %u, [x]; mad.lo.s32 %s, %u, 1000, %s;"
        "st.param.b32 [r], %s; ret; }"
    )
    body = (
        ".reg .b32 %d; .reg .b16 %b; .reg .b64 %o; ld.param.u64 %o, [out];"
        "mov.u16 %b, 0x1f0; { .param .b8 p; .param .b32 q; st.param.b8 [p], %b;"
        "call (q), both, (p); ld.param.b32 %d, [q]; } st.global.u32 [%o], %d; ret;"
    )
    out = np.zeros(1, np.int32)
    kernel_of(body, function, ".param .u64 out").launch(1, 1, (out,))
    assert out[0] == 240 * 1000 - 16


def test_recursion_raises():
    loop = ".func loop() { call loop; ret; }"
    with pytest.raises(ptxsim.UnsupportedPTX, match="or recursion"):
        kernel_of("call loop;", loop)


# ---- arguments


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.zeros(3), np.int32(1)), "k: 2 arguments, 3 are wanted"),
        ((np.zeros(3), np.int64(1), np.float32(1)), "argument 1: 8 bytes given, 4 are"),
        ((np.zeros(3), np.float32(1), np.float32(1)), r"float32 given for a \.u32"),
        ((np.zeros(3), np.int32(1), np.int32(1)), r"int32 given for a \.f32"),
        ((np.zeros(3), 1, np.float32(1)), "argument 1: int given; arrays"),
        (
            (np.zeros((3, 4)).T, np.int32(1), np.float32(1)),
            "argument 0: .*C-contiguous",
        ),
    ],
)
def test_arguments_that_do_not_fit(args, message):
    kernel = kernel_of(
        "ret;", "", ".param .u64 .ptr .align 1 p, .param .u32 n, .param .f32 s"
    )
    with pytest.raises((TypeError, ValueError), match=message):
        kernel.launch(1, 32, args)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 32, "grid 0: 1 to 3 numbers"),
        ((1, 70000), 32, r"grid \(1, 70000\): 1 to 3"),
        (1, 1025, "block 1025"),
        (1, (32, 33), "more than 1024 threads"),
    ],
)
def test_launches_that_no_gpu_takes(grid, block, message):
    with pytest.raises(ValueError, match=message):
        kernel_of("ret;").launch(grid, block, ())


def test_a_struct_is_passed_as_bytes():
    body = (
        ".reg .b64 %o; .reg .f32 %f; ld.param.u64 %o, [s];"
        "ld.param.f32 %f, [s+8]; st.global.f32 [%o], %f; ret;"
    )
    kernel = kernel_of(body, "", ".param .align 8 .b8 s[16]")
    with pytest.raises(TypeError, match="argument 0: 12 bytes given, 16 are wanted"):
        kernel.launch(1, 1, (b"x" * 12,))
