"""Hosted bases: decoders of transformers that run as they are, with the expansion beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.extension import Command, Extension

if TYPE_CHECKING:
    from pipeline.config.base import BaseCode


class Hosted(Extension):
    name = "hosted"

    def commands(self) -> Mapping[str, Command]:
        return {
            "bases": Command(
                "Lists which types of models can be a base: native, hosted or refused, and why.",
                module="pipeline.extensions.hosted.command",
                after="new",
            )
        }

    def base_kinds(self) -> Mapping[BaseCode, str]:
        return {"transformers": "pipeline.extensions.hosted.kind:HOSTED"}


EXTENSION = Hosted()
