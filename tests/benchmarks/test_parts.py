"""The parts of ``scripts/bench``: each one's ranks start, and with its smallest settings it runs to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_train.launch.start import environment
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "benchmarks"
PROGRAM = """
import os
from pathlib import Path
from beside import ENGINE

names = "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "COPY"
rank = next((os.environ[name] for name in names if name in os.environ), "0")
Path(f"{ENGINE}.{rank}").touch()
"""
ENGINES = {"ours": "01", "ours (Gloo)": "01", "copies": "01", "one process": "0"}
ENGINES |= {"Horovod": "01"} if find_spec("horovod") else {}
# part: what makes it small, and a call of it
SMALL = {
    "loop": "m.BLOCK, m.ROUNDS = 2, 1; rows = [m.compare('pytorch')]",
    "account": "import loop; loop.BLOCK, loop.ROUNDS = 2, 1; rows = [m.compare('tensorflow', 'mlp')]",
    "growth": "m.STEPS = 2, 4; rows = [m.train('tensorflow')]",
    "start": "rows = m.started([('pytorch', 2, [], ['-np', '2'])])",
    "launchers": "m.FRAMEWORKS, m.RANKS = ('pytorch',), (2,); rows = m.measure()",
    "workers": "m.BLOCKS = 1; rows = m.measure()",
    "pack": "m.IMAGES, m.BLOCKS = 4100, 1; rows = m.measure()",
    "lengths": "m.FRAMEWORKS, m.TURNS, m.EPOCHS, m.COUNT = ('tensorflow',), 1, 1, 200; rows = m.measure()",
    "bubble": "m.FRAMEWORKS, m.COUNTS, m.TURNS = ('pytorch',), (2, 4), 1; m.LIMITS = m.Limits(8); rows = m.measure()",
    "slow_rank": "m.FRAMEWORKS, m.RANKS, m.TURNS = ('pytorch',), (2,), 1; m.PAUSE = 0.001; rows = m.measure()",
    "sweep": "m.TRIALS = 2; rows = m.measure()",
    "sampler": "rows = m.measure()",
    "compare": "rows = [*m.compare('pytorch', 'cnn', 1, 0.1, ['ours', 'ours (Gloo)']).values()]",
    "memory": "rows = m.measured(m.Engine('tensorflow', 'ours', 'mpirun'), m.BACK, 'cnn', 2)",
}
COMMANDS = {
    "modes": "--frameworks pytorch --models cnn --rates here --modes synchronous --steps 8 --turns 1",
    "survival": "saves checks --framework pytorch --pairs 2",
    "insight": "--frameworks pytorch --models mlp --ranks 1,2 --repeats 2 --seconds 1 --plan-seconds 20 "
    "--target val_accuracy=0.1 --seeds 1 --epochs 1",
    "gpu": "--small --models mlp --engines bare;script;fit",
    "link": "--frameworks pytorch --model cnn --rates 1gbit --engines fp16 --rounds 1 --seconds 0.1",
}


def python(code: str, folder: Path) -> str:
    """Run code that imports the benchmarks, as ``scripts/bench`` does, and return what it prints."""
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER)])}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_engines_start_with_what_lies_beside_their_program(tmp_path):
    """Ranks of ours could not import it, and over Gloo one process started and waited for another."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("import sys\nENGINE = sys.argv[1]\n")
    starts = (
        "import subprocess, compare; from hvd_train.launch.start import environment\n"
        "for one in compare.engines('pytorch', 'mlp'):\n"
        f"    if one.name in {[*ENGINES]}:\n"
        "        lines = compare.on_this_host(one, ['program.py', one.name])\n"
        "        jobs = [subprocess.Popen(line, env=environment() | more) for line, more in lines]\n"
        "        assert not any([job.wait() for job in jobs]), one\n"
    )
    python(starts, tmp_path)
    started = {f"{name}.{rank}" for name, ranks in ENGINES.items() for rank in ranks}
    assert {path.name for path in tmp_path.iterdir() if path.suffix[1:].isdigit()} == started


def test_none_is_forgotten():
    text = (ROOT / "scripts" / "bench").read_text()
    (parts,) = re.findall(r"^PARTS = \((.*?)\)$", text, re.MULTILINE | re.DOTALL)
    (commands,) = re.findall(r"^COMMANDS = \((.*?)\)$", text, re.MULTILINE)
    named = {*re.findall(r'"(\w+)"', parts + commands)}
    assert named - {*SMALL, *COMMANDS} == {"accuracy"}, "which needs Fashion-MNIST"


LONG = pytest.mark.long("benchmarks run by hand; the engines' start is tried in every run")


@LONG
@pytest.mark.parametrize("part", SMALL)
def test_a_part_runs(tmp_path, part):
    rows = json.loads(
        python(f"import json, {part} as m\n{SMALL[part]}\nprint(json.dumps(rows))", tmp_path).splitlines()[-1]
    )
    assert rows and not any("error" in row for row in rows), rows


@LONG
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(tmp_path, command):
    if command == "link" and os.geteuid():
        pytest.skip("network namespaces are made by root")
    line = [ROOT / "scripts" / "bench", command, *COMMANDS[command].split(), "-o", tmp_path / "results"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "results").exists()
