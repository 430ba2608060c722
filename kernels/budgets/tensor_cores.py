"""What the tensor-core kernels cost in machine code: `tensor_cores.csv`.

    rows()      compile, read the main loop
    LIMITS      instructions per byte that the kernels are built to stay below
    limit()     what a device has too little of: memory, instructions, tensor cores
    cells()     the table of `kvq kernels report` and of kernels/README.md

The main loop takes one step: 64 tokens, or 16 in full precision. A lane's instructions
for a step, times 32 lanes, over the bytes of the step in memory are its instructions
per byte: codes, scales and zeros. A device can start so many instructions for each byte
that its memory delivers (`kvq.hardware`); what a loop needs of that is its share of the
issue slots. All instructions of the loop count, also those that few steps reach.

`LIMITS` are claimed for the first of `SETTINGS`. The others are recorded without one:
the softmax, and folding scales into q, cost a step the same whatever its bytes. D = 64
has half of them; 9 to 16 query heads have two tiles, each with a softmax of its own;
groups of 128 have fewer scales. They stay below 4/3 of the limits: at most 86 % of the
issue slots of an H200, which has the fewest for a byte.

Rows of 16 bits are the baseline: a cache in full precision, float16 or bfloat16. In all
rows `step_bytes` are those of 64 tokens.

v5 spills at D = 256, outside of its main loop.

Some need more than 128 registers, so that fewer warps fit a multiprocessor. What counts
is how many bytes are under way: bandwidth times latency, at least (Little's law). A
warp of v5 has a stage of its ring under way while it works on another, so that few
warps are enough: `bytes_under_way` is at least 1.3 times `bytes_to_cover` in every row
of v5.

`python -m kvq.kernels.budgets.tensor_cores` records again.
"""

from pathlib import Path

from kvq.hardware import device
from kvq.kernels import static
from kvq.kernels.decode import tensor_cores
from kvq.kernels.decode.paged import NUMBERS
from kvq.kernels.host import C_TYPES
from kvq.kernels.launch import nvrtc
from kvq.kernels.pages import STEP, PageLayout
from kvq.kernels.report import facts_of
from kvq.scheme import Scheme
from kvq.tables import read_table, write_table

FILE = Path(__file__).with_name("tensor_cores.csv")
ARCHITECTURES = (80, 90)
BITS = (8, 4, 2)
LIMITS = {8: 1.9, 4: 3.6, 2: 5.0}  # D = 128, keys per channel, G = 64, up to 8 heads
# Device: whose code it would run; that of an RTX 4090 is taken to be that of sm_80.
DEVICES = {"H200": 90, "H100-SXM": 90, "A100-80GB": 80, "RTX-4090": 80}
FLOPS = 2 * 16 * 8 * 16  # of one mma.m16n8k16
KEY = ("kernel", "bits", "keys_per", "G", "value_G", "D", "ratio", "exact", "arch")
KERNELS = {"v4": "decode_v4", "v5": "decode_v5"}
# (keys per, their G, the values' G, D, query heads of a KV head); the first is LIMITS'.
SETTINGS = (
    ("channel", 64, 64, 128, 4),
    ("channel", 32, 64, 128, 4),
    ("channel", 128, 128, 128, 4),
    ("token", 128, 128, 128, 4),
    ("channel", 64, 64, 128, 16),
    ("channel", 64, 64, 64, 4),
    ("channel", 64, 64, 256, 4),
)
BASELINE = ("token", 128, 128, 128, 4)  # of 16 bits
EXACT = ("float16", "bfloat16")

REGISTERS = 65536  # of a multiprocessor, from sm_80 to sm_120
LATENCY = 800e-9  # seconds from a load to its bytes, memory busy: an upper estimate


def bytes_under_way(row):
    """What the warps of v5 that fit one multiprocessor wait for at once: a stage each,
    64 tokens, or 16 of a cache in full precision."""
    registers = -(-row["registers"] // 8) * 8  # given out in eights, to 32 lanes
    warps = REGISTERS // (32 * registers)
    return warps * row["step_bytes"] // (4 if row["bits"] == 16 else 1)


#     bytes = bandwidth / multiprocessors * latency
def bytes_to_cover(name):
    """Bytes that each multiprocessor must have under way for all of the bandwidth."""
    found = device(name)
    return found.bandwidth / found.sms * LATENCY


def rows(settings=SETTINGS, bits=BITS, versions=tuple(KERNELS), exact=EXACT[:1]):
    """A dict for each version, setting, number of bits and architecture.

    exact : types of what is in full precision.
    """
    return [
        row
        for version in versions
        for setting in settings
        for b in bits
        for numbers in exact
        for arch in ARCHITECTURES
        if (row := _row(version, setting, b, numbers, arch))
    ]


def baselines(versions=tuple(KERNELS)):
    """The rows of 16 bits."""
    return rows((BASELINE,), (16,), versions, EXACT)


def _row(version, setting, bits, exact, arch):
    """None for what the version does not do."""
    per, G, value_G, D, ratio = setting
    key = Scheme(bits, per, G, "asymmetric") if bits < 16 else NUMBERS[exact]
    value = Scheme(bits, "token", value_G, "asymmetric") if bits < 16 else key
    layout = PageLayout(key, value, D)
    size = tensor_cores.stage_bytes(layout) * tensor_cores.STAGES
    if version == "v5" and size > tensor_cores.MOST_SHARED:
        return None
    source = tensor_cores.VERSIONS[version].source
    compiled = tensor_cores.constants(version, layout, ratio, exact=C_TYPES[exact])
    found = facts_of(source, compiled, arch)[KERNELS[version]]
    loop, nbytes, steps = main_loop(found), 4 * layout.words, layout.steps
    return {
        "kernel": KERNELS[version],
        "bits": bits,
        "keys_per": per,
        "G": G,
        "value_G": value_G,
        "D": D,
        "ratio": ratio,
        "exact": exact,
        "arch": arch,
        "registers": found.registers,
        "spills": found.spills,
        "loop_spills": static.count(loop, "LDL", "STL"),
        "shared_bytes": found.shared,
        "loop_instructions": len(loop),
        "loop_barriers": static.count(loop, "BAR"),
        "loop_wide_loads": wide_loads(loop),
        "loop_other_loads": static.count(loop, "LDG", "LDGSTS") - wide_loads(loop),
        "flops_per_byte": round(FLOPS * static.count(loop, "HMMA") * steps / nbytes, 1),
        "step_bytes": nbytes * STEP // layout.tokens,
        "instructions_per_byte": round(32 * len(loop) * steps / nbytes, 3),
    }


def main_loop(facts):
    """The opcodes of the longest innermost loop that uses tensor cores."""
    loops = [s for s in facts.loops if static.count(facts.code[slice(*s)], "HMMA")]
    inner = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)
    ]
    return facts.code[slice(*max(inner, key=lambda loop: loop[1] - loop[0]))]


def wide_loads(loop):
    """Loads of 16 bytes from global memory, into registers or shared memory."""
    return sum(op.startswith(("LDG.", "LDGSTS.")) and ".128" in op for op in loop)


def issue_share(instructions_per_byte, name):
    """Of the instructions that a device can start while its memory delivers a byte."""
    return instructions_per_byte / device(name).instructions_per_byte


#     instructions: per byte * bandwidth / issue rate     tensor cores: likewise
def shares(row, name):
    """What a device needs for a byte, over the time in which its memory delivers it."""
    found = device(name)
    bandwidth = found.copy_bandwidth or found.bandwidth
    return {
        "memory": 1.0,
        "instructions": issue_share(row["instructions_per_byte"], name),
        "tensor cores": row["flops_per_byte"] * bandwidth / found.fp16_flops,
    }


def limit(row, name):
    """The largest of `shares`: what binds."""
    found = shares(row, name)
    return max(found, key=found.get)


def cells(bits=(16, *BITS), archs=ARCHITECTURES):
    """Lines of a table: titles, then a row for each kernel, bits and architecture.

    For a device that runs this code: its share of issue slots, and what binds.
    Predicted, not measured.
    """
    titles = ["kernel", "bits", "arch", "registers", "spills", "16 B", "instr/byte"]
    lines = [[*titles, *DEVICES]]
    found = {tuple(row[name] for name in KEY): row for row in recorded()[0]}
    for kernel in KERNELS.values():
        for b in bits:
            setting = BASELINE if b == 16 else SETTINGS[0]
            rows = (found[kernel, b, *setting, EXACT[0], arch] for arch in archs)
            lines += map(_cells, rows)
    return lines


def _cells(row):
    fields = ("bits", "arch", "registers", "spills", "loop_wide_loads")
    devices = (
        f"{issue_share(row['instructions_per_byte'], name):.0%} {limit(row, name)}"
        if arch == row["arch"]
        else ""
        for name, arch in DEVICES.items()
    )
    numbers = (str(row[field]) for field in fields)
    return [row["kernel"], *numbers, f"{row['instructions_per_byte']:.2f}", *devices]


def markdown():
    """`cells` for README.md."""
    titles, *lines = cells()
    lines = [[f"`{name}`", *rest] for name, *rest in lines]
    rule = ["---"] + ["---:"] * (len(titles) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, rule, *lines])


def recorded():
    """(rows, version of NVRTC)"""
    found, header = read_table(FILE)
    return found, header["nvrtc"]


def main():
    command = "python -m kvq.kernels.budgets.tensor_cores"
    write_table(
        FILE, rows() + baselines(), {"nvrtc": nvrtc.version(), "command": command}
    )


if __name__ == "__main__":
    main()
