"""Slurm for real: two nodes on this host. Ranks of a plain srun, and batch jobs of hvd-train submit."""

from __future__ import annotations

import csv
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvd_train.cli import guide
from hvd_train.launch.start import command, environment
from tests.command_lines import none_tells_a_secret
from tests.hosts import network
from tests.limits import SECONDS, until
from tests.slurm.cluster import WHERE, Cluster

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
NODES = ["-N", "2"]


class Done:
    def __init__(self, run: subprocess.CompletedProcess) -> None:
        self.code, self.out = run.returncode, run.stdout
        # srun has a line for each task that failed
        self.err = "".join(
            line for line in run.stderr.splitlines(True) if not line.startswith(("srun: ", "slurmstepd"))
        )

    def rows(self) -> list[dict]:
        return sorted((json.loads(line) for line in self.out.splitlines()), key=lambda r: int(r["HOROVOD_RANK"]))


def variables(cluster, **more: str) -> dict[str, str]:
    """A user's: the environment is active; the secret lies in a folder of the test's."""
    own = {"PATH": f"{BIN}:{cluster.environment['PATH']}", "PYTHONPATH": str(ROOT)}
    own["OMP_NUM_THREADS"] = "1"  # as horovodrun's ranks, which share this host's cores
    return {**cluster.environment, **own, "XDG_CONFIG_HOME": str(cluster.folder / "config"), **more}


def srun(cluster, *line: str, **more: str) -> Done:
    own = variables(cluster, **more)
    words = cluster.on(cluster.nodes[0], "srun", *line)
    run = subprocess.run(
        words, cwd=cluster.folder, env=own, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return Done(run)


def meet(cluster, size: int, *does: str, **more: str) -> Done:
    return srun(cluster, *NODES, "-n", str(size), "python", str(HERE / "meet.py"), *does, **more)


# ---- rendezvous of the ranks of a step


def test_every_rank_knows_its_place(cluster):
    """Three ranks, two of them on the first node."""
    done = meet(cluster, 3)
    assert done.code == 0 and done.err == "", done.err
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    places = [tuple(int(row[f"HOROVOD_{name}"]) for name in names) for row in done.rows()]
    assert places == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]
    assert [row["HOROVOD_HOSTNAME"] for row in done.rows()] == ["node1", "node1", "node2"]
    assert len({row["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for row in done.rows()}) == 1
    assert {row["HOROVOD_CONTROLLER"] + row["HOROVOD_CPU_OPERATIONS"] for row in done.rows()} == {"gloogloo"}
    assert {row["HOROVOD_GLOO_IFACE"] for row in done.rows()} == {"lo"}
    secret = cluster.folder / "config" / "hvd_train" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and secret.read_text() not in done.out


def test_a_step_of_one_task_is_one_rank(cluster):
    # Without a name it is the second node, where Slurm still ends the step of the test before on the first.
    done = srun(cluster, "-w", "node1", "-n", "1", "python", str(HERE / "meet.py"))
    assert done.code == 0 and json.loads(done.out) == {"launcher": "", "node": "node1"}


def test_the_shell_of_a_task_among_several_starts_ranks_on_its_host(cluster):
    """``srun -n 4 --pty bash``: what the message advises works. mpirun asked Slurm for them, and waited."""
    fit = f"hvd-train fit -c {TINY} --set max_epochs=1"
    lines = [f"{fit} --run-dir alone", "export SLURM_STEP_NUM_TASKS=1", f"{fit} -np 2 --run-dir ranks", "exit"]
    terminal, screen = os.openpty()
    shell = subprocess.Popen(
        ["srun", "-n", "4", "--pty", "bash", "--norc"], cwd=cluster.folder, env=variables(cluster),
        stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
    )  # fmt: skip
    os.close(screen)
    try:
        os.write(terminal, "\n".join([*lines, ""]).encode())
        shown, stop = b"", time.monotonic() + SECONDS
        while shell.poll() is None and time.monotonic() < stop:
            if select.select([terminal], [], [], 0.2)[0]:
                with suppress(OSError):  # its end
                    shown += os.read(terminal, 1 << 16)
    finally:
        shell.kill()
        os.close(terminal)
    assert b"error: this shell is one of 4 tasks of its step" in shown, shown.decode()
    assert json.loads((cluster.folder / "ranks" / "summary.json").read_text())["world_size"] == 2, shown.decode()
    assert not (cluster.folder / "alone").exists()


def test_two_commands_in_a_step_and_two_steps_at_once(cluster):
    """The second command of a step meets the server of the first one, or what is left of it, at its port."""
    line = f"python {HERE / 'meet.py'} && python {HERE / 'meet.py'}"
    both = [
        subprocess.Popen(
            ["srun", *NODES, "-n", "3", "bash", "-c", line],
            env=variables(cluster), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for started in both:
        out, err = started.communicate(timeout=SECONDS)
        assert started.returncode == 0, err
        assert sorted(json.loads(line)["HOROVOD_RANK"] for line in out.splitlines()) == list("001122")


@pytest.mark.parametrize(
    ("does", "code", "expected"),
    [
        ("2:leaves", 5, ["error[rank 0]: rank 2 did not join within 4 s; srun; look for what ended or blocked them"]),
        ("0:leaves", 5, [f"error[rank {k}]: rank 0 was not found on node1 within 4 s: nobody who" for k in (1, 2)]),
        (
            "2:fails",
            3,
            ["error[rank 0]: rank 2 ended with exit code 3 before all ranks had joined", "error[rank 2]: no su"],
        ),
        ("0:fails", 3, ["error[rank 0]: no such file; rank 0's disk"]),
    ],
)
def test_a_rank_that_never_comes(cluster, does, code, expected):
    """Nobody waits for ever, and a rank that ends with an error takes the others with it at once."""
    limit = "4" if "leaves" in does else "600"
    began = time.monotonic()
    # Of this cluster alone: another one on this machine has steps of the same numbers, and its rank 2 would come.
    secret = secrets.token_hex(8)
    done = meet(cluster, 3, does, HOROVOD_START_TIMEOUT=limit, HVD_TRAIN_SECRET=secret)
    assert done.code == code, done.err
    lines = sorted(done.err.splitlines())
    assert len(lines) == len(expected) and all(a.startswith(b) for a, b in zip(lines, expected, strict=True)), lines
    assert time.monotonic() - began < SECONDS


def test_ranks_with_another_secret_are_turned_away(cluster):
    line = f"HVD_TRAIN_SECRET={secrets.token_hex(8)}$SLURM_NODEID python {HERE / 'meet.py'}"
    done = srun(cluster, *NODES, "-n", "2", "bash", "-c", line, HOROVOD_START_TIMEOUT="4")
    assert done.code == 5 and "error[rank 0]: rank 1 did not join within 4 s" in done.err
    assert "error[rank 1]: rank 0 was not found on node1 within 4 s: nobody who knows the secret" in done.err


@pytest.fixture(scope="module")
def apart(tmp_path_factory, cluster):
    """A Slurm whose nodes have separate networks and addresses."""
    if why := network.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("apart")
    (folder / "network").mkdir()
    hosts = network.Network(folder / "network", 2)
    made = Cluster(folder / "slurm", hosts)
    try:
        hosts.start()
        made.start()
        yield made
    finally:
        made.stop()
        hosts.stop()


@pytest.mark.parametrize(
    ("layout", "does", "code"),
    [
        ("arbitrary", "", 0),
        ("heterogeneous", "", 0),
        ("arbitrary", "1:fails", 3),
        pytest.param("arbitrary", "0:fails", 3, marks=pytest.mark.long("rank 0 ends as on the first node")),
    ],
)
def test_rank_0_is_not_on_the_first_node(apart, layout, does, code):
    """Ranks 0 and 2 are on the second node of the list, or rank 0 alone; they connect, or end together, at once."""
    a, b = apart.nodes
    file = apart.folder / "hostfile"
    file.write_text(f"{b}\n{a}\n{b}\n")
    program = ["python", str(HERE / "meet.py"), *([does] if does else [])]
    line = {
        "arbitrary": ["-n", "3", *NODES, "-m", "arbitrary", *program],
        "heterogeneous": ["-n", "1", "-w", b, *program, ":", "-n", "2", "-w", a, *program],
    }[layout]
    began = time.monotonic()
    done = srun(apart, *line, SLURM_HOSTFILE=str(file))
    assert done.code == code and time.monotonic() - began < SECONDS, done.err
    if code:
        rank = int(does[0])
        told = [f"error[rank {rank}]: no such file; rank {rank}'s disk"]
        if rank:
            told.insert(0, "error[rank 0]: rank 1 ended with exit code 3 before all ranks had joined; srun; its own")
        lines = sorted(done.err.splitlines())
        assert len(lines) == len(told) and all(a.startswith(b) for a, b in zip(lines, told, strict=True)), lines
        return
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    places = [(row["node"], *(int(row[f"HOROVOD_{name}"]) for name in names)) for row in done.rows()]
    expected = {
        "arbitrary": [(b, 0, 2, 0, 2), (a, 0, 1, 1, 2), (b, 1, 2, 0, 1)],
        "heterogeneous": [(b, 0, 1, 0, 2), (a, 0, 2, 1, 2), (a, 1, 2, 0, 1)],
    }
    assert places == expected[layout]
    assert {row["HOROVOD_GLOO_IFACE"] for row in done.rows()} == {"eth0"}


# ---- training


SETS = ["precision=64", "tensorboard=false"]


def settings(folder: Path, *sets: str) -> list[str]:
    return ["-c", str(TINY), "--run-dir", str(folder), *(word for s in (*SETS, *sets) for word in ("--set", s))]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The hash of the weights that two ranks of horovodrun end with."""
    found: dict[str, str] = {}

    def get(framework: str) -> str:
        if framework not in found:
            folder = tmp_path_factory.mktemp("expected") / "run"
            line = command(2, "horovodrun", ["fit", *settings(folder, f"framework={framework}")])
            own = {**environment(), "OMP_NUM_THREADS": "1"}
            run = subprocess.run(line, env=own, capture_output=True, text=True, timeout=SECONDS, check=False)
            assert run.returncode == 0, run.stderr
            found[framework] = summary(folder)["weights_sha256"]
        return found[framework]

    return get


def test_keras_trains_to_the_weights_of_horovodrun(cluster, tmp_path, expected):
    line = ["hvd-train", "fit", *settings(tmp_path / "run", "framework=tensorflow")]
    with none_tells_a_secret() as secrets:
        done = srun(cluster, *NODES, "-n", "2", *line, **secrets)
    assert done.code == 0 and done.err == "", done.err
    assert done.out.count("done: validation loss") == 1
    assert summary(tmp_path / "run")["weights_sha256"] == expected("tensorflow")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["launcher"] == "srun"


def test_the_guides_commands(cluster, tmp_path, expected):
    """Run the commands of the page as they stand, with fewer ranks. A batch job makes a secret: it needs no file."""
    sets = "".join(f"{name}: {value}\n" for name, value in (text.split("=") for text in SETS))
    (tmp_path / "job.yaml").write_text(TINY.read_text() + sets)
    (tmp_path / "train.py").write_text((HERE / "own_torch.py").read_text())
    (tmp_path / ".bash_profile").write_text("module() { echo module $*; }\n")
    blocks = re.findall(r"^```sh\n(.*?)^```$", guide.page("slurm"), re.MULTILINE | re.DOTALL)
    trained, printed = 0, ""
    for line in "".join(blocks).splitlines():
        own = variables(cluster, HOME=str(tmp_path))
        if not line.startswith("srun"):
            own["XDG_CONFIG_HOME"] = "/proc/nowhere"
        words = ["bash", "-c", line.replace("--ntasks-per-node 4", "--ntasks-per-node 1")]
        run = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert run.returncode == 0, f"{line}\n{run.stdout}\n{run.stderr}"
        if "sbatch" in line.split()[0] or re.fullmatch(r"\d+\n", run.stdout):
            job = run.stdout.split()[-1]
            assert cluster.end_of(job) == "COMPLETED", (tmp_path / f"slurm-{job}.out").read_text()
        if (tmp_path / "runs").exists():
            found = summary(tmp_path / "runs" / "tiny")
            assert found["world_size"] == 2 and found["weights_sha256"] == expected("pytorch"), line
            trained += 1
            (tmp_path / "runs").rename(tmp_path / f"runs-{trained}")
        printed += run.stdout
    assert trained == 3 and printed.count("sum 3.0 of 2") == 4 and "module load cuda/12.4" in job_output(tmp_path, job)


@pytest.mark.long("signals of ranks have tests under the other launchers")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_step_that_fit_starts_is_saved_at_a_signal(cluster, tmp_path, sent, code):
    """srun itself keeps a first Ctrl-C from the ranks."""
    line = ["salloc", *NODES, "-n", "2", "hvd-train", "fit", "--launcher", "srun", "-np", "2"]
    line += settings(tmp_path / "run", "max_epochs=4000", "checkpoint.every_n_epochs=0")
    started = subprocess.Popen(
        line, cwd=cluster.folder, env=variables(cluster), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or started.poll() is not None)
    (own,) = psutil.Process(started.pid).children()
    own.send_signal(sent)
    try:
        out, err = started.communicate(timeout=SECONDS)
    finally:
        started.terminate()
    assert started.returncode == code and (tmp_path / "run" / "checkpoints").exists(), out + err


def job_output(folder: Path, job: str) -> str:
    return (folder / f"slurm-{job}.out").read_text()


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        (
            ["-c", "nothing.yaml"],
            2,
            "error[rank 0]: cannot read the configuration: No such file or directory",
        ),
        (["--sed", "3"], 2, "error[rank 0]: No such option '--sed'."),
        (["--set", "data.name=npz", "--set", "data.path=/nowhere.npz"], 3, "error[rank 0]: there is no such file"),
    ],
)
def test_an_error_of_all_ranks_is_one_line(cluster, line, code, error):
    done = srun(cluster, *NODES, "-n", "3", "hvd-train", "fit", *line)
    assert done.code == code and done.out == ""
    assert len(done.err.splitlines()) == 1 and done.err.startswith(error), done.err


def test_a_lost_rank_ends_the_others(cluster, tmp_path):
    own = settings(tmp_path / "run")
    line = ["srun", *NODES, "-n", "2", "hvd-train", "fit", *own, "--set", "max_epochs=4000"]
    started = subprocess.Popen(line, env=variables(cluster), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or started.poll() is not None)
    rank = [p for p in cluster.steps() if "fit" in p.cmdline() and p.environ().get("SLURM_PROCID") == "1"]
    rank[-1].send_signal(signal.SIGKILL)
    out, err = started.communicate(timeout=SECONDS)
    assert started.returncode == 128 + signal.SIGKILL and "error[rank 0]: rank 1 on host node2 was lost" in err, err
    assert "done:" not in out


# ---- user scripts


def test_an_own_script_and_its_exit_code(cluster):
    """One rank fails when the world is open: its code is that of the step, not 5 of those that lost it."""
    done = srun(cluster, *NODES, "-n", "2", "python", str(HERE / "own_torch.py"), "1")
    assert done.out.count("sum 3.0 of 2") == 2, done.out + done.err
    assert done.code == 1 and "error[rank 1]: ValueError: a fault of this rank" in done.err, done.err
    assert "error[rank 0]: rank 1 on host node2 was lost" in done.err


def test_an_own_keras_script(cluster):
    done = srun(cluster, *NODES, "-n", "2", "python", str(HERE / "own_keras.py"))
    assert done.code == 0, done.err
    assert len(set(done.out.splitlines())) == 1 and done.out.count("loss") == 2, done.out


# ---- hvd-train submit


def submit(cluster, folder: Path, *line: str, code: int = 0, **more: str) -> subprocess.CompletedProcess:
    run = subprocess.run(
        ["hvd-train", "submit", *line], cwd=folder, env=variables(cluster, **more), capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == code, run.stdout + run.stderr
    return run


NASTY = 'it\'s $(touch owned) `touch owned` "q" #x; touch owned &'


def test_submit_quotes_every_value(cluster, tmp_path):
    """Through the shell and through sbatch's reading of its lines; the program gets its words as they were."""
    show = tmp_path / "show.py"
    show.write_text("import os, sys; print(repr((sys.argv[1:], os.environ['SLURM_JOB_NAME'], os.environ['LOADED'])))")
    (tmp_path / ".bash_profile").write_text('module() { [ "$1" = load ] && export LOADED="$2"; }\n')
    words = ["--job-name", NASTY, "--module", NASTY, "--time", "1", "--output", "o u't-%j.txt", "--follow"]
    done = submit(cluster, tmp_path, *words, "--", "python", str(show), NASTY, "", HOME=str(tmp_path))
    job, said = done.stdout.splitlines()
    assert said == repr(([NASTY, ""], NASTY, NASTY))
    assert {path.name for path in tmp_path.iterdir()} == {"show.py", ".bash_profile", f"o u't-{job}.txt"}


def test_submit_hands_on_the_exit_code(cluster, tmp_path):
    words = ["--", "python", "-c", "import sys; print('so far'); sys.exit(6)"]
    done = submit(cluster, tmp_path, "--time", "1", "--follow", *words, code=6)
    assert "\nso far\n" in done.stdout and ": failed" in done.stderr  # srun may add a line


@pytest.mark.long("five launches of two ranks")
def test_a_sweep_is_an_array_of_trials(cluster, tmp_path):
    """Four trials of two ranks, two at a time: one diverges, the others come to what a sweep within one world gives;
    the last to end writes the results, and a trial that went missing is submitted alone."""
    own = ["-c", str(TINY), "--set", "tensorboard=false", "--set", "max_epochs=1"]
    own += ["--param", "optim.lr=1e30,0.1,0.05,0.02"]
    words = [*own, "--nodes", "2", "--time", "5", "--at-once", "2", "--run-dir", "s"]
    job = submit(cluster, tmp_path, *words).stdout.strip()
    folder = tmp_path / "s"
    cluster.wait_for(lambda: (folder / "best.yaml").exists() and not cluster.run("squeue", "-h", "-j", job), SECONDS)
    line = ["hvd-train", "sweep", *own, "-np", "2", "--ranks-per-trial", "2", "--run-dir", "here"]
    env = {**environment(), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{WHERE}"}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr

    def results(folder: Path) -> list[list[str]]:
        return [row[:-1] for row in csv.reader((folder / "results.csv").open())]  # but for the speed

    assert results(folder) == results(tmp_path / "here")
    assert [row[2].partition(":")[0] for row in results(folder)[1:]] == ["failed", "done", "done", "done"]
    (folder / "trial-002" / "summary.json").unlink()
    collected = ["hvd-train", "sweep", "--collect", "--run-dir", "s"]
    left = subprocess.run(
        collected, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert left.returncode == 5 and "1 of 4 trials have not ended" in left.stdout, left.stdout + left.stderr
    script = submit(cluster, tmp_path, *words, "--resume", "auto", "--dry-run").stdout
    assert "#SBATCH --array=0,2%2\n" in script, "what failed and what is missing"
    again = submit(cluster, tmp_path, *words, code=2)
    assert again.stderr.startswith("error: the folder holds a sweep already; s; "), again.stderr


@pytest.mark.long("Slurm holds a job back for two minutes before it starts it again")
def test_a_job_that_saved_in_time_is_started_again_and_ends_with_the_same_bits(cluster, tmp_path):
    """The signal is what --signal makes Slurm send to the step; Slurm holds the job back for two minutes."""
    sets = ["optim.lr=0.01", "max_epochs=40", "log_every_n_steps=1"]
    own = settings(tmp_path / "run", *sets)
    job = submit(cluster, tmp_path, "--nodes", "2", "--requeue", "1", *own).stdout.strip()
    cluster.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), SECONDS)
    cluster.run("scancel", "--signal", "USR1", job)
    # For two minutes Slurm holds the job back. They are needed: the end of the script before would count as this one's.
    cluster.wait_for(lambda: "Restarts=1" in cluster.run("scontrol", "show", "job", job))
    end, told = cluster.end_of(job), job_output(tmp_path, job)
    assert end == "COMPLETED", told
    (step,) = re.findall(r"stopped by SIGUSR1 .*step (\d+)", told)
    assert f"resumed at step {step}:" in told and told.count("done: ") == 1, told
    again = submit(cluster, tmp_path, *own, "--requeue", "1", code=2)
    assert again.stderr.startswith("error: the run folder holds a run already")
    line = command(2, "horovodrun", ["fit", *settings(tmp_path / "whole", *sets)])
    env = {**environment(), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(line, env=env, capture_output=True, timeout=SECONDS, check=False).returncode == 0
    assert summary(tmp_path / "run")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


def test_submit_mistakes_are_one_line(cluster, tmp_path):
    tiny = ["-c", str(TINY)]
    cases = [
        ([*tiny, "--time", "soon"], r"error: sbatch refuses the job: .*[Tt]ime.*; hvd-train submit\n"),
        ([*tiny, "--partition", "nowhere"], r"error: sbatch refuses the job: .*nowhere.*; hvd-train submit\n"),
        ([*tiny, "--set", "optim.lrr=1"], r"error: --set optim.lrr=1: optim.lrr: unknown key.*\n"),
        ([*tiny, "--job-name", "a\n#SBATCH --wrap=x"], r"error: '.*' holds a character that is not printable; .*\n"),
        ([*tiny, "--", "python", "x.py"], r"error: a script has no configuration; submit; .*\n"),
    ]
    for line, words in cases:
        done = submit(cluster, tmp_path, *line, code=2)
        assert re.fullmatch(words, done.stderr) and done.stdout == "", done.stderr
    done = submit(cluster, tmp_path, *tiny, code=2, PATH=f"{BIN}:/usr/local/nowhere")
    assert done.stderr.startswith("error: sbatch is not installed; hvd-train submit; ") and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_fixture_ends_what_it_started(cluster):
    """A job that runs for ever when the tests are done goes with them."""
    submit(cluster, cluster.folder, "--nodes", "2", "--", "sleep", "1000")
    until(lambda: len([p for p in cluster.steps() if p.name() == "sleep"]) >= 2)
    cluster.stop()
    assert cluster.steps() == []
    assert all(daemon.poll() is not None for daemon in cluster.daemons)
