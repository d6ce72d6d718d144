"""What gates make of texts that look alike: fitted on pairs of texts, measured on unused documents
and on other kinds.

    python -m benchmarks.gate_separation                        # after make frontier QUICK=1
    python -m benchmarks.gate_separation --base BASE --pair new.jsonl old.jsonl --own-text 16000

It needs a base and no training. A gate of each pair is fitted at every layer of `--layers`, on each
kind of features, and with `--own-text` also against what the base writes. docs/gate.md has the
figures.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch

from benchmarks.results import ROOT, Row, make_parser, print_rows, write_rows
from pipeline import command_line, log
from pipeline.command_line import positive
from pipeline.config.data import Sampling
from pipeline.config.gate import GateFeatures, GateSettings
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.packing import PackedCorpus, pack
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.workers import local_workers
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.gating.fit import area_under_roc
from pipeline.gating.fit_run import BaseStream, fit_on
from pipeline.gating.gate import FittedGate
from pipeline.gating.windows import FittingText, Windows, as_windows, joined
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.self_generated.corpus import SamplingJob, plan_of, sample_corpus

NEW, OLD = "ko/reviews", "en/gutenberg"
PAIRS = [
    (NEW, OLD),
    ("ko/law", NEW),
    ("ko/book_reviews", NEW),
    ("en/stories", OLD),
    ("en/factbook", OLD),
]
"""New and old text, as files of the folder of texts, without their endings; those that are missing
are left out."""
OWN_TEXT = "own text"
SHARES = ("new_open", "old_open", "new_open_at_even_odds", "old_open_at_even_odds")
"""Of open tokens, at the gate's threshold and at even odds."""
_MOST_DOCUMENTS = 20_000
logger = log.get_logger(__name__)


class Kind(NamedTuple):
    """Texts of one kind: to fit a gate on, to set its threshold on, and to measure it on."""

    fit: Sequence[str]
    unused: Sequence[str]
    test: Sequence[str]


def main() -> None:
    options = _options()
    base = open_base(options.base)
    layers = options.layers or sorted(
        {base.spec.num_layers // 4, base.spec.num_layers // 2, base.spec.num_layers}
    )
    if outside := [layer for layer in layers if not 0 <= layer <= base.spec.num_layers]:
        raise ConfigError(
            f"--layers: expected 0 to {base.spec.num_layers} (after the last), found {outside[0]}"
        )
    pairs = options.pair or PAIRS
    names = dict.fromkeys(name for pair in pairs for name in pair)
    files = {
        name: Path(name) if Path(name).suffix else options.data / f"{name}.jsonl.zst"
        for name in names
    }
    kinds = {name: kind_of(file, options.seed) for name, file in files.items() if file.exists()}
    for name in files.keys() - kinds.keys():
        logger.info("%s: no such file; its rows are left out", files[name])
    decoder = Decoder(base.spec).eval()
    load_base(decoder, base)
    bench = Separation(decoder, options)
    rows = [
        row
        for pair in pairs
        if set(pair) <= kinds.keys()
        for row in bench.rows(pair, kinds, layers)
    ]
    if not rows:
        raise DataError(
            f"{options.data}: expected the files of a pair, found none; give --data or --pair"
        )
    print_rows(rows)
    write_rows(options, rows)


class Separation:
    """Gates of a base's stream, fitted on pairs of texts."""

    def __init__(self, decoder: Decoder, options: argparse.Namespace) -> None:
        self._decoder, self._options = decoder, options
        self._tokenizer = load_tokenizer(options.base)
        self._settings = GateSettings(max_open_fraction=options.max_open_fraction)
        self._own = self_generated(options, self._tokenizer) if options.own_text else None

    def rows(
        self, pair: Sequence[str], kinds: Mapping[str, Kind], layers: Sequence[int]
    ) -> Iterator[Row]:
        """What a gate does to unused text of the pair (new, old): its AUC, and the shares of open
        tokens.

        Of gates against the base's own text, those with the default features.
        """
        new, old = pair
        test = joined(
            [
                self._windows(kinds[new].test, is_new=True),
                self._windows(kinds[old].test, is_new=False),
            ]
        )
        is_new = test.is_new[test.present]
        for against, text in self._texts(kinds[new], kinds[old], old).items():
            for layer in layers:
                stream = BaseStream(self._decoder, layer)
                for features in (
                    get_args(GateFeatures) if against == old else [self._settings.features]
                ):
                    if (gate := self._fit(stream, text, features)) is None:
                        continue
                    scores = stream.scores(test, gate)[test.present]
                    parts = scores[is_new], scores[~is_new]
                    shares = (
                        float((part > at).double().mean())
                        for at in (gate.threshold, 0)
                        for part in parts
                    )
                    of = {
                        "new": new,
                        "old": old,
                        "fitted_against": against,
                        "layer": layer,
                        "features": features,
                    }
                    yield (
                        of
                        | {"auc": area_under_roc(*parts)}
                        | dict(zip(SHARES, shares, strict=True))
                    )

    def _texts(self, new: Kind, old: Kind, name: str) -> dict[str, FittingText]:
        """What gates are fitted on, by what the new text is told from."""
        fit, unused = (self._windows(texts, is_new=True) for texts in (new.fit, new.unused))
        others = [self._windows(texts, is_new=False) for texts in (old.fit, old.unused)]
        texts = {name: FittingText(joined([others[0], fit]), joined([others[1], unused]))}
        if self._own is not None:
            texts[OWN_TEXT] = FittingText(
                joined([self._own.fit, fit]), joined([self._own.unused, unused])
            )
        return texts

    def _fit(
        self, stream: BaseStream, text: FittingText, features: GateFeatures
    ) -> FittedGate | None:
        """The gate; None if most of what the base writes looks like the new text."""
        try:
            return fit_on(
                stream, text, self._settings.model_copy(update={"features": features})
            ).gate
        except DataError as error:
            if not text.fit.is_self_generated.any():
                raise
            logger.warning("before layer %d: left out: %s", stream.layer, error)
            return None

    def _windows(self, texts: Iterable[str], *, is_new: bool) -> Windows:
        length, tokens = self._options.sequence_length, self._options.tokens
        return windows_of(texts, self._tokenizer, length, tokens, is_new=is_new)


def windows_of(
    texts: Iterable[str], tokenizer: Tokenizer, length: int, tokens: int, *, is_new: bool
) -> Windows:
    """A window for each text, cut to `length` tokens, until `tokens` of them count, if there are so
    many.

    What precedes a document does not count.
    """
    samples, present, found, start = [], [], 0, tokenizer.before_document
    for text in texts:
        if found >= tokens:
            break
        ids = np.array([*start, *tokenizer.reference.encode([text]).ids], dtype=np.int64)
        places = np.arange(length)
        counts = (places >= len(start)) & (places < len(ids))
        samples.append(
            pack(
                ids[:length],
                np.zeros(1, dtype=np.int64),
                length,
                padding=tokenizer.document_end[-1],
            )
        )
        present.append(counts)
        found += int(counts.sum())
    if not found:
        raise DataError(
            "gate_separation: expected text of every kind, found a kind without a token"
        )
    return replace(as_windows(samples, is_new=is_new), present=torch.from_numpy(np.stack(present)))


def kind_of(file: Path, seed: int) -> Kind:
    """The documents of a file, in random order, in three parts; the last is its held-out file, if
    it has one."""

    def documents(file: Path) -> list[str]:
        texts = [
            document.text
            for document in islice(good_documents([str(file)], Keys()), _MOST_DOCUMENTS)
        ]
        random.Random(seed).shuffle(texts)
        return texts

    texts, heldout = (
        documents(file),
        file.with_name(file.name.replace(".jsonl", ".heldout.jsonl", 1)),
    )
    half = len(texts) // 2
    if heldout != file and heldout.exists():
        return Kind(texts[:half], texts[half:], documents(heldout))
    return Kind(texts[:half], texts[half : 3 * half // 2], texts[3 * half // 2 :])


def self_generated(options: argparse.Namespace, tokenizer: Tokenizer) -> FittingText:
    """What the base writes: to fit on, and to set the threshold on."""
    length = options.sequence_length
    with tempfile.TemporaryDirectory() as folder:
        sampling = Sampling(tokens=options.own_text, seed=options.seed)
        job = SamplingJob(
            base=options.base, output=Path(folder) / "own", sampling=sampling, max_tokens=length
        )
        with local_workers(1) as workers:
            sample_corpus(job, plan_of(job), workers)
        packed = PackedCorpus(
            TokenCorpus(job.output, tokenizer_fingerprint=tokenizer.fingerprint),
            length,
            padding=tokenizer.document_end[-1],
            document_mask=True,
            begins_with_end=not tokenizer.document_start,
        )
        samples = [packed[index] for index in range(len(packed))]
    half = len(samples) // 2
    return FittingText(
        *(
            as_windows(part, is_new=False, is_self_generated=True)
            for part in (samples[:half], samples[half:])
        )
    )


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--base",
        type=Path,
        default=ROOT / "runs/frontier/quick/pretrain/hf",
        help="a Hugging Face folder",
    )
    add(
        "--data",
        type=Path,
        default=ROOT / "examples" / "data",
        help="the folder of the texts (default: examples/data)",
    )
    add(
        "--pair",
        nargs=2,
        action="append",
        metavar=("NEW", "OLD"),
        help="files, instead of the default pairs",
    )
    add(
        "--layers",
        nargs="+",
        type=int,
        help="before which the stream is read (default: a quarter, half, after all)",
    )
    add(
        "--own-text",
        type=positive,
        metavar="TOKENS",
        help="also fit against so much text that the base writes",
    )
    add(
        "--tokens",
        type=positive,
        default=20_000,
        help="of each kind and part, at most (default: 20,000)",
    )
    add("--sequence-length", type=positive, default=128, help="tokens in a window (default: 128)")
    add("--max-open-fraction", type=float, default=0.001, help="of the old text (default: 0.001)")
    add("--seed", type=int, default=0, help="of the texts' order and the own text (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run(main)
