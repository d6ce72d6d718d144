"""What a format of exports is: one way in which a trained model leaves this package.

`ExportFormat` is any folder, and `HfFormat` one that transformers or PEFT loads. A format is named
and offered in `pipeline.conversion`, or by an extension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from pipeline import log
from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Method
from pipeline.conversion.model_card import CardSections, model_card, on_stored_scale
from pipeline.conversion.probe_texts import MakeProbe, Probe
from pipeline.conversion.request import Conversion
from pipeline.conversion.verify import Report, describe, verify
from pipeline.conversion.written_files import changed_file, describe_files
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import ConversionError
from pipeline.files.folders import FolderKind, published_folder
from pipeline.files.json_files import read_object, with_named_floats, write_json
from pipeline.files.publishing import write_text
from pipeline.hf.base_card import CARD
from pipeline.hf.base_files import hashes_of_read_files
from pipeline.hf.folder_kinds import EXPORT
from pipeline.hf.load import load_hf_model
from pipeline.hf.served_tokenizer import check_export, warn_of_base
from pipeline.hf.write import Export, dtype_name, write_hf_folder
from pipeline.model.base_folder import BaseFolder
from pipeline.model.bases import computed_dtype
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan

VERIFICATION = "verification.json"
_logger = log.get_logger(__name__)


class ExportFormat(ABC):
    """A format of exports.

    Attributes:
        name: its name on the command line and in records.
        kind: the kind of folder that it writes.
        chosen_by_auto: whether `--format auto` takes it where it can express the model.
        has_dtype: whether `--dtype` has an effect: the weights are written in a type that may be
            chosen.
        has_purpose: whether `--for` has an effect: what is written for training differs from what
            is written for serving.
    """

    name: str
    kind: FolderKind = EXPORT
    chosen_by_auto: bool = False
    has_dtype: bool = False
    has_purpose: bool = False

    @abstractmethod
    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        """Why it cannot express a trained model; None if it can.

        Args:
            settings: the section `method` of the run.
            plan: how the base was widened; None if it was not.
            spec: the base's architecture.
            gated: whether the model has a gate.
        """

    def settled_options(self, conversion: Conversion, model: TrainedModel) -> Mapping[str, Any]:
        """`Conversion.options` with the format's defaults, and what follows from the run.

        Raises:
            UserError: an option does not fit the run.
        """
        return conversion.options

    def identity(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What settled options are recorded as: the folder is written again where it changed.

        The values are those of JSON.
        """
        return {}

    def read_files(self, model: TrainedModel) -> Mapping[str, str]:
        """The hashes of the files, but for weights, that it takes from the folders of the base and
        of the tokenizer: the folder is written again where one changed."""
        return {}

    @abstractmethod
    def fault_of(self, folder: Path) -> str | None:
        """What is not as it was written in a folder of this format, as a clause; None: nothing."""

    @abstractmethod
    def publish(
        self,
        conversion: Conversion,
        model: TrainedModel,
        record: Mapping[str, Any],
        make_probe: MakeProbe,
        texts: Sequence[str],
    ) -> None:
        """Writes `conversion.output`, verified, completely or not at all.

        Args:
            conversion: the request, its options settled.
            model: the trained model.
            record: what identifies the conversion, for the folder's record.
            make_probe: makes the texts on which logits are compared.
            texts: the texts on which the ids of two tokenizers are compared.

        Raises:
            UserError: the model, or an option, does not fit after all, or what was written differs
                from the trained model.
        """


class HfFormat(ExportFormat):
    """A folder that transformers loads. It appears once its logits are the trained model's."""

    has_dtype = True

    def publish(
        self,
        conversion: Conversion,
        model: TrainedModel,
        record: Mapping[str, Any],
        make_probe: MakeProbe,
        texts: Sequence[str],
    ) -> None:
        run = model.manifest.run
        output = conversion.output
        tokenizer = load_tokenizer(model.tokenizer)
        if run.vocabulary is not None and tokenizer.fingerprint != run.tokenizer_fingerprint:
            raise ConversionError(
                f"{model.tokenizer}: holds another tokenizer than the one that {model.checkpoint} "
                "was trained with; put that one back, or name its folder as --vocabulary"
            )
        dtype = conversion.dtype or self.dtype(model.base)
        # Contents of another format's making have this one's name all the same.
        export = replace(self.contents(model, dtype, conversion), format=self.name)
        _logger.info("writing %s, format %s, %s", output, export.format, dtype_name(dtype))
        # The folder appears under its name at the end of the block, after its verification.
        with published_folder(output, EXPORT, overwrite=conversion.overwrite) as folder:
            self.write(folder, export, model, tokenizer, texts)
            warn_of_base(model.tokenizer, tokenizer, texts)
            report = self.verified(model, export, folder, make_probe(model))
            write_json(folder / VERIFICATION, asdict(report))
            sections = self.card_sections(model, export)
            write_text(folder / CARD, model_card(model, export, report, sections))
            written = {
                "format": EXPORT.format,
                **record,
                "written_format": export.format,
                "written_dtype": dtype_name(dtype),
                **self.record(export),
                # The card is left out: `scale-cpt evaluate` and the user add to it.
                "files": describe_files(folder, leaving_out=CARD),
            }
            write_json(folder / EXPORT.record, with_named_floats(written))
        _logger.info("%s", self.describe(report))
        _log_stored_form(output, model, export)

    def dtype(self, base: BaseFolder) -> torch.dtype:
        """The type of the weights where none is asked for."""
        return computed_dtype(base)

    def read_files(self, model: TrainedModel) -> Mapping[str, str]:
        return hashes_of_read_files(model.base.path, model.tokenizer)

    def fault_of(self, folder: Path) -> str | None:
        return changed_file(
            folder, read_object(folder / EXPORT.record, ConversionError).get("files")
        )

    @abstractmethod
    def contents(self, model: TrainedModel, dtype: torch.dtype, conversion: Conversion) -> Export:
        """The contents of the folder.

        Raises:
            UserError: the model, or an option, does not fit after all.
        """

    def write(
        self,
        folder: Path,
        export: Export,
        model: TrainedModel,
        tokenizer: Tokenizer,
        texts: Sequence[str],
    ) -> None:
        """Writes the folder, which exists, and compares its tokenizer's ids on `texts`.

        Raises:
            UserError: a file of the base cannot be read, or the ids differ.
        """
        write_hf_folder(folder, export, model.base.path, tokenizer=model.tokenizer)
        check_export(folder, tokenizer, texts)

    def load(self, model: TrainedModel, folder: Path, dtype: torch.dtype) -> Any:
        """The written folder, as its users load it."""
        return load_hf_model(folder, dtype)

    def verified(self, model: TrainedModel, export: Export, folder: Path, probe: Probe) -> Report:
        """The comparison of the written folder with the trained model.

        Raises:
            ConversionError: they differ by more than the format allows.
        """

        def load(path: Path, dtype: torch.dtype) -> Any:
            return self.load(model, path, dtype)

        return verify(model, folder, probe, export.dtype, export.stored_scale, load)

    def describe(self, report: Report) -> str:
        """The result of the verification, in one line for the log."""
        return describe(report)

    def record(self, export: Export) -> Mapping[str, Any]:
        """Entries of the export's record, beside those of every format."""
        return {}

    def card_sections(self, model: TrainedModel, export: Export) -> CardSections:
        """What the model card says of this format alone."""
        return CardSections()


def _log_stored_form(output: Path, model: TrainedModel, export: Export) -> None:
    """Says where the export's tensors are not stored as the base's or the run's are."""
    spec = model.base.spec
    is_untied = spec.tie_word_embeddings and export.config.get("tie_word_embeddings") is False
    # Where transformers computes the base, it ties the two in the export, whatever its config.json
    # says.
    if is_untied and spec.is_native:
        _logger.info(
            "%s: embedding and output are two matrices now; the base ties them (%s values more)",
            output,
            f"{prod(model.shapes['embedding.base.weight']):,}",
        )
    for sentence in on_stored_scale(export):
        _logger.info("%s: %s", output, sentence)
