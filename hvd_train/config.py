"""The configuration: typed, frozen, every key explained; all mistakes of a file are reported at once, with lines."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hvd_train.errors import ConfigError

MAX_BYTES = 1 << 20
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Metric = Literal["val_loss", "val_accuracy", "train_loss"]
Mode = Literal["min", "max"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


def rule(problems: list[tuple[str, str]]) -> None:
    """Raises one error that carries every (key, what) of a combination check."""
    if problems:
        text = "; ".join(f"{key}: {what}" for key, what in problems)
        raise PydanticCustomError("combination", "{text}", {"text": text, "problems": problems})


class ModelConfig(Section):
    """Any further key is an option of the model's build function."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = Field(
        "mlp", description="a model of the zoo ('hvd-train models'), or your own 'package.module:function'"
    )

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataConfig(Section):
    name: str = Field(
        "digits", description="a data set ('hvd-train data'), or your own 'package.module:function' giving (train, val)"
    )
    path: str | None = Field(None, description="folder or file of the data; digits and synthetic need none")
    image_size: Positive | None = Field(None, description="side in pixels to which images are resized")
    val_fraction: float = Field(
        0.2, gt=0, lt=1, description="share held out for validation where the data has no validation part"
    )
    num_samples: Positive = Field(10_000, description="synthetic: number of training samples")
    input_shape: list[Positive] = Field(
        [28, 28, 1], description="synthetic: shape of a sample, (height, width, channels)"
    )
    num_classes: Positive | None = Field(None, description="number of classes; default: the largest label + 1")
    options: dict[str, Any] = Field({}, description="arguments of your own data function")


class OptimConfig(Section):
    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="optimizer; formulas as PyTorch documents them")
    lr: float = Field(0.01, gt=0, allow_inf_nan=False, description="base learning rate, before lr_scaling")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd: momentum")
    nesterov: bool = Field(False, description="sgd: Nesterov momentum")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="L2 term (adamw: decoupled) on all weights")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="adam, adamw: decay of the two running means"
    )
    eps: float = Field(1e-8, gt=0, description="adam, adamw: term in the denominator")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="lr times global batch / lr_reference_batch, its square root, or lr as it is"
    )
    lr_reference_batch: Positive | None = Field(None, description="global batch for which lr was chosen")
    warmup_epochs: float = Field(0.0, ge=0, allow_inf_nan=False, description="epochs of linear warm-up (parts count)")
    warmup_steps: Count = Field(0, description="steps of linear warm-up, instead of warmup_epochs")
    schedule: Literal["constant", "step", "cosine", "exponential"] = Field("constant", description="after the warm-up")
    step_size: float = Field(30.0, gt=0, description="schedule step: epochs between two drops")
    gamma: float = Field(0.1, gt=0, le=1, description="schedule step: factor of a drop; exponential: factor per epoch")
    min_lr: float = Field(0.0, ge=0, description="the schedule's lowest learning rate")

    @model_validator(mode="after")
    def _combinations(self) -> OptimConfig:
        problems = []
        if self.nesterov and not self.momentum:
            problems.append(("nesterov", "needs momentum > 0"))
        if self.name != "sgd" and (self.momentum or self.nesterov):
            problems.append(("momentum", f"belongs to sgd; {self.name} has betas"))
        if self.lr_scaling != "none" and self.lr_reference_batch is None:
            problems.append(("lr_scaling", "needs lr_reference_batch: the global batch that lr was chosen for"))
        if self.warmup_epochs and self.warmup_steps:
            problems.append(("warmup_steps", "give warmup_epochs or warmup_steps, not both"))
        rule(problems)
        return self


class ExchangeConfig(Section):
    compression: Literal["none"] = Field("none", description="what travels instead of the gradient; none: the gradient")


class CheckpointConfig(Section):
    every_n_epochs: Count = Field(1, description="save at the end of every n-th epoch; 0: only at the end of training")
    every_n_steps: Count = Field(0, description="save also every n steps, within the epoch; 0: off")
    save_top_k: Count = Field(1, description="keep the k best by monitor")
    save_last: bool = Field(True, description="keep the newest, and the one before it in case it gets damaged")
    monitor: Metric = Field("val_loss", description="what 'best' means")
    mode: Mode = Field("min", description="whether a smaller or larger monitor is better")


class EarlyStoppingConfig(Section):
    monitor: Metric = Field("val_loss", description="what must improve")
    patience: Positive = Field(3, description="evaluations without improvement before training stops")
    min_delta: float = Field(0.0, ge=0, description="smallest change that counts as improvement")
    mode: Mode = Field("min", description="whether a smaller or larger monitor is better")


def _precision(value: Any) -> Any:
    return {32: "32", 64: "64", "32-true": "32", "64-true": "64"}.get(value, value) if value is not True else value


class Config(Section):
    framework: Literal["pytorch", "tensorflow"] = Field("pytorch", description="which front-end trains")
    model: ModelConfig = Field(ModelConfig(), description="the model and its options")
    data: DataConfig = Field(DataConfig(), description="the data set")
    batch_size: Positive | None = Field(None, description="samples per rank and micro-batch (default 32)")
    global_batch_size: Positive | None = Field(
        None, description="samples per step over all ranks, instead of batch_size"
    )
    accumulate_grad_batches: Positive = Field(1, description="micro-batches per step; their gradients travel once")
    max_epochs: Positive | None = Field(None, description="epochs to train (default 1, if max_steps is not given)")
    max_steps: Positive | None = Field(None, description="steps to train; with max_epochs: whichever ends first")
    optim: OptimConfig = Field(OptimConfig(), description="optimizer and learning rate")
    gradient_clip_val: float = Field(0.0, ge=0, description="limit on the reduced gradient; 0: none")
    gradient_clip_algorithm: Literal["norm", "value"] = Field("norm", description="limit the global norm or each entry")
    exchange: ExchangeConfig = Field(ExchangeConfig(), description="how gradients travel")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="when to save and what to keep")
    early_stopping: EarlyStoppingConfig | None = Field(None, description="when to stop before the end; null: never")
    check_val_every_n_epoch: Positive = Field(1, description="evaluate after every n-th epoch, and at the end")
    limit_train_batches: Positive | None = Field(None, description="steps per epoch at most, for short trials")
    limit_val_batches: Positive | None = Field(None, description="batches per evaluation and rank at most")
    precision: Annotated[Literal["32", "64"], BeforeValidator(_precision)] = Field(
        "32", description="bits of weights and arithmetic: 32, or 64 for proofs of equality"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cuda: the GPU of the local rank")
    devices: list[Count] | None = Field(
        None, description="GPU indices for the local ranks, in order; null: all visible"
    )
    threads: Positive | Literal["auto"] = Field("auto", description="threads per rank; auto: cores / local ranks")
    seed: Count = Field(0, description="of first weights, sample order and dropout")
    run_dir: str = Field("runs/default", description="run folder: config, metrics, checkpoints, TensorBoard events")
    log_every_n_steps: Positive = Field(50, description="steps between two lines of metrics.jsonl")
    tensorboard: bool = Field(True, description="write TensorBoard events")

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
        if not self.run_dir.strip():
            problems.append(("run_dir", "must not be empty"))
        if self.devices is not None and self.device == "cpu":
            problems.append(("devices", "names GPUs, but device is cpu"))
        rule(problems)
        return self

    def global_batch(self, world_size: int) -> int:
        """Samples per step: global_batch_size, or batch_size x world size x accumulate_grad_batches."""
        if self.global_batch_size:
            return self.global_batch_size
        return (self.batch_size or 0) * world_size * self.accumulate_grad_batches


# ---- reading


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-5 for a word; people mean a number."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

Path_ = tuple[str | int, ...]


def _plain(node: yaml.Node, path: Path_, lines: dict[Path_, str], file: str, problems: list[str]) -> Any:
    """A YAML node as Python data; notes each key's place, and keys that stand twice."""
    lines[path] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        out: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            place = f"{file}:{key_node.start_mark.line + 1}"
            if key in out:
                problems.append(f"{place}: {_dotted((*path, key))}: stands twice; keep one")
            out[key] = _plain(value_node, (*path, key), lines, file, problems)
            lines[*path, key] = place
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, i), lines, file, problems) for i, item in enumerate(node.value)]
    return _Loader("").construct_object(node)


def _read(path: Path, lines: dict[Path_, str], problems: list[str]) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(path)) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"a configuration of {len(raw):,} bytes is no configuration", where=str(path))
    try:
        text = raw.decode("utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
            raise ConfigError("anchors and aliases (&, *) are not taken", where=str(path), fix="write the value out")
        node = yaml.compose(text, _Loader)
        if node is None:
            raise ConfigError("the configuration is empty", where=str(path), fix="'hvd-train config' prints a full one")
        data = _plain(node, (), lines, str(path), problems)
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not UTF-8 text", where=f"{path}, byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        tab = "; indent with blanks, not tabs" if "'\\t'" in str(error) else ""
        raise ConfigError(f"{place}: not valid YAML: {error.problem}{tab}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not valid YAML: {error}".splitlines()[0], where=str(path)) from error
    if not isinstance(data, dict):
        raise ConfigError("the configuration must be 'key: value' lines", where=f"{path}:1")
    return data


def _apply(data: dict[str, Any], setting: str, lines: dict[Path_, str], problems: list[str]) -> None:
    key, equals, text = setting.partition("=")
    where = f"--set {setting}"
    if not equals or not key.strip():
        problems.append(f"{where}: not of the form key=value; for example --set optim.lr=0.1")
        return
    try:
        node = yaml.compose(text, _Loader)
        value = None if node is None else _plain(node, (), {}, where, problems)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"{where}: the value is not valid YAML: {str(error).splitlines()[0]}")
        return
    path = tuple(part.strip().replace("-", "_") for part in key.split("."))
    at = data
    for part in path[:-1]:
        if not isinstance(at.get(part), dict):
            at[part] = {}
        at = at[part]
    at[path[-1]] = value
    for stale in [p for p in lines if p[: len(path)] == path]:
        del lines[stale]
    lines[path] = where


def load_config(path: Path | None = None, sets: Sequence[str] = (), **overrides: Any) -> Config:
    """Defaults, then the file, then ``--set`` settings, then ``overrides`` (flags; None is left out).

    Raises one ConfigError with a line for each mistake: ``FILE:LINE: key: what; what to do``.
    """
    lines: dict[Path_, str] = {}
    problems: list[str] = []
    data = _read(path, lines, problems) if path else {}
    for setting in sets:
        _apply(data, setting, lines, problems)
    for key, value in overrides.items():
        if value is not None:
            data[key] = value
            lines[key,] = f"--{key.replace('_', '-')}"
    config = None
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += _explained(error, lines, path)
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def _expanded(error: ValidationError) -> Iterator[dict[str, Any]]:
    for item in error.errors(include_url=False):
        if item["type"] == "combination":
            for key, what in item["ctx"]["problems"]:
                yield {"type": "rule", "loc": (*item["loc"], key), "msg": what, "input": None}
        else:
            yield dict(item)


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def _section(path: Sequence[str | int]) -> type[BaseModel] | None:
    """The section class at a path of keys."""
    at: Any = Config
    for part in path:
        field = at.model_fields.get(str(part)) if isinstance(at, type) and issubclass(at, BaseModel) else None
        if field is None:
            return None
        at = _inner(field.annotation)
    return at if isinstance(at, type) and issubclass(at, BaseModel) else None


def _inner(annotation: Any) -> Any:
    sections = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return sections[0] if sections else annotation


# pydantic's kind of error -> what was expected, in a user's words
EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "string_type": "text",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a section of keys",
    "model_type": "a section of keys", "finite_number": "finite", "literal_error": "{expected}",
    "greater_than": "> {gt}", "greater_than_equal": ">= {ge}", "less_than": "< {lt}", "less_than_equal": "<= {le}",
    "too_long": "of at most {max_length} items", "too_short": "of at least {min_length} items",
}  # fmt: skip


def _explained(error: ValidationError, lines: Mapping[Path_, str], file: Path | None) -> list[str]:
    """One line per key, in the order of the file; the alternatives of a key ("auto" or a number) are one mistake."""
    found: dict[Path_, list[dict[str, Any]]] = {}
    for item in _expanded(error):
        # Members of a union ("constrained-int", "literal[...]") stand in pydantic's location, but are no keys.
        path = list(item["loc"])
        while len(path) > 1 and _section(path[:-1]) is None and not isinstance(path[-1], int):
            path.pop()
        found.setdefault(tuple(path), []).append(item)
    order = list(lines)
    rows = []
    for key, items in found.items():
        near = [key[:n] for n in range(len(key), 0, -1) if key[:n] in lines]
        near += [given for given in lines if given[: len(key)] == key]  # "optm" of "--set optm.lr=3"
        place = lines[near[0]] if near else str(file or "")
        text = f"{_dotted(key)}: {_text(key, items)}"
        rows.append((order.index(near[0]) if near else -1, f"{place}: {text}" if place else text))
    return [row for _, row in sorted(rows, key=lambda row: row[0])]


def _text(path: Path_, items: Sequence[Mapping[str, Any]]) -> str:
    kinds = [item["type"] for item in items]
    if "extra_forbidden" in kinds:
        section = _section(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), list(section.model_fields) if section else [], 1, 0.6)
        guesses = [_dotted((*path[:-1], *near))] if near else []
        guesses += [key for key, *_ in explain() if key.split(".")[-1] == path[-1]]
        return f"unknown key; did you mean '{guesses[0]}'?" if guesses else f"unknown key; {LISTED}"
    if "rule" in kinds:
        return str(items[0]["msg"])
    expected = [EXPECTED.get(i["type"], i["msg"]).format_map(i.get("ctx") or {}) for i in items]
    value = items[0]["input"]
    text = f"must be {' or '.join(dict.fromkeys(expected))}, not {json.dumps(value, default=str)[:60]}"
    options = [option for words in expected for option in re.findall(r"'([^']+)'", words)]
    near = difflib.get_close_matches(value, options, 1, 0.6) if isinstance(value, str) else []
    return text + (f"; did you mean '{near[0]}'?" if near else "")


LISTED = "'hvd-train config --explain' lists the keys"


# ---- writing


def resolved_yaml(config: Config) -> str:
    """Every key with its value; loads back equal."""
    return yaml.safe_dump(_dump(config), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


def _dump(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def explain(section: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key."""
    rows = []
    for name, field in section.model_fields.items():
        inner = _inner(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if type(None) in get_args(field.annotation):
                rows.append((prefix + name, "section or null", "null", field.description or ""))
            rows += explain(inner, f"{prefix}{name}.")
            continue
        default = "null" if field.default is None else json.dumps(field.default)
        rows.append((prefix + name, _words(field.annotation), default, field.description or ""))
    return rows


def _words(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(a) for a in args)
    if origin is Annotated:
        return _words(args[0])
    if args and origin in (list, dict):
        return f"{origin.__name__} of {_words(args[-1])}"
    if args:
        return "|".join(_words(a) for a in args)
    return {type(None): "null", str: "text", int: "number", float: "real", bool: "true|false", Any: "anything"}.get(
        annotation, str(annotation)
    )


def digest(config: Config) -> str:
    """Short hash of the whole configuration; ranks compare it before they train."""
    return hashlib.sha256(json.dumps(_dump(config), sort_keys=True).encode()).hexdigest()[:12]


# A resumed run may differ in these: they decide when to stop, save and report, not what the numbers are.
FREE = (
    "max_epochs", "max_steps", "run_dir", "log_every_n_steps", "tensorboard", "checkpoint", "check_val_every_n_epoch",
    "limit_val_batches", "early_stopping", "device", "devices", "threads", "data.path",
)  # fmt: skip


def changed(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old, new) of what would change the numbers of a resumed run."""
    free = [key for key in FREE if not (new.optim.schedule == "cosine" and key in ("max_epochs", "max_steps"))]
    before, after = dict(_leaves(_dump(old))), dict(_leaves(_dump(new)))
    return [
        (key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
