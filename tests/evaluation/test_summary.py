"""The summary of runs that were trained with DeepSpeed and converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.data.tokenize.corpora import heldout_corpora
from pipeline.errors import CheckpointError, ConversionError, DataError
from pipeline.evaluation.summary import summarise
from pipeline.files.json_files import write_record
from tests.conversion.checkpoints import scale
from tests.evaluation.finished_run import TRAINING, finished_run, run_config
from tests.extensions.gate.test_open_old_text import heldout, record_of
from tests.texts import STORIES_HELDOUT
from tests.training.runs import tokenize_corpora, write_config


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    return finished_run(models, tmp_path_factory.mktemp("runs") / "demo")


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


def test_a_held_out_fraction_is_the_part_that_was_not_trained_on(tmp_path):
    file = str(STORIES_HELDOUT)
    config = run_config(
        tmp_path, english={"input": [file], "heldout_fraction": 0.25}, other={"input": [file]}
    )
    found = {name: list(documents) for name, documents in heldout_corpora(config).items()}
    assert list(found) == ["english"] and 25 < len(found["english"]) < 75
    with pytest.raises(DataError, match="none has held-out text"):
        heldout_corpora(run_config(tmp_path, other={"input": [file]}))


def test_a_held_out_fraction_that_was_changed_since_is_refused(tmp_path):
    """With a larger one, documents that were trained on would count as held out."""
    corpus = {"input": [str(STORIES_HELDOUT)], "heldout_fraction": 0.1}
    tokenize_corpora(run_config(tmp_path, english=corpus))
    found = heldout_corpora(run_config(tmp_path, english=corpus))
    assert 5 < len(list(found["english"])) < 50
    changed = heldout_corpora(run_config(tmp_path, english={**corpus, "heldout_fraction": 0.5}))
    with pytest.raises(DataError, match=r"heldout_fraction: expected 0.1, .* found 0.5; set it"):
        list(changed["english"])


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
