"""Start ranks, and detect a rank that was started. The module itself can be called: ``hvd_train.launch(function,
np=2)``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    @staticmethod
    def __call__(
        function: Callable[..., Any],
        np: int = 2,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        launcher: str = "auto",
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on ``np`` ranks, each a process, and return their results in rank order.

        The function may come from a notebook or a script, lambdas and closures too; no ``if __name__`` is needed.
        Raises ``RankError`` for the error of the rank that failed first, ``CommunicationError`` if a rank was killed,
        and ``ConfigError`` if nothing can start. No rank outlives the call.
        """
        from hvd_train.launch.function import call  # imported late: --help must not wait for it

        return call(function, np, args, kwargs, launcher)

    def __reduce__(self) -> Any:
        """Pickle by name: a function that is sent to the ranks may refer to this module."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
