"""The rendezvous of srun's ranks, as far as it needs no Slurm: ports, hosts, the secret, the server, its refusals."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.launch.environment import world
from hvd_train.launch.launchers import installed, named
from hvd_train.launch.launchers import srun as slurm
from hvd_train.launch.launchers.srun import node_names, node_of
from hvd_train.launch.rendezvous import client, server
from hvd_train.launch.rendezvous.client import Rendezvous
from hvd_train.launch.rendezvous.job_step import PORTS, JobStep
from hvd_train.launch.rendezvous.secret import make_secret, read_secret
from hvd_train.launch.rendezvous.server import RendezvousServer
from hvd_train.launch.world import World
from tests.limits import SECONDS

STEP = {
    "SLURM_JOB_ID": str(os.getpid()),  # its ports are not those of another suite on this machine
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "n2",
}


@pytest.fixture
def step(monkeypatch, tmp_path):
    """This process as a rank of STEP with a secret; variables set for Horovod are removed afterwards."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "HOROVOD", "OMPI", "PMI"))]:
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(client, "_current", None)
    monkeypatch.setattr(Rendezvous, "_report_place", lambda *_: None)  # STEP's rank is not on the first node
    slurm.address.cache_clear()
    yield tmp_path / "hvd_train" / "secret"
    if client._current:
        client._current.close()


def step_of(environ) -> JobStep:
    return named("srun").step(environ)


def open_server(here: World) -> RendezvousServer:
    """Rank 0's."""
    return client.rendezvous_of(here).open_server()


def joined_by_nobody(here: World) -> bool:
    return client.rendezvous_of(here) is not None


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[1-2]", ["node1", "node2"]),
        ("n[007,009-011],login", ["n007", "n009", "n010", "n011", "login"]),
        ("rack[0-1]n[07,09]", ["rack0n07", "rack0n09", "rack1n07", "rack1n09"]),
        ("login,n-[9-10]-x", ["login", "n-9-x", "n-10-x"]),
    ],
)
def test_names_of_nodes(nodes, names):
    assert node_names(nodes) == names


def test_a_nodes_tasks_are_found_by_its_name():
    """The variables of a heterogeneous job of Slurm 22.05, with one task on n2 and two on n1."""
    mixed = {"SLURM_STEP_TASKS_PER_NODE": "2,1"}
    first = STEP | mixed | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n2"}
    last = STEP | mixed | {"SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n1"}
    assert world(first) == World(0, 3, 0, 1, "srun") and world(last) == World(2, 3, 1, 2, "srun")
    assert (node_of(first), node_of(last)) == (1, 0)


def test_ports_follow_from_the_step():
    one, other = (step_of(STEP | {"SLURM_STEP_ID": number}) for number in "01")
    assert one.ports({}) == step_of(STEP).ports({}) != other.ports({})
    again = step_of(STEP | {"SLURM_RESTART_COUNT": "1"})
    assert again.name != one.name and set(one.ports({})) <= set(PORTS)
    assert one.ports({"HVD_TRAIN_PORT": "6000"}) == list(range(6000, 6016))
    with pytest.raises(ConfigError, match="'65530' is not a port; environment variable HVD_TRAIN_PORT"):
        one.ports({"HVD_TRAIN_PORT": "65530"})


def test_who_joins_the_ranks(step, monkeypatch):
    """Horovod's Gloo through the server, unless srun brings MPI."""
    assert joined_by_nobody(world())
    assert not joined_by_nobody(World(0, 2, 0, 2, "mpirun")) and not joined_by_nobody(World())
    monkeypatch.setattr(installed, "mpi_built", lambda: True)
    monkeypatch.setenv("PMIX_RANK", "2")
    assert not joined_by_nobody(world())
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    assert joined_by_nobody(world())
    monkeypatch.delenv("PMIX_RANK")
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    assert not joined_by_nobody(world())


def test_the_secret_is_made_once_and_for_the_user_alone(step, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_secret()
    with ThreadPoolExecutor(8) as pool:
        made = {future.result() for future in [pool.submit(make_secret) for _ in range(8)]}
    assert made == {step.read_bytes()} and len(step.read_bytes()) == 64
    assert step.stat().st_mode & 0o777 == 0o600 and list(step.parent.iterdir()) == [step]
    step.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read the secret"):
        make_secret()
    step.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: step.stat().st_uid + 1)  # as where a file server knows no root
    mine, other = os.geteuid(), step.stat().st_uid
    with pytest.raises(
        ConfigError, match=f"belongs to user {other}, and this process is of user {mine}; .*; set HVD_TRAIN"
    ):
        make_secret()
    monkeypatch.setenv("HVD_TRAIN_SECRET", "given")
    assert make_secret() == read_secret() == b"given"
    monkeypatch.delenv("HVD_TRAIN_SECRET")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    with pytest.raises(ConfigError, match="cannot be written.*set HVD_TRAIN_SECRET for all ranks"):
        make_secret()


def http_status(port: int, method: str, path: str, body: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_server_keeps_what_gloo_asks_for_and_turns_strangers_away(step):
    """Paths as Horovod's HTTPStore forms them: http://ADDR:PORT/scope/key with ADDR ending in the token."""
    opened = open_server(World(0, 3, 0, 2, "srun"))
    assert open_server(World(0, 3, 0, 2, "srun")) is opened
    port, own = opened.server_port, f"/{opened.token}:{opened.server_port}"
    assert http_status(port, "GET", f"{own}/global/0")[0] == 404
    assert http_status(port, "PUT", f"{own}/global/0", "here") == (200, b"")
    assert http_status(port, "GET", f"{own}/global/0") == (200, b"here")
    assert http_status(port, "GET", f"{own}/local_n1/0")[0] == 404
    for method, path in [("GET", "/global/0"), ("PUT", "/x/global/0"), ("DELETE", f"/{'0' * 64}:1/global/0")]:
        assert http_status(port, method, path, "other") == (403, b"")
    assert http_status(port, "POST", "/x/join", '{"rank": 1, "local": 0}') == (403, b"")
    assert http_status(port, "GET", f"{own}/global/0") == (200, b"here")
    assert http_status(port, "DELETE", f"{own}/global/0")[0] == 200
    assert http_status(port, "GET", f"{own}/global/0")[0] == 404
    assert make_secret().decode() not in opened.token


@pytest.mark.parametrize(("tasks", "address"), [("3", "127.0.0.1"), ("2,1", "0.0.0.0")])
def test_a_step_of_one_node_is_heard_there_alone(step, monkeypatch, tasks, address):
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    assert open_server(World(0, 3, 0, 2, "srun")).server_address[0] == address


def slow_connections(port: int, count: int) -> list[socket.socket]:
    """Each has begun a request, and says no more."""
    held = [socket.create_connection(("127.0.0.1", port), timeout=SECONDS) for _ in range(count)]
    for one in held:
        one.sendall(b"GET /x")
    return held


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_flood_of_slow_connections_holds_nobody_up(step, monkeypatch):
    """Few are kept, none for long however often it sends a byte, and ranks are answered meanwhile."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", SECONDS)
    opened = open_server(World(0, 3, 0, 2, "srun"))
    port, limit = opened.server_port, server.STRANGERS + 3
    before = threading.active_count()
    held = slow_connections(port, 400)
    try:
        with ThreadPoolExecutor(2) as pool:
            given = [f'{{"rank": {rank}, "local": {rank}}}' for rank in (1, 2)]
            joined = [pool.submit(http_status, port, "POST", f"/{opened.token}/join", body) for body in given]
            assert opened.wait(SECONDS) == {"address": "127.0.0.1", "locals": [0, 1, 2]}
            assert [future.result()[0] for future in joined] == [200, 200]
        assert all(ended(one) for one in held[:-limit])
        stop = time.monotonic() + SECONDS
        while threading.active_count() - before > limit + 1:
            assert time.monotonic() < stop
            time.sleep(0.01)
        monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
        left = held[-limit:]
        while left:
            assert time.monotonic() < stop, f"{len(left)} of them are still open"
            time.sleep(0.1)
            for one in left.copy():
                try:
                    one.sendall(b"x")
                except OSError:
                    left.remove(one)
    finally:
        for one in held:
            one.close()


def test_when_the_ranks_have_met_no_other_address_is_heard(step):
    opened = open_server(World(0, 2, 0, 1, "srun"))
    path, elsewhere = f"/{opened.token}/global/0", ("127.0.0.9", 0)

    def ask(source: tuple[str, int]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", opened.server_port, timeout=SECONDS, source_address=source)
        connection.request("GET", path)
        return connection.getresponse().status

    assert ask(elsewhere) == 404
    assert opened.wait(0)["failed"].startswith("rank 1 did not join") and ask(elsewhere) == 404
    opened._verdict = None
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(opened.add_rank, 1, 0, "127.0.0.1", "127.0.0.8")
        opened.wait(SECONDS)
        assert joined.result()[0] == 200
    assert ask(("127.0.0.8", 0)) == ask(("127.0.0.1", 0)) == 404
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(elsewhere)


def test_a_rank_asks_nobody_who_cannot_prove_the_secret(step, monkeypatch):
    """Another's server at the step's first port, and rank 0's at the second."""
    here = World(2, 3, 0, 1, "srun")
    monkeypatch.setattr(JobStep, "address", lambda self: "127.0.0.1")
    stranger = next(iter(step_of(os.environ).ports({})))
    other = RendezvousServer("127.0.0.1", stranger, "0" * 64, 3)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("HOROVOD_START_TIMEOUT", "1")
        with pytest.raises(CommunicationError, match="rank 0 was not found on n1 within 1 s: no secret in .*/secret"):
            client.join_world(here)
        make_secret()
        with pytest.raises(CommunicationError, match="nobody who knows the secret of this step is at port"):
            client.join_world(here)
        first = Rendezvous(World(0, 3, 0, 2, "srun"), step_of(os.environ))
        port = first.open_server().server_port
        assert port == step_of(os.environ).ports({})[1]
        endpoint = client.rendezvous_of(here).find()
        assert (endpoint.address, endpoint.port) == ("127.0.0.1", port)
        first.close()
    finally:
        other.shutdown()
        other.server_close()


def test_no_free_port(step, monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        monkeypatch.setattr(JobStep, "ports", lambda self, environ: [held.getsockname()[1]])
        with pytest.raises(ConfigError, match="no free port on n2: [0-9]+ are taken; srun; set HVD_TRAIN_PORT"):
            open_server(World(0, 3, 0, 2, "srun"))


def test_a_host_that_no_name_service_knows(step, monkeypatch, tmp_path):
    """The configuration of Slurm has its address."""
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\necho "NodeName=$3 NodeAddr=127.0.0.7 Port=1"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: resolved(name))
    assert step_of(os.environ).address() == "127.0.0.7"
    assert step_of(os.environ | {"SLURMD_NODENAME": "n1"}).address() == "127.0.0.1"
    Path(tool).write_text("#!/bin/sh\n")
    slurm.address.cache_clear()
    with pytest.raises(ValueError, match="the host name n1 cannot be resolved"):
        step_of(os.environ).address()


def resolved(name: str) -> str:
    if name != "127.0.0.7":
        raise socket.gaierror
    return name
