"""The task: losses and metrics of a model's outputs, as sums over samples."""
