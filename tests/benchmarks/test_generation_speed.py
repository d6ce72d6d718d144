"""The benchmark of generation runs at its smallest size, and its models are what they stand for."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import generation_speed

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_model_is_measured(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "rows.json"
    sizes = ["--layers", "1", "--vocab-size", "64", "--new-tokens", "3", "--turns", "1"]
    monkeypatch.setattr("sys.argv", ["generation_speed.py", *sizes, "--json", str(output)])
    generation_speed.main()
    rows = {row["model"]: row for row in json.loads(output.read_text())["rows"]}
    names = [f"1/{share}, {kind}" for share in (8, 2) for kind in ("stock", "scale", "gate shut", "gate open")]
    several = ["4 x 1/8, gate shut", "4 x 1/8, gate open"]
    assert list(rows) == ["base", *several, *names] and rows["base"]["ratio_to_base"] == 1
    assert all(row["tokens_per_second"] * row["seconds"] == pytest.approx(3) for row in rows.values())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


def test_the_base_and_several_expansions_are_loaded_from_files(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.json"
    sizes = ["--loading", "--layers", "2", "--vocab-size", "64", "--turns", "1"]
    monkeypatch.setattr("sys.argv", ["generation_speed.py", *sizes, "--json", str(output)])
    generation_speed.main()
    base, several = json.loads(output.read_text())["rows"]
    assert (base["model"], several["model"]) == ("base", "4 x 1/8") and several["seconds"] > 0
    assert 1.3 < several["gib_of_weights"] / base["gib_of_weights"] < 2 and several["gib_to_base"] > 1
    assert capsys.readouterr().out.count("\n") == 4


def test_the_scale_export_has_the_stock_exports_blocks():
    made = generation_speed.models(1024, 1, 64, torch.float32)
    count = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in made.items()}
    assert count["base"] < count["1/2, stock"] == count["1/2, scale"] < count["1/2, gate shut"]


def test_other_widths_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["generation_speed.py", "--hidden-size", "1000"])
    with pytest.raises(SystemExit):
        generation_speed.main()
    assert "expected a multiple of 1024, found 1000" in capsys.readouterr().err
