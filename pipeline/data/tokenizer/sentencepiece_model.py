"""SentencePiece's own files: reading one, training one, and the same as a tokenizer.json.

The library `sentencepiece` defines the ids of its files. `tokenizers` cannot express every detail
of it, so whoever uses a conversion compares the ids of both on the texts at hand.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pipeline.data.tokenizer.extension.bpe import SPACE
from pipeline.errors import DataError, faults_of_library

SUFFIX = ".model"
MODEL_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""The names that published folders give SentencePiece's file."""
ModelType = Literal["bpe", "unigram"]
# SentencePiece drops longer sentences.
_MAX_SENTENCE_BYTES = 16_384
_PIECE_TYPES = sentencepiece_model_pb2.ModelProto.SentencePiece
_TRAINER = sentencepiece_model_pb2.TrainerSpec


# Without `eq`: the description, a message of protobuf, has no hash.
@dataclass(frozen=True, eq=False)
class SentencePieceModel:
    """A model of SentencePiece: its file, the library's object of it, and its description."""

    path: Path
    content: bytes
    processor: Any
    description: Any

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what decides the ids: not the texts and settings that it was trained with."""
        trainer = self.description.trainer_spec
        normalizer = self.description.normalizer_spec
        spaces = [
            normalizer.add_dummy_prefix,
            normalizer.remove_extra_whitespaces,
            normalizer.escape_whitespaces,
            trainer.treat_whitespace_as_suffix,
        ]
        # The character map may have hundreds of kilobytes: its hash stands for it.
        charsmap = hashlib.sha256(normalizer.precompiled_charsmap).hexdigest()
        tokens = [[piece.piece, piece.score, piece.type] for piece in self.description.pieces]
        decisive = [trainer.model_type, trainer.byte_fallback, charsmap, spaces, tokens]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    @cached_property
    def reserved_tokens(self) -> list[str]:
        """The tokens that no text becomes, such as `<s>`.

        Where a text spells one, it is cut as any other text.
        """
        reserved = (_PIECE_TYPES.CONTROL, _PIECE_TYPES.UNKNOWN)
        return [piece.piece for piece in self.description.pieces if piece.type in reserved]

    def id_of(self, token: str) -> int | None:
        """The id of a token; None where there is no such token."""
        # The library gives the id of the unknown token for a token that it does not have.
        found = int(self.processor.piece_to_id(token))
        return found if self.processor.id_to_piece(found) == token else None


def read_model(path: Path, content: bytes) -> SentencePieceModel:
    """The model in the file `path`, which holds `content`.

    Raises:
        DataError: where it is no model of SentencePiece.
    """
    what = (
        f"{path}: expected a model of SentencePiece, which its library cannot read; copy it again, "
        "or, if it is of another kind, let transformers write a tokenizer.json: "
        "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    )
    with faults_of_library(what, DataError):
        # Read twice: the processor does not show the normalizer and the kinds of tokens.
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        description = sentencepiece_model_pb2.ModelProto.FromString(content)
    return SentencePieceModel(path, content, processor, description)


def train_model(
    documents: Iterator[str],
    vocab_size: int,
    *,
    model_type: ModelType = "bpe",
    character_coverage: float = 0.9999,
) -> bytes:
    """A tokenizer with byte fallback, like Llama's, learned from documents: its file's content.

    Raises:
        DataError: where there is too little text, or it is too uniform, for this vocabulary size.
    """
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents),
            model_writer=written,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            character_coverage=character_coverage,
            # As Llama's: a number is a token for each digit.
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=len(os.sched_getaffinity(0)),
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        # The library names its own option; ours is spelled otherwise.
        reason = reason.replace("--character_coverage", "--character-coverage")
        raise DataError(f"cannot train {vocab_size} tokens on this text: {reason}") from None
    return written.getvalue()


def _sentences(documents: Iterator[str]) -> Iterator[str]:
    """Documents line by line.

    SentencePiece learns from sentences, and would drop a long document.
    """
    # A character has at most four bytes.
    step = _MAX_SENTENCE_BYTES // 4
    for document in documents:
        for line in document.split("\n"):
            for first in range(0, len(line), step):
                yield line[first : first + step]


# --- The same tokenizer as a tokenizer.json ---


def converted(
    model: SentencePieceModel, document_start: tuple[int, ...] = ()
) -> tokenizers.Tokenizer:
    """The model as `tokenizers` has it; `document_start` are the ids that it puts before a text.

    Raises:
        DataError: the library has nothing alike.
    """
    description = model.description
    trainer = description.trainer_spec
    normalizer = description.normalizer_spec
    if trainer.model_type not in (_TRAINER.BPE, _TRAINER.UNIGRAM):
        kind = _TRAINER.ModelType.Name(trainer.model_type)
        raise DataError(
            f"{model.path}: a {kind} model of SentencePiece; expected BPE or UNIGRAM, take another "
            "base"
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise DataError(
            f"{model.path}: writes spaces otherwise than before words as {SPACE}, for which there "
            "is no tokenizer.json; take another base"
        )
    with faults_of_library(f"{model.path}: cannot be converted to a tokenizer.json", DataError):
        if trainer.model_type == _TRAINER.BPE:
            tokenizer = tokenizers.Tokenizer(_bpe(description))
        else:
            tokenizer = tokenizers.Tokenizer(_unigram(description))
        adds_space = normalizer.add_dummy_prefix
        own = _spelled(description, _PIECE_TYPES.USER_DEFINED)
        # `Prepend` would put a space behind each of the user's own tokens, too; `Metaspace` only
        # before the text. It puts none before a text that begins with one.
        only_first = bool(own) and adds_space
        tokenizer.normalizer = _normalizer(normalizer, prepends=adds_space and not only_first)
        if only_first:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
                SPACE, prepend_scheme="first", split=False
            )
        tokenizer.decoder = _decoder(strips=adds_space)
        reserved: list[tokenizers.AddedToken] = []
        for token in model.reserved_tokens:
            reserved.append(tokenizers.AddedToken(token, normalized=False))
        tokenizer.add_special_tokens(reserved)
        added: list[tokenizers.AddedToken] = []
        for token in own:
            # It may spell spaces, which a text has only after the normalizer; that also changes the
            # token itself.
            added.append(tokenizers.AddedToken(token, normalized=not adds_space))
        tokenizer.add_tokens(added)
        if document_start:
            # `$A` is the text.
            names = [tokenizer.id_to_token(number) for number in document_start]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*names, "$A"],
                special_tokens=list(zip(names, document_start, strict=True)),
            )
    return tokenizer


def _spelled(description: Any, kind: int) -> list[str]:
    """The tokens of a kind in a model of SentencePiece, in the order of their ids."""
    return [piece.piece for piece in description.pieces if piece.type == kind]


def _bpe(description: Any) -> models.BPE:
    """The merges of a BPE model, in the order in which SentencePiece prefers their tokens.

    Whichever two tokens give one are merged.
    """
    vocabulary: dict[str, int] = {}
    scores: dict[str, float] = {}
    for number, piece in enumerate(description.pieces):
        vocabulary[piece.piece] = number
        if piece.type == _PIECE_TYPES.NORMAL:
            scores[piece.piece] = piece.score
    merges: list[tuple[str, str]] = []
    # SentencePiece stores no merges: it joins whatever pair makes the token of the highest score.
    for token in sorted(scores, key=lambda token: (-scores[token], vocabulary[token])):
        of_token: list[tuple[str, str]] = []
        for middle in range(1, len(token)):
            left = token[:middle]
            right = token[middle:]
            if left in scores and right in scores:
                of_token.append((left, right))
        # Of several pairs that make the token, the one with the lower ids comes first.
        merges += sorted(of_token, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return models.BPE(
        vocabulary,
        merges,
        unk_token=description.pieces[_unknown_id(description)].piece,
        fuse_unk=True,
        byte_fallback=description.trainer_spec.byte_fallback,
    )


def _unigram(description: Any) -> models.Unigram:
    scored = [(piece.piece, piece.score) for piece in description.pieces]
    return models.Unigram(
        scored,
        _unknown_id(description),
        byte_fallback=description.trainer_spec.byte_fallback,
    )


def _unknown_id(description: Any) -> int:
    """The id of the token for what has no token; every model of SentencePiece has one."""
    types = [piece.type for piece in description.pieces]
    return types.index(_PIECE_TYPES.UNKNOWN)


def _normalizer(described: Any, *, prepends: bool) -> normalizers.Normalizer:
    parts: list[Any] = []
    if described.precompiled_charsmap:
        parts.append(normalizers.Precompiled(described.precompiled_charsmap))
        # `tokenizers` looks up a character at a time; SentencePiece also composes those that follow
        # each other.
        if "nfkc" in described.name:
            parts.append(normalizers.NFC())
    if described.remove_extra_whitespaces:
        # Not `Strip`, which takes new lines away, too.
        parts.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        parts.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if prepends:
        parts.append(normalizers.Prepend(SPACE))
    parts.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(parts)


def _decoder(*, strips: bool) -> decoders.Decoder:
    # The space that the normalizer put before the text is stripped at last.
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        parts.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(parts)
