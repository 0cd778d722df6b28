"""The README: what it shows runs and prints what it says, and its pictures are drawn by its scripts."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.cli.test_guide import PAGES, ROOT, as_typed, blocks
from tests.limits import SECONDS

README = PAGES["README"]
LONGEST = 130  # lines
NUMBER = re.compile(r"-?\d[\d,.]*(?:e[-+]\d+)?|(?<= )nan(?= )")


def test_it_is_short():
    assert len(README.splitlines()) <= LONGEST


def script(sign):
    """Return the script before (-) or after (+) the change that is shown."""
    (diff,) = blocks(README, "diff")
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in f" {sign}")


def test_the_scripts(tmp_path):
    """Six lines change. Before and after it the script learns, on one rank and on two, where rank 0 alone prints."""
    (diff,) = blocks(README, "diff")
    assert sum(line[0] in "+-" for line in diff.splitlines()) == 6
    (tmp_path / "train.py").write_text(script("-"))
    before = as_typed([sys.executable, "train.py"], tmp_path)
    (tmp_path / "train.py").write_text(script("+"))
    alone = as_typed([sys.executable, "train.py"], tmp_path)
    (line,) = (line for line in "\n".join(blocks(README, "sh")).splitlines() if "train.py" in line)
    on_two = as_typed(shlex.split(line, comments=True), tmp_path)
    for printed in (before, alone, on_two):
        losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", printed, re.MULTILINE)]
        assert len(losses) == 5 and losses[-1] < losses[0] / 2, printed


def printed_blocks():
    """Return the blocks without a language, which show what a command prints."""
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if not kind]


def shows(shown, printed):
    """Whether all lines of ``shown`` were printed in this order, with whatever numbers; "..." stands for any lines."""
    lines = iter(printed.splitlines())
    for wanted in shown.splitlines():
        if wanted.strip() not in ("", "..."):
            assert any(plain(line) == plain(wanted) for line in lines), (wanted, printed)


def plain(line):
    """Return the line with # for each number and one space for several."""
    return " ".join(NUMBER.sub("#", line).split())


def test_the_training_and_its_proof(tmp_path):
    (tmp_path / "digits.yaml").write_text(blocks(README, "yaml")[0])
    (fit,) = (line for block in blocks(README, "sh") for line in block.splitlines() if "digits.yaml" in line)
    assert "\ndone: " in as_typed(shlex.split(fit), tmp_path)
    (shown,) = (block for block in printed_blocks() if "hvd-train verify" in block)
    command, rest = shown.split("\n", 1)
    shows(rest, as_typed(shlex.split(command.removeprefix("$ ")), tmp_path))


def test_the_demo(tmp_path):
    """The commands of the demo, for fewer epochs, print what is shown."""
    (shown,) = (block for block in printed_blocks() if "pytorch, cnn" in block)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    demo = (ROOT / "scripts" / "demo").read_text().replace("\\\n", " ")
    fit, compare = (
        next(line for line in demo.splitlines() if f"hvd-train {name}" in line) for name in ("fit", "compare")
    )
    printed = ""
    for framework in ("pytorch", "tensorflow"):
        words = shlex.split(fit.replace("$framework", framework).removeprefix("    .venv/bin/"))
        printed += as_typed([*words, "--set", "max_epochs=2"], tmp_path)
    printed += as_typed(shlex.split(compare.removeprefix(".venv/bin/")), tmp_path)
    shows(shown, printed)


def draw(*words):
    line = [sys.executable, ROOT / "scripts" / "draw", *words]
    subprocess.run(line, check=True, timeout=SECONDS)


COLUMNS = {"Horovod": "bare Horovod", "MultiWorker": "MultiWorkerMirroredStrategy (Keras 2)"}


def test_the_picture_of_speed(tmp_path):
    """It shows the medians of the page of measurements."""
    draw("speed", "-o", tmp_path)
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    results = json.loads((ROOT / "scripts" / "pictures" / "speed.json").read_text())["results"]
    lines = PAGES["measurements"].splitlines()
    for head, models in zip(("| PyTorch |", "| Keras / TensorFlow |"), results.values(), strict=True):
        top = next(k for k, line in enumerate(lines) if line.startswith(head))
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[top : top + 2 + len(models)]]
        for row, engines in zip(table[2:], models.values(), strict=True):
            for name, figures in engines.items():
                if name == "ours":
                    assert int(row[1].replace(" ", "")) == figures["samples_per_second"]
                    continue
                engine, last = name.removesuffix(" (channels last)"), name.endswith("(channels last)")
                words = row[table[0].index(COLUMNS.get(engine, engine))].split(" (")
                shown = words[last].rstrip(")")
                if figures:
                    low, high = figures["interval"]
                    assert low <= figures["ours_is_faster_by"] <= high
                    assert f"{figures['ours_is_faster_by'] + 1e-9:.{len(shown.split('.')[1])}f}" == shown, (name, row)
                else:
                    assert shown == "does not run"


@pytest.mark.long("four trainings; the same commands run with verify")
def test_the_picture_of_equal_runs(tmp_path):
    draw("same", "--epochs", "1", "-o", tmp_path)
    assert (tmp_path / "same.png").stat().st_size > 5_000
