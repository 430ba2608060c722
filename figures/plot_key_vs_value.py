"""At equal bits, keys per token hurt the output most; keys per channel do not.

A smaller error of the stored numbers need not be a smaller error of the output:
values per channel are stored better than values per token and yet give a worse
output. Token 0 alone turns it round here: it takes more than a third of the weight,
and its small values share their scales with larger ones. (Layer 0, which ignores
token 0, is the exception.)
"""

from kvq import plots, study
from kvq.samples import real_kv

NAME = "key_vs_value"
SOURCE = "SmolLM2-135M, layer 15, 512 tokens, 9 x 64 queries; asymmetric, groups of 32"


def data():
    return study.key_vs_value(real_kv())


def finding(table):
    key_token, key_channel, value = (
        plots.pick(table, tensor=tensor, per=per, bits=4)[0]["output_error"]
        for tensor, per in (("K", "token"), ("K", "channel"), ("V", "token"))
    )
    return (
        f"4 bits: quantizing keys per token moves the output by "
        f"{100 * key_token:.1f} %, keys per channel by {100 * key_channel:.1f} %, "
        f"values per token by {100 * value:.1f} %"
    )


def draw(table, path_stem):
    plots.save(plots.figure("key-vs-value", table, finding(table), SOURCE), path_stem)
