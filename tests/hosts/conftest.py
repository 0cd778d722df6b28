"""Three hosts for all tests of this folder."""

import pytest

from tests.hosts.network import Network, missing


@pytest.fixture(scope="package")
def network(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    made = Network(tmp_path_factory.mktemp("hosts"), 3)
    try:
        made.start()
        yield made
        assert not made.left(), "left behind"
    finally:
        made.stop()
