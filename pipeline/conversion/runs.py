"""Where a run of this project keeps what conversion needs."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoint.folder import LATEST, latest_checkpoint
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import Conversion
from pipeline.conversion.formats import Format
from pipeline.data.records import Keys
from pipeline.errors import CheckpointError

HF_FOLDER = "hf"


def latest_conversion(
    config_path: Path, format: Format, dtype: torch.dtype | None, output: Path | None = None
) -> Conversion:
    """The conversion of a run's newest checkpoint into `output`, by default its own `hf` folder.

    Raises:
        CheckpointError: the run has saved none, or `latest` names none.
    """
    config = load_config(config_path)
    output = output or config.folder / HF_FOLDER
    return Conversion(newest_checkpoint(config), config.base, output, format=format, dtype=dtype)


def newest_checkpoint(config: RunConfig) -> Path:
    """The checkpoint that `checkpoints/latest` names."""
    folder = config.folder / "checkpoints"
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder / LATEST}: no such file; the run has no checkpoint yet: train it first")
    return checkpoint


def run_texts(config_path: Path) -> dict[str, list[str]]:
    """The text files of each corpus that the run has not trained on, or else its inputs, by the corpus's name."""
    corpora = load_config(config_path).data.corpora
    return {name: corpus.heldout_input or corpus.input for name, corpus in corpora.items()}


def run_keys(config_path: Path) -> dict[str, Keys]:
    """Where the records of each of these corpora have their text, and its prompt."""
    corpora = load_config(config_path).data.corpora
    return {name: Keys(corpus.text_key, corpus.prompt_key) for name, corpus in corpora.items()}
