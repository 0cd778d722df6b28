"""Running means and variances of normalization layers, averaged with the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class RunningStatistics:
    """Running statistics, whose changes since the last pass are averaged over the ranks.

    Only changes are exchanged, so unchanged statistics keep their bits.
    """

    def __init__(self, places: Sequence[tuple[torch.nn.Module, str]]) -> None:
        self._places = places
        self.tensors: list[torch.Tensor] = [getattr(layer, name) for layer, name in places]
        # Equal on all ranks, after the last pass; 0 where they are NaN or infinite: changes are relative to it, and a
        # script may restore its statistics after a bad batch.
        self._common = [x.detach().clone().nan_to_num_(0.0, 0.0, 0.0) for x in self.tensors]

    def look_up(self) -> None:
        """Look up the layers' current tensors, which a script may have replaced."""
        for k, (layer, name) in enumerate(self._places):
            if (x := getattr(layer, name)) is not None:
                self.tensors[k] = x

    def write_change(self, k: int, view: torch.Tensor, mean: float) -> None:
        """Write the change of statistic ``k`` since the last pass, times ``mean``, into ``view``."""
        torch.sub(self.tensors[k], self._common[k], out=view)
        view.mul_(mean)

    def add_mean_changes(self, views: Sequence[torch.Tensor]) -> None:
        """Add the mean change of each statistic, the same on all ranks."""
        for x, common, view in zip(self.tensors, self._common, views, strict=True):
            # The mean is added to the common value, not to this rank's, so all ranks get the same bits.
            common.add_(view)
            x.data.copy_(common)  # ``data``: a retained graph may hold the tensor
            common.nan_to_num_(0.0, 0.0, 0.0)

    def average(self, total: Callable[[torch.Tensor], torch.Tensor], ranks: int) -> None:
        """Average the changes since the last exchange, without gradients. ``total`` sums a tensor over the ranks."""
        self.look_up()
        pairs = [*zip(self.tensors, self._common, strict=True)]
        flat = torch.cat([(x.detach() - common).double().reshape(-1) for x, common in pairs])
        changes = total(flat / ranks).split([x.numel() for x, _ in pairs])
        self.add_mean_changes([part.view_as(x).to(x.dtype) for part, (x, _) in zip(changes, pairs, strict=True)])

    def take_loaded(self, model: torch.nn.Module) -> None:
        """Set the common values after all ranks have loaded the same state into ``model``."""
        self.look_up()
        # Another model's statistics may have changes that are not yet exchanged.
        loaded = {id(x) for x in model.buffers()}
        for x, common in zip(self.tensors, self._common, strict=True):
            if id(x) in loaded:
                common.copy_(x).nan_to_num_(0.0, 0.0, 0.0)
