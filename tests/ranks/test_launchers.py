"""The command line under every launcher: the same weights, the same exit codes, faults survived, nothing left."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from hvd_train.launch import stub
from hvd_train.launch.start import environment
from hvd_train.run_folder.lock import Lock
from tests.command_lines import none_tells_a_secret

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
FRAMEWORKS = ["pytorch", "tensorflow"]
SECONDS = 240
SETTLE = 10.0  # for a killed launcher's processes to go
# name: (the words before "hvd-train fit", the words after it)
LAUNCHERS = {
    "-np": ([], ["-np", "2"]),
    "-np horovodrun": ([], ["-np", "2", "--launcher", "horovodrun"]),
    "mpirun": ([str(BIN / "mpirun"), "-np", "2"], []),
    "horovodrun": ([str(BIN / "horovodrun"), "-np", "2"], []),
    "horovodrun --mpi": ([str(BIN / "horovodrun"), "-np", "2", "--mpi"], []),
    "horovodrun --gloo": ([str(BIN / "horovodrun"), "-np", "2", "--gloo"], []),
}
SAME_AS = {"-np": "mpirun", "-np horovodrun": "horovodrun --gloo", "horovodrun": "mpirun", "horovodrun --mpi": "mpirun"}


def grid(others: list, launchers: list[str], is_long) -> list:
    """All pairs (launcher, other); ``is_long`` says which repeat what the launcher beneath or above shows."""
    made = []
    for launcher in launchers:
        alike = f"{launcher} starts {SAME_AS[launcher]}" if launcher in SAME_AS else f"-np starts {launcher}"
        mark = pytest.mark.long(f"{alike}: one of the two runs this in every run, in one framework at least")
        for other in others:
            made.append(pytest.param(launcher, other, marks=mark if is_long(launcher, other) else ()))
    return made


SHARED: set[str] = set()  # files in memory of ranks that a test looked for, mostly to kill them

# What Open MPI prints for a rank that was reading from the memory of another one as that was killed.
READ = re.compile(r"^\[.*\] Read -1, expected \d+, errno = 3\n", re.MULTILINE)


class Job:
    """One launched ``hvd-train fit``; its processes carry a mark, its temporary files lie in a folder of its own."""

    def __init__(self, launcher: str, folder: Path, *arguments: str, **variables: str | None) -> None:
        before, after = LAUNCHERS[launcher]
        self.mark, self.temporary, self.folder = uuid.uuid4().hex, folder / f"tmp-{uuid.uuid4().hex[:6]}", folder
        self.temporary.mkdir(parents=True)
        # The variables that Open MPI wants under root, which -np sets by itself.
        own = environment() if before else dict(os.environ)
        own |= {"HVD_TRAIN_TEST": self.mark, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        own = {name: value for name, value in (own | variables).items() if value is not None}
        line = [*before, str(BIN / "hvd-train"), "fit", *after, "-c", str(TINY), *arguments]
        self.started = subprocess.Popen(
            line, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HVD_TRAIN_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by rank."""
        names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
        found = {}
        for process in self.processes():
            try:
                own, line, name = process.environ(), process.cmdline(), process.name()
            except psutil.Error:
                continue
            number = next((own[n] for n in names if n in own), None)
            if number is not None and "fit" in line and "sh" not in name:
                found[int(number)] = process
                with suppress(OSError):
                    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                    SHARED.update(line.split()[-1] for line in maps if "/dev/shm/" in line and "(deleted)" not in line)
        return [found[rank] for rank in sorted(found)]

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.started.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                process.kill()
            out, err = self.started.communicate()
            pytest.fail(f"no end after {SECONDS} s:\n{out}\n{err}")
        stop = time.monotonic() + SETTLE
        while self.processes() and time.monotonic() < stop:
            time.sleep(0.1)
        left = self.processes()
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}"
        return self.started.returncode, out, READ.sub("", err)

    def wait_for(self, ready) -> None:
        stop = time.monotonic() + SECONDS
        while not ready():
            assert self.started.poll() is None, self.started.communicate()
            if time.monotonic() > stop:
                for process in self.processes():
                    process.kill()
                pytest.fail(f"the job does not get there: {self.started.communicate()}")
            time.sleep(0.02)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def cores_of_rank_0(folder: Path) -> int:
    return len(json.loads((folder / "environment.json").read_text())["cores_of_rank_0"])


def settings(folder: Path, *sets: str) -> list[str]:
    words = ["precision=64", "tensorboard=false", "log_every_n_steps=1", *sets]
    return ["--run-dir", str(folder), *(word for s in words for word in ("--set", s))]


@pytest.fixture(scope="module", autouse=True)
def nothing_in_shared_memory():
    """F40: of the ranks that were killed here."""
    yield
    stop = time.monotonic() + SETTLE
    while (left := [path for path in SHARED if Path(path).exists()]) and time.monotonic() < stop:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The summary of two ranks under ``-np``, which each framework and settings need to train only once."""
    found: dict[tuple, dict] = {}

    def get(framework: str, *sets: str) -> dict:
        key = (framework, *sets)
        if key not in found:
            folder = tmp_path_factory.mktemp(f"expected-{framework}")
            code, out, err = Job("-np", folder, *settings(folder / "run", f"framework={framework}", *sets)).end()
            assert code == 0, out + err
            assert cores_of_rank_0(folder / "run") == max(1, len(os.sched_getaffinity(0)) // 2)
            found[key] = summary(folder / "run")
        return found[key]

    return get


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


@pytest.mark.parametrize(
    ("launcher", "framework"),
    grid(
        FRAMEWORKS,
        [name for name in LAUNCHERS if name != "-np"],
        # TensorFlow's ranks are killed under Gloo below, and end with the bits of those under -np, which is mpirun.
        lambda launcher, framework: framework == "tensorflow",
    ),
)
def test_every_launcher_gives_the_same_weights(tmp_path, expected, framework, launcher):
    """F35, F36, F38, F41: also where a path holds what shells act on, strangers talk to the ports of the job, two jobs
    start at once, and without home or locale. And no secret can be read in a command line."""
    run, second = tmp_path / 'it\'s $(touch here) & a\n"rün"', tmp_path / "second"
    strange = {"LC_ALL": "C", "LANG": "tr_TR", "TZ": "Pacific/Chatham", "HOME": None}
    with nullcontext({}) if launcher.startswith("horovodrun") else none_tells_a_secret() as secrets:
        job = Job(launcher, tmp_path, *settings(run, f"framework={framework}"), **strange, **secrets)
        if launcher == "horovodrun --gloo":
            other = Job(launcher, tmp_path, *settings(second, f"framework={framework}"))
            assert other.end()[0] == 0
            assert summary(second)["weights_sha256"] == expected(framework)["weights_sha256"]
        if launcher == "-np horovodrun":
            assert {host for host, _ in pestered(job, tmp_path / "unpickled")} == {"127.0.0.1"}
            assert not (tmp_path / "unpickled").exists()
        code, out, err = job.end()
    assert code == 0, out + err
    assert not (tmp_path / "here").exists()
    found = summary(run)
    assert found["world_size"] == 2 and found["train_samples"] == 2 * 1438 and found["val_samples"] == 359
    assert found["weights_sha256"] == expected(framework)["weights_sha256"]
    assert out.count("done: validation loss") == 1 and out.count("  loss  accuracy") == 1, "one rank speaks"
    assert "Traceback" not in err and "absl" not in err
    files = sorted(p.name for p in run.iterdir())
    assert files == ["checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "summary.json"]
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


@pytest.mark.parametrize(
    ("launcher", "code"),
    grid([*CODES], [*LAUNCHERS], lambda launcher, code: code != 6 and launcher not in ("-np", *SAME_AS.values())),
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
    # horovodrun without --gloo is mpirun in a shell: it hands on the code as well.
    assert found == code, err


@pytest.mark.parametrize(
    "framework", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.long("PyTorch runs this in every run"))]
)
def test_a_worker_that_fails_on_one_rank_ends_all(tmp_path, framework):
    """F16, F31."""
    sets = [f"framework={framework}", "data.workers=2", "data.transforms=['tests.own_models:failing']", "max_epochs=9"]
    code, out, err = Job("mpirun", tmp_path, *settings(tmp_path / "run", *sets)).end()
    (line,) = [line for line in err.splitlines() if "the function failed on sample" in line]
    assert code == 3 and "ValueError: an image of 0 bytes; data.transforms.0: tests.own_models:failing" in line, err
    assert "Traceback" not in out + err and steps_taken(tmp_path / "run") > 0


@pytest.mark.parametrize(
    "launcher",
    ["mpirun", pytest.param("horovodrun --gloo", marks=pytest.mark.long("the same, under the other launcher"))],
)
def test_a_stream_that_ends_sooner_on_one_rank_ends_all(tmp_path, launcher):
    sets = ["data={name: 'tests.own_models:streams'}", "max_epochs=2"]
    code, out, err = Job(launcher, tmp_path, *settings(tmp_path / "run", *sets)).end()
    (line,) = [line for line in err.splitlines() if "the stream ended before" in line]
    words = r"error\[rank 1\]: .* sample 3\d\d of epoch 0, and its length is 600; data.name"
    assert code == 3 and re.search(words, line), err
    assert "Traceback" not in out + err and steps_taken(tmp_path / "run") > 0


def steps_taken(folder: Path) -> int:
    """How many steps were taken before the end."""
    return len([line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line])


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])  # -np gives all ranks one command line
def test_a_difference_between_ranks_ends_all_with_a_table(tmp_path, launcher):
    """F26: Each rank reads its own file, as on hosts that hold different versions of it."""
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
    """F39."""
    with Lock(tmp_path / "run") as held:
        before = held.path.read_bytes()
        code, out, err = Job(launcher, tmp_path, *settings(tmp_path / "run"), "--overwrite").end()
        assert code == 4 and err.count(f"in use by process {os.getpid()} on ") == 1 and "Traceback" not in err, err
        assert held.path.read_bytes() == before and list((tmp_path / "run").iterdir()) == [held.path]


# ---- a rank is lost; the run goes on where it was

EPOCHS = 25  # of 29 steps: a kill or a signal after 100 of them comes before the end
LONG = ["optim.lr=0.01", f"max_epochs={EPOCHS}", "checkpoint.save_top_k=0"]
OFTEN = "checkpoint.every_n_steps=10"


def lines_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("launcher", "framework"),
    grid(
        FRAMEWORKS,
        ["-np", "mpirun", "horovodrun --gloo"],
        lambda launcher, framework: launcher != "horovodrun --gloo" and (launcher, framework) != ("-np", "pytorch"),
    ),
)
def test_killed_and_resumed_is_bit_identical(tmp_path, expected, launcher, framework):
    """F01, F06: SIGKILL on a rank within an epoch, also while rank 0 saves: all end, and the resumed run ends with the
    bits of one that nobody killed."""
    cut, sets = tmp_path / "cut", [f"framework={framework}", *LONG, OFTEN]
    job = Job(launcher, tmp_path, *settings(cut, *sets), HVD_TRAIN_FAULT="rename:0:13:hang")
    job.wait_for(lambda: lines_of(cut) >= 105)
    job.ranks()[1].send_signal(signal.SIGKILL)
    code, out, err = job.end()
    assert "step-00000090" in os.listdir(cut / "checkpoints") and "step-00000100" not in os.listdir(cut / "checkpoints")
    assert code != 0 and "done:" not in out
    if launcher == "-np":
        assert code == 5 and err.startswith("error: rank 1 was ended by SIGKILL; in "), "the cause alone"
        assert err.count("\n") == 1
    assert not (cut / "summary.json").exists()
    code, out, err = Job(launcher, tmp_path, *settings(cut, *sets), "--resume", "auto").end()
    assert code == 0, err
    assert "resumed at step" in out
    a, b = expected(framework, *LONG), summary(cut)
    assert {k: v for k, v in a.items() if k != "samples_per_second"} == {
        k: v for k, v in b.items() if k != "samples_per_second"
    }
    rows = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "train"]
    assert steps == list(range(1, 29 * EPOCHS + 1)), "each step is reported once"


# ---- signals: (launcher, framework, who is sent it, the signal, the job's code)

ASKED = [
    ("-np", "pytorch", "job", signal.SIGHUP, 75),  # its terminal was closed; UCX would take the signal
    ("horovodrun --gloo", "tensorflow", "rank", signal.SIGTERM, 75),
]
ASKED_LONG = [
    ("mpirun", "pytorch", "rank", signal.SIGUSR1, 75),
    ("-np", "tensorflow", "job", signal.SIGINT, 130),
    ("-np", "tensorflow", "job", signal.SIGTERM, 75),
    ("-np", "tensorflow", "rank", signal.SIGTERM, 75),
    ("-np horovodrun", "pytorch", "job", signal.SIGUSR1, 75),
    ("mpirun", "tensorflow", "job", signal.SIGUSR1, 75),
    ("mpirun", "pytorch", "job", signal.SIGTERM, 1),  # mpirun's own, which leaves ranks a second to save
    ("mpirun", "pytorch", "rank", signal.SIGINT, 130),
    ("horovodrun --gloo", "pytorch", "job", signal.SIGTERM, None),  # two of its threads wait for the code: 75, 143 or 0
]
LONG_REASON = "the same signals and the same loop as in the cases that run always; a launch each, and one to go on"


@pytest.mark.parametrize(
    ("launcher", "framework", "who", "number", "code"),
    [*ASKED, *(pytest.param(*case, marks=pytest.mark.long(LONG_REASON)) for case in ASKED_LONG)],
)
def test_a_signal_saves_and_the_run_goes_on_bit_identical(tmp_path, expected, launcher, framework, who, number, code):
    """F10, F12, F13. All ranks leave at one step, within the seconds that launchers leave them; what goes on, through
    the death of a rank as well, ends with the bits of a run that nobody disturbed."""
    # Longer than the quarter of a second between two meetings, and saved by itself only with an epoch.
    cut, sets = tmp_path / "cut", [f"framework={framework}", *LONG]
    job = Job(launcher, tmp_path, *settings(cut, *sets, "data.workers=2"))
    job.wait_for(lambda: lines_of(cut) >= 100)
    sent = time.monotonic()
    (job.ranks()[1] if who == "rank" else job.started).send_signal(number)
    found, out, err = job.end()
    assert code in (None, found), err
    assert time.monotonic() - sent < 5 + SETTLE
    assert "done:" not in out and "Traceback" not in err and not (cut / "summary.json").exists(), err
    saved = int(sorted((cut / "checkpoints").glob("step-*"))[-1].name[5:])
    if code != 1:  # a second after its own SIGTERM mpirun kills: enough to save where nothing else computes
        assert out.count("stopped by SIG") == 1 and not (cut / "lock").exists()
        assert saved == json.loads((cut / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    job = Job("-np", tmp_path, *settings(cut, *sets), "--resume", "auto", "--max-restarts", "1")
    if (launcher, who) == ("-np", "job"):
        job.wait_for(lambda: lines_of(cut) >= saved + 100)
        job.ranks()[1].send_signal(signal.SIGKILL)
    found, out, err = job.end()
    assert found == 0, err
    assert f"resumed at step {saved}:" in out
    if (launcher, who) == ("-np", "job"):
        assert err.startswith("restart 1 of 1: rank 1 was ended by SIGKILL; in ") and err.count("\n") == 1, err
    a, b = expected(framework, *LONG), summary(cut)
    assert {k: v for k, v in a.items() if k != "samples_per_second"} == {
        k: v for k, v in b.items() if k != "samples_per_second"
    }
    rows = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "train"]
    assert steps == list(range(1, 29 * EPOCHS + 1)), "each step is reported once"


@pytest.mark.parametrize(
    ("framework", "who", "seconds"),
    [
        ("pytorch", "job", 0.0),  # while ranks load their framework
        ("tensorflow", "rank", 2.0),
        *(
            pytest.param(framework, who, seconds, marks=pytest.mark.long("other moments before the first step"))
            for framework in ("pytorch", "tensorflow")
            for who in ("job", "rank")
            for seconds in (0.5, 1.0, 1.5, 3.0)
        ),
    ],
)
def test_f12_a_signal_before_there_is_anything_to_save(tmp_path, framework, who, seconds):
    """While ranks load their framework, meet, compile; or just after, when they save."""
    job = Job("-np", tmp_path, *settings(tmp_path / "run", f"framework={framework}", "max_epochs=1000"))
    job.wait_for(lambda: len(job.ranks()) == 2)
    time.sleep(seconds)
    sent = time.monotonic()
    (job.ranks()[1] if who == "rank" else job.started).send_signal(signal.SIGTERM)
    found, out, err = job.end()
    assert found == 75 and "Traceback" not in err and time.monotonic() - sent < 5 + SETTLE, (found, err)
    assert "before the first step: there was nothing to save" in err or "and saved" in out, (out, err)


def test_resumed_on_another_number_of_ranks_and_in_the_other_framework(tmp_path):
    """F21, F22, F23: the first half on two ranks in PyTorch, the rest on one in Keras, is the run of one rank."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sets = ["optim.lr=0.01"]
    run = [str(BIN / "hvd-train"), "fit", "-c", str(TINY)]
    assert subprocess.run([*run, *settings(whole, *sets)], timeout=SECONDS, check=False).returncode == 0
    assert Job("-np", tmp_path, *settings(cut, *sets, "max_steps=40")).end()[0] == 0
    other = [*run, *settings(cut, *sets, "framework=tensorflow"), "--resume", "last"]
    refused = subprocess.run(other, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert refused.returncode == 2 and "framework: pytorch -> tensorflow" in refused.stderr
    assert subprocess.run([*other, "--allow-change", "framework"], timeout=SECONDS, check=False).returncode == 0
    a, b = summary(whole), summary(cut)
    assert b["framework"] == "tensorflow" and (a["steps"], a["train_samples"]) == (b["steps"], b["train_samples"])
    assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-9)


def test_a_world_that_horovod_does_not_see_is_refused(tmp_path):
    """F33: Without the launcher's MPI each process would train alone, and nobody would notice."""
    alone = dict(os.environ) | {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    line = [str(BIN / "hvd-train"), "fit", "-c", str(TINY), *settings(tmp_path / "run")]
    done = subprocess.run(line, env=alone | environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 5, done.stderr
    assert "started 2 ranks, but Horovod sees a world of 1" in done.stderr


# ---- faults on purpose, and ranks that stop (F04, F07, F08, F14)

FAULTS = [
    ("-np", "pytorch", "step:1:60:stop", "rank 1 is stopped (SIGSTOP), for more than 3 s; in training, step 60"),
    ("-np horovodrun", "tensorflow", "step:0:60:hang", "rank 0 has not moved for 3 s (in _hang, "),
]
FAULTS_LONG = [
    ("-np horovodrun", "pytorch", "rename:0:2:kill", "rank 0 was ended by SIGKILL; in "),
    ("-np", "tensorflow", "step:1:60:stop", "rank 1 is stopped (SIGSTOP), for more than 3 s; in training, step 60"),
    ("-np", "pytorch", "manifest:0:2:kill", "rank 0 was ended by SIGKILL; in "),
    ("-np", "tensorflow", "commit:0:2:kill", "rank 0 was ended by SIGKILL; in "),
    ("-np", "pytorch", "step:1:60:leave", "rank 1 left before the end of the training"),
    ("-np", "tensorflow", "write:0:2:eio", ""),
]
OTHER = pytest.mark.long("the same watch over other points and ranks: scripts/torture takes them at random")


@pytest.mark.parametrize(
    ("launcher", "framework", "fault", "words"),
    [*FAULTS, *(pytest.param(*case, marks=OTHER) for case in FAULTS_LONG)],
)
def test_a_fault_starts_all_again_to_the_same_bits(tmp_path, expected, monkeypatch, launcher, framework, fault, words):
    """F02, F04, F08, F14, F17."""
    sets = [f"framework={framework}", *LONG]
    monkeypatch.setenv("HVD_TRAIN_FAULT", fault)
    more = ["--max-restarts", "1", "--set", OFTEN, "--set", "watchdog_s=3"]
    code, out, err = Job(launcher, tmp_path, *settings(tmp_path / "run", *sets), *more).end()
    assert code == 0, err
    assert (f"restart 1 of 1: {words}" in err) if words else "restart" not in err, err
    monkeypatch.delenv("HVD_TRAIN_FAULT")
    assert summary(tmp_path / "run")["weights_sha256"] == expected(framework, *LONG)["weights_sha256"]


ALONE = [
    ("mpirun", "pytorch", "step:1:60:stop",
     "error[rank 1]: is stopped (SIGSTOP), for more than 3 s; in training, step 60"),
    pytest.param("horovodrun --gloo", "tensorflow", "step:1:60:hang",
                 "error[rank 1]: has not moved for 3 s (in _hang, ", marks=OTHER),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "framework", "fault", "words"), ALONE)
def test_f14_ranks_watch_one_another_where_nobody_else_does(tmp_path, monkeypatch, launcher, framework, fault, words):
    monkeypatch.setenv("HVD_TRAIN_FAULT", fault)
    sets = settings(tmp_path / "run", f"framework={framework}", *LONG, "watchdog_s=3")
    code, out, err = Job(launcher, tmp_path, *sets).end()
    assert code == 5 and words in out + err, out + err


@pytest.mark.parametrize(
    ("launcher", "framework"),
    [("-np", "tensorflow"), pytest.param("-np horovodrun", "pytorch", marks=pytest.mark.long("times waits eagerly"))],
)
def test_a_slow_rank_is_named_and_the_job_finishes(tmp_path, monkeypatch, launcher, framework):
    """50 ms after each step of rank 1, from the second epoch on."""
    monkeypatch.setenv("HVD_TRAIN_FAULT", "step:1:30:delay")
    sets = settings(tmp_path / "run", f"framework={framework}", "max_epochs=5")
    code, out, err = Job(launcher, tmp_path, *sets).end()
    assert code == 0 and "rank 1 is slow: the others wait for it " in out, out + err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    slow = [row for row in rows if row["event"] == "straggler"]
    late = [row for row in slow if row["step"] > 40]  # before, the machine may have made a rank slow
    assert {row["rank"] for row in late} == {1} and all(0 < row["since"] < row["step"] for row in late), slow
    assert max(row["share"] for row in slow) > 0.4 and max(row["seconds"] for row in slow) > 0.03, slow


@pytest.mark.parametrize(
    ("launcher", "framework"),
    [("-np", "pytorch"), pytest.param("horovodrun", "tensorflow", marks=pytest.mark.long("the other launcher"))],
)
def test_a_save_that_hangs_ends_the_job(tmp_path, monkeypatch, launcher, framework):
    """The second one, at its first file; the third one waits for it."""
    monkeypatch.setenv("HVD_TRAIN_FAULT", "write:0:3:hang")
    rule = ["checkpoint.every_n_steps=20", "checkpoint.every_n_epochs=0", "watchdog_s=2"]
    sets = settings(tmp_path / "run", f"framework={framework}", *LONG, *rule)
    code, out, err = Job(launcher, tmp_path, *sets).end()
    told = re.findall(r"error\[rank 0\]: (.*)", out + err)
    where = re.escape(str(tmp_path / "run" / "checkpoints" / "step-00000040"))
    assert code == 4 and len(told) == 1, out + err
    assert re.match(f"the checkpoint cannot be written: nothing has moved for 2 s; {where}; look for a disk", told[0])
    assert "step-00000020" in os.listdir(tmp_path / "run" / "checkpoints")


SPARED = [("-np", "pytorch"), ("-np horovodrun", "pytorch"), ("-np", "tensorflow"), ("-np horovodrun", "tensorflow")]
SPARED[1:] = [pytest.param(*case, marks=pytest.mark.long("the same places, handed over alike")) for case in SPARED[1:]]


@pytest.mark.parametrize(("launcher", "framework"), SPARED)
def test_spares_take_the_places_of_ranks_to_the_same_bits(tmp_path, expected, monkeypatch, launcher, framework):
    """Rank 1 stands in the first start until the spares are ready; then it is killed, and then what stands for it. What
    is repeated is what came after the newest snapshot, which lies in memory; before the end none lies on the disk."""
    own = ["optim.lr=0.01", "max_epochs=6", "checkpoint.every_n_epochs=0"]
    sets = [f"framework={framework}", *own]
    monkeypatch.setenv("HVD_TRAIN_FAULT", "step:1:31:stop")
    more = ["--max-restarts", "2", "--spares", "2", "--set", "checkpoint.snapshot_every_n_steps=5"]
    job = Job(launcher, tmp_path, *settings(tmp_path / "run", *sets), *more)

    def find(word):
        found = {}
        for process in job.processes():
            with suppress(psutil.Error):
                found[process] = process.cmdline()
        return [(process, line) for process, line in found.items() if word in line]

    job.wait_for(lambda: find("hvd_train.cli.spare"))
    ((spare, line),) = find("hvd_train.cli.spare")
    job.wait_for(lambda: f"@{line[3]}" in Path("/proc/net/unix").read_text())
    job.wait_for(lambda: job.ranks()[1].status() == psutil.STATUS_STOPPED)
    job.ranks()[1].kill()
    job.wait_for(lambda: len(spare.children()) == 2)
    next(process for process, line in find(stub.__file__) if line[2] == "-S").kill()
    code, out, err = job.end()
    assert code == 0 and err.count("restart ") == 2 and "in training, step 31" in err, err
    assert out.count("resumed at step 25:") + out.count("resumed at step 30:") >= 1, out
    assert not list(Path("/dev/shm").glob(f"hvd-train-snapshots-{job.started.pid}-*"))
    monkeypatch.delenv("HVD_TRAIN_FAULT")
    assert summary(tmp_path / "run")["weights_sha256"] == expected(framework, *own)["weights_sha256"]


def test_a_full_disk_ends_with_what_was_saved_before(tmp_path, monkeypatch):
    """F07."""
    monkeypatch.setenv("HVD_TRAIN_FAULT", "manifest:0:2:enospc")
    code, out, err = Job("-np", tmp_path, *settings(tmp_path / "run", *LONG), "--set", OFTEN).end()
    assert code == 4 and "the checkpoint cannot be written: No space left on device" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000010"]
