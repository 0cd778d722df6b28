"""Horovod's own ``horovodrun`` and ``horovod.run`` with our patch: strangers can neither run code nor end a job.

It is there only after ``scripts/setup --bindings stock`` or ``both``. Each rank is a stranger first, which knows the
port and nothing else (CVE-2024-10190).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch.start import environment
from tests.limits import SECONDS

pytest.importorskip("horovod")
BIN = Path(sys.executable).parent
STRANGER = """
import base64, http.client, os, pathlib, pickle, sys
import psutil
class Evil:
    def __reduce__(self): return pathlib.Path.touch, (pathlib.Path("evil"),)
def attack(address, port):
    pickled = base64.b64encode(pickle.dumps(Evil()))
    for method, path, body in [
        ("PUT", "/worker_addresses/localhost:0", pickled),
        ("PUT", "/worker_addresses/localhost:1", b"0" * 32 + pickled),
        ("PUT", "/global/0", b"x"), ("PUT", "/global/1", b"x"), ("PUT", "/runfunc_result/1", pickled),
        ("PUT", "/x", b""), ("GET", "/worker_addresses/localhost:0", b""), ("GET", "/runfunc/func", b""),
        ("DELETE", "/global/0", b""), ("DELETE", "/", b""),
    ]:
        connection = http.client.HTTPConnection(address, port, timeout=60)
        connection.request(method, path, body)
        status = connection.getresponse().status
        assert status in (403, 501), (method, path, status)
    starters = [
        one for one in psutil.Process().parents() if "python" in one.name() and "pytest" not in " ".join(one.cmdline())
    ]
    everywhere = [
        place for one in starters
        for place in one.net_connections() if place.status == "LISTEN" and place.laddr.ip != "127.0.0.1"
    ]
    assert not everywhere, everywhere
    shown = " ".join(" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
    assert os.environ["HOROVOD_RUN_KEY"] not in shown
    for token in os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").split("/")[1:]:
        assert token not in shown
"""
JOB = """
from stranger import attack
address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0]
attack(address, int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
"""
SUM = """
import torch, horovod.torch as hvd
hvd.init()
print("sum", int(hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum)))
"""
CALL = """
import horovod
def work():
    import sys, stranger
    stranger.attack(sys.argv[1], int(sys.argv[2]))
    return 7
if __name__ == "__main__":
    print("sum", sum(horovod.run(work, num_proc=2, use_gloo=sys.argv[1] == "gloo", use_mpi=sys.argv[1] == "mpi")))
"""


@pytest.fixture
def run(tmp_path):
    def start(program: str, *words: str) -> str:
        (tmp_path / "stranger.py").write_text(STRANGER)
        (tmp_path / "job.py").write_text("import os, sys\n" + program)
        (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
        (tmp_path / "hosts.sh").chmod(0o755)
        env = environment() | {"PATH": f"{BIN}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        line = [*words, "job.py"] if words[0] == str(BIN / "horovodrun") else [words[0], "job.py", *words[1:]]
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert not (tmp_path / "evil").exists()
        return done.stdout

    return start


def test_a_job_survives_strangers(run):
    assert run(JOB + SUM, str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable).count("sum 3") == 2


def test_elastic(run):
    elastic = ["--min-np", "2", "--max-np", "2", "--host-discovery-script", "./hosts.sh", "--network-interface", "lo"]
    run(JOB, str(BIN / "horovodrun"), "--gloo", "-np", "2", *elastic, sys.executable)


@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_a_function(run, library):
    """Its function and results are pickles."""
    assert "sum 14" in run(CALL, sys.executable, library)


def test_nothing_unsigned_is_unpickled(tmp_path, monkeypatch):
    """Whoever calls Horovod's parts by themselves, as its Ray and Spark runners do, has no key, and gets an error."""
    from horovod.runner.common.util import codec, secret
    from horovod.runner.http import http_client

    monkeypatch.delenv(secret.RUN_KEY, raising=False)
    with pytest.raises(RuntimeError, match="HOROVOD_RUN_KEY"):
        http_client.unsigned("scope", "key", codec.dumps_base64(1, to_ascii=False))
    monkeypatch.setenv(secret.RUN_KEY, "1")
    content = http_client.signed("scope", "key", [1])
    assert http_client.unsigned("scope", "key", content) == [1]
    with pytest.raises(RuntimeError, match="other/key is not signed by this job"):
        http_client.unsigned("other", "key", content)
