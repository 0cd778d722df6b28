"""TensorBoard events of a saved run: in the run folder, or in a folder that holds those of several runs."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from hvd_train import files
from hvd_train.run_folder.tensorboard import Events
from hvd_train.run_folder.trackers.tracker import MAX_ID_BYTES, Known, Point, SavedRun, Target, TrackedRun

OWNER = ".hvd_train"  # a file that says which run's events a folder holds


class TensorBoardTarget(Target):
    """Event files, each with what is new. Where a resumed run repeats steps, a mark hides the earlier events."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._events: Events | None = None
        self._texts: dict[str, str] = {}
        self._folder = _folder_of(run) if run.address else run.run_dir / "tensorboard"
        logged = run.config.get("tensorboard") or "tensorboard" in run.config.get("loggers", ())
        self.live, self.place = bool(logged) and not run.address, f"tensorboard ({self._folder})"

    def known(self, saved: SavedRun) -> Known:
        # Without this TensorBoard loads TensorFlow, for seconds, if it is installed.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator

        if not self._folder.is_dir():
            return {}
        events = EventAccumulator(str(self._folder), {SCALARS: 0, TENSORS: 0})  # 0: all
        events.Reload()
        for name in events.Tags()[TENSORS]:
            self._texts[name] = b"".join(events.Tensors(name)[-1].tensor_proto.string_val).decode(errors="replace")
        return {(name, one.step): one.value for name in events.Tags()[SCALARS] for one in events.Scalars(name)}

    def rounded(self, value: float) -> float:
        return ctypes.c_float(value).value

    def renew(self, step: int) -> str:
        self._open().restart(step)
        return "TensorBoard shows them alone"

    def send(self, points: Iterable[Point]) -> None:
        for _, step, values in points:
            self._open().scalars(step, values)

    def finish(self, saved: SavedRun) -> None:
        for name, values in (("config", self._run.config), ("summary", saved.summary)):
            lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
            text = "\n".join(f"    {line}" for line in lines)  # indented: Markdown shows it as it is
            if lines and self._texts.get(name) != text:
                self._open().text(saved.points[-1].step if saved.points else 0, name, text)
        if self._events:
            self._events.close()

    def _open(self) -> Events:
        if self._events is None:
            self._events = Events(self._folder)
            if self._run.address:
                files.put(self._folder / OWNER, self._run.own_id().encode())
        return self._events


def _folder_of(run: TrackedRun) -> Path:
    """Return a folder named as the run. If it holds another run's events, part of the id is appended."""
    folder = Path(run.address).expanduser() / run.name
    owner = b""
    with suppress(FileNotFoundError):
        owner = files.content(folder / OWNER, MAX_ID_BYTES)
    taken = folder.exists() and owner.decode() != run.own_id()
    return folder.with_name(f"{run.name}-{run.own_id()[:6]}") if taken else folder
