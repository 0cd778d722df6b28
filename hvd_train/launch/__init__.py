"""Starting ranks, and knowing that one was started."""

from hvd_train.launch.local import launch

__all__ = ["launch"]
