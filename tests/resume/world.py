"""A rank that trains, resumes and evaluates the runs which FOLDER/work.json lists; results go to FOLDER/results.

``python world.py FRAMEWORK FOLDER``. It uses what users import, and the command line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from runs import measure, measures  # noqa: E402

SECONDS = 300  # for the work; then it has hung
SAMPLES, BATCH, EPOCHS = 240, 24, 2  # of the scripts; the first ones stop after EPOCHS, and are resumed for as many


def fit(case, out):
    import hvd_train

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        summary = hvd_train.fit(case["config"], resume=case.get("resume"))
    found = {key: summary[key] for key in ("steps", "train_loss", "val_loss", "weights_sha256")}
    return found | {"tensors": measures(Path(case["config"]["run_dir"]))}


def evaluate(case, out):
    from hvd_train.cli.main import cli

    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            cli(["eval", "--run-dir", case["run_dir"]], standalone_mode=False)
    except SystemExit as end:
        assert not end.code, out.getvalue()
    return json.loads(next(line for line in out.getvalue().splitlines() if line.startswith("{")))


def samples():
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.data[:SAMPLES] / 16, digits.target[:SAMPLES]


def torch_script(case, out):
    """A PyTorch script of a user's: from the start, or from the checkpoint that ``case`` names."""
    import torch

    import hvd_train.torch as ht

    torch.manual_seed(1)
    x, y = (torch.tensor(array) for array in samples())
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ht.distribute(model, optimizer)
    data = torch.utils.data.TensorDataset(x, y)
    loader = ht.shard(torch.utils.data.DataLoader(data, batch_size=BATCH // ht.size(), shuffle=True))
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    first = ht.load(case["load"], **parts)["epoch"] if "load" in case else 0
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    ht.save(case["save"], **parts, epoch=first + EPOCHS)
    weights = {name: measure(x.detach().numpy()) for name, x in model.named_parameters()}
    return {"epoch": first + EPOCHS, "tensors": weights}


def keras_script(case, out):
    """A Keras script of a user's: from the start, or from the model file that ``case`` names."""
    import keras

    import hvd_train.keras as hk

    keras.utils.set_random_seed(1)
    keras.backend.set_floatx("float64")
    if "load" in case:
        model, first = keras.models.load_model(case["load"]), EPOCHS
    else:
        layers = [keras.Input((64,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(10)]
        model, first = keras.Sequential(layers), 0
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    hk.distribute(model)
    epochs = {"initial_epoch": first, "epochs": first + EPOCHS}
    loss = model.fit(*samples(), batch_size=BATCH // hk.size(), verbose=0, **epochs).history["loss"]
    model.save(case["save"])
    hk.barrier()
    keras.backend.set_floatx("float32")
    weights = {str(i): measure(x) for i, x in enumerate(model.get_weights())}
    return {"loss": loss, "tensors": weights}


def copy(case, out):
    """Keep the interrupted runs for another number of ranks."""
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == 0:
        shutil.copytree(case["folder"], case["to"])
    return {}


KINDS = {work.__name__: work for work in (fit, evaluate, torch_script, keras_script, copy)}


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    os.chdir(folder)
    results = Path("results")
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    for case in json.loads(Path("work.json").read_text())[framework]:
        faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang must end, and say where it was
        out = io.StringIO()
        try:
            result = KINDS[case["kind"]](case, out)
        except BaseException:
            print(out.getvalue(), flush=True)
            raise
        if rank == 0:
            results.mkdir(exist_ok=True)
            place = results / f"{framework}-{case['name']}.json"
            place.write_text(json.dumps(result | {"output": out.getvalue()}))


if __name__ == "__main__":
    main()
