"""Which layers ``model.recompute`` chooses, for every front-end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from hvd_train.errors import ConfigError, listing

WHERE = "model.recompute"
OTHER_VALUES = "gives other values when backward computes it again: it draws numbers, or keeps a state, of its own"
WITHOUT = "choose others by patterns of their names"


def chosen(layers: Collection[str], patterns: Sequence[str] | bool, blocks: Sequence[str]) -> list[str]:
    """Return the names of the layers that match a pattern, or ``blocks`` if ``patterns`` is True.

    A layer within another chosen one is left out.

    Raises ConfigError if a pattern matches nothing, or if there are no blocks.
    """
    listed = () if isinstance(patterns, bool) else patterns
    if not listed and not blocks:
        what = f"the model has no repeated blocks; it has the layers {listing(sorted(layers))}"
        raise ConfigError(what, where=WHERE, fix="give patterns of the names of those to compute again")
    for pattern in listed:
        if not any(fnmatchcase(name, pattern) for name in layers):
            what = f"{pattern!r} matches none of the layers {listing(sorted(layers))}"
            raise ConfigError(what, where=WHERE)
    names = [n for n in layers if any(fnmatchcase(n, p) for p in listed)] if listed else list(blocks)
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
