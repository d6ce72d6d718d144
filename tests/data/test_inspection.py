"""The two smaller command lines: looking into a corpus, and training a tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data.corpora import decoded_documents, summary
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import DataError
from tests.data.helpers import PROJECT, STORIES260K, documents, tokenize, write_jsonl
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT


def run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "tools" / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)


def test_documents_come_back_as_text(tmp_path: Path):
    texts = documents(30)
    tokenize(tmp_path / "corpus", write_jsonl(tmp_path / "x.jsonl", texts), unit_bytes=1000)
    corpus, tokenizer = TokenCorpus(tmp_path / "corpus"), load_tokenizer(STORIES260K)
    decoded = [text for _, text in decoded_documents(corpus, tokenizer, 30, seed=1)]
    assert sorted(decoded) == sorted(f"<s> {text}</s>" for text in texts)
    assert decoded != [text for _, text in decoded_documents(corpus, tokenizer, 30, seed=2)]


def test_another_tokenizer_decodes_nothing(tmp_path: Path):
    tokenize(tmp_path / "corpus", write_jsonl(tmp_path / "x.jsonl", documents(3)))
    changed = (STORIES260K / "tokenizer.json").read_text().replace('"Prepend"', '"Prepend" ')
    other = tmp_path / "tokenizer.json"
    other.write_text(changed.replace('"ignore_merges": false', '"ignore_merges": true'))
    with pytest.raises(DataError, match="is not the tokenizer that made"):
        list(
            decoded_documents(
                TokenCorpus(tmp_path / "corpus"), load_tokenizer(other, end_of_document="</s>"), 1, seed=0
            )
        )


def test_the_summary_names_what_matters(tmp_path: Path):
    source = write_jsonl(tmp_path / "x.jsonl", [*documents(30), 1, ""])
    made = tokenize(tmp_path / "corpus", source)
    said = dict(summary(made))
    assert said["rejected"] == "empty_text 1, text_not_string 1"
    assert said["documents"] == "30"
    assert str(source) in said["input"]


def test_the_inspecting_command_line(tmp_path: Path):
    tokenize(tmp_path / "corpus", write_jsonl(tmp_path / "x.jsonl", [*documents(30), 1]))
    done = run(
        "inspect_data.py", tmp_path / "corpus", "--tokenizer", STORIES260K, "--samples", "2", "--characters", "20"
    )
    assert done.returncode == 0, done.stderr
    assert "quarantine.jsonl" in done.stdout
    assert done.stdout.count("--- 00000-000000, document ") == 2
    (tmp_path / "corpus" / "00000-000000.bin").unlink()
    done = run("inspect_data.py", tmp_path / "corpus")
    assert done.returncode == 1
    assert "00000-000000.bin: no such file" in done.stderr


def test_the_training_command_line_compares_tokenizers(tmp_path: Path):
    done = run(
        "train_tokenizer.py",
        *("--input", REVIEWS_HELDOUT, STORIES_HELDOUT, "--max-mib", "0.3"),
        *("--output", tmp_path / "t.model", "--vocab-size", "1500", "--model-type", "unigram"),
        *("--compare", STORIES260K),
        *("--report-on", f"korean={REVIEWS_HELDOUT}", f"english={STORIES_HELDOUT}"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    per_character = {(row[0].rsplit("/", 1)[-1], row[1]): float(row[2]) for row in rows}
    assert per_character["stories260K", "korean"] > 2
    assert per_character["t.model", "korean"] < 1
    assert per_character["t.model", "english"] < 0.7
    assert load_tokenizer(tmp_path / "t.model").vocab_size == 1500
