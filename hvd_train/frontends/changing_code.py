"""Whether the code of a model may change weights by itself: in memory that ranks share, each would make the change."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

# Packages whose code changes no weights: ours, and Python's classes from which others are derived.
HARMLESS = ("hvd_train", "builtins", "abc", "typing")
INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]


def changing_code(code: Iterable[Any], harmless: Iterable[str], words: re.Pattern[str]) -> str:
    """Return the first module of these that has one of the words, or no source; "": none has.

    ``code``: classes, functions and modules; modules of the user that they import are read, too. ``harmless``: packages
    of the framework.
    """
    packages, read = {*HARMLESS, *harmless}, set[str]()
    parts = [part for one in code for part in (one.__mro__ if isinstance(one, type) else [_wrapped(one)])]
    names = [_module(part) for part in parts]
    while names:
        if (name := names.pop(0)) in read or name.partition(".")[0] in packages:
            continue
        read.add(name)
        try:
            found = words.search(inspect.getsource(sys.modules[name]))
        except (KeyError, OSError, TypeError):
            return name
        if found:
            return f"{name} ({found.group()})"
        names += [other for other in map(_module, vars(sys.modules[name]).values()) if _is_users(other)]
    return ""


def _module(part: Any) -> str:
    name = part.__name__ if isinstance(part, ModuleType) else getattr(part, "__module__", None)
    return str(name or type(part).__module__)


def _is_users(name: str) -> bool:
    """Return whether a module is a file outside of Python's and the installed packages."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool(file) and not any(file.startswith(path) for path in INSTALLED)


def of_layers(layers: Iterable[Any]) -> Iterator[Callable]:
    """Yield the class of each layer, and functions set on the layer itself (``layer.forward = mine``)."""
    for layer in layers:
        yield type(layer)
        yield from (x for x in vars(layer).values() if inspect.isroutine(x) or isinstance(x, partial))


def _wrapped(function: Callable) -> Callable:
    while isinstance(function, partial):
        function = function.func
    return function
