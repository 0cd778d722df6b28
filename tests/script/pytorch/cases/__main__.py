"""One rank of a launched world: ``python -m tests.script.pytorch.cases FOLDER`` runs every case as a script would.

Writes FOLDER/NAME.RANK.npz (weights after training) and FOLDER/facts.RANK.json. Cases build their own model each.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import numpy as np
import torch

import hvd_train.torch as ht
from tests.limits import SECONDS
from tests.script.pytorch.cases.drawing import draws, local_caches, looks, masks, sampled
from tests.script.pytorch.cases.facts import (
    broadcast,
    dynamic,
    equal_generators,
    library_metric,
    pickled,
    residual_by_hand,
    resume,
    scaler_skips,
    sums,
    sums_of_tensors,
    thrown_away,
    transfers,
    waits,
)
from tests.script.pytorch.cases.held import held
from tests.script.pytorch.cases.messages import (
    alone,
    divided,
    forgotten,
    late_buffers,
    main_rank,
    plain_tensors,
    same_work,
    slow,
    uneven_parts,
)
from tests.script.pytorch.cases.mistakes import errors
from tests.script.pytorch.cases.models import digest
from tests.script.pytorch.cases.same import COMPILED
from tests.script.pytorch.cases.same_bits import SAME_BITS, trained_apart
from tests.seconds import counted


def main(folder: Path, names: list[str]) -> None:
    """``names``: the trainings to run; none: all, and the facts."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang is a failure, and says where it was
    facts = {}
    for name, case in {name: (SAME_BITS | COMPILED)[name] for name in names or SAME_BITS}.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        torch.manual_seed(0)
        with counted("PyTorch scripts", name):
            model = case()
        facts[f"digest {name}"] = digest(model)
        weights = {k.replace("/", "|"): v.detach().numpy() for k, v in model.state_dict().items()}
        np.savez(folder / f"{name}.{ht.rank()}.npz", **weights)
    if names:
        return
    torch.manual_seed(0)
    fact_of = {
        "digest apart": lambda: digest(trained_apart()),
        "resume": lambda: resume(folder),
        "masks": masks,
        "broadcast": broadcast,
        "sums": sums,
        "sums of tensors": sums_of_tensors,
        "equal generators": equal_generators,
        "looks": looks,
        "waits": lambda: waits(folder),
        "main": main_rank,
        "library metric": library_metric,
    }
    if ht.size() > 1:
        fact_of |= {
            "scaler": scaler_skips,
            "scaler topk": lambda: scaler_skips(compression="topk", ratio=0.5),
            "dynamic": dynamic,
            "draws": draws,
            "held": held,
            "thrown away": thrown_away,
            "residual by hand": residual_by_hand,
            "pickled": lambda: pickled(folder),
            "forgotten": forgotten,
            "transfers": transfers,
            "own data": local_caches,
            "same work": same_work,
            "plain tensors": plain_tensors,
            "late buffers": late_buffers,
            "slow": slow,
            "parts": uneven_parts,
            "alone": alone,
            "divided": divided,
            "sampled": sampled,
            "errors": lambda: errors(folder),
        }
    for name, fact in fact_of.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        with counted("PyTorch scripts", name):
            facts[name] = fact()
    (folder / f"facts.{ht.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
