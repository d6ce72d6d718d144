"""What a model answers that is asked for a vocabulary of some size, and keeps its own."""

from __future__ import annotations

from typing import Any

from torch import nn


class FixedVocabulary:
    """A model of transformers whose vocabulary keeps its size.

    Attributes:
        vocabulary_reason: why, for errors.
    """

    config: Any
    vocabulary_reason: str

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *_: Any,
        **__: Any,
    ) -> nn.Module:
        """The embedding, as it is: training scripts ask any model for the size that it has.

        Args:
            new_num_tokens: None: the present size.
            pad_to_multiple_of: to a multiple of which the size is rounded up.

        Raises:
            ValueError: another size is asked for.
        """
        present = self.config.vocab_size
        size = present if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size != present:
            raise ValueError(
                f"resize_token_embeddings: expected {present}, the present size, found {size}; "
                f"{self.vocabulary_reason}"
            )
        embedding: nn.Module = self.get_input_embeddings()  # type: ignore[attr-defined]
        return embedding
