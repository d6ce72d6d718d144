"""Estimates parameters, memory, traffic, FLOPs and time of a run, and recommends a layout.

    scale-cpt estimate --config configs/demo.yaml --gpus 2

The base's weights are not needed: its config.json is enough (--base-config, if its folder is missing).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline import command_line
from pipeline.run_folder.changes import add_set_option, read_run
from pipeline.sizing.cluster import add_cluster_options, cluster_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file, e.g. configs/demo.yaml")
    add_set_option(parser)
    add_cluster_options(parser)
    parser.add_argument("--tp", type=int, help="overrides the configuration's parallel.tp_size")
    parser.add_argument("--base-config", type=Path, help="the base's config.json, if its folder is missing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args()
    if "gpus" not in arguments:
        parser.error("--gpus: give the number of GPUs")
    from pipeline.sizing.estimate import open_estimator  # here, so that --help does not import torch
    from pipeline.sizing.table import as_text, as_values, make_report

    config, cluster = read_run(arguments.config, arguments.set, base="described"), cluster_of(arguments)
    report = make_report(open_estimator(config, cluster, tp_size=arguments.tp, base_config=arguments.base_config))
    print(json.dumps(as_values(report), indent=2) if arguments.json else as_text(report))
    return 0 if report.recommendation.choice else 1


if __name__ == "__main__":
    command_line.run(main)
