"""Ways to train in parallel, tried side by side: ``hvd-train modes``."""
