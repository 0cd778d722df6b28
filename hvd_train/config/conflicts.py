"""The table of options that do not go together: two features, why, and what to do.

The configuration and scripts check it. ``hvd-train config --explain`` and the guide's page ``parallel`` print it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hvd_train.config.keys.section import Section, is_set
from hvd_train.config.keys.transforms import MIXING
from hvd_train.config.modes import ALLREDUCE, MODES, ModeSpec
from hvd_train.config.optimizers import OPTIMIZERS
from hvd_train.errors import ConfigError


@dataclass(frozen=True)
class Feature:
    """Certain values of a key: ``values``, all for which ``when`` is true, or all but the default.

    ``words``: a name to print if key and value are not clear. Without a key it is a property of the ranks or a script.
    """

    key: str = ""
    values: tuple[Any, ...] = ()
    when: Callable[[Any], bool] | None = None
    words: str = ""

    def used(self, config: Section) -> bool:
        """Return whether the configuration uses this feature."""
        if not self.key:
            return False
        section, last = _place(self.key, config)
        if section is None:  # a section that is left out
            return False
        value = getattr(section, last)
        return self.when(value) if self.when else value in self.values if self.values else is_set(section, last)

    def named(self, config: Section) -> str:
        """Return the name for a message, for example ``exchange.mode: outer``."""
        value = getattr(*_place(self.key, config))
        number_or_word = isinstance(value, str | int | float) and value is not True
        return self.words or (f"{self.key}: {value}" if number_or_word else self.key)

    def __str__(self) -> str:
        """Return the name for the printed table."""
        return self.words or self.key + (f": {', '.join(map(str, self.values))}" if self.values else "")


def _place(key: str, config: Section) -> tuple[Any, str]:
    """Find the section of a dotted key; return it and the key in it."""
    *path, last = key.split(".")
    return reduce(getattr, path, config), last


@dataclass(frozen=True)
class Conflict:
    """Two features that do not go together. A message begins with the key of ``one``; ``why`` is the reason."""

    one: Feature
    other: Feature
    why: str
    cure: str = "leave one of them out"


def _modes(has: Callable[[ModeSpec], bool]) -> Feature:
    return Feature("exchange.mode", tuple(name for name, spec in MODES.items() if has(spec)))


ANY_MODE, LOCAL = Feature("exchange.mode"), _modes(lambda spec: not spec.exact)
DELAYED = _modes(lambda spec: spec.exact and spec is not MODES[ALLREDUCE])
UNCOMPRESSED = _modes(lambda spec: not spec.compression)
NO_GRADIENTS = _modes(lambda spec: not spec.gradients)
SUMS = _modes(lambda spec: spec.sums)
NO_LOCKSTEP = _modes(lambda spec: not spec.lockstep)
COMPRESSION, AUTO = Feature("exchange.compression"), Feature("exchange.compression", ("auto",))
NO_COMPRESSION = Feature("exchange.compression", ("none",))
ADASUM = Feature("exchange.op", ("adasum",))
FEEDBACK = Feature("exchange.outer_feedback")
ERROR_METER = Feature("exchange.compression_error_every_n_steps")
NOISE_SCALE = Feature("noise_scale_every_n_steps")
SHARDED = Feature("optim.sharded", when=lambda x: x is True)
STAGES, DEVICES = map(Feature, ("parallel.pipeline", "parallel.devices_per_rank"))
EMA, SWA = Feature("ema"), Feature("swa")
FREE = Feature("optim.name", tuple(name for name, spec in OPTIMIZERS.items() if spec.schedule_free))
OWN = Feature("optim.name", when=lambda name: ":" in name, words="your own optimizer")
GROUPS = Feature("optim.groups")
UNFREEZING = Feature("optim.groups", when=lambda x: any(g.until_epoch for g in x), words="until_epoch of a group")
RATES = Feature(
    "optim.groups",
    when=lambda groups: any(group.lr is not None or group.weight_decay is not None for group in groups),
    words="lr or weight_decay of a group",
)
LR_SCALING = Feature("optim.lr_scaling")
WARM_UP, WARM_UP_STEPS = Feature("optim.warmup_epochs"), Feature("optim.warmup_steps")
ONE_CYCLE = Feature("optim.schedule", ("one_cycle",))
SYNC_BATCHNORM, NONFINITE = Feature("sync_batchnorm"), Feature("on_nonfinite", ("skip", "rollback"))
ROLLBACK, MIXED_16 = Feature("on_nonfinite", ("rollback",)), Feature("precision", ("16-mixed",))
LENGTHS, INPUTS = Feature("data.lengths"), Feature("data.target", ("inputs",))
TOKENS = Feature("data.lengths.max_tokens")
MIXERS = Feature("data.transforms", when=lambda x: any(one.name in MIXING for one in x), words=" or ".join(MIXING))
TRANSFORMS = Feature(
    "data.transforms",
    when=lambda x: any(one.name != "normalize" for one in x),
    words="a transform other than normalize",
)
STEP = Feature("task.step")
COMPILE, RECOMPUTE = Feature("model.compile"), Feature("model.recompute")
WEIGHTS, BALANCED = Feature("task.class_weights"), Feature("task.class_weights", ("balanced",))
# Properties that are not in the configuration, of the ranks or of a script.
GLOO, ODD_RANKS = Feature(words="ranks started with Gloo"), Feature(words="other than 2, 4, 8, ... ranks")
LOCAL_SCRIPT = Feature(words="mode= of a script")
SUMMED, VERIFY = Feature(words="average=False"), Feature(words="hvd-train verify")
LOSS_SCALE = Feature(words="LossScaleOptimizer")

_NO_WAIT = "in this mode no rank waits for another"
_ONE_STAGE = "a stage knows the names of its own weights alone"
CONFLICTS = (
    Conflict(Feature("global_batch_size"), Feature("batch_size"), "each of them sets the size of a step's batch"),
    *(
        Conflict(TOKENS, Feature(key), "each of them sets the size of a step's batch")
        for key in ("batch_size", "global_batch_size")
    ),
    Conflict(Feature("devices"), Feature("device", ("cpu",)), "it names GPUs"),
    Conflict(WARM_UP_STEPS, WARM_UP, "each of them sets the length of the warm-up"),
    *(
        Conflict(ONE_CYCLE, one, "its rate rises by itself", "leave the warm-up out, or set optim.schedule: cosine")
        for one in (WARM_UP, WARM_UP_STEPS)
    ),
    # How ranks exchange
    Conflict(COMPRESSION, UNCOMPRESSED, "what this mode sends is not compressed"),
    Conflict(ADASUM, COMPRESSION, "adasum combines the gradients as they are"),
    Conflict(ADASUM, ANY_MODE, "adasum combines the gradients of each step"),
    Conflict(ADASUM, ODD_RANKS, "it joins ranks in pairs", "start 2, 4, 8, ... ranks, or set exchange.op: average"),
    Conflict(ADASUM, GLOO, "Horovod has adasum for MPI alone", "start with mpirun, or set exchange.op: average"),
    Conflict(ERROR_METER, NO_COMPRESSION, "nothing is compressed", "set exchange.compression"),
    Conflict(ERROR_METER, NO_GRADIENTS, "no gradients are sent, whose error could be measured"),
    Conflict(NOISE_SCALE, ANY_MODE, "it compares a rank's gradient with the mean of all, of the same step"),
    Conflict(NOISE_SCALE, COMPRESSION, "what a compression leaves out would count as noise"),
    Conflict(NOISE_SCALE, ADASUM, "adasum's result is no mean of the ranks' gradients"),
    Conflict(FEEDBACK, NO_COMPRESSION, "no compression leaves anything out", "set exchange.compression"),
    Conflict(
        NO_LOCKSTEP,
        GLOO,
        "only MPI can change the memory of a rank while it computes",
        "start with mpirun, or set exchange.mode: local_sgd",
    ),
    Conflict(SYNC_BATCHNORM, NO_LOCKSTEP, f"it joins the ranks in each forward pass, and {_NO_WAIT}"),
    Conflict(NONFINITE, NO_LOCKSTEP, f"all ranks would leave out the same step, and {_NO_WAIT}"),
    Conflict(
        MIXED_16,
        NO_LOCKSTEP,
        f"all ranks leave out a step whose gradients overflow, and {_NO_WAIT}",
        "set precision: bf16-mixed, or exchange.mode: allreduce",
    ),
    Conflict(LR_SCALING, SUMS, "the changes of N ranks are added up, which is N times the rate already"),
    # Averages of weights
    *(Conflict(one, FREE, "the optimizer averages the weights by itself") for one in (EMA, SWA)),
    Conflict(SWA, EMA, "each of them evaluates and saves its own average of the weights"),
    Conflict(SWA, Feature("max_steps"), "it averages the weights of the last epochs", "give max_epochs"),
    *(Conflict(one, LOCAL, "ranks have different weights, and no common average") for one in (EMA, SWA, FREE)),
    # A sharded optimizer
    Conflict(SHARDED, LOCAL, "each rank moves all of its own weights"),
    Conflict(SHARDED, DELAYED, "each rank keeps whole gradients"),
    Conflict(SHARDED, ADASUM, "adasum combines whole gradients, and gives no rank a part of them"),
    *(
        Conflict(SHARDED, Feature("optim.name", (name,)), f"{name} {spec.undivided}")
        for name, spec in OPTIMIZERS.items()
        if spec.undivided
    ),
    Conflict(SHARDED, OWN, "it may need whole tensors, of which each rank would have a part"),
    # Groups of weights, and weights that are trained later
    Conflict(RATES, OWN, "your function sets them"),
    Conflict(UNFREEZING, OWN, "your function gets the weights once, at the start"),
    Conflict(SHARDED, UNFREEZING, "the optimizer state is divided once, at the start"),
    Conflict(ANY_MODE, UNFREEZING, "the state of this mode cannot take in further weights"),
    Conflict(ROLLBACK, UNFREEZING, "an earlier checkpoint has no optimizer state of weights that are trained since"),
    *(Conflict(one, UNFREEZING, "the average of all weights would start again") for one in (EMA, SWA, FREE)),
    # One model on several ranks or devices
    Conflict(DEVICES, STAGES, "a rank that holds a stage has one device"),
    Conflict(SHARDED, STAGES, "each rank has the optimizer state of its stage alone already"),
    Conflict(LENGTHS, STAGES, "stages exchange activations of one shape"),
    *(Conflict(one, STAGES, _ONE_STAGE) for one in (Feature("model.init_from"), GROUPS)),
    Conflict(OWN, STAGES, "your function gets the weights of a whole model"),
    *(Conflict(one, STAGES, "only whole models have averages of their weights") for one in (EMA, SWA, FREE)),
    Conflict(ANY_MODE, STAGES, "the replicas of a stage exchange gradients in each step"),
    Conflict(ADASUM, STAGES, "adasum joins all ranks, and only the replicas of a stage have the same weights"),
    Conflict(AUTO, STAGES, "auto measures the exchange of a whole model", "name a compression"),
    Conflict(NOISE_SCALE, STAGES, "no rank has a whole gradient"),
    Conflict(ERROR_METER, STAGES, "it compares the gradients of a whole model"),
    Conflict(SHARDED, DEVICES, "the optimizer state of a block lies on the block's device"),
    Conflict(GROUPS, DEVICES, "the weights of a group may lie on several devices"),
    Conflict(OWN, DEVICES, "it may need all weights on one device"),
    *(Conflict(COMPILE, one, "a whole model is compiled, for one device") for one in (STAGES, DEVICES)),
    *(Conflict(RECOMPUTE, one, "a stage or a device computes by blocks already") for one in (STAGES, DEVICES)),
    Conflict(RECOMPUTE, COMPILE, "the compiler decides what backward computes again"),
    # Data
    Conflict(INPUTS, LENGTHS, "padding would be learned as well"),
    Conflict(TRANSFORMS, LENGTHS, "transforms change samples of one shape"),
    Conflict(TOKENS, LR_SCALING, "steps have different numbers of samples"),
    Conflict(TOKENS, Feature("data.sampling"), "each epoch would have another number of steps"),
    Conflict(TOKENS, NO_LOCKSTEP, "a rank takes parts of batches of one size"),
    Conflict(Feature("data.sampling"), BALANCED, "rare classes would be made up for twice"),
    Conflict(WEIGHTS, MIXERS, "a mixed sample has several classes", "take data.sampling: balanced instead"),
    # Your own step
    *(Conflict(STEP, one, "the step calls a whole model on one device") for one in (STAGES, DEVICES)),
    Conflict(STEP, MIXERS, "a mixed sample has two labels"),
    # Users' scripts
    Conflict(SYNC_BATCHNORM, LOCAL_SCRIPT, "the statistics of each rank are its own until the weights are joined"),
    Conflict(SUMMED, LOCAL_SCRIPT, "gradients stay on their rank, and are not added up"),
    Conflict(LR_SCALING, LOCAL_SCRIPT, "each rank steps by the gradients of its own batch"),
    Conflict(VERIFY, LOCAL_SCRIPT, "it compares N ranks with one, which differ in this mode"),
    Conflict(
        LOSS_SCALE, LOCAL_SCRIPT, "each rank would leave out other steps", "take mixed_bfloat16, which needs none"
    ),
    Conflict(COMPRESSION, LOSS_SCALE, "an overflow would stay in what the compressor keeps for the next step"),
)


def refused(config: Section) -> list[tuple[str, str]]:
    """Return (key, what is wrong) for each conflict in a configuration."""
    problems = []
    for row in CONFLICTS:
        if row.one.used(config) and row.other.used(config):
            key, text = row.one.key, f"{_text(row, row.one.named(config), row.other.named(config))}; {row.cure}"
            problems.append((key, text.removeprefix(key).removeprefix(":").lstrip()))
    return problems


def check_ranks(config: Section, size: int, mpi: bool) -> None:
    """Raise ConfigError for a configuration that conflicts with the ranks that were started."""
    features = {row.one: row.one.named(config) for row in CONFLICTS if row.one.used(config)}
    # Adasum adds in pairs, so the number of ranks must be a power of two.
    features |= {ODD_RANKS: f"{size} ranks" * bool(size & (size - 1)), GLOO: GLOO.words * (size > 1 and not mpi)}
    check_together(features, common=True)


def check_together(features: Mapping[Feature, str], where: str = "", common: bool = False) -> None:
    """Raise ConfigError if two of the features in use conflict.

    ``features``: {feature: its name for the user, "" if it is not in use}.
    """
    for row in CONFLICTS:
        one, other = features.get(row.one), features.get(row.other)
        if one and other:
            raise ConfigError(_text(row, one, other), where=where, fix=row.cure, common=common)


def _text(row: Conflict, one: str, other: str) -> str:
    return f"{one} does not go with {other}, because {row.why}"


def sentences(key: str) -> list[str]:
    """Return a sentence for each conflict of a key or section; for an empty text, all of them."""
    asked = key.strip().replace("-", "_") + "." * bool(key)
    return [
        f"{_text(row, str(row.one), str(row.other))}; {row.cure}"
        for row in CONFLICTS
        if any(f"{feature.key}.".startswith(asked) for feature in (row.one, row.other))
    ]
