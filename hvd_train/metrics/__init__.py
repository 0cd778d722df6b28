"""Losses and metrics: a file per family, and an entry in ``table.py`` per name."""
