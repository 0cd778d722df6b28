"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

# Other tools' names, for which the most similar name is a wrong guess ("gpu": "cpu").
SYNONYMS = {
    "gpu": "cuda", "acc": "accuracy", "keras": "tensorflow", "tf": "tensorflow", "learning_rate": "lr",
    "16": "16-mixed", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32", "float32": "32", "float64": "64",
}  # fmt: skip


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Guess the known name: in other capitals, under another tool's name, or with a similar spelling.

    ``cutoff``: the least similarity of two spellings, 0 to 1, as in difflib.
    """
    word, names = name.lower(), {other.lower(): other for other in known}
    for same in (word, SYNONYMS.get(word)):
        if same in names:
            return names[same]
    # Swapped letters ("rl" for "lr"), which difflib finds too different in short words.
    for other in names:
        if sorted(other) == sorted(word):
            return names[other]
    close = difflib.get_close_matches(word, list(names), 1, cutoff)
    return names[close[0]] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the message for an unknown name, with a suggestion and all names."""
    # A name within a longer one ("crop") is not similar enough for difflib.
    near = nearest(name, known) or next((other for other in known if name and name in other), None)
    return f"unknown '{name}'; {f'did you mean {near!r}? ' if near else ''}there are {', '.join(known)}"
