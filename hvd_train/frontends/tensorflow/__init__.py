"""Keras 3 on TensorFlow. The backend must be set before Keras is imported."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
