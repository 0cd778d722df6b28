"""A user's script under srun: sums over the ranks; with an argument, one rank fails after that."""

import sys

import hvd_train.torch as ht

print("sum", ht.sum(2.0 ** ht.rank()), "of", ht.size(), flush=True)
if sys.argv[1:] and ht.rank() == int(sys.argv[1]):
    raise ValueError("a fault of this rank")
ht.barrier()
