"""The three jobs of the command line, put together from the rooms: fit, evaluate, predict."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import __version__
from hvd_train.config import Config, changed, digest, load_config, resolved_yaml
from hvd_train.core import checkpoint
from hvd_train.core.agreement import together
from hvd_train.core.log import NullLog, RunLog
from hvd_train.core.loop import Trainer, check_tree, start_agreement
from hvd_train.core.loop import evaluate as evaluate_batches
from hvd_train.core.record import Recorder
from hvd_train.core.trees import broadcast, without_slots
from hvd_train.data.loader import Loader
from hvd_train.data.sources import DataSet, open_data
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.launch.environment import World, bind, keep_memory, rank_settings, threads, world
from hvd_train.protocol import Communicator, Compressor, FrontEnd

FRONTENDS = {"pytorch": "hvd_train.frontends.pt", "tensorflow": "hvd_train.frontends.tf"}


@dataclass
class Job:
    """What every command needs: this rank's place, the data, the front-end."""

    config: Config
    communicator: Communicator
    data: DataSet
    frontend: FrontEnd
    settings: dict[str, Any]  # what this rank runs with: launcher, threads, environment, and who chose each

    def loader(self, split: str) -> Loader:
        c, communicator = self.config, self.communicator
        return Loader(
            getattr(self.data, split),
            global_batch=c.global_batch(communicator.size),
            accumulate=c.accumulate_grad_batches,
            rank=communicator.rank,
            size=communicator.size,
            seed=c.seed,
        )


def settle(config: Config, here: World, verbose: bool) -> dict[str, Any]:
    """Sets what frameworks and Horovod read when they load, where the user has set nothing; returns what holds."""
    bind(here)
    chosen = rank_settings(here, config.framework, threads(config.threads, here), verbose)
    by = {name: "user" if name in os.environ else "hvd_train" for name in chosen}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)
    return {
        "host": platform.node(),
        "launcher": here.launcher or "none",
        "ranks": here.size,
        "ranks_on_this_host": here.local_size,
        "cores": os.cpu_count(),
        "cores_of_rank_0": sorted(os.sched_getaffinity(0)),
        "threads": threads(config.threads, here),
        "environment": {name: {"value": os.environ[name], "chosen_by": by[name]} for name in chosen},
    }


def frontend_module(config: Config, count: int, verbose: bool) -> Any:
    """Loads the framework, after the settings that it reads only then."""
    try:
        with _without_noise(verbose):
            module = importlib.import_module(FRONTENDS[config.framework])
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "tensorflow", "keras"):
            raise
        fix = f"run scripts/setup --frameworks {config.framework}"
        raise ConfigError(
            f"{config.framework} is not installed", where=f"framework: {config.framework}", fix=fix
        ) from error
    module.configure(count, config.seed, verbose)
    return module


@contextmanager
def _without_noise(verbose: bool) -> Iterator[None]:
    """TensorFlow writes to descriptor 2 while it loads, whatever its log level; shown if loading fails."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(real, kept.read())
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)


def connect(job: Job, compression: str) -> str:
    """Puts the exchange between front-end and network; returns which compression ``auto`` took, or the given one."""
    from hvd_train.compression import make
    from hvd_train.core import auto
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
    frontend.connect(
        GradientExchange(
            specs,
            frontend.packing,
            compressor(compression),
            # Where weights are averaged instead, gradients stay on their rank.
            communicator if exchange.mode == "allreduce" else Serial(),
            frontend.ops,
            Clip(config.gradient_clip_val, config.gradient_clip_algorithm),
            op="adasum" if exchange.op == "adasum" else "sum",
            world=communicator,
        )
    )
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
    names = {"pytorch": ["torch"], "tensorflow": ["tensorflow", "keras"]}[config.framework] + ["horovod", "numpy"]
    found = {"hvd_train": __version__, "python": platform.python_version()}
    for name in names:
        for package in (name, f"{name}-cpu"):
            try:
                found[name] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def open_job(
    config: Config, module: Any, communicator: Communicator, data: DataSet, settings: dict[str, Any] | None = None
) -> Job:
    """Builds the model on every rank and makes the ranks agree on all that training rests on."""
    frontend = together(
        communicator, lambda: module.open_frontend(config, communicator, data.input_shape, data.num_classes)
    )
    facts = {
        "config": digest(config),
        "data": f"{data.name}, {len(data.train)} + {len(data.val)} samples, {data.fingerprint}",
        "global batch": str(config.global_batch(communicator.size)),
        **_versions(config),
    }
    start_agreement(config, frontend, facts)
    return Job(config, communicator, data, frontend, settings or {})


@contextmanager
def _job(config: Config, verbose: bool) -> Iterator[Job]:
    """Data first (it fails fastest), then the framework, the world, the model."""
    here = world()
    data = open_data(config.data)
    settings = settle(config, here, verbose)
    module = frontend_module(config, settings["threads"], verbose)
    communicator = module.horovod(here.size) if here.size > 1 else Serial()
    communicator.open()
    try:
        yield open_job(config, module, communicator, data, settings)
        communicator.barrier()
    except Exception as error:
        failure = communicator.failure(error)
        if failure is None:
            raise
        raise failure from error
    communicator.close()


def _run_folder(run_dir: Path, resume: str | None, overwrite: bool) -> None:
    """A run folder holds one run: another one in its place must be asked for."""
    metrics = run_dir / "metrics.jsonl"
    used = (metrics.exists() and metrics.stat().st_size > 0) or bool(checkpoint.find(run_dir / "checkpoints"))
    if used and resume is None and not overwrite:
        fix = "give --resume auto to go on, --overwrite to start anew, or another --run-dir"
        raise ConfigError("the run folder holds a run already", where=str(run_dir), fix=fix)
    if used and overwrite and resume is None:
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
        for name in ("metrics.jsonl", "summary.json"):
            (run_dir / name).unlink(missing_ok=True)
    checkpoint.preflight(run_dir / "checkpoints")


def _find_snapshot(
    config: Config, run_dir: Path, resume: str | None, allow_change: Sequence[str], log: Any
) -> checkpoint.Snapshot | None:
    if resume is None:
        return None
    if resume in ("auto", "last"):
        snapshot = checkpoint.newest(run_dir / "checkpoints", log.warning)
        if snapshot is None and resume == "last":
            raise CheckpointError("there is no checkpoint to resume from", where=str(run_dir / "checkpoints"))
    else:
        path = checkpoint.resolve(run_dir, resume)
        snapshot = checkpoint.load(path) if path else None
    if snapshot is not None:
        old = Config.model_validate(snapshot.meta["config"])
        rows = [(key, a, b) for key, a, b in changed(old, config) if not _allowed(key, allow_change)]
        if rows:
            listed = ", ".join(f"{key}: {a} -> {b}" for key, a, b in rows)
            keys = " ".join(f"--allow-change {key}" for key, _, _ in rows)
            raise ConfigError(
                f"the configuration changed since the checkpoint ({listed})", fix=f"undo it, or give {keys}"
            )
    return snapshot


def _allowed(key: str, allow_change: Sequence[str]) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in allow_change)


def record(folder: Path, verbose: bool) -> int:
    """A worker of ``hvd-train verify``: one short run per configuration in ``folder``, with its record beside it."""
    paths = sorted(folder.glob("*.yaml"))
    with _job(load_config(paths[0]), verbose) as first:
        module = importlib.import_module(FRONTENDS[first.config.framework])
        for path in paths:
            config = load_config(path)
            job = first if path == paths[0] else open_job(config, module, first.communicator, first.data)
            job.frontend.without_dropout()
            connect(job, "none")
            recorder = Recorder(config, job.frontend, job.data.train, job.data.val, folder, NullLog())
            recorder.restore(None)
            recorder.record(path.with_suffix(""))
    return 0


def fit(config: Config, resume: str | None, allow_change: tuple[str, ...], overwrite: bool, verbose: bool) -> int:
    """Trains; on rank 0 leaves a run folder. Returns the exit code."""
    if world().rank == 0:
        _run_folder(Path(config.run_dir), resume, overwrite)
    with _job(config, verbose) as job:
        train(job, resume, allow_change)
    return 0


def train(job: Job, resume: str | None = None, allow_change: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the training of an opened job; returns the summary, equal on all ranks."""
    config, communicator, run_dir = job.config, job.communicator, Path(job.config.run_dir)
    log: RunLog | NullLog = NullLog()
    if communicator.rank == 0:
        text = resolved_yaml(config)
        log = RunLog(run_dir, config_yaml=text, tensorboard=config.tensorboard, total_epochs=config.max_epochs)

    def find() -> checkpoint.Snapshot | None:
        return None if communicator.rank else _find_snapshot(config, run_dir, resume, allow_change, log)

    snapshot = together(communicator, find)
    # A run that goes on keeps the compression that it began with: the link may look different today.
    wanted = snapshot.meta.get("compression", config.exchange.compression) if snapshot else config.exchange.compression
    taken = connect(job, communicator.broadcast_bytes(wanted.encode()).decode())
    trainer = Trainer(config, job.frontend, job.data.train, job.data.val, run_dir, log, taken)
    trainer.restore(snapshot)
    if resume is not None:
        log.truncate_after(trainer.progress.step)
    log.message(_banner(job, trainer, snapshot))
    kept = keep_memory()  # from here on: what the set-up freed has gone back
    if communicator.rank == 0:
        about = {"versions": _versions(config), **job.settings, "compression": taken, "keeps_freed_memory": kept}
        (run_dir / "environment.json").write_text(json.dumps(about, indent=2) + "\n")
    summary = trainer.fit()
    log.summary(summary)
    log.message(_closing(summary, run_dir))
    log.close()
    return summary


def _banner(job: Job, trainer: Trainer, snapshot: checkpoint.Snapshot | None) -> str:
    c, count = job.config, sum(spec.size for spec in job.frontend.specs())
    lines = [
        f"{c.framework}, {c.model.name}: {count:,} weights; {job.data.name}: {len(job.data.train):,} training and "
        f"{len(job.data.val):,} validation samples",
        f"{job.communicator.size} rank{'s' * (job.communicator.size > 1)}, global batch {trainer.global_batch}, "
        f"{trainer.steps_per_epoch} steps per epoch",
    ]
    if snapshot:
        p = trainer.progress
        lines.append(f"resumed at step {p.step}: epoch {p.epoch + 1}, {p.consumed:,} samples of it used")
    return "\n".join(lines)


def _closing(summary: dict[str, Any], run_dir: Path) -> str:
    loss, accuracy = summary["val_loss"], summary["val_accuracy"]
    result = f"validation loss {loss:.4f}, accuracy {accuracy:.4f}" if loss is not None else "no evaluation"
    return f"done: {result}, {summary['samples_per_second']:,.0f} samples/s; run folder {run_dir}"


def _load_weights(job: Job, which: str) -> checkpoint.Snapshot:
    """Rank 0 reads; all ranks get the weights and statistics (the optimizer's slots are not needed)."""
    communicator, run_dir = job.communicator, Path(job.config.run_dir)

    def read() -> checkpoint.Snapshot | None:
        if communicator.rank:
            return None
        return checkpoint.choose(run_dir, which, job.config.checkpoint.monitor, job.config.checkpoint.mode)

    snapshot = together(communicator, read)
    tree = without_slots(snapshot.tree) if snapshot else {}
    together(communicator, lambda: check_tree(without_slots(job.frontend.state()), tree) if snapshot else None)
    for piece in broadcast(communicator, tree):
        job.frontend.load(piece)
    return snapshot  # type: ignore[return-value]


def evaluate(config: Config, which: str, split: str, verbose: bool) -> int:
    """Loss and accuracy of a checkpoint over every sample of a split, exactly once; one JSON line on rank 0."""
    with _job(config, verbose) as job:
        connect(job, "none")
        _load_weights(job, which)
        result = evaluate_batches(job.frontend, job.loader(split).evaluation())
        if job.communicator.rank == 0:
            print(
                json.dumps(
                    {"split": split, "loss": result.loss, "accuracy": result.accuracy, "samples": result.samples}
                ),
                flush=True,
            )
    return 0


def predict(config: Config, which: str, output: Path, split: str, verbose: bool) -> int:
    """Writes (samples, ..., num_classes) logits in the data set's order as .npy; N ranks share the work."""
    with _job(config, verbose) as job:
        connect(job, "none")
        _load_weights(job, which)
        communicator, total = job.communicator, len(getattr(job.data, split))
        rows, partial = None, output.with_name(output.name + ".partial")
        for batch in job.loader(split).evaluation():
            logits = job.frontend.predict(job.frontend.place(batch))[: batch.count]
            parts = communicator.allgather_bytes(batch.indices.tobytes() + np.ascontiguousarray(logits).tobytes())
            if communicator.rank:
                continue
            if rows is None:
                rows = _new_file(partial, logits.dtype, (total, *logits.shape[1:]), output)
            width = 8 + rows.dtype.itemsize * math.prod(rows.shape[1:])
            for part in parts:
                count = len(part) // width
                indices = np.frombuffer(part, np.int64, count)
                rows[indices] = np.frombuffer(part, rows.dtype, offset=8 * count).reshape(count, *rows.shape[1:])
        if rows is not None:
            rows.flush()
            os.replace(partial, output)
            print(f"{total:,} predictions of the {split} split: {output}", flush=True)
    return 0


def _new_file(path: Path, dtype: np.dtype, shape: tuple[int, ...], wanted: Path) -> np.memmap:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return np.lib.format.open_memmap(path, "w+", dtype, shape)
    except OSError as error:
        raise ConfigError(f"the predictions cannot be written: {error.strerror}", where=str(wanted)) from error
