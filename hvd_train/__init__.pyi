"""The types of the Python API, whose names ``__init__.py`` loads when they are first used."""

from hvd_train.api import Summary as Summary
from hvd_train.api import fit as fit
from hvd_train.core.hooks import Hook as Hook
from hvd_train.launch import _Room
from hvd_train.launch.environment import world as world

__version__: str
__all__ = ["Hook", "Summary", "fit", "launch", "world"]
launch: _Room
