"""The stage from a trained run to a published gate, its export and its summary."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.conversion.convert import convert, latest_conversion, run_sources
from pipeline.conversion.probe_texts import probe_maker
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import CheckpointError, ConfigError, ConversionError, DataError
from pipeline.evaluation.summary import summarise
from pipeline.extensions.gate.changes import CHANGES
from pipeline.extensions.gate.fit_run import fit_gate
from pipeline.extensions.gate.fitting import BaseStream, fit_on
from pipeline.extensions.gate.fitting_text import FittingText, read_fitting_text
from pipeline.extensions.gate.kinds import SHIPPED, read_kinds
from pipeline.extensions.gate.table import as_text, warn_of_cost
from pipeline.extensions.gate.threshold import threshold_by_open_fraction
from pipeline.gating.folder import open_gate, write_gate
from pipeline.hf.load import load_hf_model
from tests.bases import STORIES, reference
from tests.distributed import run_ranks
from tests.files import change_json
from tests.programs import scale_cpt
from tests.training.runs import in_turn, make_run, train

pytestmark = pytest.mark.full

GATE = {"tokens": 3000, "max_open_fraction": 0.01, "negatives_file": None}
VARIANTS = {
    "adapt": {"base_precision": "nf4"},
    "preserve": {
        "base_precision": "fp8",
        "method__norm": "base",
        "method__variant": "preserve",
        "method__l_fp": None,
    },
}


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """Finished runs by variant: the configuration's path. Their gates are fitted and converted by
    the tests."""
    folder = tmp_path_factory.mktemp("gated")
    made = {
        name: make_run(
            folder / name, tokens, zero=1, schedule__learning_rate=0.02, gate=GATE, **changes
        )
        for name, changes in VARIANTS.items()
    }
    assert run_ranks(in_turn, 1, [partial(train, config) for config in made.values()]) == [[0, 0]]
    return made


def with_changes(path: Path, **changes) -> RunConfig:
    """The configuration at `path`, with other sections."""
    values = yaml.safe_load(path.read_text()) | changes
    return parse_config(values, source="test")


def copied(path: Path, folder: Path, **gate) -> RunConfig:
    """The same run in another folder, with its checkpoints, no gate, and changes of the section
    gate."""
    config = with_changes(path, folder=str(folder), gate={**GATE, **gate})
    shutil.copytree(load_config(path).folder / "checkpoints", folder / "checkpoints")
    return config


@pytest.fixture(scope="module")
def fitted(runs):
    """The same, with their gates; the records are those of the first fit."""
    records = {}
    for name, path in runs.items():
        records[name], now = fit_gate(load_config(path))
        assert now
    return runs, records


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gate_keeps_the_old_text_and_opens_for_the_new(name, fitted):
    runs, records = fitted
    record = records[name]
    korean, english = record.heldout["korean"], record.heldout["english"]
    assert record.auc > 0.99 and korean.open_fraction > 0.9 and english.open_fraction < 0.05
    assert record.open_fraction_of_negatives <= 0.01
    assert record.layer == {"adapt": 3, "preserve": 5}[name]
    assert english.closed_sequences > 0 and record.closed_max_abs_logit_difference == 0.0
    assert abs(english.gated_perplexity - english.base_perplexity) < abs(
        english.ungated_perplexity - english.base_perplexity
    )
    assert abs(korean.gated_perplexity / korean.ungated_perplexity - 1) < 0.3
    assert korean.base_perplexity > 2 * korean.ungated_perplexity
    gate, stored = open_gate(load_config(runs[name]).folder / "gate")
    assert (
        stored.model_copy(update={"tensors_hash": ""}) == record
        and gate.threshold == record.threshold
    )


def test_a_fit_is_repeatable_and_only_a_damaged_gate_is_fitted_again(fitted):
    runs, records = fitted
    folder = load_config(runs["adapt"]).folder / "gate"
    before = (folder / "gate.json").stat().st_mtime_ns
    record, now = fit_gate(load_config(runs["adapt"]))
    assert not now and record.auc == records["adapt"].auc
    assert (folder / "gate.json").stat().st_mtime_ns == before
    tensors = (folder / "gate.safetensors").read_bytes()
    (folder / "gate.safetensors").write_bytes(tensors[:-4])
    record, now = fit_gate(load_config(runs["adapt"]))
    assert now and record == records["adapt"]
    assert (folder / "gate.safetensors").read_bytes() == tensors
    assert sorted(path.name for path in folder.parent.glob("*gate*")) == ["gate"]


def test_a_threshold_changed_by_hand_is_refused_by_every_reader_and_fitted_again(fitted, caplog):
    path = fitted[0]["adapt"]
    assert scale_cpt("convert", path).returncode == 0
    record = load_config(path).folder / "gate" / "gate.json"
    before = record.read_bytes()
    change_json(record, threshold=-100.0)
    for reader in ("convert", "evaluate"):
        refused = scale_cpt(reader, path)
        assert refused.returncode == 1
        assert refused.stderr.splitlines()[-1].startswith(
            f"error: {record}: does not match its checksum: it was changed"
        )
    assert fit_gate(load_config(path))[1]
    assert f"fits the gate again: {record}: does not match its checksum" in caplog.text
    assert record.read_bytes() == before
    shutil.rmtree(latest_conversion(load_config(path)).output)  # as other tests expect the run


def test_a_gate_of_an_earlier_version_is_read_and_stays_as_it_is(fitted, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    config = copied(fitted[0]["adapt"], tmp_path)
    gate, record = open_gate(load_config(fitted[0]["adapt"]).folder / "gate")
    settings = dict(record.request["settings"])
    for name in (
        "negatives_file",
        "leave_out",
        "threshold_rule",
        "max_cost",
        "max_closed_fraction",
    ):
        del settings[name]
    earlier = {"request": record.request | {"settings": settings}, "thresholds": {}, "changes": {}}
    gate = replace(gate, threshold=0.25)
    of_gate = {"threshold": 0.25, "threshold_rule": "max_open_fraction"}
    write_gate(tmp_path / "gate", gate, record.model_copy(update=earlier | of_gate))
    found, now = fit_gate(config)
    assert not now and found.threshold == 0.25
    assert "fitted by an earlier version" in caplog.text and "remove the folder" in caplog.text
    assert "threshold by" not in as_text(found)
    # Another setting of today is another gate.
    changed = copied_settings(config, tokens=2500)
    found, now = fit_gate(changed)
    assert now and found.threshold != 0.25 and found.thresholds


def copied_settings(config: RunConfig, **gate) -> RunConfig:
    """The same run with other settings of its gate."""
    assert config.gate is not None
    return config.model_copy(update={"gate": config.gate.model_copy(update=gate)})


KINDS = ("ko", "fr", "el", "tables", "code:c")


@pytest.fixture(scope="module")
def with_kinds(runs, tmp_path_factory):
    """The run with a file of a few kinds of text, among them the new language; and its record."""
    folder = tmp_path_factory.mktemp("kinds")
    file = folder / "kinds.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for record in read_kinds(SHIPPED):
            if record.kind in KINDS:
                lines.write(json.dumps(record._asdict()) + "\n")
    config = copied(runs["adapt"], folder / "run", negatives_file=str(file), splices=True)
    record, now = fit_gate(config)
    assert now
    return config, record


def test_kinds_of_text_are_rows_and_the_new_language_is_left_out(with_kinds):
    _, record = with_kinds
    assert set(record.kinds) == set(KINDS)
    assert [name for name, kind in record.kinds.items() if kind.left_out] == ["ko"]
    assert record.kinds["ko"].open_fraction > 0.5
    for name in ("fr", "tables", "code:c"):
        figures = record.kinds[name]
        assert figures.tokens > 100 and figures.open_fraction < record.kinds["ko"].open_fraction / 2
        if figures.open_tokens == 0:
            assert figures.cost == 0.0
    text = as_text(record)
    assert ("ko (left out)" in text and "closed on all" in text) or "fr" in text
    assert "max_cost (taken)" in text and "max_open_fraction" in text
    assert set(record.changes) == {name for name in CHANGES if not name.startswith("chat")}
    after = record.changes["new text later after other text"]
    assert after.is_new and after.open_fraction > 0.5


def test_the_threshold_is_as_high_as_the_cost_allows(with_kinds):
    config, record = with_kinds
    korean = record.heldout["korean"]
    assert korean.cost_of_later_tokens <= 0.01
    assert record.thresholds["max_cost"].threshold == record.threshold
    assert record.thresholds["max_cost"].cost <= 0.01
    costly, now = fit_gate(copied_settings(config, max_cost=0.2, max_closed_fraction=0.5))
    assert now and costly.threshold > record.threshold
    by_share, now = fit_gate(copied_settings(config, threshold_rule="max_open_fraction"))
    assert now and by_share.threshold == by_share.thresholds["max_open_fraction"].threshold
    assert by_share.open_fraction_of_negatives <= GATE["max_open_fraction"]


def test_another_file_of_kinds_is_another_gate(with_kinds, tmp_path):
    config, _ = with_kinds
    file = config.gate.negatives_file
    moved = tmp_path / "moved.jsonl"
    shutil.copy(file, moved)
    at_another_place = copied_settings(config, negatives_file=moved)
    fit_gate(at_another_place)
    assert fit_gate(at_another_place)[1] is False
    with moved.open("a", encoding="utf-8") as lines:
        lines.write('{"kind": "minutes", "text": "The meeting began at nine."}\n')
    with pytest.raises(DataError, match=r"gate.negatives_file: .*/none.jsonl: no such file"):
        fit_gate(copied_settings(config, negatives_file=tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"gate.leave_out: fx is no kind"):
        fit_gate(copied_settings(config, leave_out=["fx"]))
    record, now = fit_gate(copied_settings(at_another_place, leave_out=["fr"]))
    assert now and "fr" not in record.kinds


def with_new_text_among_the_old(windows, *, is_self_generated: bool, share: int = 5):
    """A fifth of the new windows count as old ones, which the base wrote or did not."""
    new = windows.is_new[:, 0]
    taken = new.nonzero().flatten()[: int(new.sum()) // share]
    is_new = windows.is_new.clone()
    is_new[taken] = False
    return replace(windows, is_new=is_new, is_self_generated=~is_new & is_self_generated)


def test_what_the_base_wrote_in_the_new_language_does_not_keep_the_gate_shut(runs):
    config = load_config(runs["adapt"])
    model = open_trained(newest_checkpoint(config), config.base)
    text = read_fitting_text(config, config.gate, load_tokenizer(config.base).fingerprint)
    stream = BaseStream(model.loaded(torch.float32, torch.device("cpu")), 3)

    def fitted_on(*, is_self_generated: bool):
        parts = (
            with_new_text_among_the_old(part, is_self_generated=is_self_generated)
            for part in (text.fit, text.unused)
        )
        return fit_on(stream, FittingText(*parts), config.gate.features)

    def new_open(fit):
        threshold = threshold_by_open_fraction(fit.negatives, GATE["max_open_fraction"])
        return (fit.new > threshold).double().mean()

    own, given = fitted_on(is_self_generated=True), fitted_on(is_self_generated=False)
    assert 0.1 < own.left_out < 0.25 and given.left_out == 0
    assert new_open(own) > 0.9
    assert new_open(given) < 0.5
    new = text.unused.rows(text.unused.is_new[:, 0])
    alike = with_new_text_among_the_old(new, is_self_generated=True, share=2)
    with pytest.raises(
        DataError,
        match=r"of the self-generated text looks like the new text, expected at most 50%",
    ):
        fit_on(stream, FittingText(text.fit, alike), config.gate.features)


def test_what_costs_more_than_two_percent_is_a_warning(fitted, caplog):
    record = fitted[1]["adapt"]
    korean = record.heldout["korean"]
    for factor, expected in ((1.03, ["korean: its perplexity is 3.0 % higher"]), (1.01, [])):
        costly = korean.model_copy(update={"gated_perplexity": factor * korean.ungated_perplexity})
        caplog.clear()
        warn_of_cost(record.model_copy(update={"heldout": {"korean": costly}}))
        assert [line.partition(" with the gate")[0] for line in caplog.messages] == expected


def test_the_export_is_gated_and_verified(fitted):
    runs, _ = fitted
    config = load_config(runs["adapt"])
    conversion = latest_conversion(config)
    assert convert(conversion, probe_maker(*run_sources(config)))
    assert not convert(conversion, probe_maker(*run_sources(config)))
    report = json.loads((conversion.output / "verification.json").read_text())
    assert report["max_abs"] < 1e-4 and set(report["texts"]) == {"korean", "english"}
    model, base = load_hf_model(conversion.output), reference(STORIES)
    tokens = torch.tensor([[1, 403, 407, 261, 378]])
    with torch.no_grad():
        levels = model.token_gate.forward(model.embedding.base(tokens), None, None, None)
        assert levels.shape == (1, 5, 1)
        difference = (model(tokens).logits - base(tokens).logits).abs().max()
    assert difference < 1e-4
    (config.folder / "training.json").write_text(
        json.dumps({"trainable_parameters": 1, "total_parameters": 2}), encoding="utf-8"
    )
    summarise(config, max_bytes=1000)
    values = json.loads((config.folder / "summary.json").read_text())
    assert values["closed_max_abs_logit_difference"] == 0.0
    assert values["gate_open"]["korean"] > 0.9 > 0.05 > values["gate_open"]["english"]


def test_a_gate_that_decides_otherwise_is_not_published(fitted, tmp_path):
    runs, _ = fitted
    config = load_config(runs["adapt"])
    conversion = replace(latest_conversion(config), output=tmp_path / "hf")

    def disturb(model):
        (partial,) = tmp_path.iterdir()
        tensors = load_file(partial / "model.safetensors")
        save_file(
            tensors | {"token_gate.weight": -tensors["token_gate.weight"]},
            partial / "model.safetensors",
        )
        return probe_maker(*run_sources(config))(model)

    with pytest.raises(ConversionError, match="the exported gate decides otherwise"):
        convert(conversion, disturb)
    assert not list(tmp_path.iterdir())


def test_a_gate_of_another_checkpoint_is_not_exported(fitted, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    runs, _ = fitted
    config = copied(runs["adapt"], tmp_path)
    conversion = latest_conversion(config)
    alone = replace(conversion, format="expansion", output=tmp_path / "expansion")
    assert convert(alone, probe_maker(*run_sources(config))) and not convert(
        alone, probe_maker(*run_sources(config))
    )
    assert "without the gate" in caplog.text
    with pytest.raises(
        CheckpointError, match=r"not fitted yet: run the stage gate \(scale-cpt gate\) first"
    ):
        convert(conversion, probe_maker(*run_sources(config)))
    shutil.copytree(load_config(runs["preserve"]).folder / "gate", tmp_path / "gate")
    with pytest.raises(CheckpointError, match="fitted for another checkpoint"):
        convert(conversion, probe_maker(*run_sources(config)))
    assert not conversion.output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate": {"negatives": ["korean"]}},
            "korean is no corpus of role self_generated or replay",
        ),
        ({"gate": {"negatives": ["latin"]}}, "latin is no corpus"),
    ],
)
def test_settings_that_do_not_fit(changes, message, runs):
    with pytest.raises(ConfigError, match=message):
        with_changes(runs["adapt"], **changes)


def test_a_gate_above_the_first_layer_with_w12_keeps_the_base(runs, tmp_path, caplog):
    """The layers below it run twice, in the measurement and in the export."""
    caplog.set_level("INFO", "pipeline")
    config = copied(runs["adapt"], tmp_path, layer=4)
    record, _ = fit_gate(config)
    assert "gate.layer 4 is above layer 3, where trained weights begin" in caplog.text
    assert record.layer == 4 and record.closed_max_abs_logit_difference == 0.0
    assert record.heldout["english"].closed_sequences > 0
    assert record.heldout["korean"].open_fraction > 0.9
    conversion = latest_conversion(config)
    assert convert(conversion, probe_maker(*run_sources(config)))


def test_what_only_the_model_and_the_text_refuse(runs):
    with pytest.raises(ConfigError, match=r"gate\.layer: 6 is beyond 5"):
        fit_gate(with_changes(runs["preserve"], gate={**GATE, "layer": 6}))
    too_small = {**GATE, "max_open_fraction": 1e-5, "threshold_rule": "max_open_fraction"}
    with pytest.raises(DataError, match=r"gate\.max_open_fraction: 1e-05 cannot be measured"):
        fit_gate(with_changes(runs["preserve"], gate=too_small))


def test_text_that_the_base_wrote_is_taken_before_text_that_is_replayed(runs):
    data = yaml.safe_load(runs["adapt"].read_text())["data"]
    assert with_changes(runs["adapt"]).gate_negatives == ["english"]
    own = {"role": "self_generated", "sample": {"tokens": 1000}}
    with_own = {**data, "corpora": {**data["corpora"], "own": own}}
    assert with_changes(runs["adapt"], data=with_own).gate_negatives == ["own"]
    only_new = {**data, "corpora": {"korean": data["corpora"]["korean"]}, "replay_fraction": 0}
    with pytest.raises(ConfigError, match="needs text that is not new"):
        with_changes(runs["adapt"], data=only_new)


def test_the_command_line(fitted):
    runs, _ = fitted
    done = scale_cpt("gate", runs["adapt"])
    assert done.returncode == 0 and "korean (new)" in done.stdout and "AUC" in done.stdout
    assert "is already fitted" in done.stderr
    values = yaml.safe_load(runs["adapt"].read_text())
    del values["gate"]
    path = runs["adapt"].with_name("ungated.yaml")
    path.write_text(yaml.safe_dump(values))
    done = scale_cpt("gate", path)
    assert done.returncode == 0 and "nothing to fit" in done.stderr
