#!/usr/bin/env bash
# Run by rattler-build in the source folder, with CXX, PREFIX, PYTHON and SRC_DIR set.
set -euo pipefail
export XDG_CACHE_HOME="$SRC_DIR/cache"
"$PYTHON" hvd_train/engine/build.py --archive "$SRC_DIR"/horovod-*.tar.gz --mpi "$PREFIX/bin/mpicc"
"$PYTHON" -m pip install --no-deps --no-build-isolation --no-index .
