"""Options of an optimizer's groups as texts, which ranks compare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def text_of(value: Any) -> str:
    """Describe an optimizer's option as text that is the same in each process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(k)}: {text_of(x)}' for k, x in value.items())}}}"
    # Functions and objects show where they lie in this process' memory.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def rate_of(group: Mapping[str, Any]) -> str:
    """Describe a group's learning rate as text. It is None where the optimizer chooses it (Adafactor)."""
    rate = group.get("lr")
    return "none" if rate is None else str(float(rate))
