"""Detection of nested steps: an optimizer that calls ``super().step()`` may run its hooks twice."""

from __future__ import annotations

import sys
from typing import Any


def is_running(frame: Any) -> bool:
    """Return whether ``frame`` is on the current call stack; False for None."""
    here: Any = sys._getframe()
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
