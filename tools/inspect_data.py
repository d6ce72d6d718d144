"""Shows what a token corpus holds, checks it against its manifest, and decodes some documents.

    scale-cpt inspect-data runs/demo/tokens/korean --tokenizer data/models/stories260K
    scale-cpt inspect-data runs/demo/tokens

A folder of corpora gives a line for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.command_line import folder_or_hub, run_program
from pipeline.data.blend import Permutation
from pipeline.data.jobs import QUARANTINE, STATE, check_finished
from pipeline.data.token_corpus import MANIFEST, SAMPLED_BLOCKS, Manifest, TokenCorpus, load_manifest
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.errors import DataError
from pipeline.evaluation.table import table


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", type=Path, help="the folder of a corpus, or one that holds such folders")
    add("--tokenizer", type=folder_or_hub, help="decode samples with this tokenizer, the one that made the corpus")
    add("--samples", type=int, default=3, help="how many documents to decode (default: 3)")
    add("--characters", type=int, default=400, help="show at most this many characters of each (default: 400)")
    add("--seed", type=int, default=0, help="which documents (default: 0)")
    add("--verify", action="store_true", help="compare every byte with the manifest's hashes, not only some")


def main(options: argparse.Namespace) -> None:
    if not (options.corpus / MANIFEST).exists() and (found := _corpora_in(options.corpus)):
        print(_overview(found, every_byte=options.verify))
        return
    corpus = TokenCorpus(options.corpus)
    for name, value in _summary(corpus.manifest):
        print(f"{name:18} {value}")
    check_finished(options.corpus, blocks=None if options.verify else SAMPLED_BLOCKS)
    print(f"{'shards':18} {_checked(options.verify)}")
    if (options.corpus / QUARANTINE).exists():
        print(f"{'rejected records':18} {options.corpus / QUARANTINE}")
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
        for where, text in _decoded_documents(corpus, tokenizer, options.samples, options.seed):
            print(f"\n--- {where} ---\n{text[: options.characters]}{'…' if len(text) > options.characters else ''}")


def _corpora_in(folder: Path) -> list[Path]:
    """The corpora in a folder, finished or begun; empty where it is itself one that is not finished."""
    if (folder / STATE).is_dir():
        return []
    return sorted({path.parent for name in (MANIFEST, STATE) for path in folder.glob(f"*/{name}")})


def _overview(folders: Sequence[Path], *, every_byte: bool) -> str:
    """A line for each corpus, checked against its manifest."""
    rows = []
    for folder in folders:
        if not (folder / MANIFEST).exists():
            rows.append([folder.name, *[""] * 5, "not finished: start the tool that makes it again"])
            continue
        manifest = load_manifest(folder)
        check_finished(folder, blocks=None if every_byte else SAMPLED_BLOCKS)
        cells = [manifest.part, f"{manifest.documents:,}", f"{manifest.tokens:,}", f"{manifest.tokens_per_byte:.3f}"]
        rows.append([folder.name, *cells, f"{sum(manifest.rejected.values()):,}", manifest.tokenizer.fingerprint[:24]])
    return table(["", "part", "documents", "tokens", "tokens a byte", "rejected", "tokenizer"], rows)


def _checked(every_byte: bool) -> str:
    if every_byte:
        return "every byte is the one that was written"
    return f"sizes, indexes and up to {SAMPLED_BLOCKS} blocks of tokens are those that were written"


def _summary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    tokenizer = manifest.tokenizer
    made = "encoded" if manifest.sampling is None else "sampled"
    yield "part", manifest.part
    yield "documents", f"{manifest.documents:,}"
    yield "tokens", f"{manifest.tokens:,} ({manifest.token_dtype}, in {len(manifest.shards):,} shards)"
    yield "characters", f"{manifest.characters:,} ({manifest.tokens_per_character:.4f} tokens each)"
    yield "bytes", f"{manifest.bytes:,} ({manifest.tokens_per_byte:.4f} tokens each)"
    if manifest.prompt_key is not None:
        yield "prompts", f"{manifest.prompt_tokens:,} of the tokens, {manifest.prompt_bytes:,} of the bytes"
    yield "tokenizer", f"{tokenizer.fingerprint}, {tokenizer.vocab_size:,} ids, {made} by {tokenizer.backend}"
    yield "a document is", f"{tokenizer.document_start} + its ids + {tokenizer.document_end}"
    yield "held-out fraction", f"{manifest.heldout_fraction}"
    yield "rejected", ", ".join(f"{reason} {count:,}" for reason, count in manifest.rejected.items()) or "none"
    if (sampling := manifest.sampling) is not None:
        yield "written by", ", ".join(f"{name} (sha256 {digest[:16]}…)" for name, digest in sampling.base.items())
        yield "sampled at", f"temperature {sampling.temperature}, at most {sampling.max_tokens} tokens a document"
        yield "seed", f"{sampling.seed}, {sampling.batch_size} documents at a time"
    for file in manifest.inputs:
        yield "input", f"{file.path} ({file.bytes:,} bytes, sha256 {file.sha256[:16]}…)"


def _decoded_documents(corpus: TokenCorpus, tokenizer: Tokenizer, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Random documents as (location, text), special tokens included."""
    if tokenizer.fingerprint != corpus.manifest.tokenizer.fingerprint:
        raise DataError(f"{tokenizer.path}: did not make {corpus.folder}; the decoded text would be meaningless")
    order = Permutation(corpus.manifest.documents, seed)
    for draw in range(min(count, corpus.manifest.documents)):
        shard, document = corpus.locate_document(order[draw])
        yield f"{shard.prefix.name}, document {document}", tokenizer.decode(shard.document(document))


if __name__ == "__main__":
    run_program(add_options, main, __doc__)
