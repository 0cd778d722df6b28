"""A rank without a framework: ``python -m tests.launch.fake_rank FOLDER PLAN``.

The n-th start of rank r does the words of ``PLAN[n][r]``, one after the other, once all ranks of this start have begun.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hvd_train.errors import DataError, LostRankError, stopped_code
from hvd_train.launch.environment import world
from hvd_train.launch.failed_rank import exit_with_error
from hvd_train.launch.signals import listen
from hvd_train.launch.watchdog import state


def endless(mark: Path) -> None:
    mark.touch()
    while True:
        pass


def until(ready) -> None:
    while not ready():
        time.sleep(0.01)


def asked(listener, mark: Path) -> None:
    until(lambda: listener.asked)
    mark.touch()


def main() -> None:
    listener, rank = listen(), world().rank
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    starts = folder / f"starts.{rank}"
    with open(starts, "a") as stream:
        stream.write(json.dumps([os.getpid(), *sys.argv[3:]]) + "\n")
    number = len(starts.read_text().splitlines()) - 1

    def pids(other: int) -> list[int]:
        path = folder / f"starts.{other}"
        return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []

    until(lambda: all(len(pids(other)) > number for other in range(world().size)))
    listener.run_dir = folder / "run"
    listener.last_calls.append(lambda: (folder / f"left.{rank}").touch())
    for word in plan[min(number, len(plan) - 1)][rank].split():
        verb, _, value = word.partition(":")
        if verb == "step":
            listener.begun = True
            listener.at("training", int(value))
        elif verb == "checkpoint":
            (folder / "run" / "checkpoints" / f"step-{int(value):08d}").mkdir(parents=True, exist_ok=True)
        elif verb == "sleep":
            time.sleep(float(value))
        elif verb == "after_end":  # of another rank, whose code the launcher has
            until((folder / "ended").exists)
        elif verb == "until":  # a file is there: goes on all the while
            while not (folder / value).exists():
                listener.at("training", 7)
                time.sleep(0.01)
        elif verb == "until_stopped":  # another rank: goes on all the while
            while state(pids(int(value))[number]) not in "Tt":
                listener.at("training", 7)
                time.sleep(0.01)
        elif verb == "busy":  # in native code, where Python's handlers do not get their turn
            (folder / f"busy.{rank}").touch()
            threading.Thread(target=asked, args=[listener, folder / f"asked.{rank}"], daemon=True).start()
            ctypes.CDLL(None).poll(None, 0, 600_000)
            ctypes.CDLL(None).poll(None, 0, 600_000)
        elif verb == "saving":
            listener.at("saving", int(value))
        elif verb == "wait":  # in the file of a front-end, as far as a stack shows
            exec(compile("import time; time.sleep(600)", "/hvd_train/frontends/waits.py", "exec"))
        elif verb == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif verb == "endless":
            endless(folder / "endless")
        elif verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "exit":
            os._exit(int(value))
        elif verb == "raise":
            try:
                raise RuntimeError("boom")
            except RuntimeError as error:
                exit_with_error(error)
        elif verb == "data":
            exit_with_error(DataError("no such file", common=True))
        elif verb == "lost":
            exit_with_error(LostRankError("another rank was lost"))
        elif verb == "save":  # at the next signal
            (folder / f"ready.{rank}").touch()
            until(lambda: listener.asked)
            listener.ended = True
            listener.report_end(code=stopped_code(listener.asked))
            sys.exit(stopped_code(listener.asked))
        elif verb == "done":
            listener.ended = True
            listener.report_end(code=0)


main()
