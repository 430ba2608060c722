"""`make bench-gpu`: how fast the kernels are on a GPU, beside those of other systems.

    check     every kernel gives the reference's result on a small case, or nothing is
              timed: exit code 1, and its name
    copy      a copy within the device's memory: the yardstick
    decode    v1 to v5, 8, 4 and 2 bits; v5 over float16, the same kernel without codes;
              those of `gpu_peers.py`, or a row that says why one is not there
    pack, dequant    all versions

Each time is the median of some rounds, between its quartiles. A round runs every kernel
of a scene once, each after L2 was filled with other memory. What a step must move is
counted once: codes, scales and zeros, or full-precision keys and values. Scenes come in
order of importance, until the next one would not fit into the time; rows say what was
left out.

Writes figures/data/decode_<device>.csv, and draws figures/gpu_decode. With --dry-run
the PTX machine takes the GPU's place, on tiny sizes: no times, and a folder of its own.
Exit codes: 0 measured, 1 a kernel is wrong or failed, 2 it has not run.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gpu_check import file_name
from gpu_machines import Card, Simulator
from gpu_peers import PEERS, prepared
from gpu_work import PAGES, RATIO, D, launches_of, wrong

from kvq.kernels import gpu_status
from kvq.kernels.backends import one_line
from kvq.kernels.cases import OPS
from kvq.kernels.decode import tensor_cores
from kvq.kernels.host import operation
from kvq.tables import write_table

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("op", "kernel", "bits", "B", "T", "H_kv", "H_q", "D", "nbytes")
TIMES = ("rounds", "seconds", "seconds_low", "seconds_high", "copy_percent")
BITS = (8, 4, 2)
NEWEST = "v5"  # of decode
LIMIT = 440  # seconds, of the 480 that a run may take: what has begun is finished
# What a scene is taken to need: seconds for a kernel, and for a byte of its data.
# Scenes of LARGE data show whether it is more.
KERNEL_SECONDS, BYTE_SECONDS, LARGE = 0.5, 1e-9, 1e8


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    copies : bytes. tokens : T of one sequence. batches : B, and the most tokens of
    all sequences. main : (B, T) that all kernels run. block : tokens of the data that
    is made; it is repeated.
    """

    copies: tuple
    tokens: tuple
    batches: tuple
    most: int
    main: tuple
    H_kv: int
    block: int
    rounds: int


FULL = Sizes(
    copies=(2**12, 2**20, 2**24, 2**27, 2**30),
    tokens=(512, 2048, 8192, 32768, 131072, 524288, 1048576),
    batches=(1, 8, 64),
    most=2**21,
    main=((8, 32768), (1, 131072)),
    H_kv=8,
    block=512,
    rounds=21,
)
TINY = Sizes(
    copies=(2**12, 2**16),
    tokens=(64, 128),
    batches=(1, 2),
    most=128,
    main=((1, 128),),
    H_kv=1,
    block=64,
    rounds=1,
)


@dataclass(frozen=True)
class Scene:
    """Kernels that take turns. kernels : (name, bits)."""

    op: str
    B: int
    T: int
    kernels: list


def main(argv=None):
    options = arguments(argv)
    if options.dry_run:
        machine, sizes = Simulator(), TINY
        folder = options.folder or Path(tempfile.mkdtemp(prefix="kvq-bench-"))
    else:
        available, what = gpu_status()
        if not available:
            print(f"bench-gpu has not run: no GPU to use ({what})", file=sys.stderr)
            return 2
        machine, sizes = Card(what), FULL
        folder = options.folder or ROOT / "figures" / "data"
    return bench(machine, sizes, folder, options.seconds)


def arguments(argv):
    parser = argparse.ArgumentParser(prog="bench_gpu.py", description="Time kernels.")
    parser.add_argument("--dry-run", action="store_true", help="no GPU, and no times")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="when to stop")
    parser.add_argument("--folder", type=Path, help="where the table goes")
    parser.usage = "bench_gpu.py [--dry-run] [--seconds N] [--folder PATH]"
    parser.error = lambda text: parser.exit(2, f"bench_gpu.py: {text}\n")
    options = parser.parse_args(argv)
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}; valid: more than 0")
    if options.folder and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}; valid: a folder that exists")
    return options


def bench(machine, sizes, folder, seconds):
    """Check, measure, write. Returns the exit code."""
    end = time.monotonic() + seconds
    for op, kernel, bits in progress(checked(sizes), "check"):
        reason = wrong(machine, op, kernel, bits)
        if reason:
            print(f"{op} {kernel}, {bits} bits, is wrong: {reason}", file=sys.stderr)
            return 1
    path, rows = folder / f"decode_{file_name(machine.name)}.csv", []
    header = machine.header()
    for more in timed(machine, sizes, end):
        rows += more
        write_table(path, finished(rows), header)
    rows = finished(rows)
    print(*table(rows), f"written to {path}", sep="\n")
    machine.draw()
    ours = [row for row in rows if row["kernel"] not in PEERS]
    return int(any(str(row["note"]).startswith("failed") for row in ours))


# --- what is measured -----------------------------------------------------------------
def scenes(sizes):
    """Scenes in order of importance; see `planned`."""
    newest = [(NEWEST, bits) for bits in (16, *BITS)]
    peers = [(name, peer[2]) for name, peer in PEERS.items()]
    ladder = {op: ladder_of(op) for op in OPS}
    B, T = sizes.main[0]
    every = [(b, t) for t in sizes.tokens for b in sizes.batches if b * t <= sizes.most]
    yield from (Scene("copy", 1, n, [("copy", 16)]) for n in sizes.copies)
    yield from (Scene("decode", *size, newest + peers) for size in sizes.main)
    yield from (Scene("decode", 1, t, newest + peers[:1]) for t in sizes.tokens)
    yield from (Scene(op, B, T, ladder[op]) for op in reversed(OPS))
    yield from (Scene("decode", *size, newest + peers[:1]) for size in every)
    for size in every:
        yield from (Scene("decode", *size, [kernel]) for kernel in ladder["decode"])


def ladder_of(op):
    """(version, bits) of an operation, the newest first."""
    more = {"decode": tensor_cores.VERSIONS, "pack": (PAGES,)}.get(op, ())
    versions = [*operation(op).VERSIONS, *more]
    return [(version, bits) for version in reversed(versions) for bits in BITS]


def planned(sizes):
    """The scenes, each kernel once at each size."""
    known, found = set(), []
    for scene in scenes(sizes):
        new = [(scene.op, scene.B, scene.T, *kernel) for kernel in scene.kernels]
        new = [key for key in dict.fromkeys(new) if key not in known]
        known.update(new)
        if new:
            kernels = [key[3:] for key in new]
            found.append(dataclasses.replace(scene, kernels=kernels))
    return found


def checked(sizes):
    """(op, kernel, bits) of our kernels, each once."""
    found = [
        (scene.op, *kernel)
        for scene in scenes(sizes)
        for kernel in scene.kernels
        if scene.op in OPS and kernel[0] not in PEERS
    ]
    return list(dict.fromkeys(found))


def timed(machine, sizes, end):
    """The rows of one scene after the other; noted is what would not end in time."""
    rates = [BYTE_SECONDS]
    for scene in progress(planned(sizes), "time"):
        size = sum(stored_bytes(sizes, scene, bits) for _, bits in scene.kernels)
        begin = time.monotonic()
        expected = KERNEL_SECONDS * len(scene.kernels) + max(rates) * size
        fits = begin + expected < end
        yield measured(machine, sizes, scene, None if fits else "left out: no time")
        if fits and size >= LARGE:
            rates.append((time.monotonic() - begin) / size)


def stored_bytes(sizes, scene, bits):
    """About as many bytes as the arrays of a kernel have."""
    if scene.op == "copy":
        return 2 * scene.T
    numbers = scene.B * scene.T * sizes.H_kv * D
    exact = {"decode": 0, "pack": 2, "dequant": 4}[scene.op]
    return numbers * ((bits + 1) / 8 * (2 if scene.op == "decode" else 1) + exact)


def measured(machine, sizes, scene, note):
    """A row for each kernel of a scene: its times, or a note that says why not."""
    machine.clean()
    rows, starts, room = [], [], machine.room()
    for kernel, bits in scene.kernels:
        size, start, nbytes, why = stored_bytes(sizes, scene, bits), None, None, note
        if why is None and size > room:
            why = "left out: no memory"
        if why is None:
            start, nbytes, why = ready(machine, sizes, scene, kernel, bits)
            room -= size
        rows.append(describe(sizes, scene, kernel, bits) | {"nbytes": nbytes})
        rows[-1]["note"] = why
        starts.append(start)
    running = [start for start in starts if start]
    times = iter(machine.time(running, sizes.rounds if running else 0))
    for row, start in zip(rows, starts, strict=True):
        row |= spread(next(times)) if start else {}
    return rows


def describe(sizes, scene, kernel, bits):
    """A row without numbers."""
    row = dict.fromkeys((*COLUMNS, *TIMES, "note"))
    row |= {"op": scene.op, "kernel": kernel, "bits": bits}
    if scene.op != "copy":
        row |= {"B": scene.B, "T": scene.T, "H_kv": sizes.H_kv, "D": D}
    if scene.op == "decode":
        row["H_q"] = sizes.H_kv * RATIO
    return row


def spread(times):
    """The median of some times, and their quartiles."""
    if not times:
        return {}
    low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
    return dict(zip(TIMES, (len(times), middle, low, high), strict=False))


def finished(rows):
    """The rows, with bandwidth in percent of the largest copy's.

    A small copy may end in L2: what it writes need not reach the memory.
    """
    copies = [r for r in rows if r["op"] == "copy" and r["seconds"]]
    largest = max(copies, key=lambda r: r["nbytes"], default=None)
    return [
        r | {"copy_percent": 100 * bandwidth(r) / bandwidth(largest)}
        if largest and r["seconds"]
        else r
        for r in rows
    ]


def bandwidth(row):
    """Bytes per second."""
    return row["nbytes"] / row["seconds"]


def ready(machine, sizes, scene, kernel, bits):
    """(what starts it, bytes it must move, None), or (None, None, why not)."""
    try:
        if scene.op == "copy":
            return *machine.copy(scene.T), None
        if kernel in PEERS:
            return prepared(machine, kernel, scene.B, sizes.H_kv, scene.T)
        size = scene.B, scene.T, sizes.H_kv, sizes.block
        launches, nbytes = launches_of(scene.op, kernel, bits, *size)
        reason = machine.missing(launches)
        if reason:
            return None, None, f"absent: {reason}"
        start = machine.ready(launches)
        start()
        machine.wait()
    except Exception as error:  # of any library: one line, and the run goes on
        return None, None, f"failed: {one_line(error)}"
    return start, nbytes, None


def progress(todo, title):
    """tqdm, where it is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return todo
    return tqdm(todo, title, unit="scene", leave=False)


# --- the table ------------------------------------------------------------------------
def table(rows):
    """The rows as lines of text: what was measured, then what was not."""
    titles = f"{'op':<8}{'kernel':<16}{'bits':>4}{'B':>4}{'T':>9}"
    yield titles + f"{'MB':>9}{'us':>10}{'copy':>7}"
    for row in rows:
        if row["note"] is None:
            yield line(row)
    for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
        them = [row for row in rows if row["note"] == note]
        names = dict.fromkeys(f"{r['op']} {r['kernel']}" for r in them)
        yield f"{note}: {len(them)} rows ({', '.join(names)})"


def line(row):
    shape = [row[name] or "" for name in ("B", "T")]
    seconds, percent = row["seconds"], row["copy_percent"]
    return (
        f"{row['op']:<8}{row['kernel']:<16}{row['bits']:>4}{shape[0]:>4}{shape[1]:>9}"
        f"{row['nbytes'] / 1e6:>9.2f}"
        f"{'' if seconds is None else format(1e6 * seconds, '.1f'):>10}"
        f"{'' if percent is None else format(percent, '.0f') + ' %':>7}"
    )


if __name__ == "__main__":
    sys.exit(main())
