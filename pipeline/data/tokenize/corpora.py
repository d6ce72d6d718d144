"""The corpora of a run configuration: their folders, the jobs that make them, and their held-out
documents."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from pipeline.config.data import CHAT_DATE, ChatStart, Corpus, Data
from pipeline.config.run import RunConfig
from pipeline.data.corpus.manifest import MANIFEST, load_manifest
from pipeline.data.sources.records import Document, HeldoutBy, Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.input_files import is_text
from pipeline.data.tokenize.text_hashes import hash_of_words
from pipeline.data.tokenizer.chats import chat_template
from pipeline.errors import DataError


@dataclass(frozen=True)
class Job:
    """Everything that decides what a token corpus holds. Workers and the distribution of work are
    not part of it."""

    corpus: Corpus
    tokenizer: Path
    output: Path
    """its folder; one whose name ends in .heldout is a held-out part"""
    end_of_document: str | None = None
    """the token that ends a document, where that is not the tokenizer's own"""
    unit_bytes: int | None = None
    """the size of a unit of work; None derives it from the size of the input"""
    reference_only: bool = False
    apart_from: tuple[Path, ...] = ()
    """the held-out parts of which no document may be in it; of a held-out part the training parts
    """
    chat_date: date = CHAT_DATE
    """what a chat template is told is today"""
    chat_start: ChatStart = "template"
    """what a chat begins with"""

    @property
    def keys(self) -> Keys:
        """Where documents are in the inputs."""
        return keys_of(self.corpus, self.tokenizer, self.chat_date, self.chat_start)

    @property
    def part(self) -> str:
        """What the manifest says it is."""
        return "heldout" if self.output.name.endswith(".heldout") else "train"


def keys_of(corpus: Corpus, tokenizer: Path, chat_date: date, chat_start: ChatStart) -> Keys:
    """Where documents are in the inputs of a corpus.

    `chat_date` is what a chat template is told is today, `chat_start` what a chat begins with.

    Raises:
        DataError: a corpus of chats has a tokenizer without a chat template.
    """
    keys = text_keys_of(corpus)
    key = corpus.messages_key
    if key is None:
        return keys._replace(prompt=corpus.prompt_key)
    keeps_control = corpus.special_tokens == "control"
    template = chat_template(
        tokenizer, today=chat_date, keeps_control=keeps_control, start=chat_start
    )
    return keys._replace(text=key, prompt=key, chat=template)


def text_keys_of(corpus: Corpus) -> Keys:
    """Where the texts of a corpus are, without prompts and chats."""
    return Keys(
        corpus.text_key,
        document=corpus.document,
        encoding=corpus.encoding,
        quoting=corpus.quoting,
        normalize=corpus.normalize,
        special_tokens=corpus.special_tokens,
        allow_damaged=corpus.allow_damaged,
    )


def is_heldout(
    text: str, fraction: float, by: HeldoutBy = "words", *, utf8: bytes | None = None
) -> bool:
    """Whether a document is held out: by a hash of its text (prompt included), so that copies stay
    together.

    `by` words: also copies that differ in white space, or in the form of Unicode; text: as earlier
    versions did it. `utf8`: the text in UTF-8, where the caller has it.
    """
    if by == "words":
        digest = hash_of_words(text, utf8)
    else:
        # A lone surrogate cannot be encoded; any other character does in its place.
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    # The digest has 8 bytes, so its value is uniform below 2^64.
    return int.from_bytes(digest, "big") < fraction * 2**64


def train_folder(data: Data, corpus: str) -> Path:
    return data.folder / corpus


def heldout_folder(data: Data, corpus: str) -> Path:
    return data.folder / f"{corpus}.heldout"


def cleaned_folder(data: Data, corpus: str) -> Path:
    """Of a corpus with a section `clean`; complete once it is there."""
    return data.folder / f"{corpus}.clean"


def source_of(data: Data, name: str) -> Corpus:
    """The corpus `name` as tokenization reads it: the cleaned text in place of the input, once
    there is one."""
    corpus = data.corpora[name]
    folder = cleaned_folder(data, name)
    if corpus.clean is None or not folder.is_dir():
        return corpus
    changes = {
        "input": [f"{glob.escape(str(folder))}/*.jsonl.zst"],
        "text_key": "text",
        "document": "line",
        "encoding": None,
    }
    return corpus.model_copy(update=changes)


def heldout_source(data: Data, name: str) -> Corpus:
    """The corpus `name` with the files of its held-out part as input, which are not cleaned.

    Without such files the held-out part comes from the corpus's own input, as `source_of` has it.
    """
    corpus = data.corpora[name]
    if corpus.heldout_input:
        return corpus.model_copy(update={"input": corpus.heldout_input})
    return source_of(data, name)


def has_heldout(data: Data, corpus: str) -> bool:
    described = data.corpora[corpus]
    return bool(described.heldout_input) or described.heldout_fraction > 0


def unfinished_corpora(data: Data) -> list[str]:
    """The corpora of a run that are not complete, held-out parts included, in the run's order."""
    unfinished: list[str] = []
    for name in data.corpora:
        folders = [train_folder(data, name)]
        if has_heldout(data, name):
            folders.append(heldout_folder(data, name))
        if not all((folder / MANIFEST).exists() for folder in folders):
            unfinished.append(name)
    return unfinished


def is_tokenized(data: Data) -> bool:
    return not unfinished_corpora(data)


def named_inputs(data: Data) -> Iterator[Sequence[str]]:
    """The files and patterns that each part of each corpus is made from.

    For text that the base writes, these are its prompts. For text that is cleaned, also the
    benchmarks that it is compared with.
    """
    for corpus in data.corpora.values():
        named = [corpus.input, corpus.heldout_input]
        if corpus.sample is not None:
            named.append(corpus.sample.prompts)
        if corpus.clean is not None:
            named.append(corpus.clean.benchmarks)
        for files in named:
            if files:
                yield files


def corpus_jobs(data: Data, tokenizer: Path) -> Iterator[Job]:
    """The jobs that tokenize the corpora of a run, with the run's tokenizer.

    Held-out parts come first, because the parts after them are compared with them. A corpus whose
    held-out part is its own input is to be memorised. Where two corpora hold out the same share,
    they hold out the same documents.
    """
    named = {name: corpus for name, corpus in data.corpora.items() if corpus.sample is None}
    train = tuple(train_folder(data, name) for name in named)
    job_of = partial(Job, tokenizer=tokenizer, chat_date=data.chat_date, chat_start=data.chat_start)
    for name, corpus in named.items():
        if corpus.heldout_input:
            apart = () if _is_to_be_memorised(corpus) else train
            source = heldout_source(data, name)
            yield job_of(source, output=heldout_folder(data, name), apart_from=apart)

    # The largest share first: a smaller one is part of it, as both are by the same hash. So a
    # corpus need not be compared with the parts of those after it.
    for name, corpus in sorted(named.items(), key=_heldout_share, reverse=True):
        heldout: list[Path] = []
        for other, its in named.items():
            is_larger = its.heldout_fraction > corpus.heldout_fraction
            has_files = bool(its.heldout_input) and not _is_to_be_memorised(its)
            if is_larger or has_files:
                heldout.append(heldout_folder(data, other))
        output = train_folder(data, name)
        yield job_of(source_of(data, name), output=output, apart_from=tuple(heldout))


def _heldout_share(item: tuple[str, Corpus]) -> float:
    _, corpus = item
    return corpus.heldout_fraction


def _is_to_be_memorised(corpus: Corpus) -> bool:
    heldout = {Path(name).resolve() for name in corpus.heldout_input}
    read = {Path(name).resolve() for name in corpus.input}
    return heldout == read


def check_heldout(config: RunConfig) -> dict[str, Corpus]:
    """The corpora that have held-out documents as text, each with the files that hold them as
    input.

    Raises:
        DataError: there is none, without which a run can be neither gated nor evaluated.
    """
    found: dict[str, Corpus] = {}
    for name in config.data.corpora:
        if has_heldout(config.data, name):
            corpus = heldout_source(config.data, name)
            if is_text(corpus.input):
                found[name] = corpus
    if not found:
        raise DataError(
            f"data.corpora of {config.name}: none has held-out text to score; name other "
            "files as heldout_input, or set heldout_fraction, such as 0.005, before the corpus is "
            "tokenized"
        )
    return found


def heldout_corpora(config: RunConfig) -> dict[str, Iterator[Document]]:
    """The held-out documents of every corpus that has any as text, by its name.

    Raises as `check_heldout`.
    """
    found = check_heldout(config)
    return {name: _heldout_documents(config, name, corpus) for name, corpus in found.items()}


def _heldout_documents(config: RunConfig, name: str, corpus: Corpus) -> Iterator[Document]:
    keys = keys_of(corpus, config.tokenizer, config.data.chat_date, config.data.chat_start)
    fraction = corpus.heldout_fraction
    by = _held_out_by(heldout_folder(config.data, name), name, corpus)
    for document in good_documents(corpus.input, keys):
        # Of files that are held out every document counts, of a shared input only the chosen ones.
        if corpus.heldout_input or is_heldout(document.held_out_by, fraction, by):
            yield document


def _held_out_by(folder: Path, name: str, corpus: Corpus) -> HeldoutBy:
    """How the documents of a held-out part were chosen; of one that is not made yet, by words.

    Raises:
        DataError: it was made with another heldout_fraction.
    """
    if not (folder / MANIFEST).exists():
        return "words"
    made = load_manifest(folder)
    if not corpus.heldout_input and made.heldout_fraction != corpus.heldout_fraction:
        # With a larger one, documents that were trained on would count as held out.
        raise DataError(
            f"data.corpora.{name}.heldout_fraction: expected {made.heldout_fraction}, with which "
            f"{folder} was made, found {corpus.heldout_fraction}; set it back"
        )
    return made.heldout_by
