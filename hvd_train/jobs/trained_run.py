"""Open a trained run for eval, predict and export: its configuration, code, weights and data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hvd_train.checkpoint import store
from hvd_train.checkpoint.manifest import sample_of
from hvd_train.checkpoint.resume_rules import changed_parts, check_tree, data_facts
from hvd_train.checkpoint.serialize import broadcast
from hvd_train.config import Config, load_config
from hvd_train.config.user_code import look_in, source_of
from hvd_train.core.agreement import collectively
from hvd_train.data.catalog import check_path, open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.errors import ConfigError
from hvd_train.files import ours_alone
from hvd_train.jobs.job import Job, build_job
from hvd_train.jobs.resume import best_rule, saved_vocabulary
from hvd_train.protocol import broadcast_json
from hvd_train.run_folder.terminal import say, warn
from hvd_train.session import Session


def trained_config(
    path: Path | None, sets: Sequence[str], run_dir: str | None, which: str
) -> tuple[Config, dict[str, str]]:
    """Read the configuration saved with the checkpoint ``which`` of a run folder, unless a file is named.

    Also returns the keys with code that the caller has not named, if folder or code may belong to others.
    """
    if path is not None:
        return load_config(path, sets, run_dir=run_dir).restoring().without_stages(), {}
    if run_dir is None:
        raise ConfigError(
            "no run is named", fix="give --run-dir FOLDER (the checkpoint's configuration is used), or -c FILE"
        )
    folder = Path(run_dir)
    if not folder.exists():
        fix = "" if folder.is_absolute() else f"it starts in the current folder, {Path.cwd()}"
        raise ConfigError("there is no such run folder", where=run_dir, fix=fix)
    if not (folder / "checkpoints").is_dir() and not (folder / "config.yaml").exists():
        what = "the folder is not a run folder: it holds no checkpoints and no config.yaml"
        raise ConfigError(what, where=run_dir, fix="give the --run-dir of a training")

    def saved(place: Path) -> Config:
        config = load_config(None, sets, base=store.config_of(place), run_dir=run_dir)
        return config.restoring().without_stages()  # each rank has the whole model

    # The best checkpoint depends on the configuration; until it is chosen, use that of the newest checkpoint.
    place = store.newest_readable(folder / "checkpoints") if which in ("last", "best") else None
    config = saved(place) if place else None
    if which != "last":
        place = store.resolve(folder, which, *best_rule(config or Config()))
        config = saved(place)
    assert config is not None and place is not None
    named_keys = {setting.partition("=")[0].strip().replace("-", "_") for setting in sets}
    # Optimizers, learning rates and hooks are only for training, so their code is not imported here.
    named_keys |= {"optim.name", "optim.schedule", "hooks"}
    code = {key: name for key, name in config.user_code.items() if not named_keys & {key, key.partition(".")[0]}}
    if not code and "code_dir" not in named_keys:
        # The caller has named all code, so the run's code folder is not imported from.
        config = config.model_copy(update={"code_dir": None})
    return config, {} if code and _is_callers(code, config.code_dir, folder, place) else code


def _is_callers(code: Mapping[str, str], code_dir: str | None, run_dir: Path, place: Path) -> bool:
    """Return whether a run folder, its checkpoint ``place`` and its code belong only to the caller.

    A library's functions are not the caller's: an unpacked foreign folder could name any of them.
    """
    look_in(code_dir)
    sources = [source_of(name) for names in code.values() for name in names.split(", ") if ":" in name]
    # Anyone who can write to the folder can name another function in it.
    held = [run_dir, *run_dir.rglob("*"), place, *place.rglob("*")]
    return all(sources) and ours_alone([*held, *(file for files in sources for file in files)])


def refuse_foreign(code: Mapping[str, str], run_dir: str | None) -> None:
    """Refuse code that a run folder names, because the folder's author chose it."""
    if code:
        listed = ", ".join(f"{key}: {json.dumps(name)[:200]}" for key, name in code.items())
        sets = " ".join(f"--set {key}=..." for key in code)
        what = f"the run folder names code of its own, which would be imported and run ({listed})"
        advice = "a folder and code that belong to you, which nobody else can write (chmod -R go-w), need neither"
        fix = f"if you trust it: --trust, or name it yourself with {sets} or -c FILE; {advice}"
        raise ConfigError(what, where=run_dir or "", fix=fix)


def choose_checkpoint(config: Config, which: str) -> store.Snapshot:
    """Read and verify the checkpoint of --checkpoint."""
    if which == "best":
        for note in config.notes:
            warn(note)
    return store.choose(Path(config.run_dir), which, *best_rule(config), warn)


@contextmanager
def trained_job(config: Config, which: str, split: str | None, verbose: bool, labels: bool = True) -> Iterator[Job]:
    """Open a job with the weights and statistics of checkpoint ``which``, and data read as in the run.

    Rank 0 reads the checkpoint. ``labels``: read labels even if no split needs them.
    """
    look_in(config.code_dir)
    session = Session.prepare(config.framework, config.threads, verbose)
    with session.opened() as communicator:
        snapshot = collectively(communicator, lambda: None if communicator.rank else choose_checkpoint(config, which))
        facts = collectively(communicator, partial(_facts, snapshot, Path(config.run_dir)))
        meta = broadcast_json(communicator, facts)
        config = _with_weights_of_run(config, meta)
        if config.data.path != meta["config"]["data"]["path"]:
            collectively(communicator, lambda: check_path(config.data))  # so that one rank prints it
        same, run = _same_data(config, meta), sample_of(meta)
        split = split or ("val" if same else "all")
        request = DataRequest(run, split, labels or split in ("train", "val"), vocabulary=meta["vocabulary"])
        data = collectively(communicator, lambda: open_data(config.data, config.task, request=request))
        job = build_job(config, session, data, split)
        if communicator.rank == 0:
            _print_notes(job, same, meta["data"])
        _load_weights(job, snapshot)
        del snapshot  # it holds weights and optimizer state: with adam three times the size of the model
        yield job


def _facts(snapshot: store.Snapshot | None, run_dir: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint that all ranks need, with its run's vocabulary. Rank 0 has the checkpoint."""
    if snapshot is None:
        return {}
    config = snapshot.config().model_dump(mode="json")
    facts = {key: snapshot.meta[key] for key in ("sample", "data")}
    return facts | {"config": config, "vocabulary": saved_vocabulary(run_dir)}


def _with_weights_of_run(config: Config, meta: Mapping[str, Any]) -> Config:
    """Replace ``task.class_weights: balanced`` and ``data.fitted`` by the run's.

    A file that the caller names may still say ``balanced``, and ask for what is computed: of the training samples.
    """
    if fitted := meta["config"].get("data", {}).get("fitted"):
        config = config.model_copy(update={"data": config.data.model_copy(update={"fitted": fitted})})
    saved = meta["config"]["task"]["class_weights"]
    if config.task.class_weights != "balanced" or not isinstance(saved, list):
        return config
    return config.model_copy(update={"task": config.task.model_copy(update={"class_weights": saved})})


def _load_weights(job: Job, snapshot: store.Snapshot | None) -> None:
    """Load the weights and statistics of ``snapshot`` (on rank 0) on all ranks."""
    tree = snapshot.model if snapshot else {}
    collectively(job.communicator, lambda: check_tree(job.frontend.state(), tree) if snapshot else None)
    for piece in broadcast(job.communicator, tree):
        job.frontend.load(piece)


def _same_data(config: Config, meta: Mapping[str, Any]) -> bool:
    """Return whether these are the run's training and validation data, by name and path."""
    before, now = meta["config"]["data"], config.data
    # Compare resolved paths, because the run may have been started in another folder.
    places = [path and Path(path).expanduser().resolve() for path in (before["path"], now.path)]
    return before["name"] == now.name and before["options"] == now.options and places[0] == places[1]


def _print_notes(job: Job, same_data: bool, before: Mapping[str, Any]) -> None:
    """Print how the data differ from the run's. ``before``: the facts of the run's splits, from the checkpoint."""
    lines, parts = [*job.data.remarks, *job.frontend.task.remarks], job.data.parts
    if same_data and job.split in ("train", "val") and parts.keys() >= {"train", "val"}:
        rows = changed_parts(before, data_facts(parts["train"], parts["val"]))
        if rows:
            change = f"the data changed since the training ({'; '.join(rows)})"
            lines.append(f"{change}: the {job.split} part may hold other samples than it did (--split all takes all)")
    if not same_data and job.split == "all":
        count = len(job.data.parts["all"])
        lines.append(f"the data are not those of the run: all {count:,} samples are taken (--split takes a part)")
    for line in lines:
        say(f"note: {line}", err=True)
