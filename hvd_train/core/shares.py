"""What the ranks' time was spent on: the rows of all ranks together, and the words about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_train.core.time_account import BUBBLE, PARTS, WAITED

# As PARTS, but a rank's waiting for transfers is divided into ``exchange`` and ``wait`` (for the slowest rank).
SHOWN = ("input", "compute", "exchange", "wait", "bubble", "save", "evaluate", "start", "rest")
COUNTED = ("input", "compute", "exchange", "wait", "bubble")  # what counts as effective time
IN_STEPS = (*COUNTED, "rest")  # all between two steps, but for checkpoints and evaluations
# The share of an epoch from which its row shows a part.
WORTH_A_LOOK = {"input": 0.1, "exchange": 0.1, "wait": 0.1, "bubble": 0.1, "save": 0.2, "evaluate": 0.3, "rest": 0.2}
WORDS = {"bubble": "wait for stages", "rest": "other"}
BRIEF_SECONDS = 2.0  # an epoch that is shorter shows no shares


def shown(spent: Sequence[Sequence[int]], stages: int = 1) -> np.ndarray:
    """Convert each rank's nanoseconds in PARTS to its seconds in SHOWN, (ranks, parts).

    The rank that waits least for transfers is the slowest, and its wait is what the exchange itself costs. What another
    rank waits longer, it waits for the slowest. With pipeline stages this holds among the ranks of a stage: rank =
    replica x stages + stage.
    """
    table = np.array(spent, dtype=np.int64)  # (ranks, parts)
    waited = table[:, WAITED].reshape(-1, stages)  # (replicas, stages)
    least = np.broadcast_to(waited.min(axis=0), waited.shape).reshape(-1)
    columns = {name: table[:, k] for k, name in enumerate(PARTS)}
    columns |= {"exchange": least, "wait": table[:, WAITED] - least, "bubble": table[:, BUBBLE]}
    return np.stack([columns[name] for name in SHOWN], axis=1) / 1e9


def shares(seconds: np.ndarray) -> dict[str, float]:
    """Return the share of each part of SHOWN, over all ranks; {} if there is no time."""
    total = float(seconds.sum())
    return dict(zip(SHOWN, (seconds.sum(axis=0) / total).tolist(), strict=True)) if total else {}


def worth_a_look(seconds: np.ndarray) -> str:
    """Return the parts that take much of an epoch, as in ``input 41 %, wait 12 %``; "" if none does."""
    seconds = seconds * [name != "start" for name in SHOWN]
    if seconds.sum() < BRIEF_SECONDS * len(seconds):
        return ""
    return described({k: x for k, x in shares(seconds).items() if x >= WORTH_A_LOOK.get(k, 2.0)})


def described(parts: dict[str, float]) -> str:
    """Format shares in words; those below half a percent are left out."""
    return ", ".join(f"{WORDS.get(name, name)} {100 * x:.0f} %" for name, x in parts.items() if x >= 0.005)


def duration(seconds: float) -> str:
    """Format as ``2 min 5 s`` or ``3 h 10 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
