"""``hvd-train doctor``: check this host, or several hosts together, before a training."""
