"""User code that the configuration names, as ``package.module:function`` or passed to ``hvd_train.fit``."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_train.config.names import nearest
from hvd_train.errors import ConfigError, TrainError, named_reason

PACKAGE = Path(__file__).parents[1]
NOT_OF_USER = tuple(
    f"{folder}{os.sep}" for folder in (PACKAGE, *(PACKAGE.parent / zoo for zoo in ("pt_models", "tf_models")))
)
TRACED = "__autograph_generated_file"  # TensorFlow's own copy of a function
PASSED_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # functions passed to ``hvd_train.fit``, while it runs
_folder: list[str] = []  # the configuration's ``code_dir``
_added: list[str] = []  # the entries of ``sys.path`` that are the user's folders


def look_in(folder: str | None) -> None:
    """Look for the user's modules in this folder (``code_dir``), then in the current one."""
    _folder[:] = [folder] if folder else []


def _places() -> list[str]:
    return list(dict.fromkeys([*_folder, os.getcwd()]))


def user_module(name: str, where: str, kind: type[TrainError] = ConfigError) -> ModuleType:
    """Import the module of ``package.module:function``; raises ``kind`` if it cannot be imported."""
    module = name.partition(":")[0]
    _extend_path()
    mine, installed = _find(module, _places()), _find(module, list(filter(is_library, sys.path)))
    if mine and installed and mine[-1].origin != installed[-1].origin:
        what = f"there are two modules '{module}': {mine[-1].origin} and the installed {installed[-1].origin}"
        raise kind(what, where=where, fix="rename yours")
    preferred = ModulesOf({module.partition(".")[0]}, _places())
    if mine and not installed:
        sys.meta_path.insert(0, preferred)
    try:
        return importlib.import_module(module)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise kind(f"cannot be imported: {error.msg}, {place}", where=where) from error
    except (ImportError, ValueError) as error:
        what, fix = f"cannot be imported: {error}", advice_for_passed(name, where)
        # An error within the module is the module's; only if its own name is not found, the path is wrong.
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if missing and not fix:
            what = f"there is no module '{module}'"
            fix = (
                advice_for_hidden(module)
                or f"it was looked for in {', then in '.join(_places())}; start there where it lies, or set code_dir"
            )
        raise kind(what, where=where, fix=fix) from error
    finally:
        if preferred in sys.meta_path:
            sys.meta_path.remove(preferred)


def _extend_path() -> None:
    """Let the user's modules import one another. Their folders come last on the path: a file there must not shadow the
    standard library, or a library that is loaded later."""
    for folder in _added:
        if folder in sys.path:
            sys.path.remove(folder)
    _added[:] = [folder for folder in _places() if folder not in sys.path]
    sys.path += _added


class ModulesOf:
    """A finder for ``sys.meta_path`` that finds the named modules in these folders, before any library.
    Several wheels leave packages called ``tests`` or ``tools`` behind."""

    def __init__(self, names: Collection[str], folders: Sequence[str]) -> None:
        self._names, self._folders = names, folders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, self._folders) if name in self._names else None


def _find(name: str, path: Sequence[str]) -> list[ModuleSpec]:
    """Find a module and the packages around it; [] also if the standard library has the first name."""
    return [] if name.partition(".")[0] in sys.stdlib_module_names else _specs(name, path)


def _specs(name: str, path: Sequence[str]) -> list[ModuleSpec]:
    """Find a module and the packages around it, outermost first, without running any of it; [] if one is missing."""
    specs: list[ModuleSpec] = []
    for part in name.split("."):
        # The part's own name: a dotted name would import the packages around it.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return []
        specs.append(spec)
        path = list(spec.submodule_search_locations or [])
    return specs


def is_library(path: str) -> bool:
    """Return whether a file or folder belongs to the standard library or to an installed package."""
    return any(Path(path).is_relative_to(library) for library in sysconfig.get_paths().values())


def user_frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are in the user's code: neither in this package nor in a library."""
    libraries = tuple(f"{Path(path).resolve()}{os.sep}" for path in set(sysconfig.get_paths().values()))
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__ if error else None)
        # Without an absolute path it is no file: "<frozen importlib>", "pyarrow/error.pxi".
        if os.path.isabs(frame.filename)
        and not frame.filename.startswith((*NOT_OF_USER, *libraries))
        and TRACED not in frame.filename
    ]


STANDS_IN = "STANDS_IN_FOR"  # what a module of this package has that takes the place of a library's


def failed_layer(error: BaseException) -> str:
    """Return the layer that raised in a user's model, if the model has only torch's layers; "" if none did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules: list[tuple[int, Any]] = [
        (place, module)
        for place, frame in enumerate(frames)
        if frame.f_code.co_name == "forward" and hasattr(module := frame.f_locals.get("self"), "named_modules")
    ]
    if not modules:
        return ""
    (start, model), (_, layer) = modules[0], modules[-1]
    ours = [frame for frame in frames[start:] if frame.f_code.co_filename.startswith(NOT_OF_USER)]
    if any(STANDS_IN not in frame.f_globals for frame in ours):
        return ""  # the error is in this package
    path = next((name for name, module in model.named_modules() if module is layer), "")
    shown = repr(layer) if "\n" not in repr(layer) else type(layer).__name__
    return f"in layer {path} of {type(model).__name__}: {shown}" if path else f"in {shown}"


def user_place(error: BaseException | None) -> str:
    """Return ``file:line`` in user code that raised an error or its cause; "" if there is none."""
    if error is None:
        return ""
    frames = user_frames(error)
    return user_place(error.__cause__) or (f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")


def source_of(name: str) -> list[Path]:
    """Return the files and folders from which ``package.module:function`` would be imported, except libraries.

    Nothing is imported, because the caller does not trust the code yet.
    """
    module = name.partition(":")[0]
    sources: list[str] = []
    for spec in _find(module, _places()) or _find(module, sys.path):
        sources += [*([spec.origin] if spec.origin else []), *(spec.submodule_search_locations or [])]
    return [] if any(map(is_library, sources)) else [Path(source) for source in sources]


@contextmanager
def user_errors(what: str, where: str, fix: str = "", kind: type[TrainError] = ConfigError) -> Iterator[None]:
    """Turn an exception of user code within the block into an error of ``kind``: ``WHAT: TYPE: MESSAGE``."""
    try:
        yield
    except kind:
        raise
    except Exception as error:
        raise kind(f"{what}: {named_reason(error)}", where=where, fix=fix) from error


def user_function(name: str, where: str, kind: type[TrainError] = ConfigError) -> Callable[..., Any]:
    """Import ``package.module:function``; raises ``kind`` if there is none."""
    # Passed in Python: a lambda or a function in a notebook cannot be imported.
    if name in PASSED_FUNCTIONS:
        return PASSED_FUNCTIONS[name]
    module, function = user_module(name, where, kind), name.partition(":")[2]
    try:
        return getattr(module, function)
    except AttributeError as error:
        raise no_function(module, name, function, where, kind) from error


def no_function(
    module: ModuleType, name: str, function: str, where: str, kind: type[TrainError] = ConfigError
) -> TrainError:
    """Make the error for a module that lacks a function; ``name``: ``package.module:function``."""
    fix = advice_for_passed(name, where) or advice_for_hidden(name) or advice_for_misspelled(module, function)
    return kind(f"{file_of(module, name)} has no function '{function}'", where=where, fix=fix)


def advice_for_hidden(name: str) -> str:
    """Return the advice to rename the user's module if Python itself has one of this name; else ""."""
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    mine = _specs(module, _places()) if top in sys.stdlib_module_names else []
    if not mine or not mine[-1].origin:  # a folder without Python files is no module
        return ""
    yours = mine[0].origin if len(mine) == 1 else next(iter(mine[0].submodule_search_locations or []))
    return f"Python itself has a module '{top}', which is taken instead of yours: rename {yours}"


def advice_for_misspelled(module: ModuleType, name: str) -> str:
    """Suggest the name in the module that is most similar to ``name``; "" if none is."""
    near = nearest(name, [key for key, value in vars(module).items() if callable(value)])
    return f"did you mean '{near}'?" if near else ""


def file_of(module: ModuleType, name: str) -> str:
    """Return the module's file for messages, because another module of the same name may come first on the path."""
    return getattr(module, "__file__", None) or name.partition(":")[0]


def advice_for_passed(name: str, where: str) -> str:
    """Return advice for a function that was passed from a script or notebook, at key ``where``; "" for others."""
    if not name.startswith("__main__:") and "<" not in name:
        return ""
    key = where.partition(":")[0]
    return f"it was handed over in Python; put it into a module of its own and name it, --set {key}=package.module:name"
