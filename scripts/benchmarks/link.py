"""Compression over slow links: two network namespaces connected by a veth pair, with a token bucket (tbf) at each end.

Needs root, iproute2 and the kernel's sch_tbf. Each rank has a namespace and a core of its own, so that only the link
connects them. Engines take turns as in compare.py. A plain TCP stream measures the link's speed before and after. Step
times are in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import tables
from compare import Engine, Lines, Running, add_when_warm, in_turns, interval, machine
from work import MODELS, RANKS, ROOT

from hvd_train.launch.launchers.installed import find_tool

MOST = 16  # hosts
NUMBERED = (("hvd", 0), ("hvdveth", 0), ("10.77.7.", 1))
NET, DEVICES, ADDRESSES = ([f"{name}{k}" for k in range(first, first + MOST)] for name, first in NUMBERED)
BRIDGE = "hvdbridge"  # a namespace, and its bridge, which connects more than two hosts
RATES = {"100mbit": 0.1, "1gbit": 1.0, "10gbit": 10.0}
# Bucket size of each rate: 4 ms of traffic, and at least a 64 KiB segment, which the sender passes on as a whole.
BURST = {"100mbit": "128kb", "1gbit": "512kb", "10gbit": "5mb"}
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "int4", "topk", "threshold", "powersgd", "auto")
# name: the keys under exchange.
EXCHANGES: dict[str, dict] = {name: {"compression": name} for name in COMPRESSIONS}
EXCHANGES |= {"delayed": {"mode": "delayed"}, "no exchange": {"mode": "local_sgd", "local_steps": 10**9}}
PORT = 29577
PORTS = itertools.count(PORT + 1)  # one for each engine, as they wait at the same time
# mpirun's remote shell during a launch: the "host" is an address of another namespace. All have one name, and daemons
# that start in one session folder overwrite each other's map of the machine (one start of eight ended with a SIGSEGV).
AGENT = """#!/bin/sh
host=hvd$((${1##*.} - 1))
TMPDIR=$(dirname "$0")/$host
export TMPDIR
mkdir -p "$TMPDIR"
shift
exec ip netns exec $host sh -c "$*"
"""


def shell(*line: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(line)}: {done.stderr.strip()}; scripts/bench link needs root, iproute2 and sch_tbf")


@contextmanager
def hosts(count: int = RANKS) -> Iterator[None]:
    """Make ``count`` namespaces: two with a direct link, or more on a bridge."""
    bridge = [BRIDGE] if count > 2 else []
    for name in (*NET, BRIDGE):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    try:
        for name in (*bridge, *NET[:count]):
            shell("ip", "netns", "add", name)
        if bridge:
            shell("ip", "-n", BRIDGE, "link", "add", BRIDGE, "type", "bridge")
            shell("ip", "-n", BRIDGE, "link", "set", BRIDGE, "up")
            for name, device in zip(NET[:count], DEVICES, strict=False):
                ends = ["name", device, "netns", name, "type", "veth", "peer", "name", device, "netns", BRIDGE]
                shell("ip", "link", "add", *ends)
                shell("ip", "-n", BRIDGE, "link", "set", device, "master", BRIDGE, "up")
        else:
            ends = ["name", DEVICES[0], "netns", NET[0], "type", "veth", "peer", "name", DEVICES[1], "netns", NET[1]]
            shell("ip", "link", "add", *ends)
        for name, device, address in zip(NET[:count], DEVICES, ADDRESSES, strict=False):
            shell("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            shell("ip", "-n", name, "link", "set", device, "up")
            shell("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in (*NET, BRIDGE):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def throttle(rate: str, count: int = RANKS) -> None:
    """Limit each host's sending and receiving to ``rate``."""
    bucket = ["tbf", "rate", rate, "burst", BURST[rate], "latency", "50ms"]
    for name, device in zip(NET[:count], DEVICES, strict=False):
        for end in (name, BRIDGE) if count > 2 else (name,):
            shell("tc", "-n", end, "qdisc", "replace", "dev", device, "root", *bucket)


PROBE = """
import socket, sys, time
role, address, port, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if role == "take":
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        peer, _ = server.accept()
        got = 0
        while got < size:
            got += len(peer.recv(1 << 20)) or sys.exit(1)
        peer.sendall(b"x")
else:
    peer = socket.create_connection((address, port))
    began = time.perf_counter()
    peer.sendall(bytes(size))
    peer.recv(1)
    print(size * 8 / (time.perf_counter() - began) / 1e9)
"""


def measured(rate: str) -> float:
    """Measure one TCP stream between two namespaces for about a second; return Gbit/s."""
    words = [ADDRESSES[1], str(PORT), str(int(RATES[rate] * 1e9 / 8))]
    python = [sys.executable, "-c", PROBE]
    line = ["ip", "netns", "exec", NET[1], *python, "take", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None
        taker.stdout.readline()
        line = ["ip", "netns", "exec", NET[0], *python, "give", *words]
        return float(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


def engines(framework: str) -> list[Engine]:
    ours = [Engine(framework, f"ours {name}", "mpirun", exchange) for name, exchange in EXCHANGES.items()]
    if framework == "tensorflow":
        return ours
    return [*ours, *(Engine(framework, name, "torchrun") for name in ("DDP", "DDP fp16", "DDP PowerSGD"))]


def remote_shell(folder: Path) -> Path:
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    return agent


def over_the_link(agent: Path, ranks: int = RANKS) -> Lines:
    """Return command lines for compare.Running: each rank in its own namespace, on its own core if there are enough."""
    cores = os.cpu_count() or 1

    def lines(engine: Engine, work: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        if engine.launcher == "mpirun":
            network = ["--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "10.77.7.0/24"]
            network += ["--mca", "oob_tcp_if_include", "10.77.7.0/24", "--mca", "plm_rsh_agent", str(agent)]
            # Both "hosts" are this machine: Open MPI would bind both ranks to its first core.
            place = f'exec taskset -c $((OMPI_COMM_WORLD_RANK % {cores})) "{sys.executable}" "$@"'
            passed = [w for name in ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND") for w in ("-x", name)]
            where = ["-H", ",".join(f"{a}:1" for a in ADDRESSES[:ranks]), "--bind-to", "none", "--map-by", "node"]
            line = ["ip", "netns", "exec", NET[0], str(find_tool("mpirun")), "-np", str(ranks), *where, *network]
            env = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_oob_tcp_if_include": "10.77.7.0/24"}
            passed += [w for name in os.environ if name.startswith(("HOROVOD_", "OMPI_MCA_coll")) for w in ("-x", name)]
            return [([*line, *passed, "-x", "HOROVOD_STALL_CHECK_DISABLE", "sh", "-c", place, "sh", *work], env)]
        commands, port = [], str(next(PORTS))
        for rank in range(RANKS):
            env = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": ADDRESSES[0]}
            env |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": DEVICES[rank]}
            line = ["ip", "netns", "exec", NET[rank], "taskset", "-c", str(rank), sys.executable, *work]
            commands.append((line, env))
        return commands

    return lines


def link(framework: str, model: str, rate: str, rounds: int, seconds: float, only: list[str] | None) -> dict:
    throttle(rate)
    results: dict = {"gbit_per_second": [round(measured(rate), 4)]}
    steps: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        agent = remote_shell(Path(folder))
        running: list[Running] = []
        try:
            for engine in engines(framework):
                if only and engine.name.removeprefix("ours ") not in only:
                    continue
                steps |= add_when_warm(
                    running, Running(engine, model, Path(folder), over_the_link(agent), warm_steps=3, least_steps=2)
                )
            steps |= in_turns(running, rounds, seconds)
            base = next(one for one in running if one.engine.name == "ours none")
            for one in running:
                ratio = interval([r / b for b, r in zip(base.rates, one.rates, strict=True)])
                milliseconds = 1000 * RANKS * MODELS[model][2] / median(one.rates)
                choice = [x for x in one.log.read_text(errors="replace").splitlines() if "auto takes" in x]
                steps[one.engine.name] = {
                    "milliseconds": milliseconds,
                    "faster_than_none": ratio[0],
                    "interval": ratio[1:],
                    **({"taken": choice[0].partition("takes ")[2].split()[0]} if choice else {}),
                }
        finally:
            for one in running:
                one.end()
    results["gbit_per_second"].append(round(measured(rate), 4))
    return results | {"steps": steps}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench link", description=__doc__)
    parser.add_argument("--frameworks", default="pytorch,tensorflow")
    parser.add_argument("--model", default="mlp", choices=MODELS)
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--engines", default="", help="these alone: exchanges and peers by name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block, at least two steps")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-link", help="folder")
    options = parser.parse_args(arguments)
    only = ["none", *options.engines.split(",")] if options.engines else None
    options.output.mkdir(parents=True, exist_ok=True)
    about = [f"scripts/bench link {' '.join(arguments)}".strip(), machine(), time.strftime("%Y-%m-%d")]
    results: dict[str, dict] = {}
    with hosts():
        for framework in options.frameworks.split(","):
            results[framework] = {}
            for rate in options.rates.split(","):
                print(f"== {framework}, {options.model}, {rate}", flush=True)
                results[framework][rate] = link(framework, options.model, rate, options.rounds, options.seconds, only)
                print(tables.over_link(framework, {rate: results[framework][rate]}), flush=True)
                (options.output / "link.json").write_text(
                    json.dumps({"about": about, "results": results}, indent=1) + "\n"
                )
    text = "\n\n".join([*about, *(tables.over_link(f, rates) for f, rates in results.items())])
    (options.output / "link.md").write_text(text)
    tables.link_picture(results, options.output / "link.png")
    print(f"{options.output}: link.json, link.md, link.png")
