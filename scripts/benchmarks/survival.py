"""The cost of protection against failures, and how soon failures are detected; 2 ranks.

saves      a checkpoint in the background every 20 steps of the wide MLP; blocks of 20 steps with and without
checks     heartbeats, stop requests, detection of slow ranks and comparison of weights every 100 steps: blocks of
           100 steps of SINGA's CNN with and without
detection  seconds from SIGKILL of rank 1, and from SIGSTOP beyond the limit (watchdog_s=2), to the line that names
           it, and to the end of the job
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles

import psutil
from compare import machine
from tables import markdown
from work import ROOT, settings

FRAMEWORKS, LAUNCHERS = ("pytorch", "tensorflow"), ("mpirun", "horovodrun")
PARTS = {"saves": ("mlp", 20), "checks": ("cnn", 100)}  # model, steps of a block
PAIRS, WARM = 15, 1
LIMIT, TIMES, SECONDS = 2.0, 3, 60.0


# ---- saves and checks: one training, in which they are switched on and off


class Enough(BaseException):
    """Ends the loop. It is no Exception, which would be reported as an error of the hook."""


def work(framework: str, part: str, pairs: int, file: Path) -> None:
    """Train as one rank, and on rank 0 write the seconds of each block."""
    from hvd_train.config import Config
    from hvd_train.core.control_sync import StopSource
    from hvd_train.core.hooks import Hook
    from hvd_train.core.loop import Trainer
    from hvd_train.jobs.connect import connect
    from hvd_train.jobs.job import opened_job
    from hvd_train.launch import peers
    from hvd_train.launch.environment import keep_memory
    from hvd_train.launch.signals import listen
    from hvd_train.run_folder.log import NullLog

    model, steps = PARTS[part]
    seconds: list[float] = []

    class Never:
        begin = staticmethod(lambda: None)
        due = staticmethod(lambda: False)

    class Blocks(Hook):
        """Times blocks, alternately with the feature off and on."""

        def on_start(self, trainer) -> None:
            self.k, self.began = 0, 0.0
            sync = trainer._sync
            self.on = sync.turns, trainer.config, trainer.stop_source, sync._sync_all
            unchecked = trainer.config.model_copy(update={"agreement_every_n_steps": 0})
            self.off = Never(), unchecked, StopSource(), lambda *_: None
            self.switch(trainer)

        def switch(self, trainer) -> None:
            if part == "checks":
                parts, sync = self.on if len(seconds) % 2 else self.off, trainer._sync
                sync.turns, trainer.config, trainer.stop_source, sync._sync_all = parts

        def on_step(self, trainer, info) -> None:
            self.k += 1
            if part == "saves" and len(seconds) % 2 and self.k == 1:
                trainer._saver.save({})
            if self.k < steps:
                return
            trainer.frontend.run_queued()
            now = time.perf_counter()
            seconds.append(now - self.began)
            self.k, self.began = 0, now
            self.switch(trainer)
            if len(seconds) == 2 * (pairs + WARM):
                raise Enough

    rule = {"every_n_epochs": 0, "save_last": part == "saves", "save_top_k": 0}
    config = Config.model_validate(settings(framework, model, {}) | {"run_dir": str(file.parent), "checkpoint": rule})
    with opened_job(config, False) as job:
        update, _ = connect(job, "none")
        listener = listen()
        listener.peer_slot = peers.watch(job.communicator, config.watchdog_s)
        parts_of_job = job.frontend, update, job.data.train, job.data.val, file.parent, NullLog()
        trainer = Trainer(config, *parts_of_job, hooks=[Blocks()], stop_source=listener)
        keep_memory()
        with suppress(Enough):
            trainer.fit()
        if job.communicator.rank == 0:
            file.write_text(json.dumps({"seconds": seconds[2 * WARM :], "longest": trainer._saver.writer.longest}))
        listener.ended = True


def switched(framework: str, part: str, pairs: int) -> dict:
    """Return medians over pairs of blocks; ``cost``: the time of the feature as a share of the steps."""
    from hvd_train.launch.start import command, environment

    runs = ROOT / "runs"  # on a disk; /tmp may be in memory
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as folder:
        file = Path(folder) / "seconds.json"
        program = [sys.executable, __file__, "--work", framework, part, str(pairs), str(file)]
        line = command(2, "mpirun", [], program=program)
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: {framework}, {part}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        times = json.loads(file.read_text())
    off, on = times["seconds"][::2], times["seconds"][1::2]
    costs = [b / a - 1 for a, b in zip(off, on, strict=True)]
    low, middle, high = quantiles(costs, n=4)
    steps = PARTS[part][1]
    row = {"framework": framework, "ms_per_step": 1000 * median(off) / steps, "with_it": 1000 * median(on) / steps}
    return row | {"cost": middle, "quartiles": [low, high], "longest_write": times["longest"]}


# ---- detection


def detected(framework: str, launcher: str, number: signal.Signals) -> tuple[float, float]:
    """Return the seconds until rank 1 is named, and until the job has ended."""
    with tempfile.TemporaryDirectory() as folder:
        line = [str(Path(sys.executable).parent / "hvd-train"), "fit", "-np", "2", "--launcher", launcher]
        line += ["-c", str(ROOT / "scripts" / "configs" / "tiny.yaml"), "--run-dir", f"{folder}/run"]
        for word in (f"framework={framework}", "max_epochs=100000", f"watchdog_s={LIMIT}", "log_every_n_steps=1"):
            line += ["--set", word]
        job = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert job.stderr is not None
        try:
            metrics, end = Path(folder) / "run" / "metrics.jsonl", time.monotonic() + SECONDS
            while not (metrics.exists() and metrics.stat().st_size > 20_000):
                time.sleep(0.01)
                if time.monotonic() > end or job.poll() is not None:
                    sys.exit(f"error: {framework} under {launcher} does not train")
            victim = rank_1(job.pid)
            began, named = time.monotonic(), 0.0
            victim.send_signal(number)
            for text in job.stderr:
                if not named and re.match(r"error.*rank 1", text):
                    named = time.monotonic() - began
            job.wait()
            return named, time.monotonic() - began
        finally:
            job.terminate()


def rank_1(pid: int) -> psutil.Process:
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            environment = process.environ()
            if (
                "1" in (environment.get("OMPI_COMM_WORLD_RANK"), environment.get("HOROVOD_RANK"))
                and "python" in process.name()
            ):
                return process
    sys.exit("error: there is no rank 1")


def detection(frameworks: Sequence[str], times: int) -> list[dict]:
    rows = []
    for framework in frameworks:
        for launcher in LAUNCHERS:
            row: dict = {"framework": framework, "launcher": launcher}
            for number in (signal.SIGKILL, signal.SIGSTOP):
                beyond = LIMIT if number == signal.SIGSTOP else 0.0
                seconds = [detected(framework, launcher, number) for _ in range(times)]
                row[number.name] = [median(t[k] - beyond for t in seconds) for k in (0, 1)]
            rows.append(row)
            print(row, flush=True)
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench survival", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[*PARTS, "detection"], help="none: all")
    parser.add_argument("--framework", choices=FRAMEWORKS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--times", type=int, default=TIMES, help="each rank is killed and stopped so often")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-survival.json")
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results: dict = {"machine": machine()}
    frameworks = [options.framework] if options.framework else FRAMEWORKS
    for part in options.parts:
        if part == "detection":
            results[part] = detection(frameworks, options.times)
            continue
        results[part] = []
        for framework in frameworks:
            results[part].append(switched(framework, part, options.pairs))
            print(part, results[part][-1], flush=True)
    print(f"\n{results['machine']}")
    for part, rows in list(results.items())[1:]:
        if part == "detection":
            names = ("SIGKILL", "SIGSTOP")
            cells = [[r["framework"], r["launcher"], *(f"{x:.2f}" for n in names for x in r[n])] for r in rows]
            header = ["", "launcher", "killed: named after s", "job over", "stopped: named s after limit", "job over"]
            print(f"\n{markdown(header, cells)}")
        else:
            cells = [
                [r["framework"], f"{r['ms_per_step']:.1f}", f"{r['with_it']:.1f}", f"{r['cost']:.1%}"]
                + [" to ".join(f"{x:.1%}" for x in r["quartiles"])]
                for r in rows
            ]
            print(f"\n{part}\n{markdown(['', 'ms a step without', 'with', 'cost', 'quartiles'], cells)}")
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
