"""Chats in the summary of a run, in its model card, and in the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config.run import RunConfig
from pipeline.evaluation.evaluator import RunEvaluation
from pipeline.evaluation.summary import summarise
from pipeline.extensions.chats.evaluator import RunChats
from studies.report.results import read_runs
from tests.evaluation.finished_run import finished_run, run_config
from tests.extensions.self_generated.helpers import copied_stories
from tests.texts import chat, write_chats

METRICS = "".join(
    json.dumps({"step": step, "perplexity/korean": 9.0 - step, "bits_per_byte/korean": 1.0}) + "\n"
    for step in (0, 1)
)


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    return finished_run(models, tmp_path_factory.mktemp("runs") / "demo")


def chats_of(config: RunConfig, *files: str) -> dict[str, RunEvaluation]:
    """What `scale-cpt evaluate RUN --chats` asks of a summary; nothing without files."""
    return {"chats": RunChats(config, files, max_answer_tokens=5)} if files else {}


def run_with_chats(run: Path, folder: Path) -> tuple[RunConfig, Path]:
    """A copy of the run whose base and export have a chat template, and a file of chats."""
    shutil.copytree(run, folder / "demo")
    changes = {"chat_template": "{% for m in messages %}<s>{{ m.content }}{% endfor %}"}
    base = copied_stories(folder / "base", tokenizer_config=changes)
    shutil.copy(base / "tokenizer_config.json", folder / "demo" / "hf")
    kept = write_chats(folder / "kept.jsonl", chat(("user", "Tom"), ("assistant", "ran")))
    return run_config(folder / "demo").model_copy(update={"base": base}), kept


@pytest.mark.full
def test_chats_are_in_the_summary_the_card_and_the_report(run, tmp_path):
    config, kept = run_with_chats(run, tmp_path)
    hf = config.folder / "hf"
    for _ in range(2):  # the card has them once
        text = summarise(config, max_bytes=2000, asked=chats_of(config, kept))
    found = json.loads((tmp_path / "demo" / "summary.json").read_text())["chats"]
    assert {when: files["kept"]["chats"] for when, files in found.items()} == {
        "before": 1,
        "after": 1,
    }
    row = f"{found['after']['kept']['answer_tokens']:.1f}"
    assert [
        line.split()[-1] for line in text.splitlines() if line.startswith("SCALE-Adapt: kept")
    ] == [row]
    card = (hf / "README.md").read_text()
    assert (
        card.count("## Chats") == 1 and f"| SCALE-Adapt: kept | 1 | 0.0% | 0.0% | {row} |" in card
    )

    (tmp_path / "demo" / "metrics.jsonl").write_text(METRICS)
    (read,) = read_runs([tmp_path / "demo"])
    assert read.after["kept"] == {"exact_match": 0.0, "ended": 0.0, "answer_tokens": 5.0}
    assert read.roles["kept"] == "replay"


def test_chats_are_answered_without_scoring_the_texts_again_unless_something_changed(run, tmp_path):
    config, kept = run_with_chats(run, tmp_path)
    hf = config.folder / "hf"
    path = tmp_path / "demo" / "summary.json"

    def scored(max_bytes: int = 2000, *names: str) -> tuple[float, dict]:
        summarise(config, max_bytes=max_bytes, asked=chats_of(config, *names))
        found = json.loads(path.read_text())
        return found["scores"]["after"]["english"]["perplexity"], found["chats"]

    first, _ = scored()
    marked = json.loads(path.read_text())
    marked["scores"]["after"]["english"]["perplexity"] = 1234.5
    path.write_text(json.dumps(marked))
    kept_score, answers = scored(2000, kept)
    assert kept_score == 1234.5 and answers["after"]["kept"]["chats"] == 1
    assert scored() == (first, answers), "asked for, they are scored again, and the answers stay"
    path.write_text(json.dumps(marked))
    other, _ = scored(1000, kept)
    assert other not in (first, 1234.5)
    path.write_text(json.dumps(marked))
    (hf / "verification.json").write_text(
        (hf / "verification.json").read_text() + "\n"
    )  # another export
    assert scored(2000, kept)[0] == first


def test_a_perplexity_that_is_not_finite_is_read_again(run, tmp_path):
    config, kept = run_with_chats(run, tmp_path)
    path = tmp_path / "demo" / "summary.json"
    summarise(config, max_bytes=2000)
    stored = json.loads(path.read_text())
    stored["scores"]["after"]["english"]["perplexity"] = None  # as JSON holds infinity
    path.write_text(json.dumps(stored))
    text = summarise(config, max_bytes=2000, asked=chats_of(config, kept))
    assert any(line.split()[-2:-1] == ["inf"] for line in text.splitlines()), text
    assert json.loads(path.read_text())["scores"] == stored["scores"]
