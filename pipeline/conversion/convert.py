"""From a checkpoint to a Hugging Face folder: choose the format, write, verify, publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from pipeline import log
from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.manifest import MANIFEST_FILE, check_file
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.method import FullFineTuning, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.conversion import Format, Precision, Purpose
from pipeline.conversion.adapter import load_with_adapter, write_adapter
from pipeline.conversion.difference import (
    FOUR_BITS,
    DifferenceReport,
    Packing,
    describe_difference,
    stored_sizes,
    verify_difference,
)
from pipeline.conversion.formats import check_format, check_tp_size, choose_export
from pipeline.conversion.model_card import model_card, on_stored_scale
from pipeline.conversion.probe_texts import MakeProbe, Probe
from pipeline.conversion.verify import Loader, Report, describe, verify
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.corpora import heldout_source, keys_of
from pipeline.data.tokenize.input_files import is_text
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import CheckpointError, ConversionError
from pipeline.expansion_folder import EXPANSION, write_expansion
from pipeline.files.folders import FolderKind, check_replaceable, holds, published_folder
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object, write_json
from pipeline.files.publishing import write_text
from pipeline.files.threads import in_threads
from pipeline.gating.folder import GATE_FOLDER, GATE_RECORD, open_gate
from pipeline.hf.base_card import CARD
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.modeling_difference import DifferenceForCausalLM
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.hf.served_tokenizer import check_export, texts_of, warn_of_base
from pipeline.hf.write import Export, code_files, dtype_name, write_hf_folder
from pipeline.hosted.bases import computed_dtype, runnable_types, unsupported_in
from pipeline.hub import source_of
from pipeline.methods.own_tokens import frequent_tokens
from pipeline.model.architecture import architecture_of
from pipeline.model.from_hf import RESIDUAL_KEY, read_spec
from pipeline.model.spec import DecoderSpec

HF_FOLDER = "hf"
"""Where a run's export is, in the run's folder."""
RECORD = "conversion.json"
MIN_COUNT = 20
"""Default of --min-count: how often a token must occur in the corpora of role new to have rows of
its own in a difference."""
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

    Attributes:
        checkpoint: the folder of the checkpoint.
        base: the folder of its base.
        output: the folder to write.
        format: what to write; `auto` is `merged` where that can express the model.
        dtype: the type of the weights; None: the base's own, but fp32 with a hosted base of which
            transformers keeps parameters in fp32.
        gate: the folder of the run's gate; None: the export has none.
        vocabulary: the folder of the extended vocabulary; None: where it was in training.
        overwrite: whether anything at `output` may be replaced.
        purpose: what the export is for; it decides the scale at which a merged export stores added
            channels.
        packing: how the format `difference` stores the difference.
        packing_is_asked: whether the user chose `packing`, so that other formats are refused.
        tp_size: how many GPUs a merged export of a widened model is padded for, with zeros.
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
    packing: Packing = FOUR_BITS
    packing_is_asked: bool = False
    tp_size: int = 1


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
    )


def packing_of(
    config: RunConfig | None, bits: int | None = None, min_count: int | None = None
) -> Packing:
    """How the format `difference` stores the difference of a run.

    Args:
        config: the run, whose corpora of role new decide which tokens have rows of their own; None:
            all tokens have them.
        bits: the bits of an element of a matrix within layers; None: 4.
        min_count: how often a token must occur in these corpora to have rows of its own; None: 20;
            0: all tokens have rows.

    Raises:
        ConfigError: no token occurs `min_count` times.
        DataError: a corpus is not tokenized, or not by the run's tokenizer.
    """
    packing = FOUR_BITS
    if bits is not None:
        packing = Packing(bits)
    if min_count is None:
        min_count = MIN_COUNT
    if config is None or config.gate is None or not isinstance(config.method, FullFineTuning):
        # No run, or a run that cannot be exported in this format: nothing is counted.
        return packing
    if min_count == 0:
        return packing
    own_tokens = frequent_tokens(
        config,
        read_spec(config.base).vocab_size,
        min_count,
        setting="--min-count",
        tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint,
    )
    return replace(packing, own_tokens=own_tokens)


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
    is_expansion = conversion.format == "expansion"
    if is_expansion and conversion.gate is not None:
        _logger.info(
            "%s: written without the gate; a run that trains this expansion further fits a gate "
            "of its own",
            output,
        )
        conversion = replace(conversion, gate=None)
    model = _open(conversion)
    _check_options(conversion, model)
    request = _request(conversion)
    kind = EXPANSION if is_expansion else EXPORT
    if holds(kind, output) and _is_made_for(request, output / kind.record):
        return False
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
    if is_expansion:
        _write_expansion(conversion, model, record)
    else:
        _write_export(conversion, model, make_probe, list(texts), record)
    return True


def _request(conversion: Conversion) -> dict[str, Any]:
    """What identifies a conversion: the hashes of its inputs, its options, and the hashes of the
    code that exports carry.

    An export is made again where any of these changed.
    """
    gate_hash = None
    if conversion.gate is not None:
        gate_hash = file_hash(conversion.gate / GATE_RECORD)
    code: dict[str, str] = {}
    for model in (ScaleForCausalLM, HostedScaleForCausalLM, DifferenceForCausalLM):
        for file in code_files(model):
            code[file.name] = file_hash(file)
    return {
        "checkpoint_manifest": file_hash(conversion.checkpoint / MANIFEST_FILE),
        "gate": gate_hash,
        "asked_format": conversion.format,
        "asked_dtype": str(conversion.dtype),
        "asked_purpose": conversion.purpose,
        "asked_packing": conversion.packing.identity,
        "asked_tp_size": conversion.tp_size,
        "code": code,
    }


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


def _check_options(conversion: Conversion, model: TrainedModel) -> None:
    """Checks that each option has an effect in the format that is written.

    Raises:
        ConversionError: an option has none, that format cannot express the model, or the base does
            not run in the type that is asked for.
    """
    written = check_format(model, conversion.format)
    check_tp_size(model, written, conversion.tp_size)
    has_purpose = conversion.dtype is not None or conversion.purpose != "serving"
    if has_purpose and written == "expansion":
        raise ConversionError(
            f"{model.checkpoint}: --dtype and --for are options of exports, found format "
            "expansion, which stores the added blocks as they were trained; leave them out"
        )
    if conversion.packing_is_asked and written != "difference":
        raise ConversionError(
            f"{model.checkpoint}: --bits and --min-count are options of the format difference, "
            f"found format {written} of method {model.settings.name}; leave them out"
        )
    if conversion.dtype is not None:
        check_written_dtype(model.base.spec, conversion.dtype)


def check_written_dtype(spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Checks that an export of this base runs in the type that is asked for.

    Raises:
        ConversionError: the base is hosted, and does not; see `dtype_unsupported_reason`.
    """
    reason = unsupported_in(spec, dtype)
    if reason is None:
        return
    base = f"a hosted base (model_type {spec.family}), {reason}"
    found = dtype_name(dtype)
    allowed = runnable_types(spec)
    if not allowed:
        raise ConversionError(
            f"--dtype: no type of numbers fits {base}, found {found}; take another base"
        )
    raise ConversionError(
        f"--dtype: expected {' or '.join(allowed)} with {base}, found {found}; leave --dtype out"
    )


def _write_expansion(
    conversion: Conversion, model: TrainedModel, record: Mapping[str, Any]
) -> None:
    """Writes the blocks that were added to the base: another run can start from them."""
    assert isinstance(model.settings, ScaleMethod), "checked"
    run = model.manifest.run
    origin = {
        **record,
        # The entries that `upscale` writes, too: training compares them with the run's.
        "base": source_of(model.base.path) or model.base.path.name,
        "base_hashes": model.base.hashes,
        "base_architecture": architecture_of(model.base.spec),
        "method": model.settings.of_initial_expansion,
        "seed": run.seed,
        "tokenizer": run.tokenizer_fingerprint,
        "own_tokens": run.own_tokens,
    }
    names = [name for name, _ in model.stored.named_parameters() if name in model.trained]
    # A generator: one tensor is in memory at a time.
    tensors = ((name, model.read_stored(name)) for name in names)
    write_expansion(conversion.output, tensors, origin, overwrite=conversion.overwrite)


def _write_export(
    conversion: Conversion,
    model: TrainedModel,
    make_probe: MakeProbe,
    texts: Sequence[str],
    record: Mapping[str, Any],
) -> None:
    """Writes a Hugging Face folder, and verifies it before it appears."""
    run = model.manifest.run
    output = conversion.output
    tokenizer = load_tokenizer(model.tokenizer)
    if run.vocabulary is not None and tokenizer.fingerprint != run.tokenizer_fingerprint:
        raise ConversionError(
            f"{model.tokenizer}: holds another tokenizer than the one that {model.checkpoint} was "
            "trained with; put that one back, or name its folder as --vocabulary"
        )
    is_adapter = conversion.format == "peft"
    dtype = conversion.dtype
    if dtype is None:
        # Adapters are trained and stored in fp32; a server casts them to the type of its base.
        dtype = torch.float32 if is_adapter else computed_dtype(model.base)
    export = choose_export(
        model,
        conversion.format,
        dtype,
        conversion.purpose,
        conversion.tp_size,
        conversion.packing,
    )
    if conversion.purpose == "training" and export.format != "merged":
        _logger.info(
            "--for training has an effect on merged folders only: the format %s is the same for "
            "serving and training",
            export.format,
        )
    _logger.info("writing %s, format %s, %s", output, export.format, dtype_name(dtype))
    # The folder appears under its name at the end of the block, after its verification.
    with published_folder(output, EXPORT, overwrite=conversion.overwrite) as folder:
        load: Loader = load_hf_model
        if is_adapter:
            write_adapter(folder, export, model.base.path)
            load = partial(load_with_adapter, model.base.path)
        else:
            write_hf_folder(folder, export, model.base.path, tokenizer=model.tokenizer)
            check_export(folder, tokenizer, texts)
        warn_of_base(model.tokenizer, tokenizer, texts)
        report = _verified(model, export, folder, make_probe(model), load)
        write_json(folder / VERIFICATION, asdict(report))
        write_text(folder / CARD, model_card(model, export, report))
        written = {
            "format": EXPORT.format,
            **record,
            "written_format": export.format,
            "written_dtype": dtype_name(dtype),
        }
        if export.format == "difference":
            written["difference"] = stored_sizes(export)
        write_json(folder / RECORD, written)
    if isinstance(report, DifferenceReport):
        _logger.info("%s", describe_difference(report))
    else:
        _logger.info("%s", describe(report))
    spec = model.base.spec
    is_untied = spec.tie_word_embeddings and export.config.get("tie_word_embeddings") is False
    # In the export of a hosted base transformers ties the two, whatever its config.json says.
    if is_untied and spec.is_native:
        _logger.info(
            "%s: embedding and output are two matrices now; the base ties them (%s values more)",
            output,
            f"{prod(model.shapes['embedding.base.weight']):,}",
        )
    for sentence in on_stored_scale(export):
        _logger.info("%s: %s", output, sentence)


def _verified(
    model: TrainedModel, export: Export, folder: Path, probe: Probe, load: Loader
) -> Report:
    """The comparison of the export in `folder` with the trained model."""
    if export.format == "difference":
        return verify_difference(model, folder, probe, export.dtype)
    stored_scale: float | None = None
    residual = export.config.get(RESIDUAL_KEY)
    if residual is not None:
        stored_scale = residual["scale"]
    return verify(model, folder, probe, export.dtype, stored_scale, load)
