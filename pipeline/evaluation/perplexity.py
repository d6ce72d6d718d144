"""How well a language model predicts a text: nll per token, perplexity and bits per byte.

Bits per byte compares models with different tokenizers. Documents are scored separately, so that no
document sees another. Each is scored after the tokens that precede documents in training
(`Tokenizer.before_document`: a start token, or else the end of another document), so that its first
token counts, too. Prompts are read but not scored.
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
from pipeline.data.tokenizer.prompts import pair_ids
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
"""What precedes a document: the tokens that precede it in training (document), or nothing (none).
"""

DEFAULT_BYTES = 2**17
"""How much of each text is scored unless the caller says otherwise; 0: all."""
# Longer windows only on request (--context): with a large vocabulary their logits take gigabytes.
DEFAULT_CONTEXT = 4096
_BATCH_LOGITS = 2**27
"""The most logits of a batch: 512 MiB in fp32."""
_BATCH_TOKENS = 2**13
"""The most tokens of a batch: more do not keep a small model in the caches."""
_COMPARED_DOCUMENTS = 32
"""Documents of each text whose ids are compared with those of AutoTokenizer."""
_DOCUMENT_SHARE = 16
"""At most one sixteenth of the scored bytes of a corpus come from one document."""
_ROUNDS = 8
"""How often a text with impossible tokens is scored, each time with more of them spelled out."""
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Score:
    """How well a model predicts a corpus.

    Attributes:
        documents: number of documents that were scored.
        tokens: number of tokens that were scored.
        bytes: UTF-8 length of the text that was scored.
        whole: whether that is all of the corpus.
        nll_per_token: mean negative log likelihood of a token, in nats.
        perplexity: e to the nll_per_token.
        bits_per_byte: summed negative log likelihood in bits, over `bytes`.
    """

    documents: int
    tokens: int
    bytes: int
    whole: bool
    nll_per_token: float
    perplexity: float
    bits_per_byte: float


class _Sequence(NamedTuple):
    """The tokens of a document.

    Attributes:
        ids: [S], the prefix, the prompt and the text.
        first_scored: the index of the first token that is scored.
        bytes: UTF-8 length of the text of the scored tokens.
    """

    ids: Tensor
    first_scored: int
    bytes: int

    def windows(self, context: int) -> list[_Window]:
        """Windows of at most `context` tokens that score every token once."""
        found: list[_Window] = []
        # Windows that overlap by half: every token but a document's first sees at least context / 2
        # tokens. Without overlap the first tokens of each window would see none, and a shorter
        # context would look worse.
        for start, stop, first in windows(len(self.ids), context, context // 2, self.first_scored):
            found.append(_Window(self.ids[start:stop], stop - first))
        return found

    def spelled_out(self, wanted: Tensor, spelling: Mapping[int, Sequence[int]]) -> _Sequence:
        """The sequence with some scored tokens replaced by the base's tokens that spell them.

        Args:
            wanted: bool, which of the scored tokens to replace.
            spelling: the tokens that spell a new token, by its id. Others stay as they are.
        """
        spelled = self.ids[: self.first_scored].tolist()
        scored = self.ids[self.first_scored :].tolist()
        for id_, is_wanted in zip(scored, wanted.tolist(), strict=True):
            if is_wanted and id_ in spelling:
                spelled += spelling[id_]
            else:
                spelled.append(id_)
        return self._replace(ids=torch.tensor(spelled))


class _Window(NamedTuple):
    """Tokens that a model reads at once, `ids: [S]`, of which it scores the last `scored` ones."""

    ids: Tensor
    scored: int


def score_folder(
    folder: Path,
    corpora: Mapping[str, Iterable[Text]],
    *,
    context: int | None = None,
    max_bytes: int = 0,
    prefix: Prefix = "document",
    trust_remote_code: bool = False,
) -> dict[str, Score]:
    """The score of the model in `folder` on each corpus of documents.

    The model runs on a GPU if there is one. A new token of an extended vocabulary is impossible
    after a token on which a gate is closed; it is scored as the base's tokens that spell it.

    Args:
        folder: a Hugging Face folder.
        corpora: documents by the corpus's name.
        context: tokens of a window, of which two overlap by half; default: as many as the model
            reads, up to `DEFAULT_CONTEXT`.
        max_bytes: about how much text of each corpus is scored, and of each document at most a 16th
            of it (0: all). A limit of text is the same for every tokenizer.
        prefix: what documents are scored after.
        trust_remote_code: run Python code that the folder holds.

    Raises:
        BaseModelError: the folder holds no model that can be loaded.
        ConfigError: the model has no such `context`.
        ConversionError: it is an export whose AutoTokenizer has other ids than its tokenizer.json.
        DataError: the folder has no tokenizer, or a corpus no document.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _logger.info("loading %s", folder)
    model = load_hf_model(folder, device=device, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder)
    context = _checked_context(folder, model, context)
    read: Sequence[int] = ()
    after = "nothing"
    if prefix == "document":
        read = tokenizer.before_document
    if read:
        after = tokenizer.decode(read)
    _logger.info("%s: windows of %d tokens; documents follow %s", folder, context, after)

    # The first documents are taken from the iterators for the comparison of ids, and put back.
    compared: list[str] = []
    whole_corpora: dict[str, Iterable[Text]] = {}
    for name, documents in corpora.items():
        remaining = iter(documents)
        first = list(islice(remaining, _COMPARED_DOCUMENTS))
        compared += map(_whole_text, first)
        whole_corpora[name] = chain(first, remaining)
    check_served_ids(folder, tokenizer, compared, trust_remote_code=trust_remote_code)

    spelling = exported_spelling(folder)
    scores: dict[str, Score] = {}
    for name, documents in whole_corpora.items():
        sequences, whole = _encode(documents, tokenizer, read, max_bytes)
        if not sequences:
            raise DataError(
                f"{name}: holds no document to score; give another file, or the field of its text"
            )
        _check_ids(sequences, tokenizer, int(model.config.vocab_size))
        total = _total_nll(model, sequences, context, spelling, name)
        # Tokens are counted before any is spelled out: the same number with and without a gate.
        tokens = 0
        size = 0
        for sequence in sequences:
            tokens += len(sequence.ids) - sequence.first_scored
            size += sequence.bytes
        scores[name] = Score(
            documents=len(sequences),
            tokens=tokens,
            bytes=size,
            whole=whole,
            nll_per_token=total / tokens,
            perplexity=perplexity(total / tokens),
            bits_per_byte=total / math.log(2) / size,  # nats to bits
        )
    return scores


def _checked_context(folder: Path, model: Any, context: int | None) -> int:
    """The number of tokens of a window; default: the model's, up to DEFAULT_CONTEXT.

    Raises:
        ConfigError: the model cannot read as many.
    """
    longest = int(getattr(model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if not context:
        context = min(longest, DEFAULT_CONTEXT)
    if not 2 <= context <= longest:
        raise ConfigError(
            f"{folder}: expected a context from 2 to the model's {longest}, found {context}"
        )
    return context


def _check_ids(sequences: Sequence[_Sequence], tokenizer: Tokenizer, vocab_size: int) -> None:
    highest = max(int(one.ids.max()) for one in sequences)
    if highest >= vocab_size:
        raise DataError(
            f"{tokenizer.path}: gives the id {highest}, but the model's vocab_size is {vocab_size}"
        )


def _whole_text(document: Text) -> str:
    return document if isinstance(document, str) else document.whole_text


def windows(
    length: int, context: int, stride: int, first_scored: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Windows over `length` tokens: (start, stop, index of the first token that is scored).

    Tokens before `first_scored`, at least one, are only read. Each window begins `stride` tokens
    after the one before, and scores the tokens from the end of that one on. So every scored token
    sees at least `context - stride` tokens before it, or all that precede it.
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
    """The tokens of the documents within the limit of bytes, each after `prefix`.

    Returns:
        The sequences.
        Whether all documents are in them, none of them cut.
    """
    sequences: list[_Sequence] = []
    whole = True
    left = max_bytes
    share = math.ceil(max_bytes / _DOCUMENT_SHARE)
    for document in documents:
        if max_bytes and left <= 0:
            return sequences, False
        if isinstance(document, str):
            # A bare string is of no corpus: names of special tokens in it become these tokens.
            document = Document(document, has_control=True)
        text = document.text
        content = text.encode()
        if max_bytes and len(content) > share:
            # The text is cut, not the ids: its bytes are known for every tokenizer.
            text = content[:share].decode(errors="ignore") or text[0]
            whole = False
        size = len(text.encode())
        left -= size

        read = list(prefix)
        if document.prompt is None:
            ids = ids_of(tokenizer, text, control=document.has_control)
        else:
            if document.start is not None and tokenizer.document_start:
                # The chat begins by itself, as its template has it.
                read = []
            asked, ids = pair_ids(tokenizer, document._replace(text=text))
            read += asked
        if not read:
            # Nothing predicts the first token: it is read, and its bytes do not count.
            size -= len(tokenizer.decode(ids[:1]).encode())
            read = ids[:1]
            ids = ids[1:]
        if len(ids) > 0:
            sequences.append(_Sequence(torch.tensor([*read, *ids]), len(read), size))
    return sequences, whole


def _total_nll(
    model: Any,
    sequences: Sequence[_Sequence],
    context: int,
    spelling: Mapping[int, Sequence[int]],
    name: str,
) -> float:
    """The summed nll of the scored tokens, in nats.

    Impossible tokens (their probability is zero) count as the tokens that spell them. A gate reads
    the spelled tokens in place of the new one, and may then close on others: so such sequences are
    scored again. In the last round every token that has a spelling is spelled out, and none can be
    impossible.
    """
    totals: list[float] = []
    left = list(sequences)
    rounds = _ROUNDS if spelling else 1
    for rounds_left in reversed(range(rounds)):
        windows_of: list[list[_Window]] = []
        all_windows: list[_Window] = []
        for sequence in left:
            cut = sequence.windows(context)
            windows_of.append(cut)
            all_windows += cut
        # Windows of all sequences together fill the batches better.
        found = iter(_token_nll(model, all_windows, name))
        again: list[_Sequence] = []
        for sequence, cut in zip(left, windows_of, strict=True):
            nll = torch.cat(list(islice(found, len(cut))))
            # The gate's logit of an impossible token is NEVER (-1e30) and not -inf, so that its nll
            # is a finite number, which is recognised here.
            impossible = nll > -NEVER / 2
            if rounds_left == 0 or not impossible.any():
                totals.append(float(nll.sum()))
                continue
            if rounds_left == 1:
                impossible = torch.ones_like(impossible)
            again.append(sequence.spelled_out(impossible, spelling))
        left = again
    # fsum is exact: the result does not depend on the order in which the sequences were finished.
    return math.fsum(totals)


@torch.no_grad()
def _token_nll(model: Any, cut: Sequence[_Window], name: str) -> list[Tensor]:
    """The nll of the scored tokens of each window, in fp64, however they are batched."""
    batch_tokens = min(_BATCH_TOKENS, _BATCH_LOGITS // model.config.vocab_size)
    # The longest first: batches of similar lengths have little padding.
    order = sorted(range(len(cut)), key=lambda place: -len(cut[place].ids))
    changes_at = frequency_context(model.config)

    def frequencies(place: int) -> int:
        return frequencies_of(len(cut[place].ids), 0, changes_at)

    nll: dict[int, Tensor] = {}
    with progress_bar(name, len(cut), " windows") as bar:
        while len(nll) < len(cut):
            left = order[len(nll) :]
            rows = max(1, batch_tokens // len(cut[left[0]].ids))
            batch = first_alike(left, frequencies, rows)
            ids = [cut[place].ids for place in batch]
            # Padding is on the right: with causal attention no scored token sees it.
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            logits = model(padded.to(model.device), use_cache=False).logits
            for row, place in zip(logits, batch, strict=True):
                nll[place] = _window_nll(row, cut[place])
            bar.update(len(batch))
    return [nll[place] for place in range(len(cut))]


def _window_nll(logits: Tensor, window: _Window) -> Tensor:
    """The nll of a window's scored tokens from its logits [S, V], which may be padded."""
    length = len(window.ids)
    # The logits at a token predict the next one.
    predicting = logits[length - window.scored - 1 : length - 1].float()
    targets = window.ids[-window.scored :].to(logits.device)
    # The softmax in fp32: a log-probability in bf16 has two to three significant digits.
    return F.cross_entropy(predicting, targets, reduction="none").double().cpu()
