"""Shows what a token corpus holds, and checks it against its manifest.

    scale-cpt inspect-data runs/demo/tokens/korean --tokenizer examples/data/models/stories260K
    scale-cpt inspect-data runs/demo/tokens

With --tokenizer some documents are decoded. Of a folder of corpora each corpus is shown in a line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pipeline.command_line import folder_or_hub, non_negative
from pipeline.data.corpus.manifest import CORPUS, MANIFEST, Manifest, load_manifest
from pipeline.data.corpus.token_corpus import SAMPLED_BYTES, TokenCorpus
from pipeline.data.dataset.blend import Permutation
from pipeline.data.tokenize.corpus_folder import check_finished
from pipeline.data.tokenize.unit_records import QUARANTINE, STATE
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import DataError, printable
from pipeline.evaluation.table import table
from pipeline.files.folders import other_kind


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "corpus", type=Path, help="the folder of a corpus, or a folder of such folders"
    )
    parser.add_argument(
        "--tokenizer",
        type=folder_or_hub,
        help="decode some documents with this tokenizer, which must have made the corpus",
    )
    parser.add_argument(
        "--samples",
        type=non_negative,
        default=3,
        help="how many documents are decoded (default: 3)",
    )
    parser.add_argument(
        "--characters",
        type=non_negative,
        default=400,
        help="how many characters of a document are shown at most (default: 400)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed that draws the documents (default: 0)"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every byte with the manifest's hashes, not only some",
    )


def main(arguments: argparse.Namespace) -> None:
    sampled_bytes = None if arguments.verify else SAMPLED_BYTES
    folders = _corpora_in(arguments.corpus)
    if folders:
        columns = ["", "part", "documents", "tokens", "tokens a byte", "rejected", "tokenizer"]
        print(table(columns, [_row(folder, sampled_bytes) for folder in folders]))
        return
    corpus = TokenCorpus(arguments.corpus)
    for name, value in _summary(corpus.manifest):
        print(f"{name:18} {value}")
    check_finished(arguments.corpus, sampled=sampled_bytes)
    checked = (
        f"sizes, indexes and {SAMPLED_BYTES // 2**20} MiB of tokens are those that were written"
    )
    if arguments.verify:
        checked = "every byte is the one that was written"
    print(f"{'shards':18} {checked}")
    quarantine = arguments.corpus / QUARANTINE
    if quarantine.exists():
        print(f"{'rejected records':18} {quarantine}")
    if arguments.tokenizer:
        _print_documents(corpus, load_tokenizer(arguments.tokenizer), arguments)


def _corpora_in(folder: Path) -> list[Path]:
    """The folders of corpora in a folder; none if it is a corpus itself, even an unfinished one."""
    if (folder / MANIFEST).exists() or (folder / STATE).exists():
        return []
    # In a run's folder other folders have a manifest too.
    made = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    found = {path for path in made if other_kind(CORPUS, path) is None}
    found |= {path.parent for path in folder.glob(f"*/{STATE}")}
    return sorted(found)


def _row(folder: Path, sampled_bytes: int | None) -> list[str]:
    """A corpus in a line, checked against its manifest."""
    if not (folder / MANIFEST).exists():
        return [folder.name, *[""] * 5, "not finished: start the tool that makes it again"]
    manifest = load_manifest(folder)
    check_finished(folder, sampled=sampled_bytes)
    return [
        folder.name,
        manifest.part,
        f"{manifest.documents:,}",
        f"{manifest.tokens:,}",
        f"{manifest.tokens_per_byte:.3f}",
        f"{sum(manifest.rejected.values()):,}",
        manifest.tokenizer.fingerprint[:24],
    ]


def _summary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What the manifest says, as names and values."""
    yield "part", manifest.part
    yield "documents", f"{manifest.documents:,}"
    stored = f"{manifest.token_dtype}, in {len(manifest.shards):,} shards"
    yield "tokens", f"{manifest.tokens:,} ({stored})"
    yield "characters", f"{manifest.characters:,} ({manifest.tokens_per_character:.4f} tokens each)"
    yield "bytes", f"{manifest.bytes:,} ({manifest.tokens_per_byte:.4f} tokens each)"
    if manifest.prompt_key is not None:
        prompts = (
            f"{manifest.prompt_tokens:,} of the tokens, {manifest.prompt_bytes:,} of the bytes"
        )
        yield "prompts", prompts
    tokenizer = manifest.tokenizer
    made = "encoded" if manifest.sampling is None else "sampled"
    ids = f"{tokenizer.vocab_size:,} ids, {made} by {tokenizer.backend}"
    yield "tokenizer", f"{tokenizer.fingerprint}, {ids}"
    yield "a document is", f"{tokenizer.document_start} + its ids + {tokenizer.document_end}"
    yield "held-out fraction", f"{manifest.heldout_fraction}"
    rejected = [f"{reason} {count:,}" for reason, count in manifest.rejected.items()]
    yield "rejected", ", ".join(rejected) or "none"
    sampling = manifest.sampling
    if sampling is not None:
        files = [f"{name} (sha256 {digest[:16]}…)" for name, digest in sampling.base.items()]
        yield "written by", ", ".join(files)
        length = f"at most {sampling.max_tokens} tokens a document"
        yield "sampled at", f"temperature {sampling.temperature}, {length}"
        yield "seed", f"{sampling.seed}, {sampling.batch_size} documents at a time"
    spelled = f"spelled in the texts {manifest.special_tokens_spelled:,} times"
    if manifest.special_tokens is not None:
        spelled += f", kept as {manifest.special_tokens}"
    yield "special tokens", spelled
    lost = f"{manifest.lost_characters:,} lost characters"
    yield "cannot be spelled", f"{manifest.unknown_tokens:,} unknown tokens, {lost}"
    for file in manifest.inputs:
        yield "input", f"{file.path} ({file.bytes:,} bytes, sha256 {file.sha256[:16]}…)"


def _print_documents(
    corpus: TokenCorpus, tokenizer: Tokenizer, arguments: argparse.Namespace
) -> None:
    """Prints documents drawn at random with their places, special tokens included."""
    manifest = corpus.manifest
    if tokenizer.fingerprint != manifest.tokenizer.fingerprint:
        raise DataError(
            f"{tokenizer.path}: did not make {corpus.folder}; the decoded text would be meaningless"
        )
    order = Permutation(manifest.documents, arguments.seed)
    for draw in range(min(arguments.samples, manifest.documents)):
        shard, document = corpus.locate_document(order[draw])
        text = tokenizer.decode(shard.document(document))
        shown = text[: arguments.characters]
        if len(text) > arguments.characters:
            shown += "…"
        print(f"\n--- {shard.prefix.name}, document {document} ---\n{printable(shown)}")
