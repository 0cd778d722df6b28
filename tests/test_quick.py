"""``scripts/test --quick``: its files can be imported, and pass, where no framework is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SECONDS

CODE = """
import sys, pytest

class NotInstalled:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensorflow", "keras", "horovod"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled)
sys.exit(pytest.main(["--quick", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--collect-only"], id="imports"),
        pytest.param(["-n", "2"], id="runs", marks=pytest.mark.long("the same tests run by themselves")),
    ],
)
def test_without_a_framework(words):
    line = [sys.executable, "-c", CODE, *words]
    root = Path(__file__).parents[1]
    run = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=4 * SECONDS, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
