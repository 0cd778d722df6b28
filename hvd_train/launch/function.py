"""Run a Python function on N ranks of this host.

Arguments and results are pickles in a folder that only this user can read. Nothing from a network is unpickled.
"""

from __future__ import annotations

import io
import json
import marshal
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from hvd_train.config.user_code import is_library
from hvd_train.errors import CommunicationError, ConfigError, RankError
from hvd_train.launch.environment import world
from hvd_train.launch.start import launch

WHERE = "hvd_train.launch"


def call(
    function: Callable[..., Any], np: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, launcher: str
) -> list[Any]:
    """Call the function on ``np`` ranks, as ``hvd_train.launch`` says."""
    if world().launcher:
        what = "a rank starts no ranks of its own"
        raise ConfigError(what, where=f"{WHERE}, started by {world().launcher}", fix="call it in a process of its own")
    if np < 1:
        raise ConfigError(f"np={np}: at least one rank is needed", where=WHERE)
    try:
        packed = _packed((function, tuple(args), dict(kwargs or {})))
    except Exception as error:
        what = f"the function, or an object that it uses, cannot be sent to the ranks: {error}"
        raise ConfigError(what, where=WHERE, fix="open files, sockets and locks inside the function") from error
    with tempfile.TemporaryDirectory(prefix="hvd-train-launch-") as temporary:
        folder = Path(temporary)
        (folder / "path.json").write_text(json.dumps(_paths()))
        (folder / "call").write_bytes(packed)
        code = launch(np, launcher, [temporary], module="hvd_train.launch.run_function")
        return _results(folder, np, code)


def _paths() -> dict[str, list[str]]:
    """Return sys.path for the ranks, and the modules to import from this script's or notebook's folder.

    Python puts that folder first on sys.path. For the ranks it comes last, so that its files shadow no other modules,
    except those that the caller imported from it.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    own = {"", os.getcwd(), *([os.path.dirname(os.path.abspath(script))] if script and not is_library(script) else [])}
    folders = [folder or os.getcwd() for folder in sys.path if folder in own]
    found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    files = {name: Path(file) for name, file in found.items() if file}
    names = [
        name for name, file in files.items()
        if "." not in name and str(file.parents[file.name == "__init__.py"]) in folders
    ]  # fmt: skip
    return {"libraries": [folder for folder in sys.path if folder not in own], "folders": folders, "names": names}


def _packed(what: Any) -> bytes:
    """Pickle with the functions' file and line numbers, which cloudpickle removes and tracebacks need."""
    import cloudpickle

    def code(x: CodeType) -> tuple[Any, ...]:
        return marshal.loads, (marshal.dumps(x),)

    class Pickler(cloudpickle.CloudPickler):
        dispatch_table = ChainMap({CodeType: code}, cloudpickle.CloudPickler.dispatch_table)

    stream = io.BytesIO()
    Pickler(stream).dump(what)
    return stream.getvalue()


def _results(folder: Path, np: int, code: int) -> list[Any]:
    errors = [json.loads(path.read_text()) for path in folder.glob("error.*.json")]
    if errors:
        raise RankError(**min(errors, key=lambda one: one["order"])["error"])
    if code == 130:
        raise KeyboardInterrupt
    if code == 143:
        raise SystemExit(code)
    files = [folder / f"result.{rank}" for rank in range(np)]
    absent = [str(rank) for rank, file in enumerate(files) if not file.exists()]
    if code or absent:
        what = f"a rank ended with code {code}, before the function did"
        raise CommunicationError(what, where=f"rank {', '.join(absent)}", fix="look for os._exit, or too little memory")
    return [pickle.loads(file.read_bytes()) for file in files]
