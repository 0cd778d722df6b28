"""The order of a pipeline's turns, over a grid of stages and micro-batches."""

from __future__ import annotations

import pytest

from hvd_train.frontends.stages.schedule import Turn, bubble, live, turns

GRID = [(name, s, m) for name in ("1f1b", "gpipe") for s in range(1, 9) for m in (1, 2, 3, 4, 7, 8, 16, 33)]


def played(name: str, stages: int, micro: int, backward: int = 1) -> int:
    """The time after which all stages are done, if a forward pass takes 1 and a backward pass ``backward``."""
    orders = [turns(name, stages, micro, stage) for stage in range(stages)]
    at, clock, done = [0] * stages, [0] * stages, {}
    while any(at[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            turn = orders[s][at[s]]
            before = s - 1 if turn.forward else s + 1
            needs = [(s, Turn(True, turn.micro))] if not turn.forward else []
            needs += [(before, turn)] if 0 <= before < stages else []
            if all(need in done for need in needs):
                start = max([clock[s], *(done[need] for need in needs)])
                clock[s] = done[s, turn] = start + (1 if turn.forward else backward)
                at[s], moved = at[s] + 1, True
        assert moved, f"{name} of {stages} stages and {micro} micro-batches waits for ever"
    return max(clock)


@pytest.mark.parametrize(("name", "stages", "micro"), GRID)
def test_each_micro_batch_goes_forward_and_backward_once_and_in_order(name, stages, micro):
    for stage in range(stages):
        order = turns(name, stages, micro, stage)
        assert len(order) == 2 * micro
        for forward in (True, False):
            assert [t.micro for t in order if t.forward is forward] == list(range(micro))
        places = {turn: k for k, turn in enumerate(order)}
        assert all(places[Turn(True, k)] < places[Turn(False, k)] for k in range(micro))


@pytest.mark.parametrize(("name", "stages", "micro"), GRID)
def test_no_stage_waits_for_ever_and_the_bubble_is_as_predicted(name, stages, micro):
    for backward in (1, 2):
        took, busy = played(name, stages, micro, backward), micro * (1 + backward)
        assert took == (micro + stages - 1) * (1 + backward)
        assert 1 - busy / took == pytest.approx(bubble(stages, micro))


@pytest.mark.parametrize(("name", "stages", "micro"), GRID)
def test_a_stage_keeps_few_micro_batches(name, stages, micro):
    for stage in range(stages):
        most = min(stages - stage, micro) if name == "1f1b" else micro
        assert live(turns(name, stages, micro, stage)) == most


def test_as_published():
    """Narayanan et al. 2021, figure 4: the first and the last of 4 stages, 8 micro-batches."""
    assert " ".join(map(str, turns("1f1b", 4, 8, 0))) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert " ".join(map(str, turns("1f1b", 4, 3, 3))) == "F0 B0 F1 B1 F2 B2"
