"""How fast a crawl is cleaned, and in how much memory: this project compared with datatrove alone.

    python -m benchmarks.cleaning --mib 100 1000 --json benchmarks/out/cleaning.json

Both clean the same synthetic Korean pages in one process: lines of the shipped texts, a tenth of
the pages copies. datatrove alone is its own reader, executor and blocks, with the same words,
thresholds and hashes, for the steps that it has: encoding, language, repetition, quality, lines,
mail addresses, near-copies. What this project does beside them (CP949, boilerplate, Korean personal
data, a manifest) is in its time.

A row has what a contender took for one size of the crawl. Compare `megabytes_per_cpu_second`: the
processor time of all processes hardly depends on other load. With --mib of two sizes, `peak_mib`
says whether memory grows with the crawl.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import yaml
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import (
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LambdaFilter,
)
from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter, SymbolLinesFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig

from benchmarks.process_usage import Usage, best_of, usage_of
from benchmarks.results import DATA, ROOT, Row, in_turns, make_parser, print_rows, write_rows
from pipeline.config.data import Corpus
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenize.units import default_unit_bytes
from pipeline.extensions.cleaning.blocks import Words
from pipeline.extensions.cleaning.clean import clean
from pipeline.extensions.cleaning.stages import CleaningJob, is_written_in

_LINES_A_PAGE = 12
_COPIES = 0.1


def ours(source: Path, output: Path) -> None:
    """`scale-cpt clean`, without a configuration."""
    corpus = Corpus.model_validate({"input": [f"{source}/*.jsonl"], "clean": {"language": "ko"}})
    clean(CleaningJob(corpus, output / "cleaned"), workers=1)


def datatrove_alone(source: Path, output: Path) -> None:
    """What its documentation shows: filters and signatures, then copies, which are left out of what
    was filtered."""
    rules = yaml.safe_load((ROOT / "pipeline" / "extensions" / "cleaning" / "ko.yaml").read_text())
    words = Words()
    is_korean = partial(is_written_in, re.compile(rules["script"]), rules["min_script_share"])
    # As in pipeline/extensions/cleaning/stages.py: both compare pages by the same words and hashes.
    config = MinhashConfig(
        norm_config=TextNormConfig(norm_unicode_diacritics=False),
        hash_config=HashConfig(hash_fc="sha1"),
    )
    filtered = str(output / "filtered")
    signatures = str(output / "signatures")
    pairs = str(output / "pairs")
    copies = str(output / "copies")
    filters: list[Any] = [
        JsonlReader(str(source)),
        FTFYFormatter(normalization="NFC"),
        LambdaFilter(is_korean),
        SymbolLinesFormatter(),
        GopherRepetitionFilter(language=words, **rules["repetition"]),
        GopherQualityFilter(language=words, **rules["quality"]),
        FineWebQualityFilter(language=words, **rules["lines"]),
        PIIFormatter(),
        JsonlWriter(filtered, compression="zstd"),
        MinhashDedupSignature(signatures, config, words),
    ]
    without_copies: list[Any] = [
        JsonlReader(filtered),
        MinhashDedupFilter(copies),
        JsonlWriter(str(output / "cleaned")),
    ]
    # A task for each file; for each bucket of signatures; and one that joins the buckets' pairs.
    files = len(list(source.glob("*.jsonl")))
    stages: list[tuple[int, list[Any]]] = [
        (files, filters),
        (config.num_buckets, [MinhashDedupBuckets(signatures, pairs, None, config)]),
        (1, [MinhashDedupCluster(pairs, copies, config)]),
        (files, without_copies),
    ]
    for number, (tasks, blocks) in enumerate(stages):
        logs = str(output / "logs" / str(number))
        LocalPipelineExecutor(blocks, tasks, workers=1, logging_dir=logs).run()


_CONTENDERS = {"ours": ours, "datatrove alone": datatrove_alone}


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--mib", type=float, nargs="+", default=[100], help="sizes of the crawl (default: 100)")
    add(
        "--rounds", type=int, default=1, help="runs of each contender; the best counts (default: 1)"
    )
    add(
        "--scratch",
        type=Path,
        help="folder for the temporary crawl and outputs, about three times its size",
    )
    add("--contender", nargs=3, metavar=("NAME", "SOURCE", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        # This is the process of one contender: its memory and time are measured from outside.
        name, source, output = options.contender
        _CONTENDERS[name](Path(source), Path(output))
        return
    rows: list[Row] = []
    for mib in options.mib:
        rows += _compared(mib, options.rounds, options.scratch)
    print_rows(rows)
    write_rows(options, rows)


def _compared(mib: float, rounds: int, scratch: Path | None) -> Iterator[Row]:
    """A row for each contender on a crawl of this size."""
    with tempfile.TemporaryDirectory(prefix="cleaning-", dir=scratch) as folder:
        source = Path(folder, "crawl")
        output = Path(folder, "out")
        megabytes = _write_crawl(source, int(mib * 2**20)) / 1e6

        def run(name: str) -> Usage:
            # This module in another process, which does the contender's work and nothing else.
            program = [sys.executable, "-m", "benchmarks.cleaning", "--contender", name]
            usage = usage_of([*program, str(source), str(output)])
            shutil.rmtree(output)
            return usage

        runs = in_turns({name: partial(run, name) for name in _CONTENDERS}, rounds)
        for name, usages in runs.items():
            best = best_of(usages)
            row: Row = {"contender": name, "megabytes": megabytes, **best._asdict()}
            row["megabytes_per_cpu_second"] = megabytes / best.cpu_seconds
            yield row


def _write_crawl(folder: Path, size: int) -> int:
    """Writes pages of about `size` bytes in all; returns how many bytes they are.

    A file is as large as one of our units of work, so that both contenders cut the work alike.
    """
    folder.mkdir()
    lines: list[str] = []
    for text in texts([str(DATA / "ko" / "reviews.jsonl.zst")]):
        lines += [line for line in text.split("\n") if line]
    draw = random.Random(1)
    written = 0
    number = 0
    while written < size:
        with (folder / f"{number:05d}.jsonl").open("wb") as file:
            while file.tell() < min(default_unit_bytes(size), size - written):
                file.write(orjson.dumps({"text": _page(lines, draw)}) + b"\n")
            written += file.tell()
        number += 1
    return written


def _page(lines: Sequence[str], draw: random.Random) -> str:
    """Lines that no other page has in this order; of a tenth of the pages there are several."""
    if draw.random() < _COPIES:
        # One of a hundred seeds: each of these pages comes again and again.
        draw = random.Random(draw.randrange(100))
    return "\n".join(draw.choices(lines, k=_LINES_A_PAGE))


if __name__ == "__main__":
    main()
