"""Whether the code of a model may change weights by itself: in memory that ranks share, each would make the change."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

# Packages whose code changes no weights: ours, and Python's classes from which others are derived.
HARMLESS = ("hvd_train", "builtins", "abc", "typing")


def changing_code(code: Iterable[Callable], harmless: Iterable[str], words: re.Pattern[str]) -> str:
    """Return the first module of these classes and functions that has one of the words, or no source; "": none has.

    ``harmless``: packages of the framework. Only the module itself is read, not what it imports.
    """
    packages = {*HARMLESS, *harmless}
    parts = [part for one in code for part in (one.__mro__ if isinstance(one, type) else [_wrapped(one)])]
    for name in dict.fromkeys(getattr(part, "__module__", None) or type(part).__module__ for part in parts):
        if name.partition(".")[0] not in packages:
            try:
                found = words.search(inspect.getsource(sys.modules[name]))
            except (KeyError, OSError, TypeError):
                return name
            if found:
                return f"{name} ({found.group()})"
    return ""


def of_layers(layers: Iterable[Any]) -> Iterator[Callable]:
    """Yield the classes of layers, and the functions that are attributes of a layer, such as another ``forward``."""
    for layer in layers:
        yield type(layer)
        yield from (x for x in vars(layer).values() if inspect.isroutine(x) or isinstance(x, partial))


def _wrapped(function: Callable) -> Callable:
    while isinstance(function, partial):
        function = function.func
    return function
