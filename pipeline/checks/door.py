"""The list of checks of what a user brings, each with what it needs and the stages that begin with it.

A dry run makes every check that needs no ranks, and lists all faults. A stage makes its own, and raises the first. The
preflight makes those that need the ranks of the allocation, and raises all faults in one line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.checks.allocation import Allocation, check_corpora, check_disk, check_memory, check_same_files
from pipeline.checks.devices import Finding, judge_all_reduce, judge_products, measure_all_reduce, measure_product
from pipeline.checks.inputs import (
    Inputs,
    Samples,
    check_context,
    check_fits,
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
from pipeline.data.jobs import finished
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.data.units import input_files, is_here
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.errors import PassingPreflightError, PreflightError, UserError
from pipeline.methods import training_method
from pipeline.methods.scale import check_named_expansion, made_expansion
from pipeline.methods.vocabulary import check_vocabulary, extended_spec, with_new_rows
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.ranks import all_gathered, run_on_all_ranks
from pipeline.parallel.topology import Layout, ProcessGroups
from pipeline.rehearsal.corpus import check_sampling, plan_of, sampling_jobs
from pipeline.run_folder.lock import check_folder

Stage = Literal["tokenize", "train"]
_logger = log.get_logger(__name__)


class Opened:
    """What a run's configuration names, opened when a check first asks for it.

    `base_config` is a config.json to use where the base's folder is missing. `stage` is the stage that begins; None in
    a dry run.
    """

    def __init__(
        self, config: RunConfig, world_size: int, base_config: Path | None = None, stage: Stage | None = None
    ) -> None:
        self.config, self.stage = config, stage
        self._world_size, self._base_config = world_size, base_config

    def get(self, name: str) -> Any:  # noqa: ANN401
        """One of the properties; None where it cannot be opened."""
        try:
            return getattr(self, name)
        except UserError:
            return None

    @cached_property
    def layout(self) -> tuple[Layout, DeepSpeedConfig]:
        """The layout of the ranks, and DeepSpeed's configuration."""
        return open_layout(self.config, self._world_size)

    @cached_property
    def base(self) -> BaseFolder:
        """The base, with the rows of the run's own pieces."""
        return with_new_rows(self.config, open_base(self.config.base))

    @cached_property
    def spec(self) -> DecoderSpec:
        """The base's architecture."""
        if self._base_config is None or self.get("base") is not None:
            return self.base.spec
        return extended_spec(self.config, read_spec(self._base_config))

    @cached_property
    def model(self) -> DecoderSpec:
        """The architecture of a base on which the run's model can be built."""
        check_fits(self.config, self.spec)
        return self.spec

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        if not self.config.tokenizer.exists():
            self.base  # noqa: B018  # its fault is that of the tokenizer, which is missing with it
        return load_tokenizer(self.config.tokenizer)

    @cached_property
    def samples(self) -> Samples:
        """The token corpora; with a tokenizer that cannot be opened, of any."""
        tokenizer = self.get("tokenizer")
        return open_samples(self.config, None if tokenizer is None else tokenizer.fingerprint)

    @cached_property
    def finished(self) -> bool:
        """Whether an earlier attempt finished the run."""
        return check_resume(self.config, self.base, self.tokenizer.fingerprint)


def _sampling(run: Opened) -> None:
    for corpus in run.config.data.corpora.values():
        if corpus.sample is not None:
            # A sequence length beyond the context is a fault of its own.
            longest = min(run.config.data.sequence_length, run.spec.longest_text)
            check_sampling(corpus.sample, corpus.sample.max_tokens or longest, run.tokenizer, run.spec)


def _corpora(run: Opened) -> None:
    if run.stage == "train" or is_tokenized(run.config.data):
        run.samples  # noqa: B018
    elif run.config.data.folder.resolve() != run.config.folder.resolve():
        check_folder(run.config.data.folder)


def _texts(run: Opened) -> list[UserError]:
    if (tokenizer := run.get("tokenizer")) is None:
        named = [files for files in named_inputs(run.config.data) if is_here(files)]
        return [fault for files in named for fault in _faults(input_files, files)]
    jobs = [job for job in corpus_jobs(run.config.data, run.config.tokenizer) if is_here(job.corpus.input)]
    return [
        fault
        for job in jobs
        for fault in _faults(lambda job: finished(job.output, preprocess.plan_of(job, tokenizer)), job)
    ]


def _sampled(run: Opened) -> list[UserError]:
    if run.get("base") is None or run.get("tokenizer") is None:
        return []
    jobs = sampling_jobs(run.config)
    return [fault for job in jobs for fault in _faults(lambda job: finished(job.output, plan_of(job)), job)]


def _expansion(run: Opened) -> None:
    if isinstance(run.config.method, ScaleMethod):
        check_named_expansion(run.config.upscaled)
    made_expansion(run.config, run.base)  # hashes the base


def _resume(run: Opened) -> object:
    if run.stage == "train" or (run.config.folder.is_dir() and run.get("model") and run.get("base")):
        return run.finished
    return None


def _links(run: Allocation, kind: str, group: dist.ProcessGroup, groups: list[list[int]]) -> Finding:
    if len(groups[0]) == 1:
        return Finding(f"no {kind} all-reduce: a group is one rank")
    links = all_gathered(measure_all_reduce(group, run.device))
    limit = run.inputs.config.preflight.min_gb_per_s_on(run.device.type)
    return judge_all_reduce(kind, links, groups, run.nodes, limit)


def _tp_links(run: Allocation) -> Finding:
    return _links(run, "tensor-parallel", run.groups.get_model_parallel_group(), run.groups.layout.tp_groups())


def _dp_links(run: Allocation) -> Finding:
    return _links(run, "data-parallel", run.groups.get_data_parallel_group(), run.groups.layout.dp_groups())


def _products(run: Allocation) -> Finding:
    products = all_gathered(measure_product(run.inputs.deepspeed_config.dtype, run.device))
    return judge_products(products, run.nodes, run.device.type, run.inputs.config.preflight.slow_factor)


class Check(NamedTuple):
    """A check: what it looks at, the stages that begin with it, and its function.

    A check of the configuration or its files takes what is `Opened`. It raises a UserError, or returns several. One of
    the ranks takes the Allocation, is called by all of them, and returns a Finding.
    """

    needs: Literal["config", "files", "ranks"]
    stages: tuple[Stage, ...]
    run: Callable[[Any], Any]


CHECKS = (
    Check("config", ("tokenize", "train"), lambda run: run.layout),
    Check("config", ("tokenize", "train"), lambda run: check_trackers(run.config)),
    Check("config", ("tokenize",), lambda run: check_heldout(run.config)),
    Check("files", ("tokenize", "train"), lambda run: run.base),
    Check("files", ("tokenize", "train"), lambda run: run.base.file_of),  # the header of every weight file
    Check("files", ("train",), lambda run: check_context(run.config, run.spec)),
    Check("files", ("tokenize",), lambda run: run.model),  # training builds it
    Check("files", ("tokenize", "train"), lambda run: check_vocabulary(run.tokenizer, run.spec)),
    Check("files", ("tokenize", "train"), lambda run: encoded_prompts(run.config, run.tokenizer, run.spec)),
    Check("files", ("tokenize",), _sampling),
    Check("files", ("train",), _corpora),
    Check("files", (), _texts),
    Check("files", (), lambda run: check_folder(run.config.folder)),  # a stage takes its lock
    Check("files", ("tokenize",), _expansion),
    Check("files", ("train",), _resume),
    Check("files", (), _sampled),
    Check("ranks", ("train",), _tp_links),
    Check("ranks", ("train",), _dp_links),
    Check("ranks", ("train",), _products),
    Check("ranks", ("train",), check_same_files),
    Check("ranks", ("train",), check_corpora),
    Check("ranks", ("train",), check_memory),
    Check("ranks", ("train",), check_disk),
)


def begin(config: RunConfig, world_size: int, stage: Stage) -> Opened:
    """Makes the checks of a stage that need no ranks, before it begins.

    Raises:
        UserError: the first fault.
    """
    run = Opened(config, world_size, stage=stage)
    for check in CHECKS:
        if stage in check.stages and check.needs != "ranks":
            check.run(run)
    return run


def faults_of(run: Opened) -> list[UserError]:
    """The faults that all checks find that need no ranks, each once."""
    found = [fault for check in CHECKS if check.needs != "ranks" for fault in _faults(check.run, run)]
    return list({str(fault): fault for fault in found}.values())


def _faults(check: Callable[..., Any], *arguments: Any) -> Iterable[UserError]:  # noqa: ANN401
    """What `check` raises or returns."""
    try:
        found = check(*arguments)
    except UserError as error:
        return [error]
    return found if isinstance(found, list) else []


def read_inputs(config: RunConfig, world_size: int) -> Inputs:
    """Reads and checks everything that training reads, except for weights and the files of checkpoints.

    Raises:
        UserError: the first fault.
    """
    run = begin(config, world_size, "train")
    layout, deepspeed_config = run.layout
    method = training_method(config)
    starts_at_base = run.finished or method.expansion is None or not method.expansion.is_trained
    read = (run.base, run.tokenizer.fingerprint, run.samples, method)
    return Inputs(config, deepspeed_config, layout, *read, starts_at_base, finished=run.finished)


def check_allocation(inputs: Inputs, groups: ProcessGroups, device: torch.device) -> None:
    """The preflight; every rank must call it, before it allocates anything.

    Raises:
        PreflightError: with all faults, on rank 0; a PassingPreflightError if all of them are passing.
        SystemExit: on the other ranks.
    """
    if not inputs.config.preflight.enabled:
        return
    started = time.perf_counter()
    run = Allocation(inputs, groups, device, all_gathered(log.node()))
    counts = ", ".join(f"{count} on {node}" for node, count in Counter(run.nodes).items())
    _logger.info("preflight: %d rank(s): %s", len(run.nodes), counts)
    findings: list[Finding] = []
    for check in CHECKS:
        if check.needs == "ranks":
            finding = check.run(run)
            _logger.info("preflight: %s", finding.measured)
            for warning in finding.warnings:
                _logger.warning("preflight: %s", warning)
            findings.append(finding)
    run_on_all_ranks(lambda: refuse_faults(findings))
    _logger.info("preflight: passed after %.1f s", time.perf_counter() - started)


def refuse_faults(findings: list[Finding]) -> None:
    """Raises PreflightError with every fault of `findings`, and the Slurm option that excludes the broken nodes."""
    faults = [fault for finding in findings for fault in finding.faults]
    if not faults:
        return
    nodes = sorted({fault.node for fault in faults if fault.node is not None})
    exclude = f"; to exclude the broken nodes from the job: --exclude={','.join(nodes)}" if nodes else ""
    kind = PassingPreflightError if all(fault.passing for fault in faults) else PreflightError
    raise kind(f"preflight: {len(faults)} fault(s): {'; '.join(fault.text for fault in faults)}{exclude}")
