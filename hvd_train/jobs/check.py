"""``fit --check``: all preparations of a training, then one step and one evaluation batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.checkpoint import store
from hvd_train.checkpoint.resume_rules import check_tree
from hvd_train.config import Config
from hvd_train.core.agreement import collectively
from hvd_train.core.loop import Trainer
from hvd_train.errors import ConfigError
from hvd_train.jobs import messages
from hvd_train.jobs.connect import connect
from hvd_train.jobs.job import opened_job
from hvd_train.jobs.probabilities import warn_of_probabilities
from hvd_train.jobs.resume import find_checkpoint
from hvd_train.launch.environment import world
from hvd_train.run_folder import layout
from hvd_train.run_folder.log import NullLog, WordLog
from hvd_train.run_folder.trackers import load


def check(config: Config, resume: str | None, allow_change: Sequence[str], overwrite: bool, verbose: bool) -> int:
    """Prepare a training, run one step and one evaluation batch, and write nothing."""
    run_dir, occupied = Path(config.run_dir), ""
    if resume and config.model.init_from:  # the checkpoint has all weights
        config = config.model_copy(update={"model": config.model.model_copy(update={"init_from": None})})
    if world().rank == 0:
        try:
            layout.check_free(run_dir, resume, overwrite)
        except ConfigError as error:
            # Continue, because nothing is written here. The last line says that ``fit`` would refuse this.
            occupied = str(error)
    if config.batch_size == "auto":  # one step of any size
        config = config.model_copy(update={"batch_size": 32})
        config.notes.append("batch_size: auto: the check takes 32")
    with opened_job(config, verbose) as job:
        communicator, first = job.communicator, job.communicator.rank == 0
        log = WordLog() if first else NullLog()

        def find() -> store.Snapshot | None:
            snapshot = find_checkpoint(job.config, job.data, resume, allow_change) if first else None
            if snapshot:
                check_tree(job.frontend.whole or job.frontend.state(), snapshot.model)
            return snapshot

        collectively(communicator, lambda: load(config.loggers if first else []))
        snapshot = collectively(communicator, find)
        job.config = job.config.model_copy(update={"swa": None})  # which begins with the last epochs
        update, _ = connect(job, config.exchange.compression)
        # One step and one batch, without checkpoints or early stopping.
        data: dict[str, Any] = config.model_dump(mode="json")
        data |= {"max_steps": 1, "max_epochs": None, "limit_val_batches": 1, "agreement_every_n_steps": 1}
        data |= {"checkpoint": {"save_top_k": 0, "save_last": False}, "early_stopping": None, "swa": None}
        trainer = Trainer(Config.model_validate(data), job.frontend, update, job.data.train, job.data.val, run_dir, log)
        trainer.restore(None)
        facts = [messages.start(job, trainer, None), messages.prepared_columns(job), messages.weight_names(job)]
        log.message("\n".join([*filter(None, facts), *config.notes]))
        if first and ":" in config.model.name and not job.session.links:
            warn_of_probabilities(job, log)
        summary = trainer.fit()
        resumed = f", checkpoint {snapshot.path.name} to go on from" if snapshot else ""
        log.message(f"checked: configuration, data, model{resumed}; {_steps(summary)}")
        start = (
            f"a start would be refused: {occupied}" if occupied else f"without --check the run folder will be {run_dir}"
        )
        log.message(f"nothing was written; {start}")
    return 0


def _steps(summary: dict[str, Any]) -> str:
    loss, val = summary["train_loss"], summary["val_loss"]
    step = f"one step of {summary['train_samples']:,} samples, forward, backward and update"
    step += " left out for its gradients" if loss is None else f" (loss {loss:.4f})"
    return f"{step}; one validation batch" + ("" if val is None else f" (loss {val:.4f})")
