"""The cleaning of a corpus as stages of datatrove's blocks, each of many tasks.

Tasks follow from the input and the settings alone, never from the workers: so does every byte that
is written.

    filter              fixes encodings, filters and replaces; MinHash signatures
    reference, index    signatures of corpora cleaned before and of held-out files
    buckets, cluster    finds copies and near-copies
    words               indexes words in a row of benchmarks and held-out files
    write               leaves out what was found, and writes the shards
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from datatrove.data import Document
from datatrove.pipeline.decont import NGramsDecontConfig
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
from datatrove.pipeline.dedup.minhash import MinhashBuildIndex, MinhashConfig
from datatrove.pipeline.filters import (
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LambdaFilter,
)
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig

from pipeline import log
from pipeline.config.data import Corpus, Data
from pipeline.data.sources.file_state import FileState
from pipeline.data.sources.object_stores import InputPath
from pipeline.data.sources.records import Keys
from pipeline.data.sources.streams import likely_encoding
from pipeline.data.tokenize.corpora import cleaned_folder, heldout_source, source_of, text_keys_of
from pipeline.data.tokenize.input_files import input_files, named_files
from pipeline.data.tokenize.units import Unit, default_unit_bytes, split_file
from pipeline.extensions.cleaning.benchmarks import benchmark_documents
from pipeline.extensions.cleaning.blocks import (
    CleanedShard,
    Contamination,
    PlainFolder,
    Records,
    Signatures,
    Words,
    fix_encoding,
    in_language,
    index_words,
    without_boilerplate,
    without_personal_data,
)

DROPPED = "dropped"
"""What each step dropped, in a folder of cleaned text."""
# Steps that drop documents by what is in each, and by what is in all.
_OF_EACH = ("language", "language_model", "repetition", "quality", "lines")
_OF_ALL = ("duplicates", "contamination")
# A task has its own files in several stages: more of them would be many small files.
_MOST_TASKS = 512
# Characters of a dropped document that are kept.
_EXCERPT = 600
_LETTER = re.compile(r"[^\W\d_]")
# Diacritics as they are: to normalize them halves the speed.
_PLAIN = TextNormConfig(norm_unicode_diacritics=False)
# datatrove's default, xxhash, needs another package.
_SHA1 = HashConfig(hash_fc="sha1")
_MINHASH = MinhashConfig(norm_config=_PLAIN, hash_config=_SHA1)
_WORDS = Words()
_logger = log.get_logger(__name__)
# A PipelineStep or a function; datatrove has no types.
Block = Any


class CleaningStage(NamedTuple):
    """Blocks that run as `tasks` tasks.

    `files`: patterns of what a task writes, in the folder of unfinished work, with the task's
    `{rank}`.
    """

    name: str
    tasks: int
    blocks: list[Block]
    files: list[str]


@dataclass(frozen=True)
class CleaningJob:
    """The cleaning of one corpus of a run, into `output`.

    `others` are corpora whose near-copies are left out.
    """

    corpus: Corpus
    output: Path
    heldout: Sequence[Corpus] = ()
    others: Sequence[Corpus] = ()

    @property
    def work(self) -> Path:
        """The folder of unfinished work; the part `output` is what becomes of it."""
        return self.output.with_name(f"{self.output.name}.work")


def cleaning_jobs(data: Data) -> Iterator[CleaningJob]:
    """The cleaning of the corpora of a run, of each when those before it are done."""
    heldout: list[Corpus] = []
    for name, corpus in data.corpora.items():
        if corpus.heldout_input:
            heldout.append(heldout_source(data, name))
    before: list[str] = []
    for name, corpus in data.corpora.items():
        if corpus.clean is not None:
            # Their cleaned text, if the caller has cleaned them by now.
            others = [source_of(data, other) for other in before]
            yield CleaningJob(corpus, cleaned_folder(data, name), heldout, others)
            before.append(name)


def units_of(corpora: Sequence[Corpus], states: Mapping[str, FileState]) -> list[tuple[Unit, Keys]]:
    """The units of the inputs of `corpora`, whose files are to stay as in `states`.

    A file that is not UTF-8 is read in the encoding that it likely has.
    """
    units: list[tuple[Unit, Keys]] = []
    for corpus in corpora:
        files = input_files(corpus.input)
        # As tokenization cuts them, so that both read the same records.
        size = default_unit_bytes(sum(files.values()))
        for path in files:
            encoding = corpus.encoding or likely_encoding(path)
            if encoding != corpus.encoding:
                _logger.info("%s: read as %s", path, encoding)
            keys = text_keys_of(corpus)._replace(encoding=encoding)
            for unit in split_file(path, len(units), keys, size):
                units.append((replace(unit, state=states.get(str(path))), keys))
    return units


def is_written_in(script: re.Pattern[str], least: float, doc: Document) -> bool:
    """Whether at least that share of the letters of a document is of one script."""
    letters = len(_LETTER.findall(doc.text))
    of_script = len(script.findall(doc.text))
    return of_script / max(1, letters) >= least


def _document(_: JsonlWriter, doc: Document) -> dict[str, object]:
    return {"text": doc.text, "id": doc.id}


def _excerpt(_: JsonlWriter, doc: Document) -> dict[str, object]:
    reason = doc.metadata.get("contaminated_ngram") or doc.metadata.get("filter_reason", "")
    return {"text": doc.text[:_EXCERPT], "id": doc.id, "reason": reason}


def _writer(
    folder: Path, adapter: Callable[[JsonlWriter, Document], dict[str, object]] = _document
) -> JsonlWriter:
    return JsonlWriter(str(folder), "${rank}.jsonl.zst", compression="zstd", adapter=adapter)


class _Steps:
    """Makes the blocks of a job's steps, of which the user may skip some by their names."""

    def __init__(self, job: CleaningJob, skipped: Collection[str]) -> None:
        self._dropped = job.work / "output" / DROPPED
        self._skipped = skipped

    def step(self, name: str, block: Callable[..., Block], **arguments: object) -> list[Block]:
        """A block whose counts are kept under `name`; none if the step is skipped."""
        if name in self._skipped:
            return []
        made = block(**arguments)
        made.stats.name = name
        return [made]

    def dropping(self, name: str, block: Callable[..., Block], **arguments: object) -> list[Block]:
        """A step that drops documents, of which it keeps the beginnings."""
        writer = _writer(self._dropped / name, _excerpt)
        return self.step(name, block, exclusion_writer=writer, **arguments)


def stages_of(job: CleaningJob, states: Mapping[str, FileState]) -> list[CleaningStage]:
    """The stages of a job, whose inputs are in `states` as it found them.

    The counts of a block are kept under the name of its step.
    """
    settings = job.corpus.clean
    assert settings is not None, "the corpus is to be cleaned"
    file = Path(__file__).with_name(f"{settings.language}.yaml")
    rules: dict[str, Any] = yaml.safe_load(file.read_text())
    steps = _Steps(job, settings.skip)
    units = units_of([job.corpus], states)
    heldout = units_of(job.heldout, states)
    tasks = min(len(units), _MOST_TASKS)

    finds_copies = "duplicates" not in settings.skip
    first = _steps_of_each(job, steps, rules, units)
    if finds_copies:
        first.append(Signatures(str(job.work / "signatures"), _MINHASH, _WORDS))
    filtered = [*_patterns_of(_OF_EACH), "filtered/{rank:05d}.*", "signatures/*/{rank:05d}.*"]
    stages = [CleaningStage("filter", tasks, first, filtered)]
    last: list[Block] = [CleanedShard(str(job.work / "filtered"))]
    if finds_copies:
        known = [*heldout, *units_of(job.others, states)]
        stages += _stages_of_copies(job, known)
        copies = str(job.work / "copies")
        last += steps.dropping("duplicates", MinhashDedupFilter, input_folder=copies)
    benchmarks = named_files(settings.benchmarks)
    if "contamination" not in settings.skip and (benchmarks or heldout):
        in_a_row = settings.shared_words or rules["shared_words"]
        words = {
            "index_folder": PlainFolder(str(job.work / "words")),
            "config": NGramsDecontConfig(in_a_row, norm_config=_PLAIN, hash_config=_SHA1),
            "language": _WORDS,
        }
        stages += _stages_of_words(benchmarks, heldout, Contamination(**words))
        last += steps.dropping("contamination", Contamination, **words)
    last += steps.step("written", _writer, folder=job.work / "output")
    written = [*_patterns_of(_OF_ALL), "output/{rank:05d}.*"]
    return [*stages, CleaningStage("write", tasks, last, written)]


def _steps_of_each(
    job: CleaningJob, steps: _Steps, rules: dict[str, Any], units: list[tuple[Unit, Keys]]
) -> list[Block]:
    """The blocks that decide on a document by what is in it alone."""
    settings = job.corpus.clean
    assert settings is not None, "the corpus is to be cleaned"
    least = settings.min_script_share
    if least is None:
        least = rules["min_script_share"]
    # A partial, not a lambda: blocks are pickled for workers and for Slurm.
    in_script = partial(is_written_in, re.compile(rules["script"]), least)
    language_model: list[Block] = []
    if settings.language_model:
        language_model = steps.dropping(
            "language_model",
            in_language,
            model=settings.language_model,
            labels=rules["labels"],
            least=settings.min_language_score,
        )
    repetition = {"language": _WORDS, **rules["repetition"]}
    quality = {"language": _WORDS, **rules["quality"]}
    if settings.min_words:
        quality["min_doc_words"] = settings.min_words
    lines = {"language": _WORDS, **rules["lines"]}
    return [
        *steps.step("records", Records, units=units),
        *steps.step("fix_encoding", fix_encoding),
        *steps.dropping("language", LambdaFilter, filter_function=in_script),
        *language_model,
        *steps.step("boilerplate", without_boilerplate),
        *steps.dropping("repetition", GopherRepetitionFilter, **repetition),
        *steps.dropping("quality", GopherQualityFilter, **quality),
        *steps.dropping("lines", FineWebQualityFilter, **lines),
        *steps.step("personal_data", without_personal_data),
        _writer(job.work / "filtered"),
    ]


def _stages_of_copies(job: CleaningJob, known: list[tuple[Unit, Keys]]) -> list[CleaningStage]:
    """The stages that find copies and near-copies, of each other and of the `known` documents."""
    folders = ("signatures", "references", "index", "pairs", "copies")
    signatures, references, index, pairs, copies = (str(job.work / name) for name in folders)
    buckets = _MINHASH.num_buckets
    stages: list[CleaningStage] = []
    if known:
        signing = Signatures(references, _MINHASH, _WORDS)
        stages.append(_reading("reference", known, signing, "references/*/{rank:05d}.*"))
        indexing = MinhashBuildIndex(references, index, "known", _MINHASH)
        stages.append(CleaningStage("index", buckets, [indexing], ["index/bucket_{rank:03d}/*"]))
    # Also within the corpus, and not only against the index of the others.
    found = MinhashDedupBuckets(
        signatures, pairs, index if known else None, _MINHASH, only_dedup_in_index=False
    )
    stages.append(CleaningStage("buckets", buckets, [found], ["pairs/{rank:05d}_*"]))
    # One task: a cluster of copies may span all buckets.
    clusters = MinhashDedupCluster(PlainFolder(pairs), copies, _MINHASH)
    stages.append(CleaningStage("cluster", 1, [clusters], ["copies/*"]))
    return stages


def _stages_of_words(
    benchmarks: Sequence[InputPath], heldout: list[tuple[Unit, Keys]], within: Contamination
) -> list[CleaningStage]:
    """The stages that index words in a row of benchmarks and held-out files, for `within`."""
    add = partial(index_words, within)
    lines: list[Block] = [partial(benchmark_documents, benchmarks), partial(add, "benchmarks")]
    stages = [CleaningStage("words", 1, lines, ["words/benchmarks-{rank:05d}.*"])]
    if heldout:
        adding = partial(add, "heldout")
        stages.append(_reading("words_heldout", heldout, adding, "words/heldout-{rank:05d}.*"))
    return stages


def _reading(name: str, units: list[tuple[Unit, Keys]], block: Block, file: str) -> CleaningStage:
    """A stage that reads other documents than those of the corpus, and gives them to `block`."""
    return CleaningStage(
        name, min(len(units), _MOST_TASKS), [Records(units), fix_encoding(), block], [file]
    )


def _patterns_of(steps: Sequence[str]) -> list[str]:
    """Patterns of the files of documents that the steps drop."""
    return [f"output/{DROPPED}/{name}/{{rank:05d}}.*" for name in steps]
