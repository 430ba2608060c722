"""Wrong kernels: one line of a real kernel, changed, and the case that shows it.

A mutant is applied to a copy of the source at test time; its text must be there exactly
once. `tests/kernels/test_mutants.py` wants every one of them to fail.
"""

from dataclasses import dataclass

from kvq.scheme import Policy, Scheme

TOKEN = Scheme(4, "token", 16, "asymmetric")
CHANNEL = Scheme(4, "channel", 32, "symmetric")
SCHEMES = {
    "token": TOKEN,
    "channel": CHANNEL,
    "symmetric": Scheme(4, "token", 16, "symmetric"),
    "3 bits": Scheme(3, "token", 32, "asymmetric"),
}
POLICIES = {
    "channel": Policy(
        key=Scheme(4, "channel", 32, "asymmetric"), value=TOKEN, residual=9, sinks=2
    ),
    "token": Policy(key=TOKEN, value=SCHEMES["symmetric"], residual=9),
}


@dataclass(frozen=True)
class Mutant:
    """One wrong line.

    name : what is wrong, and in which kernel.
    op, version, case : what is run; `case` is a key of SCHEMES, or of POLICIES.
    file : the source, below kernels/. right, wrong : the text and what replaces it.
    races : the PTX machine must report it as a race as well.
    """

    name: str
    op: str
    version: str
    case: str
    file: str
    right: str
    wrong: str
    races: bool = False


PACK1, PACK2 = "pack/v1_word_per_thread.cu", "pack/v2_one_pass.cu"
DEQUANT1, DEQUANT2 = "dequant/v1_value_per_thread.cu", "dequant/v2_magic_words.cu"
DECODE1, TILE = "decode/v1_two_pass.cu", "decode/tile.cuh"
DECODE2, DECODE3 = "decode/v2_online_softmax.cu", "decode/v3_split_kv.cu"
SHARED = "kvq.cuh"

MUTANTS = (
    # --- codes in words
    Mutant(
        "swapped nibbles, canonical",
        *("dequant", "v1", "token"),
        SHARED,
        "int word = i * bits >> 5, shift = i * bits & 31;",
        "int word = i * bits >> 5, shift = (i ^ 1) * bits & 31;",
    ),
    Mutant(
        "swapped nibbles, paired",
        *("decode", "v2", "channel"),
        SHARED,
        "(word >> (bits * p))",
        "(word >> (bits * (p ^ 1)))",
    ),
    Mutant(
        "a code that straddles two words is cut",
        *("dequant", "v1", "3 bits"),
        SHARED,
        "if (shift + bits > 32)",
        "if (shift + bits > 99)",
    ),
    Mutant(
        "symmetric offset off by one",
        *("dequant", "v1", "symmetric"),
        SHARED,
        "return asymmetric ? 0 : 1 << (bits - 1);",
        "return asymmetric ? 0 : (1 << (bits - 1)) - 1;",
    ),
    Mutant(
        "symmetric offset added",
        *("decode", "v3", "token"),
        SHARED,
        "__float2half2_rn(1024.0f + offset)",
        "__float2half2_rn(1024.0f - offset)",
    ),
    Mutant(
        "the word of the neighbouring lane",
        *("dequant", "v2", "token"),
        DEQUANT2,
        "__shfl_sync(WARP, word, unit)",
        "__shfl_sync(WARP, word, unit ^ 1)",
    ),
    # --- rounding
    Mutant(
        "halves rounded away from zero",
        *("pack", "v1", "token"),
        SHARED,
        "float y = rintf(",
        "float y = roundf(",
    ),
    Mutant(
        "codes of the scale before it is rounded",
        *("pack", "v1", "token"),
        SHARED,
        "float y = rintf((x - z) / (s == 0 ? 1 : s));",
        "float y = rintf((x - z) / (s == 0 ? 1 : s * 1.0003f));",
    ),
    Mutant(
        "a constant group divides by its scale of 0",
        *("pack", "v1", "symmetric"),
        SHARED,
        "(s == 0 ? 1 : s)",
        "s",
    ),
    Mutant(
        "a scale too small for its format becomes 0",
        *("pack", "v1", "token"),
        SHARED,
        "if (s != 0 && s < smallest) s = smallest;",
        "",
    ),
    # --- scales and zeros
    Mutant(
        "scale of the neighbouring group, dequant",
        *("dequant", "v1", "token"),
        DEQUANT1,
        "ceil_div(D, gc) + c / gc;",
        "ceil_div(D, gc) + (c / gc ^ 1);",
    ),
    Mutant(
        "scale of the neighbouring group, dequant of words",
        *("dequant", "v2", "token"),
        DEQUANT2,
        "row * groups + c / GROUP;",
        "row * groups + (c / GROUP ^ 1);",
    ),
    Mutant(
        "scale of the neighbouring group, decode",
        *("decode", "v2", "token"),
        TILE,
        "t * columns + c / group",
        "t * columns + (c / group ^ 1)",
    ),
    Mutant(
        "per-channel scales read as per-token ones, dequant",
        *("dequant", "v1", "channel"),
        DEQUANT1,
        "i64 group = (n * ceil_div(T, gt) + t / gt) * ceil_div(D, gc) + c / gc;",
        "i64 group = (n * ceil_div(T, gc) + t / gc) * ceil_div(D, gt) + c / gt;",
    ),
    Mutant(
        "per-channel scales read as per-token ones, decode",
        *("decode", "v1", "channel"),
        DECODE1,
        "(i64)(t / x.gt) * ceil_div(x.D, x.gc) + c / x.gc",
        "(i64)(t / x.gc) * ceil_div(x.D, x.gt) + c / x.gt",
    ),
    Mutant(
        "the last group of tokens not counted",
        *("dequant", "v1", "channel"),
        DEQUANT1,
        "n * ceil_div(T, gt)",
        "n * (T / gt)",
    ),
    Mutant(
        "zero ignored, dequant",
        *("dequant", "v1", "token"),
        DEQUANT1,
        "asymmetric ? zero[group] : S(0.0f)",
        "S(0.0f)",
    ),
    Mutant(
        "zero ignored, decode",
        *("decode", "v3", "channel"),
        TILE,
        "asymmetric ? tile.zero[g] : 0)",
        "0)",
    ),
    Mutant(
        "wrong shuffle width: extremes of two groups mixed",
        *("pack", "v2", "token"),
        PACK2,
        "for (int other = LANES / 2; other > 0; other /= 2) {",
        "for (int other = LANES; other > 0; other /= 2) {",
    ),
    Mutant(
        "wrong shuffle width: half of a warp left out of the maximum",
        *("decode", "v2", "channel"),
        TILE,
        "for (int i = 16; i > 0; i /= 2) x = fmaxf(",
        "for (int i = 8; i > 0; i /= 2) x = fmaxf(",
    ),
    Mutant(
        "wrong shuffle width: half of a warp left out of the sum",
        *("decode", "v2", "channel"),
        TILE,
        "for (int i = 16; i > 0; i /= 2) x += ",
        "for (int i = 8; i > 0; i /= 2) x += ",
    ),
    # --- guards and offsets
    Mutant(
        "missing tail guard, scales",
        *("pack", "v1", "token"),
        PACK1,
        "if (group >= N * along * across) return;",
        "",
    ),
    Mutant(
        "missing tail guard, words",
        *("pack", "v1", "token"),
        PACK1,
        "if (index >= N * T * W) return;",
        "",
    ),
    Mutant(
        "missing tail guard, values",
        *("dequant", "v1", "token"),
        DEQUANT1,
        "if (index >= (i64)N * T * D) return;",
        "",
    ),
    Mutant(
        "missing tail guard, rows",
        *("pack", "v2", "token"),
        PACK2,
        "bool inside = row < (i64)N * T;",
        "bool inside = true;",
    ),
    Mutant(
        "padding of a row written as numbers",
        *("dequant", "v2", "3 bits"),
        DEQUANT2,
        "if (row >= rows || c >= D) continue;",
        "if (row >= rows) continue;",
    ),
    Mutant(
        "one slot too many read from the tail, v1",
        *("decode", "v1", "channel"),
        DECODE1,
        "tokens = coded + lengths[2 * b + 1];",
        "tokens = coded + lengths[2 * b + 1] + 1;",
    ),
    Mutant(
        "garbage in the tail read as quantized tokens",
        *("decode", "v2", "channel"),
        DECODE2,
        "0, lengths[2 * b], options",
        "0, T_cap, options",
    ),
    Mutant(
        "garbage in the tail read as exact tokens",
        *("decode", "v3", "channel"),
        DECODE3,
        "exact = lengths[2 * b + 1];",
        "exact = R_cap;",
    ),
    Mutant(
        "32-bit offset",
        *("decode", "v2", "far"),
        TILE,
        "const X* exact, i64 head,",
        "const X* exact, int head,",
    ),
    # --- heads
    Mutant(
        "h % H_kv in place of h // ratio, v1",
        *("decode", "v1", "channel"),
        DECODE1,
        "(i64)b * H_kv + h / (H_q / H_kv);",
        "(i64)b * H_kv + h % H_kv;",
    ),
    Mutant(
        "h % H_kv in place of h // ratio, v2",
        *("decode", "v2", "channel"),
        DECODE2,
        "(i64)b * H_kv + h / (H_q / H_kv);",
        "(i64)b * H_kv + h % H_kv;",
    ),
    Mutant(
        "every KV head serves the first query heads",
        *("decode", "v3", "channel"),
        DECODE3,
        "int h = g * RATIO + chunk * HEADS,",
        "int h = g + chunk * HEADS,",
    ),
    # --- softmax
    Mutant(
        "missing rescale of the output",
        *("decode", "v2", "channel"),
        TILE,
        "state.o[h][i] *= shrink;",
        "state.o[h][i] *= 1;",
    ),
    Mutant(
        "missing rescale of the sum",
        *("decode", "v2", "channel"),
        TILE,
        "state.l[h] * shrink + s[h]",
        "state.l[h] + s[h]",
    ),
    Mutant(
        "merge forgets the maximum of a split",
        *("decode", "v3", "long"),
        DECODE3,
        "part_ml[2 * (i * rows + row)], M)",
        "part_ml[2 * row], M)",
    ),
    Mutant(
        "merge forgets a split",
        *("decode", "v3", "long"),
        DECODE3,
        "for (int i = 0; i < splits; ++i)\n            o += ",
        "for (int i = 1; i < splits; ++i)\n            o += ",
    ),
    Mutant(
        "the sink logit is left out of the sum",
        *("decode", "v1", "channel"),
        DECODE1,
        "if (has_sink) l += expf(sink - m);",
        "",
    ),
    Mutant(
        "soft cap ignored",
        *("decode", "v2", "channel"),
        TILE,
        "if (options.softcap > 0)",
        "if (options.softcap > 1e9f)",
    ),
    # --- barriers
    Mutant(
        "missing barrier between two sums of a block",
        *("decode", "v1", "channel"),
        DECODE1,
        "__syncthreads();  // `part` is written again by the next call",
        "",
        races=True,
    ),
    Mutant(
        "missing barrier in a sum of a block",
        *("decode", "v1", "channel"),
        DECODE1,
        "    part[threadIdx.x] = x;\n    __syncthreads();",
        "    part[threadIdx.x] = x;",
        races=True,
    ),
    Mutant(
        "missing barrier before warps merge",
        *("decode", "v2", "channel"),
        TILE,
        "shared.o[i] = 0;\n    __syncthreads();",
        "shared.o[i] = 0;",
        races=True,
    ),
    Mutant(
        "missing barrier before extremes are read",
        *("pack", "v2", "channel"),
        PACK2,
        "half /= 2) {\n        __syncthreads();",
        "half /= 2) {",
        races=True,
    ),
    Mutant(
        "missing barrier before scales are read",
        *("pack", "v2", "channel"),
        PACK2,
        "zeros[c % VEC][c / VEC] = to_float(z);\n    }\n    __syncthreads();",
        "zeros[c % VEC][c / VEC] = to_float(z);\n    }",
        races=True,
    ),
    Mutant(
        "a barrier that only some threads reach",
        *("decode", "v1", "channel"),
        DECODE1,
        "    x = part[0];\n    __syncthreads();",
        "    x = part[0];\n    if (threadIdx.x < 40) __syncthreads();",
        races=True,
    ),
)

# Of async_copy.cu, which stands beside this file: name -> (right, wrong).
ASYNC = {
    "missing cp.async wait": ('asm volatile("cp.async.wait_group 1;");', ""),
    "waits for one group too few": ("wait_group 1", "wait_group 2"),
    "copies into the tile that is being read": (
        "fetch(&tile[(i + 1) % 2]",
        "fetch(&tile[i % 2]",
    ),
}
