"""Find the checkpoint to resume from, by the rules of ``checkpoint.resume_rules``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvd_train import files
from hvd_train.checkpoint import resume_rules, store
from hvd_train.checkpoint.resume_rules import data_facts
from hvd_train.config import Config
from hvd_train.data.dataset import DataSet
from hvd_train.errors import CheckpointError
from hvd_train.launch import snapshots
from hvd_train.protocol import Communicator, broadcast_json
from hvd_train.run_folder import layout
from hvd_train.run_folder.terminal import warn


def resumes(config: Config, communicator: Communicator, resume: str | None) -> bool:
    """Return whether all weights come from a checkpoint, so that a model need not load pretrained ones.

    Rank 0 decides.
    """
    if resume is None:
        return False
    begun = resume != "auto" or bool(store.find(Path(config.run_dir) / "checkpoints")) or _has_snapshot()
    return broadcast_json(communicator, begun)


def _has_snapshot() -> bool:
    memory = snapshots.folder_of_rank()
    return memory is not None and bool(store.find(memory))


def best_rule(config: Config) -> tuple[str, str]:
    """Return the rule for the best checkpoint: (monitor, mode)."""
    return config.checkpoint.monitor, config.mode_of(config.checkpoint)


def split_as_before(config: Config, communicator: Communicator, resume: str | None) -> Config:
    """Keep the stages or devices of the resumed run, if ``parallel.split`` is auto.

    A new measurement could choose others. Rank 0 reads the checkpoint's manifest.
    """
    parallel = config.parallel
    if resume is None or parallel.pipeline == parallel.devices_per_rank == 1 or parallel.split != "auto":
        return config
    split: list[int] = []
    if communicator.rank == 0:
        with suppress(CheckpointError, OSError):  # reported when the checkpoint is loaded
            before = store.config_of(place(config, resume)).get("parallel") or {}
            same = before.get("pipeline") == parallel.pipeline
            same &= before.get("devices_per_rank") == parallel.devices_per_rank
            if same and before.get("split") != "auto":
                split = before["split"]
    update = {"split": broadcast_json(communicator, split) or "auto"}
    return config.model_copy(update={"parallel": parallel.model_copy(update=update)})


def place(config: Config, resume: str) -> Path:
    """Return the folder of the checkpoint ``resume``."""
    run_dir, memory = Path(config.run_dir), snapshots.folder_of_rank()
    folder = run_dir / "checkpoints"
    if resume not in ("auto", "last"):
        return store.resolve(run_dir, resume, *best_rule(config))
    return store.newest_readable(memory if memory and store.find(memory) and not store.find(folder) else folder)


def find_checkpoint(
    config: Config, data: DataSet, resume: str | None, allow_change: Sequence[str]
) -> store.Snapshot | None:
    """Read the checkpoint ``resume``. Returns None to start from the beginning.

    Its configuration and data must be this run's, except what ``allow_change`` names.
    """
    if resume is None:
        return None
    run_dir = Path(config.run_dir)
    if resume in ("auto", "last"):
        snapshot = store.newest(run_dir / "checkpoints", warn, snapshots.folder_of_rank())
        if snapshot is None and resume == "last":
            fix = "give --resume auto, which begins without one"
            raise CheckpointError("there is no checkpoint to resume from", where=str(run_dir / "checkpoints"), fix=fix)
    else:
        snapshot = store.load(store.resolve(run_dir, resume, *best_rule(config), warn))
    if snapshot is None:
        return None
    resume_rules.check_prepared(snapshot.config().data.fitted, config.data.fitted, snapshot.path)
    resume_rules.check_config(snapshot.config(), config, allow_change)
    resume_rules.check_fields(snapshot, data.sample, "data" in allow_change)
    vocabulary = saved_vocabulary(run_dir) if data.vocabulary else ""
    resume_rules.check_vocabulary(vocabulary, data.vocabulary, run_dir / layout.VOCABULARY, snapshot.path)
    if "data" not in allow_change:
        resume_rules.check_data(snapshot, data_facts(data.train, data.val))
    return snapshot


def saved_vocabulary(run_dir: Path) -> str:
    """Read the run's vocabulary, as JSON; empty if the run has none."""
    try:
        text = files.content(run_dir / layout.VOCABULARY).decode("utf-8")
        json.loads(text)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        what = f"the vocabulary of the run cannot be read: {error}"
        raise CheckpointError(what, where=str(run_dir / layout.VOCABULARY)) from error
    return text
