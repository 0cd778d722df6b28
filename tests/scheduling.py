"""Which worker of pytest-xdist gets which file's tests, also after one has crashed."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling


class Scheduling(LoadFileScheduling):
    """``--dist loadfile`` that ends after a crash.

    xdist 3.8 hands what a crashed worker had, files that are done included, to the others. A worker that gets a file
    without tests never asks for the next one, and pytest waits for ever. After two crashes at once it gives tests to a
    worker that has not collected any, and fails.
    """

    def remove_node(self, node: Any) -> str | None:
        crashed = None
        for file, tests in self.assigned_work.pop(node).items():
            left = {test: False for test, done in tests.items() if not done}
            if left and crashed is None:
                crashed = next(iter(left))
                del left[crashed]  # reported as failed
            if left:
                self.workqueue[file] = left
        if crashed is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)
