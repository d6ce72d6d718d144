"""The token corpora that a run configuration names: which there are, where they lie, and the jobs that make them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config.run import Corpus, Data, RunConfig
from pipeline.data import token_corpus as manifest
from pipeline.data.blend import Permutation
from pipeline.data.records import Document, Keys
from pipeline.data.token_corpus import Manifest, TokenCorpus
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.tokenizer_training import good_documents
from pipeline.data.unit_work import Job, is_heldout
from pipeline.errors import DataError


def train_folder(data: Data, corpus: str) -> Path:
    """Where the training part of `corpus` lies."""
    return data.folder / corpus


def heldout_folder(data: Data, corpus: str) -> Path:
    """Where the held-out part of `corpus` lies, if it has one."""
    return data.folder / f"{corpus}.heldout"


def has_heldout(data: Data, corpus: str) -> bool:
    """Whether `corpus` has a held-out part."""
    described = data.corpora[corpus]
    return bool(described.heldout_input) or described.heldout_fraction > 0


def is_tokenized(data: Data) -> bool:
    """Whether every corpus of a run is whole, with its held-out part where it has one."""
    folders = [train_folder(data, name) for name in data.corpora]
    folders += [heldout_folder(data, name) for name in data.corpora if has_heldout(data, name)]
    return all((folder / manifest.NAME).exists() for folder in folders)


def corpus_jobs(data: Data, tokenizer: Path) -> Iterator[Job]:
    """The jobs that make all corpora of a run, with the base model's own tokenizer."""
    for name, corpus in data.corpora.items():
        yield Job(
            inputs=tuple(corpus.input),
            tokenizer=str(tokenizer),
            output=train_folder(data, name),
            text_key=corpus.text_key,
            prompt_key=corpus.prompt_key,
            heldout_fraction=corpus.heldout_fraction,
        )
        if corpus.heldout_input:
            yield Job(
                inputs=tuple(corpus.heldout_input),
                tokenizer=str(tokenizer),
                output=heldout_folder(data, name),
                part="heldout",
                text_key=corpus.text_key,
                prompt_key=corpus.prompt_key,
            )


# --- Looking into a token corpus: its manifest in words, its shards checked against it, its documents as text again ---


def summary(manifest: Manifest) -> list[tuple[str, str]]:
    """What a manifest says, as pairs to print."""
    tokenizer = manifest.tokenizer
    rejected = ", ".join(f"{reason} {count:,}" for reason, count in manifest.rejected.items())
    return [
        ("part", manifest.part),
        ("documents", f"{manifest.documents:,}"),
        ("tokens", f"{manifest.tokens:,} ({manifest.token_dtype}, in {len(manifest.shards):,} shards)"),
        ("characters", f"{manifest.characters:,} ({manifest.tokens_per_character:.4f} tokens each)"),
        ("bytes", f"{manifest.bytes:,} ({manifest.tokens_per_byte:.4f} tokens each)"),
        *_prompts(manifest),
        ("tokenizer", f"{tokenizer.fingerprint}, {tokenizer.vocab_size:,} ids, encoded by {tokenizer.backend}"),
        ("a document is", f"{tokenizer.document_start} + its ids + {tokenizer.document_end}"),
        ("held-out fraction", f"{manifest.heldout_fraction}"),
        ("rejected", rejected or "none"),
        *(("input", f"{file.path} ({file.bytes:,} bytes, sha256 {file.sha256[:16]}…)") for file in manifest.inputs),
    ]


def _prompts(manifest: Manifest) -> list[tuple[str, str]]:
    if manifest.prompt_key is None:
        return []
    return [("prompts", f"{manifest.prompt_tokens:,} of the tokens, {manifest.prompt_bytes:,} of the bytes")]


def decoded_documents(corpus: TokenCorpus, tokenizer: Tokenizer, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Some documents, drawn at random, as (where, text), special tokens included.

    Raises:
        DataError: `tokenizer` is not the one that made the corpus.
    """
    if tokenizer.fingerprint != corpus.manifest.tokenizer.fingerprint:
        raise DataError(
            f"{tokenizer.path}: is not the tokenizer that made {corpus.folder}; its text would be gibberish"
        )
    order = Permutation(corpus.manifest.documents, seed)
    for draw in range(min(count, corpus.manifest.documents)):
        shard, document = corpus.locate_document(order[draw])
        yield f"{shard.prefix.name}, document {document}", tokenizer.decode(shard.document(document))


# --- The texts of a run's corpora that it does not train on ---------------------------------------------------------


def heldout_corpora(config: RunConfig) -> dict[str, Iterator[Document]]:
    """The held-out documents of every corpus that has some, by the corpus's name.

    Raises:
        DataError: none has.
    """
    found = {name: _documents(corpus) for name, corpus in config.data.corpora.items() if has_heldout(config.data, name)}
    if not found:
        raise DataError(
            f"data.corpora of {config.name}: none has a held-out part to score; set heldout_input or heldout_fraction"
        )
    return found


def _documents(corpus: Corpus) -> Iterator[Document]:
    keys = Keys(corpus.text_key, corpus.prompt_key)
    if corpus.heldout_input:
        return good_documents(corpus.heldout_input, keys)
    documents = good_documents(corpus.input, keys)
    return (document for document in documents if is_heldout(document.whole_text, corpus.heldout_fraction))
