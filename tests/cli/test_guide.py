"""README and guide: every command is parsed, every configuration validated, every block of Python run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hvd_train.cli import guide
from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.data import formats
from hvd_train.errors import ConfigError
from hvd_train.launch.start import environment
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
PAGES = {"README": (ROOT / "README.md").read_text()} | {name: guide.page(name) for name in guide.ORDER}
LAUNCHERS = {"mpirun", "horovodrun", "srun", "apptainer", "docker"}
THEIRS = (
    "srun -N 2 --ntasks-per-node 4 python train.py",
    "mpirun -np 2 python train.py",
    "horovodrun -np 2 python train.py",
    "sbatch job.sbatch",
    "apt install dataset-fashion-mnist",
    "source .venv/bin/activate",
    "pip install ",
    "spack ",
    "rattler-build build ",
    "eb ",
    "git archive ",
    "docker build -t hvd-train -f scripts/packaging/Dockerfile .",
    "apptainer build train.sif scripts/packaging/train.def",
)
WRITTEN = {"first.yaml", "digits.yaml", "job.yaml", "head.yaml"}  # which the reader has written, as the pages say
LINK = re.compile(r"!?\[[^]]*\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(text, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands():
    """Yield (page, command line) of all shell blocks, and of what stands in backticks and needs nothing filled in."""
    for name, text in PAGES.items():
        for block in blocks(text, "sh"):
            for line in block.splitlines():
                yield name, line
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`((?:\.venv/bin/)?hvd-train [^`]+)`", prose):
            if not re.search(r"[A-Z]{3}|\.\.\.", span):
                yield name, span


def parse(words):
    """The command line's own parser, without running the command."""
    command, rest, context = cli, list(words), None
    while isinstance(command, click.Group) and rest:
        # A command keeps the help options of the first context that it is in, so it needs its parents'.
        context = command.make_context("", rest[:], context, resilient_parsing=True)
        name, command, rest = command.resolve_command(context, rest)
    return command.make_context(name, rest, context).params


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_commands(page, line):
    words = shlex.split(line, comments=True)
    if not words or line.startswith(THEIRS):
        return
    if words[0] in LAUNCHERS:
        words = words[words.index("hvd-train") :]
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "hvd-train":
        if ">" in words:
            words = words[: words.index(">")]
        if "FRAMEWORK" in line:
            words = [word.replace("FRAMEWORK", "tensorflow") for word in words]
        assert words[1] in cli.commands
        options = parse(words[1:]) if len(words) > 2 else {}  # a command's name alone is a word
        path = options.get("path")
        assert path is None or str(path) in WRITTEN or (ROOT / path).exists()
        if options.get("sets"):
            load_config(path if path and (ROOT / path).exists() else None, options["sets"])
        return
    script = ROOT / words[0]
    assert script.exists(), line
    for option in words[1:]:
        assert not option.startswith("--") or option.split("=")[0] in help_of(script), option


# In tests/slurm and tests/hosts; nobody here has a container.
ELSEWHERE = re.compile(
    r"--slurm |\b(srun|sbatch|submit|docker|apptainer|host1|node1|hosts\.txt|source|pip|apt|scripts/\w+)\b(?!/)"
    r"|^(spack|rattler-build|eb|git) |framework=jax"
)
TINY = "{data: {name: digits}, model: {name: mlp, hidden: [8]}, max_epochs: 2, tensorboard: false, run_dir: runs/job}"
SCRIPT = """
import torch
import hvd_train.torch as ht
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
data = torch.utils.data.TensorDataset(torch.rand(20, 3), torch.rand(20, 2))
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for x, y in ht.shard(torch.utils.data.DataLoader(data, 4, shuffle=True)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
OWN_TESTS = {"fine-tuning"}  # pages whose examples run in tests of their own
# Pages that begin with a whole script, and the file that it saves.
SCRIPT_PAGES = {"pytorch-script": "digits.pt", "keras-script": "digits.keras"}
PAGES_RUN = [
    name if name == "packing" else pytest.param(name, marks=pytest.mark.long("other pages run each time"))
    for name in PAGES
    if name not in {"README", *SCRIPT_PAGES, *OWN_TESTS}
    and any(page == name and not ELSEWHERE.search(line) and len(line.split()) > 2 for page, line in commands())
]


@pytest.mark.parametrize("page", PAGES_RUN)
def test_commands_run(tmp_path, page):
    """Run a page's commands in turn, in one folder; a small job stands for the reader's."""
    first = next(block for block in blocks(PAGES["first-run"], "yaml") if "runs/first" in block)
    (tmp_path / "first.yaml").write_text(first.replace("max_epochs: 20", "max_epochs: 2"))
    (tmp_path / "job.yaml").write_text(TINY)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    write_photos(tmp_path / "photos")
    lines = [line for name, line in commands() if name == page and not ELSEWHERE.search(line)]
    for run, fit in (
        ("runs/first", "hvd-train fit -c first.yaml"),
        ("runs/second", "hvd-train fit -c first.yaml --run-dir runs/second"),
    ):
        makes = [" fit " in line and (run in line or run == "runs/first" and "first.yaml" in line) for line in lines]
        if any(run in line for line in lines) and not any(makes):
            lines = [fit, *lines]  # which the reader has from the page before
    done = 0
    for line in lines:
        words = shlex.split(line, comments=True)
        if len(words) < 3:
            continue
        if "scripts/configs" in line and "fit" in words:  # of minutes
            words += ["--set", "max_steps=1", "--set", "limit_val_batches=1"]
        if "modes" in words:  # each of which starts ranks of its own
            words += ["--modes", "synchronous,int8", "--steps", "8", "--turns", "1"]
        if "plan" in words:
            words += ["--seconds", "5"]
        if "scale" in words and not {"--collect", "--branch"} & set(words):
            words += ["--steps", "16", "--repeats", "1"]
        words[0] = words[0].removeprefix(".venv/bin/")
        for taken in ("job", "default"):  # a page shows other ways to do the same
            shutil.rmtree(tmp_path / "runs" / taken, ignore_errors=True)
        as_typed(words, tmp_path)
        done += 1
    assert done


@pytest.mark.parametrize(("page", "saved"), SCRIPT_PAGES.items())
def test_whole_scripts(tmp_path, page, saved):
    """The script at the top of a page learns on two ranks when it is started as the page says."""
    (tmp_path / "train.py").write_text(blocks(PAGES[page], "python")[0])
    printed = as_typed(shlex.split(blocks(PAGES[page], "sh")[0]), tmp_path)
    accuracies = [float(number) for number in re.findall(r"^(?:epoch \d: )?accuracy (\S+)$", printed, re.MULTILINE)]
    assert len(accuracies) == (5 if page == "pytorch-script" else 1), printed  # printed by rank 0 alone
    assert accuracies[-1] > 0.9 and (tmp_path / saved).exists()


def write_photos(folder, classes=None):
    for k, (image, label) in enumerate(zip(*(x[:40] for x in formats.read_digits()), strict=True)):
        path = folder / (classes[label % len(classes)] if classes else str(label)) / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).convert("RGB").save(path)


def as_typed(words, folder):
    """Runs a command in ``folder`` with the environment's tools, as a user does."""
    tools = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    tools |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # four ranks, on however many cores
    run = subprocess.run(words, cwd=folder, env=tools, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, (words, run.stdout[-2000:] + run.stderr[-2000:])
    return run.stdout


def fits():
    """Yield (page, configuration, more words) of all blocks that describe a training.

    The first block of three pages runs each time, the others with --long.
    """
    for page, text in PAGES.items():
        for k, block in enumerate(blocks(text, "yaml") if page not in OWN_TESTS else ()):
            if not re.search(r"^(model|data|task):", block, re.MULTILINE):
                continue
            always = page in ("model-and-data", "own-loss", "tables") and k == 0
            marks = () if always else pytest.mark.long("the first example of each page runs each time")
            short = ["--set", "max_epochs=1"] if "max_epochs: 20" in block else []
            yield pytest.param(page, block, short, marks=marks, id=f"{page} {k}")
            more = [["-np", "2"]] + [["--set", "framework=tensorflow"]] * ("or tensorflow" in block)
            for words in more:
                long = pytest.mark.long("one rank runs each time")
                yield pytest.param(page, block, [*short, *words], marks=long, id=f"{page} {k} {words[-1]}")


@pytest.mark.parametrize(("page", "block", "words"), [*fits()])
def test_configurations_train(tmp_path, page, block, words):
    """Train as shown, with the functions of the page in mine.py and files as the page describes them."""
    code = blocks(PAGES[page], "python")
    code = code[:1] if page == "own-loss" else code  # what follows trains from Python
    (tmp_path / "mine.py").write_text("\n".join(code) if "mine:" in PAGES[page] else "")
    (tmp_path / "job.yaml").write_text(block)
    if "photos" in block or "packed" in block:
        write_photos(tmp_path / "photos", ["cat", "dog", "bird"] if "cat" in block else None)
    if "packed" in block:
        as_typed(["hvd-train", "data", "pack", "photos", "packed", "--set", "data.image_size=64"], tmp_path)
    if "houses.csv" in block:  # which the page's code writes
        (tmp_path / "houses.py").write_text("\n".join(code))
        as_typed([sys.executable, "houses.py"], tmp_path)
    if "people.csv" in block:
        rows = [
            f"{20 + k},{['Rome', '', 'Oslo'][k % 3]},19{60 + k}-03-01,{['low', 'high'][k // 20]}" for k in range(40)
        ]
        (tmp_path / "people.csv").write_text("\n".join(["age,city,hired,income", *rows, ",Rome,1950-01-01,low"]))
    if "texts.jsonl" in block:
        as_typed([sys.executable, "-c", "import mine; mine.write_texts()"], tmp_path)
    printed = as_typed(["hvd-train", "fit", "-c", "job.yaml", *words], tmp_path)
    assert "\ndone: " in printed
    if "houses.csv" in block:  # the page promises 0.97 on two ranks
        assert float(re.search(r"^done: .* r2 ([\d.]+)", printed, re.MULTILINE)[1]) > 0.95


def help_of(script):
    """Return a script's text, which has its help; scripts/test hands its words to pytest."""
    return script.read_text() + (ROOT / "tests" / "conftest.py").read_text()


def test_container_recipes():
    """The page shows the files; both hold the same: what the package needs, and what scripts/setup builds with."""
    text = PAGES["containers"]
    docker, apptainer = ((ROOT / "scripts" / "packaging" / name).read_text() for name in ("Dockerfile", "train.def"))
    assert blocks(text, "dockerfile") == [docker] and blocks(text, "apptainer") == [apptainer]
    lines = [line.split(maxsplit=1) for line in docker.replace("\\\n", " ").splitlines()]
    assert {word for word, _ in lines} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}
    head, *parts = re.split(r"^%(\w+)\n", apptainer, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(sections) == {"files", "post", "environment", "runscript"}
    base = next(rest for word, rest in lines if word == "FROM")
    assert head.split() == ["Bootstrap:", "docker", "From:", base]
    setup = (ROOT / "scripts" / "setup").read_text()
    assert base.removeprefix("python:").removesuffix("-slim") in re.search(r"PYTHONS = \((.*)\)", setup)[1]
    pinned = re.search(r'OPENMPI = ".*", ".*", "(.*)"', setup)[1]
    assert f"({pinned} is inside)" in text

    home = "/opt/hvd_train"
    copied = {source for word, rest in lines if word == "COPY" for source in rest.split()[:-1]}
    files = [line.split() for line in sections["files"].splitlines() if line.strip()]
    assert {source for source, _ in files} == copied and all(target == f"{home}/{name}" for name, target in files)
    declared = re.findall(r"^    (\w+)\*$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert copied == {*declared, "scripts", "LICENSE", "pyproject.toml", "setup.cfg"}
    assert all((ROOT / name).exists() for name in copied) and ["WORKDIR", home] in lines

    run = "\n".join(rest for word, rest in lines if word == "RUN")
    for shell in (run, *(sections[name] for name in ("post", "environment", "runscript"))):
        subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
    steps = [re.sub(r"\s*&&\s*|\n", "\n", shell).split("\n") for shell in (run, sections["post"])]
    docker_steps, post = ([" ".join(step.split()) for step in each if step.strip()] for each in steps)
    assert [step for step in post if step not in ("set -e", f"cd {home}")] == docker_steps
    assert "g++" in setup and any(" g++ " in step for step in post)
    called = [sys.executable, ROOT / "scripts" / "setup", *shlex.split(next(s for s in post if "setup" in s))[1:]]
    shown = subprocess.run([*called, "--help"], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert shown.returncode == 0, shown.stderr
    path = f"PATH={home}/.venv/bin:$PATH"
    assert ["ENV", path] in lines and sections["environment"].split() == ["export", path]
    assert ["ENTRYPOINT", '["hvd-train"]'] in lines and sections["runscript"].split() == ["exec", "hvd-train", '"$@"']


def test_configurations(tmp_path):
    shown = [block for text in PAGES.values() for block in blocks(text, "yaml")]
    assert shown
    for block in shown:
        (tmp_path / "job.yaml").write_text(block)
        load_config(tmp_path / "job.yaml")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = ROOT if page == "README" else guide.PAGES
    for target in LINK.findall(PAGES[page]):
        assert target.startswith("https://") or (folder / target).exists(), target
    for target, heading in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", PAGES[page]):
        linked = (folder / target).read_text() if target else PAGES[page]
        headings = re.findall(r"^##+ (.*)$", linked, re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings}, (target, heading)


# Speed, memory and accuracy that somebody measured, and the commands that measure them.
FIGURE = re.compile(r"\d (?:times (?:as (?:fast|slow)|the)|(?:samples|images)/s|m?s a step|MiB a rank|%)")
MEASURES = re.compile(r"scripts/(?:bench|demo|test|torture)\b|hvd-train (?:fit|modes|verify|scale|plan|explain)\b")


@pytest.mark.parametrize("page", PAGES)
def test_figures_stand_beside_the_command_that_made_them(page):
    for section in re.split(r"^##+ ", PAGES[page], flags=re.MULTILINE):
        if section.startswith("On a GPU"):  # measured by hand, as the section says
            continue
        prose = re.sub(r"^```.*?^```$|`[^`]*`", "", section, flags=re.MULTILINE | re.DOTALL)
        assert not FIGURE.search(prose) or MEASURES.search(section), FIGURE.search(prose)


# What the blocks of a page build on.
BEFORE = {
    "own-script": """
import torch, numpy as np
model, optimizer = (m := torch.nn.Linear(3, 2)), torch.optim.SGD(m.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 3)), 4, shuffle=True)
loss, count = 2.0, 8
""",
}
BEFORE["fine-tuning"] = """
import torch
torch.save({"model_state_dict": {"a": torch.ones(2)}}, "theirs.pt")
"""
BEFORE["pytorch-script"] = "# anew\n" + BEFORE["own-script"]
AFTER = {"model-and-data": "network((1, 8, 8), 4)(torch.from_numpy(squares()[0][0][:2]).permute(0, 3, 1, 2))"}
KERAS = """
import hvd_train.keras as hk
import keras, numpy as np, tensorflow as tf
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
x, y, xv, yv = np.zeros((8, 3)), np.zeros((8, 2)), np.zeros((4, 3)), np.zeros((4, 2))
"""


def test_python(tmp_path):
    """All blocks of a page in turn, as in a notebook; the pages in one process, Keras' in another."""
    torch_code, keras_code = [], []
    (tmp_path / "my_hooks.py").write_text(next(x for x in blocks(PAGES["python-api"], "python") if "class Best" in x))
    for name, text in PAGES.items():
        torch_code.append(BEFORE.get(name, ""))
        for block in blocks(text, "python")[name in SCRIPT_PAGES :]:
            if "hvd_train.keras" in block:
                if "loss=..." in block:  # of a model that gives numbers
                    block = block.replace("loss=...", "loss='mse'").replace('metrics=["accuracy"]', "")
                block = block.replace("callbacks=[...]", "callbacks=[]").replace("epochs=5", "epochs=1")
                keras_code.append(KERAS + block)
            else:
                torch_code.append(block.replace("np=2", "np=1"))  # the same, cheaper
        torch_code.append(AFTER.get(name, ""))
    for code in (torch_code, keras_code):
        assert len(code) > 1
        (tmp_path / "blocks.py").write_text("\n".join(dict.fromkeys(code)))  # pages repeat some
        line = [sys.executable, "blocks.py"]
        run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr[-3000:]


def test_the_page_of_python_as_shown(tmp_path):
    """Its file of hooks, its other blocks as one script that starts two ranks, and its hooks from the command line."""
    blocks_of = blocks(PAGES["python-api"], "python")
    (hooks,) = (block for block in blocks_of if "class Best" in block)
    (tmp_path / "my_hooks.py").write_text(hooks)
    (tmp_path / "page.py").write_text("\n".join(block for block in blocks_of if block != hooks))
    printed = as_typed(["python", "page.py"], tmp_path)
    assert "['hello from rank 0 of 2', 'hello from rank 1 of 2']\n" in printed
    (block,) = blocks(PAGES["python-api"], "yaml")
    (tmp_path / "job.yaml").write_text(block)
    printed = as_typed(
        ["hvd-train", "fit", "-c", "job.yaml", "--set", "max_epochs=9", "--set", "optim.lr=0.1"], tmp_path
    )
    assert "good enough" in printed


@pytest.mark.long("the page's network of PyTorch runs with the other pages")
def test_the_network_of_keras_for_samples_of_different_lengths(tmp_path):
    code, network = blocks(PAGES["lengths"], "python")[:2]
    (tmp_path / "mine.py").write_text(f"{code}\n{network}")
    (tmp_path / "job.yaml").write_text(
        blocks(PAGES["lengths"], "yaml")[0].replace("mine:network", "mine:keras_network")
    )
    words = ["--set", "framework=tensorflow", "--run-dir", "runs/lengths"]
    printed = as_typed(["hvd-train", "fit", "-np", "2", "-c", "job.yaml", *words], tmp_path)
    assert float(re.search(r"^done: .* accuracy ([\d.]+)", printed, re.MULTILINE)[1]) > 0.5
    for line in ("eval --run-dir runs/lengths --trust", "predict --run-dir runs/lengths --trust -o classes.npy"):
        as_typed(["hvd-train", *line.split()], tmp_path)


def test_the_command():
    listed = CliRunner().invoke(cli, ["guide"]).output
    assert all(f"{name} " in listed for name in guide.ORDER)
    assert {path.stem for path in guide.PAGES.glob("*.md")} == set(guide.ORDER)
    shown = CliRunner().invoke(cli, ["guide", "errors"]).output
    assert "When things go wrong" in shown and "NonFiniteError" in shown and "|---|" not in shown
    found = CliRunner().invoke(cli, ["guide", "Freeze"])
    assert found.exit_code == 0 and "fine-tuning" in found.output and "transfer-learning" in found.output
    assert isinstance(CliRunner().invoke(cli, ["guide", "eror"]).exception, ConfigError)
    with pytest.raises(ConfigError, match="the guide has no page 'error'; hvd-train guide; did you mean 'errors'"):
        guide.page("error")
