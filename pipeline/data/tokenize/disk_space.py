"""About how many bytes a token corpus takes, from the beginning of its input files: for plans and
messages."""

from __future__ import annotations

from pipeline.data.corpus.indexed_dataset import token_dtype
from pipeline.data.sources.object_stores import InputPath
from pipeline.data.sources.records import Document, Keys
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.input_files import input_files, is_text
from pipeline.data.tokenize.units import Unit, beginning_of, unit_records
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer

_SAMPLED_FILES = 3
# Of text, at the beginning of each sampled file.
_SAMPLED_BYTES = 2**17
# Of a document in an .idx file: its length, its place, and its number of sequences.
_INDEX_BYTES = 20


def corpus_bytes(job: Job) -> int:
    """About how many bytes the tokens of `job` take, held-out part included.

    It reads the beginning of a few files: texts that grow longer further on make it wrong by as
    much.

    Raises:
        DataError: an input is missing, or cannot be read.
    """
    sizes = input_files(job.corpus.input)
    if not is_text(job.corpus.input):
        # Tokens of Megatron-LM are framed anew, with ids as wide or narrower.
        return sum(sizes.values())
    tokenizer = load_tokenizer(job.tokenizer, end_of_document=job.end_of_document)
    files = [*sizes]
    places = sorted({0, len(files) // 2, len(files) - 1})[:_SAMPLED_FILES]
    file_bytes = 0
    written_bytes = 0.0
    for place in places:
        file = files[place]
        file_bytes += sizes[file]
        written_bytes += _bytes_of_file(file, job.keys, tokenizer)
    return round(sum(sizes.values()) * written_bytes / file_bytes)


def _bytes_of_file(file: InputPath, keys: Keys, tokenizer: Tokenizer) -> float:
    """About what the tokens of one file take."""
    unit, whole_bytes = beginning_of(file, keys, _SAMPLED_BYTES)
    documents = _first_documents(unit, keys)
    texts = [document.whole_text for document in documents]
    text_bytes = sum(document.utf8_bytes for document in documents)
    if text_bytes == 0:
        return 0.0
    framing = len(tokenizer.document_start) + len(tokenizer.document_end)
    tokens = len(tokenizer.reference.encode(texts).ids) + framing * len(texts)
    written = tokens * token_dtype(tokenizer.vocab_size).itemsize + _INDEX_BYTES * len(texts)
    # Of lines all that was read counts, keys and brackets of JSON included.
    is_of_lines = unit.kind in ("jsonl", "text") and keys.document == "line"
    read_bytes = max(text_bytes, unit.size) if is_of_lines else text_bytes
    return written * max(1.0, whole_bytes / read_bytes)


def _first_documents(unit: Unit, keys: Keys) -> list[Document]:
    found: list[Document] = []
    taken = 0
    for record in unit_records(unit, keys):
        if isinstance(record, Document):
            found.append(record)
            taken += record.utf8_bytes
        if taken >= _SAMPLED_BYTES:
            break
    return found
