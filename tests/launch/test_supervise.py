"""Ranks that are watched: what ends them, what is said of it, what starts again. Ranks of a few lines, real signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.launchers.installed import python
from hvd_train.launch.launchers.mpirun import Mpirun
from hvd_train.launch.status import RankStatus, StatusTable
from hvd_train.launch.supervise import _cause, _going_on, supervise
from hvd_train.launch.watchdog import DEAD, Watchdog, state
from tests.limits import SECONDS, until

ROOT = Path(__file__).parents[2]


# Files: the launcher has the code of the first rank that ended, the supervisor has seen its end.
ENDED, NOTICED = "ended", "noticed"


def script(folder, plan, arguments, ends=True, size=2):
    """A shell that starts ``size`` ranks and, like a launcher, gives the code of the one that failed first. ``ends``:
    it kills the other one then, as mpirun does, which takes longer than a look of the supervisor; else it waits."""
    words = " ".join(map(shlex.quote, [str(folder), json.dumps(plan), *arguments]))
    lines = [f"rm -f {folder}/{NOTICED} {folder}/{ENDED}"]
    for rank in range(size):
        own = f"HOROVOD_RANK={rank} HOROVOD_SIZE={size} HOROVOD_LOCAL_RANK={rank} HOROVOD_LOCAL_SIZE={size}"
        own += f" PYTHONPATH={ROOT}"
        lines.append(f"{own} {sys.executable} -m tests.launch.fake_rank {words} & rank{rank}=$!")
    lines += [f"wait -n; code=$?; touch {folder}/{ENDED}", "if [ $code != 0 ]; then"]
    noticed = f"for turn in $(seq 6000); do [ ! -e {folder}/{NOTICED} ] || break; sleep 0.01; done"
    lines += [noticed, "kill -KILL $rank0 $rank1 2>/dev/null"] if ends else ["true"]
    return "\n".join([*lines, "fi", "wait", "exit $code"])


def pids(folder):
    return [json.loads(line)[0] for path in folder.glob("starts.*") for line in path.read_text().splitlines()]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(folder):
    return until(lambda: not any(map(alive, pids(folder))))


def starts(folder, rank=0):
    """The arguments of each start."""
    return [json.loads(line)[1:] for line in (folder / f"starts.{rank}").read_text().splitlines()]


@pytest.fixture
def noticed(tmp_path, monkeypatch):
    """Make the file NOTICED at the second look after the end of a rank: between two looks its end is noted.

    Also at a look that finds a rank stuck, which is the last one.
    """
    looks, look = Counter(), Watchdog.look

    def counted(self):
        looks[self] += any(one.pid and state(one.pid) in DEAD for one in self._read_all())
        stuck = look(self)
        if looks[self] > 1 or stuck:
            (tmp_path / NOTICED).touch()
        return stuck

    monkeypatch.setattr(Watchdog, "look", counted)


@pytest.fixture
def run(tmp_path, monkeypatch, noticed):
    """run(plan, restarts): the exit code; none of the ranks may be left."""
    monkeypatch.setattr(Mpirun, "check", lambda self: None)
    monkeypatch.setattr(Mpirun, "slow_to_end", False)  # a shell ends its ranks at once
    plans, ends = [], []

    def command(self, layout, program):
        return [
            "bash",
            "-c",
            script(tmp_path, plans[-1], program[len(python("hvd_train")) :], ends[-1], layout.num_proc),
        ]

    for kind in (Launcher, Mpirun):  # of one rank, and of more
        monkeypatch.setattr(kind, "command", command)

    def go(plan, restarts=0, arguments=("fit",), end=True, watchdog_s=0.0, min_np=None):
        plans.append(plan)
        ends.append(end)
        try:
            words = tmp_path / "run", restarts, False, watchdog_s, None, min_np
            return supervise(2, "mpirun", list(arguments), *words)
        finally:
            assert gone(tmp_path), "left behind"

    return go


def test_all_is_well(run, tmp_path, capfd):
    assert run([["step:1 done", "step:1 done"]], 3) == 0
    assert len(starts(tmp_path)) == 1 and capfd.readouterr().err == ""


@pytest.mark.parametrize("size", [0, 1])
def test_a_killed_rank_is_named_and_the_others_end(run, size):
    """Whatever they say of its loss."""
    plan = ["step:7 after_end lost"] * 2
    plan[size] = "step:7 kill"
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="in training, step 7") as caught:
        run([plan])
    assert caught.value.what == f"rank {size} was ended by SIGKILL" and caught.value.exit_code == 5
    assert time.monotonic() - began < SECONDS


def test_ranks_that_ended_unseen_are_named_together():
    """The process that watches was stopped meanwhile: nobody can know which rank ended first."""
    with StatusTable(3) as table:
        cause = _cause(table, {0: 5.0, 1: 5.0, 2: 6.0}, 128 + signal.SIGKILL)
        assert (cause.what, cause.rank, cause.code) == ("rank 0 or 1 was ended by SIGKILL", None, 5)
        assert _cause(table, {0: 5.0, 1: 4.0}, 128 + signal.SIGKILL).rank == 1
        assert _cause(table, {}, 1).what == "the launcher ended with code 1, before any rank had begun"


def test_a_rank_that_noticed_a_loss_is_not_its_cause():
    """Although it reported before the watching process saw the other one's end."""
    noticed = RankStatus(1, 7, "training", {"code": 5, "time": 1.0, "line": "rank 1 was lost", "lost": True}, 3, "")
    killed = RankStatus(2, 7, "training", {}, 3, "")
    table = SimpleNamespace(ranks=2, read=[noticed, killed].__getitem__)
    assert _cause(table, {0: 1.5, 1: 2.0}, 128 + signal.SIGKILL).rank == 1


@pytest.mark.parametrize("end", ["kill", "exit:0"])
def test_a_launcher_that_waits_for_the_others_is_not_waited_for(run, end):
    """As every launcher does after a rank that left with code 0."""
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 left before the end of the training; in training, step 7"):
        run([["step:7 sleep:600", f"step:7 {end}"]], end=False)
    assert time.monotonic() - began < SECONDS


def test_a_dead_rank_starts_all_again_from_the_newest_checkpoint(run, tmp_path, capfd):
    plan = [
        ["step:7 checkpoint:5 sleep:600", "step:7 kill"],
        ["step:9 after_end lost", "step:9 raise"],
        ["step:20 done", "step:20 done"],
    ]
    assert run(plan, 2, ("fit", "--overwrite", "-c", "x.yaml")) == 0
    assert starts(tmp_path, 1) == [["fit", "--overwrite", "-c", "x.yaml"]] + 2 * [
        ["fit", "-c", "x.yaml", "--resume", "auto"]
    ]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("restart")]
    assert lines[0] == "restart 1 of 2: rank 1 was ended by SIGKILL; in training, step 7"
    assert lines[1].startswith("restart 2 of 2: rank 1: RuntimeError: boom; in training, step 9; its traceback: ")
    kept = Path(lines[1].partition("its traceback: ")[2])
    assert kept.parent == tmp_path / "run" / "failures" and 'raise RuntimeError("boom")' in kept.read_text()


def test_before_the_first_step_the_same_command_runs_again(run, tmp_path):
    """``--resume auto`` would go on from the run that ``--overwrite`` was about to replace."""
    assert run([["sleep:600", "kill"], ["step:1 done", "step:1 done"]], 1, ("fit", "--overwrite")) == 0
    assert starts(tmp_path, 1) == 2 * [["fit", "--overwrite"]]


def test_no_progress_ends_the_restarts(run, tmp_path, capfd):
    with pytest.raises(CommunicationError, match="3 restarts, of which the last 2 came no further"):
        run([["step:5 sleep:600", "step:5 kill"], ["step:9 sleep:600", "step:9 kill"]], 100)
    assert len(starts(tmp_path, 1)) == 4


def test_restarts_are_counted(run, tmp_path):
    plan = [[f"step:{k} sleep:600", f"step:{k} raise"] for k in range(1, 9)]
    assert run(plan, 2) == 1
    assert len(starts(tmp_path, 1)) == 3


@pytest.mark.parametrize("fewest", [1, 2, 5])
def test_the_ranks_that_are_left_go_on_down_to_so_many(run, tmp_path, capfd, fewest):
    plan = [["step:7 checkpoint:5 sleep:600", "step:7 kill"], ["step:9 done", "step:9 done"]]
    assert run(plan, 2, min_np=fewest) == 0
    assert (len(starts(tmp_path)), len(starts(tmp_path, 1))) == ((2, 1) if fewest == 1 else (2, 2))
    on = " on 1 rank" if fewest == 1 else ""
    assert f"restart 1 of 2{on}: rank 1 was ended by SIGKILL" in capfd.readouterr().err


def test_a_mistake_starts_nothing_again(run, tmp_path):
    assert run([["sleep:0.3 data", "data"]], 5) == 3
    assert len(starts(tmp_path)) == 1


def test_an_old_kernel_runs_the_job_unwatched(run, tmp_path, monkeypatch):
    monkeypatch.setattr("hvd_train.launch.supervise.supported", lambda: False)
    assert run([["step:1 exit:7", "step:1 after_end exit:0"]], end=False) == 7
    with pytest.raises(ConfigError, match="cannot watch processes"):
        run([["step:1 done", "step:1 done"]], 1)


def test_going_on_from_a_checkpoint_that_was_named():
    old, new = (5, Path("run/checkpoints/step-5"), 1), (9, Path("run/checkpoints/step-9"), 2)
    named = ["fit", "--resume=there/step-2", "--overwrite"]
    assert _going_on(named, {old}, {old}) == ["fit", "--resume", "there/step-2", "--overwrite"]
    assert _going_on(named, {old}, {old, new}) == ["fit", "--resume", "run/checkpoints/step-9"]
    assert _going_on(["fit", "--resume", "last"], {old}, {old}) == ["fit", "--resume", "auto"]


# ---- signals to the process that watches, and its own end


@pytest.fixture
def watched(tmp_path):
    """watched(plan): the process that watches two ranks of this plan."""
    made = []

    def go(plan):
        code = f"""
        import sys
        from pathlib import Path
        from hvd_train.launch.launchers.mpirun import Mpirun
        from hvd_train.launch.supervise import supervise
        Mpirun.check, Mpirun.slow_to_end = lambda self: None, False
        Mpirun.command = lambda *args: ["bash", "-c", {script(tmp_path, plan, ["fit"], ends=False)!r}]
        sys.exit(supervise(2, "mpirun", ["fit"], Path({str(tmp_path / "run")!r}), 3, False))
        """
        made.append(subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT))
        return made[-1]

    yield go
    for process in made:
        process.kill()
        process.wait()


def both(folder, mark):
    """Both ranks have got there."""
    until(lambda: (folder / f"{mark}.0").exists() and (folder / f"{mark}.1").exists(), 0.01)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_reaches_every_rank_and_their_code_comes_back(watched, tmp_path, number, code):
    job = watched([["step:1 save", "step:1 save"]])
    both(tmp_path, "ready")
    job.send_signal(number)
    assert job.wait(SECONDS) == code and gone(tmp_path)
    assert len(starts(tmp_path)) == 1, "who asked for the end wants no restart"


def test_before_the_first_step_a_signal_ends_all_at_once(watched, tmp_path):
    job = watched([["busy", "busy"]])
    both(tmp_path, "busy")
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 75 and gone(tmp_path)
    assert (tmp_path / "left.0").exists() and (tmp_path / "left.1").exists(), "what a sudden end still does"


def test_the_second_signal_ends_all_at_once(watched, tmp_path):
    """Although their main threads are in native code, and would come back after ten minutes."""
    job = watched([["step:1 busy", "step:1 busy"]])
    both(tmp_path, "busy")
    job.send_signal(signal.SIGTERM)
    both(tmp_path, "asked")
    assert job.poll() is None and all(map(alive, pids(tmp_path)))
    job.send_signal(signal.SIGINT)
    assert job.wait(SECONDS) == 130 and gone(tmp_path)


@pytest.mark.parametrize("who", ["watcher", "launcher"])
def test_whoever_is_killed_no_rank_is_left(watched, tmp_path, who):
    plan = ["step:1 busy", "step:1 busy"], ["step:2 done", "step:2 done"]
    job = watched([list(part) for part in plan])
    both(tmp_path, "busy")
    first = pids(tmp_path)
    victim = job.pid if who == "watcher" else psutil.Process(first[0]).ppid()
    os.kill(victim, signal.SIGKILL)
    until(lambda: not any(map(alive, first)))
    assert job.wait(SECONDS) == (-9 if who == "watcher" else 0)
    assert len(starts(tmp_path)) == (1 if who == "watcher" else 2)


# ---- ranks that stop without an end


@pytest.mark.parametrize("size", [0, 1])
def test_a_stopped_rank_is_named_and_all_are_ended(run, size):
    plan = [f"step:7 until_stopped:{size} sleep:600"] * 2
    plan[size] = "step:7 stop"
    began = time.monotonic()
    with pytest.raises(
        CommunicationError, match=rf"rank {size} is stopped \(SIGSTOP\), for more than 1 s; in training"
    ):
        run([plan], watchdog_s=1)
    assert time.monotonic() - began < SECONDS


def test_a_rank_in_an_endless_loop_is_named_with_its_stack_and_all_start_again(run, tmp_path, capfd):
    """The other one is where ranks wait for one another."""
    plan = [["step:7 until:endless wait", "step:7 endless"], ["step:9 done", "step:9 done"]]
    assert run(plan, 1, watchdog_s=1) == 0
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("restart 1 of 1: rank 1 has not moved for 1 s (in endless, ") and "fake_rank.py:" in line
    (kept,) = (tmp_path / "run" / "failures").iterdir()
    assert str(kept) in line and "rank 1\n" in kept.read_text() and "in endless" in kept.read_text()
    assert "rank 0\n" not in kept.read_text()
