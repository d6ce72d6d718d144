"""From a checkpoint to a Hugging Face folder: choose the format, write, verify, publish."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline import log
from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.manifest import MANIFEST_FILE, check_file
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.run import RunConfig
from pipeline.conversion import Precision, offered_formats
from pipeline.conversion.core_formats import EXPANSION
from pipeline.conversion.export_format import ExportFormat
from pipeline.conversion.formats import check_format, check_tp_size
from pipeline.conversion.probe_texts import MakeProbe
from pipeline.conversion.request import Conversion
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.corpora import heldout_source, keys_of
from pipeline.data.tokenize.input_files import is_text
from pipeline.errors import CheckpointError, ConversionError
from pipeline.files.folders import check_replaceable, holds
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object
from pipeline.files.threads import in_threads
from pipeline.gating.folder import GATE_FOLDER, GATE_RECORD, open_gate
from pipeline.hf.remote_code.modeling_difference import DifferenceForCausalLM
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.hf.served_tokenizer import texts_of
from pipeline.hf.write import code_files, dtype_name
from pipeline.model.bases import runnable_types, unsupported_in
from pipeline.model.spec import DecoderSpec

HF_FOLDER = "hf"
"""Where a run's export is, in the run's folder."""
TYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_PROJECT = __name__.partition(".")[0]
"""The package of our own formats."""
_logger = log.get_logger(__name__)


def latest_conversion(config: RunConfig) -> Conversion:
    """The conversion of a run's newest checkpoint, with the gate of its section `gate`, into its
    own `hf` folder.

    Raises:
        CheckpointError: the run has saved none, or `latest` names none.
    """
    gate: Path | None = None
    if config.gate is not None:
        gate = config.folder / GATE_FOLDER
    vocabulary: Path | None = None
    if config.vocabulary is not None:
        vocabulary = config.vocabulary.folder
    return Conversion(
        checkpoint=newest_checkpoint(config),
        base=config.base,
        output=config.folder / HF_FOLDER,
        gate=gate,
        vocabulary=vocabulary,
        run=config,
    )


def run_sources(config: RunConfig) -> tuple[dict[str, list[str]], dict[str, Keys]]:
    """The texts that an export is verified on: each corpus's held-out files, or else its inputs.

    Left out are self-generated corpora, which have no files of text, and corpora that were imported
    as tokens.

    Returns:
        The files of each corpus, and the keys by which documents are read from them.
    """
    inputs: dict[str, list[str]] = {}
    keys: dict[str, Keys] = {}
    for name in config.data.corpora:
        source = heldout_source(config.data, name)
        if source.sample is None and is_text(source.input):
            inputs[name] = source.input
            keys[name] = keys_of(
                source, config.tokenizer, config.data.chat_date, config.data.chat_start
            )
    return inputs, keys


def run_texts(config: RunConfig) -> Iterator[str]:
    """The beginnings of the texts that an export is verified on, to compare tokenizers."""
    sources, keys = run_sources(config)
    return texts_of(sources, keys)


def convert(conversion: Conversion, make_probe: MakeProbe, texts: Iterable[str] = ()) -> bool:
    """Writes `conversion.output`, verified, completely or not at all.

    Args:
        conversion: the request.
        make_probe: makes the texts on which the logits of export and trained model are compared.
        texts: the texts on which the ids of the export's and of the run's tokenizer are compared.

    Returns:
        Whether the folder was written. False if an equal request, by the same code, wrote it
        earlier.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the gate is not fitted for it.
        BaseModelError: the base is missing or damaged, or another one than the checkpoint's.
        OutputError: the output holds something else.
        ConversionError: the format cannot express the model or an option, or the export differs
            from the trained model, or its tokenizer from the run's.
    """
    output = conversion.output
    if conversion.format == EXPANSION.name and conversion.gate is not None:
        _logger.info(
            "%s: written without the gate; a run that trains this expansion further fits a gate "
            "of its own",
            output,
        )
        conversion = replace(conversion, gate=None)
    model = _open(conversion)
    format = check_format(model, conversion.format)
    _check_options(conversion, model, format)
    conversion = replace(conversion, options=format.settled_options(conversion, model))
    request = _request(conversion, format, model)
    kind = format.kind
    if holds(kind, output) and _is_made_for(request, output / kind.record):
        fault = format.fault_of(output)
        if fault is None:
            return False
        _logger.info("converting again: %s", fault)
    check_replaceable(output, kind, overwrite=conversion.overwrite)
    # Before anything is written: an export of a damaged checkpoint would be a wrong model.
    check = partial(check_file, model.manifest, conversion.checkpoint)
    for _ in in_threads(check, model.manifest.files):
        pass

    # The folder may be published: no path of this machine is recorded in it.
    record = {
        **request,
        "run": model.manifest.run.name,
        "checkpoint": model.checkpoint.name,
        "position": model.manifest.position.model_dump(),
        "method": model.manifest.run.method,
        "base_precision": model.manifest.run.base_precision,
    }
    format.publish(conversion, model, record, make_probe, list(texts))
    return True


def _request(conversion: Conversion, format: ExportFormat, model: TrainedModel) -> dict[str, Any]:
    """What identifies a conversion: the hashes of its inputs, its options, and the hashes of the
    code that exports carry, and of the format's if another distribution has it.

    An export is made again where any of these changed. The base's weights are those that the
    checkpoint's manifest names.
    """
    gate_hash = None
    if conversion.gate is not None:
        gate_hash = file_hash(conversion.gate / GATE_RECORD)
    code: dict[str, str] = {}
    for exported in (ScaleForCausalLM, HostedScaleForCausalLM, DifferenceForCausalLM):
        for file in code_files(exported):
            code[file.name] = file_hash(file)
    code |= _hashes_of_extension(format)
    return {
        "checkpoint_manifest": file_hash(conversion.checkpoint / MANIFEST_FILE),
        "gate": gate_hash,
        "read_files": dict(format.read_files(model)),
        "asked_format": conversion.format,
        "asked_dtype": str(conversion.dtype),
        "asked_purpose": conversion.purpose,
        "asked_options": dict(format.identity(conversion.options)),
        "asked_tp_size": conversion.tp_size,
        "code": code,
    }


def _hashes_of_extension(format: ExportFormat) -> dict[str, str]:
    """The hashes of the modules of a format that another distribution has, with those of its base
    classes; by the modules' names, as no path is recorded. None for our own formats.

    Whoever writes a format converts again after each change.
    """
    hashes: dict[str, str] = {}
    for kind in type(format).__mro__:
        module = kind.__module__
        source = getattr(sys.modules[module], "__file__", None)
        if issubclass(kind, ExportFormat) and module.partition(".")[0] != _PROJECT and source:
            hashes[module] = file_hash(Path(source))
    return hashes


def _is_made_for(request: Mapping[str, Any], record: Path) -> bool:
    """Whether the record of an earlier conversion is of an equal request."""
    made = read_object(record, ConversionError)
    return all(made.get(key) == value for key, value in request.items())


def _open(conversion: Conversion) -> TrainedModel:
    """The trained model, with its gate and its vocabulary."""
    model = open_trained(conversion.checkpoint, conversion.base)
    if conversion.vocabulary is not None:
        model = model.with_tokenizer(conversion.vocabulary)
    if conversion.gate is None:
        return model
    gate, record = open_gate(conversion.gate)
    fitted_for = record.request.get("checkpoint_manifest")
    if fitted_for != file_hash(model.checkpoint / MANIFEST_FILE):
        raise CheckpointError(
            f"{conversion.gate}: fitted for another checkpoint than {model.checkpoint}; run the "
            "stage gate (scale-cpt gate) again"
        )
    return replace(model, gate=gate)


def _check_options(conversion: Conversion, model: TrainedModel, written: ExportFormat) -> None:
    """Checks that each option has an effect in the format that is written; --for may have none.

    Raises:
        ConversionError: an option has none, or the base does not run in the type that is asked for.
    """
    check_tp_size(model, written, conversion.tp_size)
    if conversion.dtype is not None and not written.has_dtype:
        raise ConversionError(
            f"{model.checkpoint}: --dtype chooses the type of an export's weights, found format "
            f"{written.name}, which has one type; leave it out"
        )
    if conversion.purpose != "serving" and not written.has_purpose:
        # No fault: the folder is right for this purpose too, and `auto` may have chosen its format.
        _logger.info(
            "--for %s: the format %s is the same for serving and training",
            conversion.purpose,
            written.name,
        )
    for name, offered in offered_formats().items():
        asked = [option.flag for option in offered.options if option.name in conversion.options]
        if asked and name != written.name:
            raise ConversionError(
                f"{model.checkpoint}: {' and '.join(asked)} belongs to the format {name}, found "
                f"format {written.name} of method {model.settings.name}; leave it out"
            )
    if conversion.dtype is not None:
        check_written_dtype(model.base.spec, conversion.dtype)


def check_written_dtype(spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Checks that an export of this base runs in the type that is asked for.

    Raises:
        ConversionError: it does not.
    """
    reason = unsupported_in(spec, dtype)
    if reason is None:
        return
    base = f"{spec.noun} (model_type {spec.family}), {reason}"
    found = dtype_name(dtype)
    allowed = runnable_types(spec)
    if not allowed:
        raise ConversionError(
            f"--dtype: no type of numbers fits {base}, found {found}; take another base"
        )
    raise ConversionError(
        f"--dtype: expected {' or '.join(allowed)} with {base}, found {found}; leave --dtype out"
    )
