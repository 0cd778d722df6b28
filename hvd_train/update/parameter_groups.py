"""Parameter groups by name patterns (``optim.groups``): learning rate, weight decay and freezing of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hvd_train.config import OptimConfig
from hvd_train.config.names import nearest
from hvd_train.errors import ConfigError, amount, listing
from hvd_train.protocol import TensorSpec


@dataclass(frozen=True)
class TensorSettings:
    """The optimizer settings of a tensor.

    ``factor``: its learning rate relative to the schedule's. ``since``: the first epoch (from 0) that trains it; None:
    never.
    """

    factor: float
    weight_decay: float
    since: int | None = 0
    fixed: bool = False  # while it is frozen, batch normalization uses running statistics

    def options(self, optim: OptimConfig) -> OptimConfig:
        """Return the ``optim`` section with this tensor's weight decay."""
        if optim.weight_decay == self.weight_decay:
            return optim
        return optim.model_copy(update={"weight_decay": self.weight_decay})


def step_key(rule: TensorSettings) -> str:
    """Return the name of the step count; tensors that are unfrozen later count from then on."""
    return f"slots/step_from_epoch_{rule.since}" if rule.since else "slots/step"


def matches(pattern: str, name: str) -> bool:
    """Return whether a canonical name matches the pattern, in which Keras' slashes count as dots."""
    return fnmatchcase(name, pattern.replace("/", "."))


def rule_of(optim: OptimConfig, name: str) -> TensorSettings:
    """Return the rule for the tensor of this canonical name."""
    rate, decay, since = optim.lr, optim.weight_decay, 0
    frozen = fixed = False
    for group in optim.groups:
        if matches(group.match, name):
            rate = group.lr if group.lr is not None else rate
            decay = group.weight_decay if group.weight_decay is not None else decay
            if group.freeze is not None:
                frozen, since, fixed = group.freeze, group.until_epoch or 0, group.fix_statistics
    # A quotient, so that scaling, schedule and plateaus apply to all groups alike.
    return TensorSettings(rate / optim.lr, decay, None if frozen and not since else since, fixed)


class ParameterGroups:
    """The rules of a model's trainable tensors."""

    def __init__(self, optim: OptimConfig, specs: Sequence[TensorSpec]) -> None:
        self._optim, self.specs = optim, list(specs)
        self.rules = {spec.name: rule_of(optim, spec.name) for spec in specs}
        for number, group in enumerate(optim.groups):
            if not any(matches(group.match, name) for name in self.rules):
                near = nearest(group.match.strip("*?."), {part for name in self.rules for part in name.split(".")})
                guess = f"is it {near!r}? " if near else ""
                what, where = f"{group.match!r} matches no weight", f"optim.groups.{number}.match"
                raise ConfigError(what, where=where, fix=f"{guess}there are {listing(list(self.rules))}")
        if len(self.frozen(0)) == len(self.rules):
            what = "every weight is frozen at the start"
            raise ConfigError(
                what, where="optim.groups", fix="leave some of them out, with freeze: false in a later group"
            )

    def frozen(self, epoch: int) -> list[str]:
        """Return the names of the tensors that are not trained in this epoch (from 0)."""
        return [name for name, rule in self.rules.items() if rule.since is None or rule.since > epoch]

    def fixed(self, epoch: int) -> list[str]:
        """Return the names of the frozen tensors whose batch normalization uses its running statistics."""
        return [name for name in self.frozen(epoch) if self.rules[name].fixed]

    def phase(self, epoch: int) -> int:
        """Return the epoch (from 0) of the latest unfreezing up to this one; 0: none."""
        return max((rule.since for rule in self.rules.values() if rule.since and rule.since <= epoch), default=0)

    def table(self) -> list[str]:
        """Describe which tensors matched, a line for each group and one for the rest."""
        if not self._optim.groups:
            return []
        rest = [spec for spec in self.specs if not any(matches(g.match, spec.name) for g in self._optim.groups)]
        rows = [
            (group.match, [spec for spec in self.specs if matches(group.match, spec.name)], group.words())
            for group in self._optim.groups
        ]
        rows += [("all others", rest, f"lr {self._optim.lr:g}")] if rest else []
        width = max(len(name) for name, _, _ in rows)
        lines = [f"  {name:<{width}}  {_size(specs)}: {words}" for name, specs, words in rows]
        frozen = set(self.frozen(0))
        if frozen:
            trained = [spec for spec in self.specs if spec.name not in frozen]
            lines.append(f"  trained at the start: {_size(trained)}, {listing([spec.name for spec in trained])}")
        return ["optim.groups:", *lines]


def _size(specs: Collection[TensorSpec]) -> str:
    return f"{amount(len(specs), 'tensor')} of {sum(spec.size for spec in specs):,} weights"
