"""The picture of the rooms in the guide is that of the imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


def test_the_picture_of_the_rooms_is_up_to_date(tmp_path):
    line = [sys.executable, ROOT / "scripts" / "rooms", "-o", tmp_path / "rooms.svg"]
    subprocess.run(line, check=True, timeout=SECONDS)
    drawn, kept = ((folder / "rooms.svg").read_text() for folder in (tmp_path, ROOT / "scripts" / "pictures"))
    assert drawn == kept, "run scripts/rooms"
