"""The three jobs of the command line, put together from the rooms: fit, evaluate, predict."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import __version__
from hvd_train.config import Config, changed, digest, load_config, resolved_yaml
from hvd_train.config.own import look_in, source_of
from hvd_train.core import checkpoint, faults, folder
from hvd_train.core.agreement import collectively
from hvd_train.core.evaluation import evaluate as evaluate_batches
from hvd_train.core.hooks import Crowded, Hook
from hvd_train.core.log import NullLog, RunLog, WordLog, warn
from hvd_train.core.loop import Trainer, start_agreement
from hvd_train.core.manifest import sample_of
from hvd_train.core.meeting import Outside
from hvd_train.core.saving import check_tree, data_facts
from hvd_train.core.state_dict import broadcast, without_slots
from hvd_train.data.classes import listing
from hvd_train.data.loader import Loader
from hvd_train.data.sources import Asked, DataSet, open_data
from hvd_train.errors import CheckpointError, CommunicationError, ConfigError, DataError, Interrupted
from hvd_train.files import Aside, ours_alone
from hvd_train.frameworks import FRAMEWORKS, version
from hvd_train.frontends.rank import settle
from hvd_train.frontends.serial import Serial
from hvd_train.launch import peers, snapshots
from hvd_train.launch.environment import keep_memory, world
from hvd_train.launch.outside import Ears
from hvd_train.protocol import (
    Batch,
    Communicator,
    Compressor,
    Field,
    FrontEnd,
    FrontEndModule,
    Sample,
    one_or_all,
)


@dataclass
class Job:
    """What every command needs: this rank's place, the data, the front-end."""

    config: Config
    communicator: Communicator
    data: DataSet
    frontend: FrontEnd
    settings: dict[str, Any]  # what this rank runs with: launcher, threads, environment, and who chose each
    given: Config  # the configuration without what the data told
    split: str = "val"  # what eval and predict take

    def loader(self, split: str) -> Loader:
        c, communicator = self.config, self.communicator
        return Loader(
            self.data.parts[split],
            global_batch=c.global_batch(communicator.size),
            accumulate=c.accumulate_grad_batches,
            rank=communicator.rank,
            size=communicator.size,
            seed=c.seed,
            workers=c.data.workers,
        )


def connect(job: Job, compression: str) -> str:
    """Puts the exchange between front-end and network; returns which compression ``auto`` took, or the given one."""
    from hvd_train.compression import make
    from hvd_train.core import auto, synchronizers
    from hvd_train.core.exchange import Clip
    from hvd_train.core.exchange import Exchange as GradientExchange

    config, frontend, communicator = job.config, job.frontend, job.communicator
    exchange, specs = config.exchange, frontend.specs()

    def compressor(name: str) -> Compressor:
        return make(name, communicator.size, **exchange.options(name))

    if exchange.op == "adasum":
        _check_adasum(communicator)
    if compression == "auto":
        compression, seconds = auto.choose(specs, frontend.packing, compressor, communicator, frontend.ops)
        if communicator.rank == 0 and seconds:
            listed = ", ".join(f"{name} {1000 * s:,.1f} ms" for name, s in seconds.items())
            print(f"exchange.compression: auto takes {compression} (an exchange: {listed})", flush=True)

    def build(over: Communicator) -> GradientExchange:
        return GradientExchange(
            specs,
            frontend.packing,
            compressor(compression),
            over,
            frontend.ops,
            Clip(config.gradient_clip_val, config.gradient_clip_algorithm),
            op="adasum" if exchange.op == "adasum" else "sum",
            world=communicator,
        )

    frontend.connect(synchronizers.make(exchange).exchange(build, communicator, Serial()))
    return compression


def _check_adasum(communicator: Communicator) -> None:
    where = "exchange.op: adasum"
    if communicator.size & (communicator.size - 1):
        what = f"adasum joins 2, 4, 8, ... ranks, not {communicator.size}"
        raise ConfigError(what, where=where, fix="change -np, or set exchange.op: average", common=True)
    if communicator.size > 1 and not communicator.mpi:
        what = "adasum needs MPI, and this world was started with Gloo"
        raise ConfigError(what, where=where, fix="start with mpirun, or set exchange.op: average", common=True)


def _versions(config: Config) -> dict[str, str]:
    names = (*FRAMEWORKS[config.framework].packages, "horovod", "numpy")
    found = {name: number for name in names if (number := version(name))}
    return {"hvd_train": __version__, "python": platform.python_version(), **found}


def open_job(
    config: Config,
    module: FrontEndModule,
    communicator: Communicator,
    data: DataSet,
    settings: dict[str, Any] | None = None,
    split: str = "val",
) -> Job:
    """Builds the model on every rank and makes the ranks agree on all that training rests on."""
    frontend = collectively(communicator, lambda: module.open_frontend(config, communicator, data.sample))
    sizes = " + ".join(str(len(part)) for part in data.parts.values())
    given, config = config, named(config, data.sample)
    facts = {
        "config": digest(config),
        "data": f"{data.name}, {sizes} samples, {data.fingerprint}",
        "global batch": str(config.global_batch(communicator.size)),
        **_versions(config),
    }
    start_agreement(config, frontend, facts)
    return Job(config, communicator, data, frontend, settings or {}, given, split)


def named(config: Config, sample: Sample) -> Config:
    """The configuration with ``data.classes`` as the data have them: a run keeps its classes."""
    found = {name: list(field.names) for name, field in sample.labels.items() if field.names}
    if not found or config.data.classes == one_or_all(found):
        return config
    several = len(sample.labels) > 1
    return config.model_copy(
        update={"data": config.data.model_copy(update={"classes": found if several else one_or_all(found)})}
    )


def as_before(
    config: Config, communicator: Communicator, data: DataSet, resume: str | None, given: Any = None
) -> DataSet:
    """The data as the run that is resumed took them: earlier versions took every (n, height, width) for images.

    Rank 0 reads the checkpoint's manifest. ``given``: as ``open_data``.
    """
    if resume is None or config.data.images is not None:
        return data
    were = communicator.rank == 0 and _were_images(config, data, resume)
    if not communicator.broadcast_bytes(b"1" if were else b""):
        return data
    if communicator.rank == 0:
        shapes = ", ".join(str(field.shape) for field in data.sample.inputs.values())
        print(
            f"note: samples of {shapes} are images, as when the run began (data.images: true)",
            file=sys.stderr,
            flush=True,
        )
    as_images = config.data.model_copy(update={"images": True})
    return collectively(communicator, lambda: open_data(as_images, config.task, given))


def _were_images(config: Config, data: DataSet, resume: str) -> bool:
    folder, rule = Path(config.run_dir), config.checkpoint
    try:
        newest = resume in ("auto", "last")
        place = (
            checkpoint.newest_readable(folder / "checkpoints")
            if newest
            else checkpoint.resolve(folder, resume, rule.monitor, rule.mode)
        )
        run = sample_of(checkpoint.read(place)[1])
    except (CheckpointError, OSError):  # is told where the checkpoint is loaded
        return False
    pairs = [(run.inputs[name], field) for name, field in data.sample.inputs.items() if run and name in run.inputs]
    return any(old.image and not new.image and old.shape in (new.shape, (*new.shape, 1)) for old, new in pairs)


@contextmanager
def opened(config: Config, verbose: bool, resume: str | None = None) -> Iterator[Job]:
    """Data first (it fails fastest), then the framework, the world, the model."""
    look_in(config.code_dir)
    data = open_data(config.data, config.task)
    rank = settle(config.framework, config.threads, verbose, lean=True)
    rank.module.configure(rank.threads)
    communicator = rank.communicator()
    communicator.open()
    with telling(communicator):
        data = as_before(config, communicator, data, resume)
        yield open_job(config, rank.module, communicator, data, rank.settings)
        communicator.barrier()
    communicator.close()


@contextmanager
def telling(communicator: Communicator) -> Iterator[None]:
    """What comes of a lost rank, or of too little memory, is told as that."""
    try:
        yield
    except Exception as error:
        failure = communicator.failure(error) or _out_of_memory(error)
        if failure is None:
            raise
        raise failure from error


def _out_of_memory(error: Exception) -> CommunicationError | None:
    """Python, PyTorch (on CPUs without a type of its own) and TensorFlow say it in their own ways."""
    text = str(error)
    kinds = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"} & {c.__name__ for c in type(error).__mro__}
    if not kinds and "can't allocate memory" not in text and "std::bad_alloc" not in text:
        return None
    what = f"out of memory: {text.splitlines()[0][:200] if text else type(error).__name__}"
    fix = "lower batch_size (accumulate_grad_batches keeps the global batch), or start fewer ranks on this host"
    return CommunicationError(what, fix=fix)


def _find_snapshot(job: Job, resume: str | None, allow_change: Sequence[str]) -> checkpoint.Snapshot | None:
    """The checkpoint that ``resume`` names; its configuration and data must be this run's, but for what is allowed."""
    if resume is None:
        return None
    run_dir = Path(job.config.run_dir)
    if resume in ("auto", "last"):
        snapshot = checkpoint.newest(run_dir / "checkpoints", warn, snapshots.given())
        if snapshot is None and resume == "last":
            raise CheckpointError("there is no checkpoint to resume from", where=str(run_dir / "checkpoints"))
    else:
        snapshot = checkpoint.load(checkpoint.resolve(run_dir, resume, *_best(job.config), warn))
    if snapshot is None:
        return None
    before = snapshot.config()
    classes = job.config.data.classes
    if classes and before.data.classes is None and job.given.data.classes is None:  # an older checkpoint tells none
        before = before.model_copy(update={"data": before.data.model_copy(update={"classes": classes})})
    rows = [row for row in changed(before, job.config) if not _allowed(row[0], allow_change)]
    if rows:
        listed = ", ".join(f"{key}: {a} -> {b}" for key, a, b in rows)
        keys = " ".join(f"--allow-change {key}" for key, _, _ in rows)
        kept = next((a for key, a, _ in rows if key == "data.classes" and isinstance(a, list)), None)
        undo = f"keep its classes with --set data.classes={json.dumps(kept)!r}" if kept else "undo it"
        raise ConfigError(f"the configuration changed since the checkpoint ({listed})", fix=f"{undo}, or give {keys}")
    _check_fields(snapshot, job.data.sample, "data" in allow_change)
    learned = _vocabulary(run_dir) if job.data.vocabulary else ""
    if learned and json.loads(learned) != json.loads(job.data.vocabulary):
        what = "the vocabulary that was learned from the text is another one than at the checkpoint"
        fix = f"keep to the run's: --set data.vocabulary={(run_dir / folder.VOCABULARY).resolve()} --allow-change data"
        raise DataError(what, where=str(snapshot.path), fix=fix)
    if "data" not in allow_change:
        _check_data(snapshot, data_facts(job.data.train, job.data.val), len(job.data.train))
    return snapshot


def _vocabulary(run_dir: Path) -> str:
    """The run's, JSON; empty: it has none, or is of an older version."""
    try:
        text = (run_dir / folder.VOCABULARY).read_text(encoding="utf-8")
        json.loads(text)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        what = f"the vocabulary of the run cannot be read: {error}"
        raise CheckpointError(what, where=str(run_dir / folder.VOCABULARY)) from error
    return text


def _check_vocabulary(config: Config, data: DataSet, own: bool, meta: Mapping[str, Any]) -> None:
    """Raises where words may have other numbers than in the run. An older run did not keep what it learned."""
    if not data.vocabulary or (config.data.vocabulary and not meta["vocabulary"]):
        return
    if meta["vocabulary"]:
        if json.loads(meta["vocabulary"]) != json.loads(data.vocabulary):
            what = "the text was numbered by another vocabulary than the run's"
            fix = "number it by vocabulary.json of the run, with data.vocabulary"
            raise DataError(what, where=config.data.path or "data", fix=fix)
        return
    there = data.parts.keys() >= {"train", "val"}
    found = data_facts(data.parts["train"], data.parts["val"]) if there else {}
    if not own or (found and _parts_changed(meta.get("data") or {}, found)):
        what = "the run is of an older version and did not keep its vocabulary, and this text is not the run's"
        raise DataError(what, where="data.vocabulary", fix="take the run's own text, or train again")


def _check_fields(snapshot: checkpoint.Snapshot, found: Sample, allowed: bool) -> None:
    """The weights know columns by their places and inputs by their size, whatever else of the data may change."""
    run = sample_of(snapshot.meta) if snapshot.meta.get("sample") else None
    pairs = [(kind, getattr(run, kind), getattr(found, kind)) for kind in ("inputs", "labels")] if run else []
    for kind, before, now in pairs:
        for name, old in before.items():
            new = now.get(name)
            if new is None:
                continue
            key = "data.features" if kind == "inputs" else "data.labels"
            if old.columns and new.columns and old.columns != new.columns:
                same = set(old.columns) == set(new.columns)
                if same or not allowed:
                    how = "in another order" if same else "called otherwise"
                    what = f"the columns are {how} than at the checkpoint: {listing(new.columns)}"
                    fix = f"they were {listing(old.columns)}; give them again, or --allow-change data: by their places"
                    if same:
                        fix = f"give --set {key}={json.dumps(list(old.columns))!r} --allow-change data"
                    raise DataError(what, where=str(snapshot.path), fix=fix)
            if kind == "inputs" and old.divisor != new.divisor:
                told = [f"{one.dtype} divided by {one.divisor:g}" for one in (old, new)]
                what = f"inputs '{name}' were {told[0]} at the checkpoint, and are {told[1]}"
                raise DataError(what, where=str(snapshot.path), fix=f"store them as {old.dtype}")


def _parts_changed(old: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Training: 88 samples -> 120; of a part that is other than the checkpoint tells."""
    rows = []
    for part, name in {"train": "training", "val": "validation"}.items():
        if part in old and old[part] != found[part]:
            before, now = (f"{facts[part]['samples']:,}" for facts in (old, found))
            rows.append(f"{name}: {before} samples -> {now}" if before != now else f"{name}: {now} samples, but others")
    return rows


def _check_data(snapshot: checkpoint.Snapshot, found: dict[str, dict[str, Any]], size: int) -> None:
    rows = _parts_changed(snapshot.meta.get("data", {}), found)
    consumed = snapshot.progress.consumed
    if not rows and consumed > size:  # a checkpoint that tells nothing of its data
        rows.append(f"training: {consumed:,} samples of an epoch used -> {size:,}")
    if rows:
        what = f"the data changed since the checkpoint ({'; '.join(rows)})"
        fix = "give the same data, or --allow-change data: a begun epoch then begins anew"
        raise DataError(what, where=str(snapshot.path), fix=fix)


def _allowed(key: str, allow_change: Sequence[str]) -> bool:
    if key.startswith("data.classes"):  # other data are no reason to number classes anew
        return "data.classes" in allow_change
    return any(key == allowed or key.startswith(allowed + ".") for allowed in allow_change)


def fit(
    config: Config,
    resume: str | None,
    allow_change: tuple[str, ...],
    overwrite: bool,
    verbose: bool,
    ears: Ears,
    until: int | None = None,
) -> int:
    """Trains; on rank 0 leaves a run folder. Returns the exit code."""
    code, ears.run_dir = 0, Path(config.run_dir)
    faults.arm(world().rank)
    with locked(config, resume, overwrite) as lock, opened(config, verbose, resume) as job:
        if not ears.told and job.communicator.size > 1:
            ears.seen = peers.watch(job.communicator, config.watchdog_s, "--resume auto goes on")
        if lock:
            ears.leaving.append(lock.release)
        ears.leaving.append(snapshots.forget)
        try:
            train(job, resume, allow_change, overwrite, lock, outside=ears, until=until)
        except Interrupted as error:
            code = error.exit_code
        ears.leave(code)  # the ranks leave one by one, and launchers signal the last
    ears.end(code=code)
    return code


def check(config: Config, resume: str | None, allow_change: Sequence[str], overwrite: bool, verbose: bool) -> int:
    """Do what comes before a training, then one step and one batch of an evaluation; nothing is written."""
    run_dir = Path(config.run_dir)
    if world().rank == 0:
        folder.check_free(run_dir, resume, overwrite)
    with opened(config, verbose) as job:
        communicator, first = job.communicator, job.communicator.rank == 0
        log = WordLog() if first else NullLog()

        def find() -> checkpoint.Snapshot | None:
            snapshot = _find_snapshot(job, resume, allow_change) if first else None
            if snapshot:
                check_tree(without_slots(job.frontend.state()), without_slots(snapshot.tree))
            return snapshot

        snapshot = collectively(communicator, find)
        connect(job, config.exchange.compression)
        data: dict[str, Any] = config.model_dump(mode="json")
        data |= {"max_steps": 1, "max_epochs": None, "limit_val_batches": 1, "agreement_every_n_steps": 1}
        data |= {"checkpoint": {"save_top_k": 0, "save_last": False}, "early_stopping": None}
        trainer = Trainer(Config.model_validate(data), job.frontend, job.data.train, job.data.val, run_dir, log)
        trainer.restore(None)
        log.message("\n".join([_banner(job, trainer, None), *config.notes]))
        if first and ":" in config.model.name:
            _look_at_outputs(job, log)
        summary = trainer.fit()
        going = f", checkpoint {snapshot.path.name} to go on from" if snapshot else ""
        log.message(f"checked: configuration, data, model{going}; {_tried(summary)}")
        log.message(f"nothing was written; without --check the run folder will be {run_dir}")
    return 0


def _tried(summary: dict[str, Any]) -> str:
    loss, val = summary["train_loss"], summary["val_loss"]
    step = f"one step of {summary['train_samples']:,} samples, forward, backward and update"
    step += " left out for its gradients" if loss is None else f" (loss {loss:.4f})"
    return f"{step}; one validation batch" + ("" if val is None else f" (loss {val:.4f})")


@contextmanager
def locked(config: Config, resume: str | None, overwrite: bool) -> Iterator[folder.Lock | None]:
    """The run folder as rank 0's own, if it is free for this run."""
    if world().rank:
        yield None
        return
    run_dir = Path(config.run_dir)
    with folder.Lock(run_dir) as lock:
        folder.bring_back(run_dir)
        folder.check_free(run_dir, resume, overwrite)
        yield lock


def train(
    job: Job,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    overwrite: bool = False,
    lock: folder.Lock | None = None,
    hooks: Sequence[Hook] = (),
    outside: Outside | None = None,
    until: int | None = None,
) -> dict[str, Any]:
    """Runs the training of an opened job, or its part before epoch ``until``; returns the summary, equal on all ranks,
    or raises Interrupted.

    All is read and checked, on all ranks, before anything of the run folder is changed.
    """
    config, communicator, run_dir = job.config, job.communicator, Path(job.config.run_dir)
    log: RunLog | NullLog = NullLog()
    if communicator.rank == 0:
        log = RunLog(run_dir, tensorboard=config.tensorboard, total_epochs=config.max_epochs, lock=lock)
    snapshot = collectively(
        communicator, lambda: None if communicator.rank else _find_snapshot(job, resume, allow_change)
    )
    # ``auto`` keeps to what the run began with: the link may look different today.
    wanted = config.exchange.compression
    if snapshot and wanted == "auto":
        wanted = snapshot.meta.get("compression") or wanted
    taken = connect(job, communicator.broadcast_bytes(wanted.encode()).decode())
    data = job.data.train, job.data.val
    hooks = [*_crowded(job), *hooks]
    trainer = Trainer(config, job.frontend, *data, run_dir, log, taken, hooks, outside, until, snapshots.given())
    notes = trainer.restore(snapshot)
    log.message("\n".join([_banner(job, trainer, snapshot), *config.notes, *notes, *filter(None, [trainer.complete])]))
    if communicator.rank == 0 and ":" in config.model.name:
        _look_at_outputs(job, log)
    kept = keep_memory()  # from here on: what the set-up freed has gone back
    if isinstance(log, RunLog):
        about = {"versions": _versions(config), **job.settings, "compression": taken, "keeps_freed_memory": kept}
        log.files = {"config.yaml": resolved_yaml(config.resolved()), "environment.json": about}
        if job.data.vocabulary:
            log.files[folder.VOCABULARY] = job.data.vocabulary
        log.resumed_at = None if resume is None else trainer.progress.step
        log.evaluates_again = trainer.progress.ending
        log.replace = overwrite and not folder.goes_on(run_dir, resume)
    faults.at("start")
    try:
        summary = trainer.fit()
    except Interrupted as error:
        log.message(str(error))
        collectively(communicator, lambda: log.close(trainer.progress.step))
        raise
    collectively(communicator, lambda: log.summary(summary))
    if communicator.rank == 0:
        log.message(_closing(summary, config))
    log.close()
    return summary


def _crowded(job: Job) -> list[Hook]:
    """The hook that looks whether several threads are worse than one, where nobody but ``auto`` chose them."""
    threads = job.settings.get("threads", 1)
    by = job.settings.get("environment", {}).get("OMP_NUM_THREADS", {}).get("chosen_by")
    chosen = job.config.threads == "auto" and by == "hvd_train" and job.config.device != "cuda"
    alone = job.communicator.size == 1 and threads > 1 and FRAMEWORKS[job.config.framework].threads_wait
    return [Crowded(threads)] if chosen and alone else []


def _look_at_outputs(job: Job, log: RunLog | NullLog) -> None:
    """A model of the user's own may end in softmax, which the loss applies again: it learns, but slowly and worse."""
    if job.config.task.loss != "cross_entropy":
        return
    indices = np.arange(min(8, len(job.data.train)))
    inputs, labels = job.data.train.fetch(indices)
    batch = Batch(inputs, labels, np.ones(len(indices), np.float32), indices)
    found = job.frontend.predict(job.frontend.to_device(batch))
    logits = one_or_all(found) if isinstance(found, dict) else found
    sums = np.sum(logits, axis=-1, dtype=np.float64)
    if logits.shape[-1] > 1 and (logits >= 0).all() and np.abs(sums - 1).max() < 0.01:
        what = "the model gives probabilities (its outputs are not negative and sum to 1), and the loss applies softmax"
        log.warning(f"{what} again; model.name: {job.config.model.name}; leave its last softmax out")


def _banner(job: Job, trainer: Trainer, snapshot: checkpoint.Snapshot | None) -> str:
    c, count, size = job.config, sum(spec.size for spec in job.frontend.specs()), job.communicator.size
    steps = f"{trainer.steps_per_epoch} steps per epoch"
    if trainer.limit < trainer.steps_per_epoch:
        samples = f"{trainer.epoch_size:,} of {trainer.train_size:,} samples"
        steps = f"{trainer.limit} of {steps}, {samples} (limit_train_batches)"
    if c.limit_val_batches and (scored := c.limit_val_batches * trainer.val_loader.length * size) < trainer.val_size:
        steps += f"; an evaluation takes {scored:,} of {trainer.val_size:,} samples (limit_val_batches)"
    lines = [
        f"{c.framework}, {c.model.name}: {count:,} weights; {job.data.name}: {len(job.data.train):,} training and "
        f"{len(job.data.val):,} validation samples",
        f"{size} rank{'s' * (size > 1)}, global batch {trainer.global_batch}, {steps}",
    ]
    lines.append(f"the model gets {_gets(job)}")
    notes = (getattr(part, "note", "").splitlines() for part in (job.data.train, job.data.val))
    lines += dict.fromkeys(line for part in notes for line in part)
    lines += [*_classes_told(job.data.sample), *job.data.remarks]
    if snapshot:
        p = trainer.progress
        lines.append(f"resumed at step {p.step}: epoch {p.epoch + 1}, {p.consumed:,} samples of it used")
    return "\n".join(lines)


def _gets(job: Job) -> str:
    """Images (1, 28, 28) float32: the shape and type of a sample in the framework's own order of axes."""
    first = FRAMEWORKS[job.config.framework].channels_first
    weights = "float64" if job.config.precision == "64" else "float32"
    listed = []
    for name, field in job.data.sample.inputs.items():
        shape = (field.shape[2], *field.shape[:2]) if field.image and first else field.shape
        kind = ("bool" if field.dtype == "bool" else "int64") if field.whole else weights
        title = [name] * (len(job.data.sample.inputs) > 1) + ["images"] * bool(field.image)
        listed.append(" ".join([*title, f"{shape} {kind}"]))
    return ", ".join(listed)


def _classes_told(sample: Sample) -> list[str]:
    """The names of the classes and their numbers, a line for each label."""
    rows = {name: [f"{one} {k}" for k, one in enumerate(field.names or ())] for name, field in sample.labels.items()}
    return [f"classes{f' of {name}' * (len(rows) > 1)}: {listing(row)}" for name, row in rows.items() if row]


def _closing(summary: dict[str, Any], config: Config) -> str:
    run_dir = Path(config.run_dir)
    told = {name[4:]: x for name, x in summary.items() if name.startswith("val_") and name != "val_samples"}
    listed = ", ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in told.items() if x is not None)
    result = f"validation {listed}" if listed else "no evaluation"
    at = summary.get("paused_at")
    word = f"left after epoch {at}, --resume auto goes on" if at else "done"
    best = checkpoint.best(run_dir / "checkpoints", *_best(config)) if config.checkpoint.save_top_k else ""
    best = f"; best: {best}" if best else ""
    speed = summary["samples_per_second"]
    speed = f", {speed:,.0f} samples/s" if speed else ""
    return f"{word}: {result}{speed}{best}; run folder {run_dir}"


def trained_config(
    path: Path | None, sets: Sequence[str], run_dir: str | None, which: str
) -> tuple[Config, dict[str, str]]:
    """The configuration saved with the checkpoint ``which`` of a run folder, unless a file is given; and what of it
    names code that the caller has not named himself, where folder and code are not his alone."""
    if path is not None:
        return load_config(path, sets, run_dir=run_dir).restoring(), {}
    if run_dir is None:
        raise ConfigError(
            "which run?", fix="give --run-dir FOLDER (the checkpoint's configuration is used), or -c FILE"
        )
    folder = Path(run_dir)
    if not (folder / "checkpoints").is_dir() and not (folder / "config.yaml").exists():
        raise ConfigError("is no run folder: it holds no checkpoints and no config.yaml", where=run_dir)

    def saved(place: Path) -> Config:
        return load_config(None, sets, base=checkpoint.config_of(place), run_dir=run_dir).restoring()

    # "best" is a matter of the configuration, which is that of the newest one as long as none is chosen.
    place = checkpoint.newest_readable(folder / "checkpoints") if which in ("last", "best") else None
    config = saved(place) if place else None
    if which != "last":
        place = checkpoint.resolve(folder, which, *_best(config or Config()))
        config = saved(place)
    assert config is not None and place is not None
    given = {setting.partition("=")[0].strip().replace("-", "_") for setting in sets}
    named = {key: name for key, name in config.user_code.items() if not given & {key, key.partition(".")[0]}}
    if not named and "code_dir" not in given:
        # All code is what the caller names: it is the caller's, not what lies in a folder that the run names.
        config = config.model_copy(update={"code_dir": None})
    return config, {} if named and _is_callers(named, config.code_dir, folder, place) else named


def _is_callers(named: Mapping[str, str], code_dir: str | None, run_dir: Path, place: Path) -> bool:
    """Return whether a run folder, its checkpoint ``place`` and the code that it names belong to the caller alone.

    A library's function is not the caller's: a folder that was unpacked here could name any of them."""
    look_in(code_dir)
    sources = [source_of(name) for names in named.values() for name in names.split(", ") if ":" in name]
    held = [run_dir, *run_dir.rglob("*"), place, *place.rglob("*")]
    return all(sources) and ours_alone([*held, *(file for files in sources for file in files)])


def refuse_foreign(named: Mapping[str, str], run_dir: str) -> None:
    """What a run folder names is code of whoever made it."""
    if named:
        listed = ", ".join(f"{key}: {json.dumps(name)[:200]}" for key, name in named.items())
        sets = " ".join(f"--set {key}=..." for key in named)
        what = f"the run folder names code of its own, which would be imported and run ({listed})"
        own = "a folder and code that belong to you, which nobody else can write (chmod -R go-w), need neither"
        fix = f"if you trust it: --trust, or name it yourself with {sets} or -c FILE; {own}"
        raise ConfigError(what, where=run_dir, fix=fix)


def _best(config: Config) -> tuple[str, str]:
    """Return what makes a checkpoint the best: (monitor, mode)."""
    return config.checkpoint.monitor, config.mode_of(config.checkpoint)


def chosen(config: Config, which: str) -> checkpoint.Snapshot:
    """The checkpoint that --checkpoint names, verified."""
    if which == "best":
        for note in config.notes:
            warn(note)
    return checkpoint.choose(Path(config.run_dir), which, *_best(config), warn)


@contextmanager
def reopened(config: Config, which: str, split: str | None, verbose: bool, labels: bool = True) -> Iterator[Job]:
    """A job with the weights and statistics of the checkpoint ``which``, which rank 0 reads, over data that are read as
    the run knows them. ``labels``: whether they are looked at where no split needs them."""
    look_in(config.code_dir)
    rank = settle(config.framework, config.threads, verbose, lean=True)
    rank.module.configure(rank.threads)
    communicator = rank.communicator()
    communicator.open()
    with telling(communicator):
        snapshot = collectively(communicator, lambda: None if communicator.rank else chosen(config, which))
        meta = {key: x for key, x in snapshot.meta.items() if key != "progress"} if snapshot else {}
        kept = collectively(communicator, lambda: "" if communicator.rank else _vocabulary(Path(config.run_dir)))
        meta["vocabulary"] = kept
        meta = json.loads(communicator.broadcast_bytes(json.dumps(meta).encode()))
        own, run = _is_own(config, meta), sample_of(meta)
        split = split or ("val" if own else "all")
        looked_at = labels or run is None or split in ("train", "val")
        asked = Asked(run, split, looked_at, vocabulary=meta["vocabulary"])
        data = collectively(communicator, lambda: open_data(config.data, config.task, asked=asked))
        collectively(communicator, lambda: _check_vocabulary(config, data, own, meta))
        job = open_job(config, rank.module, communicator, data, rank.settings, split)
        if communicator.rank == 0:
            _tell_data(job, run, own, meta.get("data") or {})
        connect(job, "none")
        tree = without_slots(snapshot.tree) if snapshot else {}
        collectively(communicator, lambda: check_tree(without_slots(job.frontend.state()), tree) if snapshot else None)
        for piece in broadcast(communicator, tree):
            job.frontend.load(piece)
        yield job
        communicator.barrier()
    communicator.close()


def _is_own(config: Config, meta: Mapping[str, Any]) -> bool:
    """Return whether these are the data that the run was trained and validated with, by their name and place."""
    before, now = (meta.get("config") or {}).get("data") or {}, config.data
    places = [path and Path(path).expanduser().resolve() for path in (before.get("path"), now.path)]
    same = before.get("name", now.name) == now.name and before.get("options", now.options) == now.options
    return same and (not before or places[0] == places[1])


def _tell_data(job: Job, run: Sample | None, own: bool, before: Mapping[str, Any]) -> None:
    """``before``: of the run's parts, what the checkpoint tells."""
    lines, labels, parts = job.data.remarks, job.data.sample.labels, job.data.parts
    if own and job.split in ("train", "val") and parts.keys() >= {"train", "val"}:
        rows = _parts_changed(before, data_facts(parts["train"], parts["val"]))
        if rows:
            told = f"the data changed since the training ({'; '.join(rows)})"
            lines.append(f"{told}: the {job.split} part may hold other samples than it did (--split all takes all)")
    for name, field in run.labels.items() if run else ():
        found = labels.get(name) or one_or_all(labels)
        if field.names is None and isinstance(found, Field) and found.names:
            listed = listing([f"{one} {k}" for k, one in enumerate(found.names)])
            lines.append(f"the checkpoint is of an older version and does not tell its classes: they are {listed}")
    if not own and job.split == "all":
        count = len(job.data.parts["all"])
        lines.append(f"the data are not those of the run: all {count:,} samples are taken (--split takes a part)")
    for line in lines:
        print(f"note: {line}", file=sys.stderr, flush=True)


def evaluate(config: Config, which: str, split: str | None, verbose: bool) -> int:
    """Loss and accuracy of a checkpoint over every sample of a split, exactly once; one JSON line on rank 0. Without a
    ``split`` it is the validation part of the run's own data, and all of others."""
    with reopened(config, which, split, verbose) as job:
        result = evaluate_batches(job.frontend, job.loader(job.split).evaluation())
        if job.communicator.rank == 0:
            print(json.dumps({"split": job.split, **result}), flush=True)
    return 0


def check_output(config: Config, output: Path, overwrite: bool) -> None:
    """Before any work, on the rank that writes: the files of ``predict`` must not be there."""
    names = [name for name in config.task.terms if name]
    there = [path for path in map(partial(_named, output), names or [""]) if path.exists()]
    if there and not overwrite and world().rank == 0:
        fix = "give --overwrite, or another place with -o"
        raise ConfigError("the file exists already", where=str(there[0]), fix=fix)


def check_names(config: Config, output: Path) -> None:
    """``predict --names`` wants classes and a CSV file."""
    other = {name: loss for name, (loss, _) in config.task.terms.items() if loss != "cross_entropy"}
    if other:
        what = f"task.loss: {', '.join(other.values())} has no classes"
        raise ConfigError(what, where="--names", fix="leave it out: what the model gives is written as .npy")
    if output.suffix != ".csv":
        raise ConfigError("a table of classes is a CSV file", where=f"-o {output}", fix="end its name in .csv")


def predict(
    config: Config,
    which: str,
    output: Path,
    split: str | None,
    verbose: bool,
    overwrite: bool = False,
    names: bool = False,
) -> int:
    """Writes what the model gives, (samples, ...) in the data set's order, as .npy; of several outputs a file each,
    OUTPUT.NAME.npy. N ranks share the work. Labels are not needed, but where they decide what is held out. ``names``:
    writes a table of each sample's class and its probability instead."""
    with reopened(config, which, split, verbose, labels=False) as job:
        communicator, split = job.communicator, job.split
        total = len(job.data.parts[split])
        made = partial(_made_file, job, names)
        files: dict[str, _Rows] = {}
        try:
            for batch in job.loader(split).evaluation():
                found = job.frontend.predict(job.frontend.to_device(batch))
                for name, rows in (found if isinstance(found, dict) else {"": found}).items():
                    if name not in files:
                        files[name] = made(name, _named(output, name), overwrite)
                    _put(files[name], rows, batch, communicator, total)
            for file in files.values():
                collectively(communicator, file.close)
        except BaseException:
            for written in files.values():
                written.forget()
            raise
        if communicator.rank == 0:
            listed = ", ".join(str(_named(output, name)) for name in files)
            print(f"{total:,} predictions of the {split} split: {listed}", flush=True)
    return 0


def _made_file(job: Job, names: bool, name: str, output: Path, overwrite: bool) -> _Rows:
    """The file of the output ``name``."""
    labels = job.data.sample.labels
    field = labels.get(name) or one_or_all(labels)
    if not names:
        return _Rows(output, overwrite)
    if not isinstance(field, Field) or field.shape:
        what = "the model gives a class for each place of a sample"
        raise ConfigError(what, where="--names", fix="leave it out: the numbers are written as .npy", common=True)
    part = job.data.parts[job.split]
    return _Classes(output, overwrite, field.names or (), getattr(part, "files", ()), getattr(part, "rows", None))


def _named(output: Path, name: str) -> Path:
    return output.with_name(f"{output.stem}.{name}{output.suffix}") if name else output


def _put(file: _Rows, rows: np.ndarray, batch: Batch, communicator: Communicator, total: int) -> None:
    """What all ranks found for their parts of a batch, on rank 0 into its file."""
    rows = rows[: batch.count]
    parts = communicator.allgather_bytes(batch.indices.tobytes() + np.ascontiguousarray(rows).tobytes())
    if communicator.rank:
        return
    shape, dtype = rows.shape[1:], rows.dtype
    file.open((total, *shape), dtype)
    width = 8 + dtype.itemsize * math.prod(shape)
    for part in parts:
        count = len(part) // width
        file.put(np.frombuffer(part, np.int64, count), part[8 * count :])


class _Rows:
    """Rows of a .npy file, in any order of whole parts; a file that cannot be written is told at the end, for other
    ranks wait in between. Written and not mapped: a mapped file on a full disk ends the process by a signal."""

    def __init__(self, output: Path, overwrite: bool) -> None:
        self.output, self._overwrite = output, overwrite
        self._file: Aside | None = None
        self._failure: OSError | None = None
        self._start = self._width = 0

    def open(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if self._file or self._failure:
            return
        try:
            if self.output.exists() and not self._overwrite:  # a name that only the outputs tell
                raise FileExistsError(errno.EEXIST, "the file exists already, and --overwrite is not given")
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._file = Aside(self.output)
            self.header(shape, dtype)
            self._start, self._width = self._file.stream.tell(), dtype.itemsize * math.prod(shape[1:])
        except OSError as error:
            self._failure = error

    def put(self, indices: np.ndarray, rows: bytes) -> None:
        """Rows of consecutive ``indices``."""
        if self._file is None or self._failure or not len(indices):
            return
        try:
            self._file.stream.seek(self._start + int(indices[0]) * self._width)
            self._file.stream.write(rows)
        except OSError as error:
            self._failure = error

    def header(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(self._file.stream, told)  # type: ignore[union-attr]

    def close(self) -> None:
        try:
            if self._failure:
                raise self._failure
            if self._file:
                self._file.close()
        except OSError as error:
            what = f"the predictions cannot be written: {error.strerror}"
            raise ConfigError(what, where=str(self.output)) from error

    def forget(self) -> None:
        if self._file:
            self._file.forget()


class _Classes(_Rows):
    """A CSV file with the class of each sample, by name, and its probability, the softmax of its logit. Rows come in
    the order of the samples. ``rows``: their numbers in the whole data, where they are a held-out part."""

    def __init__(
        self, output: Path, overwrite: bool, names: Sequence[str], files: Sequence[str], rows: np.ndarray | None
    ) -> None:
        super().__init__(output, overwrite)
        self._names, self._files = names, files
        self._samples: Sequence[str] | np.ndarray | None = files or rows

    def header(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._write([["file" if self._files else "sample", "class", "probability"]])

    def put(self, indices: np.ndarray, rows: bytes) -> None:
        if self._file is None or self._failure or not len(indices):
            return
        logits = np.frombuffer(rows, self._dtype).reshape(-1, *self._shape[1:]).astype(np.float64)
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        classes, most = logits.argmax(-1), (powers / powers.sum(-1, keepdims=True)).max(-1)
        try:
            self._write(
                [index if self._samples is None else self._samples[index], self._title(k), f"{p:.6f}"]
                for index, k, p in zip(indices.tolist(), classes.tolist(), most.tolist(), strict=True)
            )
        except OSError as error:
            self._failure = error

    def _title(self, number: int) -> str | int:
        return self._names[number] if number < len(self._names) else number

    def _write(self, rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._file.stream.write(text.getvalue().encode())  # type: ignore[union-attr]
