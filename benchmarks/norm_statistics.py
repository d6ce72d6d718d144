"""Compares the statistics that normalise the expansion stream: its own (`separate`) or the base stream's (`base`).

    python benchmarks/norm_statistics.py --seeds 2 --json benchmarks/out/norm_statistics.json

Trains the run of --config once for each choice and seed, everything else equal, and prints the perplexity on each
held-out part, before and after. The corpora are tokenized once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from pipeline.config.method import ScaleMethod
from pipeline.config.run import load_config
from pipeline.config.sources import combined, read_layers
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base

NORMS = ("separate", "base")


def run_once(values: dict[str, Any], folder: Path, norm: str, seed: int, ranks: int) -> dict[str, float]:
    """Trains with one choice of `norm` in `folder`; returns the perplexities of the first and the last validation."""
    folder.mkdir(parents=True)
    variant = {**values, "folder": str(folder), "seed": seed, "method": {**values["method"], "norm": norm}}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(variant), encoding="utf-8")
    run = load_config(config)
    assert isinstance(run.method, ScaleMethod)
    upscale(run.method, open_base(run.base), run.upscaled_folder, seed)
    launcher = [sys.executable, "tools/launch_here.py", "--ranks", str(ranks)]
    subprocess.run([*launcher, "-m", "pipeline.train", str(config)], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scored = [line for line in lines if any(name.startswith("perplexity/") for name in line)]
    figures = {}
    for moment, line in (("before", scored[0]), ("after", scored[-1])):
        for name, value in line.items():
            if name.startswith("perplexity/"):
                figures[f"{name.removeprefix('perplexity/')}_perplexity_{moment}"] = value
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS)
    parser.add_argument("--steps", type=int, help="default: the configuration's")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()

    values = combined(read_layers(arguments.config))
    if arguments.steps:
        values["schedule"]["steps"] = arguments.steps
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for tool in ("preprocess_data.py", "sample_base.py"):
            subprocess.run([sys.executable, f"tools/{tool}", "--config", str(arguments.config)], check=True)
        for seed in range(1, arguments.seeds + 1):
            for norm in arguments.norms:
                figures = run_once(values, Path(scratch) / f"{norm}-{seed}", norm, seed, arguments.ranks)
                rows.append({"norm": norm, "seed": seed, **figures})

    names = [name for name in rows[0] if name not in ("norm", "seed")]
    width = max(map(len, names))
    print(f"{'norm':<10} {'seed':>4}" + "".join(f"  {name:>{width}}" for name in names))
    for row in rows:
        print(f"{row['norm']:<10} {row['seed']:>4}" + "".join(f"  {row[name]:>{width}.3f}" for name in names))
    for norm in arguments.norms:
        means = (mean(row[name] for row in rows if row["norm"] == norm) for name in names)
        print(f"{norm:<10} mean" + "".join(f"  {value:>{width}.3f}" for value in means))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
