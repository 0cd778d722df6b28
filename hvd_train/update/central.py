"""Asynchronous training with central weights, which lie in windows on some ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_train.protocol import Exchange, Parameters, Placement
from hvd_train.update.local_update import LocalUpdate
from hvd_train.update.state import weight_names


class Central(LocalUpdate):
    """The base of updates in which each rank exchanges weights with a centre, which is evaluated and saved.

    No rank waits for another. A checkpoint holds the centre as the weights, and each rank's weights and optimizer
    state beside it.
    """

    lockstep = False

    def __init__(self, frontend: Parameters, exchange: Exchange) -> None:
        super().__init__(frontend, exchange)
        specs, self._ranks = frontend.specs(), frontend.groups.data
        self._ends = np.cumsum([0, *(spec.size for spec in specs)])
        readers = dict(frontend.views())
        self._shapes = [readers[name]().shape for name in weight_names(frontend)]
        kind = np.result_type(*(spec.dtype for spec in specs))
        # This rank's weights, flat, as they were last read or written.
        self._flat = np.empty(self._ends[-1], kind)
        bounds = np.cumsum([0, *self._shares(int(self._ends[-1]), self._ranks.size)])
        # (rank, its part of the flat weights) for each rank that holds a part of the centre.
        self._places = [(k, slice(*bounds[k : k + 2])) for k in range(self._ranks.size) if bounds[k] < bounds[k + 1]]
        self._window = self._ranks.window(int(np.diff(bounds)[self._ranks.rank]), kind.name)
        self._steps = 0  # of this rank

    @abstractmethod
    def _shares(self, entries: int, ranks: int) -> Sequence[int]:
        """Return the number of entries of the centre on each rank."""

    @abstractmethod
    def _add_steps(self) -> None:
        """Exchange this rank's weights, in ``_flat``, with the centre."""

    def after_step(self, step: int, samples: int) -> None:
        self._steps += 1
        if self.due(self._steps):
            self._read()
            self._add_steps()
            self._write()

    def due(self, step: int) -> bool:
        """Return whether this rank exchanges weights with the centre after its ``step``-th step."""
        return True

    def _load_common_weights(self) -> None:
        self._ranks.barrier()  # else another rank could still change the centre
        for rank, place in self._places:
            self._window.read(rank, self._flat[place])
        self._write()
        self._ranks.barrier()  # else another rank could change the centre before this one has read all of it

    def load(self, tree: Mapping[str, np.ndarray], placement: Placement) -> None:
        # Until here all ranks hold the global weights. Their own come with the PER_RANK entries.
        if placement is Placement.PER_RANK:
            self._load_training()
            self._read()
            for rank, place in self._places:
                if rank == self._ranks.rank:
                    self._window.change(rank, lambda _, place=place: self._flat[place])  # type: ignore[misc]
            self._ranks.barrier()
        super().load(tree, placement)
        self.diverged = True

    def close(self) -> None:
        self._window.close()

    def _read(self) -> None:
        readers = dict(self.frontend.views())
        for name, part, shape in zip(weight_names(self.frontend), self._parts(), self._shapes, strict=True):
            np.copyto(part.reshape(shape), readers[name]())

    def _write(self) -> None:
        parts = zip(weight_names(self.frontend), self._parts(), self._shapes, strict=True)
        self.frontend.load({name: part.reshape(shape) for name, part, shape in parts})

    def _parts(self) -> list[np.ndarray]:
        return np.split(self._flat, self._ends[1:-1])
