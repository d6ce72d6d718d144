"""Looking into a token corpus: its manifest in words, its shards checked against it, its documents as text again."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.manifest import Manifest
from pipeline.data.permutation import Permutation
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError


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
