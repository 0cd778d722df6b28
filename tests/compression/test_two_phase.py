"""Two phases: sums in rank order, nothing lost, the bytes that it promises, whatever the number of ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from hvd_train.compression import make
from hvd_train.compression.quantized import Int8
from hvd_train.compression.two_phase import TwoPhase
from hvd_train.protocol import Packing, TensorSpec
from hvd_train.update.error_meter import compression_error
from hvd_train.update.exchange import Exchange
from hvd_train.update.sharded import ShardedExchange
from tests.frontends.test_contract import OPS
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import Threads, run_ranks

NAMES = ("bf16", "int8", "int4")
BITS = {"bf16": 16, "int8": 8, "int4": 4}
# Bits of the largest rounding of an entry, of the largest of its block.
STEP = {"bf16": 2.0**-8, "int8": 1 / 254, "int4": 1 / 14}
PACKING = Packing(1 << 20, 1 << 20)


class Identity(TwoPhase):
    """Q leaves out nothing."""

    entries = 5

    def encode(self, blocks, ops):
        return (ops.reshape(blocks, (-1,)),), blocks

    def decode(self, encoded, shape, dtype, ops):
        return ops.reshape(encoded[0], shape)


def exchange_of(compressor, communicator, lengths, dtype="float64"):
    specs = [TensorSpec(f"t{i}", (n,), dtype) for i, n in enumerate(lengths)]
    return Exchange(specs, PACKING, compressor, communicator, NumpyOps(), small=0)


def drawn(rank, step, length, dtype="float64"):
    return np.random.default_rng([rank, step, length]).standard_t(3, length).astype(dtype)


def in_rank_order(size, step, length, dtype="float64"):
    return functools.reduce(np.add, [drawn(rank, step, length, dtype) for rank in range(size)])


LENGTHS = (1, 2, 3, 7, 64, 1001)  # fewer entries than ranks, uneven and even parts


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_without_rounding_it_is_a_sum_in_rank_order_bit_for_bit(size, length, dtype):
    def work(communicator):
        exchange = exchange_of(Identity(size, communicator.rank), communicator, [length], dtype)
        (result,), ((residual,),) = exchange.reduce(
            [drawn(communicator.rank, 0, length, dtype)], [tuple(x) for x in exchange.init_state()]
        )
        assert not residual.any()
        return result

    for result in run_ranks(size, work):
        assert result.dtype == dtype and (result == in_rank_order(size, 0, length, dtype)).all()


def test_sums_of_16_bits_have_32():
    """Each rank's number fits into 16 bits, and every partial sum of 16 bits would lose the small ones."""

    def work(communicator):
        exchange = exchange_of(Identity(4, communicator.rank), communicator, [8], "float16")
        gradient = np.full(8, [2048.0, 1, 1, -2048][communicator.rank], "float16")
        return exchange.reduce([gradient], [tuple(x) for x in exchange.init_state()])[0][0]

    for result in run_ranks(4, work):
        assert result.dtype == "float16" and (result == 2).all()


def trained(name, length, dtype, steps=30):
    """What is summed over these steps on each rank: gradients, decoded sums; its residual, and the last decoded sum."""

    def work(communicator):
        exchange = exchange_of(make(name, communicator.size, communicator.rank), communicator, [length], dtype)
        states, inputs, outputs = exchange.init_state(), np.zeros(length), np.zeros(length)
        for step in range(steps):
            gradient = drawn(communicator.rank, step, length, dtype)
            inputs += gradient
            (decoded,), states = exchange.reduce([gradient.copy()], states)
            outputs += decoded
        ((residual,),) = states
        assert residual.shape == (length,) and residual.dtype == dtype
        return inputs, outputs, residual, decoded

    return work


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-4), ("float16", 0.3)])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_decoded_and_the_residuals_are_the_gradients(name, size, length, dtype, tolerance):
    results = run_ranks(size, trained(name, length, dtype))
    inputs = sum(result[0] for result in results)
    residual = sum(result[2].astype("float64") for result in results)
    np.testing.assert_allclose(results[0][1] + residual, inputs, rtol=0, atol=tolerance * size)
    assert all((result[3] == results[0][3]).all() for result in results), "all ranks decode the same bits"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_residuals_stay_within_two_roundings(name, size):
    """Also those of the sums, which lie with their owners: nothing grows from step to step."""
    results = run_ranks(size, trained(name, 1001, "float64", 60))
    largest = max(np.abs(drawn(rank, step, 1001)).max() for rank in range(size) for step in range(60))
    assert max(np.abs(result[2]).max() for result in results) < 2 * STEP[name] * (size + 1) * largest


class Counting(Threads):
    """Counts the bytes that this rank sends to others. A part of an allgather goes to each of them."""

    def __init__(self, threads):
        self.__dict__.update(threads.__dict__)
        self.sent = {"alltoall": 0, "allgather": 0, "allreduce": 0}

    def alltoall_async(self, x, sizes, name):
        self.sent["alltoall"] += (sum(sizes) - sizes[self.rank]) * x.itemsize
        return super().alltoall_async(x, sizes, name)

    def allgather_async(self, x, name):
        self.sent["allgather"] += (self.size - 1) * x.nbytes
        return super().allgather_async(x, name)

    def allreduce_async(self, x, name, op="sum"):
        self.sent["allreduce"] += round(2 * (self.size - 1) / self.size * x.nbytes)
        return super().allreduce_async(x, name, op)


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_rank_do_not_grow_with_the_ranks(name, size):
    length = 100_000

    def work(communicator):
        counting = Counting(communicator)
        exchange = exchange_of(make(name, size, communicator.rank), counting, [length], "float32")
        exchange.reduce([drawn(communicator.rank, 0, length, "float32")], exchange.init_state())
        exact = dict(counting.sent)
        figures = compression_error(exchange, [drawn(0, 0, length, "float32")], exchange.init_state())
        return exact, figures[3] / figures[4]

    scales = {"bf16": 0, "int8": 2, "int4": size * -(-length // size // 256) + size}[name]
    promised = 2 * (size - 1) / size * (length * BITS[name] / 8 + 4 * scales)
    for sent, share in run_ranks(size, work):
        assert sent["allreduce"] == 0 and sent["alltoall"] == sent["allgather"]
        assert promised * 0.999 < sum(sent.values()) < promised * 1.01
        assert share == pytest.approx(sum(sent.values()) / (2 * (size - 1) / size * 4 * length)), "as the log says it"


class Converting:
    """Ranks that are threads hold arrays of NumPy; a framework's tensors become such and back."""

    def __init__(self, threads, ops):
        self.threads, self.ops, self.rank, self.size = threads, ops, threads.rank, threads.size

    def alltoall_async(self, x, sizes, name):
        return self.ops.from_numpy(self.threads.alltoall_async(self.ops.to_numpy(x), sizes, name))

    def allgather_async(self, x, name):
        return self.ops.from_numpy(self.threads.allgather_async(self.ops.to_numpy(x), name))

    def synchronize(self, handle):
        return handle


def decoded_by(framework, name, size, gradients, dtype="float32"):
    """What each rank decodes, and its residual; ``gradients(rank, step)`` gives those of some steps."""

    def work(communicator):
        ops = OPS[framework]()
        specs = [TensorSpec("t", gradients(0, 0).shape, dtype)]
        compressor = make(name, size, communicator.rank)
        exchange = Exchange(specs, PACKING, compressor, Converting(communicator, ops), ops, small=0)
        states, found = [tuple(map(ops.from_numpy, state)) for state in exchange.init_state()], []
        for step in range(3):
            (decoded,), states = exchange.reduce([ops.from_numpy(gradients(communicator.rank, step))], states)
            found.append((ops.to_numpy(decoded), ops.to_numpy(states[0][0])))
        return found

    return run_ranks(size, work)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("framework", OPS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_seen_on_all_ranks(name, framework, size, bad):
    """It would stay in a residual for ever, without a word."""

    def gradients(rank, step):
        x = drawn(rank, step, 1000, "float32")
        if rank == size - 1 and step == 2:
            x[[0, 777]] = bad
        return x

    for found in decoded_by(framework, name, size, gradients):
        assert np.isfinite(found[1][0]).all() and not np.isfinite(found[2][0][[0, 777]]).any()


def test_blocks_fill_a_part_but_for_a_few_zeros():
    for length in (*range(1, 200), 4096, 4104, 1 << 20, (1 << 20) + 1):
        for size in (1, 2, 3, 8, 64):
            for name in NAMES:
                compressor = make(name, size, 0)
                count, entries = compressor.blocks(length)
                assert entries % 2 == 0 and entries <= max(compressor.entries, 2)
                part = -(-length // size)
                assert part <= count * entries < part + 2 * count
                assert compressor.fills_parts(length) == (count * entries * size == length)


def test_a_small_block_beside_a_large_one_keeps_its_precision():
    x = np.concatenate([np.full(Int8.entries, 1e3), np.full(Int8.entries, 1e-3)])
    _, sent = Int8(1, 0).encode(x.reshape(2, -1), NumpyOps())
    np.testing.assert_allclose(sent.ravel(), x, rtol=1e-12)


@pytest.mark.parametrize("length", [96, 97, 1 << 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_that_is_divided_gets_its_part_after_the_first_phase(name, size, length):
    """Where parts are equal nothing is rounded twice and nothing gathered; else all is decoded and cut."""

    def work(communicator):
        counting = Counting(communicator)
        compressor = make(name, size, communicator.rank)
        exchange = ShardedExchange(exchange_of(compressor, counting, [length]))
        (part,), ((residual,),) = exchange.reduce([drawn(communicator.rank, 0, length)], exchange.init_state())
        whole = exchange.whole
        (decoded,), _ = whole.reduce([drawn(communicator.rank, 0, length)], exchange.init_state())
        return part, residual, decoded, compressor.fills_parts(length) and size > 1

    results = run_ranks(size, work)
    joined, residual = np.concatenate([result[0] for result in results]), sum(result[1] for result in results)
    np.testing.assert_allclose(joined + residual, in_rank_order(size, 0, length), rtol=0, atol=1e-12)
    assert (joined == results[0][2]).all() == (not results[0][3])
    assert results[0][3] == (size > 1 and length % (2 * size) == 0)
