"""The keys of ``parallel``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hvd_train.config.keys.section import Positive, Section, free, raise_problems

PER_STAGE = 4  # micro-batches per stage, with which a stage idles less than a fifth of the time


class ParallelConfig(Section):
    """The division of one model over several ranks (pipeline), or over several devices of a rank.

    rank = replica x pipeline + stage.
    """

    pipeline: Positive = free(
        1, description="stages: each rank holds and trains one of so many parts of the model's blocks; 1: all of it"
    )
    microbatches: Positive | None = Field(
        None,
        description="parts of a step's batch that follow one another through the stages; default: 4 for each stage",
    )
    schedule: Literal["1f1b", "gpipe"] = free(
        "1f1b", description="1f1b keeps few micro-batches in memory; gpipe takes all forward, then all backward"
    )
    devices_per_rank: Positive = free(
        1, description="devices (GPUs, or CPU devices) of each rank, over which the model's blocks are placed"
    )
    split: Literal["auto"] | Annotated[list[Positive], Field(min_length=1)] = free(
        "auto", description="blocks of each stage or device, as [3, 2]; auto: even by measured time and memory"
    )

    @model_validator(mode="after")
    def _combinations(self) -> ParallelConfig:
        for parts, noun in ((self.pipeline, "stages"), (self.devices_per_rank, "devices")):
            if self.split != "auto" and parts > 1 and len(self.split) != parts:
                raise_problems([("split", f"{len(self.split)} numbers of blocks for {parts} {noun}")])
        return self
