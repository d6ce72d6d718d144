"""The list of checks of what a user brings, each with the stages that begin with it.

A dry run runs every check that needs no allocation, and lists all faults. A stage runs its own, and raises the first.
Those that need the ranks run in the preflight (`allocation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pipeline.checks.inputs import (
    Inputs,
    Samples,
    check_context,
    check_imagined_model,
    check_resume,
    check_trackers,
    encoded_prompts,
    open_layout,
    open_samples,
)
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data import preprocess
from pipeline.data.corpora import check_heldout, corpus_jobs, is_tokenized, named_inputs
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import input_files, is_here
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import UserError
from pipeline.methods import training_method
from pipeline.methods.scale import check_named_expansion, made_expansion
from pipeline.methods.vocabulary import check_vocabulary, extended_spec, with_new_rows
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout
from pipeline.rehearsal.corpus import check_folder as check_sampled_folder
from pipeline.rehearsal.corpus import check_sampling, plan_of, sampling_jobs
from pipeline.run_folder.lock import check_folder

Stage = Literal["tokenize", "train"]
_T = TypeVar("_T")


class Opened:
    """What a run's configuration names, opened when a check first asks for it; its fault is raised each time.

    `base_config` is a config.json to use where the base's folder is missing. `stage` is the stage that begins; None in
    a dry run.
    """

    def __init__(
        self, config: RunConfig, world_size: int, base_config: Path | None = None, stage: Stage | None = None
    ) -> None:
        self.config, self.stage = config, stage
        self._world_size, self._base_config = world_size, base_config
        self._found: dict[str, Any] = {}

    def _once(self, name: str, work: Callable[[], _T]) -> _T:
        if name not in self._found:
            try:
                self._found[name] = work()
            except UserError as error:
                self._found[name] = error
        if isinstance(found := self._found[name], UserError):
            raise found
        return found

    def get(self, name: str) -> Any:  # noqa: ANN401
        """One of the properties; None where it cannot be opened."""
        try:
            return getattr(self, name)
        except UserError:
            return None

    @property
    def layout(self) -> tuple[Layout, DeepSpeedConfig]:
        """The layout of the ranks, and DeepSpeed's configuration."""
        return self._once("layout", lambda: open_layout(self.config, self._world_size))

    @property
    def base(self) -> BaseFolder:
        """The base, with the rows of the run's own pieces."""
        return self._once("base", lambda: with_new_rows(self.config, open_base(self.config.base)))

    @property
    def spec(self) -> DecoderSpec:
        """The base's architecture."""
        if self._base_config is None or self.get("base") is not None:
            return self.base.spec
        file = self._base_config
        return self._once("spec", lambda: extended_spec(self.config, read_spec(file)))

    @property
    def model(self) -> DecoderSpec:
        """The architecture of a base on which the run's model can be built."""
        spec = self.spec
        self._once("model", lambda: check_imagined_model(self.config, spec))
        return spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        if not self.config.tokenizer.exists():
            self.base  # noqa: B018  # its fault is that of the tokenizer, which is missing with it
        return self._once("tokenizer", lambda: load_tokenizer(self.config.tokenizer))

    @property
    def samples(self) -> Samples:
        """The token corpora; with a tokenizer that cannot be opened, of any."""
        tokenizer = self.get("tokenizer")
        fingerprint = None if tokenizer is None else tokenizer.fingerprint
        return self._once("samples", lambda: open_samples(self.config, fingerprint))

    @property
    def finished(self) -> bool:
        """Whether an earlier attempt finished the run."""
        return self._once("finished", lambda: check_resume(self.config, self.base, self.tokenizer.fingerprint))


def _expansion(run: Opened) -> None:
    if isinstance(run.config.method, ScaleMethod):
        check_named_expansion(run.config.upscaled)
    # Every restart of a run passes the stage tokenize, and a base may have hundreds of GB, which this reads.
    if run.stage is None or not is_tokenized(run.config.data):
        made_expansion(run.config, run.base)


def _sampling(run: Opened) -> None:
    for corpus in run.config.data.corpora.values():
        if corpus.sample is not None:
            # A sequence length beyond the context is a fault of its own.
            longest = min(run.config.data.sequence_length, run.spec.longest_text)
            check_sampling(corpus.sample, corpus.sample.max_tokens or longest, run.tokenizer, run.spec)


def _corpora(run: Opened) -> object:
    if run.stage == "train" or is_tokenized(run.config.data):
        return run.samples
    if run.config.data.folder.resolve() != run.config.folder.resolve():
        check_folder(run.config.data.folder)
    return None


def _texts(run: Opened) -> Iterator[Callable[[], object]]:
    if (tokenizer := run.get("tokenizer")) is None:
        for files in named_inputs(run.config.data):
            yield partial(_if_here, files, partial(input_files, files))
        return
    for job in corpus_jobs(run.config.data, run.config.tokenizer):
        yield partial(_if_here, job.inputs, partial(preprocess.check_folder, job, tokenizer))


def _if_here(files: Sequence[str], check: Callable[[], object]) -> None:
    if is_here(files):
        check()


def _sampled(run: Opened) -> Iterator[Callable[[], object]]:
    if run.get("base") is not None and run.get("tokenizer") is not None:
        for job in sampling_jobs(run.config):
            yield lambda job=job: check_sampled_folder(job, plan_of(job))  # type: ignore[misc]


def _resume(run: Opened) -> object:
    if run.stage == "train" or (run.config.folder.is_dir() and run.get("model") and run.get("base")):
        return run.finished
    return None


class Check(NamedTuple):
    """A check, and the stages that begin with it.

    `run` raises a UserError. Where several faults may be found it yields the checks that it consists of.
    """

    run: Callable[[Opened], object]
    stages: tuple[Stage, ...]


_BOTH: tuple[Stage, ...] = ("tokenize", "train")
CHECKS = (
    Check(lambda run: run.layout, _BOTH),
    Check(lambda run: check_trackers(run.config), _BOTH),
    Check(lambda run: check_heldout(run.config), ("tokenize",)),
    Check(lambda run: run.base, _BOTH),
    Check(lambda run: run.base.file_of, ("tokenize",)),  # the header of every weight file
    Check(lambda run: check_context(run.config, run.spec), _BOTH),
    Check(lambda run: run.model, ("tokenize",)),  # training builds it
    Check(lambda run: check_vocabulary(run.tokenizer, run.spec), _BOTH),
    Check(lambda run: encoded_prompts(run.config, run.tokenizer, run.spec), _BOTH),
    Check(_sampling, ("tokenize",)),
    Check(_corpora, ("train",)),
    Check(_texts, ()),
    Check(lambda run: check_folder(run.config.folder), ()),  # a stage takes its lock
    Check(_expansion, ("tokenize",)),
    Check(_resume, ("train",)),
    Check(_sampled, ()),
)


def begin(config: RunConfig, world_size: int, stage: Stage) -> Opened:
    """Runs the checks of a stage, before it begins.

    Raises:
        UserError: the first fault.
    """
    run = Opened(config, world_size, stage=stage)
    for check in CHECKS:
        if stage in check.stages:
            check.run(run)
    return run


def faults_of(run: Opened) -> list[UserError]:
    """The faults that all checks find, each once."""
    faults: dict[str, UserError] = {}

    def attempt(work: Callable[[], object]) -> None:
        try:
            if isinstance(parts := work(), Iterator):
                for part in parts:
                    attempt(part)
        except UserError as error:
            faults.setdefault(str(error), error)

    for check in CHECKS:
        attempt(lambda check=check: check.run(run))  # type: ignore[misc]
    return list(faults.values())


def read_inputs(config: RunConfig, world_size: int) -> Inputs:
    """Reads and checks everything that training reads, except for weights and the files of checkpoints.

    Raises:
        UserError: the first fault.
    """
    run = begin(config, world_size, "train")
    layout, deepspeed_config = run.layout
    starts_at_base = run.finished or training_method(config).starts_at_base()
    return Inputs(
        config, deepspeed_config, layout, run.base, run.tokenizer.fingerprint, starts_at_base, finished=run.finished
    )
