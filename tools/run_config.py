"""Shows what a run's configuration says and where each value comes from, or writes a first one for a base and texts.

python tools/run_config.py show configs/demo_fft.yaml --set schedule.steps=20
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline import command_line
from pipeline.config.run import RunConfig, parse_config
from pipeline.config.sources import Layer, combined, source_of
from pipeline.run_folder.changes import add_set_option, read_sources

_DEFAULT = "default"
_WIDEST = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print every setting, and where it comes from: a file, --set, or default")
    show.add_argument("config", type=Path, help="the run's YAML file")
    add_set_option(show)
    arguments = parser.parse_args()
    layers = read_sources(arguments.config, arguments.set)
    print(as_yaml(parse_config(combined(layers), source=str(arguments.config)), layers), end="")


def as_yaml(config: RunConfig, layers: list[Layer]) -> str:
    """The configuration as YAML that describes the same run, with the source of each value as a comment."""
    lines = list(_lines(config.model_dump(mode="json"), layers, ()))
    width = min(_WIDEST, max(len(line) for line, source in lines if source))
    return "".join(f"{line:<{width}}  # {source}\n" if source else f"{line}\n" for line, source in lines)


def _lines(section: Mapping[str, Any], layers: list[Layer], outer: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The lines of a section with their sources; the line of an inner section itself has none."""
    for key, value in section.items():
        keys = (*outer, key)
        indent = "  " * len(outer)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, layers, keys)
        else:
            text = yaml.safe_dump([value], default_flow_style=True, width=10_000, allow_unicode=True).strip()[1:-1]
            yield f"{indent}{key}: {text}", source_of(layers, keys) or _DEFAULT


if __name__ == "__main__":
    command_line.run(main)
