"""Data-parallel training of PyTorch and Keras 3 / TensorFlow models over Horovod. Importing this loads no framework.

``hvd_train.fit(config, model=, data=, hooks=[...])`` trains; ``hvd_train.launch(function, np=2)`` runs a Python
function on ranks of this host, and ``hvd_train.world()`` says there which of them this process is.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Hook", "Summary", "fit", "launch", "world"]

_PLACES = {"Hook": "core.hooks", "Summary": "api", "fit": "api", "world": "launch.environment"}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API when it is first used: the command line's help must be fast."""
    if name == "launch":
        return import_module("hvd_train.launch")
    if name in _PLACES:
        return getattr(import_module(f"hvd_train.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'hvd_train' has no attribute '{name}'")
