"""A rank knows its place from its launcher's variables, takes its share of the cores, and overrides nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hvd_train.errors import ConfigError
from hvd_train.frameworks import KERNELS
from hvd_train.launch import environment
from hvd_train.launch.environment import bind, rank_settings, threads, world
from hvd_train.launch.world import World
from tests.limits import SECONDS

HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, World()),
        (HOROVOD, World(3, 4, 1, 2, "horovodrun")),
        (OPEN_MPI, World(2, 3, 0, 1, "mpirun")),
        (HOROVOD | OPEN_MPI, World(3, 4, 1, 2, "horovodrun")),
        (MPICH, World(1, 2, 1, 2, "mpiexec")),
        (MPICH | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, World(1, 2, 0, 1, "mpiexec")),
        ({"HOROVOD_RANK": "1"}, World()),
        (SRUN, World(9, 11, 1, 3, "srun")),
        (SRUN | {"SLURM_NODEID": "1"}, World(9, 11, 1, 4, "srun")),
        (SRUN | OPEN_MPI, World(2, 3, 0, 1, "mpirun")),
        (SRUN | {"PMI_RANK": "9", "PMI_SIZE": "11"}, World(9, 11, 1, 3, "srun")),  # --mpi=pmi2
        (SRUN | MPICH, World(1, 2, 1, 2, "mpiexec")),  # whose own daemons srun has started
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, World()),  # a shell in an allocation
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World()),  # a batch script
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, World(1, 2, 1, 2, "mpirun_rsh")),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"} | OPEN_MPI, World(2, 3, 0, 1, "mpirun")),
        (
            MPICH | {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"},
            World(1, 2, 0, 2, "flux"),
        ),
    ],
    ids=str,
)
def test_world(environ, expected):
    assert world(environ) == expected


def tf_config(workers: int) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"][:workers]}, "task": {"index": 0}})}


UNKNOWN = [
    ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}, "torchrun", "WORLD_SIZE RANK"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "the launcher", "WORLD_SIZE RANK"),  # Kubeflow's PyTorchJob, DeepSpeed
    ({"PET_NNODES": "1:3", "PET_NODE_RANK": "0"}, "the launcher", "PET_NNODES PET_NODE_RANK"),
    (tf_config(2), "the launcher", "TF_CONFIG"),
    ({"PMIX_RANK": "1"}, "the launcher", "PMIX_RANK"),
    ({"SLURM_PROCID": "1"}, "the launcher", "SLURM_PROCID"),  # a container that hands on some variables
]


@pytest.mark.parametrize(("environ", "who", "names"), UNKNOWN, ids=str)
def test_a_launcher_that_horovod_does_not_know_is_refused(environ, who, names):
    """Each of its processes would train alone, as rank 0 of 1; Horovod's own launchers stand above it."""
    first = names.split()[0]
    with pytest.raises(ConfigError, match=rf"^{who} is not supported .* \({first}=.*variable {first}; .*horovodrun"):
        world(environ)
    with pytest.raises(ConfigError, match=f"to train with this process alone, unset {names}$"):
        world(environ)
    assert world({name: x for name, x in environ.items() if name not in names.split()}) == World()  # the cure
    assert world(OPEN_MPI | environ).size == 3


@pytest.mark.parametrize(
    "environ",
    [
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "4"},  # no launcher sets one of them alone
        {"RANK": "8"},
        {"WORLD_SIZE": "big", "RANK": "0"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        tf_config(1),
        {"TF_CONFIG": "not JSON"},
        {"PMIX_RANK": "0"},
    ],
    ids=str,
)
def test_a_single_process_is_not_refused(environ):
    assert world(environ) == World()


@pytest.mark.parametrize("program", ["hvd_train.torch", "hvd_train.keras", "hvd_train"])
def test_an_unknown_launcher_is_told_in_one_line(program):
    """Refused in scripts, and by ``fit``, which listens for signals before it reads its command."""
    line = (
        f"import {program} as h; h.rank()" if program != "hvd_train" else "from hvd_train.cli.main import main; main()"
    )
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", line, "fit", "-c", "none.yaml"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    told = [row for row in done.stderr.splitlines() if row.startswith(("error", "Traceback"))]
    assert done.returncode == 2 and len(told) == 1, done.stderr
    assert told[0].startswith("error: the launcher is not supported by Horovod (WORLD_SIZE=2, RANK=1): each process")


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="'x' is not a number; environment variable HOROVOD_SIZE"):
        world(HOROVOD | {"HOROVOD_SIZE": "x"})


@pytest.mark.parametrize(
    ("cores", "allowed", "local_size", "omp", "configured", "expected"),
    [
        (8, 8, 1, None, "auto", 8),
        (8, 8, 2, None, "auto", 4),
        (8, 8, 3, None, "auto", 2),
        (8, 8, 16, None, "auto", 1),
        (8, 1, 2, None, "auto", 1),  # bound to a core already
        (8, 4, 2, None, "auto", 4),
        (8, 4, 4, None, "auto", 2),  # to a socket, with another rank
        (2, 2, 3, None, "auto", 1),
        (8, 8, 2, "3", "auto", 3),
        (8, 8, 2, "0", "auto", 4),
        (8, 8, 2, "3", 7, 7),
    ],
)
def test_threads(monkeypatch, cores, allowed, local_size, omp, configured, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert threads(configured, World(0, local_size, 0, local_size, "mpirun")) == expected


@pytest.mark.parametrize(
    ("cpus", "allowed", "given", "here", "expected"),
    [
        (8, 8, "", World(3, 4, 1, 2, "horovodrun"), {4, 5, 6, 7}),
        (8, 8, "", World(2, 3, 2, 3, "horovodrun"), {4, 5}),
        (8, 8, "", World(0, 2, 0, 1, "horovodrun"), set(range(8))),
        (8, 8, "", World(0, 2, 0, 2, "mpirun"), None),  # --bind-to none is the user's word
        (8, 8, "", World(0, 2, 0, 2, "srun"), None),
        (8, 4, "", World(0, 2, 0, 2, "horovodrun"), None),  # a wrapper bound it, or all of them
        (8, 8, "0,1,2,3,4,5,6,7", World(1, 2, 1, 2, "mpirun"), {4, 5, 6, 7}),
        (8, 4, "0,1,2,3", World(1, 2, 1, 2, "mpirun"), {2, 3}),  # -np within taskset
        (8, 1, "0,1,2,3", World(0, 2, 0, 2, "mpirun"), None),
        (2, 2, "0,1", World(0, 3, 0, 3, "mpirun"), None),  # more ranks than cores
    ],
)
def test_bind(monkeypatch, cpus, allowed, given, here, expected):
    bound = {}
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.update({thread: set(cores)}))
    monkeypatch.setattr(environment, "_place", lambda cpu: (0, cpu, cpu))
    monkeypatch.delenv(environment.CORES, raising=False)
    if given:
        monkeypatch.setenv(environment.CORES, given)
    bind(here)
    assert (os.getpid() in bound) == (expected is not None)
    assert all(cores == expected for cores in bound.values())


def test_threads_of_a_core_and_cores_of_a_socket_stay_together(monkeypatch):
    """8 CPUs as kernels often number them: odd ones on the other socket, the second thread of each core at the end."""
    monkeypatch.setattr(environment, "_place", lambda cpu: (cpu % 2, cpu % 4, cpu))
    shares = [environment._share(set(range(8)), World(rank, 4, rank, 4)) for rank in range(4)]
    assert shares == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_a_rank_binds_all_of_its_threads():
    """A real process with a second thread, as rank 1 of as many ranks as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    here = f"World({len(cores) - 1}, {len(cores)}, {len(cores) - 1}, {len(cores)}, 'mpirun')"
    program = (
        "import os, threading; from hvd_train.launch.environment import bind; done = threading.Event()\n"
        "from hvd_train.launch.world import World\n"
        "threading.Thread(target=done.wait).start()\n"
        f"bind({here}); print([len(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')]); done.set()"
    )
    env = {**os.environ, environment.CORES: ",".join(map(str, cores))}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.strip() == "[1, 1]"


def test_rank_settings(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    alone = rank_settings(World(), "pytorch", 3, verbose=False)
    assert alone == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "GOMP_SPINCOUNT": "1000"}
    gloo = rank_settings(World(0, 2, 0, 2, "horovodrun"), "tensorflow", 1, verbose=False)
    assert gloo["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert gloo["TF_CPP_MIN_LOG_LEVEL"] == "3" and gloo["KERAS_BACKEND"] == "tensorflow"
    assert gloo.items() >= KERNELS.items()
    mpi = rank_settings(World(0, 2, 0, 2, "mpirun"), "tensorflow", 1, verbose=True)
    assert mpi["HOROVOD_CYCLE_TIME"] == "0.1" and "TF_CPP_MIN_LOG_LEVEL" not in mpi
    assert all(isinstance(value, str) for value in mpi.values())
    hosts = rank_settings(World(0, 2, 0, 1, "mpirun"), "pytorch", 1, verbose=False)
    assert int(hosts["HOROVOD_MPI_PIECE_BYTES"]) == 4 * int(mpi["HOROVOD_MPI_PIECE_BYTES"]) == 32 << 20
    assert "put" not in hosts["OMPI_MCA_btl_tcp_flags"].split(",")


@pytest.mark.parametrize(("limit", "check"), [(None, "60"), ("3", "1"), ("100", "10"), ("7200", "60"), ("0", "60")])
def test_a_stall_is_looked_for_more_often_than_its_limit(monkeypatch, limit, check):
    """Or Horovod would leave the limit out."""
    name = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    monkeypatch.setenv(name, limit) if limit else monkeypatch.delenv(name, raising=False)
    settings = rank_settings(World(0, 2, 0, 2, "mpirun"), "pytorch", 1, False)
    assert settings[name] == (limit or "600") and settings["HOROVOD_STALL_CHECK_TIME_SECONDS"] == check


def test_a_command_typed_in_a_shell_of_several_tasks_is_told_at_once(monkeypatch):
    """``srun -n 4 --pty bash``: the other tasks have ended, and nobody would come."""
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    monkeypatch.setattr("os.getpgrp", lambda: 7)
    monkeypatch.setattr("os.getsid", lambda pid: 5)
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    assert world(step).size == 4
    with pytest.raises(
        ConfigError, match=r"one of 4 tasks of its step \(srun --pty\).*srun -n 4; .*NUM_TASKS=1.*-np N"
    ):
        world(step | {"SLURM_PTY_PORT": "40000"})
    assert world(step | {"SLURM_PTY_PORT": "40000", "SLURM_STEP_NUM_TASKS": "1"}).size == 1
    monkeypatch.setattr("os.getpgrp", lambda: 5)  # srun -n 4 --pty hvd-train fit
    assert world(step | {"SLURM_PTY_PORT": "40000"}).size == 4
    monkeypatch.undo()  # its other tasks: Slurm gives them one group, and no terminal
    monkeypatch.setattr("os.isatty", lambda descriptor: False)
    monkeypatch.setattr("os.getpgrp", lambda: 7)
    assert world(step | {"SLURM_PTY_PORT": "40000", "SLURM_PROCID": "1"}).rank == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "abc"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "0"),
        ("HOROVOD_FUSION_THRESHOLD", "1e9"),
        ("HOROVOD_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_CACHE_CAPACITY", ""),
        ("HOROVOD_CYCLE_TIME", "5ms"),
    ],
)
def test_horovods_numbers_are_numbers(name, value):
    """Horovod would read 1e9 as 1, and a word as 0: a limit of no seconds."""
    with pytest.raises(ConfigError, match=f"'{value}' is no .*number.*; environment variable {name};"):
        environment.check_horovod({name: value})


def test_sound_numbers_of_horovod_pass():
    good = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_LOG_LEVEL": "debug", "OTHER_MS": "x"}
    environment.check_horovod(good | HOROVOD)
