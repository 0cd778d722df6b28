"""What makes a training slow: each finding with its evidence, a cure, and what the cure would give by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_train.config.modes import ALLREDUCE, EVERY_STEP
from hvd_train.core.shares import IN_STEPS
from hvd_train.errors import amount
from hvd_train.insight.recorded_steps import RecordedSteps
from hvd_train.insight.replay import Replay

WORTH = 1.05  # a finding is told from this gain on
# The shares of the time that checkpoints and evaluations may take.
SAVE_SHARE, EVALUATE_SHARE = 0.05, 0.1
SAVE_FROM, EVALUATE_FROM = 0.1, 0.25  # from which they are told
LOST = 0.05  # of a rank's time, which other programs took from it
STEADY = 0.7  # of what a rank has more than the others in some steps, it has not less in other steps
FROM_DISK = 10.0  # MB/s of all ranks, from which a disk is to blame
MOST_WORKERS = 64
FAULTS = 100.0  # page faults a second that read from a disk
SHORT_STEP = 0.003  # seconds
OWN_CORES = "end the other programs, or use cores of your own (Slurm: hvd-train submit, slurm.lines: [--exclusive])"


@dataclass(frozen=True)
class Finding:
    """``cause``: one word or a few. ``evidence``: a sentence. ``cure``: what to do.

    ``gain``: how many times as fast the run would be, None: not known. ``bound``: "at most", "at least" or "".
    """

    cause: str
    evidence: str
    cure: str
    gain: float | None
    bound: str = ""

    @property
    def gain_words(self) -> str:
        if self.gain is None:
            return ""
        return f"{self.bound} {self.gain:.2f} times as fast".lstrip()


class Case:
    """A run to explain. ``config``: {key with dots: value}. ``environment``: of rank 0; both may lack anything.

    ``allocation``: seconds of steps that count, and of all starts; zeros: not known. ``seconds``: of the last start
    from the end of its first step, the mean over ranks.
    """

    def __init__(
        self,
        recorded: RecordedSteps,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        allocation: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.recorded, self.config, self.environment, self.allocation = recorded, config, environment, allocation
        self.replay = Replay(recorded)
        self.in_steps = float(np.mean(recorded.total(*IN_STEPS)))
        self.seconds = max(self.in_steps + self.part("save", "evaluate"), 1e-9)
        self.step = self.replay.seconds / float(recorded.weights @ recorded.steps)
        every_step = self.setting("exchange.mode", ALLREDUCE) in EVERY_STEP
        # Its process runs ahead of a GPU, so computing counts where it waits.
        self.on_gpu = environment.get("device") == "cuda"
        self.in_lockstep = not self.on_gpu and recorded.ranks > 1 and recorded.stages == 1 and every_step

    def setting(self, key: str, otherwise: Any) -> Any:
        value = self.config.get(key)
        return otherwise if value is None else value

    def whole(self, key: str, otherwise: int) -> int:
        """Return the whole number of a key; the file may be somebody else's."""
        value = self.config.get(key)
        return value if isinstance(value, int) and value > 0 else otherwise

    def part(self, *names: str) -> float:
        """Return the seconds of these parts, the mean over ranks."""
        return float(np.mean(self.recorded.total(*names)))

    def share(self, seconds: float) -> str:
        return f"{seconds / self.seconds:.0%}"

    def gain(self, **changes: Any) -> float:
        """Return how many times as fast the run is if its steps have other terms (``Replay.with_changes``)."""
        return self.without(self.in_steps * (1 - self.replay.with_changes(**changes) / self.replay.seconds))

    def without(self, seconds: float) -> float:
        """Return how many times as fast the run is without these seconds."""
        return self.seconds / max(self.seconds - seconds, 1e-9)

    def of_rank(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of (cells, ranks) over all steps, (ranks,)."""
        total: np.ndarray = self.recorded.weights @ values
        return total

    def per_step(self, seconds: np.ndarray) -> np.ndarray:
        """Return ``seconds`` (cells, ...) as milliseconds a step, the mean over all steps."""
        mean: np.ndarray = 1000 * (self.recorded.weights @ seconds) / (self.recorded.weights @ self.recorded.steps)
        return mean

    def named(self, ranks: Sequence[int], verb: str = "") -> str:
        """Return the words for some ranks, with their hosts if there are several. ``verb``: of one rank (computes)."""
        hosts = self.recorded.hosts
        on = sorted({hosts[rank] for rank in ranks}) if len(set(hosts)) > 1 else []
        words = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        words += f" (host {', '.join(on)})" if on else ""
        return f"{words} {verb if len(ranks) == 1 else verb.removesuffix('s')}".rstrip()

    def lost(self) -> np.ndarray | None:
        """Return the seconds that other programs, or other ranks, took each rank's cores from it, (ranks,).

        They are those in which its threads waited for a core, but no more than others used its cores: threads of a rank
        also wait for one another. None: not known.
        """
        r = self.recorded
        figures = [r.usage.get(name) or (None,) for name in ("elapsed", "cpu", "queued", "busy")]
        if not r.cores or not all(r.cores) or any(None in one for one in figures):
            return None
        elapsed, used, queued, busy = (np.array(one, dtype=float) for one in figures)
        lost = np.zeros(r.ranks)
        for ranks in self.crowds():
            own = set(r.cores[ranks[0]])
            if any(set(r.cores[k]) != own for k in ranks):
                continue  # they share some cores, and it is not known how busy each is
            others = busy[ranks].mean() - used[ranks].sum()
            others += (used[ranks].sum() - used[ranks]) * (len(ranks) > len(own))
            lost[ranks] = np.minimum(queued[ranks], others) / np.maximum(elapsed[ranks], 1e-9)
        return self.seconds * np.clip(lost, 0, 1)

    def crowds(self) -> list[list[int]]:
        """Return the ranks that have cores in common, as groups."""
        r, groups = self.recorded, dict[tuple[str, int], list[int]]()
        for rank, (host, cores) in enumerate(zip(r.hosts, r.cores, strict=True)):
            joined = sorted({k for core in cores for k in groups.get((host, core), ())} | {rank})
            groups |= {(host, core): joined for k in joined for core in r.cores[k]}
        return list({tuple(one): one for one in groups.values()}.values())

    def without_loss(self, lost: np.ndarray, ranks: Sequence[int], like_others: bool = False) -> dict[str, np.ndarray]:
        """Return the terms of the replay if these ranks had not lost their seconds (ranks,).

        ``like_others``: they compute as the median of the others. What else they have lost, they lost while exchanging.
        """
        replay, compute = self.replay, self.replay.compute.copy()
        if like_others:
            compute = replay.as_others(compute, ranks)
        else:
            both = np.maximum(self.of_rank(replay.own + replay.exchange[:, None]), 1e-9)
            compute[:, ranks] *= np.clip(1 - lost / both, 0, 1)[ranks]
        left = lost - self.of_rank(replay.compute - compute)
        share = max(0.0, left[ranks].max()) / max(self.recorded.weights @ replay.exchange, 1e-9)
        return {"compute": compute, "exchange": np.maximum(replay.exchange * (1 - share), self.least_exchange())}

    def least_exchange(self) -> np.ndarray:
        """Return the seconds of exchanges of almost no bytes, (cells,): one a step, each like the fastest sync."""
        least: np.ndarray = np.minimum(self.replay.exchange, (self.recorded.sync or 0.0) * self.recorded.steps)
        return least


def findings(case: Case) -> list[Finding]:
    """Return what was found, worst first."""
    rules = (_slow_input, _too_often, _memory) if case.on_gpu else RULES
    found = [one for rule in rules for one in rule(case)]
    worth = [one for one in found if one.gain is None or one.gain >= WORTH]
    # What is at most so much counts less, as the geometric mean of nothing and that.
    return sorted(worth, key=lambda one: -((one.gain or 1.0) ** (0.5 if one.bound == "at most" else 1.0)))


def _slow_input(case: Case) -> Iterator[Finding]:
    """All ranks wait for input; or some of them do."""
    input, r, bound = case.replay.input, case.recorded, "at most" * case.on_gpu
    # A loader goes on while its rank waits for another one, so equally slow ones differ.
    slow = _outliers(case, input, times=2.0)
    if slow:
        evidence = f"{case.named(slow, 'waits')} {_compared(case, input, slow)} for the input of a step"
        cure = f"look at the disk, the network file system and the cores of {case.named(slow)}"
        gain = case.gain(input=case.replay.as_others(input, slow))
        yield Finding(f"input of {'one rank' if len(slow) == 1 else 'some ranks'}", evidence, cure, gain, bound)
    common = np.delete(input, slow, axis=1)
    if not np.median(r.weights @ common) > 0:
        return
    left = np.zeros_like(input)
    left[:, slow] = np.maximum(input[:, slow] - np.median(common, axis=1)[:, None], 0)
    workers = case.whole("data.workers", 1)
    # The loader is busy all the time, and a step takes as long as its share of a batch's preparation.
    fast = case.replay.with_changes(input=left) / case.replay.seconds
    needed = 2 * workers
    while needed < MOST_WORKERS and workers / needed > fast:
        needed *= 2
    read = [x for x in r.usage.get("read_mb", ()) if x is not None]
    speed = sum(read) / case.seconds if read else 0.0
    disk = f"; {speed:,.0f} MB/s came from disks" if speed >= 1 else ""
    pack = "pack the data once (hvd-train data pack)"
    seconds = float(np.median(r.weights @ common))
    evidence = f"ranks wait for input {case.share(seconds)} of the time, with data.workers: {workers}{disk}"
    cure = f"data.workers: {needed}, if cores are free for them; otherwise {pack}"
    cure = f"the data on a disk of this host, or {pack}; {cure}" if speed >= FROM_DISK else cure
    yield Finding("input", evidence, cure, case.gain(input=left), bound)


def _slow_rank(case: Case) -> Iterator[Finding]:
    """Some ranks compute longer than the others."""
    compute, r = case.replay.compute, case.recorded
    slow = _outliers(case, compute)
    if not slow:
        return
    evidence = f"{case.named(slow, 'computes')} {_compared(case, compute, slow)} a step"
    cure = "hvd-train doctor there: a slower core, GPU or host, which may be left out; or code that only they run"
    lost, changes = case.lost(), {"compute": case.replay.as_others(compute, slow)}
    fewest = min((len(r.cores[k]) for k in range(r.ranks) if k not in slow), default=0) if r.cores else 0
    if lost is not None and min(lost[slow]) >= LOST * case.seconds:
        evidence += f"; others had its core for {case.share(np.mean(lost[slow]))} of the time while it could have run"
        cure = f"end other programs on the cores of {case.named(slow)}, or bind each rank to cores of its own"
        changes = case.without_loss(lost, slow, like_others=True)
    elif fewest and max(len(r.cores[k]) for k in slow) < fewest:
        evidence += f"; on {amount(len(r.cores[slow[0]]), 'core')}, fewer than the others"
        cure = "give each rank as many cores"
    gain = case.gain(**changes)
    yield Finding("slow rank" if len(slow) == 1 else "slow ranks", evidence, cure, gain)


def _compared(case: Case, values: np.ndarray, slow: list[int]) -> str:
    """Return the words for the milliseconds of some ranks, and of the others."""
    each = case.per_step(values)
    return f"{np.mean(each[slow]):,.1f} ms (the others {np.median(np.delete(each, slow)):,.1f} ms)"


def _outliers(case: Case, values: np.ndarray, times: float = 1.0) -> list[int]:
    """Return the ranks that have so much more than the others that equal values would be worth it; [] if none.

    They are at most half of the ranks, for example all of a host, and have more than ``times`` as much as any other.
    """
    if not case.in_lockstep:
        return []
    weights, sums, own = case.recorded.weights, case.of_rank(values), case.replay.own
    order = np.argsort(-sums, kind="stable")
    for count in range(1, case.recorded.ranks // 2 + 1):
        slow, others = order[:count].tolist(), sums[order[count:]]
        if sums[slow].min() <= max(times * others.max(), 3 * others.max() - 2 * others.min()):
            continue
        like_others = case.replay.as_others(values, slow)
        saved = weights @ (own.max(axis=1) - (own - values + like_others).max(axis=1))
        # They are mostly slower, and not now and then as any rank may be.
        more = (weights @ (values - like_others))[slow]
        steady = np.all(sums[slow] - np.median(others) >= STEADY * more)
        if steady and saved / case.replay.seconds > 1 - 1 / WORTH:
            return sorted(slow)
    return []


def _cores(case: Case) -> Iterator[Finding]:
    """Ranks, or other programs, share cores; or cores are not used."""
    r, lost = case.recorded, case.lost()
    if not r.cores or not all(r.cores):
        return
    threads = case.environment.get("threads")
    if not (isinstance(threads, int) and threads > 0 and case.environment.get("device") == "cpu"):
        threads = 0  # not known, or not what computes
    crowded = None
    for host in dict.fromkeys(r.hosts):
        ranks = [k for k in range(r.ranks) if r.hosts[k] == host]
        cores = {core for k in ranks for core in r.cores[k]}
        if len(cores) < len(ranks):
            crowded = f"{len(ranks)} ranks share {amount(len(cores), 'core')} of {host}"
        elif threads and len(cores) >= 2 * threads * len(ranks):
            possible = len(cores) // len(ranks)
            compute = case.replay.compute.copy()
            compute[:, ranks] *= threads / possible
            evidence = f"{amount(len(ranks), 'rank')} with {amount(threads, 'thread')} on {len(cores)} cores of {host}"
            cure = f"threads: {possible}, or more ranks; 'hvd-train scale' measures both"
            yield Finding("unused cores", evidence, cure, case.gain(compute=compute), "at most")
            break
    if lost is None or np.median(lost) < LOST * case.seconds or _outliers(case, case.replay.compute):
        return
    evidence = crowded or "other programs use the cores of these ranks"
    evidence += f": a rank lost {case.share(np.median(lost))} of its time to others"
    cure = "a core for each rank: fewer ranks, or ask for more cores" if crowded else OWN_CORES
    yield Finding("shared cores", evidence, cure, case.gain(**case.without_loss(lost, range(r.ranks))))


def _exchange(case: Case) -> Iterator[Finding]:
    """Transfers that nothing hides."""
    r, exchange = case.recorded, case.replay.exchange
    if r.ranks == 1 or r.stages > 1:
        return
    least = case.least_exchange()
    taken = float(case.per_step(exchange))
    size = r.gradient_bytes
    of_size = f"{size / 1e6:,.1f} MB" if size and size >= 1e5 else f"{(size or 0) / 1e3:,.1f} kB"
    bytes_words = f" for {of_size} of gradients" if size else ""
    on_one_host = len(set(r.hosts)) <= 1
    where = "one host" if on_one_host else f"{len(set(r.hosts))} hosts"
    evidence = f"a step of {1000 * case.step:,.1f} ms waits {taken:,.1f} ms for transfers between ranks on {where}"
    compression = case.setting("exchange.compression", "none")
    if on_one_host:
        cure = "fewer ranks with more threads, or a larger batch_size"
    else:
        cure = "a faster network interface (hvd-train doctor names them); exchange.mode: outer"
        cure = f"exchange.compression: auto, which measures what pays; {cure}" if compression == "none" else cure
    if compression not in ("none", "auto"):
        cure = f"exchange.compression: auto, which measures whether {compression} or none is faster; {cure}"
    few = float(case.per_step(least))
    few_words = f"; {few:,.1f} ms of it would remain with the fewest bytes" if few >= 0.05 * taken else ""
    yield Finding("exchange", evidence + bytes_words + few_words, cure, case.gain(exchange=least), "at most")


def _short_steps(case: Case) -> Iterator[Finding]:
    """What does not depend on the size of a batch takes much of a step."""
    if case.step >= SHORT_STEP:
        return
    batch = case.config.get("batch_size")
    size = f" (batch_size: {batch})" if isinstance(batch, int) else ""
    replay = case.replay
    half = case.gain(exchange=replay.exchange / 2, rest=replay.rest / 2)
    fixed = float(case.per_step(replay.exchange) + case.per_step(replay.rest).max())
    evidence = f"a step takes {1000 * case.step:,.2f} ms{size}, {fixed:,.2f} ms of it for each batch, however small"
    cure = "a larger batch, with a learning rate to match; batch_size: auto tries sizes"
    yield Finding("small batches", evidence, cure, half, "at least")


def _rest(case: Case) -> Iterator[Finding]:
    """Hooks and the log."""
    seconds = case.of_rank(case.replay.rest)
    rank = int(seconds.argmax())
    hooks = case.setting("hooks", ())
    hooks = hooks if isinstance(hooks, list) else ()
    every = case.whole("log_every_n_steps", 50)
    who = "rank 0, which writes the log," if rank == 0 and case.recorded.ranks > 1 else case.named([rank])
    taken = case.per_step(case.replay.rest)[rank]
    evidence = f"{who} spends {taken:,.1f} ms a step in hooks and the log, with log_every_n_steps: {every}"
    cure = f"log_every_n_steps: {10 * every}; the run folder on a fast disk"
    cure = f"look at the hooks ({', '.join(map(str, hooks))}); {cure}" if hooks else cure
    yield Finding("hooks and log", evidence, cure, case.gain(rest=0.0))


def _uneven_work(case: Case) -> Iterator[Finding]:
    """Each step has another slowest rank."""
    if not case.in_lockstep or _outliers(case, case.replay.compute):
        return
    compute = case.replay.compute
    even = np.broadcast_to(compute.mean(axis=1, keepdims=True), compute.shape)
    slowest, mean = case.per_step(compute.max(axis=1)), case.per_step(compute.mean(axis=1))
    evidence = f"the slowest rank of a step, another one each time, computes {slowest:,.1f} ms, the mean {mean:,.1f} ms"
    cure = "samples of similar length in a batch (data.lengths), or equal work for each sample"
    lost = case.lost()
    if lost is not None and np.median(lost) >= LOST * case.seconds:
        cure = f"first cores of your own, since programs on shared cores delay one rank, then another; {cure}"
    yield Finding("uneven work", evidence, cure, case.gain(compute=even), "at most")


def _too_often(case: Case) -> Iterator[Finding]:
    """Checkpoints and evaluations."""
    by_steps = case.whole("checkpoint.every_n_steps", 0)
    saving = "checkpoint.every_n_steps" if by_steps else "checkpoint.every_n_epochs"
    for name, part, now, key, share, enough in (
        ("checkpoints", "save", by_steps or case.whole(saving, 1), saving, SAVE_FROM, SAVE_SHARE),
        ("evaluations", "evaluate", case.whole("check_val_every_n_epoch", 1), "check_val_every_n_epoch",
         EVALUATE_FROM, EVALUATE_SHARE),
    ):  # fmt: skip
        seconds = case.part(part)
        if seconds < share * case.seconds:
            continue
        others = case.seconds - seconds
        times = math.ceil(round(seconds * (1 - enough) / (enough * others), 3)) if others > 0 else 10
        times = min(times, 100)
        evidence = f"{name} take {case.share(seconds)} of the time, with {key}: {now}"
        slow = "; a faster disk" if part == "save" else "; or limit_val_batches"
        gain = case.without(seconds * (1 - 1 / times))
        # A checkpoint that is written in the background slows down the steps, too.
        bound = "at least" * (part == "save")
        yield Finding(name, evidence, f"{key}: {times * now}{slow}", gain, bound)


def _stages(case: Case) -> Iterator[Finding]:
    """Stages of a pipeline wait for one another: (p - 1) / (m + p - 1) of the time, with m micro-batches."""
    p, seconds = case.recorded.stages, case.part("bubble")
    if p == 1 or seconds <= 0:
        return
    m = case.whole("parallel.microbatches", p)
    fewer = (p - 1) / (2 * m + p - 1) / ((p - 1) / (m + p - 1))
    evidence = f"stages wait for one another {case.share(seconds)} of the time, with parallel.microbatches: {m}"
    cure = f"parallel.microbatches: {2 * m}"
    yield Finding("pipeline", evidence, cure, case.without(seconds * (1 - fewer)))


def _memory(case: Case) -> Iterator[Finding]:
    """Pages that are read from a disk again and again."""
    for rank, faults in enumerate(case.recorded.usage.get("faults", ())):
        if faults is not None and faults / case.seconds >= FAULTS:
            evidence = (
                f"{case.named([rank])} reads {faults / case.seconds:,.0f} pages a second from a disk, or from swap"
            )
            yield Finding("memory", evidence, "more memory a rank, fewer ranks a host, or smaller data", None)
            return


RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    _slow_input, _slow_rank, _cores, _exchange, _short_steps, _rest, _uneven_work, _too_often, _stages, _memory,
)  # fmt: skip
