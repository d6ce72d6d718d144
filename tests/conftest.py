"""Fixtures of several rooms, and the order of the tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base
from tests.bases import STORIES, save_base
from tests.conversion.exports import Exports, Models
from tests.disks import SmallDisk
from tests.slurm.cluster import Cluster, guarded_cluster, unsupported_reason

_NO_SLURM = "no Slurm: "
_SKIPPED = pytest.StashKey[list[str]]()
FIRST = ("training/test_journeys.py", "slurm/test_pipeline.py", "slurm/test_jobs.py")
"""The longest files, with which both tiers start: the workers then end together."""

# The same examples in every run, so that a change cannot fail on an example that chance drew for
# other code. `pytest --hypothesis-profile=default` draws new ones.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Callable[[str], BaseFolder]:
    """A base model by its name in `bases.CONFIGS`, or "stories260K", written once a session."""
    folder: Path = tmp_path_factory.mktemp("bases")

    @cache
    def opened(name: str) -> BaseFolder:
        return open_base(
            STORIES if name == "stories260K" else save_base(name, folder / name.replace(" ", "_"))
        )

    return opened


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """The folder of the corpora that small training runs read, made once a session."""
    from tests.training.runs import make_tokens

    return make_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session")
def models(base, tmp_path_factory) -> Models:
    """Models trained a few steps, by the names of their base and of their method in
    `exports.METHODS`."""
    return Models(base, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def exports(models, tmp_path_factory) -> Exports:
    """Their exports in the scale format."""
    return Exports(models, tmp_path_factory.mktemp("exports"))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[..., SmallDisk]]:
    """Makes disks of some MiB."""
    made: list[SmallDisk] = []

    def make(mib: int) -> SmallDisk:
        made.append(SmallDisk(tmp_path / f"disk{len(made)}", mib))
        return made[-1]

    yield make
    for disk in made:
        disk.remove()


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Removes handlers that a test's command line or library adds: their stream is the test's
    captured stderr."""
    loggers = [logging.getLogger(), logging.getLogger("pipeline")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    """One cluster for the whole session of this worker, started when the first test asks for it.

    Skips where Slurm cannot run; the reason is repeated at the end of the summary.
    """
    if reason := unsupported_reason():
        pytest.skip(f"{_NO_SLURM}{reason}")
    with guarded_cluster() as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests: the longest files first, then those of the full tier, then the quick ones."""
    tests = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        name = item.path.relative_to(tests).as_posix()
        if name in FIRST:
            return FIRST.index(name)
        if item.get_closest_marker("full"):
            return len(FIRST)
        return len(FIRST) + 1

    items.sort(key=turn)


def pytest_configure() -> None:
    # Tests' tensors are small, and threads of several workers wait for one another.
    torch.set_num_threads(1)
    # A shell without job control, and nohup, start background processes with SIGINT ignored.
    # Programs that tests start would inherit that and ignore the SIGINT that a test sends.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # From the reports, which reach this process from every worker.
    reasons = {
        str(report.longrepr).partition(_NO_SLURM)[2]
        for report in terminalreporter.getreports("skipped")
    }
    terminalreporter.config.stash[_SKIPPED] = sorted(
        reason.rstrip("')") for reason in reasons - {""}
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    # The last line of the output.
    for reason in config.stash.get(_SKIPPED, []):
        config.get_terminal_writer().line(
            f"CLUSTER TESTS SKIPPED, nothing was tried on a real Slurm: {reason}"
        )
