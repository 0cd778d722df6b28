#!/usr/bin/env bash
# Run by rattler-build in the source folder, with CXX, PREFIX, PYTHON, SP_DIR and SRC_DIR set.
set -euo pipefail
export XDG_CACHE_HOME="$SRC_DIR/cache"
"$PYTHON" hvd_train/engine/build.py --archive "$SRC_DIR"/horovod-*.tar.gz --mpi "$PREFIX/bin/mpicc"
"$PYTHON" hvd_train/engine/build.py --tensorflow "$SP_DIR/tensorflow/include"
"$PYTHON" -m pip install --no-deps --no-build-isolation --no-index .
