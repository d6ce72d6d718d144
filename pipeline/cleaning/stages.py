"""The cleaning of a corpus as stages of datatrove's blocks, each of as many tasks as the input needs.

Tasks follow from the input and the settings alone, never from the workers: so does every byte that is written.

    filter              fixes encodings, filters and replaces; MinHash signatures
    reference, index    signatures of corpora cleaned before and of held-out files
    buckets, cluster    finds copies and near-copies
    words               indexes words in a row of benchmarks and held-out files
    write               leaves out what was found, and writes the shards
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from pipeline.cleaning.blocks import (
    Contamination,
    PlainFolder,
    Records,
    Shard,
    Signatures,
    Words,
    benchmark_lines,
    fix_encoding,
    in_language,
    index_words,
    without_boilerplate,
    without_personal_data,
)
from pipeline.config.data import Corpus, Data
from pipeline.data.sources.records import Keys
from pipeline.data.sources.streams import likely_encoding
from pipeline.data.tokenize.corpora import cleaned_folder, heldout_source, source_of, text_keys_of
from pipeline.data.tokenize.units import (
    Unit,
    default_unit_bytes,
    input_files,
    named_files,
    split_file,
)

DROPPED = "dropped"
"""What each step dropped, in a folder of cleaned text."""
_OF_EACH, _OF_ALL = (
    ("language", "language_model", "repetition", "quality", "lines"),
    ("duplicates", "contamination"),
)
"""Steps that drop documents: by what is in each, and by what is in all."""
_MOST_TASKS = 512
_EXCERPT = 600
_LETTER = re.compile(r"[^\W\d_]")
_PLAIN = TextNormConfig(norm_unicode_diacritics=False)  # which halves the speed
_SHA1 = HashConfig(hash_fc="sha1")  # its xxhash needs another package
_MINHASH = MinhashConfig(norm_config=_PLAIN, hash_config=_SHA1)
_WORDS = Words()
_logger = log.get_logger(__name__)
Block = Any  # a PipelineStep or a function; datatrove has no types


class Stage(NamedTuple):
    """Blocks that run as `tasks` tasks.

    `files`: patterns of what a task writes, in the folder of unfinished work, with the task's `{rank}`.
    """

    name: str
    tasks: int
    blocks: list[Block]
    files: list[str]


@dataclass(frozen=True)
class CleaningJob:
    """The cleaning of one corpus of a run, into `output`; `others` are corpora whose near-copies are left out."""

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
    heldout = [
        heldout_source(data, name) for name, corpus in data.corpora.items() if corpus.heldout_input
    ]
    before: list[str] = []
    for name, corpus in data.corpora.items():
        if corpus.clean is not None:
            yield CleaningJob(
                corpus,
                cleaned_folder(data, name),
                heldout,
                [source_of(data, one) for one in before],
            )
            before.append(name)


def units_of(corpora: Sequence[Corpus]) -> list[tuple[Unit, Keys]]:
    """The units of the inputs of `corpora`. A file that is not UTF-8 is read in the encoding that it likely has."""
    units: list[tuple[Unit, Keys]] = []
    for corpus in corpora:
        files = input_files(corpus.input)
        size = default_unit_bytes(sum(files.values()))
        for path in files:
            encoding = corpus.encoding or likely_encoding(path)
            if encoding != corpus.encoding:
                _logger.info("%s: read as %s", path, encoding)
            keys = text_keys_of(corpus)._replace(encoding=encoding)
            units += [(unit, keys) for unit in split_file(path, len(units), keys, size)]
    return units


def is_written_in(script: re.Pattern[str], least: float, doc: Document) -> bool:
    """Whether at least that share of the letters of a document is of one script."""
    return len(script.findall(doc.text)) / max(1, len(_LETTER.findall(doc.text))) >= least


def _document(_: JsonlWriter, doc: Document) -> dict[str, object]:
    return {"text": doc.text, "id": doc.id}


def _excerpt(_: JsonlWriter, doc: Document) -> dict[str, object]:
    reason = doc.metadata.get("contaminated_ngram") or doc.metadata.get("filter_reason", "")
    return {"text": doc.text[:_EXCERPT], "id": doc.id, "reason": reason}


def _writer(
    folder: Path, adapter: Callable[[JsonlWriter, Document], dict[str, object]] = _document
) -> JsonlWriter:
    return JsonlWriter(str(folder), "${rank}.jsonl.zst", compression="zstd", adapter=adapter)


def stages_of(job: CleaningJob) -> list[Stage]:
    """The stages of a job; the counts of a block are kept under the name of its step."""
    settings, work = job.corpus.clean, job.work
    assert settings is not None  # it is to be cleaned
    rules: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name(f"{settings.language}.yaml").read_text()
    )
    rules["quality"]["min_doc_words"] = settings.min_words or rules["quality"]["min_doc_words"]
    least = (
        rules["min_script_share"]
        if settings.min_script_share is None
        else settings.min_script_share
    )
    units, benchmarks = units_of([job.corpus]), named_files(settings.benchmarks)
    tasks, heldout = min(len(units), _MOST_TASKS), units_of(job.heldout)
    folders = ("signatures", "references", "index", "pairs", "copies")
    signatures, references, index, pairs, copies = (str(work / name) for name in folders)

    model = {
        "model": settings.language_model,
        "labels": rules["labels"],
        "least": settings.min_language_score,
    }

    def step(name: str, block: Callable[..., Block], **arguments: object) -> list[Block]:
        if name in settings.skip:
            return []
        made = block(**arguments)
        made.stats.name = name
        return [made]

    def dropping(name: str, block: Callable[..., Block], **arguments: object) -> list[Block]:
        return step(
            name,
            block,
            exclusion_writer=_writer(work / "output" / DROPPED / name, _excerpt),
            **arguments,
        )

    def others(name: str, of: list[tuple[Unit, Keys]], block: object, file: str) -> Stage:
        return Stage(name, min(len(of), _MOST_TASKS), [Records(of), fix_encoding(), block], [file])

    def dropped(steps: Sequence[str]) -> list[str]:
        return [f"output/{DROPPED}/{name}/{{rank:05d}}.*" for name in steps]

    first = [
        *step("records", Records, units=units),
        *step("fix_encoding", fix_encoding),
        *dropping(
            "language",
            LambdaFilter,
            filter_function=partial(is_written_in, re.compile(rules["script"]), least),
        ),
        *(dropping("language_model", in_language, **model) if settings.language_model else []),
        *step("boilerplate", without_boilerplate),
        *dropping("repetition", GopherRepetitionFilter, language=_WORDS, **rules["repetition"]),
        *dropping("quality", GopherQualityFilter, language=_WORDS, **rules["quality"]),
        *dropping("lines", FineWebQualityFilter, language=_WORDS, **rules["lines"]),
        *step("personal_data", without_personal_data),
        _writer(work / "filtered"),
    ]
    last: list[Block] = [Shard(str(work / "filtered"))]
    filtered = [*dropped(_OF_EACH), "filtered/{rank:05d}.*", "signatures/*/{rank:05d}.*"]
    stages = [Stage("filter", tasks, first, filtered)]
    if "duplicates" not in settings.skip:
        first.append(Signatures(signatures, _MINHASH, _WORDS))
        buckets, known = _MINHASH.num_buckets, [*heldout, *units_of(job.others)]
        if known:
            signing = Signatures(references, _MINHASH, _WORDS)
            stages.append(others("reference", known, signing, "references/*/{rank:05d}.*"))
            indexing = MinhashBuildIndex(references, index, "known", _MINHASH)
            stages.append(Stage("index", buckets, [indexing], ["index/bucket_{rank:03d}/*"]))
        found = MinhashDedupBuckets(
            signatures, pairs, index if known else None, _MINHASH, only_dedup_in_index=False
        )
        stages.append(Stage("buckets", buckets, [found], ["pairs/{rank:05d}_*"]))
        stages.append(
            Stage(
                "cluster",
                1,
                [MinhashDedupCluster(PlainFolder(pairs), copies, _MINHASH)],
                ["copies/*"],
            )
        )
        last += dropping("duplicates", MinhashDedupFilter, input_folder=copies)
    if "contamination" not in settings.skip and (benchmarks or heldout):
        in_a_row = settings.shared_words or rules["shared_words"]
        config = NGramsDecontConfig(in_a_row, norm_config=_PLAIN, hash_config=_SHA1)
        words = {
            "index_folder": PlainFolder(str(work / "words")),
            "config": config,
            "language": _WORDS,
        }
        add = partial(index_words, Contamination(**words))
        lines = [partial(benchmark_lines, benchmarks), partial(add, "benchmarks")]
        stages.append(Stage("words", 1, lines, ["words/benchmarks-{rank:05d}.*"]))
        if heldout:
            stages.append(
                others(
                    "words_heldout", heldout, partial(add, "heldout"), "words/heldout-{rank:05d}.*"
                )
            )
        last += dropping("contamination", Contamination, **words)
    last += step("written", _writer, folder=work / "output")
    return [*stages, Stage("write", tasks, last, [*dropped(_OF_ALL), "output/{rank:05d}.*"])]
