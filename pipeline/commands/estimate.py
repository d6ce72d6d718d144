r"""Estimates memory, traffic, FLOPs and time of a run, and recommends a layout.

    scale-cpt estimate configs/demo.yaml
    scale-cpt estimate configs/cpt_korean_llama3.2_1b.yaml --gpus 8 \
        --base-config configs/bases/llama-3.2-1b.json

Without --gpus it is for this machine: its GPUs, or processes on its CPUs, whose speed is measured.

Layouts that recompute more than they must are left out; --all lists them. A layout is recommended
if it leaves at least 5 % of the usable memory, which is the error of the estimate. The exit code is
1 where none fits. The base's weights are not needed: its config.json is enough.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.config.run import load_config
from pipeline.log import get_logger
from pipeline.sizing.cluster import add_cluster_options, cluster_of
from pipeline.sizing.described_base import described_base

_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    add_cluster_options(parser)
    parser.add_argument("--all", action="store_true", help="list every layout")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for a program (docs/json.md)"
    )
    parser.add_argument(
        "--base-config", type=Path, help="the base's config.json, if its folder is missing"
    )


def main(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.run, arguments.set, base="described")
    described_base(config, arguments.base_config)  # Before torch is loaded.
    _logger.info("estimating %s: loading the libraries, then each layout", config.name)
    # Here, because --help does not wait for torch.
    from pipeline.sizing.estimate import open_estimator
    from pipeline.sizing.report import report, report_values

    cluster = cluster_of(arguments)
    estimator = open_estimator(config, cluster, base_config=arguments.base_config)
    if arguments.json:
        values, recommended = report_values(estimator, every=arguments.all)
        command_line.print_json(values)
    else:
        text, recommended = report(estimator, every=arguments.all)
        print(text)
    # So that a script can refuse to submit a job that would not fit.
    return 0 if recommended else 1
