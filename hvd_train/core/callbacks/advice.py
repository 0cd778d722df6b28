"""One-time advice to use fewer threads or ranks, if measured times suggest that this is faster."""

from __future__ import annotations

import os

from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.training import Training

# OneThreadAdvice: minimum ratio of usual to fastest step time, and maximum seconds of a fast step. Beside other work a
# small PyTorch model ran at 494 samples/s with two threads, and 31 675 with one.
TIMES_AS_FAST, SMALL_SECONDS = 3.0, 0.005
# FewerRanksAdvice: on 2 cores the exchange took 16 to 34 % of the time for an MLP with 24 million weights, where one
# process is 1.7 times as fast; 4 to 5 % for ResNet-18, and 3 % for BERT. With models of a few MB, waiting dominates: 16
# % of the time for the CNN, where one process has 0.95 of the speed.
EXCHANGE_SHARE, HEAVY_BYTES, BUSY = 0.1, 16 << 20, 1.25


class OneThreadAdvice(Hook):
    """Advises once to use one thread. If other programs use the cores, a rank's ``threads`` wait for one another in
    each operation, and a small step is mostly waiting.

    Only advice, because fewer threads change the order of sums, and so the last bits of results.
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
    """Advises once to start fewer ranks with more threads, if all are on one host and the exchange takes much time.

    Each rank sends and updates all weights, while the threads of a rank share that work. ``threads``: per rank.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._decided = threads, False

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        share = trainer.exchange_share
        if self._decided or share is None or share < EXCHANGE_SHARE:
            return
        specs = trainer.frontend.specs()
        # Beside other programs, ranks lose their cores and others wait for them, so the share is not the exchange's.
        busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
        if busy or sum(spec.nbytes for spec in specs) < HEAVY_BYTES:
            return
        self._decided = True
        ranks = trainer.communicator.size
        fewer = max(n for n in range(1, ranks) if ranks % n == 0)
        # The same global batch on the same cores.
        threads, batch = self._threads * ranks // fewer, trainer.config.batch_size
        words = [f"-np {fewer}", f"--set threads={threads}"]
        words += [f"--set batch_size={batch * ranks // fewer}"] if isinstance(batch, int) else []
        who = f"1 rank with {threads} threads is" if fewer == 1 else f"{fewer} ranks with {threads} threads each are"
        millions = sum(spec.size for spec in specs) / 1e6
        trainer.log.message(
            f"note: {ranks} ranks spend {share:.0%} of the time in the exchange of {millions:,.1f} million weights; "
            f"{who} likely to be faster on this host ({' '.join(words)})"
        )
