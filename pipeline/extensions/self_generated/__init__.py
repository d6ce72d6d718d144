"""Text that a base model writes itself, as a token corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.extension import CheckedStage, Command, Extension, InputCheck


class SelfGenerated(Extension):
    name = "self_generated"

    def commands(self) -> Mapping[str, Command]:
        return {
            "sample": Command(
                "Makes token corpora of text that the base model writes itself.",
                module="pipeline.extensions.self_generated.command",
                after="tokenize",
            )
        }

    def input_checks(self, stage: CheckedStage) -> Sequence[InputCheck]:
        from pipeline.extensions.self_generated.checks import (
            check_sampling_settings,
            check_self_generated,
        )

        if stage == "tokenize":
            return [check_sampling_settings]
        if stage == "dry run":
            return [check_sampling_settings, check_self_generated]
        return []


EXTENSION = SelfGenerated()
