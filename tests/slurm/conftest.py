"""Fixtures of the Slurm tests: jobs that mostly wait run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, ClusterError

Scenario = Callable[[Cluster, Path], None]
"""Submits jobs of its own from a folder of its own, and asserts what becomes of them."""


BETWEEN_STARTS_S = 0.5
"""Jobs that start in the same instant make Slurm 22.05's slurmd crash now and then."""
ATTEMPTS = 3


def run_scenario(scenario: Scenario, cluster: Cluster, new_folder: Callable[[], Path]) -> None:
    """Runs a scenario, and again where a slurmd crashed meanwhile: what it saw says nothing about our scripts."""
    for attempt in range(1, ATTEMPTS + 1):
        crashes = cluster.crashes
        try:
            scenario(cluster, new_folder())
            return
        except (AssertionError, ClusterError):
            if cluster.crashes == crashes or attempt == ATTEMPTS:
                raise


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The module's `SCENARIOS` by name, which run at the same time. `result()` waits for one and raises what it raised.

    Only those whose tests were selected are started.
    """
    scenarios: dict[str, Scenario] = request.module.SCENARIOS
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {
        test.callspec.params.get("name")
        for test in tests
        if test.module is request.module and hasattr(test, "callspec")
    }
    with ThreadPoolExecutor(len(scenarios)) as pool:
        running = {}
        for name in filter(chosen.__contains__, scenarios):
            new_folder = partial(tmp_path_factory.mktemp, "job")
            running[name] = pool.submit(run_scenario, scenarios[name], slurm_cluster, new_folder)
            time.sleep(BETWEEN_STARTS_S)
        yield running
