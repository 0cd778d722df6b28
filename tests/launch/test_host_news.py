"""A launcher that does not end when its ranks have: mpirun waits for ever for a host that it cannot reach."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from hvd_train.errors import CommunicationError
from hvd_train.launch import host_news, process, start
from hvd_train.launch.host_news import HostNews
from hvd_train.launch.hosts import Hosts
from hvd_train.launch.launchers import named
from hvd_train.launch.launchers.base import Layout
from hvd_train.launch.status import VERDICT, StatusTable, announce_met, host_key, verdict_path
from tests.limits import SECONDS


@pytest.fixture
def child():
    made = subprocess.Popen(["sleep", "600"])
    yield made
    made.kill()
    made.wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(host_news, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(host_news, "MEET_SECONDS", 0.6)
    monkeypatch.setattr(host_news, "LOOK_SECONDS", 0.05)


def test_a_launcher_that_stays_is_ended(child):
    made = HostNews(["localhost", "b"], named("mpirun"))
    StatusTable(0, made._table.path).publish({"code": 5})
    began = time.monotonic()
    made.wait(child)
    assert child.returncode == -signal.SIGKILL and time.monotonic() - began < SECONDS


def test_ranks_that_do_not_meet(child, monkeypatch, capfd):
    asked = []
    monkeypatch.setattr(
        host_news, "check_way_back", lambda hosts: asked.append(hosts) or "host b does not reach this host"
    )
    made = HostNews(["localhost", "b"], named("mpirun"))
    made.wait(child)
    assert child.returncode == -signal.SIGKILL and made.last == {"code": 5} and asked == [["b"]]
    assert capfd.readouterr().err == "error: host b does not reach this host\n"


@pytest.mark.parametrize("way", ["met", "reached", "ports", "horovodrun"])
def test_who_may_take_longer(monkeypatch, way):
    monkeypatch.setattr(host_news, "check_way_back", lambda hosts: "" if way == "reached" else "a line")
    if way == "ports":
        monkeypatch.setenv("OMPI_MCA_oob_tcp_dynamic_ipv4_ports", "5000-5100")
    made = HostNews(["localhost", "b"], named("horovodrun" if way == "horovodrun" else "mpirun"))
    if way == "met":
        monkeypatch.setenv(VERDICT, made.variables[VERDICT])
        announce_met()
        assert made.last == {"met": True}
    short = subprocess.Popen(["sleep", "1.5"])
    made.wait(short)
    assert short.returncode == 0


def test_another_host_does_not_take_the_path_for_its_own(monkeypatch):
    monkeypatch.setenv(VERDICT, "/proc/1/fd/3 another host")
    assert verdict_path() == ""
    monkeypatch.setenv(VERDICT, f"/proc/1/fd/3 {host_key()}")
    assert verdict_path() == "/proc/1/fd/3"


def test_a_killed_rank_is_named(monkeypatch):
    def run(line, env, launcher, wait):
        StatusTable(0, env[VERDICT].split()[0]).publish({"lost": ["rank 3 on host b"]})
        return 137, [], {}

    monkeypatch.setattr(process, "run", run)
    for name in ("look", "after"):
        monkeypatch.setattr(start, name, lambda *given: None)
    with pytest.raises(CommunicationError, match="rank 3 on host b was ended by SIGKILL; look for a crash"):
        start.start(named("mpirun"), Layout(2, Hosts({"localhost": 1, "b": 1})), ["true"])
