r"""Prints which features of a run go together, and why others do not.

    scale-cpt combinations
    scale-cpt combinations --why lora compile
    scale-cpt combinations --why adapt 'norm: base' gate merged

Every pair is asked of the checks that a run passes before training: a small run is made up that has
both. Nothing is trained, and no file is read. --why asks one question, also of three features or
more; a format of exports among them asks whether the trained model leaves in it.
docs/combinations.md has the tables, which a test compares with this output.
"""

from __future__ import annotations

import argparse
import itertools

from pipeline.conversion import offered_formats
from pipeline.errors import ConfigError, did_you_mean
from pipeline.extensions.compatibility.features import FEATURES, contradicts
from pipeline.extensions.compatibility.legend import legend
from pipeline.log import get_logger

_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--why",
        nargs="+",
        metavar="FEATURE",
        help="whether these features go together, and why not: names of the tables, at least two",
    )


def main(arguments: argparse.Namespace) -> None:
    if arguments.why is not None:
        print(_answer(arguments.why))
        return
    for line in legend():
        print(line, flush=True)
    # Here, because the first table does not wait for torch.
    from pipeline.extensions.compatibility.tables import tables

    for line in tables():
        print(line, flush=True)


def _answer(names: list[str]) -> str:
    """Whether the features go together, in a line.

    Raises:
        ConfigError: a name is of no feature, there is one name only, or two are values of one
            setting.
    """
    formats = [name for name in names if name in offered_formats()]
    features = [name for name in names if name not in formats]
    for name in features:
        if name not in FEATURES:
            raise ConfigError(
                f"--why: no feature is called {name}{did_you_mean(name, known_names())}; see "
                "scale-cpt combinations"
            )
    if len(names) < 2 or not features or len(formats) > 1:
        raise ConfigError(
            f"--why: expected two features or more, at most one of them a format of exports, found "
            f"{', '.join(names)}"
        )
    for one, other in itertools.combinations(features, 2):
        setting = contradicts(one, other)
        if setting is not None:
            raise ConfigError(f"--why: {one} and {other} are two values of {setting}; name one")
    _logger.info("asking the checks about %s: loading the libraries", ", ".join(names))
    # Here, because a mistake in a name is reported without waiting for torch.
    from pipeline.extensions.compatibility.ask import format_refusals, refusal

    reason = refusal(features)
    if reason is None and formats:
        reason = format_refusals(features)[formats[0]]
    return f"{', '.join(names)}: {'works' if reason is None else f'refused: {reason}'}"


def known_names() -> list[str]:
    """The names that --why knows."""
    return [*FEATURES, *offered_formats()]
