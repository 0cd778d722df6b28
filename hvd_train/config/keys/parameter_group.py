"""The keys of an entry of ``optim.groups``."""

from __future__ import annotations

from pydantic import Field, model_validator

from hvd_train.config.keys.section import Positive, Section, raise_problems
from hvd_train.errors import amount


class GroupConfig(Section):
    """Settings of the weights whose names match. If several groups match, later ones win, key by key."""

    match: str = Field(
        "", min_length=1, description="pattern of names, with * and ?, as checkpoints have them ('fit --check' lists)"
    )
    lr: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="learning rate instead of optim.lr; scaling and schedule hold alike",
    )
    weight_decay: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="weight decay instead of optim.weight_decay"
    )
    freeze: bool | None = Field(
        None, description="true: these weights stay as they are, with no gradient and no slots; false: they do not"
    )
    until_epoch: Positive | None = Field(
        None, description="freeze: the number of epochs after which they are trained; null: never"
    )
    fix_statistics: bool = Field(
        False, description="freeze: their batch normalization uses its running statistics, and leaves them"
    )

    @model_validator(mode="after")
    def _combinations(self) -> GroupConfig:
        problems = []
        if self.match == "":  # the default, which is not checked
            problems.append(("match", "give a pattern of names, for example 'head.*'"))
        if self.lr is None and self.weight_decay is None and self.freeze is None:
            problems.append(("match", f"{self.match!r} sets nothing: give lr, weight_decay or freeze"))
        if self.until_epoch and not self.freeze:
            problems.append(("until_epoch", "belongs to freeze: true"))
        if self.fix_statistics and not self.freeze:
            problems.append(("fix_statistics", "belongs to freeze: true"))
        if self.freeze and not self.until_epoch and (self.lr is not None or self.weight_decay is not None):
            problems.append(("freeze", "frozen weights have no lr and no weight_decay, unless until_epoch ends that"))
        raise_problems(problems)
        return self

    def words(self) -> str:
        """Describe the group's settings."""
        numbers = {"lr": self.lr, "weight_decay": self.weight_decay}
        words = [f"{key} {x:g}" for key, x in numbers.items() if x is not None]
        if self.freeze:
            words.append(f"frozen for {amount(self.until_epoch, 'epoch')}" if self.until_epoch else "frozen")
        elif self.freeze is False:
            words.append("not frozen")
        words += ["batch normalization with running statistics"] * self.fix_statistics
        return ", ".join(words)
