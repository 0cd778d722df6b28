"""The scores of a checkpoint: ``hvd-train eval``."""

from __future__ import annotations

import json
from pathlib import Path

from hvd_train.config import Config
from hvd_train.core.evaluation import evaluate as evaluate_batches
from hvd_train.core.summary import numbers
from hvd_train.jobs.confusion import confusion, names_of, show
from hvd_train.jobs.mistakes import check_images, mistakes, show_mistakes
from hvd_train.jobs.trained_run import trained_job
from hvd_train.run_folder.terminal import say


def evaluate(
    config: Config,
    which: str,
    split: str | None,
    verbose: bool,
    confused: Path | None = None,
    wrong: Path | None = None,
) -> int:
    """Score a checkpoint over every sample of a split, exactly once; rank 0 prints one line of JSON.

    Without ``split``: the validation part of the run's data, and all samples of other data. ``confused``,
    ``wrong``: pictures of the confusion matrix and of the worst mistakes, which are printed, too.
    """
    with trained_job(config, which, split, verbose) as job:
        names = names_of(job) if confused else []  # refuses what has no classes, before any work
        if wrong:
            check_images(job)
        # Sums and counts are added over ranks, so the split may be divided unevenly.
        result = evaluate_batches(job.frontend, job.loader(job.split).evaluation())
        if job.communicator.rank == 0:
            say(json.dumps({"split": job.split, **numbers(result)}))
        if confused:
            counts = confusion(job)
            if job.communicator.rank == 0:
                say(show(counts, names, confused), styled=True)
        if wrong:
            worst = mistakes(job)
            if job.communicator.rank == 0:
                say(show_mistakes(job, worst, wrong), styled=True)
    return 0
