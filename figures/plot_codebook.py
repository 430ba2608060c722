"""At 4 bits the zero-point wins; levels made for Gaussian numbers lose on real keys.

Asymmetric integers have the smallest error everywhere, and store half a bit more. Of
those with one float16 scale, llama.cpp's iq4_nl leads. Lloyd-Max, scaled by the RMS,
clips the outliers of keys per token and comes last there.
"""

from kvq import plots, study
from kvq.samples import real_kv

NAME = "codebook"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens; 4 bits per code, groups of 32"


def data():
    return study.codebook(real_kv())


def finding(table):
    keys = {
        r["codebook"]: r["sqnr_db"] for r in plots.pick(table, tensor="K", per="token")
    }
    return (
        f"4-bit keys per token: {keys['asymmetric']:.1f} dB asymmetric, "
        f"{keys['iq4_nl']:.1f} iq4_nl, {keys['symmetric']:.1f} symmetric, "
        f"{keys['lloyd-max']:.1f} Lloyd-Max"
    )


def draw(table, path_stem):
    plots.save(plots.figure("codebook", table, finding(table), SOURCE), path_stem)
