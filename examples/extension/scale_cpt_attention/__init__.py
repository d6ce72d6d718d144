"""Full fine-tuning of attention alone, the optimizer Lion, and exports of what was added to the
base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.extension import Extension, OfferedFormat, OfferedMethod


class Attention(Extension):
    name = "attention"

    def methods(self) -> Sequence[OfferedMethod]:
        return [
            OfferedMethod(
                settings="scale_cpt_attention.settings:AttentionOnly",
                method="scale_cpt_attention.method:AttentionOnlyMethod",
            )
        ]

    def optimizers(self) -> Mapping[str, str]:
        return {"lion": "scale_cpt_attention.lion:LION"}

    def export_formats(self) -> Mapping[str, OfferedFormat]:
        return {
            "task_vector": OfferedFormat(
                "what training added to the base's weights",
                "scale_cpt_attention.task_vector:TASK_VECTOR",
            )
        }


EXTENSION = Attention()
