"""The keys of ``optim``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hvd_train.config.keys.parameter_group import GroupConfig
from hvd_train.config.keys.section import Count, Mode, OneOf, Positive, Section, free, is_set, misplaced, raise_problems
from hvd_train.config.optimizers import OPTIMIZERS, OptimizerSpec, takers
from hvd_train.config.schedules import SCHEDULES


class PlateauConfig(Section):
    """When to lower the learning rate because a metric does not improve."""

    monitor: str = Field("val_loss", description="the value that must improve: val_NAME or train_NAME")
    mode: Mode = Field(
        "auto", description="which direction is better; auto: by the metric; set it for metrics of yours"
    )
    factor: float = Field(0.1, gt=0, lt=1, description="what the rate is multiplied by")
    patience: Positive = Field(10, description="evaluations without improvement before the rate falls")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as improvement")
    cooldown: Count = Field(0, description="evaluations after a reduction that are not counted")


# Keys of built-in optimizers; a user's optimizer sets these in the user's function.
_BUILT_IN = {"weight_decay"}.union(*(spec.options for spec in OPTIMIZERS.values()))


def _of(option: str) -> str:
    return ", ".join(takers(option))


class OptimConfig(Section):
    """The optimizer and the learning rate. Formulas are in ``update/layerwise.py`` and ``core/learning_rate.py``."""

    name: Annotated[str, OneOf(OPTIMIZERS, functions=True)] = Field(
        "sgd",
        description="PyTorch's formulas (lars to schedule_free_*: their papers'), or your function that makes one",
    )
    lr: float = Field(0.01, gt=0, allow_inf_nan=False, description="base learning rate, before lr_scaling")
    momentum: float = Field(0.0, ge=0, lt=1, description=f"{_of('momentum')}: momentum")
    nesterov: bool = Field(False, description=f"{_of('nesterov')}: Nesterov momentum")
    weight_decay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="L2 term (*adamw, lamb, lion, muon: decoupled), also without a gradient; lars, lamb: no biases",
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999],
        min_length=2,
        max_length=2,
        description="the adams, lamb, lion, muon: decay of the running means; schedule_free: weight of x, decay",
    )
    alpha: float = Field(0.99, ge=0, lt=1, description=f"{_of('alpha')}: decay of the running mean of squares")
    eps: float = Field(1e-8, gt=0, description="all but sgd, lion and schedule_free_sgd: term in the denominator")
    trust_coefficient: float = Field(
        0.001,
        gt=0,
        allow_inf_nan=False,
        description=f"{_of('trust_coefficient')}: a tensor's step is this share of its norm, times lr",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="lr times global batch / lr_reference_batch, its square root, or lr as it is"
    )
    lr_reference_batch: Positive | None = Field(None, description="global batch for which lr was chosen")
    warmup_epochs: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="epochs of linear warm-up; may be a fraction"
    )
    warmup_steps: Count = Field(0, description="steps of linear warm-up, instead of warmup_epochs")
    schedule: Annotated[str, OneOf(SCHEDULES, functions=True)] = Field(
        "constant",
        description="learning rate after the warm-up; your function gets (step, total_steps), gives a factor",
    )
    schedule_unit: Literal["epochs", "steps"] = Field(
        "epochs", description="what step_size, milestones, period and the steps of exponential count"
    )
    step_size: float = Field(30.0, gt=0, description="schedule step: epochs (or steps) between two drops")
    milestones: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="schedule multistep: epochs (or steps) at which the rate drops by gamma"
    )
    gamma: float = Field(
        0.1, gt=0, le=1, description="schedule step, multistep: factor of a drop; exponential: factor per epoch or step"
    )
    period: float = Field(10.0, gt=0, description="schedule cosine_restarts: epochs (or steps) of the first cycle")
    period_factor: float = Field(1.0, ge=1, description="schedule cosine_restarts: length of a cycle over that before")
    power: float = Field(1.0, gt=0, allow_inf_nan=False, description="schedule polynomial: the exponent")
    rise: float = Field(
        0.3, gt=0, lt=1, description="schedule one_cycle: share of the training in which the rate rises"
    )
    start_divisor: float = Field(25.0, ge=1, description="schedule one_cycle: the first rate is lr divided by this")
    end_divisor: float = Field(1e4, ge=1, description="schedule one_cycle: the last rate is the first divided by this")
    min_lr: float = Field(0.0, ge=0, description="the schedule's lowest learning rate")
    plateau: PlateauConfig | None = Field(
        None, description="lower the rate when an evaluation does not improve, with any schedule; null: never"
    )
    groups: list[GroupConfig] = Field([], description="other settings for weights by patterns of their names")
    sharded: bool | Literal["auto"] = free(
        "auto",
        description="each rank has the optimizer's slots of its part of the weights (ZeRO-1); auto: where it is faster",
    )

    @model_validator(mode="after")
    def _combinations(self) -> OptimConfig:
        problems = misplaced(self, "schedule", {name: row.options for name, row in SCHEDULES.items()})
        if self.is_users:
            what = "belongs to built-in optimizers; give it in your function"
            problems += [(key, what) for key in sorted(_BUILT_IN) if is_set(self, key)]
        else:
            problems += self._optimizer_problems(OPTIMIZERS[self.name])
        if self.lr_scaling != "none" and self.lr_reference_batch is None:
            problems.append(("lr_scaling", "needs lr_reference_batch: the global batch that lr was chosen for"))
        if self.schedule == "multistep" and not self.milestones:
            problems.append(("milestones", "schedule: multistep needs them, for example [30, 60]"))
        if self.milestones != sorted(set(self.milestones)):
            problems.append(("milestones", "must grow"))
        raise_problems(problems)
        return self

    def _optimizer_problems(self, spec: OptimizerSpec) -> list[tuple[str, str]]:
        problems = misplaced(self, "name", {name: spec.options for name, spec in OPTIMIZERS.items()})
        if "nesterov" in spec.options and self.nesterov and not self.momentum:
            problems.append(("nesterov", "needs momentum > 0"))
        if spec.momentum and not self.momentum:
            problems.append(("momentum", f"{self.name} needs one, for example {spec.momentum}"))
        if spec.schedule_free and not self.betas[0]:
            problems.append(("betas", f"{self.name} needs a first one > 0"))
        return problems

    @property
    def is_users(self) -> bool:
        """Return whether a function of the user makes the optimizer."""
        return ":" in self.name

    @property
    def schedule_free(self) -> bool:
        """Return whether the optimizer is a schedule-free one."""
        return not self.is_users and OPTIMIZERS[self.name].schedule_free
