"""Buckets: which tensors travel together."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from hvd_train.protocol import Packing, TensorSpec

# Entries. Tensors of fewer cost more time to compress than to send, and biases are worth their bytes.
SMALL = 4096
# The same in every framework, because what a compressor leaves out depends on its bucket.
COMPRESSED = Packing(4 << 20, 4 << 20)
# Of small tensors, where a compressor takes each of the others alone.
JOINED = Packing(bucket_bytes=1 << 20, alone_bytes=1 << 20)


def plan(
    specs: Sequence[TensorSpec],
    packing: Packing,
    small: int = 0,
    whole: Collection[int] = (),
    rules: Sequence[Hashable] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return buckets of indices into ``specs``, last layers first: backward finishes their gradients first.

    Every index stands in exactly one bucket; a bucket holds one dtype, lies on one device, and has tensors of one of
    ``rules``, which has an entry for each tensor, or none. Tensors of fewer than ``small`` entries and those of
    ``whole`` stand in other buckets. The plan depends on these alone, so it is the same on all ranks; the buckets of
    one rule do not depend on the tensors of others.
    """
    buckets: list[tuple[int, ...]] = []
    open_buckets: dict[tuple[str, bool, Hashable, int], list[int]] = {}
    for i in reversed(range(len(specs))):
        spec, little = specs[i], specs[i].size < small or i in whole
        limits = JOINED if little else packing
        # To join a large tensor would cost a copy each way, and save one message.
        if spec.nbytes >= limits.alone_bytes:
            buckets.append((i,))
            continue
        members = open_buckets.setdefault((spec.dtype, little, rules[i] if rules else None, spec.place), [])
        if members and sum(specs[j].nbytes for j in members) + spec.nbytes > limits.bucket_bytes:
            # The bucket is full, and this tensor begins the next one.
            buckets.append(tuple(members))
            members.clear()
        members.append(i)
    buckets.extend(tuple(members) for members in open_buckets.values() if members)
    return tuple(buckets)
