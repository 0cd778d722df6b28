"""Models in blocks: on ranks of a pipeline (``parallel.pipeline``) or on devices (``parallel.devices_per_rank``)."""

NO_BLOCKS = (
    "let the model function return a list of blocks, each of which takes one tensor and gives one, or set "
    "parallel.pipeline and parallel.devices_per_rank: 1"
)
