"""Does a run survive kill -9 and a change of layout? Trains one run at three layouts, and one undisturbed.

    python benchmarks/elastic.py --folder runs/elastic

The run starts at tensor-parallel 2 × data-parallel 2 with ZeRO-3, is killed, resumes at 1 × 2 with ZeRO-1, is killed
again, ends at 4 × 1 with ZeRO-2, and is exported. The other is a single process. Writes <folder>/summary.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.files import write_json
from pipeline.run_folder.metrics import METRICS, read_metrics

# Of the undisturbed run's loss. Layouts sum in another order, and the rounding error of an fp32 sum grows with its
# terms: an absolute bound would be too tight for a large loss and too loose for a small one.
LOSS_TOLERANCE = 1e-6
EXPORT_TOLERANCE = 1e-5
SAVES = 6
"""Saves in a run, which is killed between two of them."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout of the run, and after which share of its steps it is killed (None: it may end)."""

    tp_size: int
    dp_size: int
    zero_stage: int
    killed_at: float | None = None


MOVED = [Layout(2, 2, 3, killed_at=0.4), Layout(1, 2, 1, killed_at=0.7), Layout(4, 1, 2)]
UNDISTURBED = Layout(1, 1, 1)


def write_run(folder: Path, data: Path, layout: Layout, steps: int) -> Path:
    """Writes the configuration of a short demo run for `layout` into `folder`, where it trains too."""
    folder.mkdir(parents=True, exist_ok=True)
    zero = folder / f"zero{layout.zero_stage}.json"
    write_json(zero, {"zero_optimization": {"stage": layout.zero_stage, "overlap_comm": False}})
    values: dict[str, Any] = yaml.safe_load(Path("configs/demo.yaml").read_text(encoding="utf-8"))
    values |= {"name": "elastic", "folder": str(folder), "deepspeed": str(zero)}
    values["method"]["expansion"]["intermediate_size"] = 88  # divides by four
    values["data"] |= {"folder": str(data), "sequence_length": 64, "replay_fraction": 0.0625}
    del values["gate"], values["data"]["corpora"]["own_text"]  # what is compared is the run itself
    for corpus in values["data"]["corpora"].values():
        corpus["input"] = corpus["heldout_input"]  # a little text is enough
    values["schedule"] |= {"steps": steps, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3}
    values["parallel"] = {"tp_size": layout.tp_size}
    values["validation"] = {"every_steps": steps, "max_sequences": 8}
    values["checkpoints"] = {"every_steps": max(1, steps // SAVES)}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def train(folder: Path, data: Path, layout: Layout, steps: int) -> None:
    """Trains in `folder` until the end, or until every process is killed (SIGKILL) after a share of the steps."""
    config = write_run(folder, data, layout, steps)
    world_size = layout.tp_size * layout.dp_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "pipeline.train", str(config)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if layout.killed_at is not None and steps_done(folder) >= round(layout.killed_at * steps):
                break
            if any(rank.returncode for rank in ranks):
                break
            time.sleep(0.02)
    finally:
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [code for code in codes if code]
    if failed or (layout.killed_at is not None and None not in codes):
        raise SystemExit(f"error: {config}: expected {layout} to run until it is killed or done, found {codes}")


def steps_done(folder: Path) -> int:
    """The last step in the metrics of the run in `folder`."""
    lines = read_metrics(folder / METRICS)
    return int(lines[-1]["step"]) if lines else 0


def losses(folder: Path) -> dict[int, float]:
    """The training loss by step."""
    return {line["step"]: line["loss"] for line in read_metrics(folder / METRICS) if "loss" in line}


def run_tool(name: str, config: Path) -> None:
    """Runs a tool of the project on `config`."""
    subprocess.run([sys.executable, f"tools/{name}.py", str(config)], check=True)


def move(folder: Path, data: Path, steps: int) -> list[dict[str, Any]]:
    """Trains at each layout in turn; returns a row for each, up to the checkpoint from which the next resumed."""
    rows = []
    first = 1
    for layout in MOVED:
        train(folder, data, layout, steps)
        saved = int((folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip().removeprefix("step_"))
        trained = losses(folder)
        rows.append(
            {
                "tp_size": layout.tp_size,
                "dp_size": layout.dp_size,
                "zero_stage": layout.zero_stage,
                "killed_after_step": steps_done(folder) if layout.killed_at else None,
                "first_step": first,
                "last_step": saved,
                "losses": [trained[step] for step in range(first, saved + 1)],
            }
        )
        first = saved + 1
    return rows


def summarise(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the moved run with the undisturbed one."""
    expected = losses(folder / "undisturbed")
    found = {row["first_step"] + index: loss for row in rows for index, loss in enumerate(row["losses"])}
    if found.keys() != expected.keys():
        raise SystemExit(f"error: {folder}: the moved run took the steps {sorted(found)}, expected {sorted(expected)}")
    differences = {step: abs(found[step] - expected[step]) for step in expected}
    for row in rows:
        row["max_abs_loss_difference"] = max(
            differences[step] for step in range(row["first_step"], row["last_step"] + 1)
        )
    facts = json.loads((folder / "undisturbed" / "training.json").read_text(encoding="utf-8"))
    exported = json.loads((folder / "moved" / "hf" / "verification.json").read_text(encoding="utf-8"))
    return {
        "layouts": rows,
        "undisturbed_losses": list(expected.values()),
        "max_abs_loss_difference": max(differences.values()),
        "max_relative_loss_difference": max(differences[step] / expected[step] for step in expected),
        "trainable_parameters": facts["trainable_parameters"],
        "optimizer_state_elements": facts["optimizer_state_elements"],
        "export_max_abs_logit_difference": exported["max_abs"],
    }


def print_table(summary: dict[str, Any]) -> None:
    """A row for each layout, then the other figures."""
    print(f"{'layout':<24} {'steps':>8} {'ended':>20} {'first loss':>11} {'last loss':>11} {'max difference':>15}")
    for row in summary["layouts"]:
        layout = f"tp {row['tp_size']} x dp {row['dp_size']}, ZeRO-{row['zero_stage']}"
        killed = row["killed_after_step"]
        ended = f"killed in step {killed + 1}" if killed else "completed"
        steps = f"{row['first_step']}-{row['last_step']}"
        print(
            f"{layout:<24} {steps:>8} {ended:>20} {row['losses'][0]:>11.6f} {row['losses'][-1]:>11.6f} "
            f"{row['max_abs_loss_difference']:>15.2e}"
        )
    for name, value in summary.items():
        if not isinstance(value, list):
            print(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--steps", type=int, default=30, help="at least 12, so that a kill loses steps")
    options = parser.parse_args()
    folder: Path = options.folder

    for name in ("moved", "undisturbed"):
        shutil.rmtree(folder / name, ignore_errors=True)
    moved, undisturbed, data = folder / "moved", folder / "undisturbed", folder / "tokens"
    config = write_run(moved, data, MOVED[0], options.steps)
    run_tool("preprocess_data", config)
    run_tool("upscale", config)
    rows = move(moved, data, options.steps)
    run_tool("convert_checkpoint", moved / "run.yaml")
    shutil.copytree(moved / "upscaled", undisturbed / "upscaled")
    train(undisturbed, data, UNDISTURBED, options.steps)
    summary = summarise(folder, rows)
    write_json(folder / "summary.json", summary)

    print_table(summary)
    print(f"wrote {folder / 'summary.json'}")
    if summary["max_relative_loss_difference"] > LOSS_TOLERANCE:
        raise SystemExit(f"error: the losses differ by more than {LOSS_TOLERANCE} of their values")
    if summary["export_max_abs_logit_difference"] > EXPORT_TOLERANCE:
        raise SystemExit(f"error: the exported model's logits differ by more than {EXPORT_TOLERANCE}")


if __name__ == "__main__":
    main()
