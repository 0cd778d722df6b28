"""Trainings whose weights are the same on any number of ranks, up to rounding."""

from __future__ import annotations

import torch

from tests.torch.cases.batches import (
    Lengths,
    batched,
    in_parts,
    sampled_by,
    streamed,
    tokens,
    two_loaders,
    uneven,
    weighted,
)
from tests.torch.cases.gradients import by_hand, by_hand_summed, caught, checkpointed, kept, other_data, summed
from tests.torch.cases.models import cnn, mlp
from tests.torch.cases.trainings import (
    channels_last,
    compiled,
    gan,
    lbfgs,
    norm_kept,
    norm_synchronized,
    one_optimizer,
    overlapping,
    scheduled,
    several_models,
    simple,
    tied_and_frozen,
    two_models,
    two_optimizers,
)
from tests.torch.cases.unfreezing import unfrozen, unfrozen_late

# Weights after 20 steps are those of one rank with the same global batch.
SAME = {
    "sgd": simple(mlp),
    "adam": simple(mlp, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)),
    "clip": simple(cnn, clip=0.5),
    "zeros": simple(mlp, to_none=False, clip=0.5),
    "accumulate": simple(mlp, accumulate=2),
    "passes": simple(mlp, accumulate=2, no_sync=False),
    "zeros passes": simple(mlp, accumulate=2, no_sync=False, to_none=False),
    "two optimizers": two_optimizers,
    "two models": two_models,
    "scheduler": scheduled,
    "compile before": compiled(before=True, backend="inductor"),
    "compile after": compiled(before=False, backend="aot_eager"),
    "channels last": channels_last,
    "tied and frozen": tied_and_frozen,
    "norm synchronized": norm_synchronized(),
    "norm synchronized uneven": norm_synchronized(235),
    "overlap": overlapping,
    "uneven": uneven,
    "one optimizer": one_optimizer,
    "several models": several_models,
    "unfrozen": unfrozen(),
    "unfrozen overlap": unfrozen(overlap=True),
    "unfrozen late": unfrozen_late,
    "weighted sampler": sampled_by(weighted),
    "batch sampler": sampled_by(batched),
    "stream": sampled_by(streamed(0)),
    "stream of workers": sampled_by(streamed(2)),
    "gan": gan,
    "norm fixed": norm_kept(False),
    "lbfgs": lbfgs,
    "by hand": by_hand,
    "by hand summed": by_hand_summed,
    "data": other_data,
    "summed": summed(),
    "summed passes": summed(2),
    "tokens": tokens(),
    "tokens of a batch sampler": tokens(Lengths),
    "two loaders": two_loaders,
    "kept": kept(view=False),
    "kept views": kept(view=True),
    "checkpointed": checkpointed,
    "caught": caught(overlap=False),
    "caught overlap": caught(overlap=True),
    "parts": in_parts(),
    "parts overlap": in_parts(overlap=True),
    "parts at once": in_parts(once=True, clip=0.2),
    "parts of two models": in_parts(models=2),
    "parts of a stream": in_parts(streamed(0)),
    "parts of a batch sampler": in_parts(batched),
}
