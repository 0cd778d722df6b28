"""``python -m tests.frontends.numpy_ranks ARGUMENTS`` is hvd-train with a third framework, known here alone."""

from hvd_train.cli.main import main
from hvd_train.frameworks import Framework, register

NUMPY = Framework(
    "numpy",
    module="tests.numpy_frontend",
    communicator="tests.numpy_frontend",
    horovod="horovod.torch",
    packages=("numpy",),
)

if __name__ == "__main__":
    register(NUMPY)
    main()
