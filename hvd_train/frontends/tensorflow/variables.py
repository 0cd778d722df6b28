"""The variables of a Keras model by their unique paths; none may be created after the start."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import keras
from keras.src.random.seed_generator import global_seed_generator

from hvd_train.errors import ConfigError

SEED = "seed_generator_state"


def by_path(variables: Iterable[Any], name: str) -> dict[str, Any]:
    """Return {path: variable}, without the states of random generators.

    ``name``: of the model. Raises ConfigError if two variables have the same path: one of them would not be trained.
    """
    paths: dict[str, Any] = {}
    for v in variables:
        if v.path.endswith(SEED):
            continue
        if v.path in paths:
            fix = "give these layers, or the weights of one layer, different names"
            what = f"two variables of the model are called '{v.path}'"
            raise ConfigError(what, where=f"model.name: {name}", fix=fix)
        paths[v.path] = v
    return paths


def states(model: keras.Model) -> list[Any]:
    """Return the states of the model's random generators.

    A state is not a weight: if it were broadcast or compared, all ranks would have the same dropout masks.
    """
    return [v for v in model.variables if v.path.endswith(SEED)]


def common_state() -> Any:
    """Return the state of Keras' global generator, which ``keras.random`` uses if it is given no seed."""
    return global_seed_generator().state


def check_none_is_late(model: keras.Model, known: Collection[str], name: str) -> None:
    """Raise ConfigError for a weight that is not ``known``: it would be in no optimizer and no checkpoint."""
    late = [v.path for v in model.trainable_variables if v.path not in known]
    if late:
        what = f"'{late[0]}' got its weights within the first step, and they would not be trained"
        fix = "let its layer be called in evaluation, too, or build it in the model function"
        raise ConfigError(what, where=f"model.name: {name}", fix=fix, common=True)
