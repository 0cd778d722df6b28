"""``python -m hvd_train`` is ``hvd-train``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: a file there must not shadow one of our modules
    from hvd_train.cli.main import main

    main()
