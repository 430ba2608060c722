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
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

LANES = 16
LINE = 64  # bytes that memory gives at once
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
WORDS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
BYTES = ir.VectorType(I8, 4 * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)


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


floats, words, halves, codes_of, signed_bytes, integers = map(
    _row_intrinsic,
    (types.float32, types.uint32, types.uint16, types.uint8, types.int8, types.int64),
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
def prefetch(typing, memory):
    """Ask for the bytes at an address, which are wanted soon."""

    def codegen(context, b, signature, args):
        _prefetch(b, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def ask(typing, ahead):
    """Ask for bytes that are wanted soon, at two places.

    ahead : address of three int64: the places, which move on, and how many lines of
    memory to ask for at both.
    """

    def codegen(context, b, signature, args):
        _ask(b, args[0], _load(b, args[0], 16, I64))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def _ask(b, ahead, lines):
    for cell in (_pointer(b, ahead, 0, I64), _pointer(b, ahead, 8, I64)):
        place = b.load(cell)
        with cgutils.for_range(b, lines) as loop:
            _prefetch(b, b.add(place, b.mul(loop.index, I64(LINE))))
        b.store(b.add(place, b.mul(lines, I64(LINE))), cell)


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
        return _larger(builder, *args)

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def largest_of_128(typing, row):
    """max of 128 float32 from an address on. LLVM unrolls a loop of a constant length
    before it looks for vectors, and then waits for each comparison."""

    def codegen(context, b, signature, args):
        vectors = [_load(b, args[0], 64 * i, FLOATS) for i in range(128 // LANES)]
        while len(vectors) > 1:
            vectors.insert(0, _larger(b, vectors.pop(), vectors.pop()))
        return _reduced(b, "fmax", vectors[0])

    return types.float32(types.intp), codegen


#     2^x = 2^n 2^f,    n = round(x),    |f| <= 1/2
POLYNOMIAL = 1.3276471e-3, 9.6755419e-3, 5.5507131e-2, 0.24022120, 0.69314694, 1.0000001
WHOLE = 1.5 * 2**23  # a number of this size has no fraction: to add it is to round


@intrinsic
def exp2_of_128(typing, row, top):
    """sum_t 2^(x_t - top) of 128 float32 x_t <= top from an address on, each of which
    is replaced by its power; 2^-125 for smaller ones. Relative error 2e-7."""

    def codegen(context, b, signature, args):
        row, top = args[0], _splat(b, args[1])
        powers = []
        for i in range(128 // LANES):
            powers.append(_exp2(b, b.fsub(_load(b, row, 64 * i, FLOATS), top)))
            b.store(powers[i], _pointer(b, row, 64 * i, FLOATS)).align = 4
        while len(powers) > 1:
            x, y = powers.pop(), powers.pop()
            powers.insert(0, b.fadd(x, y, flags=["fast"]))
        return _reduced(b, "fadd", powers[0])

    return types.float32(types.intp, types.float32), codegen


def _exp2(b, x):
    """Of a vector. 2^f by a polynomial of degree 5; n is added to its exponent."""
    x = _larger(b, x, _numbers(-125))
    # Not by adding WHOLE: a compiler that may reorder sums would add it to `top`.
    n = _call(b, "llvm.rint", x)
    f = b.fsub(x, n)
    p = _numbers(POLYNOMIAL[0])
    for c in POLYNOMIAL[1:]:
        p = _fma(b, p, f, _numbers(c))
    exponent = b.shl(b.fptosi(n, WORDS), _words(23))
    return b.bitcast(b.add(b.bitcast(p, WORDS), exponent), FLOATS)


# --- scales ---------------------------------------------------------------------------
@intrinsic
def scale_row(typing, scale, zero, has_zero, center, count, s, z):
    """s_i = scale_i,  z_i = has_zero zero_i + center s_i,  i < count.

    Of addresses of binary16 numbers, to addresses of float32; count is a multiple of
    16. has_zero, center : float32.
    """

    def codegen(context, b, signature, args):
        scale, zero, has_zero, center, count, s, z = args
        has_zero, center = _splat(b, has_zero), _splat(b, center)
        with cgutils.for_range(b, b.sdiv(count, I64(LANES))) as loop:
            scales, zeros = (
                b.fpext(
                    _load(b, b.add(a, b.mul(loop.index, I64(32))), 0, HALVES), FLOATS
                )
                for a in (scale, zero)
            )
            zeros = _fma(b, center, scales, b.fmul(has_zero, zeros))
            for row, numbers in ((s, scales), (z, zeros)):
                at = b.add(row, b.mul(loop.index, I64(64)))
                b.store(numbers, _pointer(b, at, 0, FLOATS)).align = 4
        return context.get_dummy_value()

    numbers = types.float32, types.float32
    return types.void(types.intp, types.intp, *numbers, *[types.intp] * 3), codegen


# --- rows to bytes --------------------------------------------------------------------
# Rows of a multiple of 32 numbers, given by addresses; two vectors at a time.
@intrinsic
def fold_row(typing, row, s, z, count, x):
    """(sum_i row_i z_i, max_i |x_i|) of x_i = row_i s_i, i < count, which it writes."""

    def codegen(context, b, signature, args):
        row, s, z, count, x = args
        sums, tops = ([_cell(b, _numbers(0)) for _ in range(2)] for _ in range(2))
        with cgutils.for_range(b, b.sdiv(count, I64(32))) as loop:
            at = b.mul(loop.index, I64(128))
            for half, (total, top) in enumerate(zip(sums, tops, strict=True)):
                numbers, scales, zeros = (
                    _load(b, b.add(a, at), 64 * half, FLOATS) for a in (row, s, z)
                )
                product = b.fmul(numbers, scales)
                b.store(product, _pointer(b, b.add(x, at), 64 * half, FLOATS)).align = 4
                more = b.fmul(numbers, zeros, flags=["fast"])
                b.store(b.fadd(b.load(total), more, flags=["fast"]), total)
                size = _call(b, "llvm.fabs", product)
                b.store(_larger(b, b.load(top), size), top)
        total = b.fadd(*map(b.load, sums), flags=["fast"])
        top = _larger(b, *map(b.load, tops))
        pair = _reduced(b, "fadd", total), _reduced(b, "fmax", top)
        return context.make_tuple(b, signature.return_type, pair)

    return types.UniTuple(types.float32, 2)(*[types.intp] * 5), codegen


@intrinsic
def round_row(typing, x, count, inverse, down, Q):
    """sum_i Q_i, i < count, of Q_i = round(x_i inverse - down), half to even, which is
    written as a byte: the low bits of WHOLE + Q_i."""

    def codegen(context, b, signature, args):
        x, count, inverse, down, Q = args
        inverse, down = _splat(b, inverse), _splat(b, b.fneg(down))
        sums = [_cell(b, _words(0)) for _ in range(2)]
        with cgutils.for_range(b, b.sdiv(count, I64(32))) as loop:
            for half, total in enumerate(sums):
                i = b.add(b.mul(loop.index, I64(32)), I64(LANES * half))
                numbers = _load(b, b.add(x, b.mul(i, I64(4))), 0, FLOATS)
                whole = b.fadd(_fma(b, numbers, inverse, down), _numbers(WHOLE))
                whole = b.bitcast(whole, WORDS)
                b.store(b.add(b.load(total), whole), total)
                narrow = b.trunc(whole, ir.VectorType(I8, LANES))
                b.store(narrow, _pointer(b, b.add(Q, i), 0, narrow.type)).align = 1
        total = _reduced(b, "add", b.add(*map(b.load, sums)))
        more = b.mul(b.trunc(count, I32), b.bitcast(F32(WHOLE), I32))
        return b.sitofp(b.sub(total, more), F32)

    numbers = types.float32, types.float32
    return types.float32(types.intp, types.intp, *numbers, types.intp), codegen


# --- numbers to codes -----------------------------------------------------------------
# n is a multiple of 16.
@intrinsic
def extremes(typing, x, n, wrong):
    """(min, max) of n float32 from address x on. To the 16 numbers at `wrong`, x 0 is
    added: 0, or NaN for inf and NaN."""

    def codegen(context, b, signature, args):
        x, n, wrong = args
        # Not from inf: a fast comparison may take all numbers for finite.
        low, high = _cell(b, _numbers(3.4e38)), _cell(b, _numbers(-3.4e38))
        bad = _cell(b, _load(b, wrong, 0, FLOATS))
        with cgutils.for_range(b, b.sdiv(n, I64(LANES))) as loop:
            numbers = _load(b, b.add(x, b.mul(loop.index, I64(64))), 0, FLOATS)
            b.store(_smaller(b, b.load(low), numbers), low)
            b.store(_larger(b, b.load(high), numbers), high)
            b.store(_fma(b, numbers, _numbers(0), b.load(bad)), bad)
        b.store(b.load(bad), _pointer(b, wrong, 0, FLOATS)).align = 4
        pair = _reduced(b, "fmin", b.load(low)), _reduced(b, "fmax", b.load(high))
        return context.make_tuple(b, signature.return_type, pair)

    return types.UniTuple(types.float32, 2)(*[types.intp] * 3), codegen


#     q = x r     q' = q + (x - q s) r, twice
#     code = round(clip(q', low, high)) + offset
def _encoder(kind):
    """An intrinsic; kind: s, z and r are the "same" for all numbers, or "rows"."""

    @intrinsic
    def encode(typing, x, n, s, z, r, low, high, offset, codes):
        """A byte at `codes` for each of n float32 at x: the nearest code to (x - z) /
        s, half to even. r = 1 / s.

        The rest x - q s is exact in a fused multiplication. q' is one of the two
        float32 neighbours of the quotient, and from such a one the step gives the
        nearest, without the price of a division. (Markstein, "Computation of elementary
        functions on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34(1), 1990.)
        """

        def codegen(context, b, signature, args):
            x, n, *scales, low, high, offset, codes = args
            low, high, offset = (_splat(b, a) for a in (low, high, offset))
            if kind == "same":
                scales = [_splat(b, a) for a in scales]
            with cgutils.for_range(b, b.sdiv(n, I64(LANES))) as loop:
                at = b.mul(loop.index, I64(64))
                s, z, r = scales
                if kind == "rows":
                    s, z, r = (_load(b, b.add(a, at), 0, FLOATS) for a in scales)
                numbers = b.fsub(_load(b, b.add(x, at), 0, FLOATS), z)
                q = b.fmul(numbers, r)
                for _ in range(2):
                    q = _fma(b, _fma(b, b.fneg(q), s, numbers), r, q)
                q = _larger(b, _smaller(b, q, high), low)
                whole = b.bitcast(b.fadd(q, _numbers(WHOLE)), WORDS)
                narrow = b.trunc(b.add(whole, offset), ir.VectorType(I8, LANES))
                at = b.add(codes, b.mul(loop.index, I64(LANES)))
                b.store(narrow, _pointer(b, at, 0, narrow.type)).align = 1
            return context.get_dummy_value()

        scale = types.float32 if kind == "same" else types.intp
        limits = types.float32, types.float32, types.int32
        signature = (types.intp, types.intp, *[scale] * 3, *limits, types.intp)
        return types.void(*signature), codegen

    return encode


encode_same, encode_rows = map(_encoder, ("same", "rows"))


# --- rows times codes -----------------------------------------------------------------
#     out[h, lane]  =  scale[h] sum_i row[h, i] code[i, lane] + constant[h]
#     out[h, lane] +=  ...                                      (values)
def _rows_times_codes(kind, accumulate):
    """An intrinsic; kind: rows are "numbers" or "bytes". Values are accumulated, and
    their codes of 8 bits are signed bytes."""

    @intrinsic(prefer_literal=True)
    def multiply(
        typing, heads, panels, bits, rows, codes, row, n, scale, constant, out, m, ahead
    ):
        """`heads` rows of n numbers times the codes of consecutive panels.

        bits : of a code. codes : address of words uint32 (panels, rows, 32). row :
        address of float32 or bytes (heads, n), of which the first 32 / bits * rows are
        used. scale, constant : addresses of float32 (heads,). out : of (heads, m), of
        which the first 32 * panels are written, or added to. ahead : see `ask`.
        """
        H, V = heads.literal_value, 2 * panels.literal_value

        def codegen(context, b, signature, args):
            bits, rows, codes, row, n, scale, constant, out, m, ahead = args[2:]
            add = {"numbers": _add_numbers, "bytes": _add_bytes}[kind]
            zero = _numbers(0) if kind == "numbers" else _words(0)
            geometry = bits, rows, codes, row, n, ahead
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

        return types.void(heads, panels, *[types.intp] * 10), codegen

    return multiply


key_numbers = _rows_times_codes("numbers", accumulate=False)
value_numbers = _rows_times_codes("numbers", accumulate=True)
key_bytes = _rows_times_codes("bytes", accumulate=False)
value_bytes = _rows_times_codes("bytes", accumulate=True)


def _sums(b, H, V, zero, add, values, bits, *geometry):
    """H x V vectors of sums: every code times the number of its row."""
    total = [[_cell(b, zero) for _ in range(V)] for _ in range(H)]
    for width in (8, 4, 2):  # a loop for each: shifts by constants cost half
        with b.if_then(b.icmp_signed("==", bits, I64(width))):
            _sum(b, total, add, values, width, *geometry)
    return total


def _sum(b, total, add, values, bits, rows, codes, row, n, ahead):
    V, planes = len(total[0]), 8 // bits
    with cgutils.for_range(b, rows) as outer:
        start, panel = b.add(codes, b.mul(outer.index, I64(128))), b.mul(rows, I64(128))
        words = [
            _load(b, b.add(start, b.mul(panel, I64(v // 2))), 64 * (v % 2), WORDS)
            for v in range(V)
        ]
        _ask(b, ahead, I64(1))
        i = b.mul(outer.index, I64(4 * planes))
        for plane in range(planes):
            add(b, total, words, plane, bits, row, i, n, values)


def _add_numbers(b, total, words, plane, bits, row, i, n, values):
    """total + the four codes of a plane times four numbers of each row."""
    if values and bits == 8:  # from code - 128 back to the code
        words = [b.xor(w, _words(0x80808080 - 2**32)) for w in words]
    for byte in range(4):
        by = _words(8 * byte + bits * plane)
        fields = [b.and_(b.lshr(w, by), _words(2**bits - 1)) for w in words]
        codes = [b.sitofp(field, FLOATS) for field in fields]
        for h, cells in enumerate(total):
            at = b.add(row, b.mul(b.add(b.mul(n, I64(h)), i), I64(4)))
            x = _splat(b, _load(b, at, 16 * plane + 4 * byte, F32))
            for cell, code in zip(cells, codes, strict=True):
                product = b.fmul(x, code, flags=["fast"])
                b.store(b.fadd(b.load(cell), product, flags=["fast"]), cell)


def _add_bytes(b, total, words, plane, bits, row, i, n, values):
    """The same for rows of bytes, four products at once.

    The instruction takes an unsigned and a signed factor. Keys are unsigned, and the
    query signed; values are signed, and the weights unsigned.
    """
    mask = _words((2**bits - 1) * 0x01010101)
    planes = [b.and_(b.lshr(w, _words(bits * plane)), mask) for w in words]
    for h, cells in enumerate(total):
        at = b.add(row, b.add(b.mul(n, I64(h)), i))
        four = _splat(b, _load(b, at, 4 * plane, I32))
        for cell, codes in zip(cells, planes, strict=True):
            factors = (four, codes) if values else (codes, four)
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


def _prefetch(b, place):
    pointer = ir.PointerType(I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(ask, [b.inttoptr(place, pointer), I32(0), I32(2), I32(1)])


def _call(b, name, *vectors):
    """An intrinsic of LLVM for vectors of numbers."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * len(vectors))
    return b.call(
        cgutils.get_or_insert_function(b.module, kind, f"{name}.v16f32"), vectors
    )


def _fma(b, x, y, z):
    return _call(b, "llvm.fma", x, y, z)


def _larger(b, x, y):
    greater = b.fcmp_ordered(">", x, y, flags=["fast"])
    return b.select(greater, x, y, flags=["fast"])


def _smaller(b, x, y):
    less = b.fcmp_ordered("<", x, y, flags=["fast"])
    return b.select(less, x, y, flags=["fast"])


def _reduced(b, by, vector):
    """A vector's lanes added, or the largest of them."""
    kind = vector.type.element
    name = f"llvm.vector.reduce.{by}.v16{'i32' if kind == I32 else 'f32'}"
    arguments = [F32(-0.0), vector] if by == "fadd" else [vector]
    signature = ir.FunctionType(kind, [a.type for a in arguments])
    reduce = cgutils.get_or_insert_function(b.module, signature, name)
    flags = () if kind == I32 else ["fast"]
    return b.call(reduce, arguments, fastmath=flags)


def _words(value):
    return ir.Constant(WORDS, [value] * LANES)


def _numbers(value):
    return ir.Constant(FLOATS, [float(value)] * LANES)


def _cell(b, value):
    """A variable; LLVM makes registers of them."""
    cell = cgutils.alloca_once(b, value.type)
    b.store(value, cell)
    return cell


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
