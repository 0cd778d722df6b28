"""``hvd-train doctor``: is this host fit to train, and are these hosts together."""
