"""Metrics and logs of all samples on all ranks, at the end of an epoch or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_train.core.reductions import ordered_sum
from hvd_train.protocol import Communicator
from hvd_train.script.keras.model_state import to_numpy


class GlobalLogs:
    """Replaces the model's ``_get_metrics_result_or_logs``.

    Metrics' variables are sums over samples, and counts, so they are added over ranks. Other results of a user's step
    are averaged over ranks.
    """

    def __init__(self, model: Any, world: Communicator) -> None:
        self._model, self._world = model, world
        self._logs: Callable[[Any], Any] = model._get_metrics_result_or_logs

    def of_all_ranks(self, logs: Any, counts: bool, whole: bool) -> Any:
        """Return the logs of all ranks' samples; on all ranks together.

        ``counts``: whether this rank's sums count. ``whole``: whether each rank has scored all samples, perhaps with
        other random numbers.
        """
        # Keras returns a dict of a user's step unchanged, and otherwise the results of the metrics.
        user_step = self._logs(logs) is logs and isinstance(logs, dict)
        results = self._results() if user_step else {}
        local = {k: _numbers(x) for k, x in results.items() if k in logs}  # of this rank's samples
        variables = [v for metric in self._model.metrics for v in metric.variables]
        sums = [to_numpy(v) if counts else np.zeros_like(to_numpy(v)) for v in variables]
        for v, total in zip(variables, add_up(sums, self._world), strict=True):
            v.assign(total)
        global_logs = self._logs(logs)
        if global_logs is not logs:
            return global_logs
        values = [np.asarray(to_numpy(x), np.float64) * (counts or not whole) for x in keras.tree.flatten(logs)]
        ranks = 1 if whole else self._world.size
        means = keras.tree.pack_sequence_as(logs, [(x / ranks).tolist() for x in add_up(values, self._world)])
        # A step may return another number under a metric's name.
        close = [np.array(_is_close(_numbers(logs[k]), x), np.float64) for k, x in local.items()]
        same = add_up(close, self._world)
        results = self._results()
        return means | {k: results[k] for k, count in zip(local, same, strict=True) if count == self._world.size}

    def leave_to_rank_0(self) -> None:
        """Keep the metrics' sums, which are those of all ranks, on rank 0 only.

        As in one process, what a callback evaluates within an epoch counts in the epoch's sums, and it counts once.
        """
        for v in (v for metric in self._model.metrics for v in metric.variables if self._world.rank):
            v.assign(np.zeros_like(to_numpy(v)))

    def _results(self) -> dict[str, Any]:
        """Return the metrics' results, by metric name and by the names that Keras' own step uses."""
        return {metric.name: metric.result() for metric in self._model.metrics} | self._model.get_metrics_result()


def add_up(arrays: Sequence[np.ndarray], world: Communicator) -> list[np.ndarray]:
    """Sum arrays over ranks, in float64 and rank order."""
    if not arrays:
        return []
    flat = np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])
    pieces = np.split(ordered_sum(flat, world), np.cumsum([a.size for a in arrays])[:-1])
    return [piece.reshape(a.shape).astype(a.dtype) for piece, a in zip(pieces, arrays, strict=True)]


def _numbers(result: Any) -> np.ndarray:
    """Flatten a metric's result, which may be a dict, into one array."""
    return np.concatenate([np.zeros(0), *(to_numpy(x).ravel() for x in keras.tree.flatten(result))])


def _is_close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, 1e-5, 0)
