"""``hvd-train run``: any program as ranks, with their output tagged, torchrun's variables, and restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_train.launch.launchers import installed
from hvd_train.launch.rank_program import torchrun_variables
from hvd_train.launch.start import environment
from hvd_train.launch.world import World
from tests.launching import needs_horovod
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
LAUNCHERS = ["mpirun", "horovodrun"]


def begin(*words, cwd):
    needs_horovod()
    if "mpirun" in words and not installed.mpi_built():
        pytest.skip("Horovod was built without MPI")
    line = [sys.executable, "-P", "-m", "hvd_train", "run", *words]
    env = {key: x for key, x in environment().items() if not key.startswith(("OMPI_", "PRTE_"))}  # as a user has it
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*words, cwd, code=0):
    with begin(*words, cwd=cwd) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, (out[-3000:], err[-3000:])
    assert "Traceback" not in err
    return out, err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_rank_gets_the_words_and_its_lines_are_tagged(launcher, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:])\nprint('a\\nb', end='')\n"
        "print(*map(os.environ.get, ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')), file=sys.stderr)\n"
    )
    words = ["-np", "2", "--launcher", launcher, "--tag", "--torchrun", "--", "python", "train.py", "--tag", "-np", "7"]
    out, err = run(*words, cwd=tmp_path)
    for rank in (0, 1):
        tagged = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert tagged == [f"[{rank}] {text}" for text in ("['--tag', '-np', '7']", "a", "b")]
        assert f"[{rank}] {rank} 2 {rank} 127.0.0.1\n" in err
    assert len(out.splitlines()) == 6


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_code_is_the_programs(launcher, tmp_path):
    run("-np", "2", "--launcher", launcher, "python", "-c", "import sys; sys.exit(7)", cwd=tmp_path, code=7)
    program = ["python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    _, err = run("-np", "2", "--launcher", launcher, "--tag", *program, cwd=tmp_path, code=5)
    assert "error: a rank was ended by SIGKILL; look for a crash or too little memory" in err


def test_alone_it_is_the_program_itself(tmp_path):
    out, _ = run("python", "-c", "print(3)", cwd=tmp_path)
    assert out == "3\n"
    run("-np", "1", "--tag", "python", "-c", "import sys; sys.exit(9)", cwd=tmp_path, code=9)


RESTARTED = """
import os, pathlib, sys
import torch
import hvd_train.torch as ht

model = torch.nn.Linear(1, 1).double()
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
begin = ht.load("state.safetensors", missing_ok=True, model=model, optimizer=optimizer).get("step", 0)
for step in range(begin, 6):
    optimizer.zero_grad()
    model(torch.full((1, 1), 1.0 + ht.rank(), dtype=torch.float64)).sum().backward()
    optimizer.step()
    ht.save("state.safetensors", model=model, optimizer=optimizer, step=step + 1)
    if step in (1, 3) and ht.rank() == 1 and not os.path.exists(f"died{step}"):
        pathlib.Path(f"died{step}").touch()
        os.kill(os.getpid(), 9)
ht.print(f"from step {begin}")
"""


def test_a_script_is_started_again_and_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(RESTARTED)
    words = ["-np", "2", "--max-restarts", "3", "--", "python", "train.py"]
    out, err = run(*words, cwd=tmp_path)
    assert "restart 1 of 3: a rank was ended by SIGKILL; " in err and "restart 2 of 3: " in err
    assert "restart 3" not in err and out.splitlines()[-1] in ("from step 3", "from step 4")


def test_restarts_end(tmp_path):
    program = ["python", "-c", "import sys; sys.exit(7)"]
    _, err = run("-np", "2", "--max-restarts", "2", *program, cwd=tmp_path, code=7)
    assert err.count("restart ") == 2 and "given up: a rank ended with code 7; " in err and "2 restarts" in err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_reaches_each_rank(launcher, tmp_path):
    program = "import pathlib, os, time\npathlib.Path(f'begun{os.getpid()}').touch()\ntime.sleep(60)\n"
    (tmp_path / "train.py").write_text(program)
    process = begin("-np", "2", "--launcher", launcher, "--tag", "python", "train.py", cwd=tmp_path)
    for _ in range(600):
        if len([*tmp_path.glob("begun*")]) == 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, (out, err)
    ranks = [Path("/proc", path.name.removeprefix("begun")) for path in tmp_path.glob("begun*")]
    for _ in range(50):  # a busy machine takes a moment to end them
        if not any(rank.exists() for rank in ranks):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"still there: {ranks}")


def test_a_script_with_ddp_as_it_is(tmp_path):
    (tmp_path / "ddp.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.tensor([1.0 + dist.get_rank()])\ndist.all_reduce(x)\nprint('sum', x.item())\n"
        "dist.destroy_process_group()\n"
    )
    out, _ = run("-np", "2", "--tag", "--torchrun", "--", "python", "ddp.py", cwd=tmp_path)
    assert sorted(out.splitlines()) == ["[0] sum 3.0", "[1] sum 3.0"]
    process = begin("-np", "2", "--", "python", "ddp.py", cwd=tmp_path)
    _, err = process.communicate(timeout=SECONDS)
    told = "warning: ddp.py uses torch.distributed, which needs torchrun's variables: add --torchrun"
    assert process.returncode == 1 and told in err


def test_in_an_allocation_the_first_node_is_where_they_meet(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[3-4],node7")
    variables = torchrun_variables(World(3, 4, 1, 2), ":4711")
    assert variables == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node3", "MASTER_PORT": "4711",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-np", "2", "nosuch"], "error: there is no program 'nosuch'; host "),
        (["-np", "2", "--max-restarts", "1", "nosuch"], "error: there is no program 'nosuch'; host "),
        (["-np", "2", "--tag", "nosuch"], "error: there is no program 'nosuch'; host "),
        (["nosuch"], "error: there is no program 'nosuch'; host "),
        (["-np", "2"], "Missing argument '[--] PROGRAM ...'"),
        (
            ["-np", "2", "train.py", "5"],
            "is a script, which python runs; hvd-train run; hvd-train run ... -- python",
        ),
        (["-np", "0", "true"], "0 is not in the range x>=1"),
        (["--elastic", "-np", "2", "true"], "No such option"),
        (["--max-restarts", "1", "true"], "--max-restarts needs -np"),
        (["-np", "3", "-H", "localhost:2", "true"], "3 ranks on hosts with 2 slots"),
        (["--launcher", "srun", "-np", "2", "true"], "this is not a Slurm allocation"),
    ],
)
def test_mistakes(words, told, tmp_path):
    (tmp_path / "train.py").touch()
    _, err = run(*words, cwd=tmp_path, code=2)
    assert told in err
