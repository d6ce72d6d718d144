"""Prints a checkpoint's method, widths, base, step and trained share.

    scale-cpt inspect runs/demo
    scale-cpt inspect runs/demo/checkpoints/step_00000200

A run stands for its newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from pipeline import command_line
from pipeline.config.sources import CHECKPOINTS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="its folder, or a run's for the newest")
    parser.add_argument(
        "--base", type=command_line.folder_or_hub, help="the path of the base, if it has moved"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def main(arguments: argparse.Namespace) -> None:
    from pipeline.checkpoint.folder import latest_checkpoint  # after --help: they load torch
    from pipeline.checkpoint.trained_model import describe_checkpoint

    folder = arguments.checkpoint
    if (folder / CHECKPOINTS).is_dir():
        folder = latest_checkpoint(folder / CHECKPOINTS) or folder
    facts = describe_checkpoint(folder, arguments.base)
    text = json.dumps(facts, indent=2) if arguments.json else yaml.safe_dump(facts, sort_keys=False)
    print(text.rstrip("\n"))
