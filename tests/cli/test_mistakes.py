"""One line for a mistake, exit code 2 or 3, before a framework is loaded."""

from __future__ import annotations

import numpy as np

from tests.cli.running import commands, run

MISTAKES = [
    (["ft"], "Did you mean 'fit'?"),
    (["fit", "-np", "0"], "0 is not in the range x>=1"),
    (["fit", "-np", "two"], "'two' is not a valid integer"),
    (["fit", "--launcher", "slurm"], "'slurm' is not one of 'auto', 'horovodrun', 'mpirun'"),
    (["fit", "-np", "2", "--min-np", "1"], "only a restart can use fewer ranks; --min-np; give --max-restarts"),
    (["fit", "-np", "2", "--spares", "1"], "spares take the place of ranks at a restart; --spares"),
    (["fit", "--sed", "3"], "'--seed'"),
    (
        ["fit", "--max_epochs", "3"],
        "No such option '--max_epochs'. Give --set max_epochs=3. See 'hvd-train fit --h",
    ),
    (["fit", "-c", "job.yaml", "--epochs", "3"], "No such option '--epochs'. Give --set max_epochs=3. See"),
    (["find-lr", "--batch-size=8"], "No such option '--batch-size'. Give --set batch_size=8. See"),
    (["watch", "--lr", "3"], "No such option '--lr'."),
    (["fit", "--seed", "-1"], "-1 is not in the range x>=0"),
    (["fit", "-c", "nothing.yaml"], "cannot read the configuration: No such file or directory; nothing.yaml"),
    (["fit", "--set", "optim.lrr=1"], "--set optim.lrr=1: optim.lrr: unknown key; did you mean 'optim.lr'?"),
    (["fit", "--set", "optim.rl=1"], "--set optim.rl=1: optim.rl: unknown key; did you mean 'optim.lr'?"),
    (["fit", "--set", "batch_size=3", "--set", "global_batch_size=6"], "does not go with batch_size: 3"),
    (["fit", "--set", "lr"], "--set lr: not of the form key=value"),
    (["eval"], "no run is named; give --run-dir"),
    (["fit", "-np", "2", "job.yaml"], "Unexpected argument 'job.yaml'. Give -c job.yaml."),
    (["verify", "-np", "2", "job.yaml"], "job.yaml is not a script; verify; give -c job.yaml"),
    (["eval", "--run-dir", "nowhere"], "no such run folder; nowhere; it starts in the current folder, "),
    (
        ["eval", "--run-dir", "."],
        "the folder is not a run folder: it holds no checkpoints and no config.yaml",
    ),
    (["predict", "--run-dir", "nowhere"], "Missing option '-o'"),
    (["verify"], "Missing option '-np'"),
    (["verify", "-np", "1"], "1 is not in the range x>=2"),
    (["verify", "-np", "2", "--steps", "0"], "0 is not in the range x>=1"),
    (["watch", "nowhere"], "there is no such run folder; nowhere"),
    (["compare", "nowhere"], "there is no such run folder; nowhere"),
    (["compare"], "Missing argument 'RUN_DIR...'"),
    (["config", "-c", "nothing.yaml"], "nothing.yaml"),
]


def test_one_line_for_a_mistake(tmp_path):
    for (arguments, words), done in zip(MISTAKES, commands(*(line for line, _ in MISTAKES), cwd=tmp_path), strict=True):
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), (arguments, done)
        assert done.err.startswith("error: ") and words in done.err, (arguments, done)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_every_mistake_of_a_file_at_once(tmp_path):
    (tmp_path / "job.yaml").write_text("framework: torch\nbatch_size: 3\nglobal_batch_size: 4\noptim: {lr: fast}\n")
    lines = run("fit", "-c", "job.yaml", cwd=tmp_path, code=2).stderr.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["job.yaml:1", "job.yaml:4"]
    assert all(line.startswith("error: ") for line in lines)


def test_np_inside_a_launched_world_is_refused():
    done = run("fit", "-np", "3", code=2, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    assert done.stderr == "error[rank 0]: -np 3 inside a world of 2 ranks; started by mpirun; leave out -np\n"


def test_verify_in_a_launched_world_is_refused():
    done = run("verify", "-np", "2", code=2, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    assert done.stderr.startswith(
        "error[rank 0]: verify starts its ranks itself; started by mpirun; call hvd-train verify"
    )


BAD_DATA = [
    (["data.name=digit"], "unknown 'digit'; did you mean 'digits'? there are digits,"),
    (
        ["data.name=npz", "data.path=x.npz"],
        "there is no such file or folder; data.path: x.npz; it starts in the current folder, ",
    ),
    (["data.name=npz", "data.path=cut.npz"], "cut.npz"),
    (["data.name=npz"], "data.path"),
    (["data.name=tests.own_models:bad_labels", "data.num_classes=3"], "label"),
    (["data.name=tests.own_models:nothing"], "nothing"),
]


def test_bad_data(tmp_path):
    np.savez(tmp_path / "whole.npz", x_train=np.zeros((9, 2), np.float32), y_train=np.arange(9))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:200])
    lines = [["fit", "--run-dir", "run", *(word for one in sets for word in ("--set", one))] for sets, _ in BAD_DATA]
    for (sets, words), done in zip(BAD_DATA, commands(*lines, cwd=tmp_path), strict=True):
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1), (sets, done)
        assert done.err.startswith("error: ") and words in done.err, (sets, done)
