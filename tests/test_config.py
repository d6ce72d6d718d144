"""Mistakes in a configuration's YAML that a lenient reader would pass over; files that extend
others; --set."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config.reading import read_yaml
from pipeline.config.run import load_config
from pipeline.config.sources import read_settings
from pipeline.errors import ConfigError
from tests.training.runs import write_config


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"init_expansion": "folder"}, "init_expansion: method fft trains no expansion"),
        (
            {"forgetting": {"max_kl_from_base": 0.1}},
            "forgetting.max_kl_from_base: method fft keeps no base",
        ),
        ({"forgetting": {"max_increase": 0.1}}, "forgetting: needs a corpus of role replay"),
        ({"data__replay_fraction": 1.0}, "leave no sample of the role new"),
    ],
)
def test_a_setting_that_would_do_nothing_is_a_fault(changes, fault, tmp_path):
    corpora = {
        "korean": {"input": ["ko.jsonl"]},
        "english": {"input": ["en.jsonl"], "role": "replay"},
    }
    with pytest.raises(ConfigError, match=fault):
        load_config(
            write_config(
                tmp_path, tmp_path, method={"name": "fft"}, data__corpora=corpora, **changes
            )
        )


ADAPT_OWN = {
    "name": "scale",
    "variant": "adapt",
    "expansion": {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4},
    "l_fp": 3,
    "open_rows": {"min_count": 5},
}


@pytest.mark.parametrize(
    ("method", "changes", "fault"),
    [
        ({}, {"gate": None}, "method.open_rows, open_gains, low_rank: .*add a section gate"),
        ({"open_rows": None, "low_rank": 4}, {"gate": None}, "add a section gate"),
        ({"variant": "route"}, {}, "do not go with variant route"),
        (
            {"variant": "preserve", "l_fp": None},
            {},
            "open_first_layer: expected with variant preserve",
        ),
        ({"open_first_layer": 3}, {}, "open_first_layer does not apply to variant adapt"),
        (
            {"open_rows": None, "open_first_layer": 3},
            {},
            "open_first_layer belongs to open_rows, open_gains or low_rank",
        ),
        ({"open_rows": "some"}, {}, "open_rows"),
        ({"open_rows": {"min_count": 0}}, {}, "min_count"),
    ],
)
def test_weights_of_open_tokens_own_that_do_not_fit_are_a_fault(method, changes, fault, tmp_path):
    settings = {"method": ADAPT_OWN | method, "gate": {}, **changes}
    with pytest.raises(ConfigError, match=fault) as error:
        load_config(write_config(tmp_path, tmp_path, **settings))
    assert "\n" not in str(error.value)
    load_config(write_config(tmp_path, tmp_path, method=ADAPT_OWN, gate={}))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"gate": {"layer": 0}}, "gate.layer: expected at least 1 with method fft, found 0"),
        (
            {"vocabulary": {"folder": "words"}},
            "gate: method fft has none with an extended vocabulary",
        ),
        ({"gate": {"negatives": ["korean"]}}, "gate.negatives: korean is no corpus of role"),
    ],
)
def test_a_gate_of_full_fine_tuning_that_does_not_fit_is_a_fault(changes, fault, tmp_path):
    settings = {"method": {"name": "fft"}, "gate": {"layer": 3}}
    load_config(write_config(tmp_path, tmp_path, **settings))
    with pytest.raises(ConfigError, match=fault) as error:
        load_config(write_config(tmp_path, tmp_path, **{**settings, **changes}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "changes", "fault"),
    [
        (
            {"open_rows": "all"},
            {"gate": None},
            "method.open_rows, open_gains: only tokens .*add a section gate",
        ),
        ({"open_gains": True}, {"gate": None}, "add a section gate"),
        ({"open_rows": {"min_count": 0}}, {}, "min_count"),
        ({}, {"init_expansion": "expansion"}, "init_expansion: method lora trains no expansion"),
        ({"low_rank": 4}, {}, "method.low_rank: unknown key"),
    ],
)
def test_what_does_not_fit_lora_with_a_gate_is_a_fault(method, changes, fault, tmp_path):
    lora = {"name": "lora", "rank": 4}
    settings = {"method": lora | method, "gate": {}, **changes}
    with pytest.raises(ConfigError, match=fault) as error:
        load_config(write_config(tmp_path, tmp_path, **settings))
    assert "\n" not in str(error.value)
    for gate in ({}, None):
        load_config(write_config(tmp_path, tmp_path, method=lora, gate=gate))


def test_a_key_that_is_given_twice_is_a_fault_but_not_one_that_was_merged(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}
    path.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="the key seed is given twice in one section"):
        read_yaml(path)


def test_what_is_no_yaml_ends_in_one_line(tmp_path):
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\n")
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([1]))
    for name in ("deep.yaml", "bytes.yaml", "list.yaml", "none.yaml", "."):
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("data.chat_date=2025-02-30", "expected a value in YAML: day is out of range for month"),
        ("watchdog.slow_after_s=.inf", "watchdog.slow_after_s: Input should be less than or equal"),
        ("data.corpora.korean.epochs=.inf", "epochs: expected a finite number, found inf"),
        ("watchdog.hung_after_s=1e12", "watchdog.hung_after_s: Input should be less than or equal"),
        ("seed=99999999999999999999", "seed: Input should be less than"),
    ],
)
def test_numbers_and_dates_that_nothing_can_count_with_are_faults(tmp_path, change, fault):
    with pytest.raises(ConfigError) as error:
        load_config(write_config(tmp_path, tmp_path), [change])
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_a_folder_in_the_home_is_not_one_named_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load_config(write_config(tmp_path, tmp_path), ["folder=~/runs/mine"])
    assert config.folder == tmp_path / "home" / "runs" / "mine"


def extending(path: Path, parent: str, **values: object) -> Path:
    path.write_text(yaml.safe_dump({"extends": parent, **values}))
    return path


def test_a_file_extends_others_key_by_key(tmp_path):
    base = write_config(tmp_path, tmp_path, name="base.yaml", gate={}, stability={"window": 7})
    inner = tmp_path / "inner"
    inner.mkdir()
    middle = {"schedule": {"steps": 9}, "gate": None, "stability": {"loss_increase": None}}
    extending(inner / "middle.yaml", "../base.yaml", **middle)
    data = {"corpora": {"english": None}, "replay_fraction": 0}
    top = extending(inner / "top.yaml", "middle.yaml", schedule={"learning_rate": 1.0}, data=data)
    top.write_text(
        top.read_text().replace("learning_rate: 1.0", "learning_rate: 1e-3")
    )  # YAML reads a text
    first, last = load_config(base), load_config(top)
    assert last.schedule == first.schedule.model_copy(update={"steps": 9, "learning_rate": 1e-3})
    assert (last.stability.window, last.stability.loss_increase) == (
        7,
        None,
    )  # null is a value of this setting
    assert (first.gate is not None, last.gate) == (True, None)
    assert list(last.data.corpora) == ["korean"] and last.method == first.method


def test_a_section_of_another_name_replaces_the_extended_one(tmp_path):
    write_config(tmp_path, tmp_path, name="base.yaml")
    fft = extending(tmp_path / "fft.yaml", "base.yaml", method={"name": "fft"})
    assert read_settings(fft)["method"] == {"name": "fft"}
    route = extending(
        tmp_path / "route.yaml", "base.yaml", method={"name": "scale", "variant": "route"}
    )
    assert read_settings(route)["method"]["l_fp"] == 3


@pytest.mark.parametrize(
    ("name", "parent", "fault"),
    [
        ("a.yaml", "b.yaml", r"b\.yaml: extends: .*a\.yaml: this file is extended already"),
        ("self.yaml", "self.yaml", "this file is extended already"),
        (
            "missing.yaml",
            "none.yaml",
            r"missing\.yaml: extends: .*none\.yaml: cannot read this configuration",
        ),
        ("list.yaml", ["a.yaml"], "expected the path of one YAML file, found \\['a.yaml'\\]"),
    ],
)
def test_files_that_cannot_be_extended_are_named(tmp_path, name, parent, fault):
    extending(tmp_path / "b.yaml", "a.yaml")
    extending(tmp_path / name, parent)
    with pytest.raises(ConfigError, match=fault) as error:
        load_config(tmp_path / name)
    assert "\n" not in str(error.value)


def test_settings_are_changed_by_their_dotted_keys_and_have_their_types(tmp_path):
    changes = [
        "schedule.steps=1_000",
        "schedule.learning_rate=2e-4",
        "schedule.betas=[0.8, 0.9]",
        "name=20",  # a text
        "base='no'",
        "compile=true",
        "data.corpora.korean.input=a.jsonl",
        "data.corpora.korean.heldout_input=[b.jsonl, 'c, d.jsonl']",
        "data.corpora.english=null",
        "data.replay_fraction=0",
        "method.variant=route",
        "method.expansion.hidden_size=32",
        "init_expansion=null",
        "stability.loss_increase=null",
        "schedule.steps=11",  # the last one holds
    ]
    config = load_config(write_config(tmp_path, tmp_path), changes)
    assert (config.schedule.steps, config.schedule.learning_rate, config.schedule.betas) == (
        11,
        2e-4,
        (0.8, 0.9),
    )
    assert (config.name, config.base, config.compile, config.init_expansion) == (
        "20",
        Path("no"),
        True,
        None,
    )
    assert config.stability.loss_increase is None
    assert list(config.data.corpora) == ["korean"]
    assert config.data.corpora["korean"].input == ["a.jsonl"]
    assert config.data.corpora["korean"].heldout_input == ["b.jsonl", "c, d.jsonl"]
    assert (config.method.variant, config.method.expansion.hidden_size, config.method.l_fp) == (
        "route",
        32,
        3,
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            "schedule.stps=20",
            r"--set schedule\.stps=20: .*: schedule\.stps: unknown key \(did you mean steps\?\)",
        ),
        ("shedule.steps=20", r"shedule: unknown key \(did you mean schedule\?\)"),
        (
            "method.expansion.hiden_size=8",
            r"method\.expansion\.hiden_size: unknown key \(did you mean hidden_size\?\)",
        ),
        (
            "data.corpora.korean.inputs=[]",
            r"data\.corpora\.korean\.inputs: unknown key \(did you mean input\?\)",
        ),
        ("qqqq=3", "qqqq: unknown key;"),
        ("method.rank=8", "rank: unknown key"),  # of LoRA, which this run is not
        ("schedule.steps", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("schedule.steps=many", "schedule.steps: expected an integer, found 'many'"),
        ("schedule.steps=1.5", "schedule.steps: expected an integer, found 1.5"),
        ("schedule.steps=[1]", "schedule.steps: expected an integer, found list"),
        ("schedule.learning_rate=fast", "learning_rate: expected a number, found 'fast'"),
        ("schedule=3", "schedule: expected a mapping of settings, found 3"),
        ("gate.splices=perhaps", "gate.splices: expected true or false, found 'perhaps'"),
        ("gate.negatives=3", "gate.negatives: expected a list, found 3"),
        ("schedule.betas=[0.9", "expected a value in YAML"),
    ],
)
def test_a_change_that_fits_no_setting_is_refused_by_its_name(tmp_path, change, fault):
    with pytest.raises(ConfigError, match=fault) as error:
        load_config(write_config(tmp_path, tmp_path), [change])
    assert "\n" not in str(error.value)
