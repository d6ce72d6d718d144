"""Prints a checkpoint's method, widths, base, step and trained share.

    scale-cpt inspect runs/demo
    scale-cpt inspect runs/demo/checkpoints/step_00000200 --json

Of a run, the newest checkpoint is shown. The output is YAML, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from pipeline import command_line
from pipeline.config.sources import CHECKPOINTS
from pipeline.log import get_logger

_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a checkpoint's folder, or a run's folder")
    parser.add_argument(
        "--base", type=command_line.folder_or_hub, help="the base model's folder, if it has moved"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")


def main(arguments: argparse.Namespace) -> None:
    _logger.info("inspecting %s: loading the libraries", arguments.checkpoint)
    # Here, because --help does not wait for torch.
    from pipeline.checkpoint.folder import newest_in
    from pipeline.checkpoint.trained_model import describe_checkpoint

    folder = arguments.checkpoint
    if (folder / CHECKPOINTS).is_dir():
        folder = newest_in(folder / CHECKPOINTS)
    facts = describe_checkpoint(folder, arguments.base)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print(yaml.safe_dump(facts, sort_keys=False), end="")
