from __future__ import annotations

import pytest

from tests.cli.running import run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = run("fit", "-c", "scripts/configs/tiny.yaml", "--run-dir", str(folder), "--set", "precision=64")
    return folder, done.stdout
