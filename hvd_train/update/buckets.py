"""Buckets: which tensors are exchanged together."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from hvd_train.protocol import Packing, TensorSpec

# The same in every framework, because a compressor's error depends on the bucket.
COMPRESSED = Packing(4 << 20, 4 << 20)
# For small tensors, if a compressor takes each of the others alone.
JOINED = Packing(bucket_bytes=1 << 20, alone_bytes=1 << 20)


def plan(
    specs: Sequence[TensorSpec],
    packing: Packing,
    small: int = 0,
    whole: Collection[int] = (),
    rules: Sequence[Hashable] = (),
) -> tuple[tuple[int, ...], ...]:
    """Divide the indices of ``specs`` into buckets, last layers first: backward finishes their gradients first.

    Every index is in exactly one bucket. The tensors of a bucket share dtype, device and rule (``rules``: one for each
    tensor, or empty). Tensors of fewer than ``small`` entries and those in ``whole`` have buckets of their own. The
    plan depends on these arguments alone, so it is the same on all ranks. The buckets of one rule do not depend on
    the tensors of others.
    """
    buckets: list[tuple[int, ...]] = []
    open_buckets: dict[tuple[str, bool, Hashable, int], list[int]] = {}
    for i in reversed(range(len(specs))):
        spec, little = specs[i], specs[i].size < small or i in whole
        limits = JOINED if little else packing
        # Packing a large tensor would cost a copy each way, and save one message.
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
