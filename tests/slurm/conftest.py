"""The cluster of the tests in this folder: one for the whole session, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, guarded_cluster
from tests.slurm.daemons import why_not

_REASON = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def slurm_installed(request: pytest.FixtureRequest) -> None:
    """Skips, and has the reason repeated where nobody overlooks it."""
    if reason := why_not():
        request.config.stash[_REASON] = reason
        pytest.skip(f"no Slurm: {reason}")


@pytest.fixture(scope="session")
def slurm_cluster(slurm_installed: None) -> Iterator[Cluster]:
    with guarded_cluster() as cluster:
        yield cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reason := config.stash.get(_REASON, None):
        terminalreporter.section("CLUSTER TESTS SKIPPED", red=True, bold=True)
        terminalreporter.line(f"Nothing was tried on a real Slurm. {reason}.")
