"""One writer at a time, whatever dies; and an old run is gone only when the new one is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.run_folder import layout, lock
from hvd_train.run_folder import lock as lock_module
from hvd_train.run_folder.lock import Lock
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


def names(path):
    return sorted(p.name for p in path.iterdir())


def forked(work) -> int:
    """The exit code of ``work`` in a process of its own, which runs none of pytest's ends."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work() or 0)
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dead_lock(run_dir, **changed):
    """What a process that was killed leaves."""

    def die():
        Lock(run_dir).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(die) == -signal.SIGKILL
    path = run_dir / "lock"
    if changed:
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return path


def test_nothing_is_left_where_the_disk_cannot_be_flushed(tmp_path, monkeypatch):
    """``lock.<token>`` was."""

    def refused(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(CheckpointError, match="the run folder cannot be written: Invalid argument"):
        Lock(tmp_path / "a" / "run").__enter__()
    assert names(tmp_path) == []


def test_a_checkpoint_of_another_run_goes_into_no_run(tmp_path):
    """It would cut the log of the run that lies there, and drop its checkpoints."""
    for name in "ab":
        (tmp_path / name / "checkpoints" / "step-00000003").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("{}\n")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    places = [link / "checkpoints" / "step-00000003", tmp_path / "disk" / "step-00000003"]
    os.rename(tmp_path / "a" / "checkpoints", tmp_path / "disk")
    (tmp_path / "a" / "checkpoints").symlink_to(tmp_path / "disk")
    for own in ("auto", "last", "best", tmp_path / "a", link, *places):
        layout.check_free(tmp_path / "a", str(own), False)
        assert layout.goes_on(tmp_path / "a", str(own))
    for other in (None, str(tmp_path / "b"), str(tmp_path / "b" / "checkpoints" / "step-00000003"), str(tmp_path)):
        assert not layout.goes_on(tmp_path / "a", other)
        with pytest.raises(ConfigError, match="holds a run already.*--overwrite"):
            layout.check_free(tmp_path / "a", other, False)
        layout.check_free(tmp_path / "a", other, True)
        layout.check_free(tmp_path / "new", other, False)


def test_the_second_is_refused_and_told_who_the_first_is(tmp_path):
    with Lock(tmp_path / "a" / "run") as held:
        before = (tmp_path / "a" / "run" / "lock").read_bytes()
        with pytest.raises(CheckpointError) as caught, Lock(tmp_path / "a" / "run"):
            pass
        text = str(caught.value)
        assert f"in use by process {os.getpid()} on {os.uname().nodename}, since 20" in text and "remove" not in text
        assert names(tmp_path / "a" / "run") == ["lock"]
        assert (tmp_path / "a" / "run" / "lock").read_bytes() == before
        held.check()
    assert names(tmp_path) == [], "no folder that was made for nothing stays"


def test_a_lock_goes_with_its_process(tmp_path):
    dead_lock(tmp_path)
    with Lock(tmp_path):
        assert names(tmp_path) == ["lock"]
    with pytest.raises(ValueError, match="stop"), Lock(tmp_path):
        raise ValueError("stop")
    assert names(tmp_path) == []
    dead_lock(tmp_path, pid=1)  # a pid that another process has now
    with Lock(tmp_path):
        pass


def test_sigterm_releases_and_ends(tmp_path):
    def end():
        with Lock(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    assert forked(end) == -signal.SIGTERM
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", ['{"place": "elsewhere"}', "", "nonsense", '{"pid": -1, "token": "../../x"}', "[1]"])
def test_of_another_host_only_time_tells(tmp_path, text):
    path = tmp_path / "lock"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught, Lock(tmp_path):
        pass
    assert f"remove {path}" in str(caught.value) and "10 minutes" in str(caught.value)
    assert path.read_text() == text and names(tmp_path) == ["lock"]
    os.utime(path, (time.time() - lock.OLD_SECONDS - 5,) * 2)
    with Lock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("holder", "restarts", "taken"), [("7 0", "1", True), ("7 1", "1", False), ("6 0", "1", False), ("", "1", False)]
)
def test_a_job_that_slurm_started_again_takes_its_own_lock(tmp_path, monkeypatch, holder, restarts, taken):
    """Perhaps on other hosts, where nobody sees that what it ran before is gone."""
    (tmp_path / "lock").write_text(json.dumps({"place": "elsewhere", "job": holder}))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if taken:
        with Lock(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["job"] == f"7 {restarts}"
    else:
        with pytest.raises(CheckpointError, match="in use"), Lock(tmp_path):
            pass


def test_words_of_a_foreign_lock_do_no_harm(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"host": "\x1b[2J\nall is well", "pid": 7}))
    with pytest.raises(CheckpointError) as caught, Lock(tmp_path):
        pass
    assert str(caught.value).isprintable() and "?[2J?all is well" in str(caught.value)


def test_the_holder_shows_that_it_lives_and_notices_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("hvd_train.run_folder.lock.BEAT_SECONDS", 0.02)
    with Lock(tmp_path) as lock:
        os.utime(lock.path, (1, 1))
        stop = time.monotonic() + SECONDS
        while lock.path.stat().st_mtime < 2:
            assert time.monotonic() < stop
            time.sleep(0.02)
        lock.path.write_text('{"token": "%s"}' % ("f" * 16))
        with pytest.raises(CheckpointError, match="was taken over by"):
            lock.check()
    assert names(tmp_path) == ["lock"], "the other's lock stays"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_lock_that_cannot_be_read_is_not_taken_over(tmp_path, monkeypatch, number):
    """Only a lock that can be read and is another's is one; at the start, the error is told as what it is."""
    with Lock(tmp_path) as lock, monkeypatch.context() as patched:
        patched.setattr(lock_module.files, "content", broken(number))
        lock.check()
        with pytest.raises(CheckpointError, match=f"the run folder cannot be written: {os.strerror(number)}"):
            Lock(tmp_path).__enter__()
    assert names(tmp_path) == []


def broken(number):
    def content(path, most):
        raise OSError(number, os.strerror(number))

    return content


def test_a_run_folder_that_was_removed_is_told_as_that(tmp_path):
    run = tmp_path / "run"
    with Lock(run) as lock:
        lock.path.unlink()
        with pytest.raises(CheckpointError, match=f"the run folder's lock was removed .*; {lock.path}; nothing more"):
            lock.check()
        shutil.rmtree(run)
        with pytest.raises(CheckpointError, match=f"the run folder was removed .*; {run}; nothing more was written"):
            lock.check()


TAKERS = """
import os, sys, time
from pathlib import Path
from hvd_train.run_folder import lock
from hvd_train.errors import CheckpointError
from tests.run_folder.test_lock import dead_lock
root, real = Path(sys.argv[1]), lock._dead
def slow(*args):
    found = real(*args)
    time.sleep(float.fromhex(f"0x0.{os.urandom(2).hex()}") / 50)  # up to 20 ms between looking and acting
    return found
lock._dead = slow
for turn in range(12):
    run = root / str(turn)
    dead_lock(run)
    if turn % 2:  # its first taker died as well, with the gate in its hand
        (run / "lock").rename(run / "kept")
        gate = run / f"lock.after-{lock._read(run / 'kept').token}"
        dead_lock(run).rename(gate)
        (run / "kept").rename(run / "lock")
    start = time.time() + 0.05
    for k in range(6):
        if os.fork() == 0:
            time.sleep(max(0, start - time.time()))
            try:
                with lock.Lock(run):
                    (run / f"won-{k}").touch()
                    while len(list(run.glob("lost-*"))) < 5 and time.time() < start + 60:  # a second winner: too few
                        time.sleep(0.01)
            except CheckpointError:
                (run / f"lost-{k}").touch()
            os._exit(0)
    for k in range(6):
        os.wait()
"""


def test_of_many_takers_at_once_one_wins(tmp_path):
    """Six processes find a dead lock, look at it and act at any moment; the winner holds it until all have tried."""
    line = [sys.executable, "-c", TAKERS, str(tmp_path)]
    subprocess.run(line, cwd=ROOT, timeout=SECONDS, check=True)
    for turn in range(12):
        found = names(tmp_path / str(turn))
        assert [n[:3] for n in found] == ["los"] * 5 + ["won"], found


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    with Lock(tmp_path):
        with pytest.raises(CheckpointError, match="in use"), Lock(tmp_path):
            pass
        assert names(tmp_path) == ["lock"]
    dead_lock(tmp_path)
    with Lock(tmp_path):
        pass
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the run folder cannot be written"), Lock(tmp_path / "file" / "run"):
        pass


# ---- an old run in the way of a new one


def old_run(run_dir):
    (run_dir / "checkpoints" / "step-1").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-1" / "weights").write_text("old")
    (run_dir / "metrics.jsonl").write_text("old")
    (run_dir / "config.yaml").write_text("old")
    (run_dir / "mine.txt").write_text("mine")


def content(run_dir):
    return {str(p.relative_to(run_dir)): p.read_text() for p in run_dir.rglob("*") if p.is_file()}


def test_killed_at_any_moment_the_old_run_or_the_new_one_is_there(tmp_path, monkeypatch):
    reference = tmp_path / "reference"
    old_run(reference)
    old, new = content(reference), {"mine.txt": "mine", "config.yaml": "new", "metrics.jsonl": ""}
    ended = set()
    for k in range(1, 60):
        run_dir = tmp_path / str(k)
        old_run(run_dir)

        def replace(k=k, run_dir=run_dir):
            calls = [0]

            def counted(real):
                def call(*args, **keys):
                    calls[0] += 1
                    if calls[0] == k:
                        os._exit(42)
                    return real(*args, **keys)

                return call

            for name in ("rename", "replace", "mkdir", "rmdir", "unlink", "open"):
                setattr(os, name, counted(getattr(os, name)))
            replaced = layout.retire(run_dir)
            layout.put(run_dir / "config.yaml", "new")
            layout.put(run_dir / "metrics.jsonl", "")
            (run_dir / "checkpoints").mkdir()
            layout.drop(replaced)

        code = forked(replace)
        assert code in (0, 42)
        for again in range(2):  # what mends may be killed as well
            layout.bring_back(run_dir)
            found = {name: text for name, text in content(run_dir).items() if not name.endswith(".tmp")}
            assert found in (old, new), f"call {k}, turn {again}: {names(run_dir)}"
        ended.add(found == new)
        assert not [n for n in names(run_dir) if n.startswith(("replaced", "removed"))]
        if code == 0:
            break
    assert ended == {True, False} and 8 < k < 59
