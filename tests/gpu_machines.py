"""Where `bench_gpu.py` runs: on a GPU, or on the PTX machine in its place."""

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
from gpu_check import header
from gpu_work import RATIO, D

from kvq.kernels.backends import import_problem
from kvq.kernels.decode import tensor_cores
from kvq.kernels.launch import nvrtc, ptxsim
from kvq.tables import provenance

ROOT = Path(__file__).resolve().parents[1]


class Simulator:
    """The PTX machine in the GPU's place: everything but times."""

    name = "dry run"

    def missing(self, launches):
        """None, or why the PTX of one of them cannot be had."""
        return ptxsim.missing(launches) and f"no compiler: {nvrtc.unavailable()}"

    def run(self, launches):
        ptxsim.run(launches, check=False)

    def ready(self, launches):
        return functools.partial(self.run, launches)

    def copy(self, nbytes):
        """(what starts it, bytes read and written)"""
        a, b = np.ones((2, nbytes), np.uint8)
        return functools.partial(np.copyto, a, b), 2 * nbytes

    def time(self, starts, rounds):
        """No times."""
        return [[] for _ in starts]

    def room(self):
        return 2**30

    def wait(self):
        pass

    clean = draw = wait

    def tensors(self, B, H_kv, T):
        """q (B, H_q, 1, D), k and v (B, H_kv, T, D), float16."""
        return torch_tensors("cpu", B, H_kv, T)

    def header(self):
        return provenance("make bench-gpu DRY=1") | {"device": "none: a dry run"}


class Card:
    """The GPU, by CuPy. L2 is cold: before each run other memory is read."""

    def __init__(self, name):
        import cupy

        self.name, self.cupy = name, cupy
        free, _ = cupy.cuda.runtime.memGetInfo()
        # Long enough to read that the next kernel is in the queue before it ends, so
        # that no time of the host is measured. Read, not written: lines that were
        # written would go back to memory while the next kernel runs.
        self.other = cupy.ones(min(2**30, free // 8) // 4, cupy.float32)
        self.sum = cupy.zeros((), cupy.float32)

    def missing(self, launches):
        """None, or why the GPU cannot run them."""
        capability = int(self.cupy.cuda.Device().compute_capability)
        sources = {version.source for version in tensor_cores.VERSIONS.values()}
        if capability < 80 and any(one.source in sources for one in launches):
            return "compute capability 8.0 is needed"
        return None

    def run(self, launches):
        from kvq.kernels.launch import cupy

        cupy.run(launches)

    def ready(self, launches):
        from kvq.kernels.launch import cupy

        loaded = cupy.load(launches)

        def start():
            for launch, args in loaded:
                cupy.start(launch, args)

        return start

    def copy(self, nbytes):
        """(what starts it, bytes read and written)"""
        a, b = (self.cupy.ones(nbytes, self.cupy.uint8) for _ in range(2))
        return functools.partial(self.cupy.copyto, a, b), 2 * nbytes

    def time(self, starts, rounds):
        """[seconds of each round] for each of `starts`, which take turns."""
        event, found = self.cupy.cuda.Event, []
        for _ in range(rounds):
            for start in starts:
                self.other.sum(out=self.sum)
                begin, end = event(), event()
                begin.record()
                start()
                end.record()
                found.append((begin, end))
        self.wait()
        seconds = [self.cupy.cuda.get_elapsed_time(*pair) / 1e3 for pair in found]
        return [seconds[i :: len(starts)] for i in range(len(starts))]

    def room(self):
        """Bytes that are free, less a tenth."""
        return 0.9 * self.cupy.cuda.runtime.memGetInfo()[0]

    def wait(self):
        self.cupy.cuda.get_current_stream().synchronize()

    def clean(self):
        """Give memory back: ours, and PyTorch's."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def tensors(self, B, H_kv, T):
        """q (B, H_q, 1, D), k and v (B, H_kv, T, D), float16."""
        return torch_tensors("cuda", B, H_kv, T)

    def header(self):
        facts = header(self.name) | {"command": "make bench-gpu"}
        return facts | {"clocks": "as the driver set them", "L2": "cold"}

    def draw(self):
        """The figures, where matplotlib is installed."""
        if reason := import_problem("matplotlib"):
            return print(f"no figure is drawn: {reason}")
        command = [sys.executable, ROOT / "figures" / "make.py", "gpu_decode"]
        subprocess.run(command, cwd=ROOT)


def torch_tensors(device, B, H_kv, T):
    import torch

    torch.manual_seed(0)
    shapes = (B, H_kv * RATIO, 1, D), (B, H_kv, T, D), (B, H_kv, T, D)
    return [torch.randn(s, dtype=torch.float16, device=device) for s in shapes]
