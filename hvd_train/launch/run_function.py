"""``python -m hvd_train.launch.run_function FOLDER``: one rank of ``hvd_train.launch``."""

from __future__ import annotations

import json
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from hvd_train.config.user_code import ModulesOf
from hvd_train.errors import LostRankError, TrainError
from hvd_train.launch.environment import prepare_rank, world
from hvd_train.launch.failed_rank import exit_rank
from hvd_train.run_folder.layout import put


def main() -> None:
    import cloudpickle

    folder, here = Path(sys.argv[1]), world()
    # The function may import a framework before it calls hvd_train.
    prepare_rank(here, None, "auto", verbose=True)
    try:
        paths = json.loads((folder / "path.json").read_text())
        sys.path[:] = [*paths["libraries"], *paths["folders"]]
        sys.meta_path.insert(0, ModulesOf(paths["names"], paths["folders"]))
        function, args, kwargs = pickle.loads((folder / "call").read_bytes())
        result = function(*args, **kwargs)
        (folder / f"result.{here.rank}").write_bytes(cloudpickle.dumps(result))
    except KeyboardInterrupt:
        exit_rank(130)
    except BaseException as error:
        _report(folder, here.rank, error)


def _report(folder: Path, rank: int, error: BaseException) -> NoReturn:
    """Write the error to a file for the calling process, before this exit ends the other ranks."""
    code = error.exit_code if isinstance(error, TrainError) else 1
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
    facts = {"kind": type(error).__name__, "message": str(error), "rank": rank, "trace": trace, "exit_code": code}
    order = [isinstance(error, LostRankError), time.monotonic()]  # a lost rank sorts before those that noticed
    put(folder / f"error.{rank}.json", {"order": order, "error": facts})
    exit_rank(code)


if __name__ == "__main__":
    main()
