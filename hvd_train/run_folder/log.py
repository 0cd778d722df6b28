"""The log of a run: terminal, metrics.jsonl, summary.json, TensorBoard events, trackers. Only rank 0 writes."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train import faults
from hvd_train.checkpoint import store
from hvd_train.errors import CheckpointError, amount
from hvd_train.run_folder import layout, metrics_file, safe_reading
from hvd_train.run_folder.answering import FileWatch
from hvd_train.run_folder.lock import Lock
from hvd_train.run_folder.metrics_file import MetricsFile
from hvd_train.run_folder.step_times import StepTimes
from hvd_train.run_folder.tensorboard import Events
from hvd_train.run_folder.terminal import LongStep, Terminal, on_terminal, say, warn
from hvd_train.run_folder.trackers.calls import Trackers

PLAIN_SECONDS = 10.0  # between progress lines without a terminal
REFRESH_SECONDS = 0.1


class NullLog:
    """A log that writes nothing, for ranks other than 0."""

    watch = FileWatch()

    def train(self, *args: Any) -> None: ...
    def val(self, *args: Any) -> None: ...
    def progress(self, *args: Any) -> None: ...
    def epoch_line(self, **row: Any) -> None: ...
    def message(self, text: str) -> None: ...
    def last_message(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def waits_for(self, name: str) -> None: ...
    def failed(self) -> None: ...
    def summary(self, values: dict[str, Any]) -> None: ...
    def compression_error(self, *args: Any) -> None: ...
    def noise_scale(self, *args: Any) -> None: ...
    def straggler(self, *args: Any) -> None: ...
    def rollback(self, *args: Any) -> None: ...
    def time(self, *args: Any) -> None: ...
    def energy(self, *args: Any) -> None: ...
    def ranks(self, *args: Any) -> None: ...
    def steps(self, *args: Any) -> None: ...
    def steps_saved(self, *args: Any) -> None: ...
    def notice(self, kind: str, text: str) -> None: ...
    def allocation(self, counted: float) -> tuple[float, float]:
        return 0.0, 0.0

    def begin(self, needed: int) -> None: ...
    def check(self) -> None: ...
    def incomplete(self) -> bool:
        return False

    def end_incomplete(self, step: int) -> None: ...
    def close(self, step: int = 0) -> None: ...


class WordLog(NullLog):
    """A log that only prints rank 0's messages."""

    def message(self, text: str) -> None:
        say(text)

    def notice(self, kind: str, text: str) -> None:
        say(text)

    def warning(self, text: str) -> None:
        warn(text)


def _cell(value: float | None, width: int) -> str:
    """Format with at most 4 decimals, fewer if the column is too narrow; as a last resort in scientific notation."""
    if value is None:
        return f"{'-':>{width}}"
    texts = (f"{value:.{digits}f}" for digits in (4, 3, 2, 1, 0))
    return next((text for text in texts if len(text) <= width), f"{value:.1e}").rjust(width)


class RunLog:
    """The log of rank 0. ``total_epochs`` None: training is bounded by steps; ``quiet``: prints only its last line.

    The run folder is not touched before ``begin``, which training calls after its first step. ``begin`` writes
    ``files`` (name -> text or JSON), and moves an old run aside (``replace``) or drops the lines after ``resumed_at``,
    whose steps a resumed run repeats. It moves aside what the run does not repeat: later checkpoints, a summary of
    later steps, and all lines if there is no checkpoint (``resumed_at`` 0).
    """

    watch = FileWatch()

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool,
        total_epochs: int | None,
        lock: Lock | None = None,
        quiet: bool = False,
        watch: FileWatch | None = None,
    ) -> None:
        self.run_dir, self._epochs, self._tensorboard, self._lock = run_dir, total_epochs, tensorboard, lock
        self.watch = watch or self.watch
        self._quiet = quiet
        self.files: dict[str, Any] = {}
        self.resumed_at: int | None = None
        self.evaluates_again = False  # the resumed run stopped within an evaluation
        self.replace = False
        self._metrics: MetricsFile | None = None
        self._early: list[Callable[[], None]] = []  # events before begin
        self.began = time.time()  # of the command that started the ranks
        self._steps: StepTimes | None = None
        self._notices: Counter[str] = Counter()  # since the last row of an epoch
        self._told: set[str] = set()
        self._events: Events | None = None
        self.trackers: Trackers | None = None
        self._long_step: LongStep | None = None
        self._terminal = Terminal() if on_terminal() else None
        self._header_shown, self._last, self._started = False, time.monotonic(), time.monotonic()

    def begin(self, needed: int) -> None:
        """Begin to write to the run folder. ``needed``: size of a checkpoint in bytes, which must be free."""
        if self._metrics is not None:
            return
        with self.watch.at(self.run_dir):
            self._begin(needed)
        for line in self._early:
            line()

    def _begin(self, needed: int) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            replaced = layout.retire(self.run_dir) if self.replace else None
            store.preflight(self.run_dir / "checkpoints", needed)
            left = None
            if self.resumed_at is not None:
                left = store.leave(self.run_dir / "checkpoints", self.resumed_at)
                self._leave_files(self.resumed_at)
                self._truncate_after(self.resumed_at)
            for name, content in self.files.items():
                layout.put(self.run_dir / name, content)
            if self._tensorboard:
                self._open_events()
            self._metrics = MetricsFile(self.run_dir)
            self._steps = StepTimes(self.run_dir, self.began, self.resumed_at or 0)
            if self.trackers:
                self.trackers.begin()
            if replaced:
                layout.drop(replaced)
            if left:
                self.message(f"checkpoints after step {self.resumed_at} are not of this run any more: now in {left}")
        except (OSError, CheckpointError) as error:
            layout.bring_back(self.run_dir)
            if isinstance(error, CheckpointError):
                raise
            what = f"the run folder cannot be written: {error.strerror}"
            raise CheckpointError(what, where=str(self.run_dir)) from error

    def check(self) -> None:
        """Raise if another process has taken over the run folder."""
        if self._lock is not None:
            with self.watch.at(self._lock.path):
                faults.at("check")
                self._lock.check()

    def incomplete(self) -> bool:
        """Return whether lines of metrics.jsonl cannot be written, so that the run must save and end."""
        if self._metrics is None:
            return False
        with self.watch.at(self._metrics.path):
            return self._metrics.incomplete()

    def end_incomplete(self, step: int) -> None:
        """Raise the error for missing lines, after the run was saved at ``step``."""
        assert self._metrics is not None
        raise self._metrics.failure(step)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._metrics is not None
        with self.watch.at(self._metrics.path):
            self._metrics.write(row)
            if self.trackers:
                self.trackers.row(row)

    def _open_events(self) -> None:
        try:
            self._events = Events(self.run_dir / "tensorboard")
        except OSError as error:
            self._without_events(error)

    def _show(self, epoch: int, step: int, scalars: dict[str, float]) -> None:
        """Write to TensorBoard and trackers. They may fail, because metrics.jsonl has the same numbers."""
        if self.trackers:
            self.trackers.scalars(epoch + 1, step, scalars)
            self._report_trackers()
        try:
            if self._events:
                with self.watch.at(self.run_dir / "tensorboard"):
                    self._events.scalars(step, scalars)
        except OSError as error:
            self._without_events(error)

    def _report_trackers(self) -> None:
        for failure in self.trackers.failures() if self.trackers else []:
            self.warning(failure)

    def _end_trackers(self, finished: bool, summary: Mapping[str, Any]) -> None:
        if self.trackers:
            self.trackers.end(finished, summary)
            self._report_trackers()

    def _without_events(self, error: OSError) -> None:
        where = self.run_dir / "tensorboard"
        self.warning(
            f"TensorBoard's events cannot be written: {error.strerror}; {where}; training goes on without them"
        )
        if self._events:
            self._events.close()
        self._events = None

    # ---- numbers

    def train(self, epoch: int, step: int, results: Mapping[str, float], lr: float, speed: float) -> None:
        self._event("train", epoch, step, results, lr, speed)

    def val(self, epoch: int, step: int, results: Mapping[str, float], lr: float, speed: float) -> None:
        self._event("val", epoch, step, results, lr, speed)

    def _event(self, event: str, epoch: int, step: int, results: Mapping[str, float], lr: float, speed: float) -> None:
        row = {"event": event, "epoch": epoch + 1, "step": step, **results, "lr": lr, "samples_per_second": speed}
        scalars = metrics_file.scalars(row)
        row["samples_per_second"] = round(speed, 1)
        # JSON has neither NaN nor infinity.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._write(finite)
        self._show(epoch, step, scalars)

    def compression_error(self, epoch: int, step: int, cosine: float, sent: float, plain: float) -> None:
        """Log the error of compression: the cosine with the exact gradient, this rank's bytes with and without."""
        if self._metrics is None:  # the error of step 0 is measured before ``begin``
            self._early.append(lambda: self.compression_error(epoch, step, cosine, sent, plain))
            return
        row = {"event": "compression", "epoch": epoch + 1, "step": step, "cosine": cosine}
        row |= {"bytes": round(sent), "bytes_plain": round(plain)}
        self._write(row)
        self.message(f"step {step}: compressed gradient: cosine {cosine:.4f}, {sent / plain:.1%} of {plain:,.0f} bytes")
        self._show(epoch, step, metrics_file.scalars(row))

    def noise_scale(self, epoch: int, step: int, row: Mapping[str, float | None]) -> None:
        """Log an estimate of the gradient noise scale (core/noise_scale.py)."""
        whole = {"event": "noise_scale", "epoch": epoch + 1, "step": step, **row}
        self._write(whole)
        self._show(epoch, step, metrics_file.scalars(whole))

    def straggler(self, epoch: int, step: int, row: Mapping[str, Any]) -> None:
        self._write({"event": "straggler", "epoch": epoch + 1, "step": step, **row})

    def rollback(self, epoch: int, step: int, checkpoint: str, why: str) -> None:
        self._write({"event": "rollback", "epoch": epoch + 1, "step": step, "checkpoint": checkpoint, "why": why})

    def time(self, epoch: int, step: int, row: Mapping[str, float]) -> None:
        """Log the time since the last such line: seconds of each part, as the mean over ranks."""
        if self._metrics is None:
            return
        whole = {"event": "time", "epoch": epoch + 1, "step": step, **row}
        self._write(whole)
        self._show(epoch, step, metrics_file.scalars(whole))

    def energy(self, epoch: int, step: int, row: Mapping[str, float]) -> None:
        """Log the Wh of all hosts since the last such line, in all and by source."""
        whole = {"event": "energy", "epoch": epoch + 1, "step": step, **row}
        self._write(whole)
        self._show(epoch, step, metrics_file.scalars(whole))

    def ranks(self, row: Mapping[str, Any]) -> None:
        """Log where the ranks are."""
        if self._steps:
            with self.watch.at(self.run_dir):
                self._steps.ranks(row)

    def steps(self, window: Mapping[str, Any]) -> None:
        """Log the times of the steps between two syncs."""
        if self._steps:
            with self.watch.at(self.run_dir):
                self._steps.window(window)

    def steps_saved(self, step: int, counted: float) -> None:
        """Log that a checkpoint has the first ``step`` steps, of which this start spent ``counted`` seconds."""
        if self._steps:
            with self.watch.at(self.run_dir):
                self._steps.saved(step, counted)

    def allocation(self, counted: float) -> tuple[float, float]:
        """Return the seconds of the steps that count and of the allocation, of all starts of the run."""
        return self._steps.allocation(counted) if self._steps else (counted, time.time() - self.began)

    def _leave_files(self, step: int) -> None:
        """Move files of an earlier start into ``left-XXXX`` if this run will not rewrite them with the same steps."""
        later = layout.summary_steps(self.run_dir) > step
        names = [layout.SUMMARY] * later
        written = step == 0 and (self.run_dir / metrics_file.NAME).exists()
        lines = len(metrics_file.read(self.run_dir)[0]) if written else 0
        names += [metrics_file.NAME] * bool(lines)
        if names:
            left = layout.leave(self.run_dir, names)
            why = "there is no checkpoint, so the run begins at step 0" if step == 0 else f"the run is at step {step}"
            what = [f"{amount(lines, 'line')} of {metrics_file.NAME}"] * bool(lines) + ["the summary"] * later
            verb = "is" if what == ["the summary"] else "are"
            self.warning(f"{why}; {' and '.join(what)} of an earlier start {verb} now in {left}")

    def _truncate_after(self, step: int) -> None:
        if not (self.run_dir / metrics_file.NAME).exists():
            return
        rows, damaged = metrics_file.read(self.run_dir)
        # A run that stopped within an evaluation repeats it, and logs its line again.
        end = {"val": step + (not self.evaluates_again)}
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] < end.get(row["event"], step + 1)]
        layout.put(self.run_dir / metrics_file.NAME, "".join(kept))
        if damaged:
            lines = "1 damaged line" if damaged == 1 else f"{damaged} damaged lines"
            self.message(f"{lines} of {metrics_file.NAME} left out")

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json and finish metrics.jsonl. Raises CheckpointError if one of them cannot be written."""
        self.check()
        path = self.run_dir / layout.SUMMARY
        try:
            with self.watch.at(path):
                layout.put(path, values if values.get("samples_per_second") else values | _speed(path, values))
        except OSError as error:
            what = f"the summary cannot be written: {error.strerror}"
            fix = "make room: the run is saved, and --resume auto ends it again"
            raise CheckpointError(what, where=str(path), fix=fix) from error
        self._close_metrics(values["steps"])
        self._end_trackers(not values.get("paused_at"), values)

    def _close_metrics(self, step: int) -> None:
        if self._metrics is not None:
            with self.watch.at(self._metrics.path):
                self._metrics.close(step)
        if self._steps:
            with self.watch.at(self.run_dir):
                self._steps.flush()

    # ---- words

    def progress(self, epoch: int, done: int, total: int, speed: Callable[[], float]) -> None:
        """Show the progress, at most a few times a second, calling ``speed`` only then. Called after every step."""
        if self._long_step:
            self._end_long_step()
        if self._quiet:
            return
        now = time.monotonic()
        if now - self._last < (REFRESH_SECONDS if self._terminal else PLAIN_SECONDS):
            return
        self._last = now
        name = f"epoch {epoch + 1}" + (f"/{self._epochs}" if self._epochs else "")
        if self._terminal:
            self._terminal.progress(name, done, total, speed())
        else:
            say(f"{name}: {done:,}/{total:,} samples, {speed():,.0f} samples/s")

    def epoch_line(
        self,
        epoch: int,
        step: int,
        values: Mapping[str, float | None],
        lr: float,
        samples_per_second: float | None,
        seconds: float,
        notes: Sequence[str] = (),
    ) -> None:
        """Print the row of an epoch.

        ``values``: {train_NAME or val_NAME: value, None without an evaluation}. ``samples_per_second``: over these
        ``seconds``. ``notes``: appended to the row, and the number of notices that were not printed.
        """
        shown = {name.replace("train_", "").replace("_", " "): x for name, x in values.items() if name != "val_samples"}
        widths = [max(8, len(name) + 1) for name in shown]
        total = f"/{self._epochs}" if self._epochs else ""
        first = max(6, len(f"{self._epochs}{total}") + 1)
        if not self._header_shown:
            names = " ".join(f"{name:>{width}}" for name, width in zip(shown, widths, strict=True))
            self.message(f"{'epoch':>{first}}     step {names}        lr  samples/s  seconds")
            self._header_shown = True
        cells = " ".join(_cell(x, width) for x, width in zip(shown.values(), widths, strict=True))
        speed = f"{'-':>10}" if samples_per_second is None else f"{samples_per_second:10,.0f}"
        row = f"{f'{epoch + 1}{total}':>{first}} {step:8d} {cells} {lr:9.3g} {speed} {seconds:8.1f}"
        repeated = [f"{count} more {kind}" for kind, count in self._notices.items()]
        self._notices.clear()
        self.message("  ".join([row, *filter(None, ["; ".join([*filter(None, notes), *repeated])])]))

    def notice(self, kind: str, text: str) -> None:
        """Print a message that may repeat: only the first of a ``kind``; the row of an epoch counts the others."""
        if kind in self._told:
            self._notices[kind] += 1
            return
        self._told.add(kind)
        self.message(text)

    def message(self, text: str) -> None:
        if not self._quiet:
            self._print(text)

    def last_message(self, text: str) -> None:
        """Print how the training ended, also in a quiet log."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._clear()
        say(text)

    def warning(self, text: str) -> None:
        self._clear()
        warn(text)

    def waits_for(self, name: str) -> None:
        """Show the name of a long operation until the next output, if it takes long."""
        self._end_long_step()
        if not self._quiet:
            self._long_step = LongStep(name).start()

    def _end_long_step(self) -> None:
        if self._long_step:
            self._long_step.stop()
        self._long_step = None

    def _clear(self) -> None:
        self._end_long_step()
        if self._terminal:
            self._terminal.clear()

    def failed(self) -> None:
        """Close the trackers of a failed run, before its error is printed."""
        self._clear()
        self._end_trackers(False, {})

    def close(self, step: int = 0) -> None:
        """Close all files of a run saved at ``step``. Raises CheckpointError if lines could not be written."""
        self._clear()
        self._close_metrics(step)
        if self._events:
            with self.watch.at(self.run_dir / "tensorboard"):
                self._events.close()
        self._end_trackers(False, {})
        self.watch.close()


def _speed(path: Path, values: dict[str, Any]) -> dict[str, float]:
    """Return the speed in the summary ``path`` if it is for the same weights, for a run that took no step."""
    with suppress(OSError, ValueError, KeyError, TypeError, CheckpointError):
        before = safe_reading.json_object(path)
        if before["weights_sha256"] == values["weights_sha256"]:
            return {"samples_per_second": float(before["samples_per_second"])}
    return {}
