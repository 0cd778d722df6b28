"""Spares: a place is handed over and taken, and whoever dies, nobody is left. Ranks of a few lines, real processes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from hvd_train.launch import stub
from tests.limits import SECONDS, until

ROOT = Path(__file__).parents[2]
SPARE = """
import os, sys, time
from hvd_train.cli import main, spare
def rank():
    print(sys.argv, os.getcwd(), os.environ.get("PLACE"), flush=True)
    word, _, value = sys.argv[1].partition(":")
    if word == "sleep":
        time.sleep(600)
    sys.exit(int(value))
main.main, spare.warm = rank, lambda *given: None
spare.main()
"""
SUPERVISOR = """
import subprocess, sys
from hvd_train.launch.process import end_with_parent
line = [sys.executable, "-c", {spare!r}, sys.argv[1], "pytorch", "auto", "2", "2", ""]
subprocess.Popen(line, preexec_fn=end_with_parent).wait()
"""


@pytest.fixture
def spare():
    """(its name, the supervisor, the spare)"""
    name = f"hvd-train-test-{secrets.token_hex(8)}"
    code = textwrap.dedent(SUPERVISOR).format(spare=SPARE)
    started = subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT)
    until(lambda: f"@{name}" in Path("/proc/net/unix").read_text())
    (process,) = psutil.Process(started.pid).children()
    yield name, started, process
    started.kill()
    started.wait()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def place(name, word, folder):
    line = [sys.executable, "-I", "-S", stub.__file__, name, sys.executable, "-P", "-m", "hvd_train", word]
    env = os.environ | {"PLACE": "here"}
    return subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_place_is_taken_and_the_code_comes_back(spare, tmp_path):
    name, _, process = spare
    for code in (0, 7):
        started = place(name, f"exit:{code}", tmp_path)
        out, _ = started.communicate(timeout=SECONDS)
        assert (started.returncode, out) == (code, f"['hvd-train', 'exit:{code}'] {tmp_path} here\n")
    busy = [place(name, "sleep", tmp_path) for _ in range(2)]
    first, second = until(lambda: len(process.children()) == 2 and process.children())
    third = place(name, "--version", tmp_path)  # of two spares none is left: it becomes what it stands for
    assert third.communicate(timeout=SECONDS)[0].startswith("hvd-train, version")
    first.kill()  # a rank: its stub ends as it did
    assert until(lambda: [one for one in busy if one.poll() is not None])[0].returncode == -signal.SIGKILL
    (left,) = [one for one in busy if one.poll() is None]
    left.kill()  # a stub: its rank ends
    until(lambda: not alive(second) and not process.children())  # it is waited for a moment after its end
    assert alive(process)
    for one in busy:
        one.communicate(timeout=SECONDS)


@pytest.mark.parametrize("who", ["spare", "supervisor", "launcher"])
def test_whoever_is_killed_no_rank_is_left(spare, tmp_path, who):
    name, supervisor, process = spare
    launcher = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -I -S {stub.__file__} {name} {sys.executable} -P -m hvd_train sleep; true"],
        stdout=subprocess.DEVNULL,
    )
    (rank,) = until(process.children)
    (stands,) = psutil.Process(launcher.pid).children()
    os.kill({"spare": process.pid, "supervisor": supervisor.pid, "launcher": launcher.pid}[who], signal.SIGKILL)
    until(lambda: not alive(rank) and not alive(stands))
    launcher.wait(SECONDS)


def test_a_spare_whose_name_is_taken_says_so():
    name = f"hvd-train-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{name}")
        line = [sys.executable, "-c", SPARE, name, "pytorch", "auto", "2", "2", ""]
        run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    told = f"spare: the socket {name} cannot be opened (Address already in use); ranks load all by themselves\n"
    assert (run.returncode, run.stdout, run.stderr) == (1, "", told)


def test_without_a_spare_it_becomes_the_rank(tmp_path):
    started = place("hvd-train-nobody", "--version", tmp_path)
    assert started.communicate(timeout=SECONDS)[0].startswith("hvd-train, version") and started.returncode == 0


def test_it_does_not_become_the_rank_of_a_launcher_that_is_gone(tmp_path):
    name, written = f"hvd-train-test-{secrets.token_hex(8)}", tmp_path / "written"
    program = f'{sys.executable} -c \'open("{written}", "w")\''
    with socket.socket(socket.AF_UNIX) as spare:
        spare.bind(f"\0{name}")
        spare.listen()
        launcher = subprocess.Popen(["bash", "-c", f"{sys.executable} -I -S {stub.__file__} {name} {program}; true"])
        connection = spare.accept()[0]
        (stands,) = psutil.Process(launcher.pid).children()
        launcher.kill()
        launcher.wait(SECONDS)
        connection.close()  # the spare is gone as well
    until(lambda: not alive(stands))
    assert not written.exists()


def test_what_is_no_request_is_refused_and_the_spare_goes_on(spare, tmp_path):
    name, _, process = spare
    texts = [b"", b"\xff" * 8, stub.LENGTH.pack(3) + b"{}]", stub.LENGTH.pack(4) + b"null", stub.LENGTH.pack(9)]
    for text in [*texts, stub.LENGTH.pack(8) + json.dumps([1, {}]).encode()[:8]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name}")
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(SECONDS)
            assert connection.recv(1) == b""
    assert alive(process) and place(name, "exit:3", tmp_path).wait(SECONDS) == 3
