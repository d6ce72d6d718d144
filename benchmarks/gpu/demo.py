"""The demo as users run it: all stages, from text to an evaluated export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.commands import run_command
from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.gpu.small_run import (
    ENGLISH,
    KOREAN,
    NO_DEEPSPEED,
    has_deepspeed,
    preservation_row,
)
from benchmarks.results import ROOT
from pipeline.config.reading import read_yaml
from pipeline.files.publishing import write_text


def check_demo(setting: Setting) -> Iterator[CheckRow]:
    """All stages of the demo; on a CPU it trains a few steps."""
    if not has_deepspeed():
        yield CheckRow("the demo", None, NO_DEEPSPEED)
        return
    folder = setting.folder / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    config = setting.folder / "demo.yaml"
    write_text(config, yaml.safe_dump(_demo_settings(folder, smaller=not setting.on_gpu)))
    script = ["bash", "slurm/cpt_korean.sh", str(config)]
    run_command(script, setting, NPROC="1", CONFIG=str(config))
    yield preservation_row("the demo", folder)

    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    perplexities: dict[str, str] = {}
    for corpus, figures in training["validation"].items():
        perplexities[corpus] = f"{figures['perplexity']:.3g}"
    exports = exports_in(folder)
    yield CheckRow(
        "the demo: trained, converted and evaluated",
        bool(exports),
        f"perplexities {perplexities}, exports {exports}",
    )


def _demo_settings(folder: Path, *, smaller: bool) -> dict[str, Any]:
    """The shipped configuration of the demo, with all that it writes in `folder`."""
    values = read_yaml(ROOT / "configs" / "demo.yaml")
    data = values["data"]
    values["folder"] = str(folder)
    data["folder"] = str(folder / "tokens")
    if smaller:
        # Every stage runs, on as little text as it accepts.
        values["schedule"]["steps"] = 2
        values["validation"]["max_sequences"] = 2
        values["gate"] = {"tokens": 1000, "max_open_fraction": 0.1}
        data["corpora"]["self_generated"]["sample"] = {"tokens": 4000}
        data["corpora"]["korean"]["input"] = [KOREAN.format("heldout.")]
        data["corpora"]["english"]["input"] = [ENGLISH.format("heldout.")]
    return values


def exports_in(folder: Path) -> list[str]:
    """The names of the exported models below a run's folder."""
    names: list[str] = []
    for path in folder.rglob("config.json"):
        if path.parent != folder:
            names.append(path.parent.name)
    return sorted(names)
