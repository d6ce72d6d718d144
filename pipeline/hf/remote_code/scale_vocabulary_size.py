"""What a model answers that is asked for a vocabulary of some size, and keeps its own."""

from __future__ import annotations


def check_vocabulary_size(
    present: int, asked: int | None, multiple: int | None, reason: str
) -> None:
    """Accepts what training scripts ask of any model: the `present` size, or none.

    Args:
        present: the size of the vocabulary.
        asked: the argument `new_num_tokens` of `resize_token_embeddings`; None: the present size.
        multiple: its `pad_to_multiple_of`, to a multiple of which `asked` is rounded up.
        reason: why the size stays as it is.

    Raises:
        ValueError: another size is asked for.
    """
    size = present if asked is None else asked
    if multiple is not None:
        size = -(-size // multiple) * multiple
    if size != present:
        raise ValueError(
            f"resize_token_embeddings: expected {present}, the present size, found {size}; {reason}"
        )
