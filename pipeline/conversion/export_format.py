"""What a format of exports is: one way in which a trained model leaves this package.

`ExportFormat` is any folder, and `HfFormat` one that transformers or PEFT loads. A format is named
and offered in `pipeline.conversion`, or by an extension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Method
from pipeline.conversion.model_card import CardSections
from pipeline.conversion.probe_texts import Probe
from pipeline.conversion.request import Conversion
from pipeline.conversion.verify import Report, describe, verify
from pipeline.conversion.written_files import changed_file
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import ConversionError
from pipeline.files.folders import FolderKind
from pipeline.files.json_files import read_object
from pipeline.hf.base_files import hashes_of_read_files
from pipeline.hf.folder_kinds import EXPORT
from pipeline.hf.load import load_hf_model
from pipeline.hf.served_tokenizer import check_export
from pipeline.hf.write import Export, write_hf_folder
from pipeline.model.base_folder import BaseFolder
from pipeline.model.bases import computed_dtype
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan


class ExportFormat(ABC):
    """A format of exports.

    Attributes:
        name: its name on the command line and in records.
        kind: the kind of folder that it writes.
        chosen_by_auto: whether `--format auto` takes it where it can express the model.
    """

    name: str
    kind: FolderKind = EXPORT
    chosen_by_auto: bool = False

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


class HfFormat(ExportFormat):
    """A folder that transformers loads. It appears once its logits are the trained model's."""

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
