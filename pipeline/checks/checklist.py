"""The list of checks of what a user brings, each with what it needs and the stages that begin with it.

A dry run makes every check that needs no ranks, and lists all faults. A stage makes its own, and raises the first. The
preflight makes those that need the ranks of the allocation, and raises all faults in one line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch

from pipeline import log
from pipeline.checks.allocation import (
    Allocation,
    check_corpora,
    check_disk,
    check_memory,
    check_same_files,
)
from pipeline.checks.devices import (
    Finding,
    judge_all_reduce,
    judge_products,
    measure_all_reduce,
    measure_product,
)
from pipeline.checks.inputs import Inputs, Stage
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.conversion.formats import unsupported_reason
from pipeline.data.tokenize import job as preprocess
from pipeline.data.tokenize.corpora import check_heldout, corpus_jobs, is_tokenized, named_inputs
from pipeline.data.tokenize.queue import finished
from pipeline.data.tokenize.units import input_files, is_here
from pipeline.errors import (
    TRANSIENT_FAULT,
    ConfigError,
    MissingPackageError,
    PreflightError,
    UserError,
)
from pipeline.hf.base_files import base_config
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.served_tokenizer import check_future_export
from pipeline.methods.scale import check_named_expansion, made_expansion
from pipeline.methods.vocabulary import check_vocabulary
from pipeline.parallel.ranks import all_gathered, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups
from pipeline.run_folder.lock import check_folder
from pipeline.scale.plan import plan_expansion
from pipeline.self_generated.corpus import check_sampling, plan_of, sampling_jobs

_MIN_GB_PER_S = {"cuda": 0.5, "cpu": 0.001}
_logger = log.get_logger(__name__)


def _profile(run: Inputs) -> None:
    profile, ranks = run.config.profile, run.layout.world_size
    if profile.steps is not None and max(profile.ranks, default=0) >= ranks:
        raise ConfigError(
            f"profile.ranks: rank {max(profile.ranks)} of {ranks} ranks; they count from 0, name those that exist"
        )


def check_trackers(config: RunConfig) -> None:
    """Raises MissingPackageError where `observers` names a tracker whose package is not installed."""
    for name in ("wandb", "mlflow"):
        if getattr(config.observers, name) is not None and find_spec(name) is None:
            raise MissingPackageError(
                f"observers.{name}: the package is missing; pip install 'scale-cpt[{name}]', or remove the section"
            )


def _sampling(run: Inputs) -> None:
    for corpus in run.config.data.corpora.values():
        if corpus.sample is not None:
            # A sequence length beyond the context is a fault of its own.
            longest = min(run.config.data.sequence_length, run.spec.max_position_embeddings)
            check_sampling(
                corpus.sample, corpus.sample.max_tokens or longest, run.tokenizer, run.spec
            )


def _corpora(run: Inputs) -> None:
    if run.stage == "train" or is_tokenized(run.config.data):
        run.samples  # noqa: B018
    elif run.config.data.folder.resolve() != run.config.folder.resolve():
        check_folder(run.config.data.folder)


def _texts(run: Inputs) -> list[UserError]:
    if (tokenizer := run.get("tokenizer")) is None:
        return _faults_of_each(input_files, filter(is_here, named_inputs(run.config.data)))
    jobs = (
        job
        for job in corpus_jobs(run.config.data, run.config.tokenizer)
        if is_here(job.corpus.input)
    )
    return _faults_of_each(
        lambda job: finished(job.output, preprocess.plan_of(job, tokenizer)), jobs
    )


def _sampled(run: Inputs) -> list[UserError]:
    if run.get("base") is None or run.get("tokenizer") is None:
        return []
    return _faults_of_each(
        lambda job: finished(job.output, plan_of(job)), sampling_jobs(run.config)
    )


def _exported_tokenizer(run: Inputs) -> None:
    """The export's AutoTokenizer is compared with the tokenizer of training before any GPU is used."""
    config = run.config
    if run.get("fitting_spec") is None or run.get("tokenizer") is None:
        return
    scale = config.method if isinstance(config.method, ScaleMethod) else None
    spec = run.fitting_spec
    expansion = plan_expansion(scale, spec.widths, spec.num_layers) if scale else None
    refused = unsupported_reason(config.method, expansion, spec, gated=config.gate is not None)
    # `auto` takes merged where it can.
    model_type = ScaleConfig.model_type
    if refused["merged"] is None and config.base.is_dir():
        model_type = str(base_config(config.base)["model_type"])
    check_future_export(config.tokenizer, run.tokenizer, model_type, run.compared_texts)


def _expansion(run: Inputs) -> None:
    if isinstance(run.config.method, ScaleMethod):
        check_named_expansion(run.config.init_expansion)
    made_expansion(run.config, run.base)  # hashes the base


def _resume(run: Inputs) -> object:
    if run.stage == "train":
        return run.starts_at_base  # which reads the expansion where no attempt has finished
    return (
        run.config.folder.is_dir() and run.get("fitting_spec") and run.get("base") and run.finished
    )


def _links(run: Allocation, kind: Literal["tensor-parallel", "data-parallel"]) -> Finding:
    layout = run.groups.layout
    if kind == "tensor-parallel":
        group, groups = run.groups.get_model_parallel_group(), layout.tp_groups()
    else:
        group, groups = run.groups.get_data_parallel_group(), layout.dp_groups()
    if len(groups[0]) == 1:
        return Finding(f"no {kind} all-reduce: a group is one rank")
    limit = run.inputs.config.preflight.min_gb_per_s
    if limit is None:
        limit = _MIN_GB_PER_S[run.device.type]
    return judge_all_reduce(
        kind, all_gathered(measure_all_reduce(group, run.device)), groups, run.nodes, limit
    )


def _products(run: Allocation) -> Finding:
    products = all_gathered(measure_product(run.inputs.deepspeed_config.dtype, run.device))
    return judge_products(
        products, run.nodes, run.device.type, run.inputs.config.preflight.slow_factor
    )


class Check(NamedTuple):
    """A check: what it looks at, the stages that begin with it, and its function.

    A check of the configuration or its files takes the Inputs. It raises a UserError, or returns several. One of
    the ranks takes the Allocation, is called by all of them, and returns a Finding.
    """

    needs: Literal["config", "files", "ranks"]
    stages: tuple[Stage, ...]
    run: Callable[[Any], Any]


CHECKS = (
    Check("config", ("tokenize", "train"), lambda run: run.layout),
    Check("config", ("tokenize", "train"), lambda run: run.deepspeed_config),
    Check("config", ("tokenize", "train"), _profile),
    Check("config", ("tokenize", "train"), lambda run: check_trackers(run.config)),
    Check("config", ("tokenize",), lambda run: check_heldout(run.config)),
    Check("files", ("tokenize", "train"), lambda run: run.base),
    Check(
        "files", ("tokenize", "train"), lambda run: run.base.file_of
    ),  # the header of every weight file
    Check("files", ("tokenize", "train"), lambda run: run.fitting_spec),
    Check("files", ("tokenize", "train"), lambda run: check_vocabulary(run.tokenizer, run.spec)),
    Check("files", ("tokenize",), _sampling),
    Check("files", ("train",), _corpora),
    Check("files", (), _texts),
    Check("files", (), _exported_tokenizer),
    Check("files", (), lambda run: check_folder(run.config.folder)),  # a stage takes its lock
    Check("files", ("tokenize",), _expansion),
    Check("files", ("train",), _resume),
    Check("files", (), _sampled),
    Check("ranks", ("train",), lambda run: _links(run, "tensor-parallel")),
    Check("ranks", ("train",), lambda run: _links(run, "data-parallel")),
    Check("ranks", ("train",), _products),
    Check("ranks", ("train",), check_same_files),
    Check("ranks", ("train",), check_corpora),
    Check("ranks", ("train",), check_memory),
    Check("ranks", ("train",), check_disk),
)


def begin(config: RunConfig, world_size: int, stage: Stage) -> Inputs:
    """Makes the checks of a stage that need no ranks, before it begins; raises the first fault, a UserError.

    Before training, what it reads is then open: no other rank reads it again.
    """
    run = Inputs(config, world_size, stage=stage)
    for check in CHECKS:
        if stage in check.stages and check.needs != "ranks":
            check.run(run)
    return run


def faults_of(run: Inputs) -> list[UserError]:
    """The faults that all checks find that need no ranks, each once."""
    found = _faults_of_each(
        lambda check: check.run(run), (check for check in CHECKS if check.needs != "ranks")
    )
    return list({str(fault): fault for fault in found}.values())


def _faults_of_each(check: Callable[[Any], Any], subjects: Iterable[Any]) -> list[UserError]:
    """What `check` raises or returns for each subject."""
    faults: list[UserError] = []
    for subject in subjects:
        try:
            found = check(subject)
        except UserError as error:
            found = [error]
        faults += found if isinstance(found, list) else []
    return faults


def check_allocation(inputs: Inputs, groups: ProcessGroups, device: torch.device) -> None:
    """The preflight; every rank must call it, before it allocates anything.

    Raises:
        PreflightError: with all faults, on rank 0; another attempt may succeed if all of them are passing.
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
            findings.append(check.run(run))
            _logger.info("preflight: %s", findings[-1].measured)
    run_on_all_ranks(lambda: refuse_faults(findings))
    _logger.info("preflight: passed after %.1f s", time.perf_counter() - started)


def refuse_faults(findings: list[Finding]) -> None:
    """Raises PreflightError with every fault of `findings`, and the Slurm option that excludes the broken nodes."""
    faults = [fault for finding in findings for fault in finding.faults]
    if not faults:
        return
    nodes = sorted({fault.node for fault in faults if fault.node is not None})
    exclude = (
        f"; to exclude the broken nodes from the job: --exclude={','.join(nodes)}" if nodes else ""
    )
    text = (
        f"preflight: {len(faults)} fault(s): {'; '.join(fault.text for fault in faults)}{exclude}"
    )
    raise PreflightError(text, TRANSIENT_FAULT if all(fault.passing for fault in faults) else None)
