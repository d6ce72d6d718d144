"""The formats of the core: merged, scale, expansion and peft.

The contents of each are in a module of its own: `merged`, `scale_export` and `adapter`. A kind of
bases may have an export of its own in the format `scale` (`BaseKind.scale_export`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.manifest import SAME_MODEL
from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Method, ScaleMethod
from pipeline.conversion.adapter import (
    adapter_export,
    adapter_unsupported_reason,
    load_with_adapter,
    write_adapter,
)
from pipeline.conversion.export_format import ExportFormat, HfFormat
from pipeline.conversion.merged import merged_export
from pipeline.conversion.model_card import CardSections, base_hub_name
from pipeline.conversion.probe_texts import MakeProbe
from pipeline.conversion.request import Conversion
from pipeline.conversion.scale_export import scale_export
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import CheckpointError
from pipeline.expansion_folder import EXPANSION as EXPANSION_FOLDER
from pipeline.expansion_folder import open_expansion, write_expansion
from pipeline.extension import load_object
from pipeline.hf.write import Export
from pipeline.hub import source_of
from pipeline.model.architecture import architecture_of
from pipeline.model.base_folder import BaseFolder
from pipeline.model.bases import kind_of
from pipeline.model.merged_model import merged_unsupported_reason
from pipeline.model.spec import DecoderSpec
from pipeline.open_weights import UNGATED_REASON
from pipeline.scale.plan import ExpansionPlan, added_widths


def unwidened_reason(settings: Method, plan: ExpansionPlan | None) -> str | None:
    """Why a model has no expansion to write; None if it has one."""
    if added_widths(plan) is None:
        return f"method {settings.name} widens nothing"
    return None


class Merged(HfFormat):
    """A model of the base's own class, which any server loads with no code of ours."""

    name = "merged"
    chosen_by_auto = True
    has_purpose = True

    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        if plan is None and gated:
            return "a gate decides for each token (--without-gate leaves it out)"
        return merged_unsupported_reason(plan, spec, gated=gated)

    def contents(self, model: TrainedModel, dtype: torch.dtype, conversion: Conversion) -> Export:
        return merged_export(model, dtype, conversion.purpose, conversion.tp_size)


class Scale(HfFormat):
    """The tensors as they were trained, and the code that runs them."""

    name = "scale"
    chosen_by_auto = True

    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        unwidened = unwidened_reason(settings, plan)
        if plan is None or plan.own is None:
            return unwidened
        if gated:
            # Open weights need no widths: LoRA under a gate has none.
            return None
        if unwidened is not None and plan.own.tokens is None:
            return f"{unwidened}, and has no gate"
        return UNGATED_REASON

    def contents(self, model: TrainedModel, dtype: torch.dtype, conversion: Conversion) -> Export:
        place = kind_of(model.base.spec).scale_export
        make = scale_export if place is None else load_object(place)
        export: Export = make(model, dtype)
        return export


class Peft(HfFormat):
    """The trained factors of LoRA, as an adapter that PEFT and vLLM load."""

    name = "peft"

    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        return adapter_unsupported_reason(settings, spec, gated=gated)

    def dtype(self, base: BaseFolder) -> torch.dtype:
        # Adapters are trained and stored in fp32; a server casts them to the type of its base.
        return torch.float32

    def contents(self, model: TrainedModel, dtype: torch.dtype, conversion: Conversion) -> Export:
        return adapter_export(model, dtype, base_hub_name(model))

    def write(
        self,
        folder: Path,
        export: Export,
        model: TrainedModel,
        tokenizer: Tokenizer,
        texts: Sequence[str],
    ) -> None:
        # The tokenizer is the base's: the folder holds none.
        write_adapter(folder, export, model.base.path)

    def load(self, model: TrainedModel, folder: Path, dtype: torch.dtype) -> Any:
        return load_with_adapter(model.base.path, folder, dtype)

    def card_sections(self, model: TrainedModel, export: Export) -> CardSections:
        def loading(folder: str, base: str) -> list[str]:
            return [
                "from transformers import AutoModelForCausalLM, AutoTokenizer",
                "from peft import PeftModel",
                "",
                folder,
                f'base = "{base}"',
                "model = PeftModel.from_pretrained("
                "AutoModelForCausalLM.from_pretrained(base), folder)",
                "tokenizer = AutoTokenizer.from_pretrained(base)",
            ]

        return CardSections(relation="adapter", library="peft", loading=loading)


class Expansion(ExportFormat):
    """What SCALE added to the base: another run can start from it."""

    name = "expansion"
    kind = EXPANSION_FOLDER

    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        return unwidened_reason(settings, plan)

    def fault_of(self, folder: Path) -> str | None:
        try:
            open_expansion(folder).check_files()
        except CheckpointError as fault:
            return str(fault)
        return None

    def publish(
        self,
        conversion: Conversion,
        model: TrainedModel,
        record: Mapping[str, Any],
        make_probe: MakeProbe,
        texts: Sequence[str],
    ) -> None:
        assert isinstance(model.settings, ScaleMethod), "checked"
        run = model.manifest.run
        origin = {
            **record,
            # The entries that `upscale` writes, too: training compares them with the run's.
            "base": source_of(model.base.path) or model.base.path.name,
            "base_hashes": model.base.hashes,
            "base_architecture": architecture_of(model.base.spec),
            "method": model.settings.initial_expansion_settings,
            "seed": run.seed,
            "trained_as": run.model_dump(include=set(SAME_MODEL)),
            "tokenizer": run.tokenizer_fingerprint,
            "own_tokens": run.own_tokens,
        }
        names = [name for name, _ in model.stored.named_parameters() if name in model.trained]
        # A generator: one tensor is in memory at a time.
        tensors = ((name, model.read_stored(name)) for name in names)
        write_expansion(conversion.output, tensors, origin, overwrite=conversion.overwrite)


MERGED = Merged()
SCALE = Scale()
PEFT = Peft()
EXPANSION = Expansion()
