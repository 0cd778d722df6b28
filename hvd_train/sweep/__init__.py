"""Many trainings of one configuration with other values: planned, run on the ranks there are, compared."""
