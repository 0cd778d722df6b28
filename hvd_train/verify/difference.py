"""Compare two records of the same training: how much they differ, where, and what differed first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvd_train.errors import amount, name_ranks
from hvd_train.protocol import Tree
from hvd_train.verify.record import Record

TOLERANCE = 1e-9
NORM_FIX = "sync_batchnorm: true makes it independent of the ranks"  # in a configuration
# Differences are relative to at least this share of the largest entry of the tensor's kind. Tensors of pure rounding
# error are about 1e-13 of it.
FLOOR = 1e-4


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one quantity, and where it is."""

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
        """Return the gradient of step 1 by the names of the weights, from the plain step; {} if not recorded."""
        if self.gradient is None:
            return {}
        first, last, rate = self.gradient.trees["first"], self.gradient.trees["last"], self.gradient.rates[0, 0]
        weights = [key for key in first if key.startswith("weights/")]
        return {key.replace("weights", "gradient", 1): (first[key] - last[key]) / rate for key in weights}


def farthest(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> tuple[float, str]:
    """Return (largest |a - b| / max(largest |a|, floor), its index). Infinite where the shapes or a NaN differ."""
    if a.shape != b.shape:
        return math.inf, f"shape {a.shape} against {b.shape}"
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        distance = np.abs(a - b)
    # NaN on both sides counts as equal here; ``_not_finite`` reports it.
    gap = np.where(np.isnan(a) == np.isnan(b), np.nan_to_num(distance, nan=0.0, posinf=math.inf), math.inf)
    if not gap.size or not gap.max():
        return 0.0, "-"
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    scale = max(float(np.nanmax(np.abs(a))), floor)
    return float(gap[at]) / scale if scale else math.inf, f"[{', '.join(map(str, at))}]"


def _trees(a: Tree, b: Tree) -> list[Difference]:
    """Return a row for each tensor. The floor depends on its kind: the key without its last part."""
    scales: dict[str, float] = {}
    for key, x in a.items():
        kind = key.rpartition("/")[0]
        scales[kind] = max(scales.get(kind, 0.0), float(np.abs(x).max(initial=0.0)))
    result = []
    for key in dict.fromkeys([*a, *b]):
        if key in a and key in b:
            difference, place = farthest(a[key], b[key], FLOOR * scales[key.rpartition("/")[0]])
            result.append(Difference(key, place, difference))
        else:
            result.append(Difference(key, "only in one of them", math.inf))
    return result


def rows(a: Runs, b: Runs) -> list[Difference]:
    """Return rows for loss, rate and samples, then for each tensor of the first gradient and the last state."""
    one, two = a.training, b.training
    return [
        Difference("loss", *_step(farthest(one.losses, two.losses))),
        Difference("learning rate", *_step(_rates(one, two))),
        Difference("samples", *_samples(one, two)),
        *_trees(a.first_gradient(), b.first_gradient()),
        *_trees(one.trees["last"], two.trees["last"]),
    ]


def _step(farthest_entry: tuple[float, str]) -> tuple[str, float]:
    difference, place = farthest_entry
    return (f"step {int(place.strip('[]').split(',')[-1]) + 1}" if difference and "[" in place else place), difference


def _rates(one: Record, two: Record) -> tuple[float, str]:
    return farthest(np.broadcast_to(one.rates[0], two.rates.shape), two.rates)


def _samples(one: Record, two: Record) -> tuple[str, float]:
    """Return the first step whose samples differ, and the share of its samples that do."""
    for step, (a, b) in enumerate(zip(one.samples, two.samples, strict=True)):
        if not np.array_equal(a, b):
            extra, missing = _surplus(a, b)
            return f"step {step + 1}", max(extra, missing) / max(len(a), 1)
    return "-", 0.0


def _surplus(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Count (samples of b that a lacks, with repeats; samples of a that b lacks)."""
    # (distinct samples,); count: how often each of them comes in a and in b
    values = np.union1d(a, b)
    count = [np.bincount(np.searchsorted(values, x), minlength=len(values)) for x in (a, b)]
    more = count[1] - count[0]
    return int(more[more > 0].sum()), int(-more[more < 0].sum())


def findings(a: Runs, b: Runs, norm_fix: str = NORM_FIX) -> list[str]:
    """List the differences, causes before consequences, so that the first line says where to look. [] if equal.

    ``norm_fix``: what to do about batch normalization over each rank's local samples.
    """
    # Causes first: with different weights or samples the loss must differ, which tells nothing new.
    lines = _weights_apart(b, "first", "start") + _first_weights(a, b) + _which_samples(a, b)
    same_start = not lines
    lines += _which_rate(a, b)
    if same_start:
        lines += _first_loss(a, b, norm_fix)
    lines += _gradient(a, b)
    lines += _weights_apart(b, "last", "end")
    lines += _not_finite(a, b)
    # ``not <=`` and not ``>``: a NaN is beyond, too.
    beyond = [row for row in rows(a, b) if not row.difference <= TOLERANCE]
    state = [row for row in beyond if row.what.split("/")[0] in ("weights", "statistics", "slots")]
    if state:
        worst = max(state, key=lambda row: row.difference)
        steps = len(a.training.losses)
        lines.append(f"after {amount(steps, 'step')} {worst.what} differs by {worst.difference:.1e} at {worst.place}")
    if beyond and not lines:
        lines.append(f"{beyond[0].what} differs by {beyond[0].difference:.1e} at {beyond[0].place}")
    return lines


def _weights_apart(runs: Runs, stage: str, verb: str) -> list[str]:
    apart = runs.training.differing[stage]
    if not apart:
        return []
    tensor = min(key for tree in apart.values() for key in tree)
    return [f"the ranks {verb} with different weights: {name_ranks(sorted(apart))} against rank 0, first in {tensor}"]


def _first_weights(a: Runs, b: Runs) -> list[str]:
    beyond = [r for r in _trees(a.training.trees["first"], b.training.trees["first"]) if not r.difference <= TOLERANCE]
    return [f"the first weights differ: {r.what} by {r.difference:.1e} at {r.place}" for r in beyond[:1]]


def _which_samples(a: Runs, b: Runs) -> list[str]:
    for step, (one, two) in enumerate(zip(a.training.samples, b.training.samples, strict=True)):
        more, less = _surplus(one, two)
        if more or less:
            again = int(len(two) - len(np.unique(two)))
            what = [f"{again} seen twice"] * bool(again) + [f"{less} left out"] * bool(less)
            what += [f"{more} that do not belong there"] * (more > again)
            return [f"samples of step {step + 1}: {', '.join(what)}"]
    return []


def _which_rate(a: Runs, b: Runs) -> list[str]:
    difference, place = _rates(a.training, b.training)
    if difference <= TOLERANCE:
        return []
    rank, step = (int(n) for n in place.strip("[]").split(","))
    one, two = float(a.training.rates[0, step]), float(b.training.rates[rank, step])
    return [f"the learning rate of step {step + 1} is {_times(two, one)} that of {a.title} ({two:g} against {one:g})"]


def _first_loss(a: Runs, b: Runs, norm_fix: str) -> list[str]:
    """Compare the first losses. With equal weights and samples, a difference comes from the forward pass."""
    one, two = (float(runs.training.losses[0]) for runs in (a, b))
    if abs(one - two) <= TOLERANCE * abs(one):
        return []
    normalized = any(key.startswith("statistics/") for key in a.training.trees["first"])
    message = f"the loss of step 1 is {two:.6g} against {one:.6g} with equal weights and samples"
    if a.training.size == b.training.size:
        return [message]
    if normalized:
        return [f"unsynchronized batch norm: {message}; {norm_fix}"]
    return [f"{message}: something in the forward pass depends on the rank (random numbers, statistics of a batch?)"]


def _gradient(a: Runs, b: Runs) -> list[str]:
    if a.gradient is None or b.gradient is None:
        return []
    apart = b.gradient.differing
    if apart["last"] and not apart["first"]:
        ranks = name_ranks(sorted(apart["last"]))
        return [f"the gradient of step 1 differs between ranks ({ranks} against rank 0): no exchange"]
    one, two = a.first_gradient(), b.first_gradient()
    beyond = [row for row in _trees(one, two) if not row.difference <= TOLERANCE]
    if not beyond:
        return []
    # Least squares: the ratio r for which r * one is nearest to two. A sum in place of a mean gives N.
    square = sum(float(np.vdot(x, x)) for x in one.values())
    ratio = sum(float(np.vdot(x, two[key])) for key, x in one.items()) / square if square else math.nan
    if all(row.difference <= TOLERANCE for row in _trees({key: ratio * x for key, x in one.items()}, two)):
        return [f"the gradient of step 1 is {ratio:.6g} times that of {a.title}"]
    worst = max(beyond, key=lambda row: row.difference)
    return [f"the gradient of step 1 differs: {worst.what} by {worst.difference:.1e} at {worst.place}"]


def _not_finite(a: Runs, b: Runs) -> list[str]:
    """Report NaN and infinity on both sides, which look equal and are not compared."""
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
