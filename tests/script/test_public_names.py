"""Names and parameters that scripts use stay as they are."""

import inspect
from typing import get_overloads

import pytest

TORCH = {
    "barrier": [],
    "device": [],
    "distribute": [
        "model", "others", "compression", "overlap", "sync_batchnorm", "average", "sharded", "mode",
        "agreement_every_n_steps", "options",
    ],
    "global_weights": ["model"],
    "is_main": [],
    "load": ["path", "missing_ok", "parts"],
    "no_sync": ["model"],
    "print": ["values", "options"],
    "rank": [],
    "save": ["path", "parts"],
    "shard": ["loader"],
    "size": [],
    "sum": ["values"],
    "times": [],
    "tqdm": ["arguments", "options"],
}  # fmt: skip
KERAS = {
    "barrier": [],
    "distribute": [
        "model", "given_optimizers", "shard", "lr_scaling", "seed", "compression", "sharded", "mode",
        "agreement_every_n_steps", "options",
    ],
    "global_weights": ["model"],
    "is_main": [],
    "print": ["values", "options"],
    "rank": [],
    "reduce": ["values", "op"],
    "shard": ["x", "y", "sample_weight", "batch_size", "shuffle", "seed"],
    "size": [],
    "times": [],
    "tqdm": ["arguments", "options"],
}  # fmt: skip


@pytest.mark.parametrize(("framework", "names"), [("torch", TORCH), ("keras", KERAS)])
def test_public_names_and_parameters(framework, names):
    module = __import__(f"hvd_train.{framework}", fromlist=[framework])
    assert sorted(module.__all__) == sorted(names)
    assert sorted(name for name in vars(module) if not name.startswith("_")) == sorted(names)
    for name, parameters in names.items():
        assert list(inspect.signature(getattr(module, name)).parameters) == parameters, name


def test_distribute_returns_the_types_that_it_gets():
    """Editors and type checkers know nothing of a value of type Any."""
    import hvd_train.keras as hk
    import hvd_train.torch as ht

    returned = [inspect.signature(each).return_annotation for each in (*get_overloads(ht.distribute), hk.distribute)]
    assert returned == ["Model", "tuple[Model, *Others]", "Model"]
