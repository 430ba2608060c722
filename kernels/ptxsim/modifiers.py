"""The modifiers that are accepted and change nothing, each with the reason.

Every other modifier of an instruction is either modelled by its opcode or raises
`UnsupportedPTX`: nothing is ignored silently.
"""

ONE_FLOAT = ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "abs", "neg")
SEVERAL_FLOATS = ("add", "sub", "mul", "fma", "mad", "div", "min", "max")
COMPARED = ("set", "setp", "slct", "cvt")
APPROXIMATE = ("div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
ACCESSES = ("ld", "st", "cp")
SHARING = ("ld", "st", "atom", "red")
FENCES = ("fence", "membar")

# (modifiers, the opcodes they are accepted on, the reason)
ROWS = (
    (
        ("ftz",),
        SEVERAL_FLOATS + ONE_FLOAT + COMPARED,
        "subnormal numbers are kept; the hardware takes them as zero",
    ),
    (
        ("approx",),
        APPROXIMATE,
        "NumPy's function; the hardware's differs in the last bits",
    ),
    (("full",), ("div",), "a true division; the hardware's is within 2 ulp"),
    (("noftz",), ("atom", "red"), "subnormal numbers are kept, as it asks"),
    (("uni",), ("bra", "ret", "call"), "a promise that all lanes go the same way"),
    (("nc",), ("ld",), "another cache; the value is the same"),
    (
        ("ca", "cg", "cs", "lu", "cv", "wb", "wt"),
        ACCESSES,
        "cache operators: no cache is modelled",
    ),
    (
        (
            *("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first"),
            *("L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B"),
        ),
        ACCESSES,
        "hints to a cache: no cache is modelled",
    ),
    (
        ("L2::cache_hint",),
        (*ACCESSES, "atom", "red"),
        "its operand, a policy of the cache, is not read",
    ),
    (("L1", "L2"), ("prefetch",), "which cache: none is modelled"),
    (("volatile",), ("ld", "st"), "every access goes to memory"),
    (
        ("weak", "relaxed", "acquire", "release", "acq_rel", "sc"),
        SHARING + FENCES,
        "memory order: the lanes run in one order that all of them see",
    ),
    (
        ("cta", "cluster", "gpu", "gl", "sys"),
        SHARING + FENCES,
        "who sees the order: all lanes do",
    ),
)

# modifier -> the opcodes on which it changes nothing
WITHOUT_EFFECT = {name: opcodes for names, opcodes, _ in ROWS for name in names}


def table():
    """The rows as Markdown, the form in which README.md shows them."""
    lines = ["| modifiers | on | why they change nothing |", "|---|---|---|"]
    for names, opcodes, reason in ROWS:
        written = ", ".join(f"`.{name}`" for name in names)
        lines.append(f"| {written} | {', '.join(opcodes)} | {reason} |")
    return "\n".join(lines)
