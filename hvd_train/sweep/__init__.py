"""Hyperparameter sweeps: plan the trials, run them on the available ranks, and compare them."""
