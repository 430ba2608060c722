"""What the tensor-core kernels cost in machine code: `tensor_cores.csv`.

    rows()      compile, read the main loop
    LIMITS      instructions per byte that the kernels are built to stay below
    markdown()  what they are, and the share of the issue slots of some devices

The main loop takes one step of 64 tokens. A lane's instructions for a step, times 32
lanes, over the bytes of the step in memory are its instructions per byte: codes, scales
and zeros. A device can start so many instructions for each byte that its memory
delivers (`kvq.hardware`); what a loop needs of that is its share of the issue slots.
All instructions of the loop count, also those that few steps reach.

v5 spills at D = 256, outside of its main loop.

`python -m kvq.kernels.budgets.tensor_cores` records again.
"""

from pathlib import Path

from kvq.hardware import device
from kvq.kernels import static
from kvq.kernels.decode import tensor_cores
from kvq.kernels.launch import nvrtc
from kvq.kernels.pages import PageLayout
from kvq.kernels.report import facts_of
from kvq.scheme import Scheme
from kvq.tables import read_table, write_table

FILE = Path(__file__).with_name("tensor_cores.csv")
ARCHITECTURES = (80, 90)
BITS = (8, 4, 2)
LIMITS = {8: 1.9, 4: 3.6, 2: 5.0}  # D = 128, keys per channel, G = 64, up to 8 heads
# Device: whose code it would run; that of an RTX 4090 is taken to be that of sm_80.
DEVICES = {"H200": 90, "H100-SXM": 90, "A100-80GB": 80, "RTX-4090": 80}
KEY = ("kernel", "bits", "keys_per", "G", "value_G", "D", "ratio", "arch")
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


def rows(archs=ARCHITECTURES, settings=SETTINGS, bits=BITS, versions=tuple(KERNELS)):
    """A dict for each version, setting, number of bits and architecture."""
    return [
        row
        for version in versions
        for setting in settings
        for b in bits
        for arch in archs
        if (row := _row(version, setting, b, arch))
    ]


def _row(version, setting, bits, arch):
    """None for what the version does not do."""
    per, G, value_G, D, ratio = setting
    key = Scheme(bits, per, G, "asymmetric")
    layout = PageLayout(key, Scheme(bits, "token", value_G, "asymmetric"), D)
    size = tensor_cores.stage_bytes(layout) * tensor_cores.STAGES
    if version == "v5" and size > tensor_cores.MOST_SHARED:
        return None
    source = tensor_cores.VERSIONS[version].source
    compiled = tensor_cores.constants(version, layout, ratio)
    found = facts_of(source, compiled, arch)[KERNELS[version]]
    loop, nbytes = main_loop(found), 4 * layout.words // layout.steps
    return {
        "kernel": KERNELS[version],
        "bits": bits,
        "keys_per": per,
        "G": G,
        "value_G": value_G,
        "D": D,
        "ratio": ratio,
        "arch": arch,
        "registers": found.registers,
        "spills": found.spills,
        "loop_spills": static.count(loop, "LDL", "STL"),
        "shared_bytes": found.shared,
        "loop_instructions": len(loop),
        "loop_barriers": static.count(loop, "BAR"),
        "loop_wide_loads": wide_loads(loop),
        "loop_other_loads": static.count(loop, "LDG", "LDGSTS") - wide_loads(loop),
        "step_bytes": nbytes,
        "instructions_per_byte": round(32 * len(loop) / nbytes, 3),
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


def markdown():
    """The shares of the issue slots, in percent: predicted, not measured."""
    titles = ["kernel", "bits", "instructions per byte", *DEVICES]
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1)]
    found = {tuple(row[name] for name in KEY): row for row in recorded()[0]}
    for kernel in KERNELS.values():
        for bits in BITS:
            cost = {
                arch: found[kernel, bits, *SETTINGS[0], arch]["instructions_per_byte"]
                for arch in ARCHITECTURES
            }
            shares = (issue_share(cost[arch], name) for name, arch in DEVICES.items())
            lines.append(
                [
                    *(f"`{kernel}`", str(bits)),
                    " / ".join(f"{cost[arch]:.2f}" for arch in ARCHITECTURES),
                    *(f"{share:.0%}" for share in shares),
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def recorded():
    """(rows, version of NVRTC)"""
    found, header = read_table(FILE)
    return found, header["nvrtc"]


def main():
    command = "python -m kvq.kernels.budgets.tensor_cores"
    write_table(FILE, rows(), {"nvrtc": nvrtc.version(), "command": command})


if __name__ == "__main__":
    main()
