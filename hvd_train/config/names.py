"""Guess which of the known names a user meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

# Words of other tools whose nearest name by letters is something else ("gpu": "cpu").
SYNONYMS = {
    "gpu": "cuda", "acc": "accuracy", "keras": "tensorflow", "tf": "tensorflow", "learning_rate": "lr",
    "16": "16-mixed", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32", "float32": "32", "float64": "64",
}  # fmt: skip


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is meant: it differs in capitals, is a word of another tool, or is spelled similarly.

    ``cutoff``: the least similarity of two spellings, 0 to 1, as difflib counts it.
    """
    word, names = name.lower(), {other.lower(): other for other in known}
    for same in (word, SYNONYMS.get(word)):
        if same in names:
            return names[same]
    # difflib finds "rl" and "lr" too different: two letters that changed places are half of so short a word.
    for other in names:
        if sorted(other) == sorted(word):
            return names[other]
    close = difflib.get_close_matches(word, list(names), 1, cutoff)
    return names[close[0]] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the message for an unknown name: what may have been meant, and all names."""
    # A name within a longer one ("crop") is not similar enough for difflib.
    near = nearest(name, known) or next((other for other in known if name and name in other), None)
    return f"unknown '{name}'; {f'did you mean {near!r}? ' if near else ''}there are {', '.join(known)}"
