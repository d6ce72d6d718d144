"""Options of a command line that take several values: `--new A B`, `--new A --new B`, or both."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

_ANY_NUMBER = (argparse.ONE_OR_MORE, argparse.ZERO_OR_MORE)


class _StoreAll(argparse._StoreAction):
    """Stores an option's value. An option with a list of values may be given several times: each
    time adds to the list, and the first replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        # argparse puts the default itself there, before it reads the first option; or nothing, if
        # the default is SUPPRESS.
        before = getattr(namespace, self.dest, self.default)
        was_given = before is not self.default
        has_list = bool(self.option_strings) and self.nargs in _ANY_NUMBER
        if has_list and was_given and values is not None:
            values = [*before, *values]
        super().__call__(parser, namespace, values, option_string)


def join_repeated_lists(parser: argparse.ArgumentParser) -> None:
    """Lets every list option that is added to `parser` from now on be given several times.

    argparse alone would keep the last list, and drop the others without a word. A parser of
    commands needs this in the `__init__` of its class, which its commands share.
    """
    # What argparse takes for an option that names no action. Groups of options share it.
    parser.register("action", None, _StoreAll)
    parser.register("action", "store", _StoreAll)
