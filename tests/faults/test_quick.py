"""Some faults of the suite; `make faults` injects all of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.run_folder.metrics import METRICS, read_metrics
from tests.faults.random_kills import kill_at_borders, kill_at_random
from tests.faults.runs import BRIEF, SAVE_EVERY, Laboratory
from tests.faults.trials import kill_rank, stop_and_resume, to_the_newest, truncate
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("faults"))


@pytest.mark.slurm
def test_a_killed_rank_and_a_truncated_checkpoint_cost_some_steps(
    laboratory: Laboratory, slurm_cluster: Cluster
):
    damage = partial(to_the_newest, truncate)
    result = stop_and_resume(
        laboratory, slurm_cluster, inject=kill_rank, while_down=damage, checkpoints_before=2
    )
    assert result.sequence_equal and result.steps_lost > SAVE_EVERY


def test_a_difference_in_the_last_bit_is_found(laboratory: Laboratory, tmp_path: Path):
    reference, _ = laboratory.undisturbed(BRIEF)
    lines = read_metrics(reference.folder / METRICS)

    def found_equal() -> bool:
        (tmp_path / METRICS).write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
        return laboratory.is_undisturbed(replace(reference, folder=tmp_path))

    assert found_equal()
    lines[20]["loss"] = math.nextafter(lines[20]["loss"], 0)
    assert not found_equal()
    lines[20] = lines[21]
    assert not found_equal()


def test_a_run_survives_random_kills(laboratory: Laboratory):
    result = kill_at_random(laboratory, kills=2, seed=4)
    assert result.times == 2 and result.sequence_equal


def test_a_run_in_stages_survives_kills_at_its_borders(laboratory: Laboratory):
    result = kill_at_borders(laboratory, kills=2, seed=6)
    assert result.times == 2 and result.sequence_equal
