"""The batch script of ``hvd-train submit``; that Slurm takes it, and what it does there: tests/slurm."""

from __future__ import annotations

import subprocess

import pytest

from hvd_train.errors import ConfigError
from hvd_train.launch.submit import script


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
    for given in ((["python", word], {}, []), (["python"], {"account": word}, []), (["python"], {}, [word])):
        with pytest.raises(ConfigError, match="a character that is not printable; hvd-train submit: "):
            script(*given)
