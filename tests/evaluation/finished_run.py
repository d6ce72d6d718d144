"""A SCALE run, trained and converted, whose summary is written."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from tests.bases import STORIES
from tests.conversion.checkpoints import scale
from tests.training.runs import write_config

TRAINING = {
    "step0_max_abs_logit_difference": 0.0,
    "trainable_parameters": 250,
    "total_parameters": 1000,
}


def run_config(folder: Path, **corpora) -> RunConfig:
    changes = {"data__corpora": corpora, "data__replay_fraction": 0} if corpora else {}
    return load_config(write_config(folder, folder, method=scale("adapt"), **changes))


def finished_run(models, folder: Path) -> Path:
    """Writes the run, of a model of the fixture `models`."""
    convert(
        Conversion(models("stories260K", "adapt separate").checkpoint, STORIES, folder / "hf"),
        probe_maker({}),
    )
    (folder / "training.json").write_text(json.dumps(TRAINING))
    return folder
