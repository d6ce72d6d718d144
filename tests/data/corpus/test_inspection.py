"""The command lines that inspect a corpus and train a tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import printable
from tests.data.helpers import (
    STORIES260K,
    documents,
    tokenize,
    write_jsonl,
)
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT


def test_inspect_data_shows_the_manifest_and_documents(tmp_path: Path):
    """The manifest, the quarantine, and every document as text; then that another tokenizer is
    refused."""
    texts = documents(30)
    source = write_jsonl(tmp_path / "x.jsonl", [*texts, 1, ""])
    tokenize(tmp_path / "corpus", source, unit_bytes=1000)
    done = scale_cpt(
        "inspect-data", tmp_path / "corpus", "--tokenizer", STORIES260K, "--samples", "30"
    )
    assert done.returncode == 0, done.stderr
    summary, *decoded = done.stdout.split("\n--- ")
    values = dict(re.split("  +", line, maxsplit=1) for line in summary.splitlines())
    assert (values["rejected"], values["documents"]) == ("empty_text 1, text_not_string 1", "30")
    assert str(source) in values["input"] and values["rejected records"].endswith(
        "quarantine.jsonl"
    )
    found = [document.partition(" ---\n")[2].rstrip("\n") for document in decoded]
    assert sorted(found) == sorted(f"<s> {text}</s>".rstrip("\n") for text in texts)

    described = (STORIES260K / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(
        described.replace('"ignore_merges": false', '"ignore_merges": true')
    )
    (tmp_path / "tokenizer_config.json").write_bytes(
        (STORIES260K / "tokenizer_config.json").read_bytes()
    )
    done = scale_cpt("inspect-data", tmp_path / "corpus", "--tokenizer", tmp_path)
    assert done.returncode == 1
    assert f"tokenizer.json: did not make {tmp_path / 'corpus'}" in done.stderr


def test_a_folder_of_corpora_has_a_line_for_each(tmp_path: Path):
    tokenize(
        tmp_path / "korean", write_jsonl(tmp_path / "x.jsonl", documents(30)), heldout_fraction=0.2
    )
    (tmp_path / "begun" / ".units").mkdir(parents=True)
    done = scale_cpt("inspect-data", tmp_path, "--verify")
    assert done.returncode == 0, done.stderr
    begun, korean, heldout = (line.split() for line in done.stdout.splitlines()[2:])
    assert begun[:3] == ["begun", "not", "finished:"]
    assert (korean[:2], heldout[:2]) == (["korean", "train"], ["korean.heldout", "heldout"])
    assert int(korean[2]) + int(heldout[2]) == 30
    next((tmp_path / "korean").glob("*.bin")).unlink()
    done = scale_cpt("inspect-data", tmp_path)
    assert done.returncode == 1 and ".bin: no such file" in done.stderr
    assert "unfinished" in scale_cpt("inspect-data", tmp_path / "begun").stderr


def test_a_checkpoint_is_no_damaged_corpus(tmp_path: Path):
    """Nobody is told to remove one."""
    tokenize(tmp_path / "korean", write_jsonl(tmp_path / "x.jsonl", documents(3)))
    checkpoint = tmp_path / "step_00000004"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text('{"format": "scale-cpt checkpoint 3"}')
    done = scale_cpt("inspect-data", checkpoint)
    assert done.returncode == 1
    assert "expected a token corpus, found scale-cpt checkpoint 3" in done.stderr
    assert "remove" not in done.stderr
    done = scale_cpt("inspect-data", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["korean"]


def test_train_tokenizer_compares_tokenizers(tmp_path: Path):
    done = scale_cpt(
        "tokenizer",
        *("--input", REVIEWS_HELDOUT, STORIES_HELDOUT, "--max-mib", "0.3"),
        *("--output", tmp_path / "t.json", "--vocab-size", "1500"),
        *("--compare", STORIES260K),
        *("--report-on", f"korean={REVIEWS_HELDOUT}", f"english={STORIES_HELDOUT}"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    per_character = {(row[0].rsplit("/", 1)[-1], row[1]): float(row[2]) for row in rows}
    assert per_character["stories260K", "korean"] > 2
    assert per_character["t.json", "korean"] < 1
    assert per_character["t.json", "english"] < 0.7
    assert load_tokenizer(tmp_path / "t.json").vocab_size == 1500


def test_escape_sequences_are_not_printed(tmp_path: Path):
    text = "red \x1b[31mtext\x1b]0;title\x07 and \u202eback"
    assert printable(text) == r"red \x1b[31mtext\x1b]0;title\x07 and \u202eback"
    tokenize(tmp_path / "out", write_jsonl(tmp_path / "x.jsonl", [text]))
    shown = scale_cpt(
        "inspect-data", tmp_path / "out", "--tokenizer", "examples/data/models/stories260K"
    ).stdout
    assert "\x1b" not in shown and r"\x1b[31m" in shown
