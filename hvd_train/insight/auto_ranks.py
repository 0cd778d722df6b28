"""``fit -np auto``: measure the configuration on this host, and choose ranks and threads."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from hvd_train.checkpoint import store
from hvd_train.config import Config
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.insight import calibration
from hvd_train.insight.calibration import Placement, described
from hvd_train.insight.plan import batch_of_rank
from hvd_train.insight.prediction import Model
from hvd_train.run_folder import layout, safe_reading
from hvd_train.run_folder.terminal import on_terminal, say

SECONDS = 30.0
NEAR = 0.97  # of the most samples/s: fewer ranks are taken, which keep the global batch small


def choose(config: Config, resume: str | None, launcher: str) -> tuple[Placement, str]:
    """Return (ranks, threads) and why. A run that goes on keeps those that it had. Raises ConfigError."""
    if earlier := _earlier(config, resume):
        return earlier, f"{described(earlier)}, as the run began"
    try:
        calibration.check(config)
    except ConfigError as error:
        what = "auto measures synchronous training, in which all ranks exchange gradients in each step"
        raise ConfigError(what, where=error.where, fix="give the number of ranks: -np 2") from error
    cores = calibration.host_cores()
    wanted, start = calibration.placements(cores, config.threads), calibration.on_ranks(launcher)
    if cores == 1:
        return wanted[0], f"{described(wanted[0])}: this host has one core"
    if on_terminal():
        say(f"-np auto: measuring for up to {SECONDS:.0f} s", err=True)
    with calibration.folder_of(config, shared=False) as folder:
        measured = calibration.measure(config, wanted, SECONDS, start, folder, lambda line: None)
    if measured.stopped:
        sys.exit(measured.stopped)
    model = measured.model()
    chosen = fastest(model)
    listed = [f"{described(key)} {model.predict(1, *key).rate:,.0f}" for key in model.placements if key != chosen]
    rate = model.predict(1, *chosen).rate
    others = f" ({', '.join(listed)})" if listed else ", the only one that could be measured"
    batch = chosen[0] * batch_of_rank(config, chosen[0])
    return chosen, f"{described(chosen)}: {rate:,.0f} samples/s{others}; global batch {batch:,.0f}"


def fastest(model: Model) -> Placement:
    """Return the measured placement with most samples/s, or one of fewer ranks that is nearly as fast."""
    rates = {key: model.predict(1, *key).rate for key in model.placements}
    near = [key for key, rate in rates.items() if rate >= NEAR * max(rates.values())]
    return min(near, key=lambda key: (key[0], -rates[key]))


def _earlier(config: Config, resume: str | None) -> Placement | None:
    """Return the ranks and threads of the run that ``resume`` continues; None: a new run."""
    run_dir = Path(config.run_dir)
    if not layout.goes_on(run_dir, resume) or not store.find(run_dir / "checkpoints"):
        return None
    with suppress(OSError, CheckpointError, ValueError, KeyError, TypeError):
        settings = safe_reading.json_object(run_dir / "environment.json")
        ranks, here = int(settings["ranks"]), int(settings["ranks_on_this_host"])
        return (ranks, int(settings["threads"])) if ranks == here else None
    return None
