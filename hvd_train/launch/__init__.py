"""Starting ranks, and knowing that one was started. ``hvd_train.launch(function, np=2)``: the room's name is a verb."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from hvd_train.launch.function import call
from hvd_train.launch.local import launch

__all__ = ["launch"]


class _Room(ModuleType):
    __call__ = staticmethod(call)

    def __reduce__(self) -> Any:
        """A function that is sent to the ranks may name it."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
