"""Rotary frequencies that change with a text's length (longrope): what is cached of a text is of no
use once it outgrows their context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def longrope_contexts(config: Any) -> list[int]:  # of any class
    """The longest texts, in tokens, before rotary frequencies of a configuration change; none:
    they never do.
    """
    contexts: list[int] = []
    # Models in the format scale describe each kind of layer on their own.
    for spec in getattr(config, "rotary", None) or ():
        if spec["context"] is not None:
            contexts.append(int(spec["context"]))
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    # Some models of transformers have several sets of parameters, by the kind of layer.
    for part in (parameters, *(parameters or {}).values()):
        if _is_longrope(part):
            context = (
                part.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
            contexts.append(int(context))
    return contexts


def _is_longrope(parameters: Any) -> bool:
    """Whether an entry of a model's rotary parameters is a set of them, of the kind longrope."""
    if not isinstance(parameters, Mapping):
        return False
    # `type` is the name that transformers before 4.43 wrote.
    return "longrope" in (parameters.get("rope_type"), parameters.get("type"))


class RereadsOutgrown:
    """A model of transformers whose `generate` reads a batch again from its start where a text of
    it outgrows a context of longrope.

    Attributes:
        frequency_contexts: from `longrope_contexts`.
        frequencies_by_row: whether each text has the frequencies of its own length; else all of a
            batch have those of its longest.
    """

    frequency_contexts: list[int]
    frequencies_by_row: bool

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The library's, without a cache whose keys have other frequencies.

        Raises:
            ValueError: a text's beginning is not given, and so cannot be read again.
        """
        seen = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        given = input_ids.shape[1]
        # All of `input_ids` are new tokens where no number is given.
        new = kwargs.get("next_sequence_length") or given
        for context in self.frequency_contexts:
            if not self._outgrows(context, attention_mask, seen, new):
                continue
            if given < seen + new:
                raise ValueError(
                    f"input_ids: expected all {seen + new} tokens of a text that outgrows "
                    f"{context}, where its rotary frequencies change (longrope), found the last "
                    f"{given}; give them from its start, without prefill_chunk_size"
                )
            past_key_values = None
            kwargs["next_sequence_length"] = None
            break
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return inputs

    def _outgrows(self, context: int, mask: Tensor | None, seen: int, new: int) -> bool:
        """Whether a text is longer than `context` with its `new` tokens, and was not with the
        `seen` ones that are cached.

        mask: the padding [B, T]; of another form, or None: there is none.
        """
        if seen == 0 or seen + new <= context:
            return False
        if mask is None or mask.dim() != 2:
            return seen <= context
        # Read past the context alone: it makes the host wait for a GPU.
        before = mask[:, :seen].sum(-1)
        now = mask.sum(-1)
        if not self.frequencies_by_row:
            before = before.amax()
            now = now.amax()
        return bool(((before <= context) & (now > context)).any())
