"""The plan: what a training takes on N ranks and hosts, the best choice, and what an exchange of fewer bytes brings."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from hvd_train.config import Config, load_config
from hvd_train.core.learning_rate import Schedule
from hvd_train.data.order import steps
from hvd_train.errors import ConfigError, amount, listing
from hvd_train.insight import scaling_laws
from hvd_train.insight.calibration import Calibration
from hvd_train.insight.prediction import LEVEL_Z, PAYLOAD, Compressed, Link, Model, Prediction
from hvd_train.report.text_tables import table

LATENCY = 50e-6  # of a link, if none is given: Ethernet with TCP
BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MOST_COUNT = 1 << 20  # of ranks or hosts
MOST = 1e15  # of what a user gives: bit/s, hours
WORTH = 0.95  # of the step time: another exchange pays below it
EFFICIENT = 0.8  # of the work of single hosts, down to which more are well used
LARGER, BETTER = 4, 1.2  # times the batch of a rank that is looked at, and the samples/s from which it is told
STRONG, WEAK = "strong", "weak"


def parse_link(text: str) -> Link:
    """Parse the speed of a link, and its latency, as in ``10gbit`` or ``10gbit,20us``. Raises ConfigError."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)bit(?:/s)?\s*(?:,\s*([\d.]+)\s*(us|ms|s))?\s*", text.lower())
    try:
        rate = float(found[1]) * BITS[found[2]] if found else 0.0
        latency = float(found[3]) * UNITS[found[4]] if found and found[3] else LATENCY
    except ValueError:
        rate = latency = 0.0
    if not 0 < rate <= MOST or latency > MOST:
        raise ConfigError(
            "this is no speed of a link", where=f"--link {text}", fix="give 10gbit, 100mbit or 1gbit,20us"
        )
    return Link(PAYLOAD * rate / 8, latency)


def parse_hours(text: str, option: str) -> float:
    """Parse a time, as in ``6h``, ``90m`` or ``2d``; return hours. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d)\s*", text.lower())
    if not found or not 0 < float(found[1]) <= MOST:
        raise ConfigError("this is no time", where=f"{option} {text}", fix="give 6h, 90m or 2d")
    return float(found[1]) * UNITS[found[2]] / 3600


def parse_budget(text: str) -> float:
    """Parse node-hours, as in ``200nodeh``. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:node-?h(?:ours?)?)?\s*", text.lower())
    if not found or not 0 < float(found[1]) <= MOST:
        raise ConfigError("these are no node-hours", where=f"--budget {text}", fix="give 200nodeh")
    return float(found[1])


def parse_counts(text: str, option: str) -> list[int]:
    """Parse numbers as in ``1,2,4``; return them in order. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch("[0-9]{1,9}", word) or not 0 < int(word) <= MOST_COUNT:
            what = f"{word!r} is no whole number from 1"
            raise ConfigError(what, where=f"{option} {text}", fix=f"list them, as in {option} 1,2,4")
    return sorted({int(word) for word in words})


@dataclass(frozen=True)
class Trainings:
    """A study's trainings to a target on a number of ranks: the ``samples`` and ``seconds`` (of steps) of each until
    then; inf: it ended before. ``batch``: the global batch."""

    batch: int
    samples: Sequence[float]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Aim:
    """A study's ``target``, in words, and its trainings by their number of ranks."""

    target: str
    trainings: Mapping[int, Trainings]

    def samples(self, batch: int, below: float = math.inf) -> float | None:
        """Return the samples that a training with this global batch needs; None: not known.

        Of a batch that was tried, the median over its trainings; of another, the line a + b B through the medians with
        a, b >= 0: where the noise of gradients limits, samples grow so over the batch (McCandlish et al. 2018, An
        Empirical Model of Large-Batch Training, section 2). Only trainings on fewer than ``below`` ranks count.
        """
        each: dict[int, list[float]] = {}
        for ranks, one in self.trainings.items():
            if ranks < below:
                each.setdefault(one.batch, []).extend(one.samples)
        known = {size: middle for size, x in each.items() if x and math.isfinite(middle := median(x))}
        if batch in known or len(known) < 2:
            return known.get(batch)
        sizes, medians = np.array([*known], dtype=float), np.array([*known.values()])
        slope, level = np.polyfit(sizes, medians, 1)
        if slope < 0:
            return float(medians.mean())
        return float((medians @ sizes) / (sizes @ sizes) * batch if level < 0 else level + slope * batch)


@dataclass(frozen=True)
class Row:
    """A row of the plan. ``source``: measured, predicted or rehearsed; ``steps``: of the configured training.

    ``speedup``: of samples/s, against the fewest ranks times their number. ``studied``: samples/s that a study has
    measured on these ranks, the median over its runs; None: not in the study. ``needed``: samples to the study's
    target; None: not known.
    """

    at: Prediction
    source: str
    steps: int
    speedup: float
    studied: float | None = None
    needed: float | None = None

    @property
    def efficiency(self) -> float:
        return self.speedup / self.at.ranks

    @property
    def error(self) -> float | None:
        """Return by which share the plan's samples/s exceed the study's."""
        return self.at.rate / self.studied - 1 if self.studied else None

    def hours(self, seconds: float) -> float:
        return self.steps * seconds / 3600

    @property
    def node_hours(self) -> float:
        return self.at.hosts * self.hours(self.at.step)

    @property
    def to_target(self) -> float | None:
        """Return the seconds of training steps until the target is reached; None: not known."""
        return self.needed / self.at.rate if self.needed else None


@dataclass(frozen=True)
class Wish:
    """What is looked for: hours at most, node-hours at most; None: no limit."""

    hours: float | None = None
    node_hours: float | None = None

    def allows(self, row: Row) -> bool:
        in_time = self.hours is None or row.hours(row.at.step) <= self.hours
        return in_time and (self.node_hours is None or row.node_hours <= self.node_hours)


def with_batches(config: Config, kind: str) -> Config:
    """Return the configuration with its batch on one rank kept: of all ranks (strong), or of each (weak)."""
    together = config.global_batch(1)
    keys = {"batch_size": None, "global_batch_size": together}
    if kind == WEAK:
        keys = {"batch_size": max(together // config.accumulate_grad_batches, 1), "global_batch_size": None}
    return load_config(base=config.model_dump(mode="json") | keys)


def unshared(config: Config) -> Config:
    """Return the configuration with ``optim.sharded: auto`` as it is on several hosts."""
    data = config.model_dump(mode="json")
    if config.optim.sharded == "auto":
        data["optim"]["sharded"] = False
    return load_config(base=data)


def total_steps(config: Config, samples: int, ranks: int) -> int:
    """Return the steps of the configured training on so many ranks. ``max_steps`` is that of one rank: on more, the
    steps are as many as use the same samples."""
    config_of_epoch = config.model_copy(update={"max_steps": None, "max_epochs": 1})
    schedule = Schedule.of(config_of_epoch, steps(samples, 0, config.global_batch(ranks)), ranks)
    totals = [config.max_epochs * schedule.steps_per_epoch] if config.max_epochs else []
    if config.max_steps:
        totals.append(math.ceil(config.max_steps * config.global_batch(1) / config.global_batch(ranks)))
    return min(totals)


def batch_of_rank(config: Config, ranks: int) -> float:
    return config.global_batch(ranks) / ranks


def rows(
    config: Config,
    calibration: Calibration,
    hosts: Sequence[int] = (1,),
    ranks: Sequence[int] = (),
    link: Link | None = None,
    rehearsed: Mapping[int, Sequence[float]] | None = None,
    studied: Mapping[int, Sequence[float]] | None = None,
    aim: Aim | None = None,
) -> list[Row]:
    """Return the rows: each placement on one host, then the fastest one on more hosts, and rehearsals.

    ``ranks``: on a host, also ones that were not measured. ``rehearsed``: {ranks: seconds of steps}. ``studied``:
    {ranks: samples/s of each run}, with the usual threads. ``aim``: its target.
    """
    model, samples = calibration.model(config.exchange.compression), calibration.samples
    placements = sorted({*model.placements, *((n, 0) for n in ranks if n not in {k for k, _ in model.placements})})

    def fits(n: int) -> bool:
        return n <= min(samples, config.global_batch(n))

    # Without a measured exchange, only what was measured is known.
    placements = [(k, t) for k, t in placements if (k, t) in model.placements or (fits(k) and model.knows_exchange)]
    on_host = [model.predict(1, k, t or None, batch=batch_of_rank(config, k)) for k, t in placements]
    found = [(one, "measured" if one.measured else "predicted") for one in on_host]
    for count in hosts:
        if count > 1 and model.knows_exchange:
            tried = [(k, t) for k, t in placements if k <= calibration.cores and fits(count * k)]
            several = [model.predict(count, k, t or None, link, batch_of_rank(config, count * k)) for k, t in tried]
            if several:
                found.append((max(several, key=lambda one: one.rate), "predicted"))
    found += [(_of_rehearsal(config, model, n, taken), "rehearsed") for n, taken in (rehearsed or {}).items()]
    # One rank with most threads comes first: what a user has without this program.
    first = max((one for one, _ in found if one.ranks == found[0][0].ranks and one.hosts == 1), key=lambda o: o.threads)
    found.sort(key=lambda pair: (pair[1] == "rehearsed", pair[0].hosts, pair[0].ranks, -pair[0].threads))
    unit = first.rate / first.ranks

    usual = {one.ranks: max(o.threads for o in on_host if o.ranks == one.ranks) for one in on_host}

    def studied_rate(one: Prediction, source: str) -> float | None:
        here = source != "rehearsed" and one.hosts == 1 and one.threads == usual[one.ranks]
        rates = (studied or {}).get(one.ranks) if here else None
        return median(rates) if rates else None

    return [
        Row(
            one,
            source,
            total_steps(config, samples, one.ranks),
            one.rate / unit,
            studied_rate(one, source),
            aim.samples(config.global_batch(one.ranks)) if aim and source != "rehearsed" else None,
        )
        for one, source in found
    ]


def _of_rehearsal(config: Config, model: Model, ranks: int, taken: Sequence[float]) -> Prediction:
    """Return the step of a rehearsal; its interval is that of the mean of its steps, and of runs of the calibration."""
    parts = model.parts(*slept_placement(model))
    step, (deviation, _) = float(np.mean(taken)), model.deviation
    spread = math.hypot(float(np.std(taken)) / math.sqrt(len(taken)) / step, deviation)
    factor = math.exp(LEVEL_Z * spread)
    batch = batch_of_rank(config, ranks)
    own = min(parts.point.own_with(batch), step)
    return Prediction(
        1, ranks, parts.threads, batch, step, step / factor, step * factor, own, step - own, 0.0,
        measured=False, shared=False,
    )  # fmt: skip


def slept_placement(model: Model) -> tuple[int, int]:
    """Return the placement whose own times a rehearsal sleeps: the one with most samples/s on a host."""
    return max(model.placements, key=lambda key: model.predict(1, *key).rate)


def slept(model: Model, batch: float) -> list[float]:
    """Return the seconds that the ranks of a rehearsal draw from: own times, a step each, at this batch."""
    return slept_as(model, slept_placement(model), batch)


def slept_as(model: Model, placement: tuple[int, int], batch: float) -> list[float]:
    """Return own times of a measured placement, a step each, at this batch."""
    point = model.parts(*placement).point
    factor = point.own_with(batch) / point.mean_own
    return (factor * np.repeat(point.own, point.weights.astype(int), axis=1)).reshape(-1)[:4000].tolist()


def best(found: Sequence[Row], wish: Wish) -> Row | None:
    """Return the row to take: with a deadline the one of least node-hours in time, else the fastest within the budget.

    Rehearsed rows are of imagined hosts, and ranks that share cores are never faster: neither is chosen.
    """
    allowed = [row for row in found if row.source != "rehearsed" and not row.at.shared and wish.allows(row)]
    if not allowed:
        return None
    if wish.hours is not None:
        return min(allowed, key=lambda row: (row.node_hours, row.hours(row.at.step)))
    return min(allowed, key=lambda row: row.hours(row.at.step))


HEADER = [
    "hosts", "ranks", "threads", "batch", "ms a step", "90 %", "samples/s", "speed-up", "efficiency", "hours",
    "node-hours", "how",
]  # fmt: skip


def cells(row: Row) -> list[str]:
    at = row.at
    hosts = "-" if row.source == "rehearsed" else str(at.hosts)
    node_hours = "-" if row.source == "rehearsed" else brief(row.node_hours)
    how = row.source + (", shares cores" if at.shared else "")
    interval = f"{milliseconds(at.low)}-{milliseconds(at.high)}"
    return [
        hosts, str(at.ranks), str(at.threads), f"{at.ranks * at.batch:,.0f}", milliseconds(at.step), interval,
        f"{at.rate:,.0f}", f"{row.speedup:.2f}", f"{100 * row.efficiency:.0f} %", brief(row.hours(at.step)),
        node_hours, how,
    ]  # fmt: skip


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def brief_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def brief(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


DOUBTFUL = 4.0  # times the samples/s of a core; threads that bring nothing and caches explain less


def _cores(row: Row) -> int:
    return row.at.ranks * row.at.threads


def text(
    found: Sequence[Row],
    wish: Wish,
    config: Config,
    calibration: Calibration,
    link: Link | None = None,
    hosts: Sequence[int] = (),
    aim: Aim | None = None,
) -> str:
    """Return the table of predictions, and the advice below it. ``hosts``: the numbers that were asked for."""
    header, body = HEADER, [cells(row) for row in found]
    if aim:
        header = [*HEADER[:-1], f"s to {aim.target}", HEADER[-1]]
        times = [brief_seconds(row.to_target) for row in found]
        body = [[*row[:-1], taken, row[-1]] for row, taken in zip(body, times, strict=True)]
    lines = [table(header, body), "", choice(found, wish)]
    if not calibration.model(config.exchange.compression).knows_exchange:
        lines.append("no exchange could be measured, so more ranks are not predicted")
    elif left_out := sorted({*hosts} - {row.at.hosts for row in found}):
        lines.append(
            f"not planned: {listing(left_out)} hosts, whose ranks are more than the samples of a step or of the data"
        )
    lines += [*findings(found, config, calibration, link), *against_study(found), *against_trainings(found, aim)]
    one = min(found, key=lambda row: abs(row.speedup - 1))
    if max(row.speedup / _cores(row) for row in found) > DOUBTFUL * one.speedup / _cores(one):
        what = f"more than {DOUBTFUL:g} times as fast a core as on {amount(one.at.ranks, 'rank')} cannot be"
        lines.append(f"note: {what}: other programs ran while it was measured; plan again on a quiet host")
    runs = sum(map(len, calibration.figures.values()))
    lines.append(
        f"{amount(runs, 'run')} in {calibration.seconds:.0f} s; batch: of all ranks; 90 %: the interval of a step in "
        "another run; efficiency: speed-up / ranks; hours: of steps alone, for the same samples"
    )
    if (fewest := min(row.at.ranks for row in found if row.source != "rehearsed")) > 1:
        lines.append(f"speed-up: {fewest} ranks count as {fewest} times as fast as one, which is not in the table")
    return "\n".join(lines)


def choice(found: Sequence[Row], wish: Wish) -> str:
    """Say in one line what to take."""
    row = best(found, wish)
    limits = [] if wish.hours is None else [f"{wish.hours:g} h"]
    limits += [] if wish.node_hours is None else [f"{wish.node_hours:g} node-hours"]
    if row is None:
        near = min((one for one in found if one.source != "rehearsed"), key=lambda one: one.hours(one.at.step))
        took = f"{brief(near.hours(near.at.step))} h and {brief(near.node_hours)} node-hours"
        least = min(one.node_hours for one in found if one.source != "rehearsed")
        more = f"the fastest takes {took}, the cheapest {brief(least)} node-hours"
        return f"no choice keeps to {' and '.join(limits)}: {more}"
    at = row.at
    where = f"{amount(at.hosts, 'host')}, " if any(one.at.hosts > 1 for one in found) else ""
    span = f"{brief(row.hours(at.low))} to {brief(row.hours(at.high))}"
    took = f"{brief(row.hours(at.step))} h ({span}), {brief(row.node_hours)} node-hours"
    why = f"within {' and '.join(limits)}" if limits else "the fastest"
    return f"take {where}{amount(at.ranks, 'rank')} of {amount(at.threads, 'thread')}: {took}; {why}"


def findings(found: Sequence[Row], config: Config, calibration: Calibration, link: Link | None) -> list[str]:
    """Say how far cores are well used, where the loader limits, and from where fewer bytes pay."""
    lines = []
    known = [row for row in found if row.source != "rehearsed" and not row.at.shared]
    most = {row.at.hosts: max(one.at.rate for one in known if one.at.hosts == row.at.hosts) for row in known}
    if len(most) > 1:
        good = [n for n, rate in most.items() if n == 1 or rate >= EFFICIENT * n * most[1]]
        share = f"{100 * EFFICIENT:.0f} % of the work of as many single ones"
        if max(good) > 1:
            lines.append(f"up to {max(good)} hosts do {share}")
        else:
            lines.append(f"{min(n for n in most if n > 1)} hosts do less than {share}")
    for row in known:
        runs = calibration.figures.get((row.at.ranks, row.at.threads), [])
        alone = [run["input"] for run in runs if run.get("input")]
        if alone and row.at.hosts == 1 and min(alone) > 0.5 * row.at.own:
            lines.append(
                f"{amount(row.at.ranks, 'rank')}: the loader alone takes {milliseconds(min(alone))} ms a batch; "
                "see hvd-train guide slow"
            )
    return lines + _larger_batch(known, calibration) + _fewer_bytes(known, config, calibration, link)


def _larger_batch(known: Sequence[Row], calibration: Calibration) -> list[str]:
    """Say what a larger batch of a rank would bring on this host."""
    row = max((row for row in known if row.at.hosts == 1), key=lambda row: row.at.rate)
    runs = calibration.figures.get((row.at.ranks, row.at.threads), [])
    if not any(run.get("other") for run in runs):
        return []
    at, model = row.at, calibration.model()
    larger = model.predict(1, at.ranks, at.threads, batch=LARGER * at.batch)
    if larger.rate < BETTER * at.rate:
        return []
    batches = f"{LARGER * at.batch:,.0f} in place of {at.batch:,.0f}"
    rates = f"{larger.rate:,.0f} samples/s in place of {at.rate:,.0f}"
    return [f"{amount(at.ranks, 'rank')}: a batch of {batches} on each would give {rates}; it changes the training"]


def against_study(found: Sequence[Row]) -> list[str]:
    """Compare the plan, and simpler predictions beside it, with what a study has measured."""
    lines, errors, inside = [], [], 0
    for row in found:
        at = row.at
        if row.studied is None or row.error is None:
            continue
        others = [f"{name} {100 * (rate / row.studied - 1):+.1f} %" for name, rate in baselines(found, row).items()]
        words = ", ".join([f"plan {at.rate:,.0f}: {100 * row.error:+.1f} %", *others])
        lines.append(f"study: {amount(at.ranks, 'rank')}: {row.studied:,.0f} samples/s, {words}")
        errors.append(abs(row.error))
        inside += at.ranks * at.batch / at.high <= row.studied <= at.ranks * at.batch / at.low
    if errors:
        lines.append(f"study: median error {100 * median(errors):.1f} %; {inside} of {len(errors)} within the interval")
    return lines


def against_trainings(found: Sequence[Row], aim: Aim | None) -> list[str]:
    """Compare the predicted seconds to the target with those of the study's trainings on more than the fewest ranks.

    What is predicted uses the samples of trainings on fewer ranks alone.
    """
    lines = []
    for row in found:
        one = aim.trainings.get(row.at.ranks) if aim else None
        # ``studied`` marks the rows that trained as the study did: on this host, with the usual threads.
        if not aim or not one or row.studied is None:
            continue
        samples, took = aim.samples(one.batch, row.at.ranks), median(one.seconds or [math.inf])
        if samples and math.isfinite(took):
            taken = samples / row.at.rate
            words = f"{brief_seconds(took)} s to {aim.target}, plan {brief_seconds(taken)} s"
            lines.append(f"study: {amount(row.at.ranks, 'rank')}: {words}: {100 * (taken / took - 1):+.1f} %")
    if aim and not any(row.needed for row in found):
        lines.append(f"no time to {aim.target} is known: the study has no trainings that reached it")
    return lines


def baselines(found: Sequence[Row], row: Row) -> dict[str, float]:
    """Return {name: samples/s} of simpler predictions: as many times the first row, and a scaling law through the
    study's fewer ranks, the universal law if there are three, or Amdahl's."""
    first = found[0].at
    rates = {"linear": first.rate / first.ranks * row.at.ranks}
    fewer = {one.at.ranks: [one.studied] for one in found if one.studied and one.at.ranks < row.at.ranks}
    name = scaling_laws.UNIVERSAL if len(fewer) > 2 else scaling_laws.AMDAHL
    if law := scaling_laws.fit(fewer, name):
        rates[f"{name} law"] = float(law.law.rate(row.at.ranks))
    return {} if row.at.ranks == first.ranks else rates


def _fewer_bytes(known: Sequence[Row], config: Config, calibration: Calibration, link: Link | None) -> list[str]:
    """Say from how many hosts a compressor, or local training, makes a step shorter."""
    model, tried = calibration.model(config.exchange.compression), calibration.compressors()
    others = {key: one for key, one in tried.items() if key not in ("none", config.exchange.compression)}
    several = [row for row in known if row.at.hosts > 1]
    if not link or not several or not model.sent:
        return []
    lines: list[str] = []
    if others:
        limit = slowest_link(model, several[-1].at, others, link.latency)
        below = f"on {several[-1].at.hosts} hosts compression pays on links below {speed(limit)}" if limit else ""
        for row in several:
            name, step = best_compressor(model, row.at, others, link)
            if step < WORTH * row.at.step:
                where, bytes_ = amount(row.at.hosts, "host"), tried[name].sent / model.sent
                times = f"{milliseconds(step)} ms a step in place of {milliseconds(row.at.step)}"
                told = f"from {where} on exchange.compression: {name} pays: {times}, with {bytes_:.2g} of the bytes"
                lines.append("; ".join(filter(None, [told, below])))
                break
        else:
            lines.append("; ".join(filter(None, ["no compressor pays at these hosts and this link", below])))
    every = config.exchange.outer_steps
    for row in several:
        at, each = row.at, row.at.ranks // row.at.hosts
        x = model.exchange(at.hosts, each, link) / every
        step = at.own + x + at.waiting
        if step < WORTH * at.step:
            lines.append(
                f"from {amount(at.hosts, 'host')} on local training (exchange.mode: outer, every {every} steps) takes "
                f"{milliseconds(step)} ms a step in place of {milliseconds(at.step)}; it is another algorithm: compare "
                "its loss"
            )
            break
    return lines


def best_compressor(model: Model, at: Prediction, tried: Mapping[str, Compressed], link: Link) -> tuple[str, float]:
    """Return the compressor with the shortest predicted step on these hosts, and the seconds of the step."""
    each = at.ranks // at.hosts
    steps = {
        name: model.predict(at.hosts, each, at.threads, link, at.batch, one.exchange(model, at.hosts, each, link)).step
        for name, one in tried.items()
    }
    name = min(steps, key=lambda key: steps[key])
    return name, steps[name]


def slowest_link(model: Model, at: Prediction, tried: Mapping[str, Compressed], latency: float) -> float:
    """Return the bytes/s of a link below which compression pays on these hosts; 0: it never does."""

    def pays(log: float) -> bool:
        link = Link(math.exp(log), latency)
        plain = model.predict(at.hosts, at.ranks // at.hosts, at.threads, link, at.batch).step
        return best_compressor(model, at, tried, link)[1] < WORTH * plain

    low, high = math.log(1e4), math.log(1e12)
    if not pays(low):
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return math.exp(low)


def speed(bytes_per_second: float) -> str:
    """Return the speed of a link in words, with its headers."""
    bits = 8 * bytes_per_second / PAYLOAD
    unit, name = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s")
    return f"{bits / unit:,.{1 if bits < 10 * unit else 0}f} {name}"


def csv_text(found: Sequence[Row]) -> str:
    """Return the rows as CSV, in SI units."""
    stream = io.StringIO()
    records = [record(row) for row in found]
    writer = csv.DictWriter(stream, records[0])
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def json_text(found: Sequence[Row], calibration: Calibration) -> str:
    figures = {f"{k}x{t}": runs for (k, t), runs in calibration.figures.items()}
    problems = {f"{k}x{t}": reason for (k, t), (reason, _) in calibration.problems.items()}
    rows = [record(row) for row in found]
    return json.dumps({"rows": rows, "calibration": figures, "problems": problems}, indent=1) + "\n"


def record(row: Row) -> dict[str, Any]:
    """Return a row as names and numbers: seconds, samples/s, hours."""
    at = asdict(row.at)
    del at["measured"]
    if row.source == "rehearsed":  # hosts that are imagined
        at["hosts"] = None
    steps = {
        "steps": row.steps,
        "hours": row.hours(row.at.step),
        "node_hours": None if at["hosts"] is None else row.node_hours,
    }
    values = {"how": row.source, **at, "rate": row.at.rate, "speedup": row.speedup, "efficiency": row.efficiency}
    return values | steps | {"studied": row.studied, "error": row.error, "seconds_to_target": row.to_target}
