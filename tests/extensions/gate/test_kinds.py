"""The kinds of text on which every gate learns to stay closed: the file, and its windows."""

from __future__ import annotations

import json

import pytest
import torch
import zstandard

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, DataError
from pipeline.extensions.gate.kinds import (
    SHIPPED,
    KindRecord,
    kept_records,
    kind_windows,
    read_kinds,
)
from pipeline.extensions.gate.windows import NO_KIND
from tests.bases import STORIES
from tests.texts import DATA

RECORDS = [
    KindRecord(kind, f"{kind} {number} " + "word " * (number + 3))
    for kind in ("fr", "tables", "zz")
    for number in range(6)
]
TOKENIZERS = {
    "with a start token": STORIES,
    "without": DATA / "tokenizers" / "20B_tokenizer.json",
}


def test_the_shipped_file_is_small_has_many_kinds_and_names_its_sources():
    assert SHIPPED.stat().st_size < 2**20
    records = read_kinds(SHIPPED)
    kinds = {record.kind for record in records}
    assert len(kinds) > 400 and {"fr", "ja", "zh", "ko", "script:Cyrillic", "code:rust"} < kinds
    assert {"formulas", "tables", "json", "urls", "symbols", "emoji", "diacritics"} < kinds
    notices = SHIPPED.with_name("negatives.licenses.txt").read_text(encoding="utf-8")
    for source in (
        "UNICODE LICENSE V3",
        "Django Software Foundation",
        "ExplosionAI",
        "Apache-2.0",
    ):
        assert source in notices


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_windows_hold_each_record_once_with_its_kind(tokenizer):
    loaded = load_tokenizer(tokenizer)
    text = kind_windows(
        RECORDS, loaded, tokens=10**6, sequence_length=32, document_mask=True, seed=0
    )
    assert text.names == ("fr", "tables", "zz")
    found: dict[str, list[str]] = {}
    for part in text.parts:
        assert part is not None and not part.is_new.any()
        for kind, name in enumerate(text.names):
            ids = part.tokens[(part.kinds == kind) & part.present].tolist()
            found.setdefault(name, []).append(loaded.decode(ids))
        assert (part.kinds[~part.present] == NO_KIND).all()
        begins = part.positions == 0
        assert begins.sum() >= len(RECORDS) // 2
    for name, (to_fit, to_test) in found.items():
        numbers = [{text for text in part.split() if text.isdigit()} for part in (to_fit, to_test)]
        assert numbers[0] | numbers[1] == set("012345") and not numbers[0] & numbers[1]
        assert {word for word in to_fit.split() if word in text.names} == {name}


def test_few_tokens_are_of_all_kinds_alike():
    loaded = load_tokenizer(STORIES)
    text = kind_windows(RECORDS, loaded, tokens=60, sequence_length=32, document_mask=True, seed=0)
    part = text.parts[0]
    assert part is not None and part.present.sum() < 150
    assert torch.bincount(part.kinds[part.present & (part.kinds >= 0)]).min() > 0
    fewest = kind_windows(RECORDS, loaded, tokens=1, sequence_length=32, document_mask=True, seed=0)
    for part in fewest.parts:
        assert part is not None and set(part.kinds[part.present].tolist()) >= {0, 1, 2}


FAULTS = {
    "": "is empty",
    "{": "line 1: ",
    '{"kind": "fr", "text": "a"}\n["fr", "a"]': 'line 2: found b\'["fr", "a"]\'',
    '{"kind": "fr", "text": 3}': "line 1: found",
    '{"kind": "fr"}': "line 1: found",
}


@pytest.mark.parametrize("content", FAULTS)
def test_a_file_of_something_else_is_one_line(content, tmp_path):
    path = tmp_path / "negatives.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_kinds(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {FAULTS[content]}") and "\n" not in message
    assert 'such as {"kind": "fr", "text": "..."}' in message


def test_a_file_may_be_compressed_and_damage_is_one_line(tmp_path):
    path = tmp_path / "negatives.jsonl.zst"
    line = json.dumps({"kind": "fr", "text": "été"}) + "\n"
    path.write_bytes(zstandard.compress(line.encode()))
    assert read_kinds(path) == [KindRecord("fr", "été")]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"negatives.jsonl.zst: "):
        read_kinds(path)
    path.write_bytes(b"text")
    with pytest.raises(DataError, match="cannot be decompressed"):
        read_kinds(path)
    with pytest.raises(DataError, match="no such file"):
        read_kinds(tmp_path / "other.jsonl")


def test_a_kind_to_leave_out_must_be_there():
    assert {record.kind for record in kept_records(RECORDS, ["fr"])} == {"tables", "zz"}
    with pytest.raises(ConfigError, match=r"gate.leave_out: table is no kind .* mean tables\?"):
        kept_records(RECORDS, ["table"])
