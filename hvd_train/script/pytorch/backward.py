"""Detection of the start and end of backward passes, including nested and failed ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from hvd_train.frontends.pytorch.eager import eager


class Member(Protocol):
    number: float

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


before: Callable[[Sequence[Member]], None] | None = None  # called at the end of a pass, before its members finish

_waiting: list[Member] = []  # the members whose gradients this pass has reached
_task: int | None = None  # autograd's number of the pass
_depth = 0  # nested backward passes of checkpointed parts


def current_pass() -> int:
    """Return autograd's number of the running pass; -1: none."""
    return torch._C._current_graph_task_id()


def register(member: Member) -> None:
    """Call ``member.finish()`` at the end of this backward pass, or of the outermost one around it."""
    _enter()
    _waiting.append(member)


def enter() -> None:
    """Record that an autograd hook runs. If its pass is new, the one before failed or ended in a callback."""
    if current_pass() != _task:
        _enter()


def _enter() -> None:
    global _task
    # Autograd numbers passes. A nested one has its own number, but its gradients belong to the pass around it.
    task = current_pass()
    if task == _task or (_task is not None and _nested()):
        return
    after_failure()
    _task = task
    # Autograd calls this after the last node of the pass, before backward() returns.
    torch.autograd.Variable._execution_engine.queue_callback(_end)


def after_failure() -> None:
    """Abandon the members of the last pass if it failed: they still wait, but their pass no longer runs."""
    members = _pop_members()
    if members and before:
        before(members)
    for member in members:
        member.abandon()


@eager
def _end() -> None:
    members = _pop_members()
    if before:
        before(members)
    for member in members:
        member.finish()


def _pop_members() -> list[Member]:
    """End the pass; return its members in the same order on every rank."""
    global _task
    # Hooks run in the order in which gradients are ready, which may differ between ranks; transfers must not.
    members, _task = sorted(_waiting, key=lambda member: member.number), None
    _waiting.clear()
    return members


def _nested() -> bool:
    if _depth:
        return True
    frame = sys._getframe()
    while frame is not None:
        # The backward of a Python torch.autograd.Function that has called backward() itself.
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.cache
def watch_checkpoints() -> None:
    """Count nested backward passes of reentrant checkpointing.

    For each part it runs a backward pass within the outer one, and torch has no hook for its start and end. Without
    this every part would be exchanged separately, which is correct but slow.
    """
    backward: Callable[..., Any] = CheckpointFunction.backward

    @functools.wraps(backward)
    def watched(*arguments: Any) -> Any:
        global _depth
        enter()
        _depth += 1
        try:
            return backward(*arguments)
        finally:
            _depth -= 1

    CheckpointFunction.backward = staticmethod(watched)
