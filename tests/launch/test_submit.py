"""The batch script of ``hvd-train submit``; that Slurm takes it, and what it does there: tests/slurm."""

from __future__ import annotations

import subprocess

import pytest
from click.testing import CliRunner

from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.errors import ConfigError
from hvd_train.launch.submit import contained, script
from tests.cli.running import run


def test_what_is_not_given_is_left_to_the_site():
    options = {"job-name": "a", "nodes": 2, "cpus-per-task": None, "gpus-per-node": "h100:4", "time": None}
    lines = script(["python", "train.py"], options, []).splitlines()
    assert lines[:4] == ["#!/bin/bash", "#SBATCH --job-name=a", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=h100:4"]
    assert lines[-1] == "exec srun python train.py" and len(lines) == 7


def test_cores_and_modules():
    lines = script(["python"], {"cpus-per-task": 4}, ["gcc/12", "cuda 12"]).splitlines()
    assert lines[0] == "#!/bin/bash -l", "which knows the function module"
    assert lines[2:4] == ["module load gcc/12 || exit 2", "module load 'cuda 12' || exit 2"]
    assert lines[-1] == "exec srun --cpus-per-task=4 python", "srun takes it from no variable"


def test_each_job_has_a_secret_of_its_own(tmp_path):
    text = script(["-c", "echo $HVD_TRAIN_SECRET"], {}, []).replace("exec srun", "exec bash")
    said = {subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(said) == 2 and all(len(one.strip()) == 64 and int(one, 16) for one in said)


@pytest.mark.parametrize("word", ["a\nrm -rf x", "a\rb", "a\x00"])
def test_no_value_adds_a_line(word):
    """A line of a batch script is run by a shell."""
    for given in ((["python", word], {}, []), (["python"], {"account": word}, []), (["python"], {}, [word])):
        with pytest.raises(ConfigError, match="a character that is not printable; hvd-train submit: "):
            script(*given)


def test_the_configuration_asks_and_the_command_line_comes_first(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "slurm: {nodes: 2, ntasks_per_node: 4, time: 2:00:00, gpus_per_node: 4, modules: [gcc/12], "
        "lines: ['--qos=high prio', --exclusive], container: apptainer exec 'a b.sif'}\n"
    )
    words = ["submit", "-c", str(path), "--nodes", "3", "--run-dir", str(tmp_path / "run"), "--dry-run"]
    lines = CliRunner().invoke(cli, words).output.splitlines()
    assert lines[:10] == [
        "#!/bin/bash -l", "#SBATCH --job-name=job", "#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4", "#SBATCH --time=2:00:00", "#SBATCH --no-requeue", "#SBATCH --qos='high prio'",
        "#SBATCH --exclusive", "module load gcc/12 || exit 2",
    ]  # fmt: skip
    assert lines[-1].startswith(f"exec srun apptainer exec 'a b.sif' hvd-train fit -c {path} --run-dir ")


def test_a_sweep_is_an_array(tmp_path):
    words = ["submit", "--run-dir", "50% of/s", "--param", "optim.lr=0.1,0.01,0.001"]
    lines = CliRunner().invoke(cli, [*words, "--dry-run"]).output.splitlines()
    assert lines[4:6] == ["#SBATCH --output='50%% of/s/trial-%3a/output.log'", "#SBATCH --array=0-2"]
    assert lines[-3] == "trial='50% of/s'/trial-$(printf %03d \"$SLURM_ARRAY_TASK_ID\")"
    assert lines[-2].endswith(' -m hvd_train fit -c "$trial"/trial.yaml --resume auto')
    assert lines[-1].endswith(' -m hvd_train ended "$trial" $?')
    words += ["--at-once", "2", "--requeue", "3", "--dry-run"]
    lines = CliRunner().invoke(cli, words).output.splitlines()
    assert "#SBATCH --array=0-2%2" in lines and lines[-3].startswith("srun ")
    assert lines[-4].startswith("export HVD_TRAIN_JOB_END=$(date ")
    assert lines[-2].endswith(' -m hvd_train requeue --times 3 --run-dir "$trial" $?')
    for more in (["--output", "x"], ["--follow"], ["--overwrite"], ["--resume", "last"], ["--", "python", "x.py"]):
        found = CliRunner().invoke(cli, ["submit", "--param", "optim.lr=1,2", *more])
        assert isinstance(found.exception, ConfigError) and "takes no" in str(found.exception), more


@pytest.mark.parametrize("words", [["submit"], ["submit", "--param", "optim.lr=1"], ["sweep", "--param", "optim.lr=1"]])
def test_a_seed_without_draws_is_not_silently_left_out(words):
    found = CliRunner().invoke(cli, [*words, "--seed", "3"])
    assert str(found.exception).startswith("--seed is the seed of --random, which is not given; give")


def test_what_is_no_option_or_command_is_refused(tmp_path):
    for setting in ("slurm.lines=[qos]", "slurm.lines=['-x']", "slurm.time=[]", "slurm.nodes=0"):
        with pytest.raises(ConfigError, match=r"slurm\.(lines|time|nodes): "):
            load_config(None, [setting])
    with pytest.raises(ConfigError, match="is not a command: No closing quotation"):
        contained("a 'b")


def test_submit_overwrites_as_fit_does_and_never_at_each_start(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    line = ["submit", "-c", "scripts/configs/tiny.yaml", "--run-dir", str(tmp_path), "--dry-run"]
    assert "--overwrite to start anew" in run(*line[:-1], code=2).stderr
    for dry in (run(*line), run("fit", *line[1:])):
        assert dry.stderr.startswith("note: this would be refused: the run folder holds a run already; ") and dry.stdout
    assert f"--run-dir {tmp_path} --overwrite\n" in run(*line, "--overwrite").stdout
    for more in (["--overwrite"], ["--resume", str(tmp_path)]):
        told = run(*line, *more, "--requeue", "2", code=2).stderr
        assert "each start of the job would begin anew" in told and f"--requeue {more[0]}" in told
