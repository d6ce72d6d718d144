"""Texts that change between new and other text within a document, to see what a gate does there.

A word of new text within other text, new text that follows other text, and a chat whose
instructions are in other text and whose question is in new text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pipeline.data.tokenizer.chats import ChatTemplate
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.extensions.gate.documents import Packer, Piece
from pipeline.extensions.gate.windows import Windows

CHANGES = (
    "other text right after a new word",
    "other text later after a new word",
    "new text right after other text",
    "new text later after other text",
    "chat: other instructions",
    "chat: new question",
)
RIGHT_AFTER = 8
"""So many tokens behind a change are right after it."""
_WORD = re.compile(r"\S{1,12}\s*")
"""A word with the space behind it; a part of one where a language writes no spaces."""
RUN = 50
"""So many words of each kind make a document."""
TEXTS = 24
"""How many documents of each sort are made."""


def change_windows(
    old: Iterable[str],
    new: Iterable[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    packer: Packer,
) -> Windows | None:
    """Documents that change between other and new text; the number of a kind is its place in
    CHANGES.

    Args:
        old: texts that are not new, of which words are taken in turn.
        new: new texts.
        tokenizer: the run's.
        template: the base's chat template; None: no chats.
        packer: what makes windows of documents.
    """
    documents: list[list[Piece]] = []
    for old_words, new_words in zip(_words(old), _words(new), strict=False):
        before = Piece(ids_of(tokenizer, _text(old_words[:20])))
        word = Piece(ids_of(tokenizer, " " + new_words[0].strip()))
        documents.append([before, word, *_right_after(tokenizer, old_words[20:50], 0, False)])
        documents.append([before, *_right_after(tokenizer, new_words[:30], 2, True)])
        if template is not None:
            documents.append(_chat(tokenizer, template, old_words[:12], new_words[:12]))
        if len(documents) >= 3 * TEXTS:
            break
    return packer.windows(documents)


def _right_after(
    tokenizer: Tokenizer, words: Sequence[str], kind: int, is_new: bool
) -> tuple[Piece, Piece]:
    """The first tokens behind a change, of kind `kind`, and the later ones, of the next kind."""
    ids = ids_of(tokenizer, " " + _text(words))
    return (
        Piece(ids[:RIGHT_AFTER], kind, is_new),
        Piece(ids[RIGHT_AFTER:], kind + 1, is_new),
    )


def _chat(
    tokenizer: Tokenizer, template: ChatTemplate, system: Sequence[str], question: Sequence[str]
) -> list[Piece]:
    """A chat up to where the model answers."""
    asked = _text(question)
    opened = template.opened(
        [{"role": "system", "content": _text(system)}, {"role": "user", "content": asked}]
    )
    before, _, behind = opened.partition(asked)
    return [
        Piece(ids_of(tokenizer, before, control=True), CHANGES.index("chat: other instructions")),
        Piece(ids_of(tokenizer, asked), CHANGES.index("chat: new question"), is_new=True),
        Piece(ids_of(tokenizer, behind, control=True)),
    ]


def _words(texts: Iterable[str]) -> Iterator[list[str]]:
    """Runs of RUN words; the first and last of a text may be cut, and are left out."""
    run: list[str] = []
    for text in texts:
        for word in _WORD.findall(text)[1:-1]:
            run.append(word)
            if len(run) == RUN:
                yield run
                run = []


def _text(words: Sequence[str]) -> str:
    return "".join(words).strip()
