"""The keys of ``data.lengths``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hvd_train.config.keys.section import Positive, Section, is_set, raise_problems


class LengthsConfig(Section):
    """Padding, order and mask of samples of different lengths."""

    max_length: Positive = Field(512, description="places of a sample, at most")
    truncate: bool = Field(False, description="cut longer samples at their end; false: refuse them")
    buckets: Literal["auto"] | Annotated[list[Positive], Field(min_length=1)] | None = Field(
        "auto", description="lengths to which batches are padded, rising; auto: 8; null: the longest of each batch"
    )
    block: Positive = Field(
        256, description="samples of a bucket that follow one another; best a multiple of the global batch"
    )
    max_tokens: Positive | None = Field(
        None, description="places of a step's batch over all ranks, padding included, instead of batch_size"
    )
    mask: str | None = Field(
        "mask", description="the model's input that is true for places of a sample, false for padding; null: none"
    )

    @model_validator(mode="after")
    def _combinations(self) -> LengthsConfig:
        if isinstance(self.buckets, list):
            if self.buckets != sorted(set(self.buckets)):
                raise_problems([("buckets", "must rise, each once")])
            if self.buckets[-1] > self.max_length:
                raise_problems([("buckets", f"{self.buckets[-1]} is more than max_length, {self.max_length}")])
        if self.max_tokens is not None:
            if self.buckets is None:
                raise_problems([("max_tokens", "needs buckets: the samples of a batch are of one bucket")])
            if self.max_tokens < self.max_length:
                what = f"{self.max_tokens:,} places are too few for a sample of max_length, {self.max_length:,}"
                raise_problems([("max_tokens", f"{what}; raise it, or lower max_length")])
            if is_set(self, "block"):
                raise_problems([("block", "with max_tokens, batches are the blocks; leave one of them out")])
        if self.mask is not None and not self.mask.isidentifier():
            raise_problems([("mask", "give it the name of an argument of the model")])
        return self
