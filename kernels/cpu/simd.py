"""What Numba has no function for, as LLVM's intermediate representation.

The large ones multiply rows with a matrix of codes. A vector has 16 lanes of one *word*
each, four bytes that belong together; a word of codes holds `8 / bits` *planes* of four
codes, and a *panel* is a matrix of words with 32 lanes (see `blocks.py`).

    numbers    a code becomes a float32 and meets float32 rows. LLVM has vectors of any
               width and cuts them into what the CPU has: this runs everywhere.
    bytes      rows of bytes meet the codes as they are, by the instruction `vpdpbusd`
               of AVX-512 VNNI: 64 products of an unsigned and a signed byte, added in
               fours to sixteen 32-bit sums.

Their sums stay in registers from the first row of codes to the last. (Loops in Python
over the same layout vectorize, too, but keep the sums in memory.)
"""

from functools import lru_cache

from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy import float32

LANES = 16
AHEAD = 4096  # bytes
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
WORDS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
BYTES = ir.VectorType(I8, 4 * LANES)
NO_NUMBERS = ir.Constant(FLOATS, [0.0] * LANES)


@lru_cache
def available():
    """Whether Numba compiles for a CPU that has the instruction, as this one must."""
    named = config.CPU_FEATURES  # set by hand, or None
    features = (named or binding.get_host_cpu_features().flatten()).split(",")
    return {"+avx512vnni", "+avx512bw"} <= set(features)


# --- small ones -----------------------------------------------------------------------
@intrinsic
def address(typing, array):
    """Where a contiguous array begins, in bytes. The array must outlive its use."""

    def codegen(context, b, signature, args):
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        return b.ptrtoint(data, I64)

    return types.intp(array), codegen


def _row_intrinsic(dtype):
    @intrinsic
    def row(typing, memory, start, n):
        """The numbers start .. start + n - 1 from an address on, as an array.

        It has no reference count. A slice has: two atomic operations each time, which
        took more time than loops over 64 numbers, and far more with two threads.
        """
        kind = types.Array(dtype, 1, "C")

        def codegen(context, b, signature, args):
            out = context.make_array(kind)(context, b)
            width = context.get_abi_sizeof(context.get_data_type(dtype))
            step = context.get_constant(types.intp, width)
            data = b.inttoptr(b.add(args[0], b.mul(args[1], step)), out.data.type)
            populate_array(
                out,
                data=data,
                shape=[args[2]],
                strides=[step],
                itemsize=step,
                meminfo=None,
            )
            return out._getvalue()

        return kind(types.intp, types.intp, types.intp), codegen

    return row


floats, words, halves, codes_of, signed_bytes = map(
    _row_intrinsic,
    (types.float32, types.uint32, types.uint16, types.uint8, types.int8),
)


@intrinsic
def wide_vectors(typing):
    """Let the loops of this function use all of AVX-512: LLVM prefers half of it, for
    the sake of CPUs that slow down. Short rows of packing gain nothing by it."""

    def codegen(context, b, signature, args):
        # llvmlite does not know this attribute, but writes what stands in the set.
        set.add(b.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def half_to_float(typing, bits):
    """The float32 of a binary16 number, given as its uint16 bits."""

    def codegen(context, b, signature, args):
        return b.fpext(b.bitcast(args[0], ir.HalfType()), F32)

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typing, x):
    """The uint16 bits of float32 x rounded to binary16, half to even."""

    def codegen(context, b, signature, args):
        return b.bitcast(b.fptrunc(args[0], ir.HalfType()), I16)

    return types.uint16(types.float32), codegen


@intrinsic
def round_even(typing, x):
    """The nearest integer, half to even, as float32; unlike `round` it vectorizes."""

    def codegen(context, b, signature, args):
        return b.call(b.module.declare_intrinsic("llvm.rint", [F32]), args)

    return types.float32(types.float32), codegen


@intrinsic
def prefetch(typing, memory):
    """Ask for the bytes at an address, which are wanted soon."""

    def codegen(context, b, signature, args):
        _prefetch(b, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def fused(typing, a, b, c):
    """a b + c, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(*[types.float32] * 3), codegen


@intrinsic
def nearest_byte(typing, x, offset):
    """The nearest integer, half to even, plus int32 `offset`, as uint8."""

    def codegen(context, b, signature, args):
        kind = ir.FunctionType(I32, [F32])
        rint = cgutils.get_or_insert_function(b.module, kind, "llvm.lrint.i32.f32")
        return b.trunc(b.add(b.call(rint, args[:1]), args[1]), I8)

    return types.uint8(types.float32, types.int32), codegen


@intrinsic
def larger(typing, a, b):
    """max(a, b) without a branch: a loop with the builtin `max` does not vectorize."""

    def codegen(context, builder, signature, args):
        greater = builder.fcmp_ordered(">", *args, flags=["fast"])
        return builder.select(greater, *args, flags=["fast"])

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def largest_of_128(typing, row):
    """max of 128 float32 from an address on. LLVM unrolls a loop of a constant length
    before it looks for vectors, and then waits for each comparison."""

    def codegen(context, b, signature, args):
        vectors = [_load(b, args[0], 64 * i, FLOATS) for i in range(128 // LANES)]
        while len(vectors) > 1:
            x, y = vectors.pop(), vectors.pop()
            greater = b.fcmp_ordered(">", x, y, flags=["fast"])
            vectors.insert(0, b.select(greater, x, y, flags=["fast"]))
        kind = ir.FunctionType(F32, [FLOATS])
        name = "llvm.vector.reduce.fmax.v16f32"
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), vectors)

    return types.float32(types.intp), codegen


@intrinsic
def power_of_two(typing, n):
    """2^n of a whole float32 n, -126..127: n + 127 is the exponent of the number.

    Numba's own operators would compute in 64 bits, and half as many at once.
    """

    def codegen(context, b, signature, args):
        exponent = b.add(b.fptosi(args[0], I32), I32(127))
        return b.bitcast(b.shl(exponent, I32(23)), F32)

    return types.float32(types.float32), codegen


# 2^x = 2^n 2^f,  n = round(x), |f| <= 1/2,  2^f by its Taylor polynomial of degree 6
@njit(inline="always", fastmath=True)
def exp2(x):
    """2^x of float32 x <= 0; 2^-126 for smaller ones. Relative error 2e-7."""
    x = larger(x, float32(-126))
    n = round_even(x)
    f = x - n
    p = float32(1.5403530e-4)
    p = p * f + float32(1.33335581e-3)
    p = p * f + float32(9.61812910e-3)
    p = p * f + float32(5.55041087e-2)
    p = p * f + float32(2.40226507e-1)
    p = p * f + float32(6.93147181e-1)
    p = p * f + float32(1)
    return power_of_two(n) * p


# --- rows times codes -----------------------------------------------------------------
#     out[h, lane]  =  scale[h] sum_i row[h, i] code[i, lane] + constant[h]
#     out[h, lane] +=  ...                                      (values)
def _rows_times_codes(kind, accumulate):
    """An intrinsic; kind: rows are "numbers" or "bytes". Values are accumulated, and
    their codes of 8 bits are signed bytes."""

    @intrinsic(prefer_literal=True)
    def multiply(
        typing, heads, panels, bits, rows, codes, row, n, scale, constant, out, m
    ):
        """`heads` rows of n numbers times the codes of consecutive panels.

        bits : of a code. codes : address of words uint32 (panels, rows, 32). row :
        address of float32 or bytes (heads, n), of which the first 32 / bits * rows are
        used. scale, constant : addresses of float32 (heads,). out : of (heads, m), of
        which the first 32 * panels are written, or added to.
        """
        H, V = heads.literal_value, 2 * panels.literal_value

        def codegen(context, b, signature, args):
            bits, rows, codes, row, n, scale, constant, out, m = args[2:]
            add = {"numbers": _add_numbers, "bytes": _add_bytes}[kind]
            zero = NO_NUMBERS if kind == "numbers" else _words(0)
            geometry = bits, rows, codes, row, n
            total = _sums(b, H, V, zero, add, accumulate, *geometry)
            for h in range(H):
                s, c = (_splat(b, _load(b, a, 4 * h, F32)) for a in (scale, constant))
                line = b.add(out, b.mul(m, I64(4 * h)))
                for v in range(V):
                    x = b.load(total[h][v])
                    x = x if kind == "numbers" else b.sitofp(x, FLOATS)
                    x = b.fadd(b.fmul(x, s, flags=["fast"]), c, flags=["fast"])
                    if accumulate:
                        x = b.fadd(_load(b, line, 64 * v, FLOATS), x, flags=["fast"])
                    b.store(x, _pointer(b, line, 64 * v, FLOATS)).align = 4
            return context.get_dummy_value()

        return types.void(heads, panels, *[types.intp] * 9), codegen

    return multiply


key_numbers = _rows_times_codes("numbers", accumulate=False)
value_numbers = _rows_times_codes("numbers", accumulate=True)
key_bytes = _rows_times_codes("bytes", accumulate=False)
value_bytes = _rows_times_codes("bytes", accumulate=True)


def _sums(b, H, V, zero, add, values, bits, rows, codes, row, n):
    """H x V vectors of sums: every code times the number of its row."""
    total = [[cgutils.alloca_once_value(b, zero) for _ in range(V)] for _ in range(H)]
    for cell in (cell for vectors in total for cell in vectors):
        b.store(zero, cell)
    planes = b.sdiv(I64(8), bits)
    with cgutils.for_range(b, rows) as outer:
        start, panel = b.add(codes, b.mul(outer.index, I64(128))), b.mul(rows, I64(128))
        words = [
            _load(b, b.add(start, b.mul(panel, I64(v // 2))), 64 * (v % 2), WORDS)
            for v in range(V)
        ]
        for v in range(V):  # the row that is wanted soon: memory is slower than this
            place = b.add(start, b.mul(panel, I64(v // 2)))
            _prefetch(b, b.add(place, I64(64 * (v % 2) + AHEAD)))
        with cgutils.for_range(b, planes) as inner:
            shift = b.trunc(b.mul(inner.index, bits), I32)
            i = b.add(b.mul(outer.index, planes), inner.index)
            add(b, total, words, shift, bits, row, b.mul(i, I64(4)), n, values)
    return total


def _add_numbers(b, total, words, shift, bits, row, i, n, values):
    """total + the four codes of a plane times four numbers of each row."""
    mask = _splat(b, _ones(b, bits))
    if values:  # from code - 128 back to the code
        is_byte = b.icmp_signed("==", bits, I64(8))
        sign = _splat(b, b.select(is_byte, I32(0x80808080 - 2**32), I32(0)))
        words = [b.xor(w, sign) for w in words]
    for byte in range(4):
        by = _splat(b, b.add(shift, I32(8 * byte)))
        codes = [b.sitofp(b.and_(b.lshr(w, by), mask), FLOATS) for w in words]
        for h, cells in enumerate(total):
            at = b.add(row, b.mul(b.add(b.mul(n, I64(h)), i), I64(4)))
            x = _splat(b, _load(b, at, 4 * byte, F32))
            for cell, code in zip(cells, codes, strict=True):
                product = b.fmul(x, code, flags=["fast"])
                b.store(b.fadd(b.load(cell), product, flags=["fast"]), cell)


def _add_bytes(b, total, words, shift, bits, row, i, n, values):
    """The same for rows of bytes, four products at once.

    The instruction takes an unsigned and a signed factor. Keys are unsigned, and the
    query signed; values are signed, and the weights unsigned.
    """
    mask = _splat(b, b.mul(_ones(b, bits), I32(0x01010101)))
    planes = [b.and_(b.lshr(w, _splat(b, shift)), mask) for w in words]
    for h, cells in enumerate(total):
        at = b.add(row, b.add(b.mul(n, I64(h)), i))
        four = _splat(b, _load(b, at, 0, I32))
        for cell, plane in zip(cells, planes, strict=True):
            factors = (four, plane) if values else (plane, four)
            b.store(_dot(b, b.load(cell), *factors), cell)


def _dot(b, total, unsigned, signed):
    """total + the four products in each lane; on a CPU that cannot, it is never run."""
    if not available():
        return total
    # LLVM 21 changed the type of the factors from words to bytes.
    kind = BYTES if binding.llvm_version_info[0] >= 21 else WORDS
    signature = ir.FunctionType(WORDS, [WORDS, kind, kind])
    name = "llvm.x86.avx512.vpdpbusd.512"
    dot = cgutils.get_or_insert_function(b.module, signature, name)
    return b.call(dot, [total, b.bitcast(unsigned, kind), b.bitcast(signed, kind)])


def _ones(b, bits):
    """2^bits - 1"""
    return b.sub(b.shl(I32(1), b.trunc(bits, I32)), I32(1))


def _prefetch(b, place):
    pointer = ir.PointerType(I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(ask, [b.inttoptr(place, pointer), I32(0), I32(3), I32(1)])


def _words(value):
    return ir.Constant(WORDS, [value] * LANES)


def _pointer(b, base, offset, kind):
    return b.inttoptr(b.add(base, I64(offset)), ir.PointerType(kind))


def _load(b, base, offset, kind):
    value = b.load(_pointer(b, base, offset, kind))
    value.align = 4 if kind in (F32, FLOATS) else 1
    return value


def _splat(b, x):
    """x in every lane."""
    nothing = ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined)
    first = b.insert_element(nothing, x, I32(0))
    return b.shuffle_vector(first, nothing, _words(0))
