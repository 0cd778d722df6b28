"""One rank of one engine of a comparison: trains forever and counts its steps where others can see them.

    python engines.py FRAMEWORK ENGINE MODEL --count FILE [--exchange JSON]

Every engine does the same work (work.py). Ours runs its own loop with its own loader; the others get ready batches from
memory. compare.py and link.py start it with the engine's own launcher.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pytorch_engines import PYTORCH
from tensorflow_engines import TENSORFLOW
from work import MODELS, Count, settings


def ours(
    framework: str, model: str, count: Count, exchange: dict, steps: int | str = "auto", more: dict | None = None
) -> None:
    """Run the product's own loop; ``more``: additional keys of the configuration."""
    from hvd_train.config import Config
    from hvd_train.core.hooks import Hook
    from hvd_train.core.loop import Trainer
    from hvd_train.jobs.connect import connect
    from hvd_train.jobs.job import opened_job
    from hvd_train.launch.environment import keep_memory
    from hvd_train.run_folder.log import NullLog

    class Counting(Hook):
        def __init__(self) -> None:
            self.open: list = []  # sums of steps that have not run

        def on_step(self, trainer, info) -> None:
            self.open += info.local_sums
            if not trainer.frontend.queued:
                for sums in self.open:
                    count(partial(mean, trainer.frontend, sums))
                self.open.clear()

    def mean(frontend, sums) -> float:
        """Return the mean loss of this rank's samples. No collectives here: ranks run queued steps separately."""
        return frontend.task.results(frontend.ops.to_numpy(sums))["loss"]

    keys = settings(framework, model, exchange) | {"steps_per_execution": steps}
    for key, value in (more or {}).items():
        keys[key] = {**keys.get(key, {}), **value}
    config = Config.model_validate(keys)
    with opened_job(config, False) as job:
        update, _ = connect(job, config.exchange.compression)
        trainer = Trainer(
            config, job.frontend, update, job.data.train, job.data.val, Path(), NullLog(), hooks=[Counting()]
        )
        keep_memory()
        trainer.fit()


# Engines with additional keys, which other checkouts may not have.
MORE = {
    "ours (ema)": {"ema": {"decay": 0.999}},
    "ours (compiled)": {"model": {"compile": True}},
    "ours (groups)": {"optim": {"groups": [{"match": "*.bias", "lr": 0.01}]}},
}
ENGINES: dict[str, dict[str, Callable]] = {
    "pytorch": PYTORCH,
    "tensorflow": TENSORFLOW
    | {"ours (step by step)": lambda model, count: ours("tensorflow", model, count, {}, steps=1)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("pytorch", "tensorflow"))
    parser.add_argument("engine")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--count", type=Path, required=True)
    parser.add_argument("--exchange", default="{}", help="JSON: the configuration's exchange (ours)")
    options = parser.parse_args()
    rank = next(
        (os.environ[k] for k in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK", "COPY") if k in os.environ), "0"
    )
    if options.framework == "pytorch":
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    count = Count(options.count.with_name(f"{options.count.name}.{rank}"))
    run = ENGINES[options.framework].get(options.engine)
    if options.engine in MORE:
        ours(options.framework, options.model, count, {}, more=MORE[options.engine])
    elif run is None:
        ours(options.framework, options.model, count, json.loads(options.exchange))
    else:
        run(options.model, count)


if __name__ == "__main__":
    main()
