"""The division of an optimizer over ranks: its cuts, and norms of tensors of which each rank has a part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.config import load_config
from hvd_train.frontends.host_memory import VARIABLE, HostMemory
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Packing, TensorSpec
from hvd_train.update.clip import Clip
from hvd_train.update.exchange import Exchange
from hvd_train.update.layerwise import lamb, lars, side_by_side, whole
from hvd_train.update.sharded import ShardedExchange, part_sizes, pieces
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import run_ranks

SHAPES = [(5, 3), (7,), (1, 1), (4, 2), (2,)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 9))
def test_parts_and_pieces_cover_each_entry_once(sizes, ranks):
    parts = part_sizes(sum(sizes), ranks)
    assert sum(parts) == sum(sizes) and max(parts) - min(parts) <= 1 and parts[0] == max(parts)
    counted, start = [np.zeros(size, int) for size in sizes], 0
    for part in parts:
        bounds = pieces(sizes, start, start + part)
        assert sum(last - first for first, last in bounds) == part
        for tensor, (first, last) in zip(counted, bounds, strict=True):
            tensor[first:last] += 1
        start += part
    assert all((tensor == 1).all() for tensor in counted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_layerwise_formulas_over_parts_give_what_they_give_over_whole_tensors(name, ranks):
    """Also where a rank has nothing of a tensor, or nothing at all."""
    options = load_config(None, [f"optim.name={name}", "optim.weight_decay=0.1", "optim.lr=0.3"]).optim
    ops, rng = NumpyOps(), np.random.default_rng(0)
    tensors = [[rng.standard_normal(shape) for _ in range(4)] for shape in SHAPES]

    def formula(w, g, m, v):
        slots = [m] if name == "lars" else [m, abs(v)]
        return (lars if name == "lars" else lamb)(w, g, slots, 3.0, 0.3, options, ops)

    expected = [side_by_side([formula(*one)], whole)[0] for one in tensors]
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    parts = part_sizes(sum(sizes), ranks)

    def work(communicator):
        start = sum(parts[: communicator.rank])
        bounds = pieces(sizes, start, start + parts[communicator.rank])

        def piece(x, first, last):
            return x.reshape(-1)[first:last].reshape((-1, 1) if x.ndim > 1 else (-1,))

        def total(squares):
            return list(communicator.allreduce_async(np.array(squares), "norms"))

        cut = [[piece(x, *edges) for x in one] for one, edges in zip(tensors, bounds, strict=True)]
        return side_by_side([formula(*one) for one in cut], total)

    of_ranks = run_ranks(ranks, work)
    for k, results in enumerate(expected):
        for i, result in enumerate(results):
            joined = np.concatenate([rank[k][i].reshape(-1) for rank in of_ranks]).reshape(result.shape)
            np.testing.assert_allclose(joined, result, rtol=1e-12)


@pytest.mark.parametrize(("ranks", "together"), [(4, 2), (6, 2), (6, 3), (3, 3)])
def test_hosts_send_each_other_what_their_ranks_have_in_common(monkeypatch, ranks, together):
    """Each rank receives its part of the clipped sum over all, and the weights of those that have its place."""
    monkeypatch.setenv(VARIABLE, str(together))
    specs = [TensorSpec(str(i), shape, "float64") for i, shape in enumerate([(50, 3), (70,), (1,), (40, 2), (2,)])]
    rng = np.random.default_rng(0)
    gradients = [[rng.standard_normal(spec.shape) for spec in specs] for _ in range(ranks)]

    def sharded(communicator, clip=None):
        packing = Packing(1 << 10, 1 << 9)
        return ShardedExchange(Exchange(specs, packing, Uncompressed(), communicator, NumpyOps(), clip))

    sent = []  # (entries to others, entries in all) of each transfer of rank 0

    def work(communicator):
        exchange = sharded(communicator, Clip(0.05))
        host = HostMemory.of(communicator, lambda memory, *where: np.frombuffer(memory, *where))
        exchange.share(host)
        alltoall = communicator.alltoall_async

        def counted(x, sizes, name):
            if communicator.rank == 0:
                sent.append((sum(sizes) - sizes[0], len(x)))
            return alltoall(x, sizes, name)

        communicator.alltoall_async = counted
        flats = exchange.to_buckets(gradients[communicator.rank])
        parts, _ = exchange.reduce(flats, exchange.init_state())
        came = [communicator.synchronize(exchange.gather(b, part)) for b, part in enumerate(parts)]
        host.barrier("end")
        return parts, came, [exchange.gathered(b) for b in range(len(flats))]

    of_ranks = run_ranks(ranks, work)
    flats = sharded(Serial()).to_buckets([sum(of_rank) for of_rank in zip(*gradients, strict=True)])
    norm = np.linalg.norm(np.concatenate(flats))
    for b, total in enumerate(x * 0.05 / (norm + 1e-6) for x in flats):
        np.testing.assert_allclose(np.concatenate([parts[b] for parts, *_ in of_ranks]), total, rtol=1e-12)
        for _, came, bounds in of_ranks:
            assert len(bounds[b]) == ranks // together
            expected = np.concatenate([total[first:last] for first, last in bounds[b]])
            np.testing.assert_allclose(came[b], expected, rtol=1e-12)
    entries = sum(map(len, flats))
    if ranks == together:
        assert all(out == 0 for out, _ in sent)
    else:
        hosts = ranks // together
        assert sum(out for out, _ in sent) <= 2 * (hosts - 1) * (entries / ranks + len(flats))
