"""The contracts between the core and everything that knows a framework, a network or a file format.

A *tensor* below is whatever the front-end computes with (``torch.Tensor``, ``tf.Tensor``, ``numpy.ndarray``).
State is an argument and a result: nothing here hides a dictionary, so the same code runs eagerly and traced.
"""

from hvd_train.protocol.communicator import (
    Communicator,
    CommunicatorModule,
    Groups,
    StageLinks,
    Window,
    allgather_json,
    broadcast_json,
)
from hvd_train.protocol.data import (
    PARTNER,
    SHARE,
    Batch,
    Field,
    Fields,
    Sample,
    Source,
    different,
    made_up,
    one_or_all,
)
from hvd_train.protocol.frontend import (
    Build,
    Evaluable,
    FrontEnd,
    FrontEndModule,
    GathersStatistics,
    Model,
    Parameters,
    Replica,
    Runtime,
    Scale,
    Shardable,
    Sums,
    TracksStatistics,
    Trainable,
    WeightNames,
)
from hvd_train.protocol.ops import Cell, LibraryMetric, Ops
from hvd_train.protocol.tensors import Handle, Tensor, TensorSpec, Tree, is_vector
from hvd_train.protocol.update import (
    EXCHANGE_PREFIX,
    IN_FLIGHT,
    Compressor,
    DividedUpdate,
    Entry,
    Exchange,
    GradientNorms,
    HostMemory,
    HostSums,
    Optimizer,
    Packing,
    Placement,
    Rounds,
    ShardedOptimizer,
    State,
    StepUpdate,
    Update,
    Wire,
)
