"""Keras 3 on TensorFlow; Keras asks for its backend when it is imported."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
