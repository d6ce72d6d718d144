"""The stage from a trained run to a published gate, its export and its summary."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from pipeline.config.run import load_config, parse_config
from pipeline.conversion.convert import convert, latest_conversion, newest_checkpoint, run_probe
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.conversion.trained_model import open_trained
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import CheckpointError, ConfigError, ConversionError, DataError
from pipeline.evaluation.summary import summarise
from pipeline.gating.fit_run import fit_gate, fit_on, warn_of_cost
from pipeline.gating.states import BaseStream
from pipeline.gating.windows import FittingText, read_fitting_text
from pipeline.scale.gate_folder import open_gate
from tests.bases import STORIES, reference
from tests.distributed import run_ranks
from tests.training.runs import make_run, train_each

TOOL = Path(__file__).parents[2] / "tools" / "fit_gate.py"
GATE = {"tokens": 3000, "max_open_fraction": 0.01}
VARIANTS = {
    "adapt": {},
    "preserve": {"method__norm": "base", "method__variant": "preserve", "method__l_fp": None},
}


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """Finished runs by variant: the configuration's path. Their gates are fitted and converted by the tests."""
    folder = tmp_path_factory.mktemp("gated")
    made = {
        name: make_run(folder / name, tokens, zero=1, schedule__learning_rate=0.02, gate=GATE, **changes)
        for name, changes in VARIANTS.items()
    }
    assert run_ranks(train_each, 1, list(made.values())) == [[0, 0]]
    return made


@pytest.fixture(scope="module")
def fitted(runs):
    """The same, with their gates; the records are those of the first fit."""
    records = {}
    for name, path in runs.items():
        records[name], now = fit_gate(load_config(path))
        assert now
    return runs, records


def changed(path: Path, **gate) -> Path:
    """A configuration of the same run with another section gate."""
    values = yaml.safe_load(path.read_text())
    values["gate"] = {**values["gate"], **gate}
    other = path.with_name("other.yaml")
    other.write_text(yaml.safe_dump(values))
    return other


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
    assert stored.model_copy(update={"tensors_hash": ""}) == record and gate.threshold == record.threshold


def test_an_equal_request_is_fitted_once(fitted):
    runs, records = fitted
    path = runs["adapt"]
    folder = load_config(path).folder / "gate"
    before = (folder / "gate.json").stat().st_mtime_ns
    record, now = fit_gate(load_config(path))
    assert not now and record.auc == records["adapt"].auc
    assert (folder / "gate.json").stat().st_mtime_ns == before


def test_a_fit_is_repeatable_and_a_damaged_gate_is_fitted_again(fitted):
    runs, records = fitted
    folder = load_config(runs["adapt"]).folder / "gate"
    tensors = (folder / "gate.safetensors").read_bytes()
    (folder / "gate.safetensors").write_bytes(tensors[:-4])
    record, now = fit_gate(load_config(runs["adapt"]))
    assert now and record == records["adapt"]
    assert (folder / "gate.safetensors").read_bytes() == tensors
    assert sorted(path.name for path in folder.parent.glob("*gate*")) == ["gate"]


def with_new_text_among_the_old(windows, *, is_own: bool):
    """A fifth of the new windows count as old ones, which the base wrote or did not."""
    new = windows.is_new[:, 0]
    taken = new.nonzero().flatten()[: int(new.sum()) // 5]
    is_new = windows.is_new.clone()
    is_new[taken] = False
    return replace(windows, is_new=is_new, is_own=~is_new & is_own)


def test_what_the_base_wrote_in_the_new_language_does_not_keep_the_gate_shut(runs):
    config = load_config(runs["adapt"])
    model = open_trained(newest_checkpoint(config), config.base)
    text = read_fitting_text(config, load_tokenizer(config.base).fingerprint)

    stream = BaseStream(model.loaded(torch.float32, torch.device("cpu")), 3)

    def fitted_on(*, is_own: bool):
        parts = (with_new_text_among_the_old(part, is_own=is_own) for part in (text.fit, text.unused))
        return fit_on(stream, FittingText(*parts), config.gate)

    own, given = fitted_on(is_own=True), fitted_on(is_own=False)
    assert 0.1 < own.left_out < 0.25 and given.left_out == 0
    assert (own.new > own.gate.threshold).double().mean() > 0.9
    assert (own.negatives > own.gate.threshold).double().mean() <= GATE["max_open_fraction"]
    assert (given.new > given.gate.threshold).double().mean() < 0.5


def test_own_text_that_looks_like_the_new_one_is_refused(runs):
    config = load_config(runs["adapt"])
    model = open_trained(newest_checkpoint(config), config.base)
    text = read_fitting_text(config, load_tokenizer(config.base).fingerprint)
    unused = text.unused.rows(text.unused.is_new[:, 0])
    half = torch.arange(len(unused)) < len(unused) // 2
    is_new = half.unsqueeze(1).expand_as(unused.is_new)
    alike = replace(unused, is_new=is_new, is_own=~is_new)
    with pytest.raises(DataError, match=r"of what the base wrote itself looks like the new text, expected at most 50%"):
        stream = BaseStream(model.loaded(torch.float32, torch.device("cpu")), 3)
        fit_on(stream, FittingText(text.fit, alike), config.gate)


def test_other_features_and_splices(runs, tmp_path):
    values = yaml.safe_load(runs["adapt"].read_text())
    shutil.copytree(Path(values["folder"]) / "checkpoints", tmp_path / "run" / "checkpoints")
    values |= {
        "folder": str(tmp_path / "run"),
        "gate": {**GATE, "features": "token+running_mean", "splices": True, "layer": 2, "negatives": ["english"]},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    record, _ = fit_gate(load_config(path))
    gate, _ = open_gate(tmp_path / "run" / "gate")
    assert (record.layer, len(gate.weight)) == (2, 128)
    assert record.auc > 0.99 and record.closed_max_abs_logit_difference in (0.0, None)


def test_where_it_is_undecided_the_mean_bounds_what_the_gate_costs(runs, tmp_path, caplog):
    values = yaml.safe_load(runs["adapt"].read_text())
    shutil.copytree(Path(values["folder"]) / "checkpoints", tmp_path / "run" / "checkpoints")
    # Before the first layer, without a mean, spaces and the start token are of no kind.
    plain = {**GATE, "features": "token", "layer": 0}
    records = []
    for choice in ("closed", "mean"):
        values |= {"folder": str(tmp_path / "run"), "gate": {**plain, "undecided": choice}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        config = load_config(tmp_path / "run.yaml")
        records.append(fit_gate(config)[0])
    without, record = records
    closed, mean = without.heldout["korean"], record.heldout["korean"]
    assert record.lower < record.threshold == without.threshold and without.lower is None
    assert mean.undecided_fraction > 0 == closed.undecided_fraction and mean.open_fraction == closed.open_fraction
    assert mean.gated_perplexity < closed.gated_perplexity and mean.ungated_perplexity == closed.ungated_perplexity
    assert mean.cost_of_later_tokens < min(closed.cost_of_later_tokens, math.log(2))
    assert mean.cost_of_first_tokens <= closed.cost_of_first_tokens
    assert record.closed_max_abs_logit_difference in (0.0, None)
    assert convert(latest_conversion(config, "auto", None), run_probe(config))
    assert mean.cost == pytest.approx(mean.gated_perplexity / mean.ungated_perplexity - 1)
    caplog.clear()
    for costly in (mean.model_copy(update={"gated_perplexity": 1.03 * mean.ungated_perplexity}), mean):
        cheap = costly.model_copy(update={"cost_of_first_tokens": 0.0, "cost_of_later_tokens": 0.0})
        warn_of_cost(record.model_copy(update={"heldout": {"korean": cheap}}))
    assert [line for line in caplog.messages if "korean: its perplexity is 3.0 % higher" in line]


def test_the_export_is_gated_and_verified(fitted):
    runs, _ = fitted
    config = load_config(runs["adapt"])
    conversion = latest_conversion(config, "auto", None)
    assert convert(conversion, run_probe(config))
    assert not convert(conversion, run_probe(config))
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
    assert values["rehearsal_fraction"] == 0 and values["closed_max_abs_logit_difference"] == 0.0
    assert values["gate_open_korean"] > 0.9 > 0.05 > values["gate_open_english"]


def test_a_gate_that_decides_otherwise_is_not_published(fitted, tmp_path):
    runs, _ = fitted
    config = load_config(runs["adapt"])
    conversion = latest_conversion(config, "auto", None, tmp_path / "hf")

    def disturb(model):
        (partial,) = tmp_path.iterdir()
        tensors = load_file(partial / "model.safetensors")
        save_file(tensors | {"token_gate.weight": -tensors["token_gate.weight"]}, partial / "model.safetensors")
        return run_probe(config)(model)

    with pytest.raises(ConversionError, match="the exported gate decides otherwise"):
        convert(conversion, disturb)
    assert not list(tmp_path.iterdir())


def test_in_sixteen_bits_all_tokens_are_verified_with_the_same_decisions(fitted, tmp_path):
    runs, _ = fitted
    config = load_config(runs["adapt"])
    conversion = latest_conversion(config, "auto", torch.bfloat16, tmp_path / "hf")
    assert convert(conversion, run_probe(config))
    report = json.loads((tmp_path / "hf" / "verification.json").read_text())
    assert report["kl"] < 1e-3 and all(text["tokens"] == 1024 for text in report["texts"].values())


def test_formats_without_a_gate(fitted, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    runs, _ = fitted
    config = load_config(runs["preserve"])
    with pytest.raises(ConversionError, match="--without-gate"):
        convert(latest_conversion(config, "stock", None, tmp_path / "stock"), run_probe(config))
    assert not (tmp_path / "stock").exists()
    assert convert(latest_conversion(config, "expansion", None, tmp_path / "expansion"), run_probe(config))
    assert "without the gate" in caplog.text


def test_where_the_text_changes(runs, monkeypatch, capsys):
    values = yaml.safe_load(runs["preserve"].read_text())
    values["gate"] |= {"tokens": 1000, "max_open_fraction": 0.02}
    path = runs["preserve"].with_name("switching.yaml")
    path.write_text(yaml.safe_dump(values))
    tool = TOOL.parents[1] / "benchmarks" / "code_switching.py"
    monkeypatch.setattr(sys, "argv", [str(tool), str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [
        [features, splices] for splices in ("False", "True") for features in ("token", "token+running_mean")
    ]
    assert lines[-1].startswith("old after new") and lines[-1].endswith("0.000")  # Preserve's closed tokens


def test_a_gate_of_another_checkpoint_is_not_exported(fitted, tmp_path):
    runs, _ = fitted
    values = yaml.safe_load(runs["adapt"].read_text())
    shutil.copytree(Path(values["folder"]) / "checkpoints", tmp_path / "checkpoints")
    values["folder"] = str(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    config = load_config(path)
    conversion = latest_conversion(config, "auto", None)
    assert convert(replace(conversion, format="expansion", output=tmp_path / "expansion"), run_probe(config))
    with pytest.raises(CheckpointError, match=r"not fitted yet: run the stage gate \(tools/fit_gate\.py\) first"):
        convert(conversion, run_probe(config))
    shutil.copytree(load_config(runs["preserve"]).folder / "gate", tmp_path / "gate")
    with pytest.raises(CheckpointError, match="fitted for another checkpoint"):
        convert(conversion, run_probe(config))
    assert not conversion.output.exists()


@pytest.mark.parametrize(
    ("gate", "error", "message"),
    [
        ({"layer": 4}, ConfigError, r"gate\.layer: 4 is above method\.l_fp 3"),
        ({"negatives": ["korean"]}, ConfigError, "korean is no corpus of role rehearsal or replay"),
        ({"negatives": ["latin"]}, ConfigError, "latin is no corpus"),
        ({"max_open_fraction": 0}, ConfigError, "max_open_fraction"),
        ({"featurs": "token"}, ConfigError, r"gate\.featurs: unknown key"),
    ],
)
def test_settings_that_do_not_fit(gate, error, message, runs):
    with pytest.raises(error, match=message):
        load_config(changed(runs["adapt"], **gate))


def test_a_layer_beyond_the_base_and_a_budget_that_cannot_be_measured_are_refused(runs):
    with pytest.raises(ConfigError, match=r"gate\.layer: 6 is beyond 5"):
        fit_gate(load_config(changed(runs["preserve"], layer=6)))
    with pytest.raises(DataError, match=r"gate\.max_open_fraction: 1e-05 cannot be measured"):
        fit_gate(load_config(changed(runs["preserve"], max_open_fraction=1e-5)))


def test_text_that_the_base_wrote_is_taken_before_text_that_is_replayed(runs):
    values = yaml.safe_load(runs["adapt"].read_text())
    assert parse_config(values, source="test").gate_negatives == ["english"]
    values["data"]["corpora"]["own"] = {"role": "rehearsal", "sample": {"tokens": 1000}}
    assert parse_config(values, source="test").gate_negatives == ["own"]
    values["gate"]["negatives"] = ["own", "english"]
    assert parse_config(values, source="test").gate_negatives == ["own", "english"]
    del values["data"]["corpora"]["own"], values["data"]["corpora"]["english"], values["gate"]["negatives"]
    values["data"]["replay_fraction"] = 0
    with pytest.raises(ConfigError, match="needs text that is not new"):
        parse_config(values, source="test")


def test_a_gate_closes_what_scale_adds(runs):
    values = yaml.safe_load(runs["adapt"].read_text())
    values["method"] = {"name": "fft"}
    path = runs["adapt"].with_name("fft.yaml")
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="method fft adds no such blocks"):
        load_config(path)


def test_the_command_line(fitted, monkeypatch, capsys):
    runs, _ = fitted

    def call(path: Path) -> int:
        monkeypatch.setattr(sys, "argv", [str(TOOL), str(path)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOL), run_name="__main__")
        return int(ended.value.code or 0)

    assert call(runs["adapt"]) == 0
    shown = capsys.readouterr()
    assert "korean (new)" in shown.out and "AUC" in shown.out and "is already fitted" in shown.err
    values = yaml.safe_load(runs["adapt"].read_text())
    del values["gate"]
    path = runs["adapt"].with_name("ungated.yaml")
    path.write_text(yaml.safe_dump(values))
    assert call(path) == 0
    assert "nothing to fit" in capsys.readouterr().err
