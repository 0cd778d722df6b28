"""An update that averages the weights over time: the average is evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from hvd_train.config import Config
from hvd_train.protocol import EXCHANGE_PREFIX, Entry, GradientNorms, Placement, Tensor, TracksStatistics, Tree, Update
from hvd_train.update.ema import ExponentialMean
from hvd_train.update.epoch_mean import EpochMean
from hvd_train.update.replicated import STATISTICS, TRAINING, Replicated
from hvd_train.update.schedule_free import ScheduleFree
from hvd_train.update.weight_average import WeightAverage

MEAN = f"{EXCHANGE_PREFIX}mean_weights/"  # prefix of the names of averages that are not ready


class AveragedUpdate:
    """A wrapper of an update, whose ``diverged`` is always false, that keeps an average of its weights.

    A checkpoint holds the average as the weights, and the training weights beside it.
    """

    def __init__(
        self, update: Replicated, make: Callable[[Replicated], WeightAverage], model: TracksStatistics
    ) -> None:
        self.update, self._model, self._owned = update, model, update.owned
        self.average = make(update)
        update.update_weights = self.average.step
        self._weights: list[Tensor] = []  # this rank's weights, while the model has the average
        self._statistics: Tree = {}  # running statistics of the weights that the model does not hold now
        self._received: Tree = {}  # from a checkpoint: averages that are not ready

    # ---- what differs from the wrapped update

    def before_step(self, step: int, samples: int) -> None:
        self._statistics = {}  # a resumed run ends with another average than its checkpoint's
        self.update.before_step(step, samples)

    @property
    def has_global_weights(self) -> bool:
        return not self.average.ready or bool(self._weights)

    def end_epoch(self, epoch: int, epochs: int) -> None:
        self.update.frontend.run_queued()
        self.average.end_epoch(epoch, epochs)

    def end_training(self) -> bool:
        return self.average.end_training()

    @property
    def needs_statistics(self) -> bool:
        return self.average.needs_statistics and bool(self._weights)

    def keep_statistics(self, training: Tree) -> None:
        self._statistics = self._statistics or training

    def take_global_weights(self) -> None:
        if self.average.ready:
            self.update.frontend.run_queued()
            if self.average.needs_statistics:
                self._model.average_statistics()  # as for a checkpoint, which a run may resume from
            self._weights = self._owned.read()
            self._owned.write(self.average.global_weights())
            self._exchange_statistics()

    def take_local_weights(self) -> None:
        if self._weights:
            self._owned.write(self._weights)
            self._weights = []
            self._exchange_statistics()

    def _exchange_statistics(self) -> None:
        """Swap the model's running statistics for those of its current weights, if they were kept."""
        if self._statistics:
            here = self._model.running_statistics()
            self._model.load(self._statistics)
            self._statistics = here

    def note(self) -> str:
        return self.average.note()

    def state(self) -> list[Entry]:
        numbers = [Entry(name, Placement.REPLICATED, number.read) for name, number in self.average.numbers().items()]
        return [*self.update.state(), *numbers, *self._weight_entries()]

    def _weight_entries(self) -> list[Entry]:
        """List the training weights and statistics if the averages are ready, otherwise the unfinished averages."""
        if not self.average.ready:
            return self._owned.entries(MEAN, self.average.global_weights)
        entries = self._owned.entries(TRAINING, lambda: self._weights or self._owned.read())
        for key, x in self._statistics.items() if self._weights else ():
            name = STATISTICS + key.removeprefix("statistics/")
            entries.append(Entry(name, Placement.REPLICATED, lambda x=x: x))  # type: ignore[misc]
        return entries

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        if placement is Placement.REPLICATED:
            self.average.load_numbers(tree)
            self._received |= {key: x for key, x in tree.items() if key.startswith((MEAN, STATISTICS))}
        else:
            # The model holds the checkpoint's weights, the average. ``update.load`` gives it the training weights.
            received, self._received, self._weights = self._received, {}, []
            self.average.begin_average()
            if any(key.startswith(MEAN) for key in received):
                self.average.take_average(self._owned.read_from(MEAN, received))
            other = any(key.startswith(STATISTICS) for key in received)
            self._statistics = self._model.running_statistics() if other else {}
        self.update.load(tree, placement)

    # ---- what is passed on to the wrapped update

    @property
    def diverged(self) -> bool:
        return self.update.diverged

    @property
    def local_gradients(self) -> bool:
        return self.update.local_gradients

    @property
    def lockstep(self) -> bool:
        return self.update.lockstep

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        return self.update.buckets

    @property
    def norms(self) -> GradientNorms | None:
        return self.update.norms

    @property
    def in_flight(self) -> bool:
        return self.update.in_flight

    def after_step(self, step: int, samples: int) -> None:
        self.update.after_step(step, samples)

    def finish_transfers(self) -> None:
        self.update.finish_transfers()

    def close(self) -> None:
        self.update.close()


def averaged(config: Config, update: Replicated, model: TracksStatistics) -> Update:
    """Wrap the update with the average that the configuration asks for, if any."""
    make: Callable[[Replicated], WeightAverage]
    if config.ema:
        make = partial(ExponentialMean, decay=config.ema.decay, every=config.ema.every_n_steps)
    elif config.swa:
        make = partial(EpochMean, epochs=config.swa.epochs)
    elif config.optim.schedule_free:
        make = partial(ScheduleFree, beta=config.optim.betas[0])
    else:
        return update
    return AveragedUpdate(update, make, model)
