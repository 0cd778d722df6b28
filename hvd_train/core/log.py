"""What the user sees and keeps: the terminal, metrics.jsonl, summary.json, TensorBoard events. Rank 0 alone speaks."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

PLAIN_SECONDS = 10.0  # between two progress lines where there is no terminal
REFRESH_SECONDS = 0.1
HEADER = " epoch     step   loss  accuracy  val loss  val accuracy        lr  samples/s  seconds"


def _on_terminal() -> bool:
    """mpirun gives its ranks terminals of their own, wherever their output goes: only our launcher knows better."""
    if "HVD_TRAIN_TERMINAL" in os.environ:
        return os.environ["HVD_TRAIN_TERMINAL"] != "0"
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ


class NullLog:
    """The log of the ranks that do not speak."""

    def train(self, *args: Any) -> None: ...
    def val(self, *args: Any) -> None: ...
    def progress(self, *args: Any) -> None: ...
    def epoch_line(self, **row: Any) -> None: ...
    def message(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def summary(self, values: dict[str, Any]) -> None: ...
    def truth(self, *args: Any) -> None: ...
    def truncate_after(self, step: int) -> None: ...
    def close(self) -> None: ...


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


class RunLog:
    """The log of rank 0. ``total_epochs`` None: training is bounded by steps."""

    def __init__(self, run_dir: Path, *, config_yaml: str, tensorboard: bool, total_epochs: int | None) -> None:
        self.run_dir, self._epochs = run_dir, total_epochs
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config_yaml, encoding="utf-8")
        self._metrics: IO[str] = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._events = _Events(run_dir / "tensorboard") if tensorboard else None
        self._terminal = _Terminal() if _on_terminal() else None
        self._header_shown, self._last, self._started = False, time.monotonic(), time.monotonic()

    # ---- numbers

    def train(self, epoch: int, step: int, loss: float, accuracy: float, samples: int, lr: float, speed: float) -> None:
        self._event("train", epoch, step, loss, accuracy, samples, lr, speed)

    def val(self, epoch: int, step: int, loss: float, accuracy: float, samples: int, lr: float, speed: float) -> None:
        self._event("val", epoch, step, loss, accuracy, samples, lr, speed)

    def _event(
        self, event: str, epoch: int, step: int, loss: float, accuracy: float, samples: int, lr: float, speed: float
    ) -> None:
        row = {"event": event, "epoch": epoch + 1, "step": step, "loss": loss, "accuracy": accuracy}
        row |= {"samples": samples, "lr": lr, "samples_per_second": round(speed, 1)}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()
        if self._events:
            scalars = {f"loss/{event}": loss, f"accuracy/{event}": accuracy}
            if event == "train":
                scalars |= {"lr": lr, "samples_per_second": speed}
            self._events.scalars(step, scalars)

    def truth(self, epoch: int, step: int, cosine: float, sent: float, plain: float) -> None:
        """What compression did to one gradient: its cosine with the exact one, this rank's bytes with and without."""
        row = {"event": "compression", "epoch": epoch + 1, "step": step, "cosine": cosine}
        row |= {"bytes": round(sent), "bytes_plain": round(plain)}
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        self.message(f"step {step}: compressed gradient: cosine {cosine:.4f}, {sent / plain:.1%} of {plain:,.0f} bytes")
        if self._events:
            self._events.scalars(step, {"compression/cosine": cosine, "compression/share_of_bytes": sent / plain})

    def truncate_after(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint: their lines are dropped first."""
        path = self.run_dir / "metrics.jsonl"
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # a line that a kill cut short
        self._metrics.close()
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def summary(self, values: dict[str, Any]) -> None:
        temporary = self.run_dir / "summary.json.tmp"
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.run_dir / "summary.json")

    # ---- words

    def progress(self, epoch: int, done: int, total: int, speed: Callable[[], float]) -> None:
        """Called after every step; shows something a few times a second at most, and asks for the speed only then."""
        now = time.monotonic()
        if now - self._last < (REFRESH_SECONDS if self._terminal else PLAIN_SECONDS):
            return
        self._last = now
        name = f"epoch {epoch + 1}" + (f"/{self._epochs}" if self._epochs else "")
        if self._terminal:
            self._terminal.progress(name, done, total, speed())
        else:
            print(f"{name}: {done:,}/{total:,} samples, {speed():,.0f} samples/s", flush=True)

    def epoch_line(self, **row: Any) -> None:
        if not self._header_shown:
            self.message(HEADER)
            self._header_shown = True
        total = f"/{self._epochs}" if self._epochs else ""
        self.message(
            f"{row['epoch'] + 1:>{6 - len(total)}}{total} {row['step']:8d} {_cell(row['train_loss'], 6, 4)} "
            f"{_cell(row['train_accuracy'], 9, 4)} {_cell(row['val_loss'], 9, 4)} {_cell(row['val_accuracy'], 13, 4)} "
            f"{row['lr']:9.3g} {row['samples_per_second']:10,.0f} {row['seconds']:8.1f}"
        )

    def message(self, text: str) -> None:
        if self._terminal:
            self._terminal.clear()
        print(text, flush=True)

    def warning(self, text: str) -> None:
        if self._terminal:
            self._terminal.clear()
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal:
            self._terminal.clear()
        self._metrics.close()
        if self._events:
            self._events.close()


class _Terminal:
    """A progress bar on the last line; drawn anew, so that it works through a launcher's pipe as well."""

    def __init__(self) -> None:
        from rich.console import Console

        width = os.environ.get("HVD_TRAIN_TERMINAL", "")
        self._console = Console(
            force_terminal=True, width=int(width) if width.isdigit() else None, highlight=False, legacy_windows=False
        )
        self._shown = False

    def progress(self, name: str, done: int, total: int, speed: float) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        left = (total - done) / speed if speed else 0
        grid = Table.grid(padding=(0, 1))
        words = f"{done:,}/{total:,}", f"{speed:,.0f} samples/s", f"{int(left) // 60}:{int(left) % 60:02d} left"
        grid.add_row(name, ProgressBar(total=total, completed=done, width=24), *words)
        with self._console.capture() as capture:
            self._console.print(grid, end="")
        self.clear()
        sys.stdout.write(capture.get().rstrip("\n"))
        sys.stdout.flush()
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()
        self._shown = False


class _Events:
    """TensorBoard scalars through TensorBoard's own record writer, which needs no TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(open(folder / name, "wb"))  # noqa: SIM115
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def scalars(self, step: int, values: dict[str, float]) -> None:
        items = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=self._summary(value=items))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
