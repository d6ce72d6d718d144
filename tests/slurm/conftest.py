"""Fixtures of the Slurm tests: jobs that mostly wait run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

Scenario = Callable[[Cluster, Path], None]
"""Submits jobs of its own from a folder of its own, and asserts what becomes of them."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The module's `SCENARIOS` by name, all started at once. `result()` waits for one and raises what it raised.

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
        yield {
            name: pool.submit(scenario, slurm_cluster, tmp_path_factory.mktemp("job"))
            for name, scenario in scenarios.items()
            if name in chosen
        }
