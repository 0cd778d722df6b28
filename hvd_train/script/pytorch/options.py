"""Texts of an optimizer's options, to compare between ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def text_of(value: Any) -> str:
    """Convert an optimizer's option to text that is the same in each process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(k)}: {text_of(x)}' for k, x in value.items())}}}"
    # The text of functions and objects contains their address.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def rate_of(group: Mapping[str, Any]) -> str:
    """Convert a group's learning rate to text. It is None if the optimizer chooses it (Adafactor)."""
    rate = group.get("lr")
    return "none" if rate is None else str(float(rate))
