"""One rank of a launched world: ``python -m tests.torch.cases FOLDER`` runs every case as a script would.

Writes FOLDER/NAME.RANK.npz (weights after training) and FOLDER/facts.RANK.json. Cases build their own model each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

import hvd_train.torch as ht
from tests.seconds import counted
from tests.torch.cases.alike import ALIKE, trained_apart
from tests.torch.cases.facts import (
    alone,
    broadcast,
    draws,
    dynamic,
    forgotten,
    looks,
    main_rank,
    masks,
    own_data,
    parts_told,
    pickled,
    plain_tensors,
    residual_by_hand,
    resume,
    same_work,
    sampled,
    scaler_skips,
    slow,
    sums,
    sums_of_tensors,
    thrown_away,
    transfers,
    waits,
)
from tests.torch.cases.mistakes import errors
from tests.torch.cases.models import digest

SECONDS = 120  # of one case


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang is a failure, and says where it was
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    facts = {}
    for name, case in ALIKE.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        torch.manual_seed(0)
        with counted("PyTorch scripts", name):
            model = case()
        facts[f"digest {name}"] = digest(model)
        weights = {k.replace("/", "|"): v.detach().numpy() for k, v in model.state_dict().items()}
        np.savez(folder / f"{name}.{ht.rank()}.npz", **weights)
    torch.manual_seed(0)
    told = {
        "digest apart": lambda: digest(trained_apart()),
        "resume": lambda: resume(folder),
        "masks": masks,
        "broadcast": broadcast,
        "sums": sums,
        "sums of tensors": sums_of_tensors,
        "looks": looks,
        "waits": lambda: waits(folder),
        "main": main_rank,
    }
    if ht.size() > 1:
        told |= {
            "scaler": scaler_skips,
            "scaler topk": lambda: scaler_skips(compression="topk", ratio=0.5),
            "dynamic": dynamic,
            "draws": draws,
            "thrown away": thrown_away,
            "residual by hand": residual_by_hand,
            "pickled": lambda: pickled(folder),
            "forgotten": forgotten,
            "transfers": transfers,
            "own data": own_data,
            "same work": same_work,
            "plain tensors": plain_tensors,
            "slow": slow,
            "parts": parts_told,
            "alone": alone,
            "sampled": sampled,
            "errors": lambda: errors(folder),
        }
    for name, fact in told.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        with counted("PyTorch scripts", name):
            facts[name] = fact()
    (folder / f"facts.{ht.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
