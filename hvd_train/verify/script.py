"""``hvd-train verify -- python train.py``: run a user's script on N ranks and on one, and compare in 64 bits.

The script runs unchanged. An environment variable (script/shared/record.py) makes ``hvd_train.torch`` and
``hvd_train.keras`` compute in 64 bits without dropout, end after K steps, and write records.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvd_train.checkpoint.serialize import unpack
from hvd_train.errors import ConfigError, amount
from hvd_train.launch.start import launch
from hvd_train.protocol import Tree
from hvd_train.run_folder.terminal import say
from hvd_train.script.shared.record import VARIABLE
from hvd_train.verify.compare_worlds import Comparison, report_page, text
from hvd_train.verify.difference import Difference, Runs, findings, rows
from hvd_train.verify.record import Record, samples_of, stages_of

STAGES = ("first", "last", "gradient")
PYTHONS = ("python", "python3")  # use this Python, even if its virtual environment is not activated


def verify_script(
    program: Sequence[str], num_proc: int, steps: int, launcher: str = "auto", report: Path | None = None,
    verbose: bool = False,
) -> int:  # fmt: skip
    """Run the script on ``num_proc`` ranks and on one, compare and print.

    Returns 0 if all is equal, 1 if not, or the exit code of a world that failed.
    """
    name = next((word for word in program if word.endswith(".py")), program[0])
    command = [sys.executable if program[0] in PYTHONS else program[0], *program[1:]]
    runs, norm_fix = [], ""
    notes = ["ht.save and model.save write nothing, and what the script saves else is of a run in 64 bits"]
    with tempfile.TemporaryDirectory(prefix="hvd-train-verify-") as temporary:
        for size in (num_proc, 1):
            folder = Path(temporary) / str(size)
            folder.mkdir()
            title = amount(size, "rank")
            say(f"{name} on {title}: {steps} steps ...")
            # ``ranks`` in both, so that on one rank the script uses the global batches of ``num_proc`` ranks.
            options = json.dumps({"folder": str(folder), "ranks": num_proc, "steps": steps})
            code = launch(size, launcher, [], verbose, program=command, more={VARIABLE: options})
            if code:
                return code
            world_runs, world_notes, norm_fix = _read(folder, size, title)
            runs.append(world_runs)
            notes += [note for note in world_notes if note not in notes]
    comparison = _compare(runs[1], runs[0], norm_fix)
    head = f"{name}, {len(runs[0].training.losses)} steps, the batches of {num_proc} ranks"
    say("\n".join(text(head, notes, [comparison], "64")), styled=True)
    if report is not None:
        report_page(report, head, notes, [comparison], {r.title: (r.training.losses, None) for r in runs}, "64")
    return int(bool(comparison.findings))


def _compare(one: Runs, many: Runs, norm_fix: str) -> Comparison:
    title = f"{many.title} against {one.title}"
    counts = [len(run.training.losses) for run in (one, many)]
    if counts[0] != counts[1]:
        what = f"the script makes {counts[1]} steps on {many.title} and {counts[0]} on {one.title}"
        fix = "ht.shard and hk.shard divide data so that both make as many"
        return Comparison(title, [Difference("steps", "-", float("inf"))] * 3, [], [f"{what}: {fix}"])
    return Comparison(title, rows(one, many), [], findings(one, many, norm_fix=norm_fix))


def _read(folder: Path, size: int, title: str) -> tuple[Runs, list[str], str]:
    """Return (the runs of a world, notes of its ranks, their advice about batch normalization)."""
    if not all((folder / f"{rank}.json").exists() for rank in range(size)):
        what = "the script did not come to the end of a step on each rank"
        raise ConfigError(what, where=title, fix="it must call ht.distribute or hk.distribute, and train")
    records = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    trees = [stages_of(unpack((folder / f"{rank}.safetensors").read_bytes()), STAGES) for rank in range(size)]
    if not records[0]["rates"]:
        raise ConfigError("the script made no step of a distributed optimizer", where=title, fix="let it train")
    notes = list(dict.fromkeys(note for each in records for note in each["notes"]))
    # A script may end before K steps, and at different steps on different ranks.
    count = min(len(each["rates"]) for each in records)
    # (steps, 2): loss times weight, weight; added over the ranks
    sums = np.sum([each["sums"][:count] for each in records], axis=0)
    if not sums[:, 1].all():
        notes.append("not compared: the loss of each step, which is not seen here")
    losses = np.divide(sums[:, 0], sums[:, 1], out=np.zeros(count), where=sums[:, 1] != 0)
    samples = samples_of([each["samples"][:count] for each in records])
    if not any(map(len, samples)):
        notes.append("not compared: which samples a step uses (no loader with indices went through ht.shard)")
    rates = np.array([each["rates"][:count] for each in records])
    apart = {
        stage: {rank: d for rank, tree in enumerate(trees) if (d := _other(tree[stage], trees[0][stage]))}
        for stage in STAGES
    }
    first = {"first": trees[0]["first"], "last": trees[0]["last"]}
    training = Record(losses, rates, samples, first, {"first": apart["first"], "last": apart["last"]})
    gradient = trees[0]["gradient"]
    if not gradient:
        return Runs(title, training), [*notes, "not compared: the gradient of step 1"], records[0]["norm_fix"]
    # As if it came from a plain step of rate 1.
    zero = {key: np.zeros_like(x) for key, x in gradient.items()}
    step = Record(
        losses[:1], np.ones((size, 1)), [], {"first": gradient, "last": zero}, {"first": {}, "last": apart["gradient"]}
    )
    return Runs(title, training, step), notes, records[0]["norm_fix"]


def _other(tree: Tree, reference: Tree) -> Tree:
    """Return the arrays of a rank's tree that differ bitwise from rank 0's."""
    return {key: x for key, x in tree.items() if key not in reference or x.tobytes() != reference[key].tobytes()}
