"""Predictions of all ranks, concatenated in rank order."""

from __future__ import annotations

import json

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator


def gather_rows(rows: np.ndarray, world: Communicator) -> np.ndarray:
    """Concatenate the ranks' rows in rank order. Raises on all ranks if their shapes do not match."""
    texts = rows.dtype.hasobject
    rows = np.ascontiguousarray(rows.astype("S") if texts else rows)
    head = json.dumps([list(rows.shape), rows.dtype.itemsize]).encode()
    parts = []
    # [shape, bytes an entry] as a line of JSON, then the rows: ranks may have different numbers of them.
    for part in world.allgather_bytes(head + b"\n" + rows.tobytes()):
        at = part.index(b"\n") + 1
        shape, width = json.loads(part[:at])
        parts.append(np.frombuffer(part, f"S{width}" if texts else rows.dtype, offset=at).reshape(shape))
    if len(shapes := {x.shape[1:] for x in parts}) > 1:
        what = f"the ranks' predictions have rows of the shapes {', '.join(map(str, sorted(shapes)))}"
        raise ConfigError(what, where="model.predict", fix="pad them to one length", common=True)
    whole = np.concatenate(parts)
    return whole.astype(object) if texts else whole
