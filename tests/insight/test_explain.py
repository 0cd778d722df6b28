"""``hvd-train explain`` on steps of which all is known: the factors, the findings, and that each gain is exact."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.insight import recorded_steps, trace
from hvd_train.insight.explain import case_of, explained
from hvd_train.insight.factors import factors
from hvd_train.insight.findings import findings
from hvd_train.insight.replay import Replay
from hvd_train.run_folder.step_times import StepTimes
from tests.insight.recorded import lockstep, write

STEPS = 64


def parts(ranks, seed=0, input=0.0001, compute=0.02, rest=0.0002, exchange=0.001):
    """The times of a healthy run: (steps, ranks) each, the exchange (steps,); equal but for a few percent."""
    random = np.random.default_rng(seed)
    noise = random.uniform(0.99, 1.01, (3, STEPS, ranks))
    of_ranks = (np.full((STEPS, ranks), x) * one for x, one in zip((input, compute, rest), noise, strict=True))
    return [*of_ranks, np.full(STEPS, exchange)]


def case(folder, values, config="", **options):
    return case_of(write(folder, lockstep(*values), config, **options))


def test_a_healthy_run_has_no_findings(tmp_path):
    one = case(tmp_path, parts(4))
    assert findings(one) == []
    text = "\n".join(explained(one))
    assert "4 ranks on 1 host" in text and "64 recorded steps" in text
    short = "The steps took 1.4 seconds in all: too short to judge."
    assert short in text and "Nothing was found" in text


def slow_loader(values):
    values[0] += 0.015


def slow_loader_of_a_rank(values):
    values[0][:, 1] += 0.015


def slow_rank(values):
    values[1][:, 1] += 0.012


def slow_hook_of_rank_0(values):
    values[2][:, 0] += 0.01


def slow_log(values):
    values[2] += 0.01


def slow_link(values):
    values[3] += 0.03


def uneven(values):
    random = np.random.default_rng(1)
    values[1] += 0.01 * random.integers(0, 2, values[1].shape)


FAULTS = {
    slow_loader: ("input", {0: 0.0}),
    slow_loader_of_a_rank: ("input of one rank", None),
    slow_rank: ("slow rank", None),
    slow_hook_of_rank_0: ("hooks and log", {2: 0.0}),
    slow_log: ("hooks and log", {2: 0.0}),
    slow_link: ("exchange", {3: 0.0002}),
    uneven: ("uneven work", None),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_planted_fault_comes_first_and_its_gain_is_that_of_taking_it_away(tmp_path, plant, ranks):
    cause, cured = FAULTS[plant]
    values, without = parts(ranks), parts(ranks)
    plant(values)
    if cured:
        for place, x in cured.items():
            without[place] = np.full_like(without[place], x)
    elif cause == "uneven work":
        without[1] = np.broadcast_to(values[1].mean(axis=1, keepdims=True), values[1].shape)
    one = case(tmp_path, values)
    first = findings(one)[0]
    real = lockstep(*values).sum() / lockstep(*without).sum()
    assert first.cause == cause
    assert first.gain == pytest.approx(real, rel=0.01)
    assert f"{first.gain:.2f} times as fast" in "\n".join(explained(one))


def test_what_an_exchange_of_few_bytes_would_take_is_told(tmp_path):
    values = parts(2)
    values[3] += 0.002
    assert findings(case(tmp_path / "a", values))[0].evidence.endswith(
        "; 0.2 ms of it would remain with the fewest bytes"
    )
    slow_link(values)
    assert findings(case(tmp_path / "b", values))[0].evidence.endswith("for 4.2 MB of gradients")


def test_a_slow_host_is_named(tmp_path):
    values, without = parts(6), parts(6)
    values[1][:, 2:4] += 0.01
    first = findings(case(tmp_path, values, hosts=["a", "a", "b", "b", "c", "c"]))[0]
    assert first.cause == "slow ranks" and first.evidence.startswith("ranks 2, 3 (host b) compute 30.")
    assert first.gain == pytest.approx(lockstep(*values).sum() / lockstep(*without).sum(), rel=0.01)


def test_a_rank_with_several_faults_has_several_findings(tmp_path):
    values = parts(3)
    slow_loader_of_a_rank(values), slow_link(values), slow_rank(values)
    causes = [one.cause for one in findings(case(tmp_path, values))]
    assert causes[0] == "exchange" and {"input of one rank", "slow rank"} <= set(causes)
    gains = [one.gain for one in findings(case(tmp_path, values))]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(
    ("part", "config", "cause", "cure", "rarer"),
    [
        ("save", "checkpoint: {every_n_steps: 5}", "checkpoints", "checkpoint.every_n_steps: 95", 19),
        ("save", "", "checkpoints", "checkpoint.every_n_epochs: 19", 19),
        ("evaluate", "check_val_every_n_epoch: 2", "evaluations", "check_val_every_n_epoch: 18", 9),
    ],
)
def test_what_is_done_too_often(tmp_path, part, config, cause, cure, rarer):
    """It takes as long as all steps: half of the time. The cure leaves a share of 5 % (10 % for evaluations)."""
    values = parts(2)
    total = lockstep(*values).sum() / 2
    first = findings(case(tmp_path, values, config, **{part: total}))[0]
    assert first.cause == cause and first.cure.startswith(cure)
    assert first.gain == pytest.approx(2 / (1 + 1 / rarer), rel=0.01)


def usage(**figures):
    ranks = len(next(iter(figures.values())))
    known = {"elapsed": 2.0, "cpu": 1.0, "queued": 0.0, "busy": 1.0, "faults": 0, "read_mb": 0.0}
    return {name: [value] * ranks for name, value in known.items()} | figures


def test_what_the_operating_system_knows(tmp_path):
    busy = parts(3)
    slow_rank(busy)
    other = case(tmp_path / "a", busy, usage=usage(queued=[0.0, 1.0, 0.0], busy=[1.0, 1.8, 1.0]))
    assert "others had its core for 40% of the time while it could have run" in findings(other)[0].evidence
    alone = case(tmp_path / "h", busy, usage=usage(queued=[0.0, 1.0, 0.0]))  # its threads wait for one another
    assert "others" not in findings(alone)[0].evidence.partition("the others")[2]
    crowded = case(tmp_path / "b", parts(2), usage=usage(queued=[1.1, 1.1], busy=[2.0, 2.0]), cores=[[0], [0]])
    first = findings(crowded)[0]
    assert first.cause == "shared cores" and "2 ranks share 1 core of one: a rank lost 50% of its" in first.evidence
    assert first.gain == pytest.approx(2.0, abs=0.1)
    taken = usage(queued=[1.0, 1.0], busy=[1.5, 1.5])
    beside = findings(case(tmp_path / "c", parts(2), usage=taken))[0]
    assert beside.cause == "shared cores" and "other programs use the cores" in beside.evidence
    together = case(tmp_path / "i", parts(2), usage=usage(queued=[1.0, 1.0], busy=[2.5, 2.5]), cores=[[0, 1], [0, 1]])
    assert together.lost() == pytest.approx([together.seconds / 4] * 2)
    late = parts(2)
    uneven(late)
    cures = {one.cause: one.cure for one in findings(case(tmp_path / "g", late, usage=taken))}
    assert "end the other programs" in cures["shared cores"] and cures["uneven work"].startswith("first cores of your")
    folder = write(tmp_path / "d", lockstep(*parts(1)), cores=[list(range(8))])
    assert findings(case_of(folder)) == []  # how many threads compute is not known
    (folder / "environment.json").write_text('{"threads": 1, "device": "cpu"}')
    few = findings(case_of(folder))[0]
    assert few.cause == "unused cores" and few.bound == "at most" and "1 rank with 1 thread on 8 cores" in few.evidence
    assert few.cure.startswith("threads: 8")
    pages = findings(case(tmp_path / "e", parts(2), usage=usage(faults=[0, 9000])))[-1]
    assert pages.cause == "memory" and pages.gain is None and "rank 1 reads" in pages.evidence
    reads = parts(2)
    slow_loader(reads)
    disk = findings(case(tmp_path / "f", reads, usage=usage(read_mb=[500.0, 500.0])))[0]
    assert re.search(r"; [\d,]+ MB/s came from disks", disk.evidence)
    assert disk.cure.startswith("the data on a disk of this host, or pack")


def test_on_a_gpu_only_what_the_process_itself_knows_is_told(tmp_path):
    """It waits for the GPU in the exchange, so nothing is said of transfers, slow ranks and cores."""
    values = parts(2)
    slow_loader(values), slow_link(values), slow_rank(values)
    folder = write(tmp_path, lockstep(*values), cores=[[0, 1, 2, 3]] * 2)
    (folder / "environment.json").write_text('{"threads": 1, "device": "cuda"}')
    one = case_of(folder)
    (found,) = findings(one)
    assert found.cause == "input" and found.bound == "at most"
    text = "\n".join(explained(one))
    assert "parallel efficiency" not in text and "The ranks compute on GPUs" in text


def test_a_cure_for_the_loader_names_enough_workers(tmp_path):
    values = parts(2)
    values[0] += 0.1
    first = findings(case(tmp_path, values, "data: {workers: 2}"))[0]
    # A step of 121 ms would take 21 ms: six times as many workers, so eight times in powers of two.
    assert first.cure.startswith("data.workers: 16,")


def test_few_bytes_are_not_0_megabytes(tmp_path):
    values = parts(2)
    slow_link(values)
    assert " for 9.6 kB of gradients" in findings(case(tmp_path, values, gradient_bytes=9600))[0].evidence


def test_short_steps(tmp_path):
    values = parts(2, compute=0.0005, exchange=0.0008)
    found = {one.cause: one for one in findings(case(tmp_path, values, "batch_size: 4"))}
    both = found["small batches"]
    assert "(batch_size: 4)" in both.evidence
    without = [values[0], values[1], values[2] / 2, values[3] / 2]
    assert both.gain == pytest.approx(lockstep(*values).sum() / lockstep(*without).sum(), rel=0.01)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 5))
def test_the_factors_multiply_to_the_efficiency_exactly(tmp_path_factory, seed, ranks):
    random = np.random.default_rng(seed)
    seconds = random.exponential(0.01, (16, ranks, 4))  # any times, also of ranks that do not wait for one another
    recorded = recorded_steps.read(write(tmp_path_factory.mktemp("run"), seconds))
    one, replay = factors(recorded), Replay(recorded)
    taken = recorded.seconds.sum(axis=2).mean(axis=1).sum()
    assert replay.seconds == pytest.approx(taken, rel=1e-12)
    assert one.parallel == pytest.approx(recorded.seconds[:, :, 1].sum() / ranks / taken, rel=1e-12)
    assert one.communication == pytest.approx(one.parallel / one.load_balance, rel=1e-12)
    assert all(0 < x <= 1 + 1e-12 for x in (one.load_balance, one.serialization, one.preparation))


def test_factors_of_known_runs(tmp_path):
    """Two ranks that take 2 and 4 s of computing: in the same steps, and in turns; nothing else takes time."""
    zero, steps = np.zeros((8, 2)), np.zeros(8)
    uneven = factors(
        recorded_steps.read(write(tmp_path / "a", lockstep(zero, np.tile([1.0, 2.0], (8, 1)), zero, steps)))
    )
    assert (uneven.load_balance, uneven.serialization, uneven.transfer) == pytest.approx((0.75, 1.0, 1.0))
    turns = np.where(np.arange(8)[:, None] % 2 == np.arange(2), 1.0, 3.0)
    taking = factors(recorded_steps.read(write(tmp_path / "b", lockstep(zero, turns, zero, steps + 1.0))))
    assert (taking.load_balance, taking.serialization, taking.transfer) == pytest.approx((1.0, 2 / 3, 0.75))


def test_a_timeline_has_each_cell_of_each_rank_once(tmp_path):
    values = parts(2)
    recorded = recorded_steps.read(write(tmp_path, lockstep(*values), save=0.1))
    trace.write(recorded, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [one["args"]["name"] for one in events if one["ph"] == "M"] == ["rank 0 (one)", "rank 1 (one)"]
    slices = [one for one in events if one["ph"] == "X"]
    assert {one["name"] for one in slices} == {"input", "compute", "exchange and wait", "other", "save"}
    for rank in range(2):
        mine = [one for one in slices if one["pid"] == rank]
        compute = sum(one["dur"] for one in mine if one["name"] == "compute") / 1e6
        assert compute == pytest.approx(values[1][:, rank].sum(), rel=1e-3)
        ends = [one["ts"] + one["dur"] for one in mine]
        assert all(one["ts"] >= end - 0.2 for one, end in zip(mine[1:], ends[:-1], strict=True))
        assert min(one["ts"] for one in mine) >= -0.2
        assert sum(one["name"] == "save" for one in mine) == STEPS / 8 - 1
    last = max(one["ts"] + one["dur"] for one in slices) / 1e6
    assert last == pytest.approx(lockstep(*values).sum() / 2 + 0.1 * 7 / 8, rel=0.02)


def test_damaged_and_foreign_files(tmp_path):
    with pytest.raises(ConfigError, match="no such run folder"):
        recorded_steps.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="the folder holds no run; .*; give the run_dir"):
        recorded_steps.read(tmp_path)
    begun, old = tmp_path / "begun", tmp_path / "old"
    for one in (begun, old):
        one.mkdir()
        (one / "config.yaml").write_text("{}")
    StepTimes(begun, 0.0, 0)
    with pytest.raises(ConfigError, match="no steps are recorded yet; .*within about 10 seconds"):
        recorded_steps.read(begun)
    with pytest.raises(ConfigError, match="no steps are recorded; .*of earlier ones and scripts have none"):
        recorded_steps.read(old)
    folder = write(tmp_path / "run", lockstep(*parts(2)))
    whole = recorded_steps.read(folder)
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    window = next(row for row in rows if row["event"] == "steps")
    changes = [
        {"cells": [[1, 2, 3, 4]]}, {"cells": "x"}, {"cells": []}, {"cells": [[0] * 32] * 2}, {"cells": [[-1] * 32] * 2},
        {"steps": 10**15, "cell_steps": 0}, {"cell_steps": None}, {"seconds": {"input": [0.0]}},
        {"steps": 10**15, "cell_steps": 10**14}, {"epoch": None}, {"cells": [[1e300] * 32] * 2}, {"counted": -1},
        {"seconds": window["seconds"] | {"rest": [-1.0, 0.0]}}, {"seconds": window["seconds"] | {"save": [1e300, 0]}},
        {"steps": 2.5}, {"step": 1e300}, {"time": -1}, {"cells": [[True] * 32] * 2},
        {"event": "saved", "counted": 1e300},
    ]  # fmt: skip
    bad = [window | change for change in changes]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]) + '{"event": "ste')
    (folder / "config.yaml").write_text("[")
    (folder / "environment.json").write_text("{")
    read = recorded_steps.read(folder)
    assert np.array_equal(read.seconds, whole.seconds)
    assert list(explained(case_of(folder)))


def test_steps_that_cannot_be_read(tmp_path):
    with (tmp_path / "steps.jsonl").open("wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(CheckpointError, match="cannot be read: it has 2,147,483,648 bytes; .* are the most"):
        recorded_steps.read(tmp_path)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").mkdir()
    with pytest.raises(CheckpointError, match="it is no plain file"):
        recorded_steps.read(tmp_path)


def changed(folder, **changes):
    """Change rows of steps.jsonl: {event: what is changed, or None to leave them out}."""
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    rows = [row | changes.get(row["event"], {}) for row in rows if changes.get(row["event"], {}) is not None]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return case_of(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": None}, {"ranks": {"hosts": ["a"]}}, {"ranks": {"hosts": [["a"], {}], "cores": [[[0]], [None]]}},
        {"ranks": {"stages": 0, "gradient_bytes": -1}}, {"steps": {"of_windows": 1e300}}, {"steps": {"of_windows": 0}},
        {"steps": {"usage": {"queued": [-1e300, 1], "busy": [1e300, 0]}}}, {"steps": {"usage": [], "sync": -1}},
    ],
)  # fmt: skip
def test_rows_that_lack_something_or_hold_something_else(tmp_path, changes):
    values = parts(2)
    slow_log(values), slow_link(values)
    folder = write(tmp_path, lockstep(*values), usage=usage(queued=[0.1, 0.1]))
    (tmp_path / "config.yaml").write_text("{hooks: 5, framework: [], exchange: {compression: [1]}, batch_size: {}}")
    _, shares, *_ = explained(case_of(folder))
    assert shares in [*explained(changed(folder, **changes))]
    trace.write(recorded_steps.read(folder), tmp_path / "t.json")


def test_of_many_short_steps_no_list_is_made(tmp_path):
    """A line stands for many that were left out: 10^12 steps would take 8 TB."""
    folder = write(tmp_path, lockstep(*parts(1)))
    first = next(explained(case_of(folder)))
    assert next(explained(changed(folder, steps={"of_windows": 10**9}))) == first


def test_quantiles_are_of_all_steps(tmp_path):
    folder = write(tmp_path, lockstep(*parts(1, compute=0.02)))
    recorded = recorded_steps.read(folder)
    each = np.sort(recorded.step_seconds)
    assert recorded.quantiles(0.0, 0.5, 1.0) == [each[0], each[STEPS // 2 - 1], each[-1]]


@pytest.mark.parametrize("mode", ["async", "parameter_server", "local_sgd", "outer", "streaming"])
def test_ranks_that_do_not_exchange_in_each_step_have_no_factors(tmp_path, mode):
    """No rank waits for the slowest one of a step, so the transfers' factor would be above 1."""
    random = np.random.default_rng(0)
    seconds = random.exponential(0.01, (STEPS, 2, 4)) * [1, 1, 0, 1]
    assert factors(recorded_steps.read(write(tmp_path, seconds))).transfer > 1
    told = "\n".join(explained(case_of(write(tmp_path, seconds, f"exchange: {{mode: {mode}}}"))))
    assert "efficiency" not in told


def test_ranks_that_do_not_wait_for_one_another_differ_in_their_steps(tmp_path):
    folder = write(tmp_path, lockstep(*parts(2)))
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    for row in rows:
        if row["event"] == "steps":
            row["cells"][1] = row["cells"][1][:-4]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = recorded_steps.read(folder)
    assert recorded.steps.tolist() == [8] * 8 and recorded.seconds.shape == (8, 2, 4)


def test_the_last_start_with_as_many_ranks_counts(tmp_path):
    write(tmp_path, lockstep(*parts(3)))
    first = (tmp_path / "steps.jsonl").read_text()
    write(tmp_path, lockstep(*parts(2)))
    (tmp_path / "steps.jsonl").write_text(first + (tmp_path / "steps.jsonl").read_text())
    assert recorded_steps.read(tmp_path).ranks == 2
    assert recorded_steps.read(tmp_path, after_step=33).seconds.shape[0] == 32
