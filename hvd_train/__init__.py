"""Data-parallel training of PyTorch and Keras 3 / TensorFlow models over Horovod. Importing this loads no framework."""

__version__ = "0.1.0"
