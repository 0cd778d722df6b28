"""Steps within steps: an optimizer that calls ``super().step()`` may run its hooks twice."""

from __future__ import annotations

import sys
from typing import Any


def is_running(frame: Any) -> bool:
    """Return whether a call, by its frame, is one of those within which this one is; False for None."""
    here: Any = sys._getframe()
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
