"""The keys of ``optim``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hvd_train.config.keys.section import Count, Positive, Section, free, raise_problems


class OptimConfig(Section):
    """The optimizer and the learning rate. The formulas are in ``update/optimizers.py``."""

    name: Literal["sgd", "adam", "adamw", "lars", "lamb"] = Field(
        "sgd",
        description="optimizer; formulas as PyTorch documents them, lars and lamb (large batches) as their papers",
    )
    lr: float = Field(0.01, gt=0, allow_inf_nan=False, description="base learning rate, before lr_scaling")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd, lars: momentum")
    nesterov: bool = Field(False, description="sgd: Nesterov momentum")
    weight_decay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="L2 term (adamw, lamb: decoupled) on all weights, those that no gradient reached too; lars, lamb: "
        "no biases",
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="adam, adamw, lamb: decay of the two running means"
    )
    eps: float = Field(1e-8, gt=0, description="adam, adamw, lars, lamb: term in the denominator")
    trust_coefficient: float = Field(
        0.001, gt=0, allow_inf_nan=False, description="lars: a tensor's step is this share of its norm, times lr"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="lr times global batch / lr_reference_batch, its square root, or lr as it is"
    )
    lr_reference_batch: Positive | None = Field(None, description="global batch for which lr was chosen")
    warmup_epochs: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="epochs of linear warm-up; may be a fraction"
    )
    warmup_steps: Count = Field(0, description="steps of linear warm-up, instead of warmup_epochs")
    schedule: Literal["constant", "step", "cosine", "exponential"] = Field(
        "constant", description="learning rate after the warm-up"
    )
    step_size: float = Field(30.0, gt=0, description="schedule step: epochs between two drops")
    gamma: float = Field(0.1, gt=0, le=1, description="schedule step: factor of a drop; exponential: factor per epoch")
    min_lr: float = Field(0.0, ge=0, description="the schedule's lowest learning rate")
    sharded: bool = free(
        False,
        description="each rank keeps the optimizer's slots of its part of the weights and moves that part (ZeRO-1)",
    )

    @model_validator(mode="after")
    def _combinations(self) -> OptimConfig:
        # A key of another optimizer is refused and not ignored: the user believes that it does something.
        problems = []
        if self.nesterov and not self.momentum:
            problems.append(("nesterov", "needs momentum > 0"))
        if self.name in ("adam", "adamw", "lamb") and (self.momentum or self.nesterov):
            problems.append(("momentum", f"belongs to sgd and lars; {self.name} has betas"))
        if self.name == "lars" and self.nesterov:
            problems.append(("nesterov", "belongs to sgd, not lars"))
        if self.name != "lars" and self.trust_coefficient != type(self).model_fields["trust_coefficient"].default:
            problems.append(("trust_coefficient", f"belongs to lars, not {self.name}"))
        if self.lr_scaling != "none" and self.lr_reference_batch is None:
            problems.append(("lr_scaling", "needs lr_reference_batch: the global batch that lr was chosen for"))
        if self.warmup_epochs and self.warmup_steps:
            problems.append(("warmup_steps", "give warmup_epochs or warmup_steps, not both"))
        raise_problems(problems)
        return self
