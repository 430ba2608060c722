"""One table of devices: memory, bandwidth and arithmetic, each with its source.

Datasheet numbers are ceilings that nothing reaches; `copy_bandwidth` is what a
plain copy really moved, where somebody measured it.

Vendors write GB. For memory they mean 2^30 bytes: an A100 "80 GB" has 80 GiB, which
is 85.9e9 bytes. For bandwidth they mean 10^9 bytes per second.
"""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30

# Lanes of 32-wide instructions that a multiprocessor starts per clock: 4 schedulers,
# one instruction each (CUDA C++ Programming Guide, compute capability 7.x to 12.x).
LANES_PER_CLOCK = 4 * 32


@dataclass(frozen=True)
class Device:
    """What one device can hold and do.

    name : as `device()` finds it.
    memory : bytes on the label, the vendor's GB read as GiB.
    usable : bytes that the driver reports in total (nvidia-smi), before any program
        has taken some. Error correction (L4, L40S, T4) and firmware have their share.
    bandwidth : bytes/s of the memory, datasheet.
    copy_bandwidth : bytes/s read plus written by a measured copy, or None.
    sms : multiprocessors. clock : Hz, the highest boost clock.
    fp16_flops : FLOP/s of the tensor cores, dense fp16 with fp32 accumulation.
    l2 : bytes of L2 cache.
    source : where the numbers come from.
    """

    name: str
    memory: int
    usable: int
    bandwidth: float
    copy_bandwidth: float | None
    sms: int
    clock: float
    fp16_flops: float
    l2: int
    source: str

    @property
    def issue_rate(self):
        """Lane instructions per second: sms * 128 * clock."""
        return self.sms * LANES_PER_CLOCK * self.clock

    @property
    def instructions_per_byte(self):
        """Lane instructions the device can start per byte its memory delivers.

        A kernel that needs more is limited by instructions, not by bandwidth.
        """
        return self.issue_rate / (self.copy_bandwidth or self.bandwidth)


# One row per device:
# name, GB on the label, MiB the driver reports, GB/s, GB/s of a measured copy,
# multiprocessors, boost GHz, fp16 TFLOP/s, MB of L2, source
# fmt: off
_TABLE = (
    ("A100-40GB", 40,  40960, 1555, None, 108, 1.410, 312.0, 40,
     "A100 datasheet (SXM4 40 GB), Ampere GA100 whitepaper"),
    ("A100-80GB", 80,  81920, 2039, None, 108, 1.410, 312.0, 40,
     "A100 datasheet (SXM4 80 GB), Ampere GA100 whitepaper"),
    ("H100-SXM",  80,  81559, 3350, None, 132, 1.980, 989.4, 50,
     "H100 datasheet (SXM5), Hopper whitepaper"),
    ("H200",     141, 143771, 4800, 4300, 132, 1.980, 989.4, 60,
     "H200 datasheet (SXM), Hopper whitepaper; measured: L2 as the driver reports it, "
     "a copy of 8.6 GB in 2.0 ms (PyTorch 2.11, driver 580)"),
    ("RTX-3090",  24,  24576,  936, None,  82, 1.695,  71.0,  6,
     "Ampere GA102 whitepaper"),
    ("RTX-4090",  24,  24564, 1008, None, 128, 2.520, 165.2, 72,
     "Ada whitepaper"),
    ("RTX-5090",  32,  32607, 1792, None, 170, 2.407, 209.5, 96,
     "RTX Blackwell whitepaper"),
    ("A6000",     48,  49140,  768, None,  84, 1.800, 154.8,  6,
     "RTX A6000 datasheet, Ampere GA102 whitepaper; memory with error correction off"),
    ("L4",        24,  23034,  300, None,  58, 2.040, 121.0, 48,
     "L4 datasheet"),
    ("L40S",      48,  46068,  864, None, 142, 2.520, 362.05, 96,
     "L40S datasheet, Ada whitepaper"),
    ("T4",        16,  15360,  320, None,  40, 1.590,  65.0,  4,
     "T4 datasheet, Turing whitepaper"),
)
# fmt: on


def _device(name, gb, mib, gb_s, copy_gb_s, sms, ghz, tflops, l2_mb, source):
    """A row of the table in bytes, seconds and hertz."""
    return Device(
        name=name,
        memory=gb * GIB,
        usable=mib * MIB,
        bandwidth=gb_s * 1e9,
        copy_bandwidth=copy_gb_s and copy_gb_s * 1e9,
        sms=sms,
        clock=ghz * 1e9,
        fp16_flops=tflops * 1e12,
        l2=l2_mb * MIB,
        source=f"NVIDIA {source}; driver's memory: nvidia-smi",
    )


DEVICES = {row[0]: _device(*row) for row in _TABLE}


def device(name_or_device):
    """A `Device`, given itself or its name; case, spaces and hyphens do not matter.

    Raises ValueError that lists the valid names.
    """
    if isinstance(name_or_device, Device):
        return name_or_device
    wanted = _plain(name_or_device)
    for name, found in DEVICES.items():
        if _plain(name) == wanted:
            return found
    raise ValueError(f"unknown device {name_or_device!r}; valid: {', '.join(DEVICES)}")


def _plain(name):
    return str(name).lower().translate(str.maketrans("", "", " -_"))
