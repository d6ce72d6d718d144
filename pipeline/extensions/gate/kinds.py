"""Text of other kinds on which a gate learns to stay closed: languages, scripts, code, formulas.

They come with this package (`studies.gate_negatives` makes them), or in a file of the user's.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import zstandard

from pipeline.config.gate import GateSettings
from pipeline.config.run import RunConfig
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.errors import ConfigError, DataError, did_you_mean, faults_of_library
from pipeline.extensions.gate.documents import Packer, Piece
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.windows import Windows, joined
from pipeline.files.reading import read_bytes

SHIPPED = Path(__file__).with_name("negatives.jsonl.zst")
_EXPECTED = 'expected lines such as {"kind": "fr", "text": "..."}'


class KindRecord(NamedTuple):
    """A text of one kind: a language (`fr`), a script (`script:Cherokee`), another (`tables`)."""

    kind: str
    text: str


def read_kinds(path: Path) -> list[KindRecord]:
    """The records of a file of JSON lines, which may be compressed by zstd.

    Raises:
        DataError: it is missing, damaged or empty, or a line is no such record.
    """
    try:
        content = read_bytes(path, DataError)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; {_EXPECTED}: name another file as gate.negatives_file, or null"
        ) from None
    if path.suffix == ".zst":
        with faults_of_library(f"{path}: cannot be decompressed", DataError):
            content = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)).read()
    records: list[KindRecord] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            records.append(_record(line, f"{path}: line {number}"))
    if not records:
        raise DataError(f"{path}: is empty; {_EXPECTED}")
    return records


def _record(line: bytes, place: str) -> KindRecord:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as fault:
        raise DataError(f"{place}: {fault}; {_EXPECTED}") from None
    if not isinstance(value, dict):
        value = {}
    kind = value.get("kind")
    text = value.get("text")
    if not (isinstance(kind, str) and isinstance(text, str) and kind and text):
        raise DataError(f"{place}: found {line[:80]!r}; {_EXPECTED}")
    return KindRecord(kind, text)


class KindText(NamedTuple):
    """Windows of text of many kinds, all of it other text.

    Attributes:
        names: of the kinds; a kind's number is its place here.
        parts: windows to fit on, and others to test with. A file of very few records has none of
            the second kind.
    """

    names: tuple[str, ...]
    parts: tuple[Windows | None, Windows | None]


def kind_windows(
    records: Sequence[KindRecord],
    tokenizer: Tokenizer,
    *,
    tokens: int,
    sequence_length: int,
    document_mask: bool,
    seed: int,
) -> KindText:
    """Windows of about `tokens` tokens to fit on, and as many to test with, equally of all kinds.

    Each record is a document. Of a kind, every second record is to test with. Few tokens are
    exceeded by one record of each kind.
    """
    by_kind: dict[str, list[str]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record.text)
    names = tuple(sorted(by_kind))
    # numpy's generator gives the same numbers on every platform.
    random = np.random.default_rng(seed)
    documents: tuple[list[list[Piece]], list[list[Piece]]] = ([], [])
    left = [tokens, tokens]
    orders = [random.permutation(len(by_kind[name])) for name in names]
    for turn in range(max(map(len, by_kind.values()))):
        part = turn % 2
        # In a new order each time: a small number of tokens is not always that of the same kinds.
        for kind in random.permutation(len(names)):
            # At least one text of each kind: what is missing is a language on which it opens.
            is_wanted = turn < 2 or left[part] > 0
            if turn < len(orders[kind]) and is_wanted:
                text = by_kind[names[kind]][orders[kind][turn]]
                ids = ids_of(tokenizer, text)
                documents[part].append([Piece(ids, int(kind))])
                left[part] -= len(ids)
    packer = Packer(tokenizer, sequence_length, document_mask)
    to_fit, to_test = documents
    return KindText(names, (packer.windows(to_fit), packer.windows(to_test)))


def negatives_file(settings: GateSettings) -> Path | None:
    """The file of kinds of text that the settings name; None: none.

    Raises:
        DataError: it is missing.
    """
    if settings.negatives_file is None:
        return None
    if settings.negatives_file == "shipped":
        return SHIPPED
    if not settings.negatives_file.is_file():
        raise DataError(
            f"gate.negatives_file: {settings.negatives_file}: no such file; {_EXPECTED}: name "
            "another, or leave the setting out for the texts that come with scale-cpt"
        )
    return settings.negatives_file


def kept_records(records: Sequence[KindRecord], leave_out: Sequence[str]) -> list[KindRecord]:
    """The records without some kinds.

    Raises:
        ConfigError: a kind to leave out is not in the records.
    """
    kinds = {record.kind for record in records}
    for kind in leave_out:
        if kind not in kinds:
            raise ConfigError(
                f"gate.leave_out: {kind} is no kind of text in gate.negatives_file"
                f"{did_you_mean(kind, kinds)}"
            )
    return [record for record in records if record.kind not in leave_out]


def with_kinds(
    text: FittingText, records: Sequence[KindRecord], config: RunConfig, tokenizer: Tokenizer
) -> FittingText:
    """`text` with windows of the records beside those of corpora."""
    assert config.gate is not None, "its caller has seen it"
    kinds = kind_windows(
        records,
        tokenizer,
        tokens=config.gate.tokens,
        sequence_length=config.data.sequence_length,
        document_mask=config.data.document_mask,
        seed=config.seed,
    )
    to_fit, to_test = kinds.parts
    fit = [text.fit]
    unused = [text.unused]
    if to_fit is not None:
        fit.append(to_fit)
    if to_test is not None:
        unused.append(to_test)
    return FittingText(fit=joined(fit), unused=joined(unused), kinds=kinds.names)
