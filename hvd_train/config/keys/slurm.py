"""The keys of ``slurm``."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from hvd_train.config.keys.section import Positive, Section, raise_problems


def _as_text(value: Any) -> Any:
    """Convert a number to text: YAML reads some of Slurm's texts as numbers."""
    return str(value) if isinstance(value, int) and value is not True else value


Word = Annotated[str, BeforeValidator(_as_text), Field(min_length=1)]


class SlurmConfig(Section):
    """The resources and options of a job for ``hvd-train submit``."""

    nodes: Positive = Field(1, description="hosts")
    ntasks_per_node: Positive = Field(1, description="ranks on each")
    cpus_per_task: Positive | None = Field(None, description="cores of each rank")
    gpus_per_node: Word | None = Field(None, description="GPUs of each host, [TYPE:]N; a rank takes its local rank's")
    time: Word | None = Field(None, description="time limit as Slurm writes it: 30 (minutes), 2:00:00, 1-12")
    partition: Word | None = Field(None, description="the partition, if the site has several")
    account: Word | None = Field(None, description="account to charge")
    modules: list[Word] = Field([], description="modules to load first")
    lines: list[Word] = Field([], description="more options of sbatch, such as '--qos=high'")
    container: Word | None = Field(
        None, description="command put before each rank's, such as 'apptainer exec train.sif'"
    )
    requeue: Positive | None = Field(
        None,
        description="restarts at most: save before the time is over or when others need the hosts, then continue",
    )
    save_before: Positive = Field(120, description="with requeue: seconds before the end of the time")

    @model_validator(mode="after")
    def _combinations(self) -> SlurmConfig:
        # A line is copied into the job script, so it must be an option.
        invalid = [line for line in self.lines if not re.fullmatch(r"--[a-z][a-z-]*(=.+)?", line)]
        raise_problems([("lines", f"{line!r} is no option of sbatch, --NAME or --NAME=VALUE") for line in invalid])
        return self
