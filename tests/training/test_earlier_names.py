"""A run of an earlier version, whose records have own_… for open_…, trains on to the bit."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.checkpoint.manifest import load_manifest
from pipeline.checkpoint.trained_model import describe_checkpoint
from pipeline.config.reading import STILL_READ_KEYS
from pipeline.config.run import load_config
from pipeline.errors import CheckpointError
from pipeline.expansion_folder import open_expansion
from tests.distributed import run_ranks
from tests.programs import scale_cpt
from tests.training.journeys import METHODS
from tests.training.runs import in_turn, losses, make_run, metrics, train

CHECKPOINT = "step_00000001"
OPEN = {"open_rows": {"min_count": 2}, "open_gains": True}
STEPS = 3
SETTINGS: dict[str, Any] = {
    "zero": 1,
    "gate": {},
    "schedule__steps": STEPS,
    "schedule__learning_rate_factors": {"open_rows": 2.0},
    "stages": [
        {"name": "some", "steps": 2, "trains": ["open_rows", "open_gains"]},
        {"name": "all", "steps": STEPS - 2},
    ],
    "checkpoints": {"every_steps": 1, "keep_last": STEPS},
}
RUNS: dict[str, dict[str, Any]] = {
    "adapt": METHODS["adapt"] | OPEN | {"low_rank": 2},
    "lora": METHODS["lora"] | OPEN | {"open_first_layer": 1},
}
EARLIER = {today: earlier for earlier, today in STILL_READ_KEYS.items()}


def with_earlier_names(value: Any) -> Any:
    """Settings as an earlier version wrote them."""
    if isinstance(value, dict):
        return {EARLIER.get(key, key): with_earlier_names(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [
            EARLIER.get(entry, entry) if isinstance(entry, str) else with_earlier_names(entry)
            for entry in value
        ]
    return value


def make_earlier(manifest: Path, *sections: str) -> None:
    """Gives sections of a manifest their earlier names; they had no checksum yet."""
    record = json.loads(manifest.read_text())
    del record["checksum"]
    settings = record.get("run", record)
    for section in sections:
        before = settings[section]
        settings[section] = with_earlier_names(before)
        assert settings[section] != before
    manifest.write_text(json.dumps(record))


def cut_back(run: Path, to: Path) -> Path:
    """A copy of a finished run as an earlier version left it after a step."""
    shutil.copytree(run, to)
    for later in range(2, STEPS + 1):
        shutil.rmtree(to / "checkpoints" / f"step_{later:08d}")
    (to / "checkpoints" / "latest").write_text(f"{CHECKPOINT}\n")
    (to / "training.json").unlink()
    make_earlier(to / "checkpoints" / CHECKPOINT / "manifest.json", "method", "stages")
    make_earlier(to / "initial_expansion" / "manifest.json", "method")
    return to


@pytest.fixture(scope="module")
def finished(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of finished runs."""
    folder = tmp_path_factory.mktemp("finished")
    files = {
        name: make_run(folder / name, tokens, method=method, **SETTINGS)
        for name, method in RUNS.items()
    }
    assert run_ranks(in_turn, 1, [partial(train, file) for file in files.values()]) == [[0, 0]]
    return files


def test_it_resumes_to_the_bit_under_either_name(finished, tmp_path):
    jobs = []
    for name, today in finished.items():
        earlier = today.with_name("earlier.yaml")
        earlier.write_text(yaml.safe_dump(with_earlier_names(yaml.safe_load(today.read_text()))))
        assert "own_rows" in earlier.read_text()
        for file in (today, earlier):
            folder = cut_back(today.parent, tmp_path / f"{name} {file.stem}")
            jobs.append(partial(train, file, changes=[f"folder={folder}"]))
    assert run_ranks(in_turn, 1, jobs) == [[0] * len(jobs)]
    for name, today in finished.items():
        for file in ("run", "earlier"):
            resumed = tmp_path / f"{name} {file}"
            assert metrics(resumed) == metrics(today.parent)
            assert len(losses(resumed)) == STEPS
            for rank in (today.parent / "checkpoints" / f"step_{STEPS:08d}").glob("rank_*"):
                again = resumed / "checkpoints" / f"step_{STEPS:08d}" / rank.name
                assert again.read_bytes() == rank.read_bytes()


@pytest.mark.parametrize("name", RUNS)
def test_its_records_are_told_by_the_names_of_today(finished, tmp_path, name):
    folder = cut_back(finished[name].parent, tmp_path / "run")
    for told in (
        load_manifest(folder / "checkpoints" / CHECKPOINT).run.method,
        open_expansion(folder / "initial_expansion").manifest.method,
        describe_checkpoint(folder / "checkpoints" / CHECKPOINT)["method"],
    ):
        assert told["open_rows"] == {"min_count": 2} and told["open_gains"]
        assert not set(told) & set(STILL_READ_KEYS)


@pytest.mark.parametrize("name", RUNS)
def test_its_expansion_is_the_runs_and_another_one_is_refused_by_the_names_of_today(
    finished, tmp_path, name
):
    folder = cut_back(finished[name].parent, tmp_path / "run")
    again = scale_cpt("upscale", finished[name], "--set", f"folder={folder}")
    # Without reading the weights, as of a run whose names are today's.
    assert again.returncode == 0 and "and training has begun" in again.stderr

    expansion = open_expansion(folder / "initial_expansion")
    hashes, seed = expansion.manifest.base_hashes, expansion.manifest.seed
    config = load_config(finished[name])
    expansion.check_origin(hashes, config.method.initial_expansion_settings, seed)
    other = load_config(finished[name], ["method.open_rows.min_count=3"]).method
    with pytest.raises(
        CheckpointError, match=r"another method\.open_rows\.min_count than .*expected 2, found 3"
    ):
        expansion.check_origin(hashes, other.initial_expansion_settings, seed)
