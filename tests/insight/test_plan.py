"""``hvd-train plan``: its options, rows, choice and sentences; real ranks in both frameworks."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from hvd_train.cli.plan import _of_study, _write
from hvd_train.config import load_config
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.insight import auto_ranks, plan
from hvd_train.insight import calibration as measuring
from hvd_train.insight.calibration import Calibration, placements, point_of, trial
from hvd_train.insight.plan import Wish, parse_budget, parse_counts, parse_hours, parse_link, with_batches
from hvd_train.insight.plan_picture import picture
from hvd_train.insight.prediction import Link
from hvd_train.scaling.study import Study, Target
from tests.cli.running import commands, run
from tests.scaling.made_up import write_run, write_training

CONFIG = load_config(None, ["batch_size=32", "max_epochs=10"])


def figures(ranks, own=0.1, exchange=0.01, batch=32, calls=20, **more):
    """What the ranks of a calibration write: equal ranks, whose own time is half fixed and half by the sample."""
    wait = exchange if ranks > 1 else 0.0
    rows = [[[1, own + wait, wait]] * calls] * ranks
    half = [[[1, 0.75 * own + wait, wait]] * calls] * ranks
    found = {"samples": 6400, "ranks": ranks, "batch": batch * ranks, "calls": rows}
    found |= {"other": [batch * ranks // 2, half], "input": 0.001}
    if ranks > 1:
        found |= {
            "exchange": [exchange] * 5,
            "empty": [0.001] * 5,
            "sent": 1e7 * 2 * (ranks - 1) / ranks,
            "messages": 4,
        }
        found |= {"compressors": {"none": [exchange, 1e7], "fp16": [0.012, 0.5e7], "topk": [0.02, 1e5]}}
    return found | more


def calibrated(**runs):
    runs = runs or {"1x2": figures(1, 0.08), "1x1": figures(1), "2x1": figures(2)}
    keys = {key: tuple(map(int, key.split("x"))) for key in runs}
    return Calibration(2, {keys[key]: [run] for key, run in runs.items()}, seconds=20)


# ---- options


@pytest.mark.parametrize(
    ("text", "gigabits", "latency"),
    [("10gbit", 10, 50e-6), ("100mbit", 0.1, 50e-6), ("2.5Gbit/s,20us", 2.5, 20e-6), ("1gbit, 1ms", 1, 1e-3)],
)
def test_links(text, gigabits, latency):
    link = parse_link(text)
    assert link.bytes_per_second == pytest.approx(0.94 * gigabits * 1e9 / 8) and link.latency == pytest.approx(latency)


@pytest.mark.parametrize(
    "text",
    ["fast", "10", "10gb", "0gbit", "-1gbit", "1.2.3gbit", "10gbit,5", "gbit", "", "9" * 400 + "gbit",
     "1gbit," + "9" * 400 + "s"],
)  # fmt: skip
def test_what_is_no_link(text):
    with pytest.raises(ConfigError, match="no speed of a link"):
        parse_link(text)


def test_times_budgets_and_counts():
    hours = [parse_hours(text, "--deadline") for text in ("6h", "90m", "2d", "1800s")]
    assert hours == [6, 1.5, 48, 0.5] and parse_budget("200nodeh") == 200 == parse_budget("200")
    assert parse_counts("8,1, 2,2", "--hosts") == [1, 2, 8]
    for wrong in ("6", "6 weeks", "0h", "-1h", "", "9" * 400 + "h"):
        with pytest.raises(ConfigError, match="no time"):
            parse_hours(wrong, "--deadline")
    for wrong in ("0", "many", "5 h", "9" * 400):
        with pytest.raises(ConfigError, match="no node-hours"):
            parse_budget(wrong)
    for wrong in ("0,1", "1;2", "a", "1.5", "", "1,,2", "-1", "9" * 30, "\u00b2", "9" * 5000):
        with pytest.raises(ConfigError, match="is no whole number from 1; --hosts .*; list them"):
            parse_counts(wrong, "--hosts")


def test_placements_are_ends_first():
    assert placements(2, "auto") == [(1, 2), (2, 1), (1, 1)] and placements(1, "auto") == [(1, 1), (2, 1)]
    assert placements(16, "auto") == [(1, 16), (2, 8), (1, 1), (16, 1), (4, 4), (8, 2)]
    assert placements(6, "auto") == [(1, 6), (2, 3), (1, 1), (6, 1), (4, 1)]
    assert placements(4, 2) == [(1, 2), (2, 2), (4, 2)] and placements(8, "auto", [1, 4]) == [(1, 8), (4, 2)]


def test_a_calibration_trains_as_the_configuration_says_and_saves_nothing(tmp_path):
    sets = [
        "optim.name=adamw",
        "checkpoint.every_n_steps=5",
        "early_stopping.patience=2",
        "loggers=[csv]",
        "swa.epochs=1",
    ]
    config = trial(load_config(None, [*sets, "exchange.compression=auto"]), 3, tmp_path)
    assert config.optim.name == "adamw" and config.threads == 3 and not config.checkpoint.every_n_steps
    assert not (config.loggers or config.early_stopping or config.swa) and config.exchange.compression == "none"


@pytest.mark.parametrize("key", ["exchange.mode=outer", "exchange.mode=async", "parallel.pipeline=2"])
def test_what_is_not_predicted_is_told(key):
    with pytest.raises(ConfigError, match="plan predicts synchronous training"):
        measuring.check(load_config(None, [key, *(["model.name=gpt"] if "pipeline" in key else [])]))


# ---- rows


def test_points_are_what_the_ranks_wrote():
    one = point_of(figures(2), (2, 1))
    assert one.batch == 32 and one.mean_own == pytest.approx(0.1) and one.step == pytest.approx(0.11)
    assert one.slope == pytest.approx(0.1 * 0.25 / 16) and one.exposed == pytest.approx(0.01)
    assert point_of({**figures(1), "other": None}, (1, 1)).own_with(64) == pytest.approx(0.2)


def test_rows_of_a_host_are_what_was_measured_and_hosts_have_the_faster_placement():
    rows = plan.rows(CONFIG, calibrated(), [1, 2, 4], (), parse_link("10gbit"))
    assert [(row.at.hosts, row.at.ranks, row.at.threads) for row in rows[:3]] == [(1, 1, 2), (1, 1, 1), (1, 2, 1)]
    assert [row.source for row in rows] == ["measured"] * 3 + ["predicted"] * 2
    assert [row.at.step for row in rows[:3]] == pytest.approx([0.08, 0.1, 0.11])
    assert rows[0].speedup == 1 and rows[2].speedup == pytest.approx(64 / 0.11 / 400)
    assert [row.at.ranks for row in rows[3:]] == [4, 8]
    assert [row.steps for row in rows] == [2000, 2000, 1000, 500, 250]
    assert rows[2].node_hours == rows[2].hours(rows[2].at.step) == pytest.approx(1000 * 0.11 / 3600)
    assert rows[4].node_hours == pytest.approx(4 * rows[4].hours(rows[4].at.step))


@pytest.mark.parametrize(("factor", "told"), [(1.0, False), (0.02, True)])
def test_speed_that_cannot_be_is_told(factor, told):
    """An efficiency of 3247 % was printed on a busy host, and its number of ranks advised."""
    rows = plan.rows(CONFIG, calibrated())
    rows = [replace(row, speedup=row.speedup / (1 if row.at.ranks == rows[0].at.ranks else factor)) for row in rows]
    assert ("plan again on a quiet host" in plan.text(rows, Wish(), CONFIG, calibrated())) == told


def test_hosts_that_a_step_has_too_few_samples_for_are_named():
    link, asked = parse_link("10gbit"), [1, 2, 10**6]
    rows = plan.rows(CONFIG, calibrated(), asked, (), link)
    told = plan.text(rows, Wish(), CONFIG, calibrated(), link, asked)
    assert "not planned: 1000000 hosts, whose ranks are more than the samples of a step or of the data" in told
    assert "not planned" not in plan.text(rows, Wish(), CONFIG, calibrated(), link, [1, 2])


def test_ranks_that_were_not_measured_are_predicted_and_marked():
    rows = plan.rows(CONFIG, calibrated(), ranks=[1, 2, 4])
    assert rows[-1].at.ranks == 4 and rows[-1].source == "predicted" and rows[-1].at.shared
    assert plan.cells(rows[-1])[-1] == "predicted, shares cores"
    assert plan.best(rows, Wish()) is not rows[-1]


def test_steps_and_batches():
    strong = with_batches(CONFIG, "strong")
    assert strong.global_batch(4) == 32 and plan.batch_of_rank(strong, 4) == 8
    weak = with_batches(load_config(None, ["global_batch_size=64", "accumulate_grad_batches=2"]), "weak")
    assert weak.global_batch(1) == 64 and weak.global_batch(4) == 256
    assert plan.total_steps(CONFIG, 6400, 4) == 500 == plan.total_steps(strong, 6400, 1) / 4
    steps = load_config(None, ["batch_size=32", "max_steps=1000"])
    assert plan.total_steps(steps, 6400, 1) == 1000 and plan.total_steps(steps, 6400, 4) == 250


def test_with_the_same_global_batch_a_rank_has_less_to_compute():
    strong = with_batches(CONFIG, "strong")
    runs = {"1x1": figures(1), "2x1": figures(2, 0.075, batch=16)}
    rows = plan.rows(strong, calibrated(**runs), [1, 2], (), parse_link("10gbit"))
    assert rows[1].source == "measured" and rows[1].at.step == pytest.approx(0.085)
    assert rows[2].at.batch == 8 and rows[2].at.own < 0.075
    assert [row.steps for row in rows] == [2000] * 3


# ---- choice


def test_the_choice():
    rows = plan.rows(CONFIG, calibrated(), [1, 2, 4, 8], (), parse_link("10gbit"))
    hours = {row.at.hosts: row.hours(row.at.step) for row in rows}
    assert plan.best(rows, Wish()).at.hosts == 8
    assert plan.best(rows, Wish(hours=hours[1])).at.hosts == 1
    assert plan.best(rows, Wish(hours=1.01 * hours[4])).at.hosts == 4
    cheap = min(row.node_hours for row in rows)
    assert plan.best(rows, Wish(node_hours=1.001 * cheap)).node_hours == cheap
    assert plan.best(rows, Wish(hours=1e-6)) is None
    told = plan.choice(rows, Wish(hours=1e-6, node_hours=3))
    assert told.startswith("no choice keeps to 1e-06 h and 3 node-hours: the fastest takes ")
    assert re.match(
        r"take 8 hosts, 16 ranks of 1 thread: \S+ h \(\S+ to \S+\), \S+ node-hours; the fastest",
        plan.choice(rows, Wish()),
    )


def test_compression_pays_on_a_slow_link_alone():
    def told(speed):
        link = parse_link(speed)
        rows = plan.rows(CONFIG, calibrated(), [1, 2, 4], (), link)
        return "\n".join(plan.findings(rows, CONFIG, calibrated(), link))

    assert "no compressor pays" in told("100gbit")
    slow = told("100mbit")
    assert "from 2 hosts on exchange.compression: topk pays" in slow and "exchange.mode: outer, every 30 steps" in slow


def test_below_the_limit_of_a_link_compression_pays():
    calibration = calibrated()
    model, tried = calibration.model(), calibration.compressors()
    others = {"fp16": tried["fp16"], "topk": tried["topk"]}
    row = plan.rows(CONFIG, calibration, [1, 4], (), parse_link("1gbit"))[-1]
    limit = plan.slowest_link(model, row.at, others, 50e-6)
    for factor, pays in ((0.99, True), (1.01, False)):
        link = Link(factor * limit, 50e-6)
        plain = model.predict(4, row.at.ranks // 4, row.at.threads, link, row.at.batch).step
        assert (plan.best_compressor(model, row.at, others, link)[1] < plan.WORTH * plain) is pays
    assert plan.speed(0.94 * 1.25e9) == "10 Gbit/s" and plan.speed(0.94 * 1.25e7) == "100 Mbit/s"


def test_a_larger_batch_is_told_if_it_brings_much():
    """Half of a step's own time does not depend on the batch: four times the batch is 1.6 times as fast."""
    rows = plan.rows(CONFIG, calibrated())
    told = "\n".join(plan.findings(rows, CONFIG, calibrated(), None))
    assert "2 ranks: a batch of 128 in place of 32 on each would give" in told
    runs = {"1x1": figures(1, other=[16, [[[1, 0.05, 0.0]] * 9]])}
    assert not plan.findings(plan.rows(CONFIG, calibrated(**runs)), CONFIG, calibrated(**runs), None)


def test_a_study_stands_beside_the_plan(tmp_path):
    rows = plan.rows(CONFIG, calibrated(), studied={1: [390, 420, 400], 2: [600]})
    errors = {(row.at.ranks, row.at.threads): row.error for row in rows}
    assert (
        errors[1, 2] == pytest.approx(0) and errors[1, 1] is None and errors[2, 1] == pytest.approx(64 / 0.11 / 600 - 1)
    )
    assert plan.against_study(rows)[-1] == "study: median error 1.5 %; 2 of 2 within the interval"
    assert plan.against_study(rows)[1] == "study: 2 ranks: 600 samples/s, plan 582: -3.0 %, linear +33.3 %"
    _write(tmp_path / "new" / "plan.csv", rows, None, {})
    assert (tmp_path / "new" / "plan.csv").exists()
    (tmp_path / "file").write_text("")
    for name in ("plan.csv", "plan.png"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            _write(tmp_path / "file" / name, rows, None, {})
    picture(rows, tmp_path / "plan.png", {1: [390, 420, 400], 2: [600]})
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_simpler_predictions_stand_beside_it():
    rows = plan.rows(CONFIG, calibrated(), ranks=[1, 2, 4], studied={1: [400], 2: [700], 4: [1000]})
    beside = plan.baselines(rows, rows[-1])
    assert beside["linear"] == pytest.approx(1600)
    sigma = 2 / (700 / 400) - 1  # Amdahl's law through 1 and 2 ranks
    assert beside["Amdahl law"] == pytest.approx(1600 / (1 + 3 * sigma))


def trained(batch, samples, seconds=(9.0,)):
    return plan.Trainings(batch, samples, seconds)


def test_samples_to_a_target_grow_with_the_batch_as_a_line():
    """1000 + 5 B: the law of McCandlish et al. with critical batch 200."""
    aim = plan.Aim("val_accuracy=0.9", {n: trained(32 * n, [1000 + 160 * n] * 3) for n in (1, 2, 4)})
    assert aim.samples(64) == 1320 and aim.samples(256) == pytest.approx(2280)
    assert aim.samples(128, below=4) == pytest.approx(1640) and aim.samples(32, below=1) is None
    assert aim.samples(64, below=2) is None  # one batch alone says nothing about others


def test_samples_to_a_target_of_one_batch_are_the_median_of_all_trainings():
    aim = plan.Aim("val_loss=0.1", {1: trained(32, [900, 1000]), 2: trained(32, [1100, 1500, math.inf])})
    assert aim.samples(32) == 1100 and aim.samples(32, below=2) == 950 and aim.samples(64) is None


def test_samples_that_do_not_grow_or_were_not_reached():
    falling = plan.Aim("val_loss=0.1", {1: trained(32, [1200]), 2: trained(64, [1000])})
    assert falling.samples(128) == 1100
    through_zero = plan.Aim("val_loss=0.1", {1: trained(32, [320]), 2: trained(64, [960])})
    assert through_zero.samples(128) == pytest.approx(128 * (32 * 320 + 64 * 960) / (32**2 + 64**2))
    never = plan.Aim("val_loss=0.1", {1: trained(32, [math.inf, math.inf, 5.0]), 2: trained(64, [])})
    assert never.samples(32) is None


def test_seconds_to_the_target_stand_in_the_plan_beside_the_study():
    aim = plan.Aim("val_accuracy=0.9", {1: trained(32, [800], [2.0]), 2: trained(64, [960], [1.6])})
    found = plan.rows(CONFIG, calibrated(), ranks=[4], studied={1: [400], 2: [600]}, aim=aim)
    words = plan.text(found, Wish(), CONFIG, calibrated(), aim=aim)
    assert "s to val_accuracy=0.9" in words.splitlines()[0]
    rates = {row.at.ranks: row.at.rate for row in found}
    by_ranks = {row.at.ranks: row.to_target for row in found}
    assert by_ranks[2] == pytest.approx(960 / rates[2]) and by_ranks[4] == pytest.approx(1280 / rates[4])
    # The samples of two ranks are not known from one: their batch is another.
    assert not any("val_accuracy" in line for line in plan.against_trainings(found, aim))
    same = plan.Aim("val_accuracy=0.9", {1: trained(64, [960], [2.4]), 2: trained(64, [999], [1.6])})
    took = 960 / rates[2]
    told = f"study: 2 ranks: 1.6 s to val_accuracy=0.9, plan {took:.3g} s: {100 * (took / 1.6 - 1):+.1f} %"
    assert plan.against_trainings(found, same) == [told]
    assert json.loads(plan.json_text(found, calibrated()))["rows"][0]["seconds_to_target"] == pytest.approx(2.0)


def test_a_target_that_no_training_reached_is_said():
    aim = plan.Aim("val_accuracy=0.9", {1: trained(32, [math.inf], [math.inf])})
    found = plan.rows(CONFIG, calibrated(), studied={1: [400]}, aim=aim)
    assert "no time to val_accuracy=0.9 is known" in plan.text(found, Wish(), CONFIG, calibrated(), aim=aim)


def test_without_one_rank_the_fewest_are_compared_with():
    one, two = calibrated(), calibrated(**{"2x1": figures(2, 0.1, exchange=0.01)})
    words = "speed-up: 2 ranks count as 2 times as fast as one, which is not in the table"
    assert words in plan.text(plan.rows(CONFIG, two), Wish(), CONFIG, two)
    assert "count as" not in plan.text(plan.rows(CONFIG, one), Wish(), CONFIG, one)


def test_csv_and_json():
    calibration = calibrated()
    calibration.problems[4, 1] = "killed", 5
    rows = plan.rows(CONFIG, calibration, [1, 2], (), parse_link("1gbit"), {8: [0.1, 0.12]})
    records = list(csv.DictReader(io.StringIO(plan.csv_text(rows))))
    assert [one["how"] for one in records] == ["measured"] * 3 + ["predicted", "rehearsed"]
    assert float(records[0]["step"]) == pytest.approx(0.08) and records[0]["studied"] == ""
    assert float(records[-1]["step"]) == pytest.approx(0.11) and records[-1]["ranks"] == "8"
    found = json.loads(plan.json_text(rows, calibration))
    assert found["problems"] == {"4x1": "killed"} and found["calibration"]["2x1"][0]["messages"] == 4


def test_a_rehearsal_sleeps_the_own_times_of_the_fastest_placement():
    model = calibrated().model()
    assert plan.slept_placement(model) == (2, 1)
    assert set(np.round(plan.slept(model, 32), 6)) == {0.1} and set(np.round(plan.slept(model, 16), 6)) == {0.075}


def test_auto_takes_fewer_ranks_if_they_are_nearly_as_fast():
    runs = {"1x2": figures(1, 0.0555), "1x1": figures(1, 0.0552), "2x1": figures(2, 0.1, exchange=0.01)}
    assert auto_ranks.fastest(calibrated(**runs).model()) == (1, 1)
    runs["2x1"] = figures(2, 0.08, exchange=0.01)
    assert auto_ranks.fastest(calibrated(**runs).model()) == (2, 1)


# ---- a calibration whose worlds fail


def measured(monkeypatch, outcomes, seconds=60.0, tmp_path=None, cores=2):
    """Measure with children that do as ``outcomes`` says: {(ranks, threads): figures or (error line, code)}."""

    def child(line, env, log, most):
        words = dict(zip(line[1::2], line[2::2], strict=False))
        threads = load_config(measuring.Path(words["-c"])).threads
        outcome = outcomes[int(words["-np"]), threads]
        if outcome == 130:
            return 130
        if isinstance(outcome, tuple):
            log.write_text(f"error: {outcome[0]}\n")
            return outcome[1]
        measuring.Path(words["-o"]).write_text(json.dumps(outcome))
        return 0

    monkeypatch.setattr(measuring.logged, "run", child)
    told: list[str] = []
    start = lambda words: (words, {})  # noqa: E731
    found = measuring.measure(CONFIG, placements(cores, "auto"), seconds, start, tmp_path, told.append)
    return found, told


def test_what_was_measured_is_kept_when_a_world_dies(monkeypatch, tmp_path):
    clock = iter(np.arange(0, 1e4, 4.0))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: float(next(clock)))
    outcomes = {(1, 2): figures(1), (2, 1): ("a rank was lost", 5), (1, 1): figures(1)}
    found, told = measured(monkeypatch, outcomes, tmp_path=tmp_path)
    assert found.problems == {(2, 1): ("a rank was lost", 5)} and set(found.figures) == {(1, 2), (1, 1)}
    assert "2 ranks of 1 thread: not measured: a rank was lost" in told
    # Nothing is known about an exchange, and nothing is made up.
    rows = plan.rows(CONFIG, found, [1, 2], [2], parse_link("1gbit"))
    assert [row.at.ranks for row in rows] == [1, 1]
    told = plan.text(rows, Wish(), CONFIG, found, parse_link("1gbit"))
    assert "no exchange could be measured, so more ranks are not predicted" in told


def test_a_world_that_dies_after_its_steps_is_measured_but_predicts_no_exchange():
    two = {name: value for name, value in figures(2).items() if name in ("samples", "ranks", "batch", "calls")}
    rows = plan.rows(CONFIG, calibrated(**{"1x1": figures(1), "2x1": two}), [1, 4], (), parse_link("1gbit"))
    assert [(row.at.ranks, row.source) for row in rows] == [(1, "measured"), (2, "measured")]
    assert rows[1].at.step == pytest.approx(0.11)


def test_a_plan_that_is_stopped_has_what_was_measured(monkeypatch, tmp_path):
    outcomes = {(1, 2): figures(1), (2, 1): 130}
    found, told = measured(monkeypatch, outcomes, tmp_path=tmp_path)
    assert found.stopped == 130 and [*found.figures] == [(1, 2)] and told[-1].startswith("stopped: ")
    with pytest.raises(SystemExit):
        measured(monkeypatch, {(1, 2): 130}, tmp_path=tmp_path / "again")


def test_of_gpus_there_are_as_many_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "host_cores", lambda: 16)
    clock = iter(np.arange(0, 1e4, 4.0))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: float(next(clock)))
    one, two = figures(1, gpus=2), figures(2, gpus=2)
    outcomes = {(1, 16): one, (2, 8): two, (1, 1): one}
    found, _ = measured(monkeypatch, outcomes, tmp_path=tmp_path, cores=16)
    assert found.cores == 2 and set(found.figures) == set(outcomes)
    assert plan.rows(CONFIG, found, ranks=[4])[-1].at.shared


def test_a_configuration_that_does_not_train_is_told_with_its_code(monkeypatch, tmp_path):
    failed = ("there is no such file; data.path: x.csv", 3)
    with pytest.raises(ConfigError, match="nothing could be measured: there is no such file") as error:
        measured(monkeypatch, dict.fromkeys(placements(2, "auto"), failed), tmp_path=tmp_path)
    assert error.value.exit_code == 3


# ---- real ranks

TINY = "{data: {name: digits}, model: {name: mlp, hidden: [128]}, max_epochs: 3, run_dir: runs/job}"
MISTAKES = {
    "plan -c job.yaml --hosts 1,2": "the network between the hosts is not given; --hosts; give --link 10gbit",
    "plan -c job.yaml --link fast": "this is no speed of a link; --link fast; give 10gbit",
    "plan -c job.yaml --rehearse 100000": "100000 ranks that sleep on ",
    "explain runs/job --picture shares.txt": "this is no picture's name; --picture shares.txt; end its name in .png",
    "plan -c job.yaml --deadline soon": "this is no time; --deadline soon; give 6h",
    "plan -c job.yaml -o plan.txt": "the ending says what to write; -o plan.txt; give .png",
    "plan -c job.yaml --seconds inf": "inf is not a finite number",
    "scale -c job.yaml --minutes nan": "nan is not a finite number",
    "scale -c job.yaml --seconds 1e999": "1e999 is not a finite number",
    "fit -np auto -c job.yaml --set exchange.mode=outer": "give the number of ranks: -np 2",
    "plan -c job.yaml --study nowhere": "the study has its own configuration; --study; leave out -c",
    "plan --study nowhere": "the folder holds no study; ",
    "plan -c job.yaml --set exchange.mode=outer": "plan predicts synchronous training",
    "fit -np auto -c job.yaml --dry-run": "auto measures before it chooses; -np auto; leave out --dry-run",
    "fit -np auto -c job.yaml -H a:1": "auto chooses ranks of this host alone; -np auto; give their number",
    "fit -np some -c job.yaml": "'some' is not a valid",
}


def test_mistakes_of_the_command(tmp_path):
    (tmp_path / "job.yaml").write_text(TINY)
    told = commands(*(words.split() for words in MISTAKES), cwd=tmp_path)
    for done, message in zip(told, MISTAKES.values(), strict=True):
        assert done.code == 2 and message in done.err, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml"}


@pytest.mark.parametrize(
    "framework", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.long("PyTorch runs each time"))]
)
def test_a_plan_on_real_ranks(tmp_path, framework):
    (tmp_path / "job.yaml").write_text(TINY)
    words = ["plan", "-c", "job.yaml", "--set", f"framework={framework}", "--ranks", "1,2,3", "--seconds", "7"]
    words += ["--hosts", "1,4", "--link", "1gbit", "--rehearse", "2", "-o", "plan.json", "-o", "plan.png"]
    done = run(*words, cwd=tmp_path)
    if measuring.host_cores() == 2:  # more ranks than cores are tried, too, if they are asked for
        assert re.search(r"^1 +3 .* (measured|predicted), shares cores$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^4 +[48] .* predicted$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^- +2 .* rehearsed$", done.stdout, re.MULTILINE)
    found = json.loads((tmp_path / "plan.json").read_text())
    rows = {(one["how"], one["ranks"]): one for one in found["rows"]}
    assert rows["rehearsed", 2]["step"] > 0.5 * rows["measured", 2]["own"]
    several = next(run for key, runs in found["calibration"].items() if key.startswith("2x") for run in runs)
    weights = 64 * 128 + 128 + 128 * 10 + 10
    assert several["sent"] == pytest.approx(4 * weights) and several["samples"] > 1000
    assert len(several["calls"]) == 2 and all(row[1] >= row[2] >= 0 for rank in several["calls"] for row in rank)
    assert (tmp_path / "plan.png").exists() and not (tmp_path / "runs").exists()


def test_a_study_gives_configuration_batches_and_runs(tmp_path):
    study = Study(tmp_path / "study", load_config(None, ["batch_size=32"]), (1, 2), "weak").begin(resume=False)
    with pytest.raises(ConfigError, match="the study holds no runs of one host"):
        _of_study(study.folder)
    for ranks, number in ((1, 0), (1, 1), (2, 0)):
        write_run(study.short_run(ranks, number, steps=100), compute=10.0 + number, exchange=float(ranks - 1))
    config, kind, rates, aim = _of_study(study.folder)
    assert (config.batch_size, kind, aim) == (32, "weak", None) and [*rates] == [1, 2]
    assert rates[1] == pytest.approx([3200, 32000 / 11]) and rates[2] == pytest.approx([64000 / 11])


def test_a_study_with_a_target_gives_its_trainings(tmp_path):
    target = Target("val_accuracy", 0.9, "max")
    config = load_config(None, ["batch_size=32"])
    study = Study(tmp_path / "study", config, (1, 2), "weak", target=target, seeds=2).begin(resume=False)
    write_run(study.short_run(1, 0, steps=100))
    write_training(study.training(1, 0), [0.5, 0.95], seconds_each=2.0)
    write_training(study.training(1, 1), [0.5, 0.6], seconds_each=2.0)
    _, _, rates, aim = _of_study(study.folder)
    assert [*rates] == [1] and aim.target == "val_accuracy=0.9"
    assert aim.trainings[1] == plan.Trainings(32, [200, math.inf], [4.0, math.inf])
    assert aim.trainings[2] == plan.Trainings(64, [], [])


@pytest.mark.long("a plan runs each time")
def test_auto_ranks_on_this_host_and_again_when_the_run_goes_on(tmp_path):
    (tmp_path / "job.yaml").write_text(TINY)
    first = run("fit", "-np", "auto", "-c", "job.yaml", cwd=tmp_path).stdout
    chosen = re.search(r"^-np auto: (\d+) ranks? of (\d+) threads?: .* samples/s", first, re.MULTILINE)
    assert chosen and "\ndone: " in first
    words = ["--resume", "auto", "--set", "max_epochs=4", "--allow-change", "max_epochs"]
    again = run("fit", "-np", "auto", "-c", "job.yaml", *words, cwd=tmp_path).stdout
    assert re.search(rf"^-np auto: {chosen[1]} ranks? of \d+ threads?, as the run began", again, re.MULTILINE)
