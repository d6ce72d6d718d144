"""Shows what a token corpus holds, and checks it against its manifest.

    scale-cpt inspect-data runs/demo/tokens/korean --tokenizer examples/data/models/stories260K
    scale-cpt inspect-data runs/demo/tokens

A folder of corpora gives a line for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pipeline.command_line import folder_or_hub
from pipeline.data.corpus.manifest import MANIFEST, Manifest, load_manifest
from pipeline.data.corpus.token_corpus import SAMPLED_BYTES, TokenCorpus
from pipeline.data.dataset.blend import Permutation
from pipeline.data.tokenize.queue import QUARANTINE, STATE, check_finished
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import DataError, printable
from pipeline.evaluation.table import table


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", type=Path, help="the folder of a corpus, or one that holds such folders")
    add(
        "--tokenizer",
        type=folder_or_hub,
        help="decode samples with this tokenizer, the one that made the corpus",
    )
    add("--samples", type=int, default=3, help="how many documents to decode (default: 3)")
    add(
        "--characters",
        type=int,
        default=400,
        help="show at most this many characters of each (default: 400)",
    )
    add("--seed", type=int, default=0, help="which documents (default: 0)")
    add(
        "--verify",
        action="store_true",
        help="compare every byte with the manifest's hashes, not only some",
    )


def main(options: argparse.Namespace) -> None:
    sampled = None if options.verify else SAMPLED_BYTES
    # A folder that is itself a corpus, also one that is not finished, is none of corpora.
    if not any((options.corpus / name).exists() for name in (MANIFEST, STATE)):
        found = {
            path.parent for name in (MANIFEST, STATE) for path in options.corpus.glob(f"*/{name}")
        }
        if found:
            rows = [_row(folder, sampled) for folder in sorted(found)]
            print(
                table(
                    ["", "part", "documents", "tokens", "tokens a byte", "rejected", "tokenizer"],
                    rows,
                )
            )
            return
    corpus = TokenCorpus(options.corpus)
    for name, value in _summary(corpus.manifest):
        print(f"{name:18} {value}")
    check_finished(options.corpus, sampled=sampled)
    some = f"sizes, indexes and {SAMPLED_BYTES // 2**20} MiB of tokens are those that were written"
    print(f"{'shards':18} {'every byte is the one that was written' if options.verify else some}")
    if (options.corpus / QUARANTINE).exists():
        print(f"{'rejected records':18} {options.corpus / QUARANTINE}")
    if options.tokenizer:
        _print_documents(corpus, load_tokenizer(options.tokenizer), options)


def _row(folder: Path, sampled: int | None) -> list[str]:
    """A corpus in a line, checked against its manifest."""
    if not (folder / MANIFEST).exists():
        return [folder.name, *[""] * 5, "not finished: start the tool that makes it again"]
    manifest = load_manifest(folder)
    check_finished(folder, sampled=sampled)
    counts = [f"{manifest.documents:,}", f"{manifest.tokens:,}", f"{manifest.tokens_per_byte:.3f}"]
    rejected = f"{sum(manifest.rejected.values()):,}"
    return [folder.name, manifest.part, *counts, rejected, manifest.tokenizer.fingerprint[:24]]


def _summary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    tokenizer = manifest.tokenizer
    made = "encoded" if manifest.sampling is None else "sampled"
    yield "part", manifest.part
    yield "documents", f"{manifest.documents:,}"
    yield (
        "tokens",
        f"{manifest.tokens:,} ({manifest.token_dtype}, in {len(manifest.shards):,} shards)",
    )
    yield "characters", f"{manifest.characters:,} ({manifest.tokens_per_character:.4f} tokens each)"
    yield "bytes", f"{manifest.bytes:,} ({manifest.tokens_per_byte:.4f} tokens each)"
    if manifest.prompt_key is not None:
        yield (
            "prompts",
            f"{manifest.prompt_tokens:,} of the tokens, {manifest.prompt_bytes:,} of the bytes",
        )
    yield (
        "tokenizer",
        f"{tokenizer.fingerprint}, {tokenizer.vocab_size:,} ids, {made} by {tokenizer.backend}",
    )
    yield "a document is", f"{tokenizer.document_start} + its ids + {tokenizer.document_end}"
    yield "held-out fraction", f"{manifest.heldout_fraction}"
    yield (
        "rejected",
        ", ".join(f"{reason} {count:,}" for reason, count in manifest.rejected.items()) or "none",
    )
    if (sampling := manifest.sampling) is not None:
        yield (
            "written by",
            ", ".join(f"{name} (sha256 {digest[:16]}…)" for name, digest in sampling.base.items()),
        )
        yield (
            "sampled at",
            f"temperature {sampling.temperature}, at most {sampling.max_tokens} tokens a document",
        )
        yield "seed", f"{sampling.seed}, {sampling.batch_size} documents at a time"
    yield (
        "special tokens",
        f"spelled in the texts {manifest.special_tokens_spelled:,} times{_kept_as(manifest)}",
    )
    yield (
        "cannot be spelled",
        f"{manifest.unknown_tokens:,} unknown tokens, {manifest.lost_characters:,} lost characters",
    )
    for file in manifest.inputs:
        yield "input", f"{file.path} ({file.bytes:,} bytes, sha256 {file.sha256[:16]}…)"


def _kept_as(manifest: Manifest) -> str:
    """What the special tokens that texts spell became, where the manifest says so."""
    return "" if manifest.special_tokens is None else f", kept as {manifest.special_tokens}"


def _print_documents(
    corpus: TokenCorpus, tokenizer: Tokenizer, options: argparse.Namespace
) -> None:
    """Random documents with their places, special tokens included."""
    if tokenizer.fingerprint != corpus.manifest.tokenizer.fingerprint:
        raise DataError(
            f"{tokenizer.path}: did not make {corpus.folder}; the decoded text would be meaningless"
        )
    order = Permutation(corpus.manifest.documents, options.seed)
    for draw in range(min(options.samples, corpus.manifest.documents)):
        shard, document = corpus.locate_document(order[draw])
        text = tokenizer.decode(shard.document(document))
        shown = text[: options.characters] + "…" * (len(text) > options.characters)
        print(f"\n--- {shard.prefix.name}, document {document} ---\n{printable(shown)}")
