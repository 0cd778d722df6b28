"""The task of a training: its losses and metrics for the outputs of a model, as sums over samples."""
