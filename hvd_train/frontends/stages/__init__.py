"""Pipeline stages: each rank of a replica holds some of the model's blocks (``parallel.pipeline``)."""

NO_BLOCKS = (
    "let the model function return a list of blocks, each of which takes one tensor and gives one, or set "
    "parallel.pipeline: 1"
)
