"""A prompt and the text behind it: encoded as one, and cut where the text begins.

Encoded alone, a text would begin as a document does, in many tokenizers with the token of another
word. A server encodes all that the model has read, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.sources.records import Document
from pipeline.data.tokenizer.encoders import HuggingFaceEncoder
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.spelling import Spelled, Speller, cached_speller, split_ids


class SpelledPairs(NamedTuple):
    """The ids of prompts, each with the text behind it.

    `prompt_tokens`: int64 [pairs], how many of the tokens of each are the prompt's.
    """

    spelled: Spelled
    prompt_tokens: npt.NDArray[np.int64]


def spell_pairs(speller: Speller, prompts: Sequence[str], texts: Sequence[str]) -> SpelledPairs:
    """Encodes each of `texts` behind its prompt.

    Where the ids of a prompt alone begin those of both, they are the prompt: so a model is asked.
    Otherwise a token ends the prompt and begins the text, such as a space and a word. It belongs to
    the text, as the first token of it that a model predicts.

    Raises:
        DataError: where an id is beyond the vocabulary, or the two encoders differ.
    """
    wholes = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    spelled = speller.spell(wholes)
    alone = split_ids(speller.spell(prompts).encoded)
    lengths = np.zeros(len(wholes), dtype=np.int64)
    for number, whole_ids in enumerate(split_ids(spelled.encoded)):
        prompt_ids = alone[number]
        length = len(prompt_ids)
        is_beginning = length < len(whole_ids) and np.array_equal(whole_ids[:length], prompt_ids)
        if not is_beginning:
            characters = len(prompts[number])
            length = speller.tokens_within(wholes[number], whole_ids, characters)
        lengths[number] = length
    return SpelledPairs(spelled, lengths)


def pair_ids(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """The ids of the prompt of a document, with its own start if it has one, and of its text.

    They are those of the reference, as tokenization makes them.
    """
    assert document.prompt is not None, "the document has a prompt"
    # SentencePiece reads no special token in a text in any case.
    is_control = document.has_control and isinstance(tokenizer.reference, HuggingFaceEncoder)
    wanted = "control" if is_control else None
    speller = cached_speller(tokenizer, tokenizer.reference, wanted)
    before = (document.start or "") + document.prompt
    pairs = spell_pairs(speller, [before], [document.text])
    ids: list[int] = pairs.spelled.encoded.ids.tolist()
    cut = int(pairs.prompt_tokens[0])
    return ids[:cut], ids[cut:]
