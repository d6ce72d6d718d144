"""New text as the base's own tokenizer spells it, for a gate beside an extended vocabulary.

No new token follows a closed one: its probability is zero. So new text begins in the base's tokens,
in a document and wherever it follows other text. A gate that never saw new text in them stays
closed, and with it all that follows.
"""

from __future__ import annotations

from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.extensions.gate.documents import Packer, Piece, document_texts
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.windows import Windows, joined


def with_base_spelling(
    text: FittingText, extended: Tokenizer, base: Tokenizer, packer: Packer
) -> FittingText:
    """`text`, and its new text once more in the base's tokens: as many tokens as it has.

    Args:
        text: windows of ids of the `extended` tokenizer.
        extended: the run's tokenizer.
        base: the tokenizer of the run's base.
        packer: what makes windows of documents.
    """
    return text._replace(
        fit=_with_base_spelling(text.fit, extended, base, packer),
        unused=_with_base_spelling(text.unused, extended, base, packer),
    )


def _with_base_spelling(
    windows: Windows, extended: Tokenizer, base: Tokenizer, packer: Packer
) -> Windows:
    # Spliced windows begin in other text: their new text is there in whole windows, too.
    new = windows.rows((windows.is_new | ~windows.present).all(dim=1))
    wanted = int(new.present.sum())
    documents: list[list[Piece]] = []
    for document in document_texts(new, extended):
        if wanted <= 0:
            break
        # From the document's beginning, where it matters most.
        ids = ids_of(base, document)[: min(wanted, packer.sequence_length)]
        wanted -= len(ids)
        if ids:
            documents.append([Piece(ids, is_new=True)])
    spelled = packer.windows(documents)
    return windows if spelled is None else joined([windows, spelled])
