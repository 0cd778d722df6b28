"""What ``import hvd_train.keras`` sets for TensorFlow before it loads."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os
import hvd_train.keras
print(os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["TF_ENABLE_ONEDNN_OPTS"])
"""


def test_notes_are_silent_and_what_the_user_sets_stands():
    """Level 2 leaves out notes and warnings: errors are shown."""
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    env |= {"KERAS_BACKEND": "torch", "TF_ENABLE_ONEDNN_OPTS": "0"}  # torch: it loads faster, and both are set anyway
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "0"]
