"""What datatrove lacks: our readers, formatters for Korean text, words without a model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch

import ftfy  # noqa: F401  # datatrove asks for it late
import numpy as np
import numpy.typing as npt
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

from pipeline.data.sources.records import Keys, Rejected
from pipeline.data.tokenize.units import Unit, unit_records
from pipeline.errors import MissingPackageError
from pipeline.extensions.cleaning.personal_data import without_personal
from pipeline.extensions.cleaning.text import (
    whole_text,
    with_fixed_encoding,
    without_boilerplate_lines,
)

READ_BYTES = "bytes"
"""Counts the text of usable records, in the statistics of `Records`."""
LOST_BYTES = "lost bytes of "
"""Counts that of rejected ones, each file's by its name behind this."""
_SHORT = "short"
"""Names the index of questions with fewer words than are looked for in a row."""


class Words(WordTokenizer):
    """Splits text into words and punctuation marks."""

    _WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")

    def word_tokenize(self, text: str) -> list[str]:
        return self._WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        # No block of the cleaning asks for sentences.
        raise NotImplementedError

    span_tokenize = sent_tokenize


class Records(PipelineStep):
    """Reads what tokenization reads: the k-th of n tasks every n-th unit.

    Rejected records count as dropped.
    """

    type = "📖 - READER"
    name = "records"

    def __init__(self, units: Sequence[tuple[Unit, Keys]]) -> None:
        super().__init__()
        self.units = units

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for unit, keys in self.units[rank::world_size]:
            for number, record in enumerate(unit_records(unit, keys)):
                self.stat_update("total")
                if isinstance(record, Rejected):
                    self.stat_update("dropped", f"dropped_{record.reason}")
                    self.stat_update(f"{LOST_BYTES}{unit.path}", value=record.lost_bytes)
                else:
                    self.stat_update(READ_BYTES, value=record.utf8_bytes)
                    yield Document(record.text, f"{unit.name}-{number}")


class CleanedShard(JsonlReader):
    """Reads the shard that the same task of an earlier stage wrote.

    It wrote none where it had nothing to write.
    """

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        name = f"{rank:05d}.jsonl.zst"
        return self.read_files_shard([name] if self.data_folder.isfile(name) else [])


def in_language(
    model: str, labels: Sequence[str], least: float, exclusion_writer: DiskWriter
) -> LanguageFilter:
    """Keeps documents of whose language, one of `labels`, a model of fastText is that sure.

    Raises:
        MissingPackageError: fastText is not installed.
    """
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


def fix_encoding() -> Formatter:
    """Mends text that was decoded with a wrong encoding, UTF-8 or CP949; then NFC."""
    return Formatter(with_fixed_encoding)


def without_boilerplate() -> Formatter:
    """Removes lines that only mark, sign or frame a page, and those of symbols alone."""
    return Formatter(without_boilerplate_lines, SymbolLinesFormatter().format)


def without_personal_data() -> Formatter:
    """Replaces mail and public IP addresses, Korea's phone and resident registration numbers."""
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
        # datatrove joins the folder's name and the pattern, and would read both as a pattern.
        found = list(super().list_files(subdirectory, recursive, None, include_directories))
        if glob_pattern is None:
            return found
        pattern = glob_pattern.rpartition("/")[2]
        return [file for file in found if fnmatch(file.rpartition("/")[2], pattern)]


class Signatures(MinhashDedupSignature):
    """Signatures for MinHash, also of texts with fewer words than a shingle.

    Of these, exact copies are alike.
    """

    def get_shingles(self, text: str) -> npt.NDArray[np.uint64]:
        found = super().get_shingles(text)
        if not found.size:
            # Without a shingle datatrove would make the same signature of all short texts.
            found = np.array([[self._hash_func(whole_text(text))]], dtype=np.uint64)
        return found


class Contamination(NGramsDecontFilter):
    """Drops documents that share words in a row with a benchmark.

    A question with fewer words than that is looked for as a whole.
    """

    _short_lengths: Sequence[int] = ()
    """How many words the short questions of the index have."""

    def load_index_hashes(self) -> None:
        super().load_index_hashes()
        # The names of indexes are `short7-benchmarks` and alike. Looked for here, once: an index
        # has millions of hashes.
        lengths: set[int] = set()
        for name in set(self._index_hashes.values()):
            if name.startswith(_SHORT):
                lengths.add(int(name.partition("-")[0].removeprefix(_SHORT)))
        self._short_lengths = sorted(lengths)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        found = self._filter_composed(doc)
        if found is not True or not self._short_lengths:
            return found
        words = composed_words(self, doc.text)
        for length in self._short_lengths:
            for words_in_a_row in map(" ".join, ngrams(words, length)):
                name = self._index_hashes.get(self.hash_func(words_in_a_row), "")
                if name.startswith(f"{_SHORT}{length}-"):
                    doc.metadata["contaminated_ngram"] = words_in_a_row
                    return False, "contaminated"
        return found

    def _filter_composed(self, doc: Document) -> bool | tuple[bool, str]:
        """What datatrove finds in the text in NFC, as the index has its words."""
        given = doc.text
        doc.text = unicodedata.normalize("NFC", given)
        found: bool | tuple[bool, str] = super().filter(doc)
        doc.text = given
        return found


def composed_words(within: NGramsDecontFilter, text: str) -> list[str]:
    """The words of a text as an index has them: in NFC, without case and punctuation."""
    composed = unicodedata.normalize("NFC", text)
    words: list[str] = within.tokenizer.word_tokenize(
        simplify_text(composed, within.config.norm_config)
    )
    return words


def index_words(
    within: NGramsDecontFilter, source: str, data: Iterable[Document], rank: int, _: int
) -> None:
    """Adds documents to the index of a filter.

    The block that datatrove has for this reads tasks of lighteval alone.
    """
    config = within.config
    # Hashes by the name of the index that gets them.
    hashes: dict[str, set[int]] = {source: set()}
    for doc in data:
        words = composed_words(within, doc.text)
        for words_in_a_row in ngrams(words, config.n_grams):
            hashes[source].add(within.hash_func(" ".join(words_in_a_row)))
        for whole in doc.metadata.get("whole", ()):
            words = composed_words(within, whole)
            # A question of fewer words than half would be found in many texts by chance.
            if config.n_grams // 2 <= len(words) < config.n_grams:
                of_length = hashes.setdefault(f"{_SHORT}{len(words)}-{source}", set())
                of_length.add(within.hash_func(" ".join(words)))
    for name, found in hashes.items():
        array = np.array(sorted(found), dtype=config.hash_config.np_descr)
        with within.index_folder.open(f"{name}-{rank:05d}.index.hashes", "wb") as file:
            file.write(array.tobytes())
