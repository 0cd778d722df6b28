"""Our ``horovodrun``: it starts ranks, and strangers who know its ports can neither run code nor end the job.

Each rank is a stranger first. It sends what runs code in stock Horovod (CVE-2024-10190) to each port of the job.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch.launchers import installed
from hvd_train.launch.start import environment
from tests.launching import needs_horovod
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = """
import base64, http.client, os, pathlib, pickle, socket
import psutil
class Evil:
    def __reduce__(self): return pathlib.Path.touch, (pathlib.Path("evil"),)
pickled = base64.b64encode(pickle.dumps(Evil()))
def send(address, port, method, path, body):
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):  # it speaks no HTTP
        return None
me = psutil.Process()
job = [one for one in (me, *me.parents()) if "pytest" not in " ".join(one.cmdline()) and one.pid > 1]
places = {c.laddr for one in job for c in one.net_connections() if c.status == "LISTEN"}
server = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").partition(":")[0]
for address, port in sorted(places):
    for method, path, body in [
        ("PUT", "/worker_addresses/localhost:0", pickled), ("PUT", "/runfunc_result/1", pickled),
        ("PUT", "/global/0", pickled), ("DELETE", "/global/0", b""), ("GET", "/runfunc/func", b""),
    ]:
        status = send("127.0.0.1" if ":" in address or address == "0.0.0.0" else address, port, method, path, body)
        assert status in (None, 403, 501), (address, port, method, path, status)
    if server:
        assert address == "127.0.0.1", places
shown = " ".join(" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
for token in os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").split("/")[1:]:
    assert token not in shown

import torch
import hvd_train.torch as ht
model = torch.nn.Linear(1, 1)
model, _ = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
total = ht.sum(ht.rank() + 1)
ht.print(f"ports {len(places)} sum {total:g}")
"""


def horovodrun(*words, cwd=ROOT, code=0):
    needs_horovod()
    line = [sys.executable, "-P", "-m", "hvd_train.cli.horovodrun", *words]
    env = environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_a_job_survives_strangers(library, tmp_path):
    if library == "mpi" and not installed.mpi_built():
        pytest.skip("Horovod was built without MPI")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = horovodrun(f"--{library}", "-np", "2", sys.executable, "train.py", cwd=tmp_path)
    assert "sum 3" in done.stdout and not (tmp_path / "evil").exists(), done.stdout
    assert "ports 0" not in done.stdout  # or nothing was tried


def test_options_of_the_program_are_its_own(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    done = horovodrun("-np", "1", sys.executable, "train.py", "-np", "7", "--gloo", "--help", cwd=tmp_path, code=3)
    assert done.stdout == "['-np', '7', '--gloo', '--help']\n"


@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_a_program_by_its_name(library, tmp_path, monkeypatch):
    """Over Gloo only a program's path was found. ``python`` is this environment's, also where it is not on PATH."""
    if library == "mpi" and not installed.mpi_built():
        pytest.skip("Horovod was built without MPI")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "train.py").write_text("import hvd_train, os, sys\nos.write(1, f'{sys.executable}\\n'.encode())\n")
    done = horovodrun(f"--{library}", "-np", "2", "python", "train.py", cwd=tmp_path)
    assert done.stdout.splitlines() == [str(Path(sys.executable).parent / "python")] * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-np", "2", "nosuch"], "error: there is no program 'nosuch'; host "),
        (["--gloo", "-np", "2", "-H", "localhost:2", "nosuch"], "error: there is no program 'nosuch'; host "),
        (["-np", "2"], "Missing argument 'PROGRAM...'"),
        (["-np", "0", "true"], "0 is not in the range x>=1"),
        (["--elastic", "-np", "2", "true"], "No such option '--elastic'"),
        (["--gloo", "--mpi", "true"], "give one of them"),
        (["-np", "3", "-H", "localhost:2", "true"], "3 ranks on hosts with 2 slots"),
    ],
)
def test_mistakes(words, told):
    done = horovodrun(*words, code=2)
    assert told in done.stderr and "Traceback" not in done.stderr
