"""All that is wrong with a run, instead of the first thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import ConfigError, UserError

Result = TypeVar("Result")


class Faults:
    """The faults that a user can mend, in the order in which they were met."""

    def __init__(self) -> None:
        self.met: list[UserError] = []

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """What `work` returns; None, and a fault more, where it raises a UserError."""
        try:
            return work()
        except UserError as error:
            self.met.append(error)
            return None

    def raise_all(self) -> None:
        """Raises the only fault as it is, and several as one ConfigError."""
        if len(self.met) == 1:
            raise self.met[0]
        if self.met:
            raise ConfigError(f"{len(self.met)} faults: {'; '.join(map(str, self.met))}")
