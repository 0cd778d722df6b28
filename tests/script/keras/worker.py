"""A rank of a launched world, or the one process that it is compared with: ``worker.py FOLDER CASE ...``.

Each case is a small Keras script of a user's; results go to FOLDER/CASE.SIZE.RANK.npz. The global batch is the same for
every world size.
"""

from __future__ import annotations

import faulthandler
import gc
import sys

import numpy as np

from hvd_train.frameworks import FRAMEWORKS, fast_import

with fast_import(FRAMEWORKS["tensorflow"].unneeded):
    import keras

import hvd_train.keras as hk
from hvd_train.script.keras import loop as own_loop
from tests.limits import SECONDS
from tests.script.keras.cases.callbacks import callbacks, stops
from tests.script.keras.cases.data import (
    image_folder,
    lengths,
    loader,
    py_dataset,
    self_shuffled,
    steps,
    tf_data,
    undivided,
    uneven_number,
)
from tests.script.keras.cases.draws import draws
from tests.script.keras.cases.fitting import UserStep, arrays, class_weight, rates, two_inputs, user_logs, user_step
from tests.script.keras.cases.gradients import compressed, float8, jit_compile, overflow, residual, saved
from tests.script.keras.cases.layers import states
from tests.script.keras.cases.loops import left_statistics, loop, main_rank, same_work, slow, sums, taken
from tests.script.keras.cases.losses import over_samples, own_losses, reading, summed, weighted_mean
from tests.script.keras.cases.mistakes import apart, refused
from tests.script.keras.cases.models import FOLDER, SGD, TENSORFLOW, Adam, simple
from tests.script.keras.cases.networks import batchnorm_and_dropout, fine_tuning, frozen, gan, unbuilt, vae
from tests.script.keras.cases.scores import masked_scores, outputs
from tests.script.keras.cases.sharded import CASES as SHARDED
from tests.seconds import counted

CASES = {
    "arrays": arrays,
    "global_clipnorm": simple(lambda: SGD(0.1, global_clipnorm=0.05, weight_decay=0.01)),
    "adam_accumulation": simple(lambda: Adam(0.01, gradient_accumulation_steps=2)),
    "run_eagerly": simple(lambda: SGD(0.1), run_eagerly=True),
    "own_step": user_step,
    "own_logs": user_logs,
    "rates": rates,
    "two_inputs": two_inputs,
    "class_weight": class_weight,
    "py_dataset": py_dataset,
    "steps": steps,
    "masked_scores": masked_scores,
    "self_shuffled": self_shuffled,
    "states": states,
    "outputs": outputs,
    "draws": draws,
    "vae": vae,
    "gan": gan(),
    "gan_compressed": gan(compression="topk", ratio=0.05),
    "unbuilt": unbuilt,
    "overflow": overflow,
    "float8": float8,
    "undivided": undivided,
    "callbacks": callbacks,
    "stops": stops,
    "batchnorm_and_dropout": batchnorm_and_dropout,
    "compressed": compressed,
    "residual": residual,
    "saved": saved,
    "fine_tuning": fine_tuning,
    "frozen": frozen,
    "slow": slow,
    "summed": summed,
    "masked": lambda: reading(weights=True),
    "masked_own_step": lambda: reading(UserStep),
    "weighted_mean": weighted_mean,
    "own_losses": own_losses,
    "over_samples": over_samples,
    "loader": loader,
    "loop": loop,
    "taken": taken,
    "left_statistics": left_statistics,
    "same_work": same_work,
    "main_rank": main_rank,
    **SHARDED,
}
if hk.size() > 1:
    CASES |= {"refused": refused, "apart": apart}
if TENSORFLOW:
    CASES |= {
        "tf_data": tf_data,
        "uneven_number": uneven_number,
        "lengths": lengths,
        "image_folder": image_folder,
        "jit_compile": jit_compile,
        "loop_dataset": lambda: loop(dataset=True),
        "loop_sums": sums,
        "taken_graph": lambda: taken(graph=True),
        "steps_per_execution": simple(lambda: SGD(0.1, momentum=0.9), steps_per_execution=3),
    }

if __name__ == "__main__":
    keras.config.set_floatx("float64")
    gc.freeze()  # clear_session collects, a third of a second for what the imports left
    for name in sys.argv[2:]:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        own_loop._iterations.clear()  # steps of the cases before, which are not the same ones in each world
        with counted(f"Keras scripts on {keras.backend.backend()}", name):
            np.savez(FOLDER / f"{name}.{hk.size()}.{hk.rank()}.npz", **CASES[name]())
        if hk.rank() == 0:
            print("done", name, flush=True)
