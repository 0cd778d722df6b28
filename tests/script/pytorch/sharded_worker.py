"""One rank of the cases of sharded optimizers: ``python -m tests.script.pytorch.sharded_worker FOLDER``.

Writes FOLDER/facts.RANK.json, and FOLDER/NAME.npz with the weights of rank 0.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import numpy as np

import hvd_train.torch as ht
from tests.limits import SECONDS
from tests.script.pytorch.cases import sharded
from tests.script.pytorch.cases.models import digest
from tests.seconds import counted

SCRIPTS = ["by hand summed", "gan", "in stages", "parts topk", "caught overlap"]


def main(folder: Path) -> None:
    facts: dict = {"same bits": {}, "digests": {}}
    for name, training in sharded.TRAININGS.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        digests = []
        with counted("PyTorch scripts, sharded", name):
            for divides in (False, True):
                sharded.begin()
                model = training(divides)
                digests.append(digest(model))
        facts["same bits"][name], facts["digests"][name] = digests[0] == digests[1], digests[1]
        if ht.is_main():
            np.savez(folder / f"{name}.npz", **{k: v.detach().numpy() for k, v in model.state_dict().items()})
    path = folder / "state.safetensors"
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    facts["begun"] = sharded.begun(path)
    facts["gone on"] = [digest(sharded.gone_on(path, divides)) for divides in (True, False)]
    facts["kept"], facts["slots"], facts["refused"] = sharded.kept_in_memory(), sharded.slots(), sharded.refused()
    if ht.size() > 1:
        facts["scripts"] = sharded.every_other(SCRIPTS)
    # What another number of ranks has saved.
    for other in sorted(folder.parent.glob("*/state.safetensors")):
        model = sharded.gone_on(other, True)
        if ht.is_main():
            weights = {k: v.detach().numpy() for k, v in model.state_dict().items()}
            np.savez(folder / f"from {other.parent.name}.npz", **weights)
    (folder / f"facts.{ht.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
