"""The faults of ``tests/faults.md``: each is planted in a copy of the repository, where tests must fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.limits import SECONDS

ROOT = Path(__file__).parents[1]
COPIED = ("hvd_train", "pt_models", "tf_models", "scripts", "tests", "setup.cfg", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Fault:
    number: int
    changes: list[tuple[str, str, str]]  # (file, old lines, new lines)
    tests: list[str]

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Change the files; change them back in the end."""
        texts = {name: (root / name).read_text() for name, _, _ in self.changes}
        try:
            for name, old, new in self.changes:
                (root / name).write_text((root / name).read_text().replace(old, new))
                # Python compiles a module again where size or whole seconds changed: the number is another second.
                os.utime(root / name, (self.number, self.number))
            yield
        finally:
            for name, text in texts.items():
                (root / name).write_text(text)
                os.utime(root / name, (0, 0))


def read_page() -> list[Fault]:
    """Return the faults of the page, in its order."""
    page = Path(__file__).with_name("faults.md").read_text()
    return [
        read_fault(int(number), text) for number, text in re.findall(r"^## (\d+): .*\n((?:(?!#).*\n)*)", page, re.M)
    ]


def read_fault(number: int, text: str) -> Fault:
    """Read the text below a heading: diffs, and the line with the tests."""
    changes = []
    for diff in re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S):
        for name, lines in re.findall(r"^--- a/.*\n\+\+\+ b/(.*)\n((?:(?!--- a/).*\n)*)", diff, re.M):
            for part in filter(None, re.split(r"^@@.*\n", lines, flags=re.M)):
                old, new = ("".join(re.findall(rf"^[ {sign}](.*\n)", part, re.M)) for sign in "-+")
                changes.append((name, old, new))
    caught_by = "".join(re.findall(r"^Caught by: .*$", text, re.M))
    return Fault(number, changes, re.findall(r"tests/\S+?::\w+(?:\[[^]]*\])?", caught_by))


FAULTS = read_page()


def test_each_number_occurs_once():
    assert FAULTS and Counter(fault.number for fault in FAULTS).most_common(1)[0][1] == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number:02}")
def test_the_page_is_up_to_date(fault):
    assert fault.changes and fault.tests
    for name, old, new in fault.changes:
        text = (ROOT / name).read_text()
        assert old != new and text.count(old) == 1, f"{name} has these lines {text.count(old)} times:\n{old}"
        if name.endswith(".py"):
            ast.parse(text.replace(old, new))
    for test in fault.tests:
        name, function = test.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / name).read_text(), f"{test} is not there"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Run tests in the copy; return pytest's exit code and its output."""
    line = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--long", *tests]
    env = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(line, cwd=copy, env=env, capture_output=True, text=True, timeout=4 * SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long("the tests run by themselves")
def test_the_tests_pass_without_a_fault(copy):
    code, output = run(copy, sorted({test for fault in FAULTS for test in fault.tests}))
    assert code == 0, output[-3000:]


@pytest.mark.long("plants a fault, and runs a test of the suite, for each fault")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number:02}")
def test_a_test_fails(copy, fault):
    with fault.planted(copy):
        code, output = run(copy, fault.tests)
    # An error is no failure: it is that of a fixture or an import.
    assert code == 1 and re.search(r"^\d+ failed", output.splitlines()[-1]), output[-3000:]
