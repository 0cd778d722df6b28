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
        try:
            made.start()
        except AssertionError as error:  # no cgroups, for example
            pytest.skip(f"Slurm does not start here: {str(error)[-500:]}")
        yield made
    finally:
        made.stop()
