"""Predict the time of a step on N ranks from short measurements on one host.

A step of rank r takes its own time u_r (input, forward, backward, update, hooks), what of the exchange is not hidden
behind it, and its waiting for the slowest rank:

    T(N) = (u^g + x(N)^g)^(1/g) + w(N)

    x(N) = (N - 1) (a + 2 m l) + 2 (N - 1) / N S (1 / B + r)

x: seconds of an exchange of S bytes in m messages, of which a is the cost of the driver for each further rank, l and B
the latency and bytes/s of the link between hosts, and r the seconds per byte of copies and sums on a host. g = 1 hides
nothing, a large g all of the shorter part (as in AdaptDL, Qiao et al. 2021). w: the expected maximum of N own times
less their mean, at the scale measured on the host.

On the ranks that were measured, T is what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

LEVEL_Z = 1.6449  # 90 % intervals, two-sided
# What is assumed about errors before anything was repeated: two runs of the same differ by this standard deviation,
# as if that many repeats had shown it.
RUN_DEVIATION, RUN_WEIGHT = 0.03, 3
# Standard deviations of what is extrapolated, relative to the part itself: on a link (whose speed is only given), and
# for each doubling of the ranks. ``OWN``: beyond the ranks that were measured on a host.
LINK, EXCHANGE, WAIT, OWN = 0.1, 0.1, 0.3, 0.05
MOST_OVERLAP = 10.0  # the largest g
PAYLOAD = 0.94  # payload of a link's bit rate: the rest is headers of Ethernet, IP and TCP


@dataclass(frozen=True)
class Link:
    """The network between hosts: payload bytes/s each way of a host, and seconds of latency."""

    bytes_per_second: float
    latency: float


@dataclass(frozen=True)
class Point:
    """One run of ranks on a host.

    ``own``: (ranks, calls) seconds a step without waiting for transfers; ``weights``: (calls,) steps of each call.
    ``step``: seconds of a step, all included. ``batch``: samples of a rank's step. ``slope``: seconds that a further
    sample adds to ``own``. ``exchange``, ``empty``: seconds of an exchange alone, and of one without content.
    ``error``: the relative standard error of ``step``, as far as it is seen within the run.
    """

    ranks: int
    threads: int
    batch: float
    own: np.ndarray
    weights: np.ndarray
    step: float
    slope: float = 0.0
    exchange: float = 0.0
    empty: float = 0.0
    error: float = 0.0

    @property
    def mean_own(self) -> float:
        return float(np.average(self.own.mean(axis=0), weights=self.weights))

    def own_with(self, batch: float) -> float:
        """Return the mean own time with another number of samples."""
        return _with_batch(self.mean_own, self.slope, self.batch, batch)

    @property
    def spread(self) -> float:
        """Return the mean over steps of the slowest rank's own time, less the mean of all."""
        return float(np.average(self.own.max(axis=0), weights=self.weights)) - self.mean_own

    @property
    def exposed(self) -> float:
        """Return the seconds of the exchange that computing does not hide."""
        return min(max(self.step - self.mean_own - self.spread, 0.0), self.exchange)

    @property
    def waiting(self) -> float:
        """Return the seconds of waiting for the slowest rank: what own time and exchange do not explain."""
        return max(self.step - self.mean_own - self.exposed, 0.0)


def _with_batch(own: float, slope: float, batch: float, other: float) -> float:
    """Return the own time with ``other`` samples. Fewer take at least their share of the time, more at most."""
    return own + min(max(slope, 0.0), own / batch) * (other - batch)


@dataclass(frozen=True)
class Parts:
    """The parts of a step on ``ranks`` of a host, in seconds. ``point``: the nearest that was measured.

    ``slope``: of ``own`` over samples; ``exchange``: x; ``overlap``: g; ``waiting``: w.
    """

    point: Point
    ranks: int
    threads: int
    own: float
    slope: float
    exchange: float
    overlap: float
    waiting: float
    measured: bool


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step, in seconds, with its 90 % interval and parts.

    ``measured``: the ranks were measured, so nothing is extrapolated. ``shared``: more ranks than cores on a host.
    """

    hosts: int
    ranks: int
    threads: int
    batch: float
    step: float
    low: float
    high: float
    own: float
    exchange: float
    waiting: float
    measured: bool
    shared: bool

    @property
    def rate(self) -> float:
        """Return samples/s of all ranks."""
        return self.ranks * self.batch / self.step


def expected_max(times: np.ndarray, weights: np.ndarray | None, n: float) -> float:
    """Return the expected maximum of ``n`` independent draws from weighted times, exactly."""
    order = np.argsort(times)
    w = np.ones(len(times)) if weights is None else np.asarray(weights, dtype=float)
    below = np.concatenate([[0.0], np.cumsum(w[order])]) / w.sum()
    below[-1] = 1.0
    return float(np.sum(times[order] * np.diff(below**n)))


def excess(point: Point, n: float) -> float:
    """Return by how much the expected maximum of ``n`` own times exceeds their mean."""
    weights = np.broadcast_to(point.weights, point.own.shape).reshape(-1)
    return max(expected_max(point.own.reshape(-1), weights, n) - point.mean_own, 0.0)


def norm(a: float, b: float, g: float) -> float:
    """Return (a^g + b^g)^(1/g) of seconds, which lies between their maximum and their sum."""
    large, small = max(a, b), min(a, b)
    return large * (1 + (small / large) ** g) ** (1 / g) if large > 0 else 0.0


def overlap(own: float, exchange: float, exposed: float) -> float:
    """Return g with (own^g + exchange^g)^(1/g) = own + exposed, from 1 to ``MOST_OVERLAP``."""
    if own <= 0 or exchange <= 0 or exposed >= exchange:
        return 1.0
    low, high = 1.0, MOST_OVERLAP
    if norm(own, exchange, high) >= own + exposed:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if norm(own, exchange, middle) > own + exposed else (low, middle)
    return (low + high) / 2


def ring(ranks: int) -> float:
    """Return how many times its bytes each rank of a ring sends: 2 (N - 1) / N."""
    return 2 * (ranks - 1) / ranks


@dataclass
class Model:
    """What was measured on one host, and what follows from it.

    ``points``: the runs of each (ranks, threads). ``cores``: of a host, or its GPUs. ``sent``: S; ``messages``: m.
    ``gathers``: each rank sends S to each other one, as some compressors do, so that S counts N - 1 times.
    """

    points: Mapping[tuple[int, int], Sequence[Point]]
    cores: int
    sent: float = 0.0
    messages: int = 0
    gathers: bool = False
    _point: dict[tuple[int, int], Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._point = {key: joined(runs) for key, runs in self.points.items()}

    @property
    def placements(self) -> list[tuple[int, int]]:
        """Return the measured (ranks, threads), in order."""
        return sorted(self._point)

    @property
    def knows_exchange(self) -> bool:
        """Return whether an exchange was measured: otherwise more ranks cannot be predicted."""
        return self._multi() is not None

    @property
    def deviation(self) -> tuple[float, float]:
        """Return the standard deviation of log seconds between runs of the same, and its degrees of freedom."""
        total, count = RUN_WEIGHT * RUN_DEVIATION**2, RUN_WEIGHT
        for runs in self.points.values():
            logs = np.log([one.step for one in runs])
            total += float(np.sum((logs - logs.mean()) ** 2))
            count += len(runs) - 1
        return math.sqrt(total / count), count

    def parts(self, ranks: int, threads: int | None = None) -> Parts:
        """Return the parts of a step on a host, also for ranks that were not measured.

        Own times are interpolated in log(ranks). Beyond the cores, ranks take turns on them.
        """
        if (ranks, threads) in self._point:
            return self._measured(self._point[ranks, threads])  # type: ignore[index]
        known = {k: self._point[k, t] for k, t in self.placements}  # of equal ranks, that with most threads
        if ranks in known:
            return self._measured(known[ranks])
        point, xs, turns = known[self._nearest(ranks)], sorted(known), 1.0
        owns = [known[k].own_with(point.batch) for k in xs]
        if ranks > xs[-1]:
            turns = max(ranks / max(xs[-1], self.cores), 1.0)
            own = owns[-1] * turns
        else:
            own = math.exp(float(np.interp(math.log(ranks), np.log(xs), np.log(owns))))
        base, factor = self._measured(point), own / point.mean_own
        x = turns * self._on_host(ranks, self.sent)
        waiting = factor * self._grown(base, ranks)
        threads = threads or max(self.cores // ranks, 1)
        return Parts(point, ranks, threads, own, factor * point.slope, x, base.overlap, waiting, False)

    def _measured(self, point: Point) -> Parts:
        base = point if point.exchange > 0 else self._multi()
        g = overlap(base.mean_own, base.exchange, base.exposed) if base else 1.0
        values = point.mean_own, point.slope, point.exchange, g, point.waiting
        return Parts(point, point.ranks, point.threads, *values, True)

    def _grown(self, parts: Parts, n: int) -> float:
        """Return w of ``n`` such ranks."""
        point = parts.point
        if n == parts.ranks:
            return parts.waiting
        scale = parts.own / point.mean_own
        before, after = scale * excess(point, parts.ranks), scale * excess(point, n)
        return parts.waiting * after / before if parts.ranks > 1 and before > 0 else parts.waiting + after - before

    def _multi(self, ranks: int = 2) -> Point | None:
        """Return the point with a measured exchange that is nearest to ``ranks``; None if none was measured."""
        several = [one for one in self._point.values() if one.exchange > 0]
        # Ranks that share cores wait for a core in each exchange, as those of other hosts do not.
        several = [one for one in several if one.ranks <= max(self.cores, 2)] or several
        return min(several, key=lambda one: abs(math.log(one.ranks / ranks))) if several else None

    def driver(self, ranks: int) -> float:
        """Return a: the seconds that each further rank costs an exchange, whatever its bytes."""
        base = self._multi(ranks)
        return base.empty / (base.ranks - 1) if base else 0.0

    def copying(self, ranks: int) -> float:
        """Return r: the seconds per byte that a host's ranks need to copy and add."""
        base = self._multi(ranks)
        if not base or not self.sent:
            return 0.0
        return max(base.exchange - base.empty, 0.0) / (self._times(base.ranks) * self.sent)

    def _times(self, n: int) -> float:
        """Return how many times S each rank sends."""
        return n - 1 if self.gathers else ring(n)

    def _on_host(self, ranks: int, sent: float) -> float:
        return (ranks - 1) * self.driver(ranks) + self._times(ranks) * sent * self.copying(ranks)

    def exchange(self, hosts: int, ranks: int, link: Link | None) -> float:
        """Return x: the seconds of an exchange on ``ranks`` of each of ``hosts``."""
        n = hosts * ranks
        if n == 1:
            return 0.0
        if hosts == 1 or link is None:
            return self.parts(ranks).exchange if hosts == 1 else self._on_host(n, self.sent)
        rank_cost = self.driver(ranks) + 2 * self.messages * link.latency
        return (n - 1) * rank_cost + self._times(n) * self.sent * (1 / link.bytes_per_second + self.copying(ranks))

    def predict(
        self,
        hosts: int,
        ranks: int,
        threads: int | None = None,
        link: Link | None = None,
        batch: float | None = None,
        exchange: float | None = None,
    ) -> Prediction:
        """Predict a step on ``ranks`` of each of ``hosts``. ``exchange``: seconds of x, if it is known otherwise."""
        parts, n = self.parts(ranks, threads), hosts * ranks
        usual = parts.point.batch
        batch = usual if batch is None else batch
        own = _with_batch(parts.own, parts.slope, usual, batch)
        here = hosts == 1 and exchange is None
        x = exchange if exchange is not None else parts.exchange if here else self.exchange(hosts, ranks, link)
        core, waiting = norm(own, x, parts.overlap), self._grown(parts, n) * own / parts.own
        step = core + waiting
        # Standard deviations of log(step), independent of one another.
        deviation, freedom = self.deviation
        errors = [deviation * math.sqrt(1 + 1 / len(self.points.get((ranks, parts.threads), [0])))]
        errors.append(parts.point.error)
        nearest = self._nearest(ranks)
        beyond = abs(math.log2(ranks / nearest))
        doublings = abs(math.log2(n / nearest))
        errors += [OWN * beyond * own / step, EXCHANGE * doublings * (core - own) / step]
        errors.append(WAIT * doublings * waiting / step)
        if hosts > 1:
            errors.append(LINK * (core - own) / step)
        if not here and x:  # how much of it is hidden was measured on the host, not on the link
            hidden = norm(own, x, 1.0) - norm(own, x, max(parts.overlap, 2.0))
            errors.append(hidden / 2 / LEVEL_Z / step)
        if batch != usual:
            errors.append(OWN * abs(math.log2(batch / usual)) * own / step)
        factor = math.exp(student(freedom) * math.sqrt(sum(e * e for e in errors)))
        return Prediction(
            hosts, n, parts.threads, batch, step, step / factor, step * factor, own, core - own, waiting,
            measured=here and parts.measured and batch == usual,
            shared=ranks > self.cores,
        )  # fmt: skip

    def _nearest(self, ranks: int) -> int:
        return min((k for k, _ in self._point), key=lambda k: (abs(math.log(k / ranks)), -k))


def joined(runs: Sequence[Point]) -> Point:
    """Return the mean of runs of the same placement, with the calls of all."""
    if len(runs) == 1:
        return runs[0]
    first = runs[0]
    own = np.concatenate([one.own for one in runs], axis=1)
    weights = np.concatenate([one.weights for one in runs])
    slopes = [one.slope for one in runs if one.slope]
    return Point(
        first.ranks,
        first.threads,
        first.batch,
        own * (fmean([one.mean_own for one in runs]) / float(np.average(own.mean(axis=0), weights=weights))),
        weights,
        fmean([one.step for one in runs]),
        median(slopes) if slopes else 0.0,
        fmean([one.exchange for one in runs]),
        fmean([one.empty for one in runs]),
        math.sqrt(sum(one.error**2 for one in runs)) / len(runs),
    )


def student(freedom: float) -> float:
    """Return Student's factor of a two-sided 90 % interval (Abramowitz and Stegun 26.7.5)."""
    z = LEVEL_Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass(frozen=True)
class Compressed:
    """An exchange with a compressor on two ranks of a host: seconds, and bytes that a rank sends.

    ``gathers``: each rank sends its message to all others, so its bytes grow with N - 1, not with 2 (N - 1) / N.
    """

    seconds: float
    sent: float
    gathers: bool = False

    def exchange(self, model: Model, hosts: int, ranks: int, link: Link) -> float:
        """Return the seconds of an exchange on ``ranks`` of each of ``hosts``."""
        n, copying = hosts * ranks, model.copying(ranks)
        cpu = max(self.seconds - model.driver(2) - self.sent * copying, 0.0)  # of the compressor itself
        sent = self.sent * ((n - 1) if self.gathers else ring(n))
        rank_cost = model.driver(ranks) + 2 * model.messages * link.latency
        return cpu + (n - 1) * rank_cost + sent * (1 / link.bytes_per_second + copying)
