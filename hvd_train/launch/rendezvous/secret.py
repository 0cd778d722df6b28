"""The user's secret, by which ranks know that a server, or who asks it, belongs to the same user."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from hvd_train.errors import ConfigError

SECRET = "HVD_TRAIN_SECRET"


def read_secret() -> bytes:
    """Return the secret from the environment or from the user's file. Raises FileNotFoundError if rank 0 has not made
    the file yet."""
    if value := os.environ.get(SECRET):
        return value.encode()
    path = _path()
    with path.open("rb") as file:
        # Of the open file, and not of its name, behind which another file may be put in between.
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():  # a file server may give the files of root to nobody (root-squash)
            what = f"the secret belongs to user {status.st_uid}, and this process is of user {os.geteuid()}"
            raise ConfigError(
                what, where=str(path), fix=f"set {SECRET} for all ranks, or XDG_CONFIG_HOME to a folder of yours"
            )
        if status.st_mode & 0o077:
            raise ConfigError("others may read the secret", where=str(path), fix=f"remove it, or set {SECRET}")
        return file.read()


def make_secret() -> bytes:
    """Return the secret as ``read_secret`` does, and make the file if there is none: whole, or not at all."""
    with suppress(FileNotFoundError):
        return read_secret()
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # for the user alone
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        # A link is made whole or not at all, and fails if another rank was faster: then its secret counts.
        with suppress(FileExistsError):
            os.link(temporary, path)
        os.unlink(temporary)
    except OSError as error:
        what = f"the secret of this user's ranks cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(path), fix=f"set {SECRET} for all ranks") from error
    return read_secret()


def _path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "hvd_train" / "secret"
