"""``python -m tests.engine.ranks FOLDER SIZE`` on each rank: collectives against NumPy; writes what was wrong."""

from __future__ import annotations

import faulthandler
import functools
import json
import sys
from pathlib import Path

import numpy as np

from hvd_train.engine import transfers
from hvd_train.engine.library import chosen
from hvd_train.engine.transfers import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    AVERAGE,
    BROADCAST,
    MAX,
    MIN,
    PRODUCT,
    REDUCESCATTER,
    SUM,
    TYPES,
    Block,
    ProcessSet,
    TransferError,
    block,
)
from tests.limits import SECONDS

REDUCED = {SUM: np.add, MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}


def of_rank(rank, kind, shape=(5, 7), seed=0):
    numbers = np.random.default_rng([seed, rank]).integers(0, 4, shape)  # sums and products are exact in every type
    return numbers.astype(kind)


def check(engine, wrong):
    rank, size = engine.rank(), engine.size()

    def run(collective, x, name, into=None, **keys):
        outputs = None if into is None else [block(into)]
        transfer = engine.start(collective, [name], [block(x)], outputs, kept=(x, into), **keys)
        transfer.wait()
        return transfer

    def compare(name, found, wanted):
        if found.dtype != wanted.dtype or not np.array_equal(found, wanted):
            wrong.append(name)

    for kind in TYPES:
        every = [of_rank(r, kind) for r in range(size)]
        for op, function in REDUCED.items() if kind != "bool" else ():
            into = np.empty_like(every[rank])
            run(ALLREDUCE, every[rank].copy(), f"allreduce.{kind}.{op}", into, reduce_op=op)
            compare(f"allreduce {kind} {op}", into, functools.reduce(function, every))
        x = every[rank].copy()
        run(BROADCAST, x, f"broadcast.{kind}", x, root=size - 1)
        compare(f"broadcast {kind}", x, every[-1])
        rows = [of_rank(r, kind, (r + 1, 3)) for r in range(size)]
        compare(f"allgather {kind}", run(ALLGATHER, rows[rank], f"allgather.{kind}").output(), np.concatenate(rows))
        rows = [of_rank(r, kind, (sum(range(size)), 2)) for r in range(size)]
        sizes = [[(k + r) % size for k in range(size)] for r in range(size)]  # of rank r, to rank k
        transfer = run(ALLTOALL, rows[rank], f"alltoall.{kind}", splits=sizes[rank])
        parts = [x[sum(row[:rank]) :][: row[rank]] for x, row in zip(rows, sizes, strict=True)]
        compare(f"alltoall {kind}", transfer.output(), np.concatenate(parts))
        compare(f"received {kind}", transfer.output(1), np.array([row[rank] for row in sizes], np.int32))
    for kind in ("float32", "float64"):
        every = [of_rank(r, kind) for r in range(size)]
        into = np.empty_like(every[rank])
        run(ALLREDUCE, every[rank], f"average.{kind}", into, reduce_op=AVERAGE)
        if not np.allclose(into, sum(every) / size, rtol=1e-6 if kind == "float32" else 1e-15, atol=0):
            wrong.append(f"average {kind}")
        run(ALLREDUCE, every[rank], f"scaled.{kind}", into, prescale=0.5, postscale=4.0)
        compare(f"scaled {kind}", into, sum(every) * 2)
        rows = [of_rank(r, kind, (2 * size + 1, 3)) for r in range(size)]  # the first ranks get a row more
        into = np.empty((2 + (rank == 0), 3), kind)
        run(REDUCESCATTER, rows[rank], f"reducescatter.{kind}", into)
        start = 2 * rank + min(rank, 1)
        compare(f"reducescatter {kind}", into, sum(rows)[start : start + len(into)])
    empty = np.empty((0, 3))
    compare("empty allgather", run(ALLGATHER, empty, "empty").output(), empty)
    group = [of_rank(rank, "float32", (10 + k,), k) for k in range(50)]
    names = [f"group.{k}" for k in range(50)]
    blocks = [block(x) for x in group]
    engine.start(ALLREDUCE, names, blocks, blocks, kept=group).wait()
    for k, x in enumerate(group):
        compare(f"group {k}", x, sum(of_rank(r, "float32", (10 + k,), k) for r in range(size)))
    many = [of_rank(rank, "float64", (100,), k) for k in range(100)]
    started = [engine.start(ALLREDUCE, [f"many.{k}"], [block(x)], [block(x)], kept=x) for k, x in enumerate(many)]
    for k in range(100) if rank % 2 else reversed(range(100)):  # each rank waits in an order of its own
        started[k].wait()
        compare(f"many {k}", many[k], sum(of_rank(r, "float64", (100,), k) for r in range(size)))
    del started


def check_sets(engine, sets, wrong):
    """Each half adds for itself."""
    rank = engine.rank()
    own = next(one for one in sets if rank in one.ranks)
    x = np.full(3, rank + 1.0)
    engine.start(ALLREDUCE, ["half"], [block(x)], [block(x)], process_set=own.number, kept=x).wait()
    if x.tolist() != [sum(r + 1.0 for r in own.ranks)] * 3:
        wrong.append(f"process set: {x}")
    other = next(one for one in sets if rank not in one.ranks)
    try:
        engine.start(ALLREDUCE, ["other"], [block(x)], [block(x)], process_set=other.number, kept=x)
        wrong.append("a rank that is not in the set takes part")
    except TransferError as error:
        if "not a member" not in str(error):
            wrong.append(str(error))


def check_errors(engine, wrong):
    """The last case: Horovod gives up the tensor, not the world."""
    x = np.ones(2 + engine.rank())
    try:
        engine.start(ALLREDUCE, ["differs"], [block(x)], [block(x)], kept=x).wait()
        wrong.append("shapes that differ are added")
    except TransferError as error:
        if "Mismatched ALLREDUCE tensor shapes" not in str(error):
            wrong.append(str(error))
    try:
        block(np.ones((4, 4)).T)
        wrong.append("an array with gaps is sent")
    except ValueError:
        pass
    large = np.ones(1 << 20)
    del_me = engine.start(ALLREDUCE, ["dropped"], [block(large)], [block(large)], kept=large)
    del del_me, large  # its memory must stay until Horovod has written
    last = np.ones(1)
    engine.start(ALLREDUCE, ["last"], [block(last)], [block(last)], kept=last).wait()
    assert isinstance(block(last), Block)


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    name, wrong = chosen(), []
    engine = transfers.Engine(name)
    size = int(sys.argv[2])
    sets = [ProcessSet(range(0, size, 2)), ProcessSet(range(1, size, 2))]
    engine.init(process_sets=sets)
    check(engine, wrong)
    check_sets(engine, sets, wrong)
    check_errors(engine, wrong)
    text = {"wrong": wrong, "size": engine.size(), "library": name, "mpi": engine.mpi_enabled()}
    (folder / f"{engine.rank()}.json").write_text(json.dumps(text))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
