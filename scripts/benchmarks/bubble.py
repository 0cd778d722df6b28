"""The idle time of a pipeline's stages: measured, and predicted by the schedule.

Micro-batches have the same size, so a step with M of them takes (M + S - 1) t with S equal stages. t is computed from
the difference between the two largest M, which contains no idle time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median

from work import MODELS, RANKS, settings

from hvd_train.config import Config, load_config
from hvd_train.frontends.stages.schedule import bubble
from hvd_train.mode_comparison import turns
from hvd_train.mode_comparison.turns import Limits, Start, on_ranks
from hvd_train.mode_comparison.ways import way

TITLE = "the bubble of a pipeline of two stages"
FRAMEWORKS, MODEL, COUNTS, TURNS = ("pytorch", "tensorflow"), "gpt", (2, 4, 8, 16), 3
LIMITS = Limits(steps=32, seconds=10.0, turns=1)


def job(framework: str, micro_batches: int) -> Config:
    keys = settings(framework, MODEL, {}) | {"batch_size": MODELS[MODEL][2] * micro_batches}
    return load_config(base=keys | {"parallel": {"pipeline": RANKS, "microbatches": micro_batches}})


def step_ms(config: Config, start: Start, folder: Path) -> float:
    (result,) = turns.measure(config, [way("pipeline")], RANKS, LIMITS, start, folder, lambda line: None)
    return result.middle("ms")


def measure() -> list[dict]:
    rows = []
    for framework in FRAMEWORKS:
        times: dict[int, list[float]] = {count: [] for count in COUNTS}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(TURNS):
                for count, taken in times.items():
                    place = Path(folder) / f"{turn}-{count}"
                    taken.append(step_ms(job(framework, count), on_ranks(["-np", str(RANKS)]), place))
        ms = {count: median(taken) for count, taken in times.items()}
        last, largest = COUNTS[-2:]
        each = (ms[largest] - ms[last]) / (largest - last)  # t: a micro-batch through one stage
        for count in COUNTS:
            share = bubble(RANKS, count)
            row = {
                "framework": framework,
                "micro-batches": count,
                "ms": ms[count],
                "predicted": each * count / (1 - share),
            }
            row |= {"waiting": 1 - count * each / ms[count], "predicted waiting": share}
            rows.append(row | {"ms / predicted": ms[count] / row["predicted"]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    measure()
