"""Which evaluation values are comparable: the same loss or metric on the same samples, read in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_train.config import Config
from hvd_train.config.keys.task import title_of

PARTS = {"train": "training", "val": "validation"}


@dataclass(frozen=True)
class Measure:
    """What a run's evaluation values depend on.

    ``task``: its configuration section. ``data``: size and fingerprint of each split. ``reading``: for each split, what
    the fingerprint does not cover.
    """

    task: Mapping[str, Any]
    data: Mapping[str, Any]
    reading: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config, data: Mapping[str, Any], ranks: int) -> Measure:
        return cls(config.task.model_dump(mode="json"), data, reading(config, data, ranks))

    def difference(self, now: Measure, monitor: str) -> str:
        """Return why the values of ``monitor`` are not comparable with those of ``now``; empty if they are."""
        losses = [{key: x for key, x in one.task.items() if key != "metrics"} for one in (self, now)]
        if losses[0] != losses[1]:
            return "the loss is different"
        part, _, name = monitor.partition("_")
        metrics = [_metrics(one.task).get(name) for one in (self, now)]
        if None not in metrics and metrics[0] != metrics[1]:
            return f"the metric {name} is a different function"
        for facts in ("data", "reading"):
            before, after = (getattr(one, facts)[part] for one in (self, now))
            if before != after:
                how = "changed" if facts == "data" else "are read differently"
                return f"the {PARTS[part]} data {how}"
        return ""


def reading(config: Config, data: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return for each split what evaluation values depend on besides the task and the stored samples."""
    lengths = config.data.lengths
    cut = [lengths.max_length, lengths.truncate] if lengths else None
    transforms = [one.model_dump(mode="json") for one in config.data.transforms]
    evaluated = None
    if config.limit_val_batches:
        together = -(-config.global_batch(config.replicas(ranks)) // config.accumulate_grad_batches)
        evaluated = config.limit_val_batches * together
        evaluated = evaluated if evaluated < data["val"]["samples"] else None  # all of them
    return {
        "train": [cut, transforms, config.data.sampling],
        # All other transforms apply only to training.
        "val": [cut, [one for one in transforms if one["name"] == "normalize"], evaluated],
    }


def _metrics(task: Mapping[str, Any]) -> dict[str, str]:
    """Return {name in the log: metric} for the task's metrics."""
    listed = task.get("metrics") or {}
    listed = {"": listed} if isinstance(listed, list) else listed
    return {title_of(output, metric): metric for output, metrics in listed.items() for metric in metrics}
