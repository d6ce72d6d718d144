"""How well a language model predicts a text: nll per token, perplexity, and bits per byte, which compares tokenizers.

Documents are scored separately, each after what it follows in training (`Tokenizer.before_document`: a start token, or
else the end of another document), so that every token of the text counts and no document sees another. Prompts are read
but not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import log
from pipeline.data.sources.records import Document
from pipeline.data.tokenizer.extension.vocabulary import exported_spelling
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.batches import first_alike, frequencies_of, frequency_context
from pipeline.evaluation.tokens import check_served_ids
from pipeline.hf.load import load_hf_model
from pipeline.log import progress_bar
from pipeline.model.output import perplexity
from pipeline.scale_math import NEVER

Text = Union[str, Document]
"""A text alone, or one that may have a prompt."""
Prefix = Literal["document", "none"]
"""What a document is scored after: what it follows in training, or nothing."""

DEFAULT_BYTES = 2**17
"""How much of each text is scored unless the caller says otherwise; 0: all."""
# Longer windows only on request (--context): with a large vocabulary their logits take gigabytes.
DEFAULT_CONTEXT = 4096
# A batch holds at most this many logits, 512 MiB in fp32, and no more tokens than keep a small model in the caches.
_BATCH_LOGITS = 2**27
_BATCH_TOKENS = 2**13
# Of each text, for the comparison with the ids that AutoTokenizer has.
_COMPARED_DOCUMENTS = 32
_ROUNDS = 8
"""How often a text with tokens that cannot follow is scored again, with these spelled out."""
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Score:
    """A model on a corpus. `bytes` is the UTF-8 length of what was scored; `whole`: that is all of it."""

    documents: int
    tokens: int
    bytes: int
    whole: bool
    nll_per_token: float
    perplexity: float
    bits_per_byte: float


class _Sequence(NamedTuple):
    """The tokens `ids: [S]` of a document; those from `first_scored` on are `bytes` bytes of text."""

    ids: Tensor
    first_scored: int
    bytes: int

    def windows(self, context: int) -> list[tuple[Tensor, int]]:
        """Windows of tokens, and how many of their last ones each scores."""
        cut = windows(len(self.ids), context, context // 2, self.first_scored)
        return [(self.ids[start:stop], stop - first) for start, stop, first in cut]

    def spelled_out(self, scored: Tensor, spelling: Mapping[int, Sequence[int]]) -> _Sequence:
        """The same with some of the scored tokens (bool) as the tokens of their `spelling`, where they have one."""
        pairs = zip(self.ids.tolist(), [False] * self.first_scored + scored.tolist(), strict=True)
        spelled = [
            old for id_, wanted in pairs for old in (spelling.get(id_, [id_]) if wanted else [id_])
        ]
        return self._replace(ids=torch.tensor(spelled))


def score_folder(
    folder: Path,
    corpora: Mapping[str, Iterable[Text]],
    *,
    context: int | None = None,
    max_bytes: int = 0,
    prefix: Prefix = "document",
    trust_remote_code: bool = False,
) -> dict[str, Score]:
    """The score of the model in `folder` on each corpus of documents, on a GPU if there is one.

    Windows of `context` tokens (default: the model's own, up to `DEFAULT_CONTEXT`) overlap by half. About `max_bytes`
    of each corpus are scored (0: all), of each document at most a 16th of it: as a limit of text it is the same for
    every tokenizer. A piece of an extended vocabulary that cannot follow, because a gate closed the token before, is
    scored as the old pieces that it stands for.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        ConfigError: the model has no such `context`.
        ConversionError: it is an export whose AutoTokenizer has other ids than its tokenizer.json.
        DataError: the folder has no tokenizer, or a corpus no document.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _logger.info("loading %s", folder)
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    tokenizer, vocab_size = load_tokenizer(folder), int(model.config.vocab_size)
    longest = int(getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    context = context or min(longest, DEFAULT_CONTEXT)
    if not 2 <= context <= longest:
        raise ConfigError(
            f"{folder}: expected a context from 2 to the model's {longest}, found {context}"
        )
    read = tokenizer.before_document if prefix == "document" else ()
    after = tokenizer.decode(read) if read else "nothing"
    _logger.info("%s: windows of %d tokens; documents follow %s", folder, context, after)
    first: dict[str, list[Text]] = {}
    whole_corpora: dict[str, Iterable[Text]] = {}
    for name, documents in corpora.items():
        remaining = iter(documents)
        first[name] = list(islice(remaining, _COMPARED_DOCUMENTS))
        whole_corpora[name] = chain(first[name], remaining)
    compared = (_whole_text(document) for own in first.values() for document in own)
    check_served_ids(folder, tokenizer, compared, trust_remote_code=trust_remote_code)
    scores = {}
    for name, documents in whole_corpora.items():
        sequences, whole = _encode(documents, tokenizer, read, max_bytes)
        if not sequences:
            raise DataError(
                f"{name}: holds no document to score; give another file, or the field of its text"
            )
        if (highest := max(int(one.ids.max()) for one in sequences)) >= vocab_size:
            raise DataError(
                f"{tokenizer.path}: gives the id {highest}, but the model's vocab_size is {vocab_size}"
            )
        total = _total_nll(model, sequences, context, exported_spelling(folder), name)
        tokens, size = (
            sum(len(one.ids) - one.first_scored for one in sequences),
            sum(one.bytes for one in sequences),
        )
        nll, bits = total / tokens, total / math.log(2) / size
        scores[name] = Score(len(sequences), tokens, size, whole, nll, perplexity(nll), bits)
    return scores


def _whole_text(document: Text) -> str:
    return document if isinstance(document, str) else document.whole_text


def windows(
    length: int, context: int, stride: int, first_scored: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Windows over a sequence of `length` tokens: (start, stop, the first of its tokens that is scored).

    Tokens before `first_scored`, at least one, are only read. Each window begins `stride` tokens after the last and
    scores what that one did not. So every scored token sees at least `context - stride` tokens before it, or all there
    are.
    """
    start = 0
    while first_scored < length:
        stop = min(start + context, length)
        if stop > first_scored:
            yield start, stop, first_scored
            first_scored = stop
        start += stride


def _encode(
    documents: Iterable[Text], tokenizer: Tokenizer, prefix: Sequence[int], max_bytes: int
) -> tuple[list[_Sequence], bool]:
    """The documents within the limit, each after `prefix`, and whether these are all."""
    sequences: list[_Sequence] = []
    left, share, whole = max_bytes, -(-max_bytes // 16), True
    for document in documents:
        if max_bytes and left <= 0:
            return sequences, False
        # A bare string comes of no corpus: it is read as its tokenizer reads it.
        given = Document(document, has_control=True) if isinstance(document, str) else document
        text, prompt, control = given.text, given.prompt, given.has_control
        if max_bytes and len(content := text.encode()) > share:
            # Cut the text, not the ids, so that the bytes are those of what is scored.
            text, whole = content[:share].decode(errors="ignore") or text[0], False
        read = [*prefix, *([] if prompt is None else ids_of(tokenizer, prompt, control=control))]
        ids = ids_of(tokenizer, text, control=control)
        left -= len(text.encode())
        skipped = (
            0 if read else len(tokenizer.decode(ids[:1]).encode())
        )  # nothing predicts the first token
        if len(ids) > (not read):
            sequences.append(
                _Sequence(torch.tensor(read + ids), max(1, len(read)), len(text.encode()) - skipped)
            )
    return sequences, whole


def _total_nll(
    model: Any,
    sequences: Sequence[_Sequence],
    context: int,
    spelling: Mapping[int, Sequence[int]],
    name: str,
) -> float:
    """The summed nll of the scored tokens, with those of no probability as the tokens of their `spelling`.

    What is spelled out changes what a gate reads. After some rounds every token that has a spelling is.
    """
    total, left = [], list(sequences)
    for rounds_left in reversed(range(_ROUNDS if spelling else 1)):
        cut = [one.windows(context) for one in left]
        found = iter(_token_nll(model, [window for windows in cut for window in windows], name))
        again = []
        for one, windows in zip(left, cut, strict=True):
            nll = torch.cat([next(found) for _ in windows])
            impossible = nll > -NEVER / 2
            if rounds_left and impossible.any():
                again.append(
                    one.spelled_out(impossible if rounds_left > 1 else impossible >= 0, spelling)
                )
            else:
                total.append(float(nll.sum()))
        left = again
    return math.fsum(total)


@torch.no_grad()
def _token_nll(model: Any, cut: Sequence[tuple[Tensor, int]], name: str) -> list[Tensor]:
    """The nll of the last so many tokens of each window, in fp64, however they are batched."""
    batch_tokens = min(_BATCH_TOKENS, _BATCH_LOGITS // model.config.vocab_size)
    longest_first = sorted(range(len(cut)), key=lambda place: -len(cut[place][0]))  # little padding
    changes_at = frequency_context(model.config)

    def frequencies(place: int) -> int:
        return frequencies_of(len(cut[place][0]), 0, changes_at)

    nll: dict[int, Tensor] = {}
    with progress_bar(name, len(cut), " windows") as bar:
        while len(nll) < len(cut):
            left = longest_first[len(nll) :]
            rows = max(1, batch_tokens // len(cut[left[0]][0]))
            batch = first_alike(left, frequencies, rows)
            padded = torch.nn.utils.rnn.pad_sequence(
                [cut[place][0] for place in batch], batch_first=True
            )
            logits = model(padded.to(model.device), use_cache=False).logits
            for row, place in zip(logits, batch, strict=True):
                tokens, scored = cut[place]
                predicting = row[len(tokens) - scored - 1 : len(tokens) - 1].float()
                losses = F.cross_entropy(
                    predicting, tokens[-scored:].to(row.device), reduction="none"
                )
                nll[place] = losses.double().cpu()
            bar.update(len(batch))
    return [nll[place] for place in range(len(cut))]
