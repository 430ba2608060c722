"""What Numba has no function for, as LLVM's intermediate representation.

The two large ones are dot products of bytes, by the instruction `vpdpbusd` of AVX-512
VNNI: 64 products of an unsigned and a signed byte, added in fours to sixteen 32-bit
sums. Four bytes that belong together are a *word* here; a register has 16 lanes of one
word each, and a word of codes holds `8 / bits` *planes* of four codes.
"""

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
WORDS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
BYTES = ir.VectorType(I8, 4 * LANES)


def available():
    """Whether this CPU has the instruction: without it the kernels would crash."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and bool(features.get("avx512bw"))


# --- small ones -----------------------------------------------------------------------
@intrinsic
def half_to_float(typing, bits):
    """The float32 of a binary16 number, given as its uint16 bits."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), F32)

    return types.float32(types.uint16), codegen


@intrinsic
def round_even(typing, x):
    """The nearest integer, half to even, as float32; unlike `round` it vectorizes."""

    def codegen(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [F32]), args)

    return types.float32(types.float32), codegen


@intrinsic
def larger(typing, a, b):
    """max(a, b) without a branch: a loop with the builtin `max` does not vectorize."""

    def codegen(context, builder, signature, args):
        greater = builder.fcmp_ordered(">", *args, flags=["fast"])
        return builder.select(greater, *args, flags=["fast"])

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def float_of_bits(typing, bits):
    """The float32 with these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@intrinsic
def address(typing, array):
    """Where an array begins, as an integer."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, I64)

    return types.intp(array), codegen


# 2^x = 2^n 2^f,  n = round(x), |f| <= 1/2,  2^f by its Taylor polynomial of degree 6
@njit(inline="always", fastmath=True)
def exp2(x):
    """2^x of float32 x <= 0; 2^-126 for smaller ones. Relative error 2e-7."""
    x = larger(x, np.float32(-126))
    n = round_even(x)
    f = x - n
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.33335581e-3)
    p = p * f + np.float32(9.61812910e-3)
    p = p * f + np.float32(5.55041087e-2)
    p = p * f + np.float32(2.40226507e-1)
    p = p * f + np.float32(6.93147181e-1)
    p = p * f + np.float32(1)
    return float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23)) * p


# --- dot products of bytes ------------------------------------------------------------
#     out[h, t] = sum_d query[h, d] code[t, d]
@intrinsic(prefer_literal=True)
def dot_keys(typing, bits, heads, vectors, words, keys, query, stride, out, out_stride):
    """Scores of 16 * `vectors` tokens for `heads` queries, int32.

    keys : address of codes (words, tokens, 4) bytes; plane c of word j and byte b is
        channel 4 j planes + 4 c + b. query : address of int8 (heads, stride).
    out : address of int32 (heads, out_stride), written.
    """
    n, H, V = (x.literal_value for x in (bits, heads, vectors))

    def codegen(context, b, signature, args):
        words, keys, query, stride, out, out_stride = args[3:]

        def factors(codes, four):
            return codes, four

        total = _dots(b, n, H, V, words, keys, query, stride, factors)
        for h in range(H):
            row = b.add(out, b.mul(out_stride, I64(4 * h)))
            for v in range(V):
                place = _pointer(b, row, 64 * v, WORDS)
                b.store(b.load(total[h][v]), place).align = 4
        return context.get_dummy_value()

    return types.void(bits, heads, vectors, *[types.intp] * 6), codegen


#     out[h, c] += scale[h] sum_t weight[h, t] code[t, c]
@intrinsic(prefer_literal=True)
def dot_values(
    typing, bits, heads, vectors, words, values, weights, stride, scale, out, out_stride
):
    """The weighted sum of values, 16 * `vectors` channels, for `heads` queries.

    values : address of codes (words, channels, 4) bytes; plane c of word j and byte b
        is token 4 j planes + 4 c + b. weights : address of uint8 (heads, stride).
    scale : address of float32 (heads,). out : float32 (heads, out_stride), added to.
    """
    n, H, V = (x.literal_value for x in (bits, heads, vectors))

    def codegen(context, b, signature, args):
        words, values, weights, stride, scale, out, out_stride = args[3:]

        def factors(codes, four):
            return four, codes

        total = _dots(b, n, H, V, words, values, weights, stride, factors)
        for h in range(H):
            s = _splat(b, _load(b, scale, 4 * h, F32, align=4), FLOATS)
            row = b.add(out, b.mul(out_stride, I64(4 * h)))
            for v in range(V):
                place = _pointer(b, row, 64 * v, FLOATS)
                old = b.load(place)
                old.align = 4
                product = b.fmul(b.sitofp(b.load(total[h][v]), FLOATS), s)
                b.store(b.fadd(old, product), place).align = 4
        return context.get_dummy_value()

    return types.void(bits, heads, vectors, *[types.intp] * 7), codegen


def _dots(b, bits, H, V, words, codes, rows, stride, factors):
    """Sums (H, V) of registers: every code times the number of its row `h`."""
    planes = 8 // bits
    total = [
        [cgutils.alloca_once_value(b, _words(0)) for _ in range(V)] for _ in range(H)
    ]
    for cell in (cell for row in total for cell in row):
        b.store(_words(0), cell)
    with cgutils.for_range(b, words) as loop:
        block = b.add(codes, b.mul(loop.index, I64(64 * V)))
        fours = b.add(rows, b.mul(loop.index, I64(4 * planes)))
        packed = [_load(b, block, 64 * v, WORDS) for v in range(V)]
        for c in range(planes):
            plane = [_plane(b, word, c, bits) for word in packed]
            for h in range(H):
                place = b.add(fours, b.mul(stride, I64(h)))
                four = _splat(b, _load(b, place, 4 * c, I32), WORDS)
                for v in range(V):
                    cell = total[h][v]
                    b.store(_dot(b, b.load(cell), *factors(plane[v], four)), cell)
    return total


def _dot(b, total, unsigned, signed):
    """total + the four products in each lane."""
    # LLVM 21 changed the type of the factors from words to bytes.
    kind = BYTES if binding.llvm_version_info[0] >= 21 else WORDS
    signature = ir.FunctionType(WORDS, [WORDS, kind, kind])
    name = "llvm.x86.avx512.vpdpbusd.512"
    dot = cgutils.get_or_insert_function(b.module, signature, name)
    return b.call(dot, [total, b.bitcast(unsigned, kind), b.bitcast(signed, kind)])


def _plane(b, word, c, bits):
    """Plane c of packed codes: four bytes of one code each, in every lane."""
    if bits == 8:
        return word
    mask = int.from_bytes(bytes([2**bits - 1] * 4), "little", signed=True)
    return b.and_(b.lshr(word, _words(bits * c)), _words(mask))


def _words(value):
    return ir.Constant(WORDS, [value] * LANES)


def _pointer(b, base, offset, kind):
    return b.inttoptr(b.add(base, I64(offset)), ir.PointerType(kind))


def _load(b, base, offset, kind, align=1):
    value = b.load(_pointer(b, base, offset, kind))
    value.align = align
    return value


def _splat(b, x, kind):
    """x in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(nothing, x, I32(0))
    return b.shuffle_vector(first, nothing, _words(0))
