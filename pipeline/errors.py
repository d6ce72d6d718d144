"""The errors a user can meet.

Each message is one line that names the file or setting, what was expected, what was found and what to do.
A traceback, by contrast, always means a bug of ours.
"""

from __future__ import annotations


class UserError(Exception):
    """A fault that the user can mend: the command lines print it as one line and exit with `exit_code`."""

    exit_code = 1


class ConfigError(UserError):
    """A run configuration, a flag or a combination of settings that cannot work."""

    exit_code = 2


class BaseModelError(UserError):
    """A pretrained model folder that is missing, damaged, of another architecture, or not the one expected."""


class DataError(UserError):
    """A corpus, a tokenizer or a record that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class LayoutError(UserError):
    """Sizes that do not divide over the ranks, or a world that is not the one that was asked for."""


class PreservationError(UserError):
    """The widened model does not reproduce its base: training must not start."""


class DivergenceError(UserError):
    """Training that has come to a loss which is no number."""


class ConversionError(UserError):
    """An exported model that cannot be made, or that differs from the model it was made of."""
