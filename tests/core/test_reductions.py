"""What ranks hold in common stays bit for bit, whatever their number; what differs becomes the mean, on all of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvd_train.core.reductions import differing, mean, sums
from hvd_train.errors import CommunicationError, ConfigError
from tests.numpy_frontend import NumpyFrontEnd, NumpyOps
from tests.rank_threads import run_ranks

DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
SIZES = [1, 2, 3, 4, 6]


def awkward(dtype):
    """Numbers that a sum of three, divided by three, or a third, added three times, does not give back."""
    limits = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(0)
    ends = [limits.min, limits.max, limits.tiny, -limits.tiny, limits.smallest_subnormal, 0.0, -0.0, np.inf, -np.inf]
    return np.concatenate(
        [np.array(ends, dtype), rng.normal(size=500).astype(dtype), (0.1 * np.arange(99)).astype(dtype)]
    )


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8).tobytes()


def joined(size, make):
    """(names that differ, their mean) of every rank; ``make(rank)`` gives its arrays."""

    def work(communicator):
        arrays = make(communicator.rank)
        names = differing(arrays.items(), communicator)
        return names, mean({name: arrays[name] for name in names}, communicator, NumpyOps())

    return run_ranks(size, work)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_equal_does_not_travel(size, dtype):
    own = {"a": awkward(dtype), "nan": np.array([np.nan], dtype), "empty": np.zeros((0, 3), dtype), "none": np.array(1)}
    assert joined(size, lambda rank: own) == [([], {})] * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES[1:])
def test_equal_entries_of_an_array_that_differs_keep_their_bits(size, dtype):
    equal = awkward(dtype)
    if dtype in ((np.float32, np.float64) if not size & (size - 1) else (np.float64,)):
        equal = np.delete(equal, 4)  # the smallest number has no half

    def make(rank):
        return {"same": equal, "mixed": np.concatenate([np.array([rank], dtype), equal])}

    for names, found in joined(size, make):
        assert names == ["mixed"] and found["mixed"].dtype == dtype
        assert float(found["mixed"][0]) == pytest.approx((size - 1) / 2, rel=1e-15)
        assert bits(found["mixed"][1:]) == bits(equal)


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_mean_of_finite_numbers_is_finite(size):
    """The sum of two largest numbers is infinite."""
    for dtype in DTYPES:
        limits = ml_dtypes.finfo(dtype)
        own = np.full(4, limits.min, dtype)
        for _, found in joined(size, lambda rank: {"x": np.append(own, np.array([rank], dtype))}):  # noqa: B023
            assert np.isfinite(found["x"].astype(np.float64)).all()


def test_all_ranks_get_the_same_bits_in_any_number_of_pieces(monkeypatch):
    monkeypatch.setattr("hvd_train.core.reductions.PIECE_BYTES", 100)

    def make(rank):
        rng = np.random.default_rng(rank)
        kinds = [np.float32, np.float64, np.int64]
        return {f"{k}": rng.normal(size=(3, 1 + k)).astype(kinds[k % 3]) for k in range(9)}

    first, *others = joined(3, make)
    assert first[0] == ["0", "1", "3", "4", "6", "7"] and list(first[1]) == sorted(first[1], key=lambda k: int(k) % 3)
    for name, x in first[1].items():
        whole = np.mean([make(rank)[name].astype(np.float64) for rank in range(3)], axis=0)
        np.testing.assert_allclose(x, whole, rtol=1e-6 if x.dtype == np.float32 else 1e-14, atol=1e-9)
    for other in others:
        assert {k: bits(x) for k, x in other[1].items()} == {k: bits(x) for k, x in first[1].items()}


def test_entries_that_changed_places_differ():
    (names, _), _ = joined(2, lambda rank: {"queue": np.roll([1.0, 0.0, 0.0], rank)})
    assert names == ["queue"]


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_front_end_leaves_alone_what_is_equal(size):
    """A mask's lowest number stays finite, frozen weights their bits; what a rank gathered for itself is averaged."""
    weights = {"w": np.full((2, 3), 0.1), "b": np.array([0.1, 0.7, np.finfo(np.float64).min])}

    def work(communicator):
        frontend = NumpyFrontEnd.of(communicator, 2, 3)
        frontend.w = {name: x.copy() for name, x in weights.items()}
        frontend.statistic = np.array([np.finfo(np.float64).min])
        frontend.average(weights)
        frontend.average_statistics()
        lowest = frontend.statistic
        frontend.statistic = np.array([float(communicator.rank)])
        frontend.average_statistics()
        return frontend.w, lowest, frontend.statistic

    for found, lowest, statistic in run_ranks(size, work):
        assert all(bits(found[name]) == bits(x) for name, x in weights.items())
        assert lowest == np.finfo(np.float64).min and statistic == pytest.approx((size - 1) / 2, rel=1e-15)


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_arrays_are_exact(size):
    """Whole numbers of more than 53 bits, truth values, and floats in rank order; shapes stay."""
    rng = np.random.default_rng(1)
    counts = rng.integers(-(2**60), 2**60, (size, 3, 2))
    floats = rng.normal(size=(size, 5)).astype(np.float32)

    def work(communicator):
        k = communicator.rank
        own = [
            counts[k],
            np.array(7.0),
            floats[k],
            np.full(4, 255, np.uint8),
            np.array([True, False]),
            np.zeros((0, 2)),
            np.array([2**63 // 8], np.uint64),
        ]
        return sums(own, communicator, "sums")

    for found in run_ranks(size, work):
        assert (found[0] == counts.sum(0)).all() and found[0].dtype == np.int64 and found[0].shape == (3, 2)
        assert found[1] == 7.0 * size and found[1].shape == ()
        expected = floats[0].astype(np.float64)
        for part in floats[1:]:
            expected = expected + part
        assert bits(found[2]) == bits(expected)
        assert (found[3] == 255 * size).all() and (found[4] == [size, 0]).all() and found[5].shape == (0, 2)
        assert found[6].dtype == np.uint64 and found[3].dtype == found[4].dtype == np.int64


def test_sums_of_other_shapes_are_told_on_all_ranks():
    def work(communicator):
        with pytest.raises(CommunicationError) as caught:
            sums([np.zeros((2, 3) if communicator.rank else (3, 2), np.int32)], communicator, "ht.sum")
        return str(caught.value)

    told = "the ranks diverged: ht.sum got int64 (3, 2) on rank 0, int64 (2, 3) on rank 1; call the same on all ranks"
    assert run_ranks(2, work) == [told] * 2


@pytest.mark.parametrize("kind, most", [(np.int64, 2**63 - 1), (np.uint64, 2**64 - 1)])
def test_a_sum_of_integers_is_exact_or_told_on_all_ranks(kind, most):
    """It would wrap around from one more than the largest integer on."""

    def work(communicator):
        half = most // 2 + communicator.rank
        (total,) = sums([np.array([1, half], kind)], communicator, "ht.sum")
        with pytest.raises(ConfigError) as caught:
            sums([np.array([1, half + 1 - communicator.rank], kind)], communicator, "ht.sum")
        return total.tolist(), str(caught.value)

    told = f"a sum of integers over the ranks does not fit into 64 bits: {most + 1:.4g}; ht.sum; "
    assert run_ranks(2, work) == [([2, most], told + "give floats, which are rounded")] * 2
    if kind == np.int64:
        lowest = run_ranks(2, lambda world: sums([np.array([-(2**62)])], world, "ht.sum")[0].tolist())
        assert lowest == [[-(2**63)]] * 2
