"""Settings of open weights under their earlier names, own_…, are read as those of today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.method import recorded_method
from pipeline.config.run import load_config
from pipeline.config.sources import RUN_FILE
from pipeline.errors import ConfigError
from pipeline.run_folder.run_file import write_run
from studies.harness.study import load_study
from tests.programs import scale_cpt
from tests.training.runs import STEPS, write_config

SCALE = {
    "name": "scale",
    "variant": "preserve",
    "expansion": {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4},
}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": (
        SCALE | {"own_rows": {"min_count": 5}, "own_gains": True, "own_first_layer": 2},
        SCALE | {"open_rows": {"min_count": 5}, "open_gains": True, "open_first_layer": 2},
    ),
    "lora": (
        {"name": "lora", "rank": 4, "own_rows": "all", "own_gains": True, "own_first_layer": 1},
        {"name": "lora", "rank": 4, "open_rows": "all", "open_gains": True, "open_first_layer": 1},
    ),
}
GROUPS: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "schedule__learning_rate_factors": {"own_rows": 2.0, "*.own_rows": 3.0},
        "schedule__weight_decay_factors": {"own_gains": 0.5},
        "stages": [{"name": "all", "steps": STEPS, "trains": ["own_rows", "*.own_rows"]}],
    },
    {
        # The last ones are patterns of the names of parameters, which stay.
        "schedule__learning_rate_factors": {"open_rows": 2.0, "*.own_rows": 3.0},
        "schedule__weight_decay_factors": {"open_gains": 0.5},
        "stages": [{"name": "all", "steps": STEPS, "trains": ["open_rows", "*.own_rows"]}],
    },
)


def written(folder: Path, name: str, **changes: Any) -> Path:
    return write_config(folder, folder, name=f"{name}.yaml", gate={}, **changes)


def extending(parent: Path, name: str, **values: Any) -> Path:
    path = parent.with_name(name)
    path.write_text(yaml.safe_dump({"extends": parent.name, **values}))
    return path


@pytest.mark.parametrize("name", METHODS)
def test_a_file_with_the_earlier_names_is_the_same_run(tmp_path, name):
    earlier, today = (
        written(tmp_path, f"{number}", method=method, **groups)
        for number, (method, groups) in enumerate(zip(METHODS[name], GROUPS, strict=True))
    )
    config = load_config(earlier)
    assert config == load_config(today)
    assert config.model_dump(exclude_unset=True) == load_config(today).model_dump(
        exclude_unset=True
    )
    assert config.schedule.learning_rate_factors == {"*.own_rows": 3.0, "open_rows": 2.0}
    assert config.trains == ["open_rows", "*.own_rows"]

    shown = scale_cpt("config", "show", earlier).stdout
    assert shown == scale_cpt("config", "show", today).stdout
    for setting in ("open_rows", "open_gains", "open_first_layer"):
        assert f"{setting}:" in shown
    assert "own_gains" not in shown and "own_first_layer" not in shown


@pytest.mark.parametrize("names", [("own", "open"), ("open", "own")], ids=" then ".join)
def test_what_comes_later_counts_under_either_name(tmp_path, names):
    first, later = names
    lora = {
        "name": "lora",
        "rank": 4,
        f"{first}_rows": {"min_count": 5},
        f"{first}_gains": True,
        f"{first}_first_layer": 1,
    }
    factors = {f"{first}_rows": 2.0, f"{first}_gains": 3.0, "output.*": 4.0}
    file = written(tmp_path, "run", method=lora, schedule__learning_rate_factors=factors)

    changes = [
        f"method.{later}_rows.min_count=7",
        f"method.{later}_gains=false",
        f"method.{later}_first_layer=0",
        f"schedule.learning_rate_factors.{later}_rows=0.5",
    ]
    config = load_config(file, changes)
    assert config.method.open_rows.min_count == 7
    assert (config.method.open_gains, config.method.open_first_layer) == (False, 0)
    found = config.schedule.learning_rate_factors
    assert found == {"open_rows": 0.5, "open_gains": 3.0, "output.*": 4.0}
    # In the order of the file, which is sorted: of factors that match a parameter the last one counts.
    assert list(found) == [name.replace("own_", "open_") for name in sorted(factors)]
    # Of three layers the last one counts, whatever the two below it say.
    assert load_config(file, [*changes, f"method.{first}_gains=true"]).method.open_gains

    assert load_config(file, [f"method.{later}_rows=null"]).method.open_rows is None
    assert load_config(file, [f"method.{later}_rows=all"]).method.open_rows == "all"

    method = {f"{later}_rows": None, f"{later}_first_layer": 2}
    child = extending(file, "child.yaml", method=method)
    assert load_config(child).method.open_rows is None
    assert load_config(child).method.open_first_layer == 2
    assert load_config(child).method.open_gains
    again = extending(child, "again.yaml", method={f"{first}_rows": "all"})
    assert load_config(again).method.open_rows == "all"
    other = {"name": "lora", "rank": 8}
    assert load_config(extending(file, "other.yaml", method=other)).method.rank == 8


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"method__own_rows": "all", "method__open_rows": {"min_count": 5}}, ("rows", "method")),
        ({"method__own_gains": True, "method__open_gains": False}, ("gains", "method")),
        (
            {"schedule__learning_rate_factors": {"open_rows": 1.0, "own_rows": 2.0}},
            ("rows", "schedule.learning_rate_factors"),
        ),
    ],
)
def test_both_names_with_different_values_are_refused(tmp_path, changes, names):
    name, section = names
    message = (
        rf"{section}: own_{name} is the earlier name of open_{name}, and the two have different "
        rf"values; remove own_{name}"
    )
    lora = {"name": "lora", "rank": 4}
    with pytest.raises(ConfigError, match=message) as fault:
        load_config(written(tmp_path, "run", method=lora, **changes))
    assert "\n" not in str(fault.value)


def test_both_names_with_one_value_are_one_setting(tmp_path):
    lora = {"name": "lora", "rank": 4, "own_gains": True, "open_gains": True}
    file = written(tmp_path, "run", method=lora)
    assert load_config(file).method.open_gains
    assert not load_config(
        file, ["method.open_gains=false", "method.own_gains=false"]
    ).method.open_gains


def test_a_method_without_open_weights_has_neither_name(tmp_path):
    freeze = {"name": "freeze", "frozen_layers": 1}
    for name in ("own_gains", "open_gains"):
        file = written(tmp_path, "run", method=freeze | {name: True})
        # No similar key is proposed: it is one of another method.
        with pytest.raises(ConfigError, match=rf"method\.{name}: unknown key;"):
            load_config(file)
    recorded = freeze | {"own_gains": True}
    assert recorded_method(recorded) == recorded
    of_a_package = {"name": "of a package that is not installed", "own_rows": 3}
    assert recorded_method(of_a_package) == of_a_package


def test_a_runs_folder_of_an_earlier_version_is_read_and_written_anew(tmp_path):
    method, _ = METHODS["scale"]
    config = load_config(written(tmp_path / "run", "first", method=method))
    write_run(config)
    file = tmp_path / "run" / RUN_FILE
    today = file.read_text()
    assert "open_rows:" in today and "own_" not in today
    file.write_text(today.replace("open_", "own_"))

    assert load_config(tmp_path / "run") == config
    changed = load_config(tmp_path / "run", ["method.open_rows=null"])
    assert changed.method.open_rows is None and changed.method.open_gains
    assert any("open_rows" in line for line in write_run(config))
    assert file.read_text() == today


def test_a_study_with_the_earlier_names_is_the_same_study(tmp_path):
    path = Path("studies/configs/frontier.yaml")
    earlier = tmp_path / path.name
    text = path.read_text()
    earlier.write_text(text.replace("open_rows", "own_rows").replace("open_gains", "own_gains"))
    assert earlier.read_text() != text
    studies = [load_study(file, tmp_path) for file in (path, earlier)]
    assert studies[0].methods == studies[1].methods
