"""Starting ranks, and knowing that one was started. ``hvd_train.launch(function, np=2)``: the room's name is a verb."""

import sys
from types import ModuleType

from hvd_train.launch.function import call
from hvd_train.launch.local import launch

__all__ = ["launch"]


class _Room(ModuleType):
    __call__ = staticmethod(call)


sys.modules[__name__].__class__ = _Room
