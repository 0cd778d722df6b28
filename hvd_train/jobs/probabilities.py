"""Warn if a user's model returns probabilities to a loss that expects logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvd_train.jobs.job import Job
from hvd_train.metrics.table import METRICS
from hvd_train.protocol import Batch, Field, Fields, one_or_all
from hvd_train.run_folder.log import NullLog, RunLog

SAMPLES = 8  # samples to try
LARGE = 100.0  # factor on inputs, which drives outputs far from 0 and 1 unless the last layer is a sigmoid
SPREAD = 0.5  # margin for large inputs, with which a last sigmoid comes close to 0 and to 1


def warn_of_probabilities(job: Job, log: RunLog | NullLog) -> None:
    """Warn if a model ends in softmax or sigmoid, which the loss applies again: it then learns more slowly and worse.

    Metrics are wrong, too: an output above 0 means class 1, and probabilities always are. So is what ``predict``
    writes, also with a loss of the user's that takes probabilities.
    """
    losses = _losses(job)
    if not losses:
        return
    inputs, labels = job.data.train.fetch(np.arange(min(SAMPLES, len(job.data.train))))
    for name, outputs in _outputs(job, inputs, labels, losses):
        own = " and use a loss of logits" * (":" in losses[name])
        if losses[name] != "bce" and _sums_to_1(outputs):
            what = f"its outputs are not negative and sum to 1), and {_who(losses[name])} softmax"
            _warn(job, log, name, what, f"leave its last softmax out{own}")
            continue
        within = losses[name] != "cross_entropy" and (outputs > 0).all() and (outputs < 1).all()
        if within and _stays_between(job, name, inputs, labels, losses):
            what = f"its outputs stay between 0 and 1), and {_who(losses[name])} the sigmoid"
            _warn(job, log, name, what, f"leave its last sigmoid out{own}")


def _losses(job: Job) -> dict[str, str]:
    """Return {output: its loss} where outputs are taken for logits: by the loss, by metrics, or as those of classes."""
    data, found = job.config.data, dict[str, str]()
    for name, (loss, metrics) in job.config.task.terms.items():
        of_classes = any(METRICS[one].labels != "numbers" or one == "bce" for one in metrics if one in METRICS)
        own = ":" in loss and (of_classes or data.num_classes or data.classes) and not job.config.task.step
        if loss in ("cross_entropy", "bce") or own:
            found[name] = loss
    return found


def _who(loss: str) -> str:
    return "metrics and predict apply" if ":" in loss else "the loss applies"


def _sums_to_1(outputs: np.ndarray) -> bool:
    # A few samples suffice: probabilities sum to 1 whatever the input.
    sums = np.sum(outputs, axis=-1, dtype=np.float64)
    return outputs.shape[-1] > 1 and bool((outputs >= 0).all() and np.abs(sums - 1).max() < 0.01)


def _warn(job: Job, log: RunLog | NullLog, output: str, what: str, fix: str) -> None:
    of_output = f" for {output}" * bool(output)
    log.warning(f"the model gives probabilities{of_output} ({what} again; model.name: {job.config.model.name}; {fix}")


def _outputs(job: Job, inputs: Fields, labels: Fields, losses: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (output, its values) for each of these losses."""
    count = len(next(iter(inputs.values())))
    batch = Batch(inputs, labels, np.ones(count, np.float32), np.arange(count))
    with job.frontend.untouched():  # this rank alone runs the model
        outputs = job.frontend.predict(job.frontend.to_device(batch))
    for name in losses:
        its = outputs.get(name) if name and isinstance(outputs, dict) else outputs
        its = one_or_all(its) if isinstance(its, dict) else its
        if isinstance(its, np.ndarray) and its.ndim:
            yield name, its


def _stays_between(job: Job, output: str, inputs: Fields, labels: Fields, losses: dict[str, str]) -> bool:
    """Return whether an output stays between 0 and 1, and comes near both, for very large inputs."""
    fields = job.data.train.sample.inputs
    large = {name: x for name, x in inputs.items() if _has_fractions(x, fields[name])}
    if not large:  # token ids must not be scaled
        return False
    tried = []
    for factor in (LARGE, -LARGE):
        changed = {**inputs, **{name: x.astype(np.float32) * np.float32(factor) for name, x in large.items()}}
        tried += [x for name, x in _outputs(job, changed, labels, losses) if name == output]
    outputs = np.concatenate(tried)
    return bool((outputs >= 0).all() and (outputs <= 1).all() and np.ptp(outputs) > SPREAD)


def _has_fractions(x: np.ndarray, field: Field) -> bool:
    return not field.whole and (field.divisor != 1 or bool((x != np.rint(x)).any()))
