"""One Slurm for all tests of this folder."""

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    absent = missing()
    if absent:
        pytest.skip(f"no {', '.join(absent)} here: apt-get install slurm-wlm munge")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()
