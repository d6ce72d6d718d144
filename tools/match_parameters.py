"""Prints `method:` sections with which each method trains as many parameters as the run's own.

    scale-cpt match --config configs/demo.yaml --methods lora llama_pro adapt

SCALE's widths grow together, by the same share of the base's. With --serve tp=8,gguf a stock export of them needs no
--pad-for. A comment above each section gives its parameter count.
The base's config.json is enough (--base-config, if its folder is missing).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.model.stock_model import Padding
from pipeline.run_folder.changes import add_set_option, read_run
from pipeline.sizing.estimate import read_architecture
from pipeline.sizing.matching import Matcher, MethodName, as_yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file, e.g. configs/demo.yaml")
    add_set_option(parser)
    parser.add_argument("--methods", nargs="+", choices=get_args(MethodName), default=get_args(MethodName))
    parser.add_argument("--target", type=int, help="trained parameters; default: those of the run's own method")
    parser.add_argument("--multiple-of", type=int, default=8, help="of added hidden and FFN widths; default 8")
    parser.add_argument(
        "--serve", type=Padding.parse, metavar="NEEDS", help="what servers split: tp=8, gguf, or tp=8,gguf"
    )
    parser.add_argument("--base-config", type=Path, help="the base's config.json, if its folder is missing")
    arguments = parser.parse_args()
    for flag in ("target", "multiple_of"):
        value = getattr(arguments, flag)
        if value is not None and value <= 0:
            raise ConfigError(f"--{flag.replace('_', '-')}: expected a number above 0, found {value}")
    config = read_run(arguments.config, arguments.set, base="described")
    spec = read_architecture(config, arguments.base_config)
    matcher = Matcher(config, spec, multiple_of=arguments.multiple_of, padding=arguments.serve)
    print(as_yaml(matcher.match(arguments.methods, arguments.target)), end="")


if __name__ == "__main__":
    command_line.run(main)
