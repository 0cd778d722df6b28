"""The user's secret, by which ranks and servers verify that they belong to the same user."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from hvd_train.errors import ConfigError

SECRET = "HVD_TRAIN_SECRET"


def read_secret() -> bytes:
    """Return the secret from the environment or the user's file. Raises FileNotFoundError if rank 0 has not created the
    file yet."""
    if value := os.environ.get(SECRET):
        return value.encode()
    path = _path()
    with path.open("rb") as file:
        # Check the open file, not its path, which another file could replace in between.
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():  # with root-squash a file server stores root's files as nobody's
            what = f"the secret belongs to user {status.st_uid}, and this process is of user {os.geteuid()}"
            raise ConfigError(
                what, where=str(path), fix=f"set {SECRET} for all ranks, or XDG_CONFIG_HOME to a folder of yours"
            )
        if status.st_mode & 0o077:
            raise ConfigError("others may read the secret", where=str(path), fix=f"remove it, or set {SECRET}")
        return file.read()


def make_secret() -> bytes:
    """Return the secret like ``read_secret``, creating the file atomically if there is none."""
    with suppress(FileNotFoundError):
        return read_secret()
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # readable only by the user
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        # A link is created atomically, and fails if another rank was faster, whose secret is then used.
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
