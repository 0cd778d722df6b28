"""``hvd_train.fit``: what ``hvd-train fit`` does, from Python, with a model, data and hooks of the caller's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.config import Config, load_config
from hvd_train.config.own import GIVEN, look_in
from hvd_train.core.hooks import Hook
from hvd_train.data.catalog import open_data
from hvd_train.errors import ConfigError
from hvd_train.frontends.rank import settle
from hvd_train.frontends.serial import Serial
from hvd_train.jobs.fit import locked_run_folder, train
from hvd_train.jobs.job import build_job, failures_explained
from hvd_train.jobs.resume import data_as_before, resumes
from hvd_train.protocol import Build
from hvd_train.script.world import open_world

STARTED_IN = os.path.abspath(sys.path[0])  # the script's folder, or the current one of a notebook and of python -m


@dataclass(frozen=True, repr=False, eq=False)
class Summary(Mapping[str, Any]):
    """A run's ``summary.json``, equal on all ranks: ``summary["val_loss"]`` or ``summary.val_loss``."""

    entries: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self.entries:
            raise AttributeError(f"the summary has {', '.join(self.entries)}; not '{key}'")
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Summary({', '.join(f'{key}={value!r}' for key, value in self.entries.items())})"


def fit(
    config: Mapping[str, Any] | str | Path | Config,
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    metrics: Any = None,
    hooks: Sequence[Hook] = (),
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    overwrite: bool = False,
    verbose: bool = False,
) -> Summary:
    """Trains, alone or as a rank of a launcher's world, and gives the run's summary; the run folder is that of
    ``hvd-train fit``. Raises the errors of ``hvd_train.errors``, each with what, where and what to do.

    config: a dict of the configuration's keys, or a YAML file. model: a built model, which is trained in place, or a
    function as ``model.name`` takes it; data: ``(train, val)``, each (inputs, labels) or an object with ``fetch``, or a
    function that gives them. loss: a function of (outputs, labels) that gives a value for each sample or place, or
    (values, weights), or a name; of several outputs ``{output: loss}``. metrics: a list of such, or ``{output: list}``;
    one with a ``result`` gives (samples, k) and makes a number of the k sums of all ranks. All ranks must be given the
    same. resume, allow_change, overwrite: as ``hvd-train fit``.
    """
    if not all(isinstance(hook, Hook) for hook in hooks):
        strange = next(type(hook).__name__ for hook in hooks if not isinstance(hook, Hook))
        raise ConfigError(f"{strange} is no hook", where="hooks", fix="derive it from hvd_train.Hook; give an object")
    with ExitStack() as stack:
        settled = stack.enter_context(_settled(config, model, data, loss, metrics))
        lock = stack.enter_context(locked_run_folder(settled, resume, overwrite))
        look_in(settled.code_dir)
        opened = open_data(settled.data, settled.task, None if isinstance(data, str) else data)
        rank = settle(settled.framework, settled.threads, verbose)
        rank.module.configure(rank.threads)
        # Kept open: a launched world cannot be opened twice.
        communicator = open_world(settled.framework) if rank.world.launcher else Serial()
        stack.enter_context(failures_explained(communicator))
        opened = data_as_before(settled, communicator, opened, resume, None if isinstance(data, str) else data)
        settled = settled.restoring() if resumes(settled, communicator, resume) else settled
        job = build_job(settled, rank.module, communicator, opened, rank.settings)
        return Summary(train(job, resume, allow_change, overwrite, lock, hooks))


@contextmanager
def _settled(
    config: Mapping[str, Any] | str | Path | Config, model: Any, data: Any, loss: Any, metrics: Any
) -> Iterator[Config]:
    """The configuration with the names of what was handed over, under which it is found meanwhile."""
    if isinstance(config, str | Path):
        config = load_config(Path(config))
    base = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
    handed = [("model", "name", model), ("data", "name", data), ("task", "loss", loss), ("task", "metrics", metrics)]
    own: dict[str, Any] = {}
    for section, key, given in handed:
        if given is not None:
            one = section in ("model", "data") and not isinstance(given, str)
            named = _name(given) if one else _named(given, own)
            base[section] = dict(base.get(section) or {}) | {key: named}
    settled = load_config(base=base)
    if settled.user_code and not settled.code_dir:
        settled = settled.model_copy(update={"code_dir": STARTED_IN})
    if model is not None and not isinstance(model, str):
        own[settled.model.name] = _build(model)
    GIVEN.update(own)
    try:
        yield settled
    finally:
        for name in own:
            del GIVEN[name]


def _named(given: Any, own: dict[str, Any]) -> Any:
    """Losses or metrics by their names; the functions among them come into ``own``."""
    if isinstance(given, Mapping):
        return {name: _named(each, own) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return [_named(each, own) for each in given]
    if not callable(given):
        return given
    name = _name(given)
    if own.setdefault(name, given) is not given:
        fix = "give each a def of its own name"
        raise ConfigError(f"two functions are called {name}", where="loss, metrics", fix=fix)
    return name


def _name(given: Any) -> str:
    """As the configuration would name it; arrays have no place of their own."""
    named = given if callable(given) and hasattr(given, "__qualname__") else type(given)
    return f"{named.__module__}:{named.__qualname__}"


def _build(model: Any) -> Build:
    own = ("named_parameters", "trainable_variables")  # PyTorch's, Keras'
    if not isinstance(model, type) and any(hasattr(model, name) for name in own):
        return lambda **given: model
    if not callable(model):
        fix = "give a torch.nn.Module, a keras.Model, a function that builds one, or a name"
        raise ConfigError(f"{type(model).__name__} is no model", where="model", fix=fix)
    return model
