"""Says what a run needs, before it gets a GPU: parameters, memory, messages, FLOPs, time; and recommends a layout.

    python tools/estimate.py --config configs/demo.yaml --gpus 8

Neither a GPU nor the base's weights are needed: its config.json is enough (--base-config where the folder is not here).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline import command_line
from pipeline.config import load_config
from pipeline.estimation.cluster import Cluster
from pipeline.estimation.inputs import open_estimator
from pipeline.estimation.table import as_text, as_values, make_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file, e.g. configs/demo.yaml")
    parser.add_argument("--gpus", type=int, required=True, help="in all")
    parser.add_argument("--gpus-per-node", type=int, default=Cluster.gpus_per_node)
    parser.add_argument("--gpu-memory-gib", type=float, default=Cluster.gpu_memory_gib)
    parser.add_argument("--peak-tflops", type=float, default=Cluster.peak_tflops, help="of one GPU, dense")
    parser.add_argument("--mfu", type=float, default=Cluster.mfu, help="share of the peak that is reached")
    parser.add_argument("--node-gb-per-s", type=float, default=Cluster.node_gb_per_s, help="a GPU sends in its node")
    parser.add_argument("--network-gb-per-s", type=float, default=Cluster.network_gb_per_s, help="... to other nodes")
    parser.add_argument("--tp", type=int, help="instead of the configuration's parallel.tp_size")
    parser.add_argument("--base-config", type=Path, help="the base's config.json, where its folder is not here")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = vars(parser.parse_args())
    config = load_config(arguments.pop("config"))
    tp_size, base_config = arguments.pop("tp"), arguments.pop("base_config")
    as_json = arguments.pop("json")
    report = make_report(open_estimator(config, Cluster(**arguments), tp_size=tp_size, base_config=base_config))
    print(json.dumps(as_values(report), indent=2) if as_json else as_text(report))


if __name__ == "__main__":
    command_line.run(main)
