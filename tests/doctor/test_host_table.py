"""The doctor over hosts: what it says of made-up ones, and its measurements on this one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_train.cli.main import cli
from hvd_train.doctor import host_table
from hvd_train.doctor.host_table import (
    FIXES,
    Facts,
    active_interfaces,
    differences,
    file_system,
    report,
    sought,
    written,
)
from hvd_train.doctor.link_speed import HostLink, answering, measure
from hvd_train.errors import ConfigError

LINK = HostLink("ib0", "10.0.0.1", "", 20e-6, 3e9, 0.0012)
FIRST = Facts("node1", 2, dict.fromkeys(FIXES, "same"), [("ib0", "10.0.0.1"), ("eth0", "192.168.0.1")], "nfs4", "")
SECOND = replace(FIRST, host="node2", interfaces=[("ib0", "10.0.0.2")], links=[LINK])


def test_hosts_that_are_alike():
    assert differences([FIRST, SECOND]) == [] and differences([FIRST]) == []
    header, first, second, *links = report([FIRST, SECOND]).splitlines()
    assert header.split()[:3] == ["host", "ranks", "Python"] and first.endswith("ib0 10.0.0.1, eth0 192.168.0.1  0")
    assert second.startswith("node2  2 ") and second.endswith("  nfs4, shared  ib0 10.0.0.2                    +1.2")
    assert links[1:3] == ["one TCP connection to node1:", "from   to            round trip  speed"]
    assert links[3:] == ["node2  ib0 10.0.0.1  20 us       3.00 GB/s"]


@pytest.mark.parametrize("what", FIXES)
def test_what_differs_is_named_with_its_host_and_what_to_do(what):
    other = replace(SECOND, common=SECOND.common | {what: "2.0"})
    assert differences([FIRST, SECOND, replace(other, host="node3")]) == [
        f"node3: {what}: 2.0, node1 has same: {FIXES[what]}"
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"links": [replace(LINK, offset=-61.25)]}, "node2: clock: -61.2 s from node1's: set it (chronyd, ntpd)"),
        (
            {"unshared": "No such file or directory"},
            "node2: working folder: does not see what node1 writes there (No such file or directory): start in a "
            "folder that all hosts share",
        ),
        (
            {
                "links": [
                    HostLink("ib0", "10.0.0.1", "no answer"),
                    HostLink("eth0", "192.168.0.1", "Connection refused"),
                ]
            },
            "node2: no TCP connection to node1 (addresses: 10.0.0.1, 192.168.0.1): look for a firewall or a missing "
            "route; --network-interfaces names the network between the hosts",
        ),
    ],
)
def test_clocks_folders_and_links(changes, says):
    other = replace(SECOND, **changes)
    assert differences([FIRST, other]) == [says]
    text = report([FIRST, other])
    assert ("not shared" in text) == ("unshared" in changes)
    assert ("-61250.0" in text) == ("clock" in says) and ("no answer  " in text) == ("no TCP" in says)


def test_one_interface_that_answers_is_enough():
    other = replace(SECOND, links=[HostLink("docker0", "172.17.0.1", "no answer"), replace(LINK, offset=0.5)])
    assert differences([FIRST, other]) == [] and other.best.offset == 0.5


def test_a_folder_that_cannot_be_written_is_told_once():
    first, second = (replace(facts, unshared="cannot write there: Read-only file system") for facts in (FIRST, SECOND))
    assert differences([first, second]) == [
        "node1: working folder: cannot write there: Read-only file system: start in a folder that all hosts share"
    ]


def test_facts_travel_as_json():
    assert Facts.from_json(host_table.asdict(SECOND)) == SECOND


def test_a_link_answers_whoever_names_the_token():
    with answering(b"secret") as port:
        link = measure("lo", "127.0.0.1", port, b"secret")
        assert not link.error and 0 < link.round_trip < 1 and link.speed > 0 and abs(link.offset) < 1
        assert measure("lo", "127.0.0.1", port, b"guess!").error
    assert measure("lo", "127.0.0.1", port, b"secret").error == "Connection refused"


def test_a_file_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_table, "SHARED_SECONDS", 0.2)
    with written("token") as (file, error):
        assert not error and sought(file, "token") == "" and sought(file, "other") == "not whole"
    assert not os.listdir() and sought(file, "token") == "No such file or directory"
    monkeypatch.setattr(host_table.Path, "cwd", lambda: tmp_path / "gone")
    with written("token") as (file, error):
        assert not file and error == "cannot write there: No such file or directory"


def test_this_host():
    assert file_system(Path("/proc/self")) == "proc"
    assert all(not address.startswith("127.") for _, address in active_interfaces())


@pytest.mark.parametrize(
    ("words", "started", "says"),
    [
        (["-H", "a:1,b:1"], "2", "the ranks are started already; by mpirun; leave out --hosts, --launcher"),
        (["--launcher", "mpirun"], None, "no hosts are named; --launcher; give --hosts too"),
        (["--network-interfaces", "ib0"], None, "no hosts are named; --network-interfaces"),
        (["-H", "a:0"], None, "'a:0' is not a host"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, words, started, says):
    if started:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", started)
    done = CliRunner().invoke(cli, ["doctor", *words])
    assert isinstance(done.exception, ConfigError) and str(done.exception).startswith(says)
