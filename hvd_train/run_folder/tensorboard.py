"""TensorBoard events."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Events:
    """TensorBoard scalars through TensorBoard's own record writer, which needs no TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        taken = len([*folder.glob(f"{name}*")])  # by this process, in the same second
        self._writer = RecordWriter(open(folder / f"{name}.{taken}", "xb"))  # noqa: SIM115
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        items = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=self._summary(value=items))
        self._writer.flush()

    def restart(self, step: int) -> None:
        """Hide all events from ``step`` on that were written before."""
        self._write(step=step, session_log=self._session(status=self._session.START))

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text (Markdown)."""
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata, tensor = create_summary_metadata(name, ""), make_tensor_proto([text.encode()])
        self._write(step=step, summary=self._summary(value=[{"tag": name, "metadata": metadata, "tensor": tensor}]))
        self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):  # a full disk rejects buffered data
            self._writer.close()
