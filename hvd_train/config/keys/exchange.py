"""The keys of ``exchange``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hvd_train.compression.table import COMPRESSORS
from hvd_train.config.keys.section import Count, Finite, OneOf, Positive, Section, misplaced, raise_problems
from hvd_train.config.modes import ALLREDUCE, MODES, ModeSpec

_CANDIDATES = [name for name, one in COMPRESSORS.items() if one.auto]


class ExchangeConfig(Section):
    """The exchange between ranks: gradients or weights, compressed or not."""

    compression: Annotated[str, OneOf([*COMPRESSORS, "auto"])] = Field(
        "none",
        description=f"how gradients are compressed; auto: the fastest here of {', '.join(_CANDIDATES)}",
    )
    ratio: float = Field(0.01, gt=0, le=1, description="topk: share of the entries that travel")
    exact: bool = Field(False, description="topk: sort large buckets too, instead of looking at a sample")
    threshold: float = Field(0.001, ge=0, description="threshold: absolute value above which an entry travels")
    rank: Positive = Field(4, description="powersgd: rank of the approximation")
    op: Literal["average", "adasum"] = Field(
        "average", description="how gradients are combined; adasum needs MPI and 2, 4, 8, ... ranks"
    )
    mode: Annotated[str, OneOf(MODES)] = Field(
        ALLREDUCE,
        description="how ranks are joined: by gradients or weights, in each step, later, rarely, or without waiting",
    )
    delay: Count = Field(1, description="delayed: steps after which a gradient is applied; 0: at once")
    compensation: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="delayed: lambda of g + lambda g^2 (w - w then), as the weights w have moved meanwhile; 0: none",
    )
    partial_fraction: float = Field(0.25, gt=0, le=1, description="partial: share of the weights averaged in a step")
    local_steps: Positive = Field(8, description="local_sgd: steps between two averages")
    outer_steps: Positive = Field(30, description="outer, streaming: steps of each rank between two outer steps")
    outer_lr: Finite = Field(
        0.7, gt=0, description="outer, streaming: learning rate of the outer step; 1 without momentum: a mean"
    )
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="outer, streaming: Nesterov momentum of the outer step")
    outer_start: Count = Field(
        0, description="outer, streaming: steps at the start in which gradients travel (allreduce)"
    )
    outer_feedback: float = Field(
        0.95, ge=0, le=1, description="outer: share of what a compression left out that the next outer step adds"
    )
    fragments: Positive = Field(3, description="streaming: parts of the weights, each with outer steps of its own")
    stream_delay: Count = Field(1, description="streaming: steps that a part has to travel before the weights take it")
    mix: float = Field(0.5, ge=0, le=1, description="streaming: share of a rank's own weights when it takes a part")
    async_steps: Positive = Field(10, description="async: steps of a rank between exchanges with the central weights")
    async_pull: float = Field(
        0.9, gt=0, le=1, description="async: share of their distance by which N ranks and the centre approach (EASGD)"
    )
    overlap: Literal["auto"] | bool = Field(
        "auto",
        description="exchange during backward; auto: on GPUs, over networks and with spare cores",
    )
    compression_error_every_n_steps: Count = Field(
        0, description="steps between two comparisons of the compressed with the exact gradient; 0: never"
    )

    @model_validator(mode="after")
    def _combinations(self) -> ExchangeConfig:
        problems = misplaced(self, "mode", {name: spec.options for name, spec in MODES.items()})
        if self.compression != "auto":  # auto may choose any compressor, so it takes the options of all
            problems += misplaced(self, "compression", {name: row.options for name, row in COMPRESSORS.items()})
        raise_problems(problems + self._stream_problems())
        return self

    def _stream_problems(self) -> list[tuple[str, str]]:
        """Return (key, what is wrong) if ``streaming`` cannot send one fragment at a time."""
        if "fragments" not in self.spec.options:
            return []
        interval, rest = divmod(self.outer_steps, self.fragments)
        if rest:
            return [("fragments", f"must divide outer_steps, and {self.fragments} does not divide {self.outer_steps}")]
        if self.stream_delay >= interval:
            what = f"must be less than outer_steps / fragments, {interval}: one part travels at a time"
            return [("stream_delay", what)]
        return []

    @property
    def spec(self) -> ModeSpec:
        """Return the spec of ``mode``."""
        return MODES[self.mode]

    def options(self, compression: str) -> dict[str, Any]:
        """Return the options of this compressor."""
        row = COMPRESSORS.get(compression)  # "auto" is not in the table: it has no options
        return {option: getattr(self, option) for option in (row.options if row else ())}
