"""The export format `difference`: when it can express a model, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import FullFineTuning, Method
from pipeline.conversion.export_format import HfFormat
from pipeline.conversion.model_card import CardSections
from pipeline.conversion.probe_texts import Probe
from pipeline.conversion.request import Conversion
from pipeline.conversion.verify import Report
from pipeline.data.tokenize.token_counts import frequent_tokens
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError
from pipeline.extensions.full_difference.difference import (
    Packing,
    difference_export,
    stored_sizes,
)
from pipeline.extensions.full_difference.verify import (
    DifferenceReport,
    describe_difference,
    verify_difference,
)
from pipeline.hf.write import Export
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan

MIN_COUNT = 20
"""Default of --min-count: how often a token must occur in the corpora of role new to have rows of
its own."""


class Difference(HfFormat):
    """The base, and in few bits how full fine-tuning changed it, for a model with a gate."""

    name = "difference"
    chosen_by_auto = True

    def unsupported_reason(
        self, settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
    ) -> str | None:
        if not isinstance(settings, FullFineTuning):
            return f"method {settings.name} does not train every parameter of the base"
        if not gated:
            return "tokens read the difference where a gate opens, and this model has no gate"
        if not spec.is_native:
            return "a base that runs by transformers' own code"
        if spec.mixture is not None:
            return (
                "a mixture of experts: transformers holds the experts in other tensors than its "
                "base"
            )
        if spec.new_tokens:
            return "an extended vocabulary: the base has no rows for its new tokens"
        if spec.residual is not None:
            return "a base that was widened before"
        return None

    def settled_options(self, conversion: Conversion, model: TrainedModel) -> Mapping[str, Any]:
        return {"packing": packing_of(conversion, model)}

    def identity(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        packing: Packing = options["packing"]
        return packing.identity

    def contents(self, model: TrainedModel, dtype: torch.dtype, conversion: Conversion) -> Export:
        return difference_export(model, dtype, conversion.options["packing"])

    def verified(self, model: TrainedModel, export: Export, folder: Path, probe: Probe) -> Report:
        return verify_difference(model, folder, probe, export.dtype)

    def describe(self, report: Report) -> str:
        assert isinstance(report, DifferenceReport), "made by `verified`"
        return describe_difference(report)

    def record(self, export: Export) -> Mapping[str, Any]:
        return {"difference": stored_sizes(export)}

    def card_sections(self, model: TrainedModel, export: Export) -> CardSections:
        bits = export.config["bits"]
        return CardSections(
            settings={"difference": f"{bits} bits an element of a matrix"},
            on_training=(
                "This folder is for inference. Closed tokens get the base's logits to the last "
                "bit. Open tokens get those of the trained weights, whose difference from the base "
                f"is stored in {bits} bits an element. To train further, continue the run, and "
                "convert it again."
            ),
        )


def packing_of(conversion: Conversion, model: TrainedModel) -> Packing:
    """How the difference is stored, by the options of a conversion.

    The run's corpora of role new decide which tokens have rows of their own. Without a run, all
    tokens have them.

    Raises:
        ConfigError: no token occurs `min_count` times, or no run is named whose tokens could be
            counted.
        DataError: a corpus is not tokenized, or not by the run's tokenizer.
    """
    bits = conversion.options.get("bits", Packing.bits)
    min_count = conversion.options.get("min_count", MIN_COUNT)
    config = conversion.run
    if config is None:
        if conversion.options.get("min_count"):
            raise ConfigError(
                "--min-count: counts tokens in the corpora of a run; name the run, or remove it to "
                "store the rows of all tokens"
            )
        return Packing(bits)
    if min_count == 0:
        return Packing(bits)
    own_tokens = frequent_tokens(
        config,
        model.base.spec.vocab_size,
        min_count,
        setting="--min-count",
        tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint,
    )
    return Packing(bits, own_tokens)


DIFFERENCE = Difference()
