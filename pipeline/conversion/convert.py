"""From a checkpoint to a Hugging Face folder: choose the format, write, verify, publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline import log
from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.manifest import MANIFEST_FILE, check_file
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.conversion import Format, Precision, Purpose
from pipeline.conversion.formats import check_format, choose_export
from pipeline.conversion.model_card import CARD, model_card, on_stored_scale
from pipeline.conversion.verify import MakeProbe, describe, verify
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.corpora import heldout_source, keys_of
from pipeline.data.tokenize.units import is_text
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import CheckpointError, ConversionError
from pipeline.expansion_folder import EXPANSION, write_expansion
from pipeline.files import (
    FolderKind,
    check_replaceable,
    file_hash,
    holds,
    in_threads,
    published_folder,
    read_object,
    write_json,
    write_text,
)
from pipeline.gating.folder import GATE_FOLDER, GATE_RECORD, open_gate
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.served_tokenizer import check_export, texts_of, warn_of_base
from pipeline.hf.write import code_files, dtype_name, write_hf_folder
from pipeline.model.architecture import architecture_of
from pipeline.model.from_hf import RESIDUAL_KEY

HF_FOLDER = "hf"
"""Where a run's export is, in the run's folder."""
RECORD = "conversion.json"
EXPORT = FolderKind("an export", RECORD, "scale-cpt export 1")
VERIFICATION = "verification.json"
TYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Conversion:
    """A request to convert a checkpoint.

    `dtype` None is the base's own type; `gate` the folder of its gate, if any. `vocabulary` is the folder of an
    extended vocabulary, by default where it was in training. `overwrite`: whatever is at `output` may be replaced.
    `purpose` says at what scale a merged export stores added channels.
    """

    checkpoint: Path
    base: Path
    output: Path
    format: Format = "auto"
    dtype: torch.dtype | None = None
    gate: Path | None = None
    vocabulary: Path | None = None
    overwrite: bool = False
    purpose: Purpose = "serving"


def latest_conversion(config: RunConfig) -> Conversion:
    """The conversion of a run's newest checkpoint, with the gate of its section `gate`, into its own `hf` folder.

    Raises CheckpointError: the run has saved none, or `latest` names none.
    """
    gate = config.folder / GATE_FOLDER if config.gate is not None else None
    vocabulary = None if config.vocabulary is None else config.vocabulary.folder
    output = config.folder / HF_FOLDER
    return Conversion(
        newest_checkpoint(config), config.base, output, gate=gate, vocabulary=vocabulary
    )


def run_sources(config: RunConfig) -> tuple[dict[str, list[str]], dict[str, Keys]]:
    """What an export is verified on: by corpus the held-out files, or else the inputs, and where documents are in them.

    Text that the base wrote has neither, and a corpus that came as tokens no text.
    """
    sources = {name: heldout_source(config.data, name) for name in config.data.corpora}
    texts = {name: of for name, of in sources.items() if of.sample is None and is_text(of.input)}
    keys = {
        name: keys_of(of, config.tokenizer, config.data.chat_date) for name, of in texts.items()
    }
    return {name: of.input for name, of in texts.items()}, keys


def run_texts(config: RunConfig) -> Iterator[str]:
    """The beginnings of the same text, on which tokenizers are compared."""
    return texts_of(*run_sources(config))


def convert(conversion: Conversion, make_probe: MakeProbe, texts: Iterable[str] = ()) -> bool:
    """Writes `conversion.output`, verified, completely or not at all. Tokenizers are compared on `texts`, too.

    Returns False, and writes nothing, if an equal request has already made it, with this version's code.

    Raises:
        CheckpointError, BaseModelError: what is read is missing, damaged or does not fit together, or there is to be a
            gate that is not fitted for this checkpoint.
        OutputError: the output holds something else.
        ConversionError: the format cannot express the model, or what was written differs from it, or its tokenizer from
            that of training.
    """
    output, is_expansion = conversion.output, conversion.format == "expansion"
    if is_expansion and conversion.gate is not None:
        _logger.info(
            "%s: without the gate; a run that trains this expansion further fits its own", output
        )
        conversion = replace(conversion, gate=None)
    model = _open(conversion)
    request = {
        "checkpoint_manifest": file_hash(conversion.checkpoint / MANIFEST_FILE),
        "gate": None if conversion.gate is None else file_hash(conversion.gate / GATE_RECORD),
        "asked_format": conversion.format,
        "asked_dtype": str(conversion.dtype),
        "asked_purpose": conversion.purpose,
        "code": {file.name: file_hash(file) for file in code_files(ScaleForCausalLM)},
    }
    kind = EXPANSION if is_expansion else EXPORT
    made = read_object(output / kind.record, ConversionError) if holds(kind, output) else {}
    if all(made.get(key) == value for key, value in request.items()):
        return False
    check_replaceable(output, kind, overwrite=conversion.overwrite)
    for _ in in_threads(
        partial(check_file, model.manifest, conversion.checkpoint), model.manifest.files
    ):
        pass
    run = model.manifest.run
    record = {
        **request,
        "checkpoint": str(model.checkpoint),
        "base": str(model.base.path),
        "position": model.manifest.position.model_dump(),
        "method": run.method,
        "base_precision": run.base_precision,
    }
    if not is_expansion:
        _write_export(conversion, model, make_probe, list(texts), record)
        return True
    check_format(model, "expansion")
    assert isinstance(model.settings, ScaleMethod), "checked"
    # The origin that `upscale` would write: a run can start from this folder.
    origin = {
        "base_hashes": model.base.hashes,
        "base_architecture": architecture_of(model.base.spec),
        "method": model.settings.of_initial_expansion,
        "seed": run.seed,
    }
    names = [name for name, _ in model.stored.named_parameters() if name in model.trained]
    tensors = ((name, model.read_stored(name)) for name in names)
    origin = {**record, **origin, "tokenizer": run.tokenizer_fingerprint}
    write_expansion(output, tensors, origin, overwrite=conversion.overwrite)
    return True


def _open(conversion: Conversion) -> TrainedModel:
    model = open_trained(conversion.checkpoint, conversion.base)
    if conversion.vocabulary is not None:
        model = model.with_tokenizer(conversion.vocabulary)
    if conversion.gate is None:
        return model
    gate, record = open_gate(conversion.gate)
    fitted_for = record.request.get("checkpoint_manifest")
    if fitted_for != file_hash(model.checkpoint / MANIFEST_FILE):
        raise CheckpointError(
            f"{conversion.gate}: fitted for another checkpoint than {model.checkpoint}; run the stage gate "
            "(scale-cpt gate) again"
        )
    return replace(model, gate=gate)


def _write_export(
    conversion: Conversion,
    model: TrainedModel,
    make_probe: MakeProbe,
    texts: Sequence[str],
    record: dict[str, Any],
) -> None:
    run, output = model.manifest.run, conversion.output
    tokenizer = load_tokenizer(model.tokenizer)
    if run.vocabulary is not None and tokenizer.fingerprint != run.tokenizer_fingerprint:
        raise ConversionError(
            f"{model.tokenizer}: holds another tokenizer than the one that {model.checkpoint} was trained with; put "
            "that one back, or name its folder as --vocabulary"
        )
    dtype = conversion.dtype or model.base.dtype
    export = choose_export(model, conversion.format, dtype, conversion.purpose)
    if conversion.purpose == "training" and export.format != "merged":
        _logger.info(
            "--for training is about merged folders: one in the format %s is alike for both",
            export.format,
        )
    _logger.info("writing %s, format %s, %s", output, export.format, dtype_name(dtype))
    with published_folder(output, EXPORT, overwrite=conversion.overwrite) as folder:
        write_hf_folder(folder, export, model.base.path, tokenizer=model.tokenizer)
        warn_of_base(model.tokenizer, tokenizer, texts)
        check_export(folder, tokenizer, texts)
        residual = export.config.get(RESIDUAL_KEY)
        report = verify(
            model, folder, make_probe(model), dtype, residual["scale"] if residual else None
        )
        write_json(folder / VERIFICATION, asdict(report))
        write_text(folder / CARD, model_card(model, export, report))
        written = {"written_format": export.format, "written_dtype": dtype_name(dtype)}
        write_json(folder / RECORD, {"format": EXPORT.format, **record, **written})
    _logger.info("%s", describe(report))
    for sentence in on_stored_scale(export):
        _logger.info("%s: %s", output, sentence)
