"""Evaluate a checkpoint: ``hvd-train eval``."""

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
    """Evaluate a checkpoint over every sample of a split, exactly once. Rank 0 prints one line of JSON.

    Without ``split``: the validation split of the run's data, or all samples of other data. ``confused``, ``wrong``:
    image files for the confusion matrix and the worst errors, which are also printed.
    """
    with trained_job(config, which, split, verbose) as job:
        names = names_of(job) if confused else []  # raises early for data without classes
        if wrong:
            check_images(job)
        # Sums and counts are added over ranks, so ranks may have different numbers of samples.
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
