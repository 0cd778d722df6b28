"""Create the hooks of the configuration."""

from __future__ import annotations

from hvd_train.config import Config
from hvd_train.config.user_code import user_function
from hvd_train.core.hooks import Hook
from hvd_train.errors import ConfigError, named_reason


def hooks_of(config: Config) -> list[Hook]:
    """Instantiate the classes listed in ``hooks``, in order. Raises ConfigError."""
    return [_made(name, f"hooks: {name}") for name in config.hooks]


def _made(name: str, where: str) -> Hook:
    named = user_function(name, where)
    try:
        hook = named if isinstance(named, Hook) else named()
    except Exception as error:
        reason = named_reason(error)
        fix = "it is called without arguments, once on each rank"
        raise ConfigError(f"it cannot be created: {reason}", where=where, fix=fix) from error
    if not isinstance(hook, Hook):
        fix = "derive its class from hvd_train.Hook"
        raise ConfigError(f"it gives {type(hook).__name__}, which is not a hook", where=where, fix=fix)
    return hook
