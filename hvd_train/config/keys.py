"""Every key of a configuration: its type, its default, its meaning, and what it may not be combined with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from hvd_train.compression.table import COMPRESSORS
from hvd_train.config.modes import ALLREDUCE, MODES
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.metrics.table import LOSSES, METRICS

FREE = "may change on resume"  # the name under which a field keeps it
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Mode = Literal["auto", "min", "max"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Finite | Annotated[list[Finite], Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


def free(default: Any, *, unless_cosine: bool = False, **rules: Any) -> Any:
    """Declare a key that a resumed run may change: it decides when to stop, save and report, not what the numbers are.

    All other keys want --allow-change. ``unless_cosine``: the cosine schedule runs to the end of the training, so the
    learning rate depends on this key.
    """
    return Field(default, json_schema_extra={FREE: "unless cosine" if unless_cosine else "always"}, **rules)


def rule(problems: list[tuple[str, str]]) -> None:
    """Raises one error that carries every (key, what) of a combination check."""
    if problems:
        text = "; ".join(f"{key}: {what}" for key, what in problems)
        raise PydanticCustomError("combination", "{text}", {"text": text, "problems": problems})


class OneOf:
    """A Literal of names to which a user may add."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    def words(self) -> str:
        return "|".join(self._names)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> str:
        if value not in [*self._names]:
            *first, last = (repr(name) for name in self._names)
            expected = " or ".join([", ".join(first), last])
            raise PydanticCustomError("literal_error", "must be {expected}", {"expected": expected})
        return value


class ModelConfig(Section):
    """Any further key is an option of the model's build function."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = Field(
        "mlp", description="a built-in model ('hvd-train models'), or your function 'package.module:function'"
    )

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


# transform -> the options it takes; as in torchvision, where it has them
TRANSFORMS = {
    "random_horizontal_flip": ("p",),
    "random_vertical_flip": ("p",),
    "random_crop": ("size", "padding", "fill", "padding_mode"),
    "cutout": ("size", "fill", "p"),
    "normalize": ("mean", "std"),
}


class TransformConfig(Section):
    name: str = Field(
        "", description="a built-in one ('hvd-train data'), or your function 'package.module:function' of (sample, rng)"
    )
    p: float | None = Field(None, ge=0, le=1, description="its probability; default: flips 0.5, cutout 1")
    size: Positive | None = Field(
        None, description="cutout: side in pixels; random_crop: default the side of the images"
    )
    padding: Positive | None = Field(None, description="random_crop: pixels put on each side first")
    fill: float = Field(0, allow_inf_nan=False, description="random_crop, cutout: value of new pixels, as stored")
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = Field(
        "constant", description="random_crop: what the padding holds"
    )
    mean: Numbers | None = Field(
        None, description="normalize: subtracted; one number, or one a channel, for values in [0, 1]"
    )
    std: Numbers | None = Field(None, description="normalize: divisor; one number, or one a channel")
    input: str | None = Field(None, description="the input that it changes, of several")
    options: dict[str, Any] = Field({}, description="arguments of your function")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """A name alone: all as by default."""
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _combinations(self) -> TransformConfig:
        if ":" not in self.name and self.name not in TRANSFORMS:
            rule([("name", did_you_mean(self.name, (*TRANSFORMS, "'package.module:function'")))])
        taken = TRANSFORMS.get(self.name, ("options",))
        fields = type(self).model_fields
        given = [key for key in fields if getattr(self, key) != fields[key].default and key not in ("name", "input")]
        problems = [(key, f"{self.name} takes {', '.join(taken)}") for key in given if key not in taken]
        wanted = {"random_crop": ("padding",), "cutout": ("size",), "normalize": ("mean", "std")}
        problems += [(key, f"{self.name} needs it") for key in wanted.get(self.name, ()) if key not in given]
        if any(x <= 0 for x in self.listed("std")):
            problems.append(("std", "must be > 0"))
        rule(problems)
        return self

    @model_serializer(mode="wrap")
    def _short(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the keys that were set, without defaults, because a list of sections is long."""
        return {key: value for key, value in dump(self).items() if value != type(self).model_fields[key].default}

    def listed(self, key: Literal["mean", "std"]) -> tuple[float, ...]:
        found = getattr(self, key)
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)


ARRAYS = ("npz", "npy", "hdf5", "packed")  # what images tells of: other kinds of data know it


def _class_names(value: Any) -> Any:
    """The names of classes as texts: YAML takes 1 for a number."""
    if isinstance(value, dict):
        return {key: _class_names(names) for key, names in value.items()}
    if value is None or value == "auto":
        return value
    listed = value if isinstance(value, list) else []
    names = [str(name) for name in listed]
    whole = all(isinstance(name, str | int) and name is not True and name is not False for name in listed)
    if not names or not whole or "" in names or len(set(names)) < len(names):
        wanted = "a list of words (yes, no, true and false in quotes) or of whole numbers, each once; or auto"
        raise PydanticCustomError("class_names", "{wanted}", {"wanted": wanted})
    return names


ClassNames = Annotated[
    Literal["auto"] | list[str] | dict[str, list[str]] | None,
    BeforeValidator(_class_names),
]


class DataConfig(Section):
    name: str = Field(
        "digits",
        description="a built-in data set ('hvd-train data'), or your 'package.module:function' giving (train, val)",
    )
    path: str | None = free(None, description="folder or file of the data; digits, synthetic and masked_text need none")
    image_size: Positive | None = Field(None, description="side in pixels to which images are resized")
    val_fraction: float = Field(
        0.2, gt=0, lt=1, description="share held out for validation where the data has no validation part"
    )
    num_samples: Positive = Field(10_000, description="synthetic: number of training samples")
    input_shape: list[Positive] = Field(
        [28, 28, 1], description="synthetic: shape of a sample, (height, width, channels)"
    )
    sequence_length: Positive = Field(128, description="text: bytes of a sample; masked_text: its tokens")
    vocabulary_size: int = Field(
        8000, ge=300, description="masked_text: byte-pair tokens to learn from the text, at most; 260 of them are fixed"
    )
    vocabulary: str | None = Field(
        None, description="masked_text: a tokenizer.json (of the tokenizers library) to take instead of learning one"
    )
    features: list[str] | None = Field(None, description="table: columns that are the input; default: all but labels")
    labels: str | list[str] | None = Field(None, description="table: the column to learn, or several")
    num_classes: Positive | None = Field(None, description="number of classes; default: the largest label + 1")
    images: bool | None = Field(
        None,
        description="your arrays: whether samples are images; null: bytes, and arrays with 1 or 3 channels",
    )
    classes: ClassNames = Field(
        None,
        description="words or whole numbers of the labels, or names of 0, 1, ..., in order; auto: those that occur",
    )
    target: Literal["labels", "inputs"] = Field(
        "labels", description="what the model learns; inputs: to reproduce its input, as autoencoders do"
    )
    options: dict[str, Any] = Field({}, description="arguments of your data function")
    transforms: list[TransformConfig] = Field([], description="transforms of each training sample, in this order")
    workers: Positive = free(1, description="threads of a rank that fetch, decode and transform ahead of the training")

    @model_validator(mode="after")
    def _combinations(self) -> DataConfig:
        names = [one.name for one in self.transforms]
        if "normalize" in names[:-1]:
            rule([("transforms", "normalize must stand last: it is done on the device, after all others")])
        if self.name != "table":
            rule([(key, "belongs to name: table") for key in ("features", "labels") if getattr(self, key)])
        if self.images is not None and self.name not in ARRAYS and ":" not in self.name:
            rule([("images", f"belongs to {', '.join(ARRAYS)} and your own data")])
        listed = self.classes if isinstance(self.classes, list) else []
        if self.num_classes and self.num_classes < len(listed):
            rule([("num_classes", f"{self.num_classes}, and data.classes names {len(listed)}: leave it out")])
        return self


TAKEN = ("event", "epoch", "step", "samples", "lr", "samples_per_second")  # what else a line of the log holds


# Words of other tools, of which the nearest by letters is another thing ("gpu": "cpu").
SYNONYMS = {
    "gpu": "cuda", "acc": "accuracy", "keras": "tensorflow", "tf": "tensorflow", "learning_rate": "lr",
    "16": "16-mixed", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32", "float32": "32", "float64": "64",
}  # fmt: skip


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is meant: it differs in capitals alone, is called so elsewhere, or is written alike."""
    word, names = name.lower(), {other.lower(): other for other in known}
    for same in (word, SYNONYMS.get(word)):
        if same in names:
            return names[same]
    close = difflib.get_close_matches(word, list(names), 1, cutoff)
    return names[close[0]] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    near = nearest(name, known) or next((other for other in known if name and name in other), None)
    return f"unknown '{name}'; {f'did you mean {near!r}? ' if near else ''}there are {', '.join(known)}"


def title_of(output: str, metric: str) -> str:
    """Return the name of a metric in the log: of a function the function's name."""
    return f"{output}_" * bool(output) + metric.rpartition(":")[2].rpartition(".")[2]


class TaskConfig(Section):
    loss: str | dict[str, str] = Field(
        "cross_entropy",
        description="a built-in loss, or your function 'package.module:function'; several outputs: {output: loss}",
    )
    metrics: list[str] | dict[str, list[str]] | None = Field(
        None,
        description="metrics, built in or yours; several outputs: {output: [...]}; null: accuracy of classes",
    )
    ignore_index: int = Field(-100, description="cross_entropy: the label of places that do not count")

    @property
    def terms(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """{output, or "" where there is one: (loss, its metrics)}, in the order of names: files may keep another."""
        losses = dict(sorted(self.loss.items())) if isinstance(self.loss, dict) else {"": self.loss}
        given = {"": self.metrics} if isinstance(self.metrics, list) else self.metrics
        usual = {name: ["accuracy"] if loss in ("cross_entropy", "bce") else [] for name, loss in losses.items()}
        return {name: (loss, tuple((given or usual).get(name, []))) for name, loss in losses.items()}

    @property
    def own(self) -> bool:
        """Return whether it names functions of the user."""
        return any(":" in name for loss, metrics in self.terms.values() for name in (loss, *metrics))

    def classes(self, label: str, alone: bool) -> bool:
        """Return whether this label is one of 0, 1, ...; ``alone``: there is no other."""
        loss, _ = self.terms.get(label) or (self.terms.get("") if alone else None) or ("", ())
        return loss == "cross_entropy"

    def asks_user_code(self, label: str) -> bool:
        """Return whether a loss or metric of the user's own looks at this label."""
        loss, metrics = self.terms.get(label) or self.terms.get("") or ("", ())
        return any(":" in name for name in (loss, *metrics))

    @property
    def names(self) -> list[str]:
        """Return the names of the values of an evaluation."""
        return [name for name, _ in self._told]

    @property
    def better(self) -> dict[str, Literal["min", "max"] | None]:
        """{name of what an evaluation tells: which value is better}; None: a metric of the user's, who must say it."""
        return dict(self._told)

    @property
    def _told(self) -> list[tuple[str, Literal["min", "max"] | None]]:
        losses: list[tuple[str, Literal["min", "max"] | None]] = [("loss", "min")]
        losses += [(f"{name}_loss", "min") for name in self.terms] if len(self.terms) > 1 else []
        each = [(name, metric) for name, (_, metrics) in self.terms.items() for metric in metrics]
        rows = [(title_of(name, metric), METRICS.get(metric)) for name, metric in each]
        return losses + [(title, row.better if row else None) for title, row in rows]

    @model_validator(mode="after")
    def _combinations(self) -> TaskConfig:
        problems = []
        for loss, metrics in self.terms.values():
            problems += [("loss", did_you_mean(loss, LOSSES))] if ":" not in loss and loss not in LOSSES else []
            problems += [("metrics", did_you_mean(m, METRICS)) for m in metrics if ":" not in m and m not in METRICS]
        if isinstance(self.loss, dict) and not all(name.isidentifier() for name in self.loss):
            problems.append(("loss", "give each loss the name of an output and of its labels"))
        named = {"": None} if isinstance(self.metrics, list) else dict(self.metrics or {})
        strange = [name for name in named if name not in self.terms]
        if strange:
            problems.append(("metrics", f"{', '.join(strange) or 'a list'}: give them by the outputs of loss"))
        names = self.names
        problems += [("metrics", f"'{x}' is no name for the log: use def") for x in names if not x.isidentifier()]
        for name in dict.fromkeys(names):
            if names.count(name) > 1 or name in TAKEN:
                problems.append(
                    ("metrics", f"'{name}' names two things in the log: leave one out or rename the function")
                )
        rule(problems)
        return self


class OptimConfig(Section):
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
        rule(problems)
        return self


# Keys of earlier configurations and checkpoints, which are taken still -> what they are called now.
FORMER = {"truth_every_n_steps": "compression_error_every_n_steps"}


class ExchangeConfig(Section):
    compression: Annotated[str, OneOf([*COMPRESSORS, "auto"])] = Field(
        "none",
        description="how gradients are compressed; auto: the fastest here of none, fp16, powersgd, topk",
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
        description="average: gradients (allreduce), a rotating part of the weights (partial), all, rarely (local_sgd)",
    )
    partial_fraction: float = Field(0.25, gt=0, le=1, description="partial: share of the weights averaged in a step")
    local_steps: Positive = Field(8, description="local_sgd: steps between two averages")
    overlap: Literal["auto"] | bool = Field(
        "auto",
        description="exchange during backward; auto: on GPUs, over networks and with spare cores",
    )
    compression_error_every_n_steps: Count = Field(
        0,
        validation_alias=AliasChoices("compression_error_every_n_steps", *FORMER),
        description="steps between two comparisons of the compressed with the exact gradient; 0: never",
    )

    @model_validator(mode="after")
    def _combinations(self) -> ExchangeConfig:
        owners = {option: name for name, row in COMPRESSORS.items() for option in row.options}
        problems = [
            (option, f"belongs to compression: {owner}, not {self.compression}")
            for option, owner in owners.items()
            if self.compression not in (owner, "auto") and self._given(option)
        ]
        for owner, row in MODES.items():
            if row.option and self.mode != owner and self._given(row.option):
                problems.append((row.option, f"belongs to mode: {owner}, not {self.mode}"))
        if self.compression != "none" and self.mode != ALLREDUCE:
            problems.append(("compression", f"gradients do not travel with mode: {self.mode}"))
        if self.op == "adasum" and (self.compression != "none" or self.mode != ALLREDUCE):
            problems.append(("op", "adasum goes with compression: none and mode: allreduce"))
        if self.compression_error_every_n_steps and self.compression == "none":
            problems.append(("compression_error_every_n_steps", "needs a compression to look at"))
        rule(problems)
        return self

    def _given(self, option: str) -> bool:
        return getattr(self, option) != type(self).model_fields[option].default

    def options(self, compression: str) -> dict[str, Any]:
        """Return the options of the compressor."""
        row = COMPRESSORS.get(compression)  # auto has none
        return {option: getattr(self, option) for option in (row.options if row else ())}


class CheckpointConfig(Section):
    every_n_epochs: Count = Field(1, description="save at the end of every n-th epoch; 0: only at the end of training")
    every_n_steps: Count = Field(0, description="save also every n steps, within the epoch; 0: off")
    snapshot_every_n_steps: Count = Field(
        0, description="with --max-restarts: steps between two states kept in memory (/dev/shm), for restarts; 0: off"
    )
    save_top_k: Count = Field(1, description="keep the k best by monitor")
    save_last: bool = Field(True, description="keep the newest, and the one before it in case it gets damaged")
    monitor: str = Field(
        "val_loss", description="the value that decides what is best: val_NAME or train_NAME of the loss or a metric"
    )
    mode: Mode = Field(
        "auto", description="which direction is better; auto: by the metric; set it for metrics of yours"
    )


class EarlyStoppingConfig(Section):
    monitor: str = Field("val_loss", description="the value that must improve: val_NAME or train_NAME")
    patience: Positive = Field(3, description="evaluations without improvement before training stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as improvement")
    mode: Mode = Field(
        "auto", description="which direction is better; auto: by the metric; set it for metrics of yours"
    )


def _number(value: Any) -> Any:
    """Slurm's words are text; YAML takes some for numbers."""
    return str(value) if isinstance(value, int) and value is not True else value


Word = Annotated[str, BeforeValidator(_number), Field(min_length=1)]


class SlurmConfig(Section):
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
        strange = [line for line in self.lines if not re.fullmatch(r"--[a-z][a-z-]*(=.+)?", line)]
        rule([("lines", f"{line!r} is no option of sbatch, --NAME or --NAME=VALUE") for line in strange])
        return self


def _precision(value: Any) -> Any:
    known = {32: "32", 64: "64", "32-true": "32", "64-true": "64"}
    return known.get(value, value) if isinstance(value, int | str) and value is not True else value


class Config(Section):
    framework: Annotated[str, OneOf(FRAMEWORKS)] = Field("pytorch", description="the framework that trains")
    model: ModelConfig = Field(ModelConfig(), description="the model and its options")
    data: DataConfig = Field(DataConfig(), description="the data set")
    task: TaskConfig = Field(TaskConfig(), description="the loss and what is told beside it")
    batch_size: Positive | None = Field(None, description="samples per rank and micro-batch (default 32)")
    global_batch_size: Positive | None = Field(
        None, description="samples per step over all ranks, instead of batch_size"
    )
    accumulate_grad_batches: Positive = Field(1, description="micro-batches per step; their gradients travel once")
    max_epochs: Positive | None = free(
        None, unless_cosine=True, description="epochs to train (default 1, if max_steps is not given)"
    )
    max_steps: Positive | None = free(
        None, unless_cosine=True, description="steps to train; with max_epochs: whichever ends first"
    )
    optim: OptimConfig = Field(OptimConfig(), description="optimizer and learning rate")
    gradient_clip_val: float = Field(0.0, ge=0, description="limit on the reduced gradient; 0: none")
    gradient_clip_algorithm: Literal["norm", "value"] = Field("norm", description="limit the global norm or each entry")
    exchange: ExchangeConfig = Field(ExchangeConfig(), description="how gradients travel")
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
    steps_per_execution: Positive | Literal["auto"] = free(
        "auto",
        description="TensorFlow: steps in one call of the compiled function; auto: on a CPU as many as take 0.1 s",
    )
    log_every_n_steps: Positive = free(50, description="steps between two lines of metrics.jsonl")
    tensorboard: bool = free(True, description="write TensorBoard events")
    slurm: SlurmConfig = free(SlurmConfig(), description="what 'hvd-train submit' asks for where its options do not")
    _notes: list[str] = PrivateAttr(default_factory=list)
    _restores: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _lengths(cls, given: Any) -> Any:
        """Defaults that depend on other keys."""
        if isinstance(given, dict):
            given = dict(given)
            if given.get("batch_size") is None and given.get("global_batch_size") is None:
                given["batch_size"] = 32
            if given.get("max_epochs") is None and given.get("max_steps") is None:
                given["max_epochs"] = 1
        return given

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        problems = []
        if self.batch_size and self.global_batch_size:
            problems.append(("global_batch_size", "give batch_size (per rank) or global_batch_size, not both"))
        told = [f"{part}_{name}" for part in ("val", "train") for name in self.task.names]
        rules: list[tuple[str, Any]] = [("checkpoint", self.checkpoint), ("early_stopping", self.early_stopping)]
        problems += [
            (f"{key}.monitor", did_you_mean(rule.monitor, told))
            for key, rule in rules
            if rule and rule.monitor not in told
        ]
        for key, one in rules:
            if one and one.monitor in told:
                known = self._known(one)
                if one.mode == "auto" and not known:
                    problems.append(
                        (f"{key}.mode", f"auto knows built-in metrics only; set min or max for {one.monitor}")
                    )
                elif known and one.mode not in ("auto", known):
                    taken, better = ("smallest", "larger") if one.mode == "min" else ("largest", "smaller")
                    what = f"takes the {taken} {one.monitor} as best, although a {better} one is better"
                    self._notes.append(f"{key}.mode: {one.mode} {what}; set {key}.mode: auto to change that")
        if not self.run_dir.strip():
            problems.append(("run_dir", "must not be empty"))
        if self.optim.sharded and self.exchange.mode != ALLREDUCE:
            problems.append(
                ("optim.sharded", f"ranks move their weights apart with exchange.mode: {self.exchange.mode}")
            )
        if self.optim.sharded and self.exchange.op == "adasum":
            problems.append(("optim.sharded", "adasum joins whole tensors, and gives no rank a part of them"))
        if self.devices is not None and self.device == "cpu":
            problems.append(("devices", "names GPUs, but device is cpu"))
        rule(problems)
        return self

    @property
    def notes(self) -> list[str]:
        """Return the notes about the configuration for the user, a line each."""
        return self._notes

    def mode_of(self, rule: CheckpointConfig | EarlyStoppingConfig) -> str:
        """Return whether the smaller ("min") or the larger ("max") value of the rule's monitor is better."""
        return rule.mode if rule.mode != "auto" else self._known(rule) or "min"

    def _known(self, rule: CheckpointConfig | EarlyStoppingConfig) -> Literal["min", "max"] | None:
        return self.task.better.get(rule.monitor.partition("_")[2])

    def resolved(self) -> Config:
        """The same with a ``mode`` in place of each ``auto``."""
        rules = {"checkpoint": self.checkpoint, "early_stopping": self.early_stopping}
        said = {key: rule.model_copy(update={"mode": self.mode_of(rule)}) for key, rule in rules.items() if rule}
        return self.model_copy(update=said)

    @property
    def user_code(self) -> dict[str, str]:
        """{key: what it names} of the keys that name code of the user's, ``package.module:function``."""
        terms = self.task.terms.values()
        named = {
            "model.name": self.model.name,
            "data.name": self.data.name,
            "data.transforms": ", ".join(one.name for one in self.data.transforms),
            "task.loss": ", ".join(loss for loss, _ in terms),
            "task.metrics": ", ".join(name for _, metrics in terms for name in metrics),
        }
        return {key: name for key, name in named.items() if ":" in name}

    @property
    def restores(self) -> bool:
        """Return whether all weights come from a checkpoint, so that a model function need not load any."""
        return self._restores

    def restoring(self) -> Config:
        """The same, with ``restores``."""
        found = self.model_copy()
        found._restores = True
        return found

    @property
    def checks_gradients(self) -> bool:
        """Return whether a step is taken only where the gradients of all ranks are finite."""
        return self.precision == "16-mixed" or self.on_nonfinite == "skip"

    def global_batch(self, world_size: int) -> int:
        """Samples per step: global_batch_size, or batch_size x world size x accumulate_grad_batches."""
        if self.global_batch_size:
            return self.global_batch_size
        return (self.batch_size or 0) * world_size * self.accumulate_grad_batches
