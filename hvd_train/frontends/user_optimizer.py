"""Build the user's optimizer, ``optim.name: package.module:function``, and check it.

The function gets the trained parameters, and returns an optimizer of the framework.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from hvd_train.config import OptimConfig
from hvd_train.config.user_code import user_errors, user_function
from hvd_train.errors import ConfigError


def build_optimizer(options: OptimConfig, parameters: Sequence[Any], names: Sequence[str], kind: type) -> Any:
    """Call the user's function; return its optimizer, of class ``kind``.

    It gets the list of parameters, and ``names`` (canonical) and ``lr`` if it has these parameters.
    """
    where = f"optim.name: {options.name}"
    function = user_function(options.name, where)
    values = {"names": list(names), "lr": options.lr}
    fix = "it is called with the list of parameters, and with names= and lr= if it takes them"
    with user_errors("the function failed", where, fix):
        takes = inspect.signature(function).parameters
        optimizer = function(list(parameters), **{name: values[name] for name in takes if name in values})
    if not isinstance(optimizer, kind):
        what = f"the function gives {type(optimizer).__name__}, not an optimizer"
        raise ConfigError(what, where=where, fix=f"return a {kind.__module__}.{kind.__name__}")
    return optimizer
