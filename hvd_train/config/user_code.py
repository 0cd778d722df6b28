"""The user's code that the configuration names, as ``package.module:function`` or passed to ``hvd_train.fit``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_train.errors import ConfigError, TrainError

PACKAGE = Path(__file__).parents[1]
NOT_OF_USER = tuple(
    f"{folder}{os.sep}" for folder in (PACKAGE, *(PACKAGE.parent / zoo for zoo in ("pt_models", "tf_models")))
)
TRACED = "__autograph_generated_file"  # TensorFlow's own copy of a function
PASSED_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # to ``hvd_train.fit``, while it runs
_folder: list[str] = []  # the configuration's ``code_dir``


def look_in(folder: str | None) -> None:
    """Look for the user's modules in this folder (``code_dir``), then in the current one."""
    _folder[:] = [folder] if folder else []


def _places() -> list[str]:
    return list(dict.fromkeys([*_folder, os.getcwd()]))


def user_module(name: str, where: str, kind: type[TrainError] = ConfigError) -> ModuleType:
    """Import the module of ``package.module:function``; raises ``kind`` if it cannot be imported."""
    module = name.partition(":")[0]
    # A console script has its own folder on the path, and not the one where the user stands.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if _folder and sys.path[0] != _folder[0]:
        sys.path.insert(0, _folder[0])
    try:
        return importlib.import_module(module)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise kind(f"cannot be imported: {error.msg}, {place}", where=where) from error
    except (ImportError, ValueError) as error:
        what, fix = f"cannot be imported: {error}", advice_for_passed(name, where)
        # An import that fails within the module is a mistake of the module: only its own name missing is a wrong place.
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if missing and not fix:
            what = f"there is no module '{module}'"
            fix = f"it was looked for in {', then in '.join(_places())}; start there where it lies, or set code_dir"
        raise kind(what, where=where, fix=fix) from error


def user_frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are in the user's code: neither in this package nor in a library."""
    libraries = tuple(f"{Path(path).resolve()}{os.sep}" for path in set(sysconfig.get_paths().values()))
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__ if error else None)
        # What has no whole path is no file: "<frozen importlib>", "pyarrow/error.pxi".
        if os.path.isabs(frame.filename)
        and not frame.filename.startswith((*NOT_OF_USER, *libraries))
        and TRACED not in frame.filename
    ]


def user_place(error: BaseException | None) -> str:
    """Return ``file:line`` of the user's code that raised an error or, before it, its cause; "" if none did."""
    if error is None:
        return ""
    frames = user_frames(error)
    return user_place(error.__cause__) or (f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")


def source_of(name: str) -> list[Path]:
    """Return the files and folders from which ``package.module:function`` would be imported; none of a library.

    Nothing is imported, because the caller asks before it trusts the code.
    """
    # PathFinder finds a module without running any of it.
    top, *rest = name.partition(":")[0].split(".")
    if top in sys.stdlib_module_names:
        return []
    spec = PathFinder.find_spec(top, [*_places(), *sys.path])
    if spec is None:
        return []
    folders = [Path(x) for x in spec.submodule_search_locations or []]
    inner = [folder.joinpath(*rest).with_suffix(".py") for folder in folders if rest]
    sources = [*([Path(spec.origin)] if spec.origin else []), *folders, *(x for x in inner if x.exists())]
    libraries = [Path(path) for path in sysconfig.get_paths().values()]
    return [] if any(x.is_relative_to(library) for x in sources for library in libraries) else sources


def user_function(name: str, where: str, kind: type[TrainError] = ConfigError) -> Callable[..., Any]:
    """Return the function of this name; raises ``kind`` if there is none."""
    # Passed in Python: the name may be that of a notebook or a lambda, which no import could give.
    if name in PASSED_FUNCTIONS:
        return PASSED_FUNCTIONS[name]
    module, function = user_module(name, where, kind), name.partition(":")[2]
    try:
        return getattr(module, function)
    except AttributeError as error:
        fix = advice_for_passed(name, where) or advice_for_misspelled(module, function)
        raise kind(f"{place_of(module, name)} has no function '{function}'", where=where, fix=fix) from error


def advice_for_misspelled(module: ModuleType, name: str) -> str:
    """Return the name in the module that ``name`` is most like; "" if none is."""
    near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], 1)
    return f"did you mean '{near[0]}'?" if near else ""


def place_of(module: ModuleType, name: str) -> str:
    """Return the module's file, for messages: another module of the same name may come first on the path."""
    return getattr(module, "__file__", None) or name.partition(":")[0]


def advice_for_passed(name: str, where: str) -> str:
    """Return what to do about code that only a script or notebook had, at its key ``where``; "" for other code."""
    if not name.startswith("__main__:") and "<" not in name:
        return ""
    key = where.partition(":")[0]
    return f"it was handed over in Python; put it into a module of its own and name it, --set {key}=package.module:name"
