"""``hvd_train.fit``: ``hvd-train fit`` from Python, with the caller's model, data and hooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.config import Config, load_config
from hvd_train.config.user_code import PASSED_FUNCTIONS, look_in
from hvd_train.core.hooks import Hook
from hvd_train.data.catalog import open_data
from hvd_train.errors import ConfigError
from hvd_train.jobs.fit import locked_run_folder, train
from hvd_train.jobs.job import build_job, noting_inputs
from hvd_train.jobs.resume import resumes, split_as_before
from hvd_train.launch.environment import prepare_rank, world
from hvd_train.protocol import Build
from hvd_train.script.shared.world import open_session
from hvd_train.session import Session, failures_explained

STARTED_IN = os.path.abspath(sys.path[0])  # the script's folder; the current one in a notebook or with python -m


@dataclass(frozen=True, repr=False, eq=False)
class Summary(Mapping[str, Any]):
    """The ``summary.json`` of a run, equal on all ranks: ``summary["val_loss"]`` or ``summary.val_loss``."""

    entries: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __getattr__(self, key: str) -> Any:
        entries = vars(self).get("entries", {})  # pickle looks for methods before the attributes are set
        if key.startswith("_") or key not in entries:
            raise AttributeError(f"the summary has {', '.join(entries)}; not '{key}'")
        return entries[key]

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
    step: Any = None,
    hooks: Sequence[Hook] = (),
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    overwrite: bool = False,
    verbose: bool = False,
) -> Summary:
    """Train, alone or as a rank of a launcher's world, as ``hvd-train fit`` does; return the run's summary.

    Raises the errors of ``hvd_train.errors``, which say what went wrong, where, and what to do.

    config: a dict of the configuration's keys, or a YAML file. model: a built model, which is trained in place, or a
    function as for ``model.name``. data: ``(train, val)``, each (inputs, labels), a torch data set or an object with
    ``fetch``; or one torch data set, of which a share is held out; or a function that returns these. loss: a name, or a
    function of (outputs, labels) that returns a value for each sample, token or pixel, or (values, weights); for
    several outputs ``{output: loss}``. metrics: a list of the same, or ``{output: list}``. If a metric has a method
    ``result``, it returns (samples, k), and ``result`` computes a number from the k sums over all ranks. step: in place
    of a loss, a function of (model, inputs, labels) that returns losses of each sample. Pass the same on all ranks.
    resume, allow_change, overwrite: as for ``hvd-train fit``.
    """
    if not all(isinstance(hook, Hook) for hook in hooks):
        strange = next(type(hook).__name__ for hook in hooks if not isinstance(hook, Hook))
        raise ConfigError(f"{strange} is no hook", where="hooks", fix="derive it from hvd_train.Hook; give an object")
    with ExitStack() as stack:
        config = stack.enter_context(_whole_config(config, model, data, loss, metrics, step))
        lock = stack.enter_context(locked_run_folder(config, resume, overwrite))
        look_in(config.code_dir)
        user_data = None if isinstance(data, str) else data
        prepare_rank(world(), config.framework, config.threads, verbose)  # the data may import the framework
        # Before the session: bad data raise an error before any rank waits for another.
        opened = open_data(config.data, config.task, user_data)
        session = Session.prepare(config.framework, config.threads, verbose, user_process=True)
        session.module.configure(session.threads)
        stages = config.parallel.pipeline
        if session.world.launcher or stages > 1:  # keep it open: a launched world cannot be opened twice
            kept = open_session(config.framework, session, stages)
            session.communicator, session.links = kept.communicator, kept.links
        stack.enter_context(failures_explained(session.communicator))
        config = split_as_before(config, session.communicator, resume)
        config = config.restoring() if resumes(config, session.communicator, resume) else config
        job = build_job(config, session, opened)
        stack.enter_context(noting_inputs(config, opened.sample))
        return Summary(train(job, resume, allow_change, overwrite, lock, hooks, user_hooks=bool(hooks)))


@contextmanager
def _whole_config(
    config: Mapping[str, Any] | str | Path | Config, model: Any, data: Any, loss: Any, metrics: Any, step: Any
) -> Iterator[Config]:
    """During a block, give the caller's objects names, which the configuration uses."""
    # A configuration is text: it is saved in the run folder and in checkpoints, and compared between ranks.
    if isinstance(config, str | Path):
        config = load_config(Path(config))
    base = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
    user_values = [
        ("model", "name", model),
        ("data", "name", data),
        ("task", "loss", loss),
        ("task", "metrics", metrics),
        ("task", "step", step),
    ]
    functions: dict[str, Any] = {}
    for section, key, value in user_values:
        if value is not None:
            one = section in ("model", "data") and not isinstance(value, str)
            name = _name(value) if one else _names(value, functions)
            base[section] = dict(base.get(section) or {}) | {key: name}
    whole = load_config(base=base)
    if whole.user_code and not whole.code_dir:
        whole = whole.model_copy(update={"code_dir": STARTED_IN})
    if model is not None and not isinstance(model, str):
        functions[whole.model.name] = _build(model)
    PASSED_FUNCTIONS.update(functions)
    try:
        yield whole
    finally:
        for name in functions:
            del PASSED_FUNCTIONS[name]


def _names(value: Any, functions: dict[str, Any]) -> Any:
    """Replace losses or metrics by their names, and add the functions among them to ``functions``."""
    if isinstance(value, Mapping):
        return {name: _names(each, functions) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_names(each, functions) for each in value]
    if not callable(value):
        return value
    name = _name(value)
    if functions.setdefault(name, value) is not value:
        fix = "give each a def of its own name"
        raise ConfigError(f"two functions are called {name}", where="loss, metrics", fix=fix)
    return name


def _name(value: Any) -> str:
    """Return the object's name for the configuration; for arrays, the name of their type."""
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def _build(model: Any) -> Build:
    attributes = ("named_parameters", "trainable_variables")  # of built models of PyTorch and of Keras
    if not isinstance(model, type) and any(hasattr(model, name) for name in attributes):
        return lambda **options: model
    if not callable(model):
        fix = "give a torch.nn.Module, a keras.Model, a function that builds one, or a name"
        raise ConfigError(f"{type(model).__name__} is no model", where="model", fix=fix)
    return model
