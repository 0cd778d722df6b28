"""Losses and metrics: a file for each family, and a row of ``table.py`` for each name."""
