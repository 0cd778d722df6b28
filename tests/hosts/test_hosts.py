"""Several hosts for real: namespaces with sshd. The weights of one host, bit for bit; hosts that are not there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_train import __version__
from hvd_train.cli.main import cli
from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.launch import hosts as module
from hvd_train.launch.hosts import Hosts, after, look, parse, travelling
from hvd_train.launch.ssh_starter import places
from hvd_train.launch.start import command, environment
from tests.command_lines import none_tells_a_secret
from tests.hosts.network import Network
from tests.launch.test_suspended import grow, sizes
from tests.limits import SECONDS, until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = ["-c", str(ROOT / "scripts" / "configs" / "tiny.yaml")]
LONG = pytest.mark.long("the other launchers run it in every run")
ROOTED = {"PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def words(folder: Path, framework: str, *more: str) -> list[str]:
    # As many threads wherever a rank is: PyTorch adds in another order with more of them.
    sets = ["threads=1", "precision=64", "tensorboard=false", "log_every_n_steps=1", f"framework={framework}", *more]
    return [*TINY, "--run-dir", str(folder), *(word for one in sets for word in ("--set", one))]


def weights(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of two ranks of one host."""
    known: dict[str, str] = {}

    def get(framework: str) -> str:
        if framework not in known:
            folder = tmp_path_factory.mktemp("one-host") / "run"
            line = [str(BIN / "hvd-train"), "fit", "-np", "2", *words(folder, framework)]
            subprocess.run(line, env=environment(), check=True, capture_output=True, timeout=300)
            known[framework] = weights(folder)
        return known[framework]

    return get


def way(name: str, network: Network, folder: Path) -> list[str]:
    """Return the line that starts two ranks on two hosts in the guide."""
    a, b, _ = network.hosts
    fit = [str(BIN / "hvd-train"), "fit"]
    file = folder / "hosts.txt"
    file.write_text(f"# two\n{a} slots=1\n{b} slots=1\n")
    return {
        "horovodrun -H": [
            str(BIN / "horovodrun"), "-np", "2", "-H", f"{a}:1,{b}:1", "--network-interfaces", "eth0", *fit,
        ],
        "mpirun --hostfile": [
            str(BIN / "mpirun"), "-np", "2", "--hostfile", str(file), "--mca", "btl_tcp_if_include", "eth0",
            "--mca", "oob_tcp_if_include", "eth0", "-x", "PYTHONPATH", *fit,
        ],
        "fit -H": [*fit, "-np", "2", "-H", f"{a}:1,{b}:1"],
        "fit --hostfile": [*fit, "-np", "2", "--hostfile", str(file), "--launcher", "horovodrun"],
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("fit --hostfile", "pytorch"),
        ("mpirun --hostfile", "pytorch"),
        ("fit -H", "tensorflow"),
        pytest.param("horovodrun -H", "pytorch", marks=LONG),
    ],
)
def test_two_hosts_give_the_weights_of_one(network, expected, tmp_path, name, framework):
    """And no secret of the starting host can be read in a command line."""
    line = [*way(name, network, tmp_path), *words(tmp_path / "run", framework)]
    with none_tells_a_secret() as secrets:
        done = network.run(line, **ROOTED, **secrets)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path / "run") == expected(framework)
    assert not network.left()


def test_a_sharded_optimizer_over_hosts_of_two_ranks(network, tmp_path):
    """Bits are those of one host whose ranks share memory in pairs."""
    a, b, _ = network.hosts
    start = [str(BIN / "hvd-train"), "fit", "-np", "4"]
    sharded = ["optim.sharded=true", "optim.name=adam", "optim.momentum=0", "optim.lr=0.01"]
    done = network.run([*start, "-H", f"{a}:2,{b}:2", *words(tmp_path / "hosts", "pytorch", *sharded)], **ROOTED)
    assert done.returncode == 0, done.stdout + done.stderr
    one = environment() | {"HVD_TRAIN_HOST_MEMORY": "2"}
    pairs = [*start, *words(tmp_path / "pairs", "pytorch", *sharded)]
    subprocess.run(pairs, env=one, check=True, capture_output=True, timeout=300)
    assert weights(tmp_path / "hosts") == weights(tmp_path / "pairs")
    assert not network.left()


def test_sums_of_parts_are_right_over_a_slow_link(network, tmp_path):
    """Parts are still being sent when others arrive."""
    tensors = [("float32", (4 << 18) + 3), ("float64", 1 << 17), ("float32", 7)]
    case = {"name": "shards", "kind": "shards", "tensors": tensors, "traced": False}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    a, b, _ = network.hosts
    line = [sys.executable, "-m", "hvd_train.launch.ssh_starter", "-np", "2", "-H", f"{a}:1,{b}:1"]
    for host in network.hosts:
        network.slow(host)
    try:
        done = network.run([*line, sys.executable, "-m", "tests.ranks.worker", "pytorch", str(tmp_path)], **ROOTED)
    finally:
        for host in network.hosts:
            network.fast(host)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"shards.{rank}.json").read_text()) == {"wrong": [], "tensors": len(tensors)}


@pytest.mark.long("2 minutes over a slow link")
def test_a_thousand_steps_of_a_sharded_optimizer_over_a_slow_link(network, tmp_path):
    """Over Gloo, whose buffers of one step may still travel in the next; 1.2 MB of weights in 64 bits."""
    a, b, _ = network.hosts
    keys = ["optim.sharded=true", "model={name: mlp, hidden: [2048]}", "max_epochs=1000", "max_steps=1000"]
    for host in (a, b):
        network.slow(host)
    try:
        start = [str(BIN / "hvd-train"), "fit", "-np", "2", "--launcher", "horovodrun"]
        line = [*start, "-H", f"{a}:1,{b}:1", *words(tmp_path / "hosts", "pytorch", *keys)]
        done = network.run(line, seconds=600, **ROOTED)
    finally:
        for host in (a, b):
            network.fast(host)
    assert done.returncode == 0, done.stdout + done.stderr
    one = environment() | {"HVD_TRAIN_HOST_MEMORY": "0"}
    subprocess.run(
        [*start, *words(tmp_path / "one", "pytorch", *keys)], env=one, check=True, capture_output=True, timeout=300
    )
    assert weights(tmp_path / "hosts") == weights(tmp_path / "one")


@pytest.mark.long("Gloo and Open MPI need 40 seconds to give a silent host up")
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_host_that_is_cut_off_is_named_and_the_others_go_on(network, tmp_path, launcher):
    a, b, c = network.hosts
    run, begun = tmp_path / "run", [str(BIN / "hvd-train"), "fit", "-np", "2", "--launcher", launcher]
    long = words(run, "pytorch", "max_epochs=4000", "checkpoint.every_n_steps=20")
    job = network.started([*begun, "-H", f"{a}:1,{b}:1", *long], **ROOTED)
    try:
        stop = time.monotonic() + SECONDS
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < 100:
            assert job.poll() is None and time.monotonic() < stop, job.communicate()
            time.sleep(0.1)
        network.link(b, "down")
        out, err = job.communicate(timeout=SECONDS)
    finally:
        network.link(b, "up")
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 5, err
    assert err.strip().splitlines()[-1].startswith(f"error: host {b} does not answer any more; --resume auto "), err
    until(lambda: not network.left())  # what was cut off learns of it when it is back
    saved = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????"))
    steps = f"max_steps={saved + 30}"
    done = network.run(
        [*begun, "-H", f"{a}:1,{c}:1", *words(run, "pytorch", "max_epochs=4000", steps), "--resume", "auto"], **ROOTED
    )
    assert done.returncode == 0 and "resumed at step" in done.stdout, done.stdout + done.stderr


def over_gloo(network, script: str, **more: str) -> subprocess.Popen:
    """Two ranks that are a few lines of a shell, the second on the second host."""
    a, b, _ = network.hosts
    line = [
        sys.executable,
        "-m",
        "hvd_train.launch.ssh_starter",
        "-np",
        "2",
        "-H",
        f"{a}:1,{b}:1",
        "/bin/sh",
        "-c",
        script,
    ]
    return network.started(line, **ROOTED, **more)


def test_a_rank_of_another_host_is_named_with_its_host(network):
    job = over_gloo(network, "if [ $HOROVOD_RANK = 1 ]; then kill -9 $$; else exec sleep 600; fi")
    _, err = job.communicate(timeout=SECONDS)
    told = f"error: rank 1 on host {network.hosts[1]} was ended by SIGKILL; look for a crash or too little memory, and"
    assert job.returncode == 5 and err.startswith(told) and err.count("\n") == 1, err
    assert not network.left()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_the_ranks_of_other_hosts(network, sent):
    """And so does the starter's end by SIGKILL. Variables that are not on the list stay on their host."""
    script = "trap 'exit 75' TERM USR1; echo up $HF_TOKEN $HOROVOD_HOSTNAME $TF_X; while :; do sleep 0.1; done"
    job = over_gloo(network, script, HF_TOKEN="abc", TF_X="y")
    up = sorted(job.stdout.readline().split() for _ in range(2))
    assert up == [["up", "abc", network.hosts[0], "y"], ["up", network.hosts[1], "y"]]
    job.send_signal(sent)  # "ip" and the shell have become the starter
    if sent == signal.SIGKILL:
        os.killpg(job.pid, signal.SIGKILL)  # the first host's rank: a shell does not see that its parent is gone
    job.communicate(timeout=SECONDS)
    assert job.returncode == (-sent if sent == signal.SIGKILL else 75)
    until(lambda: not network.left())


def test_a_job_on_several_hosts_is_suspended_and_goes_on(network, tmp_path):
    """Ctrl-Z of the starter stops the ranks of both hosts."""
    script = f"while :; do echo >> {tmp_path}/$HOROVOD_RANK.count; sleep 0.05; done"
    job = over_gloo(network, script)
    until(lambda: len(sizes(tmp_path)) == 2)
    job.send_signal(signal.SIGTSTP)
    until(lambda: (before := sizes(tmp_path), time.sleep(1), before == sizes(tmp_path))[2])
    before = sizes(tmp_path)
    job.send_signal(signal.SIGCONT)
    until(lambda: grow(tmp_path, before))
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=SECONDS)
    until(lambda: not network.left())


def test_a_host_that_is_not_there_is_one_line(network, tmp_path):
    a, b, c = network.hosts
    network.link(c, "down")
    try:
        line = [str(BIN / "hvd-train"), "fit", "-np", "2", *words(tmp_path / "run", "pytorch")]
        for host in (c, "nowhere"):
            done = network.run([*line, "-H", f"{a}:1,{host}:1"], **ROOTED)
            assert done.returncode == 2 and done.stderr.startswith("error: ssh cannot connect: "), done.stderr
            assert f"; host {host}; try 'ssh {host}'" in done.stderr and done.stderr.count("\n") == 1
    finally:
        network.link(c, "up")
    assert not (tmp_path / "run").exists() and not network.left()


def test_the_doctor_sees_all_hosts(network):
    eth0 = [word for part in ("btl", "oob") for word in ("--mca", f"{part}_tcp_if_include", "eth0")]
    line = [
        str(BIN / "mpirun"),
        "-H",
        ",".join(network.hosts),
        *eth0,
        "-x",
        "PYTHONPATH",
        str(BIN / "hvd-train"),
        "doctor",
    ]
    done = network.run(line, **ROOTED)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.startswith("host ") and header.endswith("clock (ms)")
    for k, host in enumerate(network.hosts):
        assert rows[k].startswith(f"{host}  1 ") and f", shared  eth0 10.99.0.{k + 1}  " in rows[k]
    links = [row.split() for row in rows if "eth0 10.99.0.1  " in row and row.endswith("/s")]
    assert [row[0] for row in links] == network.hosts[1:] and all(float(row[-2]) > 0 for row in links)
    assert rows[-1] == "no difference between 3 hosts" and any(row.startswith(("MPI ", "Gloo ")) for row in rows)
    assert not network.left() and not list(network.folder.glob(".hvd-train-doctor-*"))


def test_ways_to_train_are_compared_over_hosts(network, tmp_path):
    """Figures of a rank on another host come back through the folder of the run, and nothing is left there."""
    hosts = ",".join(f"{host}:1" for host in network.hosts[:2])
    line = [str(BIN / "hvd-train"), "modes", "-np", "2", "-H", hosts, *TINY, "--set", f"run_dir={tmp_path}/runs/run"]
    line += ["--modes", "synchronous,local_sgd", "--steps", "32", "--turns", "1"]
    done = network.run(line, **ROOTED)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.split()[0]: row.split() for row in done.stdout.splitlines() if row}
    sent = [float(rows[name][1]) for name in ("synchronous", "local_sgd")]
    assert sent[0] == pytest.approx(8 * sent[1], rel=0.01)
    assert not [*tmp_path.iterdir()] and not network.left()


# ---- without a network


def test_places_of_ranks():
    found = places({"a": 2, "b": 1, "c": 5}, 5)
    assert [one.host for one in found] == ["a", "a", "b", "c", "c"]
    assert [one.world for one in found] == [(0, 5, 0, 2), (1, 5, 1, 2), (2, 5, 0, 1), (3, 5, 0, 2), (4, 5, 1, 2)]
    assert [one.cross for one in found] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


def test_hosts_are_filled_one_after_the_other(tmp_path):
    given = parse("a:2,b,c:3", None, None)
    assert given == Hosts({"a": 2, "b": 1, "c": 3}) and given.words == "a:2,b:1,c:3"
    assert given.needed(2) == ["a"] and given.needed(3) == ["a", "b"] and given.needed(6) == ["a", "b", "c"]
    file = tmp_path / "hosts"
    file.write_text("# ours\n\na slots=2\nb\nc slots = 3 max-slots=4\n")
    assert parse(None, file, None) == given
    with pytest.raises(ConfigError, match=r"7 ranks on hosts with 6 slots; -H a:2,b:1,c:3; -np 6"):
        given.needed(7)


@pytest.mark.parametrize(
    ("hosts", "text", "interfaces", "says"),
    [
        ("a;reboot:2", None, None, "'a;reboot:2' is not a host; --hosts a;reboot:2; write HOST:SLOTS"),
        ("-oProxyCommand=x:1", None, None, "is not a host"),
        ("a:0", None, None, "'a:0' is not a host"),
        ("a:2,a:1", None, None, "a stands twice"),
        ("node1:2,NODE1:1", None, None, "NODE1 stands twice; --hosts node1:2,NODE1:1; give it once"),
        (f"a:{10**20}", None, None, "a has 100000000000000000000 slots; .*; a host takes up to 65536"),
        (f"a:{'9' * 9000}", None, None, "a has 9+ slots"),
        ("a:00", None, None, "'a:00' is not a host"),
        ("a:1", "b", None, "name the hosts twice"),
        (None, "a slots=2\nb slots=$(x)\n", None, r"'b slots=\$\(x\)' is not a host; .*:2; "),
        (None, "# nobody\n", None, "the file names no host"),
        ("a:1", None, "eth0; x", "is not a list of networks"),
        (None, None, "eth0", "no hosts are named; --network-interfaces"),
    ],
)
def test_no_hosts_are_one_line(tmp_path, hosts, text, interfaces, says):
    file = tmp_path / "hosts" if text is not None else None
    if file:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        parse(hosts, file, interfaces)
    assert "\n" not in str(caught.value)


def test_no_secret_travels_in_a_command_line(monkeypatch):
    monkeypatch.setenv("HVD_TRAIN_SECRET", "abc")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    monkeypatch.setenv("HF_TOKEN", "abc")
    assert travelling(os.environ)["HOROVOD_CYCLE_TIME"] == "1" and "abc" not in travelling(os.environ).values()
    line = command(1, "mpirun", ["fit"], hosts=Hosts({"a": 1}))
    assert "HOROVOD_CYCLE_TIME" in line and not [word for word in line if "SECRET" in word or "abc" in word]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            (255, "", "Permission denied (publickey)."),
            "ssh cannot connect: Permission denied .*; host b; try 'ssh b'",
        ),
        ((124, "", ""), "no answer within 60 s; host b"),
        ((127, "", "no such file"), "does not run hvd_train there: no such file; host b; install it at the same path"),
        ((0, "0.0.7", ""), f"hvd_train is 0.0.7 there, and {__version__} here; host b; install the same version"),
    ],
)
def test_hosts_are_asked_before_anything_starts(monkeypatch, answer, says):
    monkeypatch.setattr(module, "asked", lambda names: {"a": (0, __version__, ""), "b": answer})
    with pytest.raises(ConfigError, match=says):
        look(["a", "b"])


def test_after_a_failure_the_silent_host_is_the_cause(monkeypatch):
    monkeypatch.setattr(module, "asked", lambda names: {"a": (0, __version__, ""), "b": (124, "", "")})
    for code in (0, 2, 3, 4, 6, 75, 130):
        after(["a", "b"], code)
    with pytest.raises(CommunicationError, match="host b does not answer any more"):
        after(["a", "b"], 1)


def test_hosts_that_do_not_connect_back_are_named(monkeypatch):
    answers = {"b": (0, "", ""), "c": (0, "10.99.0.1", ""), "d": (255, "", "")}
    monkeypatch.setattr(module, "asked", lambda names, code: answers)
    line = module.check_way_back(["b", "c", "d"])
    assert re.match(
        r"host b does not reach this host by TCP \(.*, port \d+\), though ssh does; hosts b, c, d; open ", line
    )
    monkeypatch.setattr(module, "asked", lambda names, code: {"c": answers["c"]})
    assert module.check_way_back(["c"]) == ""


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path):
    line = [str(BIN / "hvd-train"), "fit", "-np", "3", "--dry-run", "-H", "a:2,b:1", "--network-interfaces", "ib0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*line, "--launcher", "horovodrun", *TINY], capture_output=True, text=True, timeout=60, env=env
    )
    found = done.stdout.split()
    assert found[1:4] == ["-P", "-m", "hvd_train.launch.ssh_starter"], done.stderr
    assert found[4:10] == ["-np", "3", "-H", "a:2,b:1", "--network-interfaces", "ib0"]
    assert found[11:] == ["-P", "-m", "hvd_train", "fit", *TINY]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-H a:4,b:4,c:4 --nnodes 2 --nproc-per-node 3", "-np 6 -H a:3,b:3"),
        ("-np 8 -H a:4,b:4,c:4 --nnodes 2", "-np 8 -H a:4,b:4"),
        ("-H a:4,b:2 --nproc-per-node=2", "-np 4 -H a:2,b:2"),
        ("-np 5 -H a:4,b:4 --nnodes 1", "-np 5 differs from the 4 ranks of these hosts; --nnodes, --nproc"),
        ("-H a:4 --nnodes 2", "2 hosts are wanted, and 1 are named; --nnodes; name more"),
        ("-H a,b --nproc-per-node 2", "a has 1 slot, not 2; --nproc-per-node; say a:2"),
        ("--nnodes 2 --nproc-per-node 2", "no hosts are named; --nnodes, --nproc-per-node; give --hosts"),
    ],
)
def test_nnodes_and_nproc_per_node(words, says, monkeypatch):
    given = ["fit", "--dry-run", "--launcher", "horovodrun", *words.split()]
    assert says in dry_run(given, monkeypatch)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-np 4 --run-dir x", f"srun -n 4 {sys.executable} -P -m hvd_train fit --run-dir x"),
        ("--nnodes 2 --nproc-per-node 4", f"srun -n 8 -N 2 --ntasks-per-node 4 {sys.executable} -P -m hvd_train fit"),
        ("-np 4 --nnodes 2", f"srun -n 4 -N 2 {sys.executable}"),
        ("-np 4 --nnodes 2 --nproc-per-node 4", "-np 4 differs from the 8 ranks of these hosts"),
        ("--nnodes 2", "the number of ranks is missing; --launcher srun; give -np, or"),
        ("-np 2 -H a:2", "srun takes no --hosts"),
        ("-np 2 --max-restarts 1", "srun takes no --max-restarts"),
    ],
)
def test_srun_within_an_allocation(words, says, monkeypatch):
    assert says in dry_run(["fit", "--dry-run", "--launcher", "srun", *words.split()], monkeypatch)


def test_srun_needs_an_allocation(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    says = "this is not a Slurm allocation; --launcher srun; start it with salloc, or see 'hvd-train submit'"
    assert says in dry_run(["fit", "--launcher", "srun", "-np", "2"], monkeypatch)


def dry_run(words: list[str], monkeypatch) -> str:
    """Return what the command prints, or its error."""
    monkeypatch.setattr(sys, "argv", ["hvd-train", *words])
    done = CliRunner().invoke(cli, words)
    return done.output + str(done.exception)
