"""Exports of what training added to the base's weights: W' − W (Ilharco et al. 2023, "Editing
models with task arithmetic").

The folder holds the differences alone, under transformers' names. Several of them, each times a
factor, can be added to one base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Method
from pipeline.conversion.export_format import HfFormat
from pipeline.conversion.merged import merged_export
from pipeline.conversion.model_card import CardSections
from pipeline.conversion.request import Conversion
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import ConversionError, faults_of_library
from pipeline.hf.base_files import copy_terms
from pipeline.hf.load import load_hf_model
from pipeline.hf.write import Export
from pipeline.model.base_folder import BaseFolder
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan

FILE = "task_vector.safetensors"


class TaskVector(HfFormat):
    """What training added to each of the base's tensors, in fp32."""

    name = "task_vector"

    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        if settings.name not in ("attention", "fft", "freeze"):
            return f"method {settings.name} adds weights beside the base's own"
        if gated:
            return "a gate decides for each token (--without-gate leaves it out)"
        if spec.new_tokens:
            return "an extended vocabulary: the base has no rows for its new tokens"
        return None

    def dtype(self, base: BaseFolder) -> torch.dtype:
        # In 16 bits small differences would be lost where they are added to a base in 16 bits.
        return torch.float32

    def contents(self, model: TrainedModel, dtype: torch.dtype, conversion: Conversion) -> Export:
        return merged_export(model, dtype)

    def write(
        self,
        folder: Path,
        export: Export,
        model: TrainedModel,
        tokenizer: Tokenizer,
        texts: Sequence[str],
    ) -> None:
        base = merged_export(replace(model, untrained=True), export.dtype)
        differences: dict[str, Tensor] = {}
        for trained, of_base in zip(export.tensors, base.tensors, strict=True):
            difference = trained.make().to(export.dtype) - of_base.make().to(export.dtype)
            if difference.any():
                differences[trained.name] = difference
        save_file(differences, folder / FILE, {"format": "pt"})
        copy_terms(folder, model.base.path)

    def load(self, model: TrainedModel, folder: Path, dtype: torch.dtype) -> Any:
        return load_with_task_vector(model.base.path, folder, dtype)

    def card_sections(self, model: TrainedModel, export: Export) -> CardSections:
        def loading(folder: str, base: str) -> list[str]:
            return [
                "from safetensors.torch import load_file",
                "from transformers import AutoModelForCausalLM",
                "",
                folder,
                f'model = AutoModelForCausalLM.from_pretrained("{base}")',
                "parameters = dict(model.named_parameters())",
                f'for name, difference in load_file(f"{{folder}}/{FILE}").items():',
                "    parameters[name].data += difference",
            ]

        return CardSections(relation="adapter", loading=loading)


@torch.no_grad()
def load_with_task_vector(base: Path, folder: Path, dtype: torch.dtype) -> Any:
    """The base as transformers loads it, with the differences in `folder` added.

    Raises:
        ConversionError: the file is damaged, or names a parameter that the base lacks.
    """
    file = folder / FILE
    with faults_of_library(f"{file}: damaged", ConversionError):
        differences = load_file(file)
    model = load_hf_model(base, dtype)
    parameters = dict(model.named_parameters())
    for name, difference in differences.items():
        if name not in parameters:
            raise ConversionError(f"{file}: {name} is no parameter of {base}")
        parameters[name].add_(difference.to(dtype))
    return model


TASK_VECTOR = TaskVector()
