"""The contracts between the core and everything that knows a framework, a network or a file format.

A *tensor* below is whatever the front-end computes with (``torch.Tensor``, ``tf.Tensor``, ``numpy.ndarray``).
State goes in and comes out: nothing here hides a dictionary, so the same code runs eagerly, traced and in checkpoints.
"""

from hvd_train.protocol.communicator import Communicator, CommunicatorModule, Groups, StageLinks, Window
from hvd_train.protocol.data import (
    PARTNER,
    SHARE,
    Batch,
    Field,
    Fields,
    Sample,
    Source,
    made_up,
    one_or_all,
)
from hvd_train.protocol.model import Build, FrontEnd, FrontEndModule, Scale, Sums
from hvd_train.protocol.ops import Cell, LibraryMetric, Ops
from hvd_train.protocol.tensors import Handle, Tensor, TensorSpec, Tree, is_vector
from hvd_train.protocol.update import (
    OF_EXCHANGE,
    UNDER_WAY,
    Averages,
    Compressor,
    Entry,
    Exchange,
    HostMemory,
    HostSums,
    Optimizer,
    Packing,
    Placement,
    Rounds,
    ShardedOptimizer,
    State,
    Update,
    Wire,
)

__all__ = [
    "OF_EXCHANGE",
    "PARTNER",
    "SHARE",
    "UNDER_WAY",
    "Averages",
    "Batch",
    "Build",
    "Cell",
    "Communicator",
    "CommunicatorModule",
    "Compressor",
    "Entry",
    "Exchange",
    "Field",
    "Fields",
    "FrontEnd",
    "FrontEndModule",
    "Groups",
    "Handle",
    "HostMemory",
    "HostSums",
    "LibraryMetric",
    "Ops",
    "Optimizer",
    "Packing",
    "Placement",
    "Rounds",
    "Sample",
    "Scale",
    "ShardedOptimizer",
    "Source",
    "StageLinks",
    "State",
    "Sums",
    "Tensor",
    "TensorSpec",
    "Tree",
    "Update",
    "Window",
    "Wire",
    "is_vector",
    "made_up",
    "one_or_all",
]
