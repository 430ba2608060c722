"""What lessons ask of the kernels."""

import numpy as np
import pytest
from plain import uneven

from kvq import Scheme, quantize
from kvq.kernels import teach


def test_a_piece_of_source_ends_where_its_block_ends():
    text = teach.excerpt("kvq.cuh", "inline u32 read_code").splitlines()
    assert text[0].startswith("__device__ inline u32 read_code")
    assert text[-1] == "}"


def test_an_empty_line_inside_a_block_does_not_end_it():
    text = teach.excerpt("pack/v1_word_per_thread.cu", "void pack_v1(const X*")
    assert "\n\n" in text
    assert text.splitlines()[-1] == "}"
    assert "pack_v1_scales" not in text


def test_words_that_are_nowhere_are_named():
    with pytest.raises(ValueError, match=r"no line of kvq.cuh contains 'lost'"):
        teach.excerpt("kvq.cuh", "lost")


@pytest.mark.parametrize("language", teach.LANGUAGES)
def test_a_run_gives_the_result_and_a_report_of_each_kernel(language):
    x = uneven((2, 5, 64)).astype(np.float16)
    scheme = Scheme(4, "token", 32)
    packed, reports = teach.run("pack", "v1", x, scheme, language=language)
    assert packed.codes.tobytes() == quantize(x, scheme).codes.tobytes()
    assert len(reports) == 2  # scales, then codes
    assert all(report.instructions > 0 for report in reports)


def test_an_unknown_language_is_refused():
    with pytest.raises(ValueError, match="language='rust'; valid: c, numba"):
        teach.run("pack", "v1", uneven((1, 2, 8)), Scheme(4), language="rust")
