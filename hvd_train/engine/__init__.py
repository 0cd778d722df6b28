"""Horovod's core without frameworks: one library, called by address, for NumPy, PyTorch and TensorFlow of any version.

``native`` has its C interface (``engine.h``). ``library`` finds and loads what scripts/setup compiled from it, and
``transfers`` starts collectives and waits for them.
"""
