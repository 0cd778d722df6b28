"""Two records of the same training laid side by side: how far apart, where, and what differed first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvd_train.protocol import Tree
from hvd_train.verify.record import Record

TOLERANCE = 1e-9
NORM_FIX = "sync_batchnorm: true makes it independent of the ranks"  # in a configuration
FLOOR = 1e-4  # of the largest entry of its kind: what a tensor is measured against that is all rounding (1e-13 of it)


@dataclass(frozen=True)
class Row:
    """One compared thing: its largest relative difference, and where that is."""

    what: str
    place: str
    difference: float


@dataclass(frozen=True)
class Runs:
    """The runs of one world: ``title`` ("2 ranks of pytorch"), the training, and one plain step of rate 1.

    The plain step (SGD without momentum, decay and clipping) shows the gradient: first weights - last weights, over
    the rate. ``gradient`` None: not recorded.
    """

    title: str
    training: Record
    gradient: Record | None = None

    def first_gradient(self) -> Tree:
        if self.gradient is None:
            return {}
        first, last, rate = self.gradient.trees["first"], self.gradient.trees["last"], self.gradient.rates[0, 0]
        weights = [key for key in first if key.startswith("weights/")]
        return {key.replace("weights", "gradient", 1): (first[key] - last[key]) / rate for key in weights}


def farthest(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> tuple[float, str]:
    """(largest |a - b| / max(largest |a|, floor), its index); infinite where the shapes or a NaN differ."""
    if a.shape != b.shape:
        return math.inf, f"shape {a.shape} against {b.shape}"
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of two infinities
        away = np.abs(a - b)
    gap = np.where(np.isnan(a) == np.isnan(b), np.nan_to_num(away, nan=0.0, posinf=math.inf), math.inf)
    if not gap.size or not gap.max():
        return 0.0, "-"
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    scale = max(float(np.nanmax(np.abs(a))), floor)
    return float(gap[at]) / scale if scale else math.inf, f"[{', '.join(map(str, at))}]"


def _trees(a: Tree, b: Tree) -> list[Row]:
    """A row for each tensor; the floor is that of its kind, the key less its last part."""
    largest: dict[str, float] = {}
    for key, x in a.items():
        kind = key.rpartition("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(np.abs(x).max(initial=0.0)))
    found = []
    for key in dict.fromkeys([*a, *b]):
        if key in a and key in b:
            difference, place = farthest(a[key], b[key], FLOOR * largest[key.rpartition("/")[0]])
            found.append(Row(key, place, difference))
        else:
            found.append(Row(key, "only in one of them", math.inf))
    return found


def rows(a: Runs, b: Runs) -> list[Row]:
    """Loss, learning rate, samples, then each tensor: of the gradient of step 1, and of the state after the last."""
    one, two = a.training, b.training
    return [
        Row("loss", *_step(farthest(one.losses, two.losses))),
        Row("learning rate", *_step(_rates(one, two))),
        Row("samples", *_samples(one, two)),
        *_trees(a.first_gradient(), b.first_gradient()),
        *_trees(one.trees["last"], two.trees["last"]),
    ]


def _step(found: tuple[float, str]) -> tuple[str, float]:
    difference, place = found
    return (f"step {int(place.strip('[]').split(',')[-1]) + 1}" if difference and "[" in place else place), difference


def _rates(one: Record, two: Record) -> tuple[float, str]:
    return farthest(np.broadcast_to(one.rates[0], two.rates.shape), two.rates)


def _samples(one: Record, two: Record) -> tuple[str, float]:
    """The first step whose samples differ, and the share of its samples that do."""
    for step, (a, b) in enumerate(zip(one.samples, two.samples, strict=True)):
        if not np.array_equal(a, b):
            twice, left = _odd(a, b)
            return f"step {step + 1}", max(twice, left) / max(len(a), 1)
    return "-", 0.0


def _odd(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """(samples of b beyond those of a, counted as often as they stand there; samples of a that b lacks)."""
    values = np.union1d(a, b)
    count = [np.bincount(np.searchsorted(values, x), minlength=len(values)) for x in (a, b)]
    more = count[1] - count[0]
    return int(more[more > 0].sum()), int(-more[more < 0].sum())


def findings(a: Runs, b: Runs, tolerance: float = TOLERANCE, norm_fix: str = NORM_FIX) -> list[str]:
    """List the differences, causes before consequences: the first line tells where to look. Empty: equal.

    ``norm_fix``: what to do about batch normalization over each rank's own samples.
    """
    found = _weights_apart(b, "first", "start") + _first_weights(a, b, tolerance) + _which_samples(a, b)
    equal = not found
    found += _which_rate(a, b, tolerance)
    if equal:
        found += _first_loss(a, b, tolerance, norm_fix)
    found += _gradient(a, b, tolerance)
    found += _weights_apart(b, "last", "end")
    found += _no_numbers(a, b)
    beyond = [row for row in rows(a, b) if not row.difference <= tolerance]
    state = [row for row in beyond if row.what.split("/")[0] in ("weights", "statistics", "slots")]
    if state:
        worst = max(state, key=lambda row: row.difference)
        steps = len(a.training.losses)
        found.append(
            f"after {steps} step{'s' * (steps > 1)} {worst.what} differs by {worst.difference:.1e} at {worst.place}"
        )
    if beyond and not found:
        found.append(f"{beyond[0].what} differs by {beyond[0].difference:.1e} at {beyond[0].place}")
    return found


def _weights_apart(runs: Runs, stage: str, verb: str) -> list[str]:
    apart = runs.training.differing[stage]
    if not apart:
        return []
    tensor = min(key for tree in apart.values() for key in tree)
    return [f"the ranks {verb} with different weights: {_ranks(apart)} against rank 0, first in {tensor}"]


def _ranks(apart: dict[int, Tree]) -> str:
    return f"rank{'s' * (len(apart) > 1)} {', '.join(map(str, sorted(apart)))}"


def _first_weights(a: Runs, b: Runs, tolerance: float) -> list[str]:
    beyond = [r for r in _trees(a.training.trees["first"], b.training.trees["first"]) if not r.difference <= tolerance]
    return [f"the first weights differ: {r.what} by {r.difference:.1e} at {r.place}" for r in beyond[:1]]


def _which_samples(a: Runs, b: Runs) -> list[str]:
    for step, (one, two) in enumerate(zip(a.training.samples, b.training.samples, strict=True)):
        more, less = _odd(one, two)
        if more or less:
            again = int(len(two) - len(np.unique(two)))
            what = [f"{again} seen twice"] * bool(again) + [f"{less} left out"] * bool(less)
            what += [f"{more} that do not belong there"] * (more > again)
            return [f"samples of step {step + 1}: {', '.join(what)}"]
    return []


def _which_rate(a: Runs, b: Runs, tolerance: float) -> list[str]:
    difference, place = _rates(a.training, b.training)
    if difference <= tolerance:
        return []
    rank, step = (int(n) for n in place.strip("[]").split(","))
    one, two = float(a.training.rates[0, step]), float(b.training.rates[rank, step])
    return [f"the learning rate of step {step + 1} is {_times(two, one)} that of {a.title} ({two:g} against {one:g})"]


def _first_loss(a: Runs, b: Runs, tolerance: float, norm_fix: str) -> list[str]:
    """With equal weights and samples the forward pass itself depends on the ranks."""
    one, two = (float(runs.training.losses[0]) for runs in (a, b))
    if abs(one - two) <= tolerance * abs(one):
        return []
    normalized = any(key.startswith("statistics/") for key in a.training.trees["first"])
    told = f"the loss of step 1 is {two:.6g} against {one:.6g} with equal weights and samples"
    if a.training.size == b.training.size:
        return [told]
    if normalized:
        return [f"unsynchronized batch norm: {told}; {norm_fix}"]
    return [f"{told}: something in the forward pass depends on the rank (random numbers, statistics of a batch?)"]


def _gradient(a: Runs, b: Runs, tolerance: float) -> list[str]:
    if a.gradient is None or b.gradient is None:
        return []
    apart = b.gradient.differing
    if apart["last"] and not apart["first"]:
        return [f"the gradient of step 1 differs between ranks ({_ranks(apart['last'])} against rank 0): no exchange"]
    one, two = a.first_gradient(), b.first_gradient()
    beyond = [row for row in _trees(one, two) if not row.difference <= tolerance]
    if not beyond:
        return []
    square = sum(float(np.vdot(x, x)) for x in one.values())
    ratio = sum(float(np.vdot(x, two[key])) for key, x in one.items()) / square if square else math.nan
    if all(row.difference <= tolerance for row in _trees({key: ratio * x for key, x in one.items()}, two)):
        return [f"the gradient of step 1 is {ratio:.6g} times that of {a.title}"]
    worst = max(beyond, key=lambda row: row.difference)
    return [f"the gradient of step 1 differs: {worst.what} by {worst.difference:.1e} at {worst.place}"]


def _no_numbers(a: Runs, b: Runs) -> list[str]:
    """What is no number on either side looks equal, and is not compared."""
    one, two = a.training, b.training
    if one.losses.shape == two.losses.shape:
        for step in np.flatnonzero(~np.isfinite(one.losses) & ~np.isfinite(two.losses))[:1]:
            return [f"the loss of step {step + 1} is {one.losses[step]:g} in both: from there on nothing is compared"]
    first, second = one.trees["last"], two.trees["last"]
    weights = [key for key in first.keys() & second.keys() if key.startswith("weights/")]
    spoilt = sorted(key for key in weights if not (np.isfinite(first[key]) | np.isfinite(second[key])).all())
    return [f"{key} ends with numbers that are none in both, which are not compared" for key in spoilt[:1]]


def _times(two: float, one: float) -> str:
    return f"{two / one:.6g} times" if one else "not"
