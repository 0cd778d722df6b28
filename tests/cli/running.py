"""Commands as a user gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.launching import needs_horovod
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
# One process runs many command lines, so that PyTorch is loaded once. stdin: lists of arguments.
COMMANDS = """
import contextlib, io, json, os, sys
from hvd_train.cli.main import main
told = []
for line in json.load(sys.stdin):
    sys.argv, code = ["hvd-train", *line], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    told.append([code, out.getvalue(), err.getvalue()])
json.dump(told, sys.stdout)
"""


def run(
    *arguments: str, cwd: Path = ROOT, code: int | None = 0, seconds: int = SECONDS, **environ: str
) -> subprocess.CompletedProcess:
    """Run ``hvd-train`` to its end. ``code``: what it must end with; None: anything."""
    needs_horovod()
    line = [sys.executable, "-m", "hvd_train", *arguments]
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(line, cwd=cwd, env=own, capture_output=True, text=True, timeout=seconds, check=False)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def commands(*lines, cwd: Path = ROOT) -> list[SimpleNamespace]:
    """Run command lines one after the other in one process; return code, out and err of each."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], input=json.dumps([list(map(str, line)) for line in lines]), cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{cwd}:{ROOT}"}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [SimpleNamespace(code=c, out=o, err=e) for c, o, e in json.loads(done.stdout)]
