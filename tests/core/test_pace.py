"""Ranks that do not wait for one another: each sample once, all meet where something is saved or asked for."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter

import numpy as np
import pytest

from hvd_train.checkpoint.store import find
from hvd_train.config.modes import MODES
from hvd_train.core.control_sync import StopSource
from hvd_train.core.hooks import Hook
from hvd_train.errors import Interrupted, NonFiniteError
from hvd_train.run_folder.log import NullLog, RunLog
from hvd_train.update.state import weights
from tests.core.test_control_sync import Signal
from tests.core.test_loop import VAL, N, Recorder, config, final, same, trainer, without_speed
from tests.limits import SECONDS
from tests.rank_threads import run_ranks

ALL = [name for name, row in MODES.items() if not row.lockstep]
PARTS = {1: 7, 2: 14, 3: 21, 4: 28}  # of an epoch of 53 samples in batches of 8


class Turns:
    """The parts that each rank has taken of each stretch, so that no luck decides who takes the next one.

    Ranks are never more than two parts apart. With ``slow`` the last one does not come out of the first part of a
    stretch before the others have taken all that they can.
    """

    def __init__(self, size, slow):
        self.quick, self.slow = [*range(size - slow)], size - 1 if slow else None
        self.changed, self.parts, self.ended = threading.Condition(), Counter(), set()
        self.stretches = Counter()  # that each rank has ended

    def follow(self, made):
        """Take turns after each part of this rank, before it exchanges anything."""
        rank, due = made.communicator.rank, made._pace.due

        def after_part(at_end):
            found = due(at_end)
            self._take(rank, self.stretches[rank], found.sync)
            self.stretches[rank] += found.sync
            return found

        made._pace.due = after_part

    def _take(self, rank, stretch, last):
        with self.changed:
            self.parts[rank, stretch] += 1
            if last:
                self.ended.add((rank, stretch))
            self.changed.notify_all()
            assert last or self.changed.wait_for(lambda: self._may_go_on(rank, stretch), SECONDS)

    def _may_go_on(self, rank, stretch):
        others = [one for one in self.quick if one != rank and (one, stretch) not in self.ended]
        if rank == self.slow:
            return not others
        return all(self.parts[one, stretch] >= self.parts[rank, stretch] - 1 for one in others)


class Taken(Hook):
    def __init__(self):
        self.parts = []

    def on_step(self, trainer, info):
        self.parts.append(np.concatenate([batch.indices for batch in info.batch.micro_batches]))


def run(size, c, folder, stop_source=None, resume=False, slow=False):
    """[(summary or None where it was interrupted, trainer, the parts that the rank took, an epoch's last is short)]"""
    turns = Turns(size, slow and size > 1)

    def work(communicator):
        hook, written = Taken(), NullLog()
        if communicator.rank == 0:
            written = RunLog(folder, tensorboard=False, total_epochs=3)
        made = trainer(communicator, c, folder, written, resume=resume, hooks=[hook])
        turns.follow(made)
        if communicator.rank == 0 and resume:
            written.resumed_at, written.evaluates_again = made.progress.step, made.progress.ending
        made.stop_source = stop_source if stop_source and communicator.rank == size - 1 else StopSource()
        summary = None
        try:
            summary = made.fit()
        except Interrupted as error:
            assert error.exit_code == 75
        finally:
            written.close()
        return summary, made, hook.parts

    return run_ranks(size, work)


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("size", PARTS)
def test_each_sample_is_used_once_and_a_slow_rank_takes_fewer(tmp_path, mode, size):
    c = config(exchange={"mode": mode}, accumulate_grad_batches=2)
    results = run(size, c, tmp_path, slow=True)
    first = results[0][0]
    assert (first["epochs"], first["steps"], first["train_samples"], first["val_samples"]) == (3, 21, 3 * N, VAL)
    for summary, made, _ in results:
        assert without_speed(summary) == without_speed(first)
        assert same(weights(made.frontend), weights(results[0][1].frontend))
    taken = [index for _, _, parts in results for part in parts for index in part]
    assert sorted(taken) == sorted([*range(N)] * 3)
    counts = [len(parts) for *_, parts in results]
    assert sum(counts) == 3 * PARTS[size]
    if size > 1:  # of each stretch its own part and one ahead; the first one is a step
        assert counts[-1] == 1 + 3 * 2 < min(counts[:-1])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for epoch in range(3):  # the lines add up, and so do the sums of the epoch
        assert sum(row["samples"] for row in rows if row["event"] == "train" and row["epoch"] == epoch + 1) == N


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("size", [1, 3])
def test_a_signal_saves_at_once_and_the_run_goes_on(tmp_path, mode, size):
    """Resumed again and again: each time the ranks meet at one step, and no sample is used twice or left out."""
    c = config(exchange={"mode": mode}, max_epochs=2)
    taken, steps = [], []
    for turn in range(40):
        results = run(size, c, tmp_path, Signal("training", 3), resume=turn > 0)
        assert len({made.progress.step for _, made, _ in results}) == 1
        taken += [index for _, _, parts in results for part in parts for index in part]
        steps.append(results[0][1].progress.step)
        if results[0][0] is not None:
            break
        assert find(tmp_path / "checkpoints")[-1][0] == steps[-1]
    assert len(steps) > 2 and steps == sorted(steps) and steps[-1] == 14
    assert sorted(taken) == sorted([*range(N)] * 2)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_run_goes_on_with_other_ranks(tmp_path, after):
    c = config(exchange={"mode": ALL[0]})
    results = run(3, c, tmp_path, Signal("training", 4))
    assert results[0][0] is None
    before = [index for _, _, parts in results for part in parts for index in part]
    rest = run(after, c, tmp_path, resume=True)
    assert rest[0][0]["train_samples"] == 3 * N and rest[0][0]["steps"] == 21
    assert sorted(before + [i for *_, parts in rest for part in parts for i in part]) == sorted([*range(N)] * 3)


@pytest.mark.parametrize("mode", ALL)
def test_ranks_meet_where_something_is_saved(tmp_path, mode):
    c = config(exchange={"mode": mode}, checkpoint={"every_n_steps": 3, "save_top_k": 100}, max_steps=13)
    seen = []

    class Look(Hook):
        def on_step(self, made, info):
            if info.due.sync:
                seen.append((made.communicator.rank, made.progress.step, made.progress.consumed))

    final(2, c, tmp_path, hooks=[Look()])
    # The first step, each third, the end of each epoch and of the run.
    wanted = [(1, 8), (3, 24), (6, 48), (7, 53), (9, 16), (12, 40), (13, 48)]
    assert [row[1:] for row in seen if row[0] == 0] == [row[1:] for row in seen if row[0] == 1] == wanted


def test_a_wish_to_stop_of_one_rank_is_taken_by_all(tmp_path):
    asked = threading.Event()

    class Stop(Hook):
        def on_step(self, made, info):
            if made.progress.step < 9:
                return
            if made.communicator.rank == 1:
                made.stop("enough")
                asked.set()
            else:  # On a busy machine they would take all parts of the epoch before rank 1 comes out of one.
                assert asked.wait(SECONDS)

    summary, *_ = final(3, config(exchange={"mode": ALL[0]}, max_epochs=9), tmp_path, hooks=[Stop()])
    assert 9 <= summary["steps"] < 14


def test_the_others_do_not_wait_for_a_rank_within_an_epoch(tmp_path):
    """Rank 1 does not come out of its second step before rank 0 has taken all the other parts."""
    others, log = threading.Event(), Recorder()

    class Wait(Hook):
        def __init__(self):
            self.parts = 0

        def on_step(self, made, info):
            self.parts += 1
            if made.communicator.rank == 1 and self.parts == 2:
                assert others.wait(SECONDS)
            # 14 parts: 2 of the first step, and 2 of the others are rank 1's, which takes one ahead. After its last
            # one rank 0 waits.
            if made.communicator.rank == 0 and self.parts == 1 + 12 - 2 - 1:
                others.set()

    c = config(exchange={"mode": ALL[0]}, max_epochs=1, log_every_n_steps=1)

    def work(communicator):
        log_here = log if communicator.rank == 0 else NullLog()
        return trainer(communicator, c, tmp_path, log_here, hooks=[Wait()]).fit()

    assert run_ranks(2, work)[0]["train_samples"] == N
    assert len(log.trains) >= 10, "rank 0 logs while rank 1 stands"


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    c = config(exchange={"mode": ALL[0]}, log_every_n_steps=1)
    with pytest.raises(NonFiniteError, match="the training loss is nan"):
        run_ranks(2, lambda com: trainer(com, c, tmp_path, poison_at=4 if com.rank else None).fit())


def test_the_row_and_the_update_agree():
    for row in MODES.values():
        assert row.update_class.lockstep == row.lockstep


def test_signals_of_other_kinds(tmp_path):
    """SIGUSR1 of a batch system, too."""
    c = config(exchange={"mode": ALL[0]})
    assert run(2, c, tmp_path, Signal("training", 5, signal.SIGUSR1))[0][0] is None
