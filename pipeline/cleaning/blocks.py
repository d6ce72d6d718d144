"""What datatrove lacks: this project's readers, patterns of Korean text, and words without a model of a language."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import ftfy  # noqa: F401  # datatrove asks for it late
import numpy as np
import numpy.typing as npt
import orjson
from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont import NGramsDecontFilter
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.filters import LanguageFilter
from datatrove.pipeline.formatters import SymbolLinesFormatter
from datatrove.pipeline.formatters.base import BaseFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.utils.text import ngrams, simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

from pipeline.cleaning.text import mended, whole_text, without_boilerplate_lines, without_personal
from pipeline.data.readers import text_records
from pipeline.data.records import Keys, Rejected
from pipeline.data.text_streams import open_stream, text_length
from pipeline.data.units import Unit, unit_records
from pipeline.errors import DataError, MissingPackageError, faults_of_library


class Words(WordTokenizer):
    """Splits text into words and punctuation marks."""

    _WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")

    def word_tokenize(self, text: str) -> list[str]:
        return self._WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError  # no block here asks for sentences

    span_tokenize = sent_tokenize


class Records(PipelineStep):
    """Reads what tokenization reads: the k-th of n tasks every n-th unit. Rejected records count as dropped."""

    type, name = "📖 - READER", "records"

    def __init__(self, units: Sequence[tuple[Unit, Keys]]) -> None:
        super().__init__()
        self.units = units

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for unit, keys in self.units[rank::world_size]:
            for number, record in enumerate(unit_records(unit, keys)):
                self.stat_update("total")
                if isinstance(record, Rejected):
                    self.stat_update("dropped", f"dropped_{record.reason}")
                else:
                    yield Document(record.text, f"{unit.name}-{number}")


class Shard(JsonlReader):
    """Reads the shard that the same task of an earlier stage wrote; it wrote none where it had nothing to write."""

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        name = f"{rank:05d}.jsonl.zst"
        return self.read_files_shard([name] if self.data_folder.isfile(name) else [])


def in_language(model: str, labels: Sequence[str], least: float, exclusion_writer: DiskWriter) -> LanguageFilter:
    """Keeps documents of whose language, one of `labels`, a model of fastText is that sure."""
    try:
        return LanguageFilter([*labels], least, exclusion_writer, model)
    except ImportError:
        raise MissingPackageError(
            f"{model}: fasttext is not installed; pip install 'scale-cpt[clean,fasttext]'"
        ) from None


class Formatter(BaseFormatter):
    """Formats text by one function after the other, and counts the documents that this changes."""

    def __init__(self, *functions: Callable[[str], str]) -> None:
        super().__init__()
        self.functions = functions

    def format(self, text: str) -> str:
        formatted = text
        for function in self.functions:
            formatted = function(formatted)
        if formatted != text:
            self.stat_update("changed")
        return formatted


def mend() -> Formatter:
    """Mends text that was decoded with a wrong encoding, UTF-8 or CP949; then NFC."""
    return Formatter(mended)


def without_boilerplate() -> Formatter:
    """Removes lines that only mark, sign or frame a page, and those of symbols alone."""
    return Formatter(without_boilerplate_lines, SymbolLinesFormatter().format)


def without_personal_data() -> Formatter:
    """Replaces mail addresses, public IP addresses, and Korea's phone and resident registration numbers."""
    return Formatter(without_personal)


class PlainFolder(DataFolder):
    """A folder whose own name is no pattern, even where it has brackets."""

    def list_files(
        self,
        subdirectory: str = "",
        recursive: bool = True,
        glob_pattern: str | None = None,
        include_directories: bool = False,
    ) -> list[str]:
        found = super().list_files(subdirectory, recursive, None, include_directories)
        if glob_pattern is None:
            return list(found)
        return [file for file in found if fnmatch(file.rpartition("/")[2], glob_pattern.rpartition("/")[2])]


class Signatures(MinhashDedupSignature):
    """Signatures for MinHash, also of texts with fewer words than a shingle: of these, exact copies are alike."""

    def get_shingles(self, text: str) -> npt.NDArray[np.uint64]:
        found = super().get_shingles(text)
        if not found.size:
            found = np.array([[self._hash_func(whole_text(text))]], dtype=np.uint64)
        return found


def benchmark_lines(files: Sequence[Path], *_: object) -> Iterator[Document]:
    """The lines of JSONL files, whatever their keys are: these do no harm among the words."""
    for file in files:
        for line in text_records(open_stream(file), "text", 0, text_length(file)[0], Keys()):
            if not isinstance(line, Rejected):
                with faults_of_library(f"{file}: a benchmark is JSONL, found {line.text[:60]!r}", DataError):
                    yield Document(orjson.dumps(orjson.loads(line.text)).decode().replace("\\n", " "), str(file))


def index_words(within: NGramsDecontFilter, source: str, data: Iterable[Document], rank: int, _: int) -> None:
    """Adds documents to the index of a filter; datatrove's own block for this reads tasks of lighteval alone."""
    config, split, found = within.config, within.tokenizer.word_tokenize, set[int]()
    for doc in data:
        words = split(simplify_text(doc.text, config.norm_config))
        found.update(within.hash_func(" ".join(words_in_a_row)) for words_in_a_row in ngrams(words, config.n_grams))
    with within.index_folder.open(f"{source}-{rank:05d}.index.hashes", "wb") as file:
        file.write(np.array(sorted(found), dtype=config.hash_config.np_descr).tobytes())
