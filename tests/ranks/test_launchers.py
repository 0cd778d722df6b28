"""The command line under every launcher: the same weights, the same exit codes, nothing left behind."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvd_train.launch.start import environment
from hvd_train.run_folder.lock import Lock
from tests.command_lines import none_tells_a_secret
from tests.ranks.job import (
    BIN,
    LAUNCHERS,
    SECONDS,
    TINY,
    Job,
    cores_of_rank_0,
    settings,
    steps_taken,
    summary,
)


def pestered(job: Job, canary: Path) -> set:
    """Sends what is no message of the job's, and a pickle that would make a file, to every port that it listens on
    before its ranks train; gives the addresses."""
    pickled = pickle.dumps(Canary(canary))
    words = [b"\0" * 64, pickled, len(pickled).to_bytes(4, "big") + b"x" * 32 + pickled]
    words.append(b"PUT /worker_addresses/0 HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(pickled) + pickled)
    found = set()

    def train():
        for process in job.processes():
            with suppress(psutil.Error):
                for one in process.net_connections("tcp"):
                    if one.status == psutil.CONN_LISTEN and one.laddr not in found:
                        found.add(one.laddr)
                        for word in words:
                            with suppress(OSError), socket.create_connection(one.laddr, timeout=1) as stranger:
                                stranger.sendall(word)
        return len(job.ranks()) == 2

    job.wait_for(train)
    train()
    return found


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "-np"])
def test_every_launcher_gives_the_same_weights(tmp_path, expected, launcher):
    """Also where a path holds what shells act on, strangers talk to the ports of the job, two jobs
    start at once, and without home or locale. And no secret can be read in a command line."""
    run, second = tmp_path / 'it\'s $(touch here) & a\n"rün"', tmp_path / "second"
    strange = {"LC_ALL": "C", "LANG": "tr_TR", "TZ": "Pacific/Chatham", "HOME": None}
    with none_tells_a_secret() as secrets:
        job = Job(launcher, tmp_path, *settings(run), **strange, **secrets)
        if launcher == "horovodrun --gloo":
            assert Job(launcher, tmp_path, *settings(second)).end()[0] == 0
            assert summary(second)["weights_sha256"] == expected("pytorch")["weights_sha256"]
        if launcher == "-np horovodrun":
            assert {host for host, _ in pestered(job, tmp_path / "unpickled")} == {"127.0.0.1"}
            assert not (tmp_path / "unpickled").exists()
        code, out, err = job.end()
    assert code == 0, out + err
    assert not (tmp_path / "here").exists()
    found = summary(run)
    assert found["world_size"] == 2 and found["train_samples"] == 2 * 1438 and found["val_samples"] == 359
    assert found["weights_sha256"] == expected("pytorch")["weights_sha256"]
    assert out.count("done: validation loss") == 1 and out.count("  loss  accuracy") == 1, "one rank speaks"
    assert "Traceback" not in err and "absl" not in err
    files = sorted(p.name for p in run.iterdir())
    assert files == ["checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "steps.jsonl", "summary.json"]
    if launcher != "mpirun":  # which binds by itself
        assert cores_of_rank_0(run) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert not [p for p in job.temporary.rglob("*") if p.is_file()], "no temporary file is left"


def test_one_rank_alone_needs_no_launcher(tmp_path, expected):
    line = [str(BIN / "hvd-train"), "fit", "-c", str(TINY), *settings(tmp_path / "run")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and done.stderr == ""
    found = summary(tmp_path / "run")
    assert found["world_size"] == 1
    assert found["val_loss"] == pytest.approx(expected("pytorch")["val_loss"], rel=1e-9)


CODES = {
    2: (["model.name=nothing"], "there is no model 'nothing'"),
    3: (["data.name=npz", "data.path=/nowhere/x.npz"], "there is no such file or folder"),
    4: (["run_dir=/proc/nowhere"], "the run folder cannot be written"),
    6: (["optim.lr=1e300", "max_epochs=3"], "the training loss is"),
}


# All launchers hand on the code of a training, and some those of ranks that do not come so far.
@pytest.mark.parametrize(
    ("launcher", "code"), [*((name, 6) for name in LAUNCHERS), ("mpirun", 2), ("horovodrun --gloo", 3), ("-np", 4)]
)
def test_exit_codes_and_one_line(tmp_path, launcher, code):
    sets, words = CODES[code]
    arguments = settings(tmp_path / "run", *sets)
    if "run_dir" in sets[0]:
        arguments = arguments[2:]
    found, out, err = Job(launcher, tmp_path, *arguments).end()
    lines = [line for line in err.splitlines() if "error" in line and words in line]
    assert len(lines) == 1, err
    assert "error[rank 0]: " in lines[0]
    assert "Traceback" not in out + err
    assert found == code, err


def test_a_worker_that_fails_on_one_rank_ends_all(tmp_path):
    sets = ["data.workers=2", "data.transforms=['tests.own_models:failing']", "max_epochs=9"]
    code, out, err = Job("mpirun", tmp_path, *settings(tmp_path / "run", *sets)).end()
    (line,) = [line for line in err.splitlines() if "the function failed on sample" in line]
    assert code == 3 and "ValueError: an image of 0 bytes; data.transforms.0: tests.own_models:failing" in line, err
    assert "Traceback" not in out + err and steps_taken(tmp_path / "run") > 0


def test_a_stream_that_ends_sooner_on_one_rank_ends_all(tmp_path):
    sets = ["data={name: 'tests.own_models:streams'}", "max_epochs=2"]
    code, out, err = Job("mpirun", tmp_path, *settings(tmp_path / "run", *sets)).end()
    (line,) = [line for line in err.splitlines() if "the stream ended before" in line]
    words = r"error\[rank 1\]: .* sample 3\d\d of epoch 0, and its length is 600; data.name"
    assert code == 3 and re.search(words, line), err
    assert "Traceback" not in out + err and steps_taken(tmp_path / "run") > 0


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])  # -np gives all ranks one command line
def test_a_difference_between_ranks_ends_all_with_a_table(tmp_path, launcher):
    """Each rank reads its own file, as on hosts that hold different versions of it."""
    wrapper = tmp_path / "fit.sh"
    wrapper.write_text(
        f'#!/bin/sh\nrank=${{HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}}\nexec {BIN}/hvd-train fit "$@" --seed $rank\n'
    )
    wrapper.chmod(0o755)
    before, _ = LAUNCHERS[launcher]
    line = [*before, str(wrapper), "-c", str(TINY), *settings(tmp_path / "run")]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2, done.stderr
    assert "the ranks differ" in done.stderr and "config" in done.stderr
    assert "rank 0" in done.stderr and "rank 1" in done.stderr and done.stderr.count("the ranks differ") == 1


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_a_run_folder_in_use_is_refused_on_all_ranks(tmp_path, launcher):
    with Lock(tmp_path / "run") as held:
        before = held.path.read_bytes()
        code, out, err = Job(launcher, tmp_path, *settings(tmp_path / "run"), "--overwrite").end()
        assert code == 4 and err.count(f"in use by process {os.getpid()} on ") == 1 and "Traceback" not in err, err
        assert held.path.read_bytes() == before and list((tmp_path / "run").iterdir()) == [held.path]


def test_a_world_that_horovod_does_not_see_is_refused(tmp_path):
    """Without the launcher's MPI each process would train alone, and nobody would notice."""
    alone = dict(os.environ) | {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    line = [str(BIN / "hvd-train"), "fit", "-c", str(TINY), *settings(tmp_path / "run")]
    done = subprocess.run(line, env=alone | environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 5, done.stderr
    assert "started 2 ranks, but Horovod sees a world of 1" in done.stderr
