"""Output that nobody takes: a training goes on, a lost result is an error, and no file gets a stream's number."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_train.cli import standard_streams
from tests.cli.running import ROOT, SECONDS

HVD = [sys.executable, "-m", "hvd_train"]


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "HVD": " ".join(HVD)}
    own.pop("PYTHONUNBUFFERED", None)
    words = ["bash", "-c", line]
    return subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("ranks", ["", "-np 2"])
def test_a_training_outlives_its_reader(tmp_path, ranks):
    """``hvd-train fit 2>&1 | head -1``; the run folder has all lines."""
    sets = "--set tensorboard=false --set max_epochs=3 --run-dir run"
    line = f"$HVD fit {ranks} -c {ROOT}/scripts/configs/tiny.yaml {sets}"
    done = shell(f"set -o pipefail; {line} 2>&1 | head -1", tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("pytorch, mlp: ") and done.stdout.count("\n") == 1, done
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 3


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("$HVD config >&-", 0, ""),
        ("$HVD config >&- 2>&- <&-", 0, ""),
        ("$HVD config --explain | true; exit ${PIPESTATUS[0]}", 0, ""),
        ("$HVD nothing 2>&-", 2, ""),
        ("$HVD nothing 2>/dev/full", 2, ""),
        (
            "$HVD config >/dev/full",
            2,
            "error: the output cannot be written: No space left on device; standard output; send it to another file\n",
        ),
    ],
)
def test_output_that_cannot_be_written(tmp_path, line, code, error):
    done = shell(line, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


def test_a_name_that_cannot_be_printed_ends_no_run(tmp_path):
    """It was a UnicodeEncodeError after the run was done, and with --max-restarts two restarts and "given up"."""
    folder = "\u00fc\n\x1b[31merror: x"
    sets = "--set tensorboard=false --set max_epochs=1"
    line = f"$HVD fit -c {ROOT}/scripts/configs/tiny.yaml {sets} --run-dir '{folder}'"
    done = shell(f"PYTHONIOENCODING=ascii {line}", tmp_path)
    assert done.returncode == 0 and (tmp_path / folder / "summary.json").exists(), done.stderr
    assert done.stdout.endswith("run folder \\xfc??[31merror: x\n")


def read_all(descriptor):
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts)


@pytest.mark.parametrize("kept", [1 << 20, 5000])
def test_a_reader_that_pauses_holds_nothing_up(monkeypatch, kept):
    """A paused ``less``: the line of a step waited for it, and the watchdog ended the run."""
    monkeypatch.setattr(standard_streams, "READ_SECONDS", 0.1)
    monkeypatch.setattr(standard_streams, "KEPT_BYTES", kept)
    end, given = os.pipe()
    fcntl.fcntl(given, fcntl.F_SETPIPE_SZ, 4096)
    out, err = standard_streams._Guarded(given), standard_streams._Guarded(given)
    out.silent = err.silent = True
    lines = [b"line %05d\n" % k for k in range(4000)]
    began = time.monotonic()
    for k, line in enumerate(lines):
        assert (out, err)[k == 3 and kept > 5000].write(line) == len(line)
    assert time.monotonic() - began < SECONDS / 10
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(read_all, end)
        out.drain(SECONDS)
        err.drain(SECONDS)
        os.close(given)
        content = told.result()
    if kept > 5000:
        assert sorted(content.splitlines(True)) == lines
    else:
        whole, _, rest = content.partition(b"\n... ")
        left_out = int(rest.split()[0].replace(b",", b""))
        assert rest.endswith(b" bytes left out: nobody read them\n") and len(whole) + left_out == 11 * len(lines)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_training_outlives_a_reader_that_pauses(tmp_path, launcher):
    """The watchdog ended such a run."""
    sets = "--set watchdog_s=3 --set log_every_n_steps=1 --set tensorboard=false --set max_epochs=150 --run-dir run"
    fit = f"$HVD fit -np 2 --launcher {launcher} -c {ROOT}/scripts/configs/tiny.yaml {sets}"
    small = "import fcntl, os, subprocess, sys; a, b = os.pipe(); fcntl.fcntl(b, fcntl.F_SETPIPE_SZ, 4096)"
    (tmp_path / "paused.py").write_text(
        f"""{small}
import time
run = subprocess.Popen(["bash", "-c", sys.argv[1]], stdout=b, stderr=b)
os.close(b)
time.sleep(9)
lines = os.fdopen(a).read().splitlines()
print(run.wait(), sum(map(len, lines)) > 8192, lines[-1])
"""
    )
    done = shell(f"{sys.executable} paused.py '{fit}'", tmp_path)
    assert done.stdout.startswith("0 True done: "), done


LAUNCHED = """
import sys
from hvd_train.cli import standard_streams
from hvd_train.launch import process
standard_streams.guard("stderr", *sys.argv[1:])
try:
    print(process.run(["echo", "a score"], None)[0], file=sys.stderr)
except Exception as error:
    print(type(error).__name__, error, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("silent", "error"), [("", "ConfigError the output cannot be written: No space"), ("stdout", "0")]
)
def test_what_ranks_print_is_not_lost_without_a_word(tmp_path, silent, error):
    """``eval -np 2 >/dev/full`` ended with 0."""
    (tmp_path / "launched.py").write_text(LAUNCHED)
    assert shell(f"{sys.executable} launched.py {silent} >/dev/full", tmp_path).stderr.startswith(error)
    assert shell(f"{sys.executable} launched.py {silent}", tmp_path).stdout == "a score\n"


PROGRAM = """
import os, sys
from hvd_train.cli import standard_streams
standard_streams.guard("stdout", "stderr")
standard_streams.guard("stdout", "stderr")
file = open("data", "wb")
print("a line", flush=True)
os.write(1, b"what a library prints")
file.write(b"data %d" % file.fileno())
file.close()
print("", file=sys.stderr)
assert not sys.stdout.isatty() and sys.stdout.fileno() == 1
subprocess = __import__("subprocess")
subprocess.run(["echo", "of a child"], check=True)
"""


@pytest.mark.parametrize("flag", ["", "-u"])
@pytest.mark.parametrize("streams", ["0<&- 1>&-", "0<&- 1>&- 2>&-", "1>/dev/full 2>/dev/full"])
def test_no_file_takes_the_place_of_a_stream(tmp_path, streams, flag):
    done = shell(f"{sys.executable} {flag} -c '{PROGRAM}' {streams}", tmp_path)
    assert done.returncode == 0 and done.stdout == "" and done.stderr.strip() == "", done
    name, number = (tmp_path / "data").read_text().split()
    assert name == "data" and int(number) > 2
