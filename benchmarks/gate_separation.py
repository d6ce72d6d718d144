"""How well a gate tells texts apart that look alike, and what it decides on other kinds of text. Nothing is trained.

    make frontier QUICK=1    # makes the default base
    python benchmarks/gate_separation.py --own-text 40000 --mlp --json benchmarks/out/gate_separation.json

For each pair of new and old text, gates are fitted on the base's own stream at some depths: the area under the ROC
curve, and how much of unused new and old text is open, where at most --max-open-fraction of the old text may open, and
at even odds. No document is in two of the parts to fit on, to set the threshold on and to measure on; the last is the
held-out file beside the text's, if there is one. With --own-text gates are also fitted against what the base writes
itself, and measured on the pair's old text. The second table is of gates that were fitted on Korean film reviews.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import command_line, log
from pipeline.command_line import positive
from pipeline.config.data import Sampling
from pipeline.config.run import GateFeatures, GateSettings
from pipeline.data.packing import PackedCorpus, pack
from pipeline.data.records import Keys
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import good_documents
from pipeline.data.workers import local_workers
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.table import cell, table
from pipeline.experiments.biography import ATTRIBUTES, Person, make_people, make_pools, make_roster, question
from pipeline.files import write_json
from pipeline.gating.fit import area_under_roc, standardisation
from pipeline.gating.fit_run import Fit, fit_on
from pipeline.gating.states import BaseStream
from pipeline.gating.windows import FittingText, Windows, as_windows
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.rehearsal.corpus import SamplingJob, plan_of, sample_corpus

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "Korean film reviews": "ko/reviews",
    "Korean book reviews": "ko/book_reviews",
    "Korean news": "ko/wikinews",
    "Korean statutes": "ko/law",
    "English books": "en/gutenberg",
    "English stories": "en/stories",
    "English factbook": "en/factbook",
}
PAIRS = [
    ("Korean film reviews", "English books"),
    ("Korean statutes", "Korean film reviews"),
    ("Korean book reviews", "Korean film reviews"),
    ("English stories", "English books"),
    ("English factbook", "English books"),
]
BIOGRAPHIES = ("questions about unread people", "questions about Task 0's people")
OWN_TEXT = "own text"
NEW, OLD = PAIRS[0]
_MOST_DOCUMENTS = 20_000  # of a file
_SHORTEST = 16
_MADE = 400  # names, and lines of numbers
_HANGUL_NAMES = "김이박최정강조윤장임", "민서지수현", "준우영진아"
_HIDDEN, _MLP_STEPS, _MLP_BATCH = 64, 300, 1024
logger = log.get_logger(__name__)


class Text(NamedTuple):
    """A document; of its tokens only those of `text` count, not those of the beginning of it, `prompt`."""

    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Kind:
    """Texts of one kind: to fit a gate on, to set its threshold on, and to measure it on."""

    fit: Sequence[Text]
    unused: Sequence[Text]
    test: Sequence[Text]


@dataclass(frozen=True)
class Row:
    """What a gate does to unused text of a pair: shares of open tokens, at its threshold and at even odds."""

    new: str
    old: str
    fitted_against: str
    layer: int
    features: GateFeatures
    auc: float
    new_open: float
    old_open: float
    new_open_at_even_odds: float
    old_open_at_even_odds: float
    mlp_auc: float | None


class Reader:
    """Texts as windows of `length` tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer = tokenizer
        self.length = length

    def windows(self, texts: Iterable[Text], tokens: int, *, is_new: bool) -> Windows:
        """At least `tokens` tokens of the texts if they have them, at most a window of each text, none of them cut.

        The marks around a document do not count, and neither does a prompt.
        """
        rows: list[list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]] = [[]]
        room, found = self.length, 0
        for text in texts:
            if found >= tokens:
                break
            ids, counts = self._encoded(text)
            if len(ids) > room:
                rows.append([])
                room = self.length
            rows[-1].append((ids, counts))
            room -= len(ids)
            found += int(counts.sum())
        if not found:
            raise DataError("gate_separation: expected text of every kind, found a kind without a token")
        samples, present = [], []
        for row in rows:
            ids = np.concatenate([ids for ids, _ in row])
            starts = np.cumsum([0, *(len(ids) for ids, _ in row[:-1])])
            samples.append(pack(ids, starts, self.length, padding=self.tokenizer.document_end[-1]))
            counts = np.concatenate([counts for _, counts in row])
            present.append(np.pad(counts, (0, self.length - len(counts))))
        return replace(as_windows(samples, is_new=is_new), present=torch.from_numpy(np.stack(present)))

    def _encoded(self, text: Text) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The document's ids, and which of them count."""
        start, end = self.tokenizer.before_document, self.tokenizer.document_end
        encoded = self.tokenizer.reference.encode([text.prompt + text.text, text.prompt])
        whole, prompt = encoded.lengths.tolist()
        ids = np.concatenate([start, encoded.ids[:whole][: self.length - len(start) - len(end)], end]).astype(np.int64)
        counts = np.zeros(len(ids), dtype=np.bool_)
        counts[len(start) + min(prompt, whole) : len(ids) - len(end)] = True
        return ids, counts


def main() -> None:
    options = _options()
    spec = open_base(options.base).spec
    layers = options.layers or sorted({spec.num_layers // 4, spec.num_layers // 2, spec.num_layers})
    if outside := [layer for layer in layers if not 0 <= layer <= spec.num_layers]:
        raise ConfigError(f"--layers: expected 0 to {spec.num_layers} (after the last), found {outside[0]}")
    if not _SHORTEST <= options.sequence_length <= spec.max_position_embeddings:
        raise ConfigError(
            f"--sequence-length: expected {_SHORTEST} to {spec.max_position_embeddings}, which this base can read, "
            f"found {options.sequence_length}"
        )
    reader = Reader(load_tokenizer(options.base), options.sequence_length)
    kinds: dict[str, Kind] = {}
    pairs: list[tuple[str, str]] = []
    if options.pair:
        pairs = [(new, old) for new, old in options.pair]
        kinds = {name: kind_of(Path(name), options.seed) for pair in pairs for name in pair}
    elif not options.biographies_only:
        there = {name: options.data / path for name, path in FILES.items() if _is_there(options.data / path)}
        kinds = {name: kind_of(path, options.seed) for name, path in there.items()}
        pairs = [pair for pair in PAIRS if set(pair) <= set(kinds)]
    if not options.pair:
        kinds |= dict(zip(BIOGRAPHIES, people(options.people, options.pool_fraction, options.seed), strict=True))
        pairs.append(BIOGRAPHIES)
    own = own_text(options, reader) if options.own_text else None
    bench = Separation(options, reader, own)
    rows = [row for new, old in pairs for row in bench.rows(new, old, kinds[new], kinds[old], layers)]
    print(separation_table(rows))
    decisions = []
    if {NEW, OLD} <= set(kinds):
        others = other_kinds(kinds, reader.tokenizer, options.seed)
        decisions = bench.decisions(kinds[NEW], kinds[OLD], others, spec.num_layers)
        print("\n" + decision_table(decisions))
    if options.json:
        values = {"base": str(options.base), "rows": [asdict(row) for row in rows], "other_kinds": decisions}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, values)


class Separation:
    """Gates of a base's stream, fitted on pairs of texts."""

    def __init__(self, options: argparse.Namespace, reader: Reader, own: FittingText | None) -> None:
        base = open_base(options.base)
        self._base = Decoder(base.spec).eval()
        load_base(self._base, base)
        self._reader = reader
        self._own = own
        self._tokens: int = options.tokens
        self._with_mlp: bool = options.mlp
        self._seed: int = options.seed
        self._settings = GateSettings(max_open_fraction=options.max_open_fraction)

    def rows(self, new: str, old: str, new_texts: Kind, old_texts: Kind, layers: Sequence[int]) -> Iterator[Row]:
        """The pair's rows; of gates against the base's own text, those with the default features."""
        test = self._windows(new_texts.test, is_new=True) + self._windows(old_texts.test, is_new=False)
        for against, text in self._texts(new_texts, old_texts, old).items():
            for layer in layers:
                stream = BaseStream(self._base, layer)
                for features in get_args(GateFeatures) if against == old else [self._settings.features]:
                    settings = self._settings.model_copy(update={"features": features})
                    if (fit := self._fit(stream, text, settings, f"{new} against {against}")) is None:
                        continue
                    scores = stream.scores(test, fit.gate)
                    new_scores, old_scores = _by_kind(scores[test.present], test)
                    yield Row(
                        new=new,
                        old=old,
                        fitted_against=against,
                        layer=layer,
                        features=features,
                        auc=area_under_roc(new_scores, old_scores),
                        new_open=_share(new_scores > fit.gate.threshold),
                        old_open=_share(old_scores > fit.gate.threshold),
                        new_open_at_even_odds=_share(new_scores > 0),
                        old_open_at_even_odds=_share(old_scores > 0),
                        mlp_auc=self._mlp(stream, text.fit, test, features) if self._with_mlp else None,
                    )

    def decisions(
        self, new: Kind, old: Kind, others: Mapping[str, tuple[bool, Sequence[Text]]], layer: int
    ) -> list[dict[str, object]]:
        """Of each kind of text, whether it should be open, and its open shares under gates of new against old text."""
        stream = BaseStream(self._base, layer)
        fits = {
            against: fit
            for against, text in self._texts(new, old, OLD).items()
            if (fit := self._fit(stream, text, self._settings, f"{NEW} against {against}")) is not None
        }
        found: list[dict[str, object]] = []
        for name, (is_new, texts) in others.items():
            windows = self._windows(texts, is_new=is_new)
            row: dict[str, object] = {"kind": name, "should_be_open": is_new, "tokens": int(windows.present.sum())}
            for against, fit in fits.items():
                scores = stream.scores(windows, fit.gate)[windows.present]
                row[f"open, against {against}"] = _share(scores > fit.gate.threshold)
                row[f"at even odds, against {against}"] = _share(scores > 0)
            found.append(row)
        return found

    def _texts(self, new: Kind, old: Kind, name: str) -> dict[str, FittingText]:
        """What gates are fitted on, by what the new text is told from."""
        parts = {part: self._windows(getattr(new, part), is_new=True) for part in ("fit", "unused")}
        others = {part: self._windows(getattr(old, part), is_new=False) for part in parts}
        texts = {name: FittingText(*(others[part] + parts[part] for part in parts))}
        if self._own is not None:
            texts[OWN_TEXT] = FittingText(self._own.fit + parts["fit"], self._own.unused + parts["unused"])
        return texts

    def _fit(self, stream: BaseStream, text: FittingText, settings: GateSettings, what: str) -> Fit | None:
        """The gate; None if most of what the base writes looks like the new text."""
        try:
            return fit_on(stream, text, settings)
        except DataError as error:
            if not text.fit.is_own.any():
                raise
            logger.warning("%s, before layer %d: left out: %s", what, stream.layer, error)
            return None

    def _mlp(self, stream: BaseStream, fit: Windows, test: Windows, features: GateFeatures) -> float:
        """The area under the ROC curve of a network with one hidden layer on the same features."""
        x, is_new = stream.features(fit, features)
        mean, std = standardisation(x)
        x = (x - mean) / std
        weights = torch.where(is_new, 0.5 / is_new.sum(), 0.5 / (~is_new).sum())  # both kinds count the same
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            mlp = nn.Sequential(nn.Linear(x.shape[1], _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, 1))
            optimizer = torch.optim.AdamW(mlp.parameters(), lr=3e-3, weight_decay=0.1)
            for _ in range(_MLP_STEPS):
                batch = torch.multinomial(weights, _MLP_BATCH, replacement=True)
                loss = F.binary_cross_entropy_with_logits(mlp(x[batch]).squeeze(-1), is_new[batch].float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            x, _ = stream.features(test, features)
            return area_under_roc(*_by_kind(mlp((x - mean) / std).squeeze(-1), test))

    def _windows(self, texts: Iterable[Text], *, is_new: bool) -> Windows:
        return self._reader.windows(texts, self._tokens, is_new=is_new)


def _by_kind(scores: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Those of new and of old text; scores: [T], of the tokens that are present."""
    is_new = windows.is_new[windows.present]
    return scores[is_new], scores[~is_new]


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


def _is_there(path: Path) -> bool:
    file = path.with_name(f"{path.name}.jsonl.zst")
    if not file.exists():
        logger.info("%s: no such file; its rows are left out", file)
    return file.exists()


def kind_of(path: Path, seed: int) -> Kind:
    """The documents of a file, or of `<path>.jsonl.zst`, in random order, and of `<path>.heldout.jsonl.zst`."""
    file = path if path.suffix else path.with_name(f"{path.name}.jsonl.zst")
    heldout = file.with_name(file.name.replace(".jsonl", ".heldout.jsonl", 1))
    texts, unused = _divided(_documents(file, seed), 2)
    if heldout != file and heldout.exists():
        return Kind(texts, unused, _documents(heldout, seed))
    return Kind(texts, *_divided(unused, 2))


def _documents(file: Path, seed: int) -> list[Text]:
    documents = islice(good_documents([str(file)], Keys()), _MOST_DOCUMENTS)
    texts = [Text(document.text) for document in documents]
    random.Random(seed).shuffle(texts)
    return texts


def _divided(texts: Sequence[Text], parts: int) -> tuple[Sequence[Text], ...]:
    size = len(texts) // parts
    return tuple(texts[part * size : (part + 1) * size] for part in range(parts))


def people(count: int, pool_fraction: float, seed: int) -> tuple[Kind, Kind]:
    """Questions and answers about people without biographies, and about Task 0's; tokens count from the name's last.

    They are the people of tools/make_biographies.py with these arguments. Nobody is in two of the parts.
    """
    everyone = make_people(count, make_pools(pool_fraction), seed)
    roster = make_roster(count, pool_fraction=pool_fraction, seed=seed)
    unread, task0 = everyone[len(roster.pretrained) :], roster.task0
    return _asked(unread), _asked(task0)


def _asked(persons: Sequence[Person]) -> Kind:
    half, quarter = len(persons) // 2, 3 * len(persons) // 4
    parts = persons[:half], persons[half:quarter], persons[quarter:]
    return Kind(*([_about(person, attribute) for person in part for attribute in ATTRIBUTES] for part in parts))


def _about(person: Person, attribute: str) -> Text:
    record = question(person, attribute)
    asked = record["prompt"]
    before = asked[: asked.index(person.name) + person.name.rindex(" ")]
    return Text(asked[len(before) :] + record["answer"], before)


def own_text(options: argparse.Namespace, reader: Reader) -> FittingText:
    """What the base writes: to fit on, and to set the threshold on."""
    with tempfile.TemporaryDirectory() as folder:
        job = SamplingJob(
            base=options.base,
            output=Path(folder) / "own",
            sampling=Sampling(tokens=options.own_text, seed=options.seed),
            max_tokens=reader.length,
        )
        with local_workers(1) as workers:
            sample_corpus(job, plan_of(job), workers)
        corpus = TokenCorpus(job.output, tokenizer_fingerprint=reader.tokenizer.fingerprint)
        packed = PackedCorpus(corpus, reader.length, padding=reader.tokenizer.document_end[-1], document_mask=True)
        samples = [packed[index] for index in range(len(packed))]
    half = len(samples) // 2
    return FittingText(*(as_windows(part, is_new=False, is_own=True) for part in (samples[:half], samples[half:])))


def other_kinds(kinds: Mapping[str, Kind], tokenizer: Tokenizer, seed: int) -> dict[str, tuple[bool, Sequence[Text]]]:
    """Kinds of text, and whether a gate for Korean should open on them. No gate was fitted on these documents."""
    choice = random.Random(seed)
    people = [person.name for person in make_people(_MADE, make_pools(0.1), seed)]
    hangul = ["".join(choice.choice(part) for part in _HANGUL_NAMES) for _ in range(_MADE)]
    code = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "pipeline").rglob("*.py"))]
    pieces = dict.fromkeys(tokenizer.decode([token]).strip() for token in range(tokenizer.vocab_size))
    korean, english = (_sentences(kinds[name].test) for name in (NEW, OLD))
    after = list(zip(korean, english, strict=False))  # as many as there are of both
    words = [(first.split()[0], second.split()) for first, second in after]
    found: dict[str, tuple[bool, Iterable[Text]]] = {
        **{name: (name.startswith("Korean"), kinds[name].test) for name in FILES if name in kinds},
        "names in Latin letters": (False, map(Text, people)),
        "names in Hangul": (True, map(Text, hangul)),
        "numbers": (False, [Text(_numbers(choice)) for _ in range(_MADE)]),
        "Python": (False, map(Text, code)),
        "one token, Latin": (False, (Text(piece) for piece in pieces if re.fullmatch("[A-Za-z]+", piece))),
        "one token, Hangul": (True, (Text(piece) for piece in pieces if re.fullmatch("[가-힣]+", piece))),
        "Korean sentence after an English one": (True, [Text(f" {first}", second) for first, second in after]),
        "English sentence after a Korean one": (False, [Text(f" {second}", first) for first, second in after]),
        "Korean word in an English sentence": (
            True,
            [Text(f" {word}", " ".join(others[: len(others) // 2])) for word, others in words],
        ),
    }
    listed = {name: (is_new, list(texts)) for name, (is_new, texts) in found.items()}
    return {name: (is_new, texts) for name, (is_new, texts) in listed.items() if texts}


def _sentences(texts: Sequence[Text]) -> list[str]:
    """A sentence or line of each document, of 20 to 160 characters."""
    split = (re.split(r"(?<=[.!?])\s+|\n+", text.text) for text in texts)
    fitting = ([part for part in parts if 20 <= len(part) <= 160] for parts in split)
    return [parts[len(parts) // 2] for parts in fitting if parts]


def _numbers(choice: random.Random) -> str:
    """A line of integers, decimals, dates and times."""
    forms = ("{}", "{:,}", "0.{}", "{}%", "2024-03-{:02}", "{}:30", "${}")
    return " ".join(choice.choice(forms).format(choice.randrange(10 ** choice.randint(1, 5))) for _ in range(20))


def separation_table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    header = ["new text / old text", "fitted against", "layer", "features", "AUC", "MLP"]
    header += ["new open", "old open", "even odds: new", "old"]
    cells = []
    for row in rows:
        against = OWN_TEXT if row.fitted_against == OWN_TEXT else "the old"
        shares = row.new_open, row.old_open, row.new_open_at_even_odds, row.old_open_at_even_odds
        figures = [f"{row.auc:.4f}", cell(row.mlp_auc, ".4f"), *(f"{share:.2%}" for share in shares)]
        cells.append([f"{row.new} / {row.old}", against, str(row.layer), row.features, *figures])
    return table(header, cells)


def decision_table(found: Sequence[Mapping[str, object]]) -> str:
    """What `Separation.decisions` found, for a terminal."""
    shares = [name for name in found[0] if name not in ("kind", "should_be_open", "tokens")]
    cells = []
    for row in found:
        wanted = "open" if row["should_be_open"] else "closed"
        cells.append([str(row["kind"]), wanted, str(row["tokens"]), *(f"{row[name]:.2%}" for name in shares)])
    return table(["kind of text", "should be", "tokens", *shares], cells)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base", type=Path, default=ROOT / "runs/frontier/quick/pretrain/hf", help="a Hugging Face folder")
    add("--data", type=Path, default=ROOT / "data", help="the folder of the texts (default: data)")
    add(
        "--pair",
        nargs=2,
        action="append",
        metavar=("NEW", "OLD"),
        help="files of documents, instead of the default pairs; may be repeated",
    )
    add("--biographies-only", action="store_true", help="only the pair of people, for a base that has read of some")
    add("--layers", nargs="+", type=int, help="before which the stream is read (default: a quarter, half, after all)")
    add("--own-text", type=positive, metavar="TOKENS", help="also fit against so much text that the base writes")
    add("--mlp", action="store_true", help="also the area under the ROC curve of a network with a hidden layer")
    add("--tokens", type=positive, default=20_000, help="of each kind and part, at most (default: 20,000)")
    add("--sequence-length", type=positive, default=128, help="tokens in a window (default: 128)")
    add("--max-open-fraction", type=float, default=0.001, help="of the old text (default: 0.001)")
    add("--people", type=int, default=4000, help="of whom a quarter are Task 0's, and half unread (default: 4000)")
    add("--pool-fraction", type=float, default=0.1, help="of the pools of names and places (default: 0.1)")
    add("--seed", type=int, default=0, help="of the texts' order, the people and the own text (default: 0)")
    add("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run(main)
