"""The summary of runs that were trained with DeepSpeed and converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.data.tokenize.corpora import heldout_corpora
from pipeline.errors import CheckpointError, ConversionError, DataError
from pipeline.evaluation.summary import summarise
from pipeline.files.json_files import write_record
from studies.report.results import read_runs
from tests.bases import STORIES
from tests.conversion.checkpoints import scale
from tests.extensions.gate.test_open_old_text import heldout, record_of
from tests.extensions.self_generated.helpers import copied_stories
from tests.texts import STORIES_HELDOUT, chat, write_chats
from tests.training.runs import write_config

TRAINING = {
    "step0_max_abs_logit_difference": 0.0,
    "trainable_parameters": 250,
    "total_parameters": 1000,
}


METRICS = "".join(
    json.dumps({"step": step, "perplexity/korean": 9.0 - step, "bits_per_byte/korean": 1.0}) + "\n"
    for step in (0, 1)
)


def run_config(folder: Path, **corpora) -> RunConfig:
    changes = {"data__corpora": corpora, "data__replay_fraction": 0} if corpora else {}
    return load_config(write_config(folder, folder, method=scale("adapt"), **changes))


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A SCALE run, trained and converted."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    convert(
        Conversion(models("stories260K", "adapt separate").checkpoint, STORIES, folder / "hf"),
        probe_maker({}),
    )
    (folder / "training.json").write_text(json.dumps(TRAINING))
    return folder


def test_the_summary_of_a_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "demo")
    text = summarise(run_config(tmp_path / "demo"), max_bytes=8000)
    values = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert values.items() >= TRAINING.items()
    assert values["export_max_abs_logit_difference"] <= 1e-4 and values["trained_fraction"] == 0.25
    assert Path(values["hf_folder"]) == tmp_path / "demo" / "hf"
    english, korean = (
        values["scores"]["before"][language]["perplexity"] for language in ("english", "korean")
    )
    assert english < 6 < 1000 < korean
    for language in ("english", "korean"):
        before, after = (values["scores"][when][language] for when in ("before", "after"))
        assert before["perplexity"] != after["perplexity"] and after["bits_per_byte"] > 0
        assert (before["tokens"], before["bytes"]) == (after["tokens"], after["bytes"])
    assert "SCALE-Adapt" in text and "25.0%" in text and str(tmp_path / "demo" / "hf") in text

    (tmp_path / "demo" / "hf" / "verification.json").unlink()
    with pytest.raises(ConversionError, match="scale-cpt convert"):
        summarise(run_config(tmp_path / "demo"))
    (tmp_path / "demo" / "training.json").unlink()
    with pytest.raises(CheckpointError, match="trained to its end"):
        summarise(run_config(tmp_path / "demo"))


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
        text = summarise(config, max_bytes=2000, chats=[kept], max_answer_tokens=5)
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

    def scored(max_bytes: int = 2000, **chats: object) -> tuple[float, dict]:
        summarise(config, max_bytes=max_bytes, max_answer_tokens=5, **chats)
        found = json.loads(path.read_text())
        return found["scores"]["after"]["english"]["perplexity"], found["chats"]

    first, _ = scored()
    marked = json.loads(path.read_text())
    marked["scores"]["after"]["english"]["perplexity"] = 1234.5
    path.write_text(json.dumps(marked))
    kept_score, answers = scored(chats=[kept])
    assert kept_score == 1234.5 and answers["after"]["kept"]["chats"] == 1
    assert scored() == (first, answers), "asked for, they are scored again, and the answers stay"
    path.write_text(json.dumps(marked))
    other, _ = scored(max_bytes=1000, chats=[kept])
    assert other not in (first, 1234.5)
    path.write_text(json.dumps(marked))
    (hf / "verification.json").write_text(
        (hf / "verification.json").read_text() + "\n"
    )  # another export
    assert scored(chats=[kept])[0] == first


def test_a_held_out_fraction_is_the_part_that_was_not_trained_on(tmp_path):
    file = str(STORIES_HELDOUT)
    config = run_config(
        tmp_path, english={"input": [file], "heldout_fraction": 0.25}, other={"input": [file]}
    )
    found = {name: list(documents) for name, documents in heldout_corpora(config).items()}
    assert list(found) == ["english"] and 25 < len(found["english"]) < 75
    with pytest.raises(DataError, match="none has held-out text"):
        heldout_corpora(run_config(tmp_path, other={"input": [file]}))


def test_a_perplexity_that_is_not_finite_is_read_again(run, tmp_path):
    config, kept = run_with_chats(run, tmp_path)
    path = tmp_path / "demo" / "summary.json"
    summarise(config, max_bytes=2000, max_answer_tokens=5)
    stored = json.loads(path.read_text())
    stored["scores"]["after"]["english"]["perplexity"] = None  # as JSON holds infinity
    path.write_text(json.dumps(stored))
    text = summarise(config, max_bytes=2000, max_answer_tokens=5, chats=[kept])
    assert any(line.split()[-2:-1] == ["inf"] for line in text.splitlines()), text
    assert json.loads(path.read_text())["scores"] == stored["scores"]


def test_a_gated_run_shows_what_opens_and_what_keeps_every_logit(run, tmp_path, caplog):
    folder = tmp_path / "demo"
    shutil.copytree(run, folder)
    texts = {
        "korean": heldout("new", 0.9321, closed_sequences=0),
        "english": heldout("replay", 0.058),
    }
    (folder / "gate").mkdir()
    write_record(folder / "gate" / "gate.json", record_of(**texts))
    config = load_config(write_config(folder, folder, method=scale("adapt"), gate={}))
    text = summarise(config, max_bytes=2000)
    head, _, *rows = text.splitlines()
    assert head.endswith("bits per byte    open  kept every logit")
    cells = {row.split("  ")[0]: row.split() for row in rows[:4]}
    assert cells["SCALE-Adapt: korean"][-4:] == ["93.21%", "0", "of", "64"]
    assert cells["SCALE-Adapt: english"][-4:] == ["5.80%", "41", "of", "64"]
    assert "%" not in " ".join(cells["base: english"]), "the base has no gate"
    assert "english (replay): the gate opens on 5.80 % of it" in caplog.text
    values = json.loads((folder / "summary.json").read_text())
    assert values["gate_closed_samples"] == {"korean": 0, "english": 41}
