"""The end of a rank by an error that all ranks have: rank 0 prints it, and no other rank leaves before."""

from __future__ import annotations

import pytest

from hvd_train.errors import ConfigError
from hvd_train.launch import failed_rank as module


@pytest.mark.parametrize(("tag", "printed", "slept"), [("", 1, 0), ("[rank 0]", 1, 0), ("[rank 2]", 0, 1)])
def test_other_ranks_wait_for_rank_0_to_print(monkeypatch, capfd, tag, printed, slept):
    """mpirun ends all ranks when one of them fails: of 36 starts under load, 3 ended without a word."""
    waits = []

    def left(code):
        raise SystemExit(code)

    monkeypatch.setattr(module, "rank_tag", lambda ranks=(): tag)
    monkeypatch.setattr(module.rendezvous, "current", lambda: None)
    monkeypatch.setattr(module.time, "sleep", waits.append)
    monkeypatch.setattr(module, "exit_rank", left)
    with pytest.raises(SystemExit) as end:
        module.exit_with_error(ConfigError("nothing fits", common=True))
    assert end.value.code == 2
    assert capfd.readouterr().err.count("nothing fits") == printed
    assert waits == [module.COMMON_SECONDS] * slept
