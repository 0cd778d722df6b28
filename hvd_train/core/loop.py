"""The training loop. It knows the order of calls and no framework."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import faults
from hvd_train.checkpoint import compatibility, store
from hvd_train.checkpoint.arrays import weights_sha256
from hvd_train.checkpoint.manifest import Progress
from hvd_train.checkpoint.writer import NOT_KEPT, Writer, raise_if_failed
from hvd_train.config import Config
from hvd_train.core import train_state
from hvd_train.core.agreement import agree, collectively
from hvd_train.core.evaluation import evaluate
from hvd_train.core.hooks import Agreement, EarlyStopping, Epoch, Hook, Lines, Speed, Taken, guarded
from hvd_train.core.mean import ordered_sum
from hvd_train.core.meeting import Meetings, StopSource
from hvd_train.core.nonfinite import MOST_IN_A_ROW, Skips, rescale
from hvd_train.core.precision import FIRST_SCALE
from hvd_train.core.schedule import Schedule
from hvd_train.core.straggler import Stragglers
from hvd_train.data.loader import Loader, Step
from hvd_train.errors import Interrupted, NonFiniteError
from hvd_train.protocol import Batch, FrontEnd, Scale, Source, Update
from hvd_train.run_folder.log import NullLog, RunLog

LAST_SECONDS = 10.0  # before a batch job's end, to step, save and leave
INCOMPLETE = -1  # what rank 0 asks for instead of a signal's number: its log cannot be written
SETTLE_SECONDS = 10.0  # between two words of the rank that writes to those that wait for it


def forward_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """A 63-bit seed for one forward pass: equal after a resume, different on every rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Trainer:
    """Trains ``frontend`` on ``train`` and evaluates on ``val``; all ranks run the same calls in the same order."""

    def __init__(
        self,
        config: Config,
        frontend: FrontEnd,
        update: Update,
        train: Source,
        val: Source,
        run_dir: Path,
        log: RunLog | NullLog,
        compression: str = "none",
        hooks: Sequence[Hook] = (),
        stop_source: StopSource | None = None,
        until: int | None = None,
        memory: Path | None = None,
    ) -> None:
        self.memory = memory  # a folder for snapshots
        self.until = until  # epochs after which the run is left, to be gone on with
        self.stop_source = stop_source or StopSource()
        self.config, self.frontend, self.update, self.log, self.run_dir = config, frontend, update, log, run_dir
        self.compression = compression  # what ``auto`` took; a resumed run keeps to it
        self.groups, self.communicator = frontend.groups, frontend.groups.world
        rank, size = self.groups.data.rank, self.groups.data.size
        self.global_batch = config.global_batch(size)
        self.accumulate = config.accumulate_grad_batches
        self.train_loader, self.val_loader = (
            Loader(
                source,
                global_batch=self.global_batch,
                accumulate=self.accumulate,
                rank=rank,
                size=size,
                seed=config.seed,
                workers=config.data.workers,
            )
            for source in (train, val)
        )
        self.train_size, self.val_size = len(train), len(val)
        self.sample = train.sample.joined(val.sample)
        self.data = compatibility.data_facts(train, val)
        self.steps_per_epoch = -(-self.train_size // self.global_batch)
        self.limit = min(config.limit_train_batches or self.steps_per_epoch, self.steps_per_epoch)
        self.epoch_size = min(self.train_size, self.limit * self.global_batch)  # samples
        self.schedule = Schedule(config.optim, self.global_batch, self.limit, self._total())
        self.scaled = config.precision == "16-mixed"
        self.progress = Progress(loss_scale=FIRST_SCALE if self.scaled else 1.0)
        # Of this rank's samples since the last line of the log, by which each loss is divided.
        self.counts = np.zeros(len(frontend.task.objectives) if frontend.task.weighted_by_data else 0)
        self._skips = Skips(frontend, log, self.scaled) if config.on_nonfinite == "skip" else None
        self._last: Path | None = None  # the checkpoint that this run saved or began from
        self._rolled_back = 0  # since the last one
        self._begun = False  # whether the run folder is written
        self._why = ""  # this rank's wish to stop
        self._asked = 0  # the signal that the ranks have agreed to follow, or INCOMPLETE
        self._steps, self._batches = Meetings(self.communicator), Meetings(self.communicator)
        self._stragglers = Stragglers()
        self._saved = False  # whether the newest checkpoint is what this run is now
        self._metrics: Mapping[str, float] = {}  # by which the checkpoint of this step is ranked, if there is one
        self._writer = Writer(config.watchdog_s)
        self._speed, self._lines = Speed(), Lines()
        self.samples_per_second, self.speeds = self._speed.median, self._speed.spread
        self._agreement = Agreement(self._lines)
        early = [EarlyStopping(config.early_stopping)] if config.early_stopping else []
        self._hooks: list[Hook] = [self._speed, self._lines, self._agreement, *early]
        self._own = tuple(hooks)  # the user's

    def _total(self) -> int:
        totals = [self.config.max_steps, self.config.max_epochs and self.config.max_epochs * self.limit]
        return min(total for total in totals if total)

    # ---- training

    def fit(self) -> dict[str, Any]:
        """Trains to the end, or ``until`` there; returns the run's summary. Raises Interrupted, on all ranks at one
        step, when a signal asked one of them to stop and all is saved."""
        self._call("on_start")
        try:
            while self.progress.ending or not (self._finished() or self.paused):
                self._epoch()
                if self._asked and not self._finished():
                    self._interrupt()
            self._begin()
            if self.paused:
                self._keep()
            self._settle()
        finally:  # what ends the training is no reason to lose a checkpoint
            self._writer.wait()
        summary = self._summary()
        self._call("on_end", summary)
        return summary

    def _call(self, event: str, *given: Any) -> None:
        for hook in self._hooks:
            getattr(hook, event)(self, *given)
        for hook in self._own:
            guarded(hook, event, self, *given)

    def stop(self, why: str) -> None:
        """Ends the training of all ranks, evaluated and saved as at its end, whichever of them asks: with the epoch if
        called in ``on_epoch``, else with the next line of the log."""
        self._why = why

    def _heed(self, meetings: Meetings, told: bool = True) -> None:
        """The ranks meet. A wish to ``stop`` waits for a line of the log: when a run ends must not depend on clocks."""
        looks = meetings is self._steps  # no hook is called within an evaluation
        of_steps = [self._writer.outcome(), self.frontend.waited()] if looks else [None, 0.0]
        said = meetings.meet([self._why if told else "", self._stop_request(), *of_steps])
        asked = [why for why, *_ in said if why]
        if asked:
            self.progress.stopped, self._why = True, ""
            self.log.message(asked[0])
        self._asked = next((number for _, number, *_ in said if number), 0)
        if looks and len(said) > 1 and self._stragglers.look(self.progress.step, [row[3] for row in said]):
            self.log.message(f"step {self.progress.step}: {self._stragglers.found}")
            self._note_straggler(self.progress.epoch)
        if said[0][2] is not None:
            self._written(said[0][2])

    def _stop_request(self) -> int:
        """Return the signal for which this rank wants all to save and leave; 0: none."""
        return INCOMPLETE if self.log.incomplete() else self.stop_source.asked or self._late()

    def _late(self) -> int:
        """SIGUSR1 where what is left of the batch job is needed to save, which may take three times as long as ever."""
        end, need = self.stop_source.job_end, LAST_SECONDS + 3 * self._writer.longest
        return int(signal.SIGUSR1) if end and self.stop_source.begun and time.time() > end - need else 0

    @property
    def exchange_share(self) -> float | None:
        """The share of the time that the exchange takes on every rank; None: not yet measured."""
        return self._stragglers.least_wait

    def _note_straggler(self, epoch: int) -> str:
        """Log the slow rank; return the note for the epoch's row."""
        found = self._stragglers.found
        if found is None:
            return ""
        self.log.straggler(epoch, self.progress.step, asdict(found))
        return f"rank {found.rank} is slow: {found.share:.0%}"

    def _interrupt(self) -> None:
        """Saves the run and leaves it."""
        self._keep()
        self._settle()
        if self._asked == INCOMPLETE:
            collectively(self.communicator, lambda: self.log.end_incomplete(self.progress.step))
        raise Interrupted(self._asked, self.progress.step)

    def _keep(self) -> None:
        """Saves the run as it stands, so that it goes on to the same bits."""
        while not self._saved:  # one that may not be saved may have gone back to weights that are
            self.progress.pending = [[float(x) for x in row] for row in self._gathered(self._lines.local(self))]
            self._save(self._metrics, keep=True)

    def _gathered(self, own: np.ndarray) -> list[np.ndarray]:
        return [np.frombuffer(part) for part in self.communicator.allgather_bytes(own.tobytes(), "pending")]

    def _between(self) -> None:
        """Look for a signal within an evaluation, which an interrupted run repeats."""
        self.stop_source.at("evaluation", self.progress.step)
        faults.at("evaluation")
        if self._batches.due():
            self._heed(self._batches, told=False)
            if self._asked:
                self.progress = self._before
                self._interrupt()

    def _begin(self) -> None:
        """The run folder is touched when training has proved to run: after the first step."""
        if not self._begun:
            self.frontend.run_queued()
            collectively(self.communicator, lambda: self.log.begin(train_state.size(self)))
            self._begun = self.stop_source.begun = True

    def _finished(self) -> bool:
        p, c = self.progress, self.config
        return (
            p.stopped or bool(c.max_steps and p.step >= c.max_steps) or bool(c.max_epochs and p.epoch >= c.max_epochs)
        )

    @property
    def complete(self) -> str:
        """Return the reason why a restored run has nothing left to train; empty if it has."""
        if self.progress.ending or not self._finished():
            return ""
        p, c = self.progress, self.config
        word = "nothing is left to train"
        if c.early_stopping and p.stopped and p.waited >= c.early_stopping.patience:
            return f"{word}: early stopping ended the run; a larger early_stopping.patience, or none, goes on"
        if p.stopped:
            return f"{word}: the run was stopped before its end; --overwrite starts it anew"
        key = "max_steps" if c.max_steps and p.step >= c.max_steps else "max_epochs"
        return f"{word}: {key} {getattr(c, key)} is reached; a larger one goes on"

    @property
    def paused(self) -> bool:
        """Return whether the run has come ``until`` where it is left, and not to its end."""
        return self.until is not None and self.progress.epoch >= self.until and not self._finished()

    def _epoch(self) -> None:
        p, c = self.progress, self.config
        started, seen = time.perf_counter(), p.seen
        done_in_epoch = -(-p.consumed // self.global_batch)
        at_end = p.consumed >= self.train_size or done_in_epoch >= self.limit
        if p.ending:
            self._begin()
            self._end_epoch(self._rate(done_in_epoch - 1, p.step - 1), 0.0, 0, complete=at_end)
            return
        self.stop_source.at("training", p.step)
        self._steps.begin()
        with closing(self.train_loader.epoch(p.epoch, p.consumed)) as steps:
            clock = time.perf_counter()
            for step in steps:
                rate, sums = self._step(step)
                done_in_epoch += 1
                at_end = p.consumed >= self.train_size or done_in_epoch >= self.limit
                stop = at_end or bool(c.max_steps and p.step >= c.max_steps)
                save = not at_end and bool(c.checkpoint.every_n_steps) and p.step % c.checkpoint.every_n_steps == 0
                shots = c.checkpoint.snapshot_every_n_steps if self.memory else 0
                shot = not (stop or save) and bool(shots) and p.step % shots == 0
                told = stop or save or shot or p.step % c.log_every_n_steps == 0
                every = c.agreement_every_n_steps
                compared = stop or save or shot or bool(every and p.step % every == 0)
                met = self._steps.due() or told
                if met or compared or not self._begun:
                    self.frontend.run_queued()
                taken = Taken(step, rate, sums, time.perf_counter() - clock, told, compared)
                self._begin()
                self.stop_source.at("training", p.step)
                faults.at("step")
                try:
                    self._call("on_step", taken)
                except NonFiniteError as error:
                    self._roll_back(error)
                if met:
                    self._heed(self._steps, told)
                p.ending = stop or p.stopped
                if save or shot:
                    self._save(memory=self.memory if shot else None)
                if self._asked:
                    self._interrupt()
                if p.ending:
                    break
                clock = time.perf_counter()
        self._end_epoch(rate, time.perf_counter() - started, p.seen - seen, complete=at_end)

    def _step(self, step: Step) -> tuple[float, list[Any]]:
        """(learning rate, this rank's sums of each micro-batch)."""
        p, c = self.progress, self.config
        own = sum(batch.count for batch in step.micro_batches)
        scale: Scale = p.loss_scale / (max(own, 1) if self.update.local_gradients else step.count)
        counts = self.counts
        if self.frontend.task.weighted_by_data:
            scale = self._shares(step)
        rate = self._rate(p.consumed // self.global_batch, p.step)
        *earlier, last = step.micro_batches
        seeds = [forward_seed(c.seed, p.step, micro, self.groups.data.rank) for micro in range(len(step.micro_batches))]
        placed = self.frontend.to_device(last)
        if self._skips:
            self._skips.begin()
        every = c.exchange.compression_error_every_n_steps
        if every and p.step % every == 0:
            whole = np.divide(scale, p.loss_scale).tolist()  # thresholds are for gradients as they are
            self._compression_error(placed, whole, seeds[-1])
        sums = [
            self.frontend.add_gradients(self.frontend.to_device(batch), scale, seed)
            for batch, seed in zip(earlier, seeds, strict=False)
        ]
        sums.append(self.frontend.train_step(placed, scale, seeds[-1], rate, 1 / p.loss_scale))
        p.step, p.consumed, p.seen = p.step + 1, step.consumed, p.seen + step.count
        self._saved, self._metrics = False, {}
        finite = not c.checks_gradients or self.frontend.finite()
        if self.scaled:
            rescale(p, finite, self.log)
        if self._skips and self._skips.left_out(p, finite, sums):
            sums, self.counts = [], counts
        self.update.after_step(p.step)
        return rate, sums

    def _shares(self, step: Step) -> list[float]:
        """``scale`` where labels tell how much counts, of all micro-batches before the first: each loss is divided by
        its own count, and N ranks are one rank. One small transfer a step."""
        counts = np.sum([self.frontend.counts(batch) for batch in step.micro_batches], axis=0)
        self.counts = self.counts + counts
        if not self.update.local_gradients:
            # A rank that waits here must owe no step: the others may have begun it, and wait for its gradients.
            self.frontend.run_queued()
            counts = ordered_sum(counts, self.groups.data)
        return [self.progress.loss_scale / count if count else 0.0 for count in counts.tolist()]

    def _rate(self, place: int, step: int) -> float:
        """The learning rate follows the place in the epoch, so that it means the same after a resume on another world
        size; the step where the training's length is told in steps, and no drop in epochs."""
        if self._total() == self.config.max_steps and self.config.optim.schedule in ("constant", "cosine"):
            return self.schedule.rate(step)
        return self.schedule.rate(self.progress.epoch * self.schedule.steps_per_epoch + place)

    def _roll_back(self, error: NonFiniteError) -> None:
        """Takes the weights of the last checkpoint, with ``on_nonfinite: rollback``; the samples since are left out."""
        self._rolled_back += 1
        if self.config.on_nonfinite != "rollback" or self._rolled_back > MOST_IN_A_ROW:
            raise error
        self._settle()
        p, first = self.progress, self.communicator.rank == 0
        found = self.communicator.broadcast_bytes(str(self._last or "").encode()).decode()
        if not found:
            raise NonFiniteError(
                f"{error.what}, and there is no checkpoint yet", where=error.where, fix=error.fix, common=True
            )
        snapshot = collectively(self.communicator, lambda: store.load(Path(found)) if first else None)
        train_state.restore(self, snapshot)
        p.loss_scale, p.good_steps, self.progress = self.progress.loss_scale, 0, p
        self._lines.pending.clear()
        self.counts = np.zeros_like(self.counts)
        self._saved, self._metrics = False, {}
        self.log.message(f"step {p.step}: {error.what}; goes on with the weights of {Path(found).name}")

    def _compression_error(self, placed: Any, scale: Scale, seed: int) -> None:
        """Measure how far the compressed gradient is from the exact one, on the last micro-batch of the step."""
        dot, exact, decoded, sent, plain = map(
            float, self.frontend.ops.to_numpy(self.frontend.compression_error(placed, scale, seed))
        )
        length = math.sqrt(exact * decoded)
        self.log.compression_error(
            self.progress.epoch, self.progress.step, dot / length if length else 1.0, sent, plain
        )

    def _converge(self) -> None:
        """One model on all ranks: before an evaluation, a checkpoint and the end."""
        if self.update.diverged:
            self.update.converge()
            self._agreement.compare(self)

    def _end_epoch(self, rate: float, seconds: float, samples: int, complete: bool) -> None:
        """``samples`` were trained on in ``seconds``: since the epoch began, or the run went on within it."""
        p, c = self.progress, self.config
        epoch, train = p.epoch, _told("train", self._of_epoch())
        del train["train_samples"]
        p.train = train
        self._before, self._saved, p.ending = copy.deepcopy(p), False, False
        if complete:
            p.epoch, p.consumed, p.epoch_sums = p.epoch + 1, 0, []
        val = None
        if self._finished() or (complete and p.epoch % c.check_val_every_n_epoch == 0):
            val = self._validate(epoch, rate)
        metrics = {**train, **(p.val if val else {})}
        self._call("on_epoch", Epoch(epoch, complete, metrics))
        self._heed(self._steps)
        last = self._finished()
        if last and not val:
            val = self._validate(epoch, rate)
        self.log.epoch_line(
            epoch=epoch,
            step=p.step,
            values=train | {name.replace("train", "val", 1): None for name in train} | (p.val if val else {}),
            lr=rate,
            samples_per_second=samples / seconds if seconds else None,
            seconds=seconds,
            note=self._note_straggler(epoch),
        )
        every = c.checkpoint.every_n_epochs
        if last or (complete and every and p.epoch % every == 0):
            self._save({**train, **(p.val if val else {})})

    def _of_epoch(self) -> dict[str, float]:
        """Return the means over the training samples of this epoch; after a rollback there may be none."""
        task = self.frontend.task
        return task.results(np.array(self.progress.epoch_sums or np.zeros(task.length)))

    def _validate(self, epoch: int, rate: float) -> dict[str, float]:
        p = self.progress
        self._stragglers.pause()
        self._converge()
        self.stop_source.at("evaluation", p.step)
        self._batches.begin()
        batches = _limited(self.val_loader.evaluation(), self.config.limit_val_batches)
        val = evaluate(self.frontend, batches, self._between)
        p.val = _told("val", val)
        self.log.val(epoch, p.step, val, rate, self.samples_per_second())
        return val

    # ---- checkpoints

    @property
    def folder(self) -> Path:
        return self.run_dir / "checkpoints"

    def _save(self, metrics: Mapping[str, float] | None = None, keep: bool = False, memory: Path | None = None) -> None:
        """``keep``: whatever the configuration says; ``memory``: there, as a snapshot."""
        rule = self.config.checkpoint
        if rule.save_last or rule.save_top_k or keep or memory:
            self._stragglers.pause()
            self._settle()
            try:
                self._converge()
                self.stop_source.at("saving", self.progress.step)
                train_state.save(self, metrics or {}, self._writer, keep=keep, memory=memory)
            except NonFiniteError as error:
                self._roll_back(error)
                return
            self._last, self._rolled_back, self._metrics = self._writer.path, 0, metrics or {}
            self._saved = not memory and (rule.save_last or keep)  # else it may not be kept

    def _settle(self) -> None:
        """Waits until what is being written is there."""
        if self._writer.path:
            self.stop_source.at("saving", self.progress.step)
            outcome = None
            while outcome is None:  # Horovod takes ranks that wait for one for long to have diverged
                self._writer.wait(SETTLE_SECONDS)
                own = json.dumps(self._writer.outcome()).encode()
                outcome = json.loads(self.communicator.broadcast_bytes(own))
            self._written(outcome)

    def _written(self, outcome: str) -> None:
        path, self._writer.path = self._writer.path, None
        raise_if_failed(outcome)
        if path and path.parent == self.folder and outcome != NOT_KEPT:
            self._call("on_checkpoint", path)

    def restore(self, snapshot: store.Snapshot | None) -> list[str]:
        """Goes on from ``snapshot`` (read on rank 0, None: from the start); ends with equal weights on all ranks.

        Returns what of it was left behind, a line each.
        """
        self._last = snapshot.path if snapshot else None
        self._metrics = snapshot.meta.get("monitor", {}) if snapshot else {}
        return train_state.restore(self, snapshot)

    # ---- summary

    def _summary(self) -> dict[str, Any]:
        p = self.progress
        return {
            "framework": self.config.framework,
            "model": self.config.model.name,
            "world_size": self.communicator.size,
            "epochs": p.epoch,
            **({"paused_at": p.epoch} if self.paused else {}),
            "steps": p.step,
            "train_samples": p.seen,
            **({"skipped_steps": p.skipped} if self.config.checks_gradients else {}),
            "val_samples": p.val.get("val_samples", 0),
            **_numbers({f"train_{name}": p.train.get(f"train_{name}") for name in self.config.task.names}),
            **_numbers({f"val_{name}": p.val.get(f"val_{name}") for name in self.config.task.names}),
            "samples_per_second": self.samples_per_second(),
            "weights_sha256": weights_sha256(self.frontend.state()),
        }


def _numbers(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """None for what is no number, as JSON knows no nan."""
    return {name: x if x is not None and math.isfinite(x) else None for name, x in values.items()}


def _told(part: str, results: Mapping[str, float]) -> dict[str, float]:
    return {f"{part}_{name}": value for name, value in results.items()}


def start_agreement(config: Config, frontend: FrontEnd, facts: dict[str, str]) -> None:
    """Model, data, configuration and versions are compared before the first collective that could hang."""
    specs = json.dumps([(s.name, s.shape, s.dtype) for s in frontend.specs()])
    digest = hashlib.sha256(specs.encode()).hexdigest()[:12]
    agree(frontend.groups.world, {**facts, "model": f"{config.model.name}, {len(frontend.specs())} tensors, {digest}"})


def _limited(batches: Generator[Batch, None, None], limit: int | None) -> Generator[Batch, None, None]:
    with closing(batches):
        yield from itertools.islice(batches, limit)
