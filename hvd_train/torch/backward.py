"""The beginning and the end of a backward pass, for reducers: also of one in another, and of one that failed."""

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


before: Callable[[Sequence[Member]], None] | None = None  # called at a pass' end, before its members finish

_waiting: list[Member] = []  # whose gradients this pass has reached
_task: int | None = None  # the pass, by autograd's number of it
_depth = 0  # backward passes that run in the backward of a checkpointed part


def current_pass() -> int:
    """Return autograd's number of the pass that runs now; -1: none."""
    return torch._C._current_graph_task_id()


def register(member: Member) -> None:
    """Have ``member.finish()`` called when this backward pass ends, or the outermost one around it."""
    _enter()
    _waiting.append(member)


def enter() -> None:
    """Note that a hook of autograd runs. If its pass is new, the one before ended with an error or in a callback."""
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
    # Autograd calls it after the last node of the pass, before backward() returns.
    torch.autograd.Variable._execution_engine.queue_callback(_end)


def after_failure() -> None:
    """End the last pass, if an error ended it: members still wait, and no pass runs, or a new one."""
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
    """Return the members of the pass, which is over, in the same order on every rank."""
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
        # The backward of a torch.autograd.Function in Python, which has called backward() itself.
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.cache
def watch_checkpoints() -> None:
    """Count nested backward passes of reentrant checkpointing.

    It runs a backward pass for each part, in the backward pass of the whole, whose beginning and end torch does not
    announce. Without this every part would be exchanged by itself: right, but slow.
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
