"""Hosts on this one: network namespaces at one bridge, each with a name, an address and an sshd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.limits import SECONDS


class Network:
    """``hosts``: their names, at 10.99.0.1 and up; ``run`` starts a command on the first one. All share the files."""

    def __init__(self, folder: Path, count: int) -> None:
        tag = os.getpid() % 100_000
        self.folder, self.hosts = folder, [f"n{tag}-{k}" for k in range(count)]
        self._bridge, self._links = f"br{tag}", [f"v{tag}-{k}" for k in range(count)]
        self._servers: list[subprocess.Popen] = []

    def start(self) -> None:
        self._keys()
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        names = "".join(f"10.99.0.{k + 1} {host}\n" for k, host in enumerate(self.hosts))
        for k, (host, link) in enumerate(zip(self.hosts, self._links, strict=True)):
            own = Path("/etc/netns") / host
            own.mkdir(parents=True)
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            _ip("netns", "add", host)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", host, "addr", "add", f"10.99.0.{k + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
            server = [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd.conf")]
            with open(self.folder / f"{host}.log", "w") as log:
                self._servers.append(
                    subprocess.Popen(self._on(host, server), stdout=log, stderr=log, start_new_session=True)
                )
        for host in self.hosts:
            stop = time.monotonic() + SECONDS
            while self.run(["ssh", host, "true"]).returncode:
                log = (self.folder / f"{host}.log").read_text()
                assert time.monotonic() < stop, f"sshd of {host} does not answer: {log}"
                time.sleep(0.1)

    def _keys(self) -> None:
        for name in ("host", "user"):
            line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(line, check=True, timeout=SECONDS)
        settings = {
            "HostKey": self.folder / "host", "AuthorizedKeysFile": self.folder / "user.pub", "PermitRootLogin": "yes",
            "PasswordAuthentication": "no", "UsePAM": "no", "StrictModes": "no", "PidFile": "none",
        }  # fmt: skip
        (self.folder / "sshd.conf").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        client = {
            "IdentityFile": self.folder / "user", "IdentitiesOnly": "yes", "UserKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "no", "LogLevel": "ERROR", "ConnectTimeout": "5",
        }  # fmt: skip
        (self.folder / "ssh.conf").write_text("".join(f"{key} {value}\n" for key, value in client.items()))
        own = self.folder / "bin" / "ssh"
        own.parent.mkdir()
        own.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh.conf "$@"\n')
        own.chmod(0o755)

    def _on(self, host: str, line: list[str]) -> list[str]:
        named = f'hostname {host}; exec "$@"'
        return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", named, "sh", *line]

    def started(self, line: list[str], **more: str) -> subprocess.Popen:
        env = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **more}
        return subprocess.Popen(
            self._on(self.hosts[0], line), env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=self.folder, start_new_session=True,
        )  # fmt: skip

    def run(self, line: list[str], seconds: float = 120, **more: str) -> subprocess.CompletedProcess:
        child = self.started(line, **more)
        try:
            out, err = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
            pytest.fail(f"no end after {seconds:g} s: {line}\n{out}\n{err}")
        return subprocess.CompletedProcess(line, child.returncode, out, err)

    def link(self, host: str, state: str) -> None:
        """``down``: the network does not reach it any more; ``up``."""
        _ip("link", "set", self._links[self.hosts.index(host)], state)

    def slow(self, host: str) -> None:
        """0.1 Gbit/s for what a host sends, until ``fast``."""
        rate = ("rate", "100mbit", "burst", "64kb", "latency", "400ms")
        _ip("netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)

    def fast(self, host: str) -> None:
        _ip("netns", "exec", host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def only_ssh(self, host: str) -> None:
        """Drop all that comes to a host but for ssh, until ``all_ports``."""
        rules = "type filter hook input priority 0; policy drop;\niifname lo accept\ntcp dport 22 accept\n"
        table = f"table inet only_ssh {{\nchain input {{\n{rules}tcp sport 22 accept\n}}\n}}\n"
        subprocess.run(["ip", "netns", "exec", host, "nft", "-f", "-"], input=table, text=True, check=True)

    def all_ports(self, host: str) -> None:
        _ip("netns", "exec", host, "nft", "delete", "table", "inet", "only_ssh")

    def left(self) -> list[str]:
        """Command lines of what runs on the hosts besides sshd."""
        found = []
        for host in self.hosts:
            listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False).stdout
            for pid in listed.split():
                with suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found += [line] if line and "sshd" not in line else []
        return found

    def stop(self) -> None:
        for server in self._servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        for host in self.hosts:
            listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False).stdout
            for pid in listed.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)
        for link in (*self._links, self._bridge):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def missing() -> str:
    """Why there can be no such hosts here; empty: nothing is missing."""
    tools = [name for name in ("ip", "tc", "ssh", "ssh-keygen", "unshare") if shutil.which(name) is None]
    if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        tools.append("sshd")
    if tools:
        return f"needs {', '.join(tools)} (apt install openssh-server openssh-client iproute2)"
    if os.geteuid():
        return "needs root, for network namespaces"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this machine gives no network namespaces"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=SECONDS)
