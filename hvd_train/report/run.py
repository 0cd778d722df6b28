"""What a run folder says about a run, for ``hvd-train report``: each part may be missing or damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.checkpoint import manifest, store
from hvd_train.config import leaves
from hvd_train.errors import CheckpointError, ConfigError, amount
from hvd_train.report.watch import WatchedRun
from hvd_train.run_folder import layout, metrics_file, safe_reading, step_times

VERIFY = "verify.json"  # which 'hvd-train verify --report RUN/verify.json' writes

PROVED = 5  # tensors of a comparison that are shown


class ReportedRun:
    """A run. ``rows``: its log. ``config``: {key with dots: value}. ``summary``, ``environment``: {} without one."""

    def __init__(self, run_dir: Path, name: str) -> None:
        watched = WatchedRun(run_dir)
        watched.update()
        if not watched.rows and not watched.config:
            raise ConfigError(f"holds no run: neither {metrics_file.NAME} nor config.yaml", where=str(run_dir))
        self.run_dir, self.name, self.rows, self.damaged = run_dir, name, watched.rows, watched.damaged
        self.config = dict(leaves(watched.config))
        self.times = self._times()  # seconds, as means over ranks
        self.state = watched.state_words()
        self.summary = _object(run_dir / layout.SUMMARY)
        self.environment = _object(run_dir / "environment.json")
        self.verify = _object(run_dir / VERIFY)

    @property
    def allocation(self) -> dict[str, Any]:
        """Return the seconds of all allocations, and the effective training time; {} if they are not known."""
        told = self.summary.get("time")
        return told if isinstance(told, dict) else {}

    def _times(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for row in (row for row in self.rows if row["event"] == "time"):
            for name, x in row.items():
                if name not in metrics_file.NO_PARTS and safe_reading.number(x) and x >= 0:
                    total[name] = total.get(name, 0.0) + x
        return total if sum(total.values()) > 0 else {}

    def last(self, event: str) -> dict[str, Any]:
        """Return the last line of an event, {} if there is none."""
        return next((row for row in reversed(self.rows) if row["event"] == event), {})

    def best(self) -> str:
        """Return the value, epoch and name of the best checkpoint, "" without one."""
        with suppress(CheckpointError, OSError):
            return store.best(self.run_dir / "checkpoints", *self._monitor())
        return ""

    def _monitor(self) -> tuple[str, str]:
        monitor, mode = (self.config.get(f"checkpoint.{name}") for name in ("monitor", "mode"))
        return str(monitor or "val_loss"), "max" if mode == "max" else "min"

    def checkpoints(self) -> list[list[str]]:
        """Return (name, epoch, monitored value, size, what is special) of each checkpoint, oldest first."""
        rows, found = [], []
        with suppress(CheckpointError):
            found = store.find(self.run_dir / "checkpoints")
        best, (monitor, _) = self.best(), self._monitor()
        for k, (_, path) in enumerate(found):
            remarks = ["best"] * best.endswith(f" {path.name}") + ["last"] * (k == len(found) - 1)
            try:
                read, meta = manifest.read(path)
                value, size = meta["monitor"].get(monitor), sum(entry.bytes for entry in read.files.values())
                shown = f"{value:.4f}" if safe_reading.number(value) else "none"
                cells = [
                    str(read.epoch + (read.consumed > 0)),
                    f"{monitor} {shown}",
                    f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB",
                ]
            except CheckpointError as error:
                cells, remarks = ["", "", ""], [*remarks, error.what]
            rows.append([path.name, *cells, ", ".join(remarks)])
        return rows

    def proofs(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yield (title, header, rows) of each comparison of ``verify``: losses first, then what differs most."""
        with suppress(KeyError, TypeError, ValueError, IndexError):  # somebody else's file
            header = [str(x) for x in self.verify["header"]]
            for one in self.verify["comparisons"]:
                rows = [[str(x) for x in row] for row in one["rows"]]
                rows = [*rows[:3], *sorted(rows[3:], key=lambda row: -float(row[2]))[:PROVED]]
                if rows and {len(row) for row in rows} == {len(header[: len(rows[0])])}:
                    yield str(one["title"]), header[: len(rows[0])], rows

    def incidents(self) -> Iterator[str]:
        """Yield a sentence for each thing that went wrong, and for starts after the first."""
        slow: dict[int, list[float]] = {}
        for row in self.rows:
            if row["event"] == "straggler" and safe_reading.number(row.get("share")) and type(row.get("rank")) is int:
                slow.setdefault(row["rank"], []).append(row["share"])
        for rank, shares in sorted(slow.items()):
            mean, times = sum(shares) / len(shares), amount(len(shares), "line")
            yield f"Rank {rank} was slow in {times} of the log: the others waited for it {mean:.0%} of each step."
        skipped = self.summary.get("skipped_steps")
        if safe_reading.number(skipped) and skipped:
            were = "was" if skipped == 1 else "were"
            yield f"{amount(int(skipped), 'step')} {were} skipped: a gradient was not finite."
        back = [row for row in self.rows if row["event"] == "rollback"]
        if back:
            at = f"{'step' if len(back) == 1 else 'steps'} {_listed([row['step'] for row in back])}"
            often = f"{len(back)} times, " * (len(back) > 1)
            yield f"The training went back to its last checkpoint {often}at {at}: {back[-1].get('why')}."
        none = sorted({row["epoch"] for row in self.rows if row["event"] == "val" and row.get("loss", 0) is None})
        if none:
            epochs = f"{'epoch' if len(none) == 1 else 'epochs'} {_listed(none)}"
            yield f"The validation loss had no finite value in {epochs}."
        again = [row["step"] for row in step_times.read(self.run_dir) if row["event"] == "start"][1:]
        if again:
            at = f"{'step' if len(again) == 1 else 'steps'} {_listed(again)}"
            yield f"The training was started {len(again) + 1} times: again from {at}."
        requeued = _object(self.run_dir / layout.REQUEUED)
        if requeued:
            yield f"The job was requeued, the last time at step {requeued.get('step')}."
        for pattern, words in (
            ("failures/*.txt", "A rank failed: {}."),
            ("left-*", "The run began again from an earlier step; what came after it is in {}."),
        ):
            for path in sorted(self.run_dir.glob(pattern)):
                yield words.format(path.relative_to(self.run_dir))
        if self.damaged:
            yield f"{amount(self.damaged, 'damaged line')} of {metrics_file.NAME} left out."


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + " ..." * (len(numbers) > 10)


def _object(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError, CheckpointError):
        return safe_reading.json_object(path)
    return {}
