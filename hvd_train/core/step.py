"""One optimizer step: loss scale, seeds, gradients of the micro-batches, update."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from hvd_train.core.callbacks.compression_error import CompressionErrorLog
from hvd_train.core.callbacks.noise_log import NoiseLog
from hvd_train.core.gradient_scale import gradient_scale
from hvd_train.core.nonfinite import Skips, rescale
from hvd_train.core.training import Training
from hvd_train.data.loader import Step


def forward_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """Return a 63-bit seed for one forward pass: equal after a resume, different on every rank."""
    # A hash, not a sum, so that seeds of adjacent steps and ranks are unrelated.
    digest = hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StepRunner:
    """Runs the steps of a training and counts them in its progress."""

    def __init__(self, training: Training, noise: NoiseLog | None = None) -> None:
        self.training, self._noise = training, noise
        config = training.config
        self._error_log = CompressionErrorLog(config.exchange.compression_error_every_n_steps)
        skips = config.on_nonfinite == "skip"
        self._skips = Skips(training.frontend, training.log, training.scaled) if skips else None

    def run(self, step: Step) -> tuple[float, list[Any], np.ndarray | None]:
        """Run a step. Returns (learning rate, this rank's sums of each micro-batch, its counts (losses,) or None).

        Sums are empty if the step was skipped.
        """
        training = self.training
        p, config, frontend, update = training.progress, training.config, training.frontend, training.update
        update.before_step(p.step + 1, step.count)
        scale, counts = gradient_scale(training, step)
        rate = training.learning_rate(training.train_loader.place(p.epoch, p.consumed), p.step)
        # All micro-batches accumulate gradients; the last one also exchanges them and updates the weights.
        *earlier, last = step.micro_batches
        seeds = [forward_seed(config.seed, p.step, micro, step.rank) for micro in range(len(step.micro_batches))]
        placed = frontend.to_device(last)
        if self._skips:
            self._skips.begin()
        if self._error_log.due(p.step):
            unscaled = np.divide(scale, p.loss_scale).tolist()  # clipping thresholds are for unscaled gradients
            self._error_log.measure(training, placed, unscaled, seeds[-1])
        noise, sums = self._noise, []
        measured = noise.begin(training, step, scale, counts) if noise else None
        for batch, seed in zip(earlier, seeds, strict=False):
            sums.append(frontend.add_gradients(frontend.to_device(batch), scale, seed))
            if noise and measured and len(sums) == 1:
                noise.first(training, measured)
        sums.append(frontend.train_step(placed, scale, seeds[-1], rate, 1 / p.loss_scale))
        p.step, p.consumed, p.seen = p.step + 1, step.consumed, p.seen + step.count
        finite = not config.checks_gradients or frontend.finite()
        if noise and measured and finite:
            noise.add(measured)
        if training.scaled:
            rescale(p, finite, training.log)
        if self._skips and self._skips.left_out(p, finite, sums):
            sums, counts = [], None
        update.after_step(p.step, step.local_count)
        return rate, sums, counts
