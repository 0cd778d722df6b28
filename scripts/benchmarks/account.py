"""What the account of a step's time costs: the product's loop with it and without, one rank, blocks in turn."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from statistics import median
from typing import Any

from loop import BLOCK, ROUNDS, WARM, Enough, Turns
from one_rank import DATA, FRAMEWORKS, alone, cnn_trainer

TITLE = f"ms a step with the account of time and without, {DATA['name']}; medians of {ROUNDS} blocks in turn"
MODELS = {"cnn": {"name": "cnn"}, "mlp": {"name": "mlp", "hidden": [64]}}


def trained(framework: str, model: str, turns: Turns, name: str) -> Callable[[], None]:
    """Return the product's loop; a hook switches turns. ``name``: with or without."""
    from hvd_train.core.hooks import Hook
    from hvd_train.core.time_account import TimeAccount

    class Paced(Hook):
        def on_step(self, trainer: Any, info: Any) -> None:
            if not turns.step(name):
                raise Enough

    class NoAccount(TimeAccount):
        """Reads the clock where the loop needs it for its log, and counts nothing."""

        def enter(self, part: int, fresh: bool = False) -> int:
            return self._clock()

        def stepped(self, queued: bool, steps: int = 1) -> int:
            return self._clock()

        def hooks_ended(self, late: bool) -> int:
            return self._clock()

        def window(self) -> list[Any]:
            return [0, self._spent, 0, []]

    settings = {"model": MODELS[model], "steps_per_execution": 1, "max_epochs": 10**6}
    trainer = cnn_trainer(framework, settings, Paced())
    if name == "without":
        trainer.time = NoAccount(lambda fresh: 0.0)
        trainer._sync._usage.begin = lambda: None  # nor what the system knows of this process

    def loop() -> None:
        turns.enter(name)
        with contextlib.suppress(Enough):
            trainer.fit()

    return loop


def compare(framework: str, model: str) -> dict:
    """Run both loops in turns, in this process."""
    names = ["with", "without"]
    turns = Turns(names)
    workers = [threading.Thread(target=trained(framework, model, turns, name)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken = {name: turns.seconds[name][WARM:] for name in names}
    ratios = [a / b for a, b in zip(*taken.values(), strict=True)]
    each = {f"ms {name}": 1000 * median(seconds) / BLOCK for name, seconds in taken.items()}
    return {"framework": framework, "model": model, **each, "ratio": median(ratios)}


def measure() -> list[dict]:
    return [alone(__file__, framework, model) for framework in FRAMEWORKS for model in MODELS]


if __name__ == "__main__":
    print(json.dumps(compare(*sys.argv[1:])))
