"""What several rooms' tests share."""

from __future__ import annotations

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
from tests.disks import SmallDisk
from tests.slurm.cluster import Cluster, guarded_cluster
from tests.slurm.daemons import why_not

_NO_SLURM = "no Slurm: "

# The same examples in every run, however slow the machine: who changes one room shall not be refused for what chance
# finds in another. `pytest --hypothesis-profile=default` draws new ones.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Callable[[str], BaseFolder]:
    """A base model by its name in `bases.CONFIGS`, or "stories260K", written once a session."""
    folder: Path = tmp_path_factory.mktemp("bases")

    @cache
    def opened(name: str) -> BaseFolder:
        return open_base(STORIES if name == "stories260K" else save_base(name, folder / name.replace(" ", "_")))

    return opened


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """The folder of the corpora that small training runs read, made once a session."""
    from tests.training.runs import make_tokens

    return make_tokens(tmp_path_factory.mktemp("tokens"))


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


@pytest.fixture
def one_thread():
    """Small tensors only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skips where there is none; the summary repeats the reason where nobody overlooks it."""
    if reason := why_not():
        pytest.skip(f"{_NO_SLURM}{reason}")


@pytest.fixture(scope="session")
def slurm_cluster(slurm_installed: None) -> Iterator[Cluster]:
    """One cluster for the whole session of this worker, started when the first test asks for it."""
    with guarded_cluster() as cluster:
        yield cluster


def pytest_configure() -> None:
    # A shell without job control starts what it puts in the background with SIGINT ignored, and so does nohup; programs
    # that tests start would inherit that, and never hear the Ctrl-C that they are sent.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # From the reports, which reach this process from every worker.
    reasons = {str(report.longrepr).partition(_NO_SLURM)[2] for report in terminalreporter.getreports("skipped")}
    for reason in reasons - {""}:
        terminalreporter.section("CLUSTER TESTS SKIPPED", red=True, bold=True)
        terminalreporter.line(f"Nothing was tried on a real Slurm. {reason.rstrip(chr(39) + ')')}.")
