"""The vocabulary of a run against its base: the new tokens, and that every id has a row."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.run import RunConfig
from pipeline.data.tokenizer.extension.vocabulary import RECORD, read_vocabulary
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import BaseModelError, DataError
from pipeline.model.base_folder import BaseFolder
from pipeline.model.new_tokens import NewTokens
from pipeline.model.spec import DecoderSpec


def with_new_tokens(config: RunConfig, base: BaseFolder) -> BaseFolder:
    """The base of a run, with the tokens by which the run extends its vocabulary.

    Raises:
        DataError: if the extended tokenizer is missing, damaged, or of another base.
    """
    new_tokens = _new_tokens(config, base.spec)
    if new_tokens is None:
        return base
    return replace(base, spec=replace(base.spec, new_tokens=len(new_tokens)), new_tokens=new_tokens)


def extended_spec(config: RunConfig, spec: DecoderSpec) -> DecoderSpec:
    """The architecture of a run's base with the run's new tokens; the base itself may be missing.

    Raises:
        DataError: as `with_new_tokens`.
    """
    new_tokens = _new_tokens(config, spec)
    return replace(spec, new_tokens=0 if new_tokens is None else len(new_tokens))


def _new_tokens(config: RunConfig, spec: DecoderSpec) -> NewTokens | None:
    if config.vocabulary is None:
        return None
    folder = config.vocabulary.folder
    again = "make it again with scale-cpt vocabulary"
    record = read_vocabulary(folder)
    # By fingerprint and not by path: a tokenizer that was made again, with other merges, gives the
    # same ids other meanings.
    if load_tokenizer(folder).fingerprint != record.tokenizer:
        raise DataError(f"{folder}: its tokenizer is not the one that {RECORD} describes; {again}")
    if record.base_rows != spec.vocab_size or (
        config.base.exists() and load_tokenizer(config.base).fingerprint != record.base_tokenizer
    ):
        raise DataError(
            f"vocabulary.folder: {folder} extends another tokenizer than that of {config.base}, or "
            f"its first new id, {record.base_rows}, is not the base's vocab_size "
            f"{spec.vocab_size}; {again} from this base"
        )
    return NewTokens(
        [new.replaces for new in record.tokens], config.vocabulary.initial, record.tokenizer
    )


def check_vocabulary(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    """Checks that every id of the tokenizer has a row in the embedding.

    Tensor-parallel ranks would silently read a token without one as zeros, and a single GPU would
    fail.

    Raises:
        BaseModelError: some ids have no row.
    """
    if tokenizer.vocab_size > spec.vocab_size + spec.new_tokens:
        raise BaseModelError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, but the base's "
            f"vocab_size is {spec.vocab_size}; give the base a row for each "
            "(resize_token_embeddings of transformers), or remove the tokens beyond from the "
            "tokenizer"
        )
