"""``python -m tests.numpy_ranks ARGUMENTS`` is hvd-train with NumPy as its only framework."""

import sys

from hvd_train.cli.main import main
from hvd_train.frameworks import Framework, register

NUMPY = Framework("numpy", "tests.numpy_frontend", "tests.numpy_frontend", packages=("numpy",))

if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(("horovod", "torch", "tensorflow", "keras")))  # importing them fails
    register(NUMPY)
    main()
