"""Without torch or transformers: one line that says what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_is_named_with_what_installs_it(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import kvq, kvq.integrations\n"
        "try:\n    import kvq.integrations.transformers\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "needs torch and transformers >= 4.57" in done.stdout
    assert "pip install '.[hf]'" in done.stdout
