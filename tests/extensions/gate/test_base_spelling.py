"""New text in the base's own tokens: what a gate beside an extended vocabulary is fitted on, too."""

from __future__ import annotations

import torch

from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.extension.vocabulary import learn_extension, write_extension
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.extensions.gate.base_spelling import with_base_spelling
from pipeline.extensions.gate.documents import Packer, Piece, document_texts
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.windows import joined
from tests.bases import STORIES
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

LENGTH = 64


def test_new_text_is_there_once_more_in_the_bases_tokens(tmp_path):
    new, old = (list(texts([str(file)]))[:12] for file in (REVIEWS_HELDOUT, STORIES_HELDOUT))
    write_extension(
        learn_extension(STORIES, new, old, add=40, min_uses=2),
        tmp_path / "tokenizer",
        lambda _: None,
    )
    base, extended = load_tokenizer(STORIES), load_tokenizer(tmp_path / "tokenizer")
    packer = Packer(extended, LENGTH, True)
    of_new = packer.windows([[Piece(ids_of(extended, text), is_new=True)] for text in new])
    of_old = packer.windows([[Piece(ids_of(extended, text))] for text in old])
    assert of_new is not None and of_old is not None
    text = FittingText(fit=joined([of_old, of_new]), unused=of_old)
    assert (of_new.tokens >= base.vocab_size).any(), "or there is nothing to spell"

    found = with_base_spelling(text, extended, base, packer)
    added = found.fit.rows(slice(len(text.fit), None))
    assert torch.equal(found.fit.rows(slice(0, len(text.fit))).tokens, text.fit.tokens)
    assert len(added) > 0 and (added.tokens < base.vocab_size).all()
    assert added.is_new[added.present].all()
    assert int(added.present.sum()) <= 1.2 * int(of_new.present.sum())
    # The same text, from the beginnings of its documents.
    spelled = next(document_texts(added, extended))
    assert len(spelled) > 5 and next(document_texts(of_new, extended)).startswith(spelled[:20])
    assert len(found.unused) == len(of_old), "no new text, nothing to spell"
