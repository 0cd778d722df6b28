"""The command line as a user meets it: help that teaches, one line for a mistake, commands that need no framework."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml

from hvd_train.config import explained, load_config
from hvd_train.doctor import host
from hvd_train.report import tables

ROOT = Path(__file__).parents[2]
SECONDS = 120
COMMANDS = [
    "fit",
    "sweep",
    "submit",
    "eval",
    "predict",
    "verify",
    "export",
    "compare",
    "doctor",
    "config",
    "models",
    "data",
    "guide",
]


def run(*arguments: str, cwd: Path = ROOT, code: int = 0, **environ: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "hvd_train", *arguments]
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(line, cwd=cwd, env=own, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


# ---- help


def test_help_lists_the_commands_in_the_order_of_a_first_session():
    text = run("--help").stdout
    listed = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == COMMANDS
    assert "mpirun -np 8 hvd-train fit -c job.yaml" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    for flag in ("-h", "--help"):
        text = run(command, flag).stdout
        assert f"Usage: hvd-train {command}" in text and len(text.splitlines()) > 5


def test_a_bare_command_is_its_help():
    for arguments in ((), ("config", "--help")):
        done = run(*arguments, code=0 if arguments else 2)
        text = done.stdout or done.stderr
        assert text.startswith("Usage: hvd-train") and "error" not in text and len(text.splitlines()) > 8


def test_version():
    assert run("--version").stdout.startswith("hvd-train, version ")


# ---- mistakes: one line, code 2, no framework


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ft"], "Did you mean 'fit'?"),
        (["fit", "-np", "0"], "0 is not in the range x>=1"),
        (["fit", "-np", "two"], "'two' is not a valid integer"),
        (["fit", "--launcher", "slurm"], "'slurm' is not one of 'auto', 'horovodrun', 'mpirun'"),
        (["fit", "-np", "2", "--min-np", "1"], "nothing starts again on fewer ranks; --min-np; give --max-restarts"),
        (["fit", "-np", "2", "--spares", "1"], "spares take the place of ranks at a restart; --spares"),
        (["fit", "--sed", "3"], "'--seed'"),
        (["fit", "--seed", "-1"], "-1 is not in the range x>=0"),
        (["fit", "-c", "nothing.yaml"], "cannot read the configuration: No such file or directory; nothing.yaml"),
        (["fit", "--set", "optim.lrr=1"], "--set optim.lrr=1: optim.lrr: unknown key; did you mean 'optim.lr'?"),
        (["fit", "--set", "batch_size=3", "--set", "global_batch_size=6"], "not both"),
        (["fit", "--set", "lr"], "--set lr: not of the form key=value"),
        (["eval"], "which run?"),
        (
            ["eval", "--run-dir", "nowhere"],
            "the folder is not a run folder: it holds no checkpoints and no config.yaml",
        ),
        (["predict", "--run-dir", "nowhere"], "Missing option '-o'"),
        (["verify"], "Missing option '-np'"),
        (["verify", "-np", "1"], "1 is not in the range x>=2"),
        (["verify", "-np", "2", "--steps", "0"], "0 is not in the range x>=1"),
        (["compare"], "Missing argument 'RUN_DIR...'"),
        (["config", "-c", "nothing.yaml"], "nothing.yaml"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_one_line_for_a_mistake(tmp_path, arguments, words):
    done = run(*arguments, cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_every_mistake_of_a_file_at_once(tmp_path):
    (tmp_path / "job.yaml").write_text("framework: torch\nbatch_size: 3\nglobal_batch_size: 4\noptim: {lr: fast}\n")
    lines = run("fit", "-c", "job.yaml", cwd=tmp_path, code=2).stderr.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["job.yaml:1", "job.yaml:4"]
    assert all(line.startswith("error: ") for line in lines)


def test_np_inside_a_launched_world_is_refused():
    done = run("fit", "-np", "3", code=2, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    assert done.stderr == "error[rank 0]: -np 3 inside a world of 2 ranks; started by mpirun; leave out -np\n"


# ---- data that cannot be used: code 3, before a framework is loaded


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.name=digit"], "unknown data set 'digit'; data.name; did you mean 'digits'?"),
        (["data.name=npz", "data.path=x.npz"], "there is no such file or folder; data.path: x.npz"),
        (["data.name=npz", "data.path=cut.npz"], "cut.npz"),
        (["data.name=npz"], "data.path"),
        (["data.name=tests.own_models:bad_labels", "data.num_classes=3"], "label"),
        (["data.name=tests.own_models:nothing"], "nothing"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_data(tmp_path, sets, words):
    np.savez(tmp_path / "whole.npz", x_train=np.zeros((9, 2), np.float32), y_train=np.arange(9))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:200])
    flags = [word for s in sets for word in ("--set", s)]
    done = run("fit", *flags, "--run-dir", "run", cwd=tmp_path, code=3)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


# ---- commands that only tell


def test_config_prints_a_file_that_gives_itself(tmp_path):
    text = run("config", "--set", "optim.lr=0.3", "--set", "framework=tensorflow").stdout
    (tmp_path / "job.yaml").write_text(text)
    assert run("config", "-c", "job.yaml", cwd=tmp_path).stdout == text
    assert "lr: 0.3" in text and "framework: tensorflow" in text


def test_config_explains_every_key():
    rows = run("config", "--explain").stdout.splitlines()
    assert rows[0].split() == ["key", "type", "default", "meaning"]
    assert len(rows) > 50 and any(row.startswith("optim.weight_decay ") for row in rows)


def test_config_explains_a_section_or_a_key():
    section = run("config", "--explain", "early-stopping", "--set", "seed=1").stdout.splitlines()
    assert {row.split(".")[0].split()[0] for row in section[1:]} == {"early_stopping"} and len(section) > 4
    (_, row) = run("config", "--explain", "optim.lr").stdout.splitlines()
    assert row.split()[:3] == ["optim.lr", "real", "0.01"]
    told = run("config", "--explain", "optim.lrr", code=2).stderr
    assert told == "error: optim.lrr: unknown key; did you mean 'optim.lr'?; config --explain\n"


def test_explanations_are_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = tables.explanations(explained("")).splitlines()
    assert len(lines) > 200 and max(map(len, lines)) <= 60
    assert lines[0] == 'framework: pytorch | tensorflow; default "pytorch"' and lines[1].startswith("    which")


def test_a_dry_run_of_one_rank_is_its_configuration(tmp_path):
    flags = ["--set", "optim.lr=0.3", "--run-dir", "x"]
    head, *text = run("fit", *flags, "--dry-run", cwd=tmp_path).stdout.splitlines()
    assert head == "# 1 rank, this process. It would train with this configuration:"
    assert load_config(base=yaml.safe_load("\n".join(text))) == load_config(None, ["optim.lr=0.3"], run_dir="x")
    world = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    told = [run("fit", "--dry-run", cwd=tmp_path, OMPI_COMM_WORLD_RANK=rank, **world).stdout for rank in "01"]
    assert told[0].startswith("# 2 ranks, started by mpirun. ") and not told[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "extra", [["--set", "precision=16-mixed"], ["-np", "2", "--set", "framework=tensorflow"]], ids=" ".join
)
def test_a_check_tries_all_and_writes_nothing(tmp_path, extra):
    lines = run("fit", "--check", "--run-dir", "deep/run", *extra, cwd=tmp_path).stdout.splitlines()
    samples = 64 if "-np" in extra else 32
    assert "1,438 training and 359 validation samples" in lines[0]
    assert lines[-2].startswith(f"checked: configuration, data, model; one step of {samples} samples, forward, ")
    assert "; one validation batch (loss 2." in lines[-2]
    assert lines[-1] == "nothing was written; without --check the run folder will be deep/run"
    assert not list(tmp_path.iterdir())


def test_a_check_finds_what_a_training_would(trained, tmp_path):
    """A run folder in use, a checkpoint to go on from, a model that does not take the data."""
    line = ["fit", "--check", "-c", "scripts/configs/tiny.yaml", "--set", "precision=64", "--run-dir", str(trained[0])]
    before = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    last = run(*line).stdout.splitlines()[-1]
    assert last.startswith("nothing was written; a start would be refused: the run folder holds a run already; "), last
    assert "give --resume auto to go on" in last
    assert ", model, checkpoint step-" in run(*line, "--resume", "auto").stdout
    assert "model.hidden: " in run(*line, "--resume", "auto", "--set", "model.hidden=[9]", code=2).stderr
    assert {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")} == before
    told = run("fit", "--check", "--set", "model.name=cnn", "--set", "data.name=diabetes", cwd=tmp_path, code=3).stderr
    assert told.startswith("error: ") and told.count("\n") == 1 and not list(tmp_path.iterdir())


def test_models_and_data_are_listed():
    models = run("models").stdout
    assert "cnn " in models and "mlp " in models and "pytorch, tensorflow" in models
    data = run("data").stdout
    assert all(f"\n{name} " in data for name in ["digits", "idx", "npz", "npy", "hdf5", "imagefolder", "synthetic"])


def test_example_configurations_are_valid():
    files = sorted((ROOT / "scripts" / "configs").glob("*.yaml"))
    assert len(files) >= 3
    for file in files:
        run("config", "-c", str(file))


def test_a_closed_pipe_is_no_error():
    """F41."""
    line = f"{sys.executable} -m hvd_train config --explain | head -1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stderr == ""


# ---- a run, evaluated and used


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = run("fit", "-c", "scripts/configs/tiny.yaml", "--run-dir", str(folder), "--set", "precision=64")
    return folder, done.stdout


def test_a_run_tells_what_it_does(trained):
    folder, text = trained
    lines = text.splitlines()
    assert lines[0] == "pytorch, mlp: 2,410 weights; digits: 1,438 training and 359 validation samples"
    assert lines[1] == "1 rank, global batch 50, 29 steps per epoch"
    *_, header, first, second, last = lines
    assert " ".join(header.split()) == "epoch step loss accuracy val loss val accuracy lr samples/s seconds"
    assert first.split()[:2] == ["1/2", "29"] and second.split()[:2] == ["2/2", "58"]
    assert re.fullmatch(
        r"done: validation loss \S+, accuracy \S+, \S+ samples/s; best: val_loss \S+ in epoch 2, checkpoint step-0*58; "
        f"run folder {folder}",
        last,
    )
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "summary.json", "tensorboard"]
    summary = json.loads((folder / "summary.json").read_text())
    keys = "framework model world_size epochs steps train_samples val_samples train_loss train_accuracy val_loss"
    assert list(summary) == [*keys.split(), "val_accuracy", "samples_per_second", "weights_sha256"]


def test_what_limits_leave_out_is_told(tmp_path):
    limits = ["--set", "limit_train_batches=2", "--set", "limit_val_batches=1"]
    line = run("fit", "--check", *limits, cwd=tmp_path).stdout.splitlines()[1]
    assert line == (
        "1 rank, global batch 32, 2 of 45 steps per epoch, 64 of 1,438 samples (limit_train_batches); "
        "an evaluation takes 32 of 359 samples (limit_val_batches)"
    )


def test_events_are_read_by_tensorboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[0] / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "loss/train", "loss/val", "accuracy/train", "accuracy/val", "lr", "samples_per_second",
    }  # fmt: skip
    assert [event.step for event in events.Scalars("loss/val")] == [29, 58]


def test_a_used_run_folder_is_not_touched(trained):
    folder, _ = trained
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    done = run("fit", "-c", "scripts/configs/tiny.yaml", "--run-dir", str(folder), code=2)
    assert "the run folder holds a run already" in done.stderr and "--overwrite" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


@pytest.mark.parametrize("extra", [[], ["-np", "2"], ["--set", "framework=tensorflow"]], ids=" ".join)
def test_eval_gives_what_training_measured(trained, extra):
    folder, _ = trained
    summary = json.loads((folder / "summary.json").read_text())
    found = json.loads(run("eval", "--run-dir", str(folder), *extra).stdout.splitlines()[-1])
    assert found["split"] == "val" and found["samples"] == 359
    assert found["loss"] == pytest.approx(summary["val_loss"], rel=1e-9)
    assert found["accuracy"] == summary["val_accuracy"]


def test_predictions_are_in_the_order_of_the_data(trained, tmp_path):
    """Logits of one rank and of three (which 359 does not divide by) are equal and reach the measured accuracy."""
    from hvd_train.config import DataConfig
    from hvd_train.data.catalog import open_data

    folder, _ = trained
    files = [tmp_path / "1.npy", tmp_path / "deep" / "3.npy"]
    for file, extra in zip(files, ([], ["-np", "3"]), strict=True):
        done = run("predict", "--run-dir", str(folder), "-o", str(file), *extra)
        assert f"359 predictions of the val split: {file}" in done.stdout
    one, three = (np.load(file) for file in files)
    assert one.shape == (359, 10) and np.isfinite(one).all()
    np.testing.assert_allclose(one, three, rtol=1e-12)
    labels = open_data(DataConfig(name="digits")).val.fetch(np.arange(359))[1]["label"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (one.argmax(1) == labels).mean() == pytest.approx(summary["val_accuracy"])
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["1.npy", "3.npy"], "no partial file is left"


MINE = """
import numpy as np
import torch

def build(input_shape, num_classes):
    return torch.nn.Linear(*input_shape, num_classes)

def pairs():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = x.argmax(1)
    return (x, y), (x[:10], y[:10])
"""


def test_code_beside_the_configuration_is_found_from_everywhere(tmp_path):
    """By the training on ranks of its own, by its run afterwards, and by nobody who did not say so."""
    jobs, away, folder = tmp_path / "jobs", tmp_path / "away", tmp_path / "run"
    jobs.mkdir()
    away.mkdir()
    (jobs / "mine.py").write_text(MINE)
    file = jobs / "job.yaml"
    named = f"model: {{name: 'mine:build'}}\ndata: {{name: 'mine:pairs'}}\nrun_dir: {folder}\ntensorboard: false\n"
    file.write_text(named)
    run("fit", "-c", "../jobs/job.yaml", "-np", "2", cwd=away)
    assert f"code_dir: {jobs}" in (folder / "config.yaml").read_text()
    assert json.loads(run("eval", "--run-dir", str(folder), cwd=away).stdout)["samples"] == 10
    names = ["--set", "model.name=mine:build", "--set", "data.name=mine:pairs"]
    told = run("eval", "--run-dir", str(folder), *names, cwd=away, code=3).stderr
    assert told == (
        "error: there is no module 'mine'; data.name: mine:pairs; it was looked for in "
        f"{away}; start there where it lies, or set code_dir\n"
    )
    assert run("eval", "--run-dir", str(folder), *names, "--set", f"code_dir={jobs}", cwd=away).stdout
    (jobs / "mine.py").rename(jobs / "other.py")
    told = run("fit", "-c", str(file), "--overwrite", cwd=away, code=3).stderr
    assert f"looked for in {jobs}, then in {away}; " in told and told.count("\n") == 1


def test_text_trains_and_predicts_at_every_place(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 12)
    data = f"data={{name: text, path: {tmp_path / 'text.txt'}, sequence_length: 16}}"
    model = "model={name: gpt, width: 16, depth: 1, heads: 2}"
    folder, file = tmp_path / "run", tmp_path / "logits.npy"
    settings = [x for one in (data, model, "global_batch_size=8", "tensorboard=false") for x in ("--set", one)]
    run("fit", "--run-dir", str(folder), *settings)
    run("predict", "--run-dir", str(folder), "-o", str(file), "-np", "2")
    logits = np.load(file)
    assert logits.shape == (6, 16, 256) and np.isfinite(logits).all()
    mixed = run("fit", "--run-dir", str(tmp_path / "b"), *settings, "--set", "model={name: mlp}", code=2)
    assert "the model does not take its inputs (input (16,) uint8)" in mixed.stderr and mixed.stderr.count("\n") == 1


def test_predictions_replace_no_file_unless_asked(trained, tmp_path):
    """As export does."""
    file = tmp_path / "x.npy"
    file.write_text("mine")
    for more in ([], ["-np", "2"]):
        told = run("predict", "--run-dir", str(trained[0]), "-o", str(file), *more, code=2).stderr
        assert told == f"error: the file exists already; {file}; give --overwrite, or another place with -o\n"
    assert file.read_text() == "mine"
    run("predict", "--run-dir", str(trained[0]), "-o", str(file), "--overwrite")
    assert len(np.load(file)) == 359


def test_predictions_that_cannot_be_written(trained):
    done = run("predict", "--run-dir", str(trained[0]), "-o", "/proc/nowhere/x.npy", code=2)
    assert done.stderr == "error: the predictions cannot be written: No such file or directory; /proc/nowhere/x.npy\n"


def test_eval_without_a_checkpoint(tmp_path):
    (tmp_path / "config.yaml").write_text("max_epochs: 1\n")
    done = run("eval", "--run-dir", str(tmp_path), code=4)
    assert done.stderr.startswith("error: there is no checkpoint; ") and done.stderr.count("\n") == 1


def test_compare_shows_runs_side_by_side(trained, tmp_path):
    folder, _ = trained
    done = run("compare", str(folder), str(folder), "-o", str(tmp_path / "new" / "curves.png"))
    header, *rows, last = done.stdout.splitlines()
    assert header.startswith("run folder") and len(rows) == 2 and rows[0] == rows[1]
    assert last == f"curves: {tmp_path}/new/curves.png"
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run("compare", str(tmp_path), code=4).stderr == f"error: holds no finished run; {tmp_path}\n"


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow-cpu"])
def test_doctor_counts_whatever_is_broken(monkeypatch, capsys, package):
    """F43: TensorFlow's build for GPUs has another name."""

    def version(name):
        if name in (package, "torch"):
            return "1"
        raise metadata.PackageNotFoundError(name)

    sound = {"version": "1", "gpus": 0, "mpi": True, "gloo": True, "nccl": False}
    found = {"pytorch": sound, "tensorflow": {"error": "no libcudart"}}
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(host, "_look", lambda framework: found[framework])
    monkeypatch.setattr(host, "_probe", lambda framework, tool, verbose: (framework, tool, *"...", "ok"))
    assert host.doctor(False) == 1 and "no libcudart" in capsys.readouterr().out
    found["tensorflow"] = sound
    assert host.doctor(False) == 0


def test_doctor_finds_a_sound_installation():
    done = run("doctor")
    rows = [line.split() for line in done.stdout.splitlines()]
    verdicts = {(row[0], row[1]): row[-1] for row in rows if row and row[-1] == "ok"}
    assert set(verdicts) == {(f, tool) for f in ("pytorch", "tensorflow") for tool in ("mpirun", "horovodrun")}
    assert "Horovod with MPI, Gloo" in done.stdout


def test_submit_overwrites_as_fit_does_and_never_at_each_start(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    line = ["submit", "-c", "scripts/configs/tiny.yaml", "--run-dir", str(tmp_path), "--dry-run"]
    assert "--overwrite to start anew" in run(*line, code=2).stderr
    assert f"--run-dir {tmp_path} --overwrite\n" in run(*line, "--overwrite").stdout
    for more in (["--overwrite"], ["--resume", str(tmp_path)]):
        told = run(*line, *more, "--requeue", "2", code=2).stderr
        assert "each start of the job would begin anew" in told and f"--requeue {more[0]}" in told
