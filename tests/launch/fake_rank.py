"""A rank without a framework: ``python -m tests.launch.fake_rank FOLDER PLAN``.

The n-th start of rank r does the words of ``PLAN[n][r]``, one after the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from hvd_train.errors import DataError, LostRankError, stopped_code
from hvd_train.launch.environment import world
from hvd_train.launch.outside import listen
from hvd_train.launch.shutdown import shutdown_with


def endless() -> None:
    while True:
        pass


def main() -> None:
    ears, rank = listen(), world().rank
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    starts = folder / f"starts.{rank}"
    with open(starts, "a") as stream:
        stream.write(json.dumps([os.getpid(), *sys.argv[3:]]) + "\n")
    number = len(starts.read_text().splitlines()) - 1
    ears.run_dir = folder / "run"
    ears.leaving.append(lambda: (folder / f"left.{rank}").touch())
    for word in plan[min(number, len(plan) - 1)][rank].split():
        verb, _, value = word.partition(":")
        if verb == "step":
            ears.begun = True
            ears.at("training", int(value))
        elif verb == "checkpoint":
            (folder / "run" / "checkpoints" / f"step-{int(value):08d}").mkdir(parents=True, exist_ok=True)
        elif verb == "sleep":
            time.sleep(float(value))
        elif verb == "busy":  # in native code, where Python's own handlers do not come to turn
            (folder / f"busy.{rank}").touch()
            ctypes.CDLL(None).poll(None, 0, 60_000)
            ctypes.CDLL(None).poll(None, 0, 60_000)
        elif verb == "saving":
            ears.at("saving", int(value))
        elif verb == "wait":  # in the file of a front-end, as far as a stack tells
            exec(compile("import time; time.sleep(60)", "/hvd_train/frontends/waits.py", "exec"))
        elif verb == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif verb == "endless":
            endless()
        elif verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "exit":
            os._exit(int(value))
        elif verb == "raise":
            try:
                raise RuntimeError("boom")
            except RuntimeError as error:
                shutdown_with(error)
        elif verb == "data":
            shutdown_with(DataError("no such file", common=True))
        elif verb == "lost":
            shutdown_with(LostRankError("another rank was lost"))
        elif verb == "save":  # at the next signal
            (folder / f"ready.{rank}").touch()
            while not ears.asked:
                time.sleep(0.01)
            ears.ended = True
            ears.end(code=stopped_code(ears.asked))
            sys.exit(stopped_code(ears.asked))
        elif verb == "done":
            ears.ended = True
            ears.end(code=0)


main()
