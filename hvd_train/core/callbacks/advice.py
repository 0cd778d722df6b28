"""Advice on threads and ranks, given once, where the measured times say that fewer are likely to be faster."""

from __future__ import annotations

import os

from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.training import Training

# OneThreadAdvice: the fastest steps are so many times as fast as usual, and take less than so many seconds. Beside
# other work two threads of a small PyTorch model gave 494 samples/s, one thread 31 675.
TIMES_AS_FAST, SMALL_SECONDS = 3.0, 0.005
# FewerRanksAdvice: on 2 cores the exchange took 16 to 34 % of the time of an MLP with 24 million weights, whose one
# process is 1.7 times as fast; 4 to 5 % of that of ResNet-18 and 3 % of that of BERT. Ranks with models of a few MB
# wait for one another: the CNN's 16 % of the time, and one process has 0.95 of their speed.
EXCHANGE_SHARE, HEAVY_BYTES, BUSY = 0.1, 16 << 20, 1.25


class OneThreadAdvice(Hook):
    """Say once that one thread is likely faster: with other work on the cores, the ``threads`` of a rank wait for one
    another in each operation, and a small step is all waiting.

    To choose one thread here would change the order of sums, and with it the last bits of the results.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._advised = threads, False

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        if self._advised or not info.log_due or os.getloadavg()[0] <= (os.cpu_count() or 1):
            return
        usual, fast = trainer.speeds()
        if usual and fast > TIMES_AS_FAST * usual and info.batch.count / fast < SMALL_SECONDS:
            self._advised = True
            trainer.log.message(
                f"threads: auto took {self._threads}, and other work shares the cores: {usual:,.0f} samples/s, "
                f"{fast:,.0f} in the fastest steps; for so small a model --set threads=1 is likely faster"
            )


class FewerRanksAdvice(Hook):
    """Advise once to start fewer ranks with more threads, where all are on one host and much of the time is exchange.

    Each rank sends and updates all weights; the threads of one rank share that work. ``threads``: of each rank.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._decided = threads, False

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        share = trainer.exchange_share
        if self._decided or share is None or share < EXCHANGE_SHARE:
            return
        specs = trainer.frontend.specs()
        # Beside other work ranks lose their cores, and others wait for them: the share says nothing about the exchange.
        busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
        if busy or sum(spec.nbytes for spec in specs) < HEAVY_BYTES:
            return
        self._decided = True
        ranks = trainer.communicator.size
        fewer = max(n for n in range(1, ranks) if ranks % n == 0)
        # The same global batch on the same cores.
        threads, batch = self._threads * ranks // fewer, trainer.config.batch_size
        words = [f"-np {fewer}", f"--set threads={threads}"]
        words += [f"--set batch_size={batch * ranks // fewer}"] if batch else []
        who = f"1 rank with {threads} threads is" if fewer == 1 else f"{fewer} ranks with {threads} threads each are"
        millions = sum(spec.size for spec in specs) / 1e6
        trainer.log.message(
            f"note: {ranks} ranks spend {share:.0%} of the time in the exchange of {millions:,.1f} million weights; "
            f"{who} likely to be faster on this host ({' '.join(words)})"
        )
