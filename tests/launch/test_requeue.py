"""The restart of a batch job when its ranks have ended. tests/slurm tries it under Slurm."""

from __future__ import annotations

import json
import subprocess

import pytest

from hvd_train.checkpoint import store
from hvd_train.launch import requeue as module
from hvd_train.launch.requeue import requeue
from hvd_train.launch.submit import script, starts


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return the calls of scontrol, which fails where the file ``no`` is."""
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(
        f"#!/bin/sh\necho $* >> {tmp_path}/asked\n[ ! -e {tmp_path}/no ] || {{ echo disabled >&2; exit 1; }}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(module, "END_SECONDS", 0)
    return lambda: (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []


def saved(folder, step):
    store.place(folder / "checkpoints", step).mkdir(parents=True)


def test_it_starts_again_as_often_as_it_may_and_while_it_comes_on(tmp_path, asked, monkeypatch, capsys):
    saved(tmp_path, 10)
    assert requeue(75, 2, tmp_path) == 75 and asked() == ["requeue 7"]
    assert json.loads((tmp_path / "requeued.json").read_text()) == {"job": "7", "step": 10}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue(75, 2, tmp_path) == 75 and len(asked()) == 1
    assert "it came no further than step 10 since it was started again" in capsys.readouterr().err
    saved(tmp_path, 11)
    assert requeue(75, 2, tmp_path) == 75 and len(asked()) == 2
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    saved(tmp_path, 12)
    assert requeue(75, 2, tmp_path) == 75 and len(asked()) == 2
    assert "started again 2 times, and --requeue allows 2" in capsys.readouterr().err


def test_before_the_first_checkpoint_it_starts_again_once(tmp_path, asked, monkeypatch, capsys):
    assert requeue(75, 9, tmp_path) == 75 and len(asked()) == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue(75, 9, tmp_path) == 75 and len(asked()) == 1
    words = "the job is not started again: it came no further than step 0 since it was started again; give it more"
    assert capsys.readouterr().err.startswith(words)  # the ranks have said that there was nothing to save


def test_another_jobs_step_does_not_count(tmp_path, asked, monkeypatch):
    saved(tmp_path, 10)
    (tmp_path / "requeued.json").write_text('{"job": "6", "step": 10}')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue(75, 9, tmp_path) == 75 and len(asked()) == 1


@pytest.mark.parametrize("code", [5, 137, 139])
def test_a_lost_rank_starts_it_again_and_the_code_stays(tmp_path, asked, monkeypatch, capsys, code):
    """srun hands on 137 where a rank was killed. The job ends with that code when it is not started again."""
    saved(tmp_path, 10)
    assert requeue(code, 1, tmp_path) == code and asked() == ["requeue 7"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert requeue(code, 9, tmp_path) == code and len(asked()) == 1
    assert capsys.readouterr().err.startswith("the job is not started again: it came no further than step 10 since ")
    saved(tmp_path, 11)
    assert requeue(code, 1, tmp_path) == code and len(asked()) == 1


def test_a_job_that_slurm_started_too_often_ends(monkeypatch):
    """A node that fails makes Slurm start the job again, whatever its script would say."""
    for count, code in (("0", 0), ("2", 0), ("3", 5)):
        words = ["bash", "-c", starts(2)]
        done = subprocess.run(words, env={"SLURM_RESTART_COUNT": count}, capture_output=True, text=True, check=False)
        assert done.returncode == code and done.stderr.count("--requeue allows 2") == (code == 5)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 6, 143])
def test_other_ends_are_handed_on(tmp_path, asked, code):
    assert requeue(code, 9, tmp_path) == code and asked() == [] and list(tmp_path.iterdir()) == [tmp_path / "bin"]


def test_where_slurm_does_not_take_it_back(tmp_path, asked, capsys):
    (tmp_path / "no").touch()
    assert requeue(75, 9, None) == 75 and capsys.readouterr().err.endswith("not started again: disabled\n")


def test_the_batch_script_hands_the_code_on():
    last = script(["train"], {"requeue": True, "signal": "USR1@9"}, [], [["again", "a b"]]).splitlines()
    assert last[1:3] == ["#SBATCH --requeue", "#SBATCH --signal=USR1@9"] and last[-2:] == [
        "srun train",
        "exec again 'a b' $?",
    ]
