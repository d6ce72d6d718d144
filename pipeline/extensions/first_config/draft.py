"""The settings of a first run, for every length of a sequence and method that is tried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.data.tokenizer.load import Tokenizer
from pipeline.extensions.first_config.corpora import corpora_section
from pipeline.extensions.first_config.fitting import Fit, deepspeed_file
from pipeline.extensions.first_config.method import (
    method_under_gate,
    min_count_of,
    scale_method,
    smaller_methods,
)
from pipeline.extensions.first_config.schedule import (
    schedule_section,
    stages_section,
    wanted_length,
)
from pipeline.extensions.first_config.search import first_that_fits
from pipeline.extensions.first_config.texts import TextMeasure, tokens_to_read
from pipeline.extensions.first_config.time_limit import rhythm
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster

_KL_FRACTION_OF_CHATS = 1 / 8
"""The share of the sequences that train by KL in a run with a gate and chats. With it, answers in
the new language end, and tuning on its chats begins from the base's abilities
(docs/results/chat.md)."""


@dataclass(frozen=True)
class Draft:
    """What is known of a run before its sizes are.

    Attributes:
        wanted: what the user asks for.
        folder: the base's.
        spec: its architecture.
        tokenizer: the run's.
        learned: the new text.
        known: the old text.
        cluster: the ranks.
        dtype: of the weights.
        tuned: the chats in the new language, if there are any.
        tokens: how many the run reads; None: as many as are useful.
    """

    wanted: FirstRun
    folder: Path
    spec: DecoderSpec
    tokenizer: Tokenizer
    learned: TextMeasure
    known: TextMeasure
    cluster: Cluster
    dtype: torch.dtype
    tuned: TextMeasure | None = None
    tokens: int | None = None

    @property
    def read(self) -> int:
        """How many tokens the run reads."""
        useful = tokens_to_read(self.learned)
        return useful if self.tokens is None else min(useful, self.tokens)

    def reading(self, tokens: int) -> Draft:
        """The draft of a run that reads at most so many tokens."""
        return replace(self, tokens=tokens)

    def methods(self) -> list[dict[str, Any]]:
        """The methods to try, from the one that learns the most to the smallest."""
        if not self.wanted.gated:
            method = scale_method(self.spec)
            if self.spec.is_native:
                # A merged export needs it, and such a run is to be exported so.
                method["norm"] = "base"
            return [method]
        # Open rows with an extended vocabulary were not measured.
        with_rows = self.wanted.vocabulary is None
        method = method_under_gate(
            self.spec, with_rows=with_rows, min_count=min_count_of(self.learned)
        )
        return list(smaller_methods(method))

    @property
    def length(self) -> int:
        """The wanted tokens of a sequence."""
        return wanted_length(self.read, self.spec)

    def fitted(self) -> Fit:
        """The run with the sizes that fit.

        Raises:
            LayoutError: the base does not fit on the cluster.
        """
        return first_that_fits(
            self.values, self.length, self.methods(), self.spec, self.cluster, self.dtype
        )

    def values(self, length: int, method: dict[str, Any]) -> dict[str, Any]:
        """The settings of a run with sequences of `length` tokens."""
        wanted, spec = self.wanted, self.spec
        # On a mixture the expansion learned more by Muon; on a real dense base LoRA learned more,
        # and forgot less, by AdamW (docs/adr/0087).
        by_muon = wanted.gated and spec.is_native and spec.mixture is not None
        schedule = schedule_section(self.read, length, spec, self.cluster, by_muon=by_muon)
        corpora = corpora_section(
            wanted, self.learned, self.known, self.tokenizer, length, self.read
        )
        stages: list[dict[str, Any]] = []
        if self.tuned is not None:
            stages = stages_section(schedule, length, self.tuned)
            schedule["steps"] = sum(stage["steps"] for stage in stages)
        values: dict[str, Any] = {
            "name": wanted.name,
            "folder": f"runs/{wanted.name}",
            "base": str(self.folder),
            "method": method,
            "data": {
                "folder": f"runs/{wanted.name}/tokens",
                "sequence_length": length,
                "corpora": corpora,
            },
            "schedule": schedule,
            "stages": stages,
            **rhythm(schedule),
            "deepspeed": deepspeed_file(1, self.dtype),
        }
        if not stages:
            del values["stages"]
        if wanted.gated:
            values["gate"] = _gate(wanted)
            # Without chats only the gate reads the self-generated text.
            values["data"]["self_generated_fraction"] = 0.0
            if wanted.has_chats:
                values["data"]["self_generated_fraction"] = _KL_FRACTION_OF_CHATS
        if wanted.vocabulary is not None:
            values["vocabulary"] = {"folder": str(wanted.vocabulary)}
        return values


def _gate(wanted: FirstRun) -> dict[str, Any]:
    """The section `gate`."""
    if not wanted.new_chats:
        return {}
    # Not the base's answers to chats in the new language: on these the gate should open.
    negatives = ["self_generated"]
    if wanted.old_chats:
        negatives.append("self_generated_chats")
    return {"negatives": negatives}
