"""The top-level keys, and the sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from hvd_train.config.conflicts import refused
from hvd_train.config.keys.average import EmaConfig, SwaConfig
from hvd_train.config.keys.checkpoint import CheckpointConfig, EarlyStoppingConfig
from hvd_train.config.keys.data import DataConfig
from hvd_train.config.keys.exchange import ExchangeConfig
from hvd_train.config.keys.model import ModelConfig
from hvd_train.config.keys.optim import OptimConfig, PlateauConfig
from hvd_train.config.keys.parallel import PER_STAGE, ParallelConfig
from hvd_train.config.keys.section import Count, OneOf, Positive, Section, free, is_set, raise_problems
from hvd_train.config.keys.slurm import SlurmConfig
from hvd_train.config.keys.task import GATHERED, TaskConfig
from hvd_train.config.modes import SHARDED, STAGES, ModeSpec
from hvd_train.config.names import did_you_mean
from hvd_train.config.trackers import TRACKERS
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS


def _precision(value: Any) -> Any:
    """Convert the precision to text, because YAML reads 32 as a number. Lightning's longer names are accepted, too."""
    known = {32: "32", 64: "64", "32-true": "32", "64-true": "64"}
    return known.get(value, value) if isinstance(value, int | str) and value is not True else value


def _max_tokens(data: Any) -> Any:
    """Return ``lengths.max_tokens`` of the section ``data``, which may not be checked yet; None if it is not given."""
    for key in ("lengths", "max_tokens"):
        data = data.get(key) if isinstance(data, dict) else getattr(data, key, None)
    return data


class Config(Section):
    """The whole configuration of a run."""

    framework: Annotated[str, OneOf(FRAMEWORKS)] = Field("pytorch", description="the framework that trains")
    model: ModelConfig = Field(ModelConfig(), description="the model and its options")
    data: DataConfig = Field(DataConfig(), description="the data set")
    task: TaskConfig = Field(TaskConfig(), description="the loss, and the metrics that are reported")
    batch_size: Positive | Literal["auto"] | None = Field(
        None, description="samples per rank and micro-batch (default 32); auto: tries sizes when a training starts"
    )
    global_batch_size: Positive | None = Field(
        None, description="samples per step over all ranks, instead of batch_size"
    )
    accumulate_grad_batches: Positive = Field(1, description="micro-batches per step; their gradients travel once")
    max_epochs: Positive | None = free(
        None, unless_to_end=True, description="epochs to train (default 1, if max_steps is not given)"
    )
    max_steps: Positive | None = free(
        None, unless_to_end=True, description="steps to train; with max_epochs: whichever ends first"
    )
    optim: OptimConfig = Field(OptimConfig(), description="optimizer and learning rate")
    ema: EmaConfig | None = Field(
        None, description="evaluate, save and predict with an exponential mean of the weights; null: with themselves"
    )
    swa: SwaConfig | None = Field(
        None, description="end with the mean of the weights of the last epochs, and its batch statistics; null: without"
    )
    gradient_clip_val: float = Field(0.0, ge=0, description="limit on the reduced gradient; 0: none")
    gradient_clip_algorithm: Literal["norm", "value"] = Field("norm", description="limit the global norm or each entry")
    exchange: ExchangeConfig = Field(ExchangeConfig(), description="how gradients travel")
    parallel: ParallelConfig = Field(ParallelConfig(), description="one model over several ranks")
    sync_batchnorm: bool = Field(
        False, description="batch normalization uses the global batch, not a rank's part of it"
    )
    checkpoint: CheckpointConfig = free(CheckpointConfig(), description="when to save and what to keep")
    early_stopping: EarlyStoppingConfig | None = free(None, description="stop before the end; null: never")
    check_val_every_n_epoch: Positive = free(1, description="evaluate after every n-th epoch, and at the end")
    limit_train_batches: Positive | None = Field(None, description="steps per epoch at most, for short trials")
    limit_val_batches: Positive | None = free(None, description="batches per evaluation and rank at most")
    precision: Annotated[Literal["32", "64", "16-mixed", "bf16-mixed"], BeforeValidator(_precision)] = Field(
        "32",
        description="bits: 32, 64 for proofs of equality, or weights of 32 and most arithmetic in 16 (mixed)",
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = free(
        "stop",
        description="NaN or infinity: end with code 6, leave the step out, or take the last checkpoint's weights",
    )
    watchdog_s: float = free(
        600,
        ge=0,
        description="seconds without a step, or a save without a byte, after which all ranks are ended; 0: never",
    )
    device: Literal["auto", "cpu", "cuda"] = free("auto", description="cuda: the GPU of the local rank")
    devices: list[Count] | None = free(None, description="GPU indices for the local ranks, in order; null: all visible")
    threads: Positive | Literal["auto"] = free("auto", description="threads per rank; auto: cores / local ranks")
    seed: Count = Field(0, description="seed of first weights, sample order and dropout")
    run_dir: str = free("runs/default", description="run folder: config, metrics, checkpoints, TensorBoard events")
    code_dir: str | None = free(
        None,
        description="folder of your modules, searched before the current one; null: the configuration file's",
    )
    agreement_every_n_steps: Count = free(
        100, description="steps between two checks that all ranks hold the same weights, bit for bit; 0: never"
    )
    noise_scale_every_n_steps: Count = free(
        0,
        description="steps between two measurements of the gradient noise scale, which says how large a batch pays"
        "; 0: never",
    )
    steps_per_execution: Positive | Literal["auto"] = free(
        "auto",
        description="TensorFlow: steps in one call of the compiled function; auto: on a CPU as many as take 0.1 s",
    )
    hooks: list[str] = free([], description="your hooks: package.module:Class of each, derived from hvd_train.Hook")
    log_every_n_steps: Positive = free(50, description="steps between two lines of metrics.jsonl")
    tensorboard: bool = free(True, description="write TensorBoard events")
    loggers: list[Annotated[str, OneOf(["tensorboard", *TRACKERS])]] = free(
        [], description="where the numbers go as well, from rank 0 alone; into the run folder, without a network"
    )
    slurm: SlurmConfig = free(SlurmConfig(), description="what 'hvd-train submit' asks for where its options do not")
    # Private: not part of the configuration, so not written, compared or counted in its digest.
    _notes: list[str] = PrivateAttr(default_factory=list)
    _restores: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _set_lengths(cls, data: Any) -> Any:
        """Set the defaults that depend on other keys, so that a resolved configuration shows them."""
        if isinstance(data, dict):
            data = dict(data)
            sized = data.get("batch_size"), data.get("global_batch_size"), _max_tokens(data.get("data"))
            if not any(size is not None for size in sized):
                data["batch_size"] = 32
            if data.get("max_epochs") is None and data.get("max_steps") is None:
                data["max_epochs"] = 1
            parallel = data.get("parallel")
            if isinstance(parallel, dict) and parallel.get("microbatches") is None:
                stages = parallel.get("pipeline", 1)
                if isinstance(stages, int) and stages > 1:
                    data["parallel"] = parallel | {"microbatches": PER_STAGE * stages}
        return data

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        problems = []
        monitors = [f"{part}_{name}" for part in ("val", "train") for name in self.task.names]
        rules = self._watching
        problems += [
            (f"{key}.monitor", did_you_mean(rule.monitor, monitors))
            for key, rule in rules
            if rule and rule.monitor not in monitors
        ]
        for key, one in rules:
            if one and one.monitor in monitors:
                known = self._direction(one)
                if one.mode == "auto" and not known:
                    problems.append(
                        (f"{key}.mode", f"auto knows built-in metrics only; set min or max for {one.monitor}")
                    )
                elif known and one.mode not in ("auto", known):
                    chosen, better = ("smallest", "larger") if one.mode == "min" else ("largest", "smaller")
                    what = f"takes the {chosen} {one.monitor} as best, although a {better} one is better"
                    self._notes.append(f"{key}.mode: {one.mode} {what}; set {key}.mode: auto to change that")
        if strange := [name for name in self.hooks if ":" not in name]:
            problems.append(("hooks", f"name a class as package.module:Class, not {strange[0]!r}"))
        if not self.run_dir.strip():
            problems.append(("run_dir", "must not be empty"))
        if self.swa and not self.max_steps and self.swa.epochs > (self.max_epochs or 0):
            problems.append(("swa.epochs", f"needs max_epochs of {self.swa.epochs} at least"))
        if note := self.exchange.spec.note:
            self._notes.append(f"exchange.mode: {self.exchange.mode}: {note}")
        if self.framework != "pytorch" and (options := self.model.compile):
            of_pytorch = [key for key in type(options).model_fields if is_set(options, key)]
            problems += [(f"model.compile.{key}", "belongs to framework: pytorch") for key in of_pytorch]
        problems += refused(self)
        raise_problems(problems)
        return self

    @property
    def update_spec(self) -> ModeSpec:
        """Return the update to use, from ``exchange.mode`` or the keys that replace it."""
        return STAGES if self.parallel.pipeline > 1 else SHARDED if self.optim.sharded is True else self.exchange.spec

    @property
    def _watching(self) -> list[tuple[str, Any]]:
        """Return (key, section or None) of the sections with a monitor and a mode."""
        sections = self.checkpoint, self.early_stopping, self.optim.plateau
        return list(zip(("checkpoint", "early_stopping", "optim.plateau"), sections, strict=True))

    @property
    def monitors(self) -> list[str]:
        """Return the names of all monitored metrics."""
        return list(dict.fromkeys(rule.monitor for _, rule in self._watching if rule))

    @property
    def notes(self) -> list[str]:
        """Return notes about the configuration for the user, a line each."""
        return self._notes

    def mode_of(self, rule: CheckpointConfig | EarlyStoppingConfig | PlateauConfig) -> str:
        """Return whether smaller ("min") or larger ("max") values of the rule's monitor are better."""
        return rule.mode if rule.mode != "auto" else self._direction(rule) or "min"

    def _direction(self, rule: CheckpointConfig | EarlyStoppingConfig | PlateauConfig) -> Literal["min", "max"] | None:
        """Return "min" or "max" for the rule's monitor, or None if only the user can know."""
        return self.task.better.get(rule.monitor.partition("_")[2])

    def resolved(self) -> Config:
        """Return a copy with each ``mode: auto`` replaced by min or max."""
        modes = {key: rule.model_copy(update={"mode": self.mode_of(rule)}) for key, rule in self._watching if rule}
        plateau = modes.pop("optim.plateau", None)
        return self.model_copy(update=modes | {"optim": self.optim.model_copy(update={"plateau": plateau})})

    @property
    def user_code(self) -> dict[str, str]:
        """Return {key: names} of user code in the configuration, ``package.module:function``."""
        terms = self.task.terms.values()
        named = {
            "model.name": self.model.name,
            "data.name": self.data.name,
            "data.transforms": ", ".join(one.name for one in self.data.transforms),
            "optim.schedule": self.optim.schedule,
            "optim.name": self.optim.name,
            "hooks": ", ".join(self.hooks),
            "task.loss": ", ".join(loss for loss, _ in terms),
            "task.metrics": ", ".join(x.removeprefix(GATHERED) for _, metrics in terms for x in metrics),
        }
        return {key: name for key, name in named.items() if ":" in name}

    @property
    def restores(self) -> bool:
        """Return whether all weights come from a checkpoint, so that a model function need not load any."""
        return self._restores

    def restoring(self) -> Config:
        """Return a copy with ``restores``."""
        copied = self.model_copy()
        copied._restores = True
        return copied

    @property
    def by_tokens(self) -> int:
        """Return the tokens of a step's batch, padding included; 0 if its samples are counted."""
        return (self.data.lengths and self.data.lengths.max_tokens) or 0

    @property
    def checks_gradients(self) -> bool:
        """Return whether steps with non-finite gradients are skipped."""
        return self.precision == "16-mixed" or self.on_nonfinite == "skip"

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per step: accumulation steps times those of the pipeline."""
        return self.accumulate_grad_batches * (self.parallel.microbatches or 1)

    def replicas(self, ranks: int) -> int:
        """Return the number of data-parallel replicas among ``ranks``."""
        return max(ranks // self.parallel.pipeline, 1)

    def without_stages(self) -> Config:
        """Return a copy without pipeline stages, which gives the same results."""
        parallel = self.parallel.model_copy(update={"pipeline": 1})
        return self.model_copy(update={"parallel": parallel}) if self.parallel.pipeline > 1 else self

    def on_one_device(self) -> Config:
        """Return a copy with one device per rank, which gives the same results."""
        parallel = self.parallel.model_copy(update={"devices_per_rank": 1})
        return self.model_copy(update={"parallel": parallel})

    def global_batch(self, world_size: int) -> int:
        """Return the samples per step: global_batch_size, or batch_size x world size x accumulate_grad_batches.

        With ``data.lengths.max_tokens`` it is the number of the longest samples, which evaluations take at once.
        """
        if self.global_batch_size:
            return self.global_batch_size
        if self.by_tokens:
            return self.by_tokens // self.data.lengths.max_length  # type: ignore[union-attr]
        if self.batch_size == "auto":
            what = "batch_size is auto, which 'hvd-train fit' alone replaces by a number"
            raise ConfigError(what, fix="--set batch_size=32, for example")
        return (self.batch_size or 0) * world_size * self.accumulate_grad_batches

    def batch_words(self, ranks: int) -> str:
        """Return the size of the global batch as text."""
        return (
            f"of at most {self.by_tokens:,} tokens" if self.by_tokens else str(self.global_batch(self.replicas(ranks)))
        )

    def global_batch_size_on(self, ranks: int) -> int | None:
        """Return the ``global_batch_size`` with which any number of ranks has the batches of ``ranks`` ranks.

        None for batches by tokens, which do not depend on the ranks.
        """
        return None if self.by_tokens else self.global_batch(self.replicas(ranks))
