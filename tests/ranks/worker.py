"""One rank of a launched world: opens Horovod once and runs many cases, since a launch costs seconds.

``python -m tests.ranks.worker FRAMEWORK FOLDER``: reads FOLDER/cases.json ([{name, kind, config, ...}]), writes
FOLDER/NAME.RANK.json (or .npz for weights). Exit code 0 if every case ran.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np

from hvd_train.checkpoint.serialize import broadcast
from hvd_train.compression import make
from hvd_train.config import load_config
from hvd_train.core.evaluation import evaluate
from hvd_train.core.hooks import Hook
from hvd_train.core.reductions import differing, mean
from hvd_train.data.catalog import open_data
from hvd_train.errors import TrainError
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.frontends import horovod
from hvd_train.frontends.serial import Serial
from hvd_train.jobs import fit
from hvd_train.jobs.connect import connect
from hvd_train.jobs.job import build_job
from hvd_train.launch.environment import rank_settings, world
from hvd_train.protocol import Packing, Placement, TensorSpec
from hvd_train.session import Session
from hvd_train.update.exchange import Exchange
from hvd_train.update.state import join_shards, read, training_state
from tests.limits import SECONDS
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import run_ranks
from tests.seconds import counted


def job_of(case, module, communicator):
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in case["config"].items()])
    return build_job(config, Session(module, communicator), open_data(config.data, config.task))


class Apart(Hook):
    """A rank that found its steps slow takes them alone, the others as many in a call as they are told."""

    def on_start(self, trainer):
        trainer.frontend._one_by_one = trainer.communicator.rank == 0


def train(case, module, communicator, folder):
    """Trains as ``fit`` does; the final tree and the summary are the result."""
    job = job_of(case, module, communicator)
    hooks = [Apart()] if case.get("apart") else []
    summary = fit.train(job, case.get("resume"), case.get("allow", ()), hooks=hooks)
    metrics = Path(job.config.run_dir) / "metrics.jsonl"
    if communicator.rank == 0:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        summary["compression_error"] = [row for row in rows if row["event"] == "compression"]
        summary["noise_scale"] = [row for row in rows if row["event"] == "noise_scale"]
    residuals = [x for x in read(job.frontend.update.state(), Placement.PER_RANK).values() if x.ndim]
    summary["residual"] = float(sum(np.abs(array).sum() for array in residuals))
    tree = {key.replace("/", "|"): array for key, array in whole(job.frontend).items()}
    np.savez(folder / f"{case['name']}.{communicator.rank}.npz", **tree)
    return summary


def whole(frontend):
    """Weights, running statistics and slots, on all ranks."""
    tree, shards = {}, join_shards(frontend.update.state(), frontend.groups.world)
    for piece in broadcast(frontend.groups.world, shards):
        tree |= {key: x.copy() for key, x in piece.items()}
    return training_state(frontend, frontend.update) | tree


def connected(case, module, communicator):
    job = job_of(case, module, communicator)
    connect(job, "none")
    return job


def overflow(case, module, communicator, folder):
    """Gradients of one rank alone overflow: every rank leaves the step out, and takes the next."""
    job = connected(case, module, communicator)
    frontend = job.frontend
    before, found = whole(frontend), []
    (good,) = next(job.loader("train").epoch(0)).micro_batches
    bad = dataclasses.replace(good, inputs={name: x * np.float32(1e30) for name, x in good.inputs.items()})
    for batch in (bad if communicator.rank == communicator.size - 1 else good, good):
        frontend.train_step(frontend.to_device(batch), 1.0, 0, 0.1, 1.0)
        after = whole(frontend)
        found.append([frontend.finite(), all((before[k] == after[k]).all() for k in before)])
    return {"steps": found, "finite": all(np.isfinite(x).all() for x in after.values())}


def calls(case, module, communicator, folder):
    """A rank that found its steps slow takes them alone, the others take four in a call: they still meet."""
    job = connected(case, module, communicator)
    job.frontend._one_by_one = communicator.rank == 0
    for step in job.loader("train").epoch(0):
        (batch,) = step.micro_batches
        job.frontend.train_step(job.frontend.to_device(batch), 1.0, 0, 0.1, 1.0)
    return {key: float(np.abs(array).sum()) for key, array in whole(job.frontend).items()}


def adasum(case, module, communicator, folder):
    """Of two known vectors; and the error where it cannot be."""
    ops, x = module.cpu_ops(), np.array([[1.0, 2.0, 3.0], [-2.0, 0.5, 4.0]])[communicator.rank % 2]
    try:
        connect(job_of(case, module, communicator), "none")
    except TrainError as error:
        return {"text": str(error), "common": error.common}
    total = communicator.synchronize(communicator.allreduce_async(ops.from_numpy(x), "adasum", "adasum"))
    return {"found": ops.to_numpy(total).tolist()}


def verbs(case, module, communicator, folder):
    """The communicator's own verbs against NumPy."""
    ops, rank, size = module.cpu_ops(), communicator.rank, communicator.size
    x = np.arange(5, dtype=np.float64) * (rank + 1)
    out = {"rank": rank, "size": size}
    total = communicator.synchronize(communicator.allreduce_async(ops.from_numpy(x), "verbs.sum"))
    out["sum"] = ops.to_numpy(total).tolist()
    own = ops.from_numpy(np.full((rank + 1, 2), rank, np.float32))
    out["gather"] = ops.to_numpy(communicator.synchronize(communicator.allgather_async(own, "verbs.gather"))).tolist()
    out["broadcast"] = communicator.broadcast_bytes(b"from %d" % rank, root=size - 1).decode()
    large = np.arange(size, size + (9 << 20)).tobytes()  # 72 MB: several pieces
    out["large"] = communicator.broadcast_bytes(large if rank == 1 else b"", root=1) == large
    out["empty"] = communicator.broadcast_bytes(b"").decode()
    out["bytes"] = [part.decode() for part in communicator.allgather_bytes(b"x" * rank)]
    for piece in (horovod.PIECE_BYTES, 2 * size - 1):  # in one piece, and in several
        with patch.object(horovod, "PIECE_BYTES", piece):
            parts = [b"%d" % k * (5 * k) for k in range(size)]
            gathered = communicator.gather_bytes(parts[rank])
            scattered = communicator.scatter_bytes(parts if rank == 0 else [])
            nothing = communicator.gather_bytes(b""), communicator.scatter_bytes([b""] * size)
        out[f"gathered {piece > 100}"] = gathered == (parts if rank == 0 else []) and scattered == parts[rank]
        out[f"nothing {piece > 100}"] = nothing == ([b""] * size if rank == 0 else [], b"")
    kinds = (np.float16, np.float32, np.float64) if size > 1 else ()  # one rank differs from nobody
    out["mean"] = [own_mean(communicator, ops, kind) for kind in kinds]
    communicator.barrier()
    return out


def shards(case, module, communicator, folder):
    """``alltoall`` and ``reduce_scatter`` against NumPy, bit for bit; returns what was wrong."""
    ops, rank, size, wrong = module.cpu_ops(), communicator.rank, communicator.size, []
    run = lambda work: work  # noqa: E731
    if case["traced"]:
        import tensorflow as tf

        run = lambda work: tf.function(work, autograph=False).get_concrete_function()  # noqa: E731
    for kind, length in case["tensors"]:
        sizes = unequal(length, size)
        ends = np.cumsum(sizes)
        ranks = [np.random.default_rng([length, r]).random(length, np.float32).astype(kind) for r in range(size)]
        wanted = functools.reduce(np.add, [x[ends[rank] - sizes[rank] : ends[rank]] for x in ranks])
        sent = ops.from_numpy(ranks[rank])
        name = f"scatter.{kind}.{length}"
        scatter = run(lambda: communicator.synchronize(communicator.reduce_scatter_async(sent, sizes, name)))  # noqa: B023
        if not np.array_equal(ops.to_numpy(scatter()), wanted):
            wrong.append(name)
        every = [[sizes[(k + r) % size] for k in range(size)] for r in range(size)]  # of each rank, to each rank
        starts = [sum(row[:rank]) for row in every]
        parts = [x[s : s + row[rank]] for x, s, row in zip(ranks, starts, every, strict=True)]
        name = f"alltoall.{kind}.{length}"
        exchange = run(lambda: communicator.synchronize(communicator.alltoall_async(sent, every[rank], name)))  # noqa: B023
        if not np.array_equal(ops.to_numpy(exchange()), np.concatenate(parts)):
            wrong.append(name)
        if not np.array_equal(ops.to_numpy(sent), ranks[rank]):
            wrong.append(f"{name} changed its input")
    return {"wrong": wrong, "tensors": len(case["tensors"])}


def two_phase(case, module, communicator, folder):
    """Compressors of two phases over this link against ranks that are threads, bit for bit; returns what was wrong."""
    wrong, size, rank = [], communicator.size, communicator.rank
    for name, kind, length in itertools.product(("bf16", "int8", "int4"), ("float32", "float64"), (1, 1001, 4096)):
        expected = run_ranks(size, lambda c: exchanged(c, NumpyOps(), name, kind, length))[rank]  # noqa: B023
        found = exchanged(communicator, module.cpu_ops(), name, kind, length, case["traced"])
        # TensorFlow adds three terms and more of a graph in an order of its own, on the rank that adds them up for all.
        limit = (1e-5 if kind == "float32" else 1e-13) if case["traced"] and size > 2 else 0
        if not all(np.allclose(a, b, rtol=0, atol=limit) for a, b in zip(expected, found, strict=True)):
            wrong.append(f"{name} {kind} {length}")
    return {"wrong": wrong}


def exchanged(communicator, ops, name, kind, length, traced=False):
    """Gradients of some steps as they were decoded, and the last residual."""
    compressor = make(name, communicator.size, communicator.rank)
    specs = [TensorSpec(f"{name}.{kind}.{length}", (length,), kind)]
    exchange = Exchange(specs, Packing(1 << 20, 1 << 20), compressor, communicator, ops, small=0)
    states, out = [tuple(map(ops.from_numpy, state)) for state in exchange.init_state()], []
    reduce = exchange.reduce
    if traced:
        import tensorflow as tf

        reduce = tf.function(reduce, autograph=False)
    for step in range(3):
        gradient = np.random.default_rng([communicator.rank, step]).standard_t(3, length).astype(kind)
        (decoded,), states = reduce([ops.from_numpy(gradient)], states)
        out.append(ops.to_numpy(decoded))
    return [*out, ops.to_numpy(states[0][0])]


def unequal(length, size):
    """Parts in the ratio 0 : 1 : 2 : ..., the rest with the last; all of it where there is one rank."""
    shares = [length * k // max(sum(range(size)), 1) for k in range(size)]
    return [*shares[:-1], length - sum(shares[:-1])]


def own_mean(communicator, ops, kind):
    """[names that differ, whether equal entries kept their bits, the mean of the ranks' numbers]."""
    limits, equal = np.finfo(kind), np.random.default_rng(0).normal(size=999).astype(kind)
    equal[:3] = limits.min, limits.max, 0.1
    arrays = {"same": equal, "mixed": np.append(equal, kind(communicator.rank)), "whole": np.full(2, communicator.rank)}
    names = differing(arrays.items(), communicator)
    found = mean({name: arrays[name] for name in names}, communicator, ops)["mixed"]
    return names, found[:-1].tobytes() == equal.tobytes(), float(found[-1])


def disagree(case, module, communicator, folder):
    """What each rank is told when one of them differs, or fails."""
    config = dict(case["config"])
    if communicator.rank == communicator.size - 1:
        config |= case["differs"]
    try:
        job_of(case | {"config": config}, module, communicator)
    except TrainError as error:
        return {"type": type(error).__name__, "text": str(error), "common": error.common, "ranks": error.ranks}
    return {"type": None}


def evaluation(case, module, communicator, folder):
    job = connected(case, module, communicator)
    result, batches = evaluate(job.frontend, job.loader("train").evaluation()), [*job.loader("train").evaluation()]
    outputs = [job.frontend.predict(job.frontend.to_device(one))[: one.count].ravel() for one in batches if one.count]
    labels = [one.labels["label"][: one.count] for one in batches if one.count]
    return result | {"outputs": np.concatenate(outputs).tolist(), "labels": np.concatenate(labels).tolist()}


KINDS = {f.__name__: f for f in (train, overflow, calls, adasum, verbs, shards, two_phase, disagree, evaluation)}


def main() -> int:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    # A hang must end with the worker, whatever the launcher does, and say where it was.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    here = world()
    for name, value in rank_settings(here, framework, 1, verbose=False).items():
        os.environ.setdefault(name, value)
    module = FRAMEWORKS[framework].load(skip_unneeded=True)
    assert not {"sklearn", "matplotlib"} & set(sys.modules)
    module.configure(1)
    communicator = FRAMEWORKS[framework].make_communicator(here.size) if here.size > 1 else Serial()
    communicator.open()
    gc.freeze()  # Keras collects at every clear_session, a third of a second for what the imports left
    for case in json.loads((folder / "cases.json").read_text()):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        with counted(f"ranks {framework} {here.launcher}", case["name"]):
            result = KINDS[case["kind"]](case, module, communicator, folder)
        (folder / f"{case['name']}.{communicator.rank}.json").write_text(json.dumps(result))
    communicator.barrier()
    communicator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
