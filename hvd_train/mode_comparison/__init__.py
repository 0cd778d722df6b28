"""Compare ways to train in parallel: ``hvd-train modes``."""
