"""Create the hooks of the configuration."""

from __future__ import annotations

from hvd_train.config import Config
from hvd_train.config.user_code import user_errors, user_function
from hvd_train.core.hooks import Hook
from hvd_train.errors import ConfigError


def hooks_of(config: Config) -> list[Hook]:
    """Instantiate the classes listed in ``hooks``, in order. Raises ConfigError."""
    return [_made(name, f"hooks: {name}") for name in config.hooks]


def _made(name: str, where: str) -> Hook:
    named = user_function(name, where)
    with user_errors("it cannot be created", where, "it is called without arguments, once on each rank"):
        hook = named if isinstance(named, Hook) else named()
    if not isinstance(hook, Hook):
        fix = "derive its class from hvd_train.Hook"
        raise ConfigError(f"it gives {type(hook).__name__}, which is not a hook", where=where, fix=fix)
    return hook
