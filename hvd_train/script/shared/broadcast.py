"""Broadcast of rank 0's arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hvd_train.protocol import Communicator


def broadcast_parts(communicator: Communicator, head: Any, parts: Sequence[Any]) -> tuple[Any, list[memoryview]]:
    """Broadcast rank 0's ``head``, a JSON value, and ``parts``, bytes or contiguous arrays. All ranks call it.

    Other ranks' arguments are ignored.
    """
    data = b""
    if not communicator.rank:
        about = json.dumps([head, [memoryview(part).nbytes for part in parts]]).encode()
        # Length of the head (8 bytes), the head as JSON with each part's size, the parts.
        data = b"".join([len(about).to_bytes(8, "little"), about, *parts])
    data = communicator.broadcast_bytes(data)
    at = 8 + int.from_bytes(data[:8], "little")
    head, sizes = json.loads(data[8:at])
    views = []
    for size in sizes:
        views.append(memoryview(data)[at : at + size])
        at += size
    return head, views
