"""From a checkpoint to a folder that others can load: choose the format, write, verify, publish."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import log
from pipeline.checkpoint.folder import LATEST, latest_checkpoint
from pipeline.checkpoint.manifest import NAME as MANIFEST
from pipeline.checkpoint.manifest import check_file
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion import Format, Precision
from pipeline.conversion.formats import ordinary_export, peft_export, scale_export
from pipeline.conversion.hf_folder import Export, dtype_name, write_hf_folder
from pipeline.conversion.stock import stock_export, why_not_stock
from pipeline.conversion.trained_model import TrainedModel, open_trained
from pipeline.conversion.verify import Probe, verify
from pipeline.data.records import Keys
from pipeline.errors import CheckpointError, ConversionError
from pipeline.files import file_hash, published_folder, write_json
from pipeline.methods.scale import origin_of
from pipeline.scale.expansion import write_expansion

MakeProbe = Callable[[TrainedModel], Probe]
RECORD = "conversion.json"
VERIFICATION = "verification.json"
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What is asked for. `dtype` None takes the base's own."""

    checkpoint: Path
    base: Path
    output: Path
    format: Format = "auto"
    dtype: torch.dtype | None = None


def convert(asked: Conversion, make_probe: MakeProbe) -> bool:
    """Writes `asked.output`, verified, at once or not at all; returns False where it is there already.

    Raises:
        CheckpointError, BaseModelError: what is read is missing, damaged or does not fit together.
        ConversionError: the format cannot express the model, or what was written differs from it.
    """
    request = _request(asked)
    model = open_trained(asked.checkpoint, asked.base)
    if _is_done(asked.output, request):
        return False
    for name in model.manifest.files:
        check_file(model.manifest, asked.checkpoint, name)
    _refuse_foreign(asked.output)
    record = {**request, **_facts(model)}
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    if asked.format == "expansion":
        _write_expansion(asked.output, model, record)
        return True
    export = choose_export(model, asked.format, asked.dtype or model.base_dtype)
    _logger.info("writing %s, format %s, %s", asked.output, export.format, dtype_name(export.dtype))
    with published_folder(asked.output) as folder:
        write_hf_folder(folder, export, model.base.path)
        report = verify(model, folder, make_probe(model), export.dtype)
        write_json(folder / VERIFICATION, report.as_json())
        written = {"written_format": export.format, "written_dtype": dtype_name(export.dtype)}
        write_json(folder / RECORD, {**record, **written})
    _logger.info(
        "verified: largest logit difference %.2g, KL %.2g, same likeliest token %.2f %%",
        report.max_abs, report.kl, 100 * report.top1_agreement,
    )  # fmt: skip
    return True


def choose_export(model: TrainedModel, format: Format, dtype: torch.dtype) -> Export:
    """The folder's contents; `auto` takes the ordinary format wherever it can express the model.

    Raises:
        ConversionError: `format` cannot.
    """
    if format == "peft":
        return peft_export(model, dtype)
    if model.plan is None and format in ("auto", "stock"):
        return ordinary_export(model, dtype)
    if format == "stock" or (format == "auto" and why_not_stock(model) is None):
        return stock_export(model, dtype)
    return scale_export(model, dtype)


def _write_expansion(output: Path, model: TrainedModel, record: Mapping[str, Any]) -> None:
    if not isinstance(model.settings, ScaleMethod):
        raise ConversionError(f"{model.checkpoint}: method {model.settings.name} has no expansion; use --format stock")
    # The origin that `tools/upscale.py` would write: a run can start from this folder as from its own.
    origin = {
        **record,
        "base_hashes": model.base.hashes(),
        "method": origin_of(model.settings),
        "seed": model.manifest.run.seed,
    }
    write_expansion(output, ((name, model.read(name)) for name in model.shapes if name in model.trained), origin)


def _request(asked: Conversion) -> dict[str, Any]:
    """What decides the output; equal requests need no second conversion."""
    manifest = asked.checkpoint / MANIFEST
    return {
        "checkpoint_manifest": file_hash(manifest) if manifest.exists() else None,
        "asked_format": asked.format,
        "asked_dtype": None if asked.dtype is None else str(asked.dtype).removeprefix("torch."),
    }


def _facts(model: TrainedModel) -> dict[str, Any]:
    return {
        "checkpoint": str(model.checkpoint),
        "base": str(model.base.path),
        "position": model.manifest.position.model_dump(),
        "method": model.manifest.run.method,
    }


def _is_done(output: Path, request: Mapping[str, Any]) -> bool:
    for name in (RECORD, MANIFEST):
        try:
            found = json.loads((output / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and all(found.get(key) == value for key, value in request.items()):
            return True
    return False


def _refuse_foreign(output: Path) -> None:
    """A folder that we did not make is not replaced."""
    if output.exists() and any(output.iterdir()) and not any((output / name).exists() for name in (RECORD, MANIFEST)):
        raise ConversionError(f"{output}: is there already and was not made by a conversion; name another --output")


# --- Where a run of this project keeps what conversion needs --------------------------------------------------------

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
