"""``scripts/figures`` on a small package that breaks each rule, and on this repository."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SECONDS
from tests.rooms.test_arrows import ROOMS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "figures"
FILES = {
    "hvd_train/__init__.py": "",
    "hvd_train/data/__init__.py": '"""The data."""\n',
    # Up to a higher room; and a circle, closed by an import for types alone and one within a function.
    "hvd_train/data/loader.py": '''"""Of the loader."""
from typing import TYPE_CHECKING

from hvd_train.core.loop import Trainer

if TYPE_CHECKING:
    from hvd_train.data import order
''',
    "hvd_train/data/order.py": '''"""What orders samples."""
# A reason.
one = 1  # behind code: no line of its own


def own_order(given, part):
    """Within an epoch."""
    from hvd_train.data.loader import Trainer

    return ", ".join(part)
''',
    "hvd_train/core/loop.py": '"""The loop."""\n\n\nclass Board:\n' + "    x = 1\n" * 400,
    "hvd_train/core/pt_long.py": '"""Train."""\n\n\ndef train():\n' + "    return 0\n" * 60,
    "hvd_train/guide/one.md": "Your own model is found by `own` name.\n\n```yaml\nown: found\n```\n\n"
    + "Plain words stand here. " * 5,
    "tests/rooms/test_arrows.py": 'ROOMS = {"data": 1, "core": 2, "__init__": 0}\n',
}


@pytest.fixture
def rows(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = runpy.run_path(str(SCRIPT))
    return {title: (count, places) for title, count, _, places in script["figures"](script["Checkout"](tmp_path))}


def test_each_rule_is_counted(rows):
    assert rows["files over 400 lines"] == ("1", ["hvd_train/core/loop.py 404"])
    assert rows["functions over 60 lines"] == ("1", ["hvd_train/core/pt_long.py:4 train 61"])
    assert rows["circles between modules"] == ("1", ["hvd_train.data.loader <-> hvd_train.data.order"])
    assert rows["arrows up between rooms"] == ("1", ["hvd_train.data.loader imports hvd_train.core.loop"])
    words = rows['docstrings that begin with "What" or a preposition']
    assert words == ("3", ["of 1, what 1, within 1"])
    # own_order, given, Board, pt_long; the text's join is no name of this code.
    assert rows["names with an old word"][0] == "4"
    count, _ = rows["comment lines in 100 of code"]
    assert count == f"{100 / sum(len(code_lines(text)) for text in FILES.values()):.1f}"
    assert rows["old words in 1000 of the guide"] == (f"{1000 * 2 / 27:.1f}", ["found 1, own 1"])


def code_lines(text: str) -> list[str]:
    """The lines of code of the files above, where a docstring takes one line."""
    if not text.startswith('"""'):
        return []
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(('"""', "#"))]


def test_this_repository(tmp_path):
    """The table names every count, and the rooms are those of the test of the imports; a wrong folder is refused."""
    script = runpy.run_path(str(SCRIPT))
    assert script["Checkout"](ROOT).rooms == ROOMS
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert "\narrows up between rooms                                  0   goal 0\n" in done.stdout
    wrong = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: there is no package hvd_train in ")
