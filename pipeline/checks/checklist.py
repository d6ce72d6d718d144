"""Which checks are made by tokenization, by training, by the dry run, and by the preflight.

A stage raises the first fault. A dry run makes every check that needs no ranks, and lists all
faults. The preflight makes the checks that need the ranks of the allocation, and raises all faults
in one line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from pipeline import log
from pipeline.checks.input_checks import (
    check_base,
    check_deepspeed_config,
    check_exported_tokenizer,
    check_flash_attention,
    check_heldout_texts,
    check_initial_expansion,
    check_layout,
    check_model,
    check_newest_checkpoint,
    check_open_rows,
    check_parameter_groups,
    check_profile,
    check_run_folder,
    check_samples,
    check_samples_or_folder,
    check_start,
    check_texts,
    check_tokenizer,
    check_trackers,
    check_trained_expansion,
)
from pipeline.checks.inputs import RunInputs
from pipeline.checks.preflight.all_reduce import (
    check_data_parallel_all_reduce,
    check_tensor_parallel_all_reduce,
)
from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.checkpoint_disk import check_disk
from pipeline.checks.preflight.findings import Finding
from pipeline.checks.preflight.input_files import check_corpora, check_same_files
from pipeline.checks.preflight.matrix_products import check_matrix_products
from pipeline.checks.preflight.memory import check_memory
from pipeline.config.run import RunConfig
from pipeline.errors import TRANSIENT_FAULT, PreflightError, UserError
from pipeline.extension import CheckedStage, InputCheck, extensions
from pipeline.parallel.ranks import all_gathered, run_on_all_ranks
from pipeline.parallel.topology import ProcessGroups

RankCheck: TypeAlias = Callable[[Allocation], Finding]
"""Every rank calls it, at the same time as the others."""

_logger = log.get_logger(__name__)

_CONFIG_CHECKS: tuple[InputCheck, ...] = (
    check_layout,
    check_deepspeed_config,
    check_profile,
    check_trackers,
)
_BASE_CHECKS: tuple[InputCheck, ...] = (
    check_base,
    check_model,
    check_flash_attention,
    check_parameter_groups,
    check_tokenizer,
)

# Tokenization takes hours. So it begins with all checks of training that can be made before it.
_TOKENIZE_CHECKS: tuple[InputCheck, ...] = (
    check_heldout_texts,
    *_BASE_CHECKS,
    check_open_rows,
    check_initial_expansion,
    check_trained_expansion,
)

_TRAIN_CHECKS: tuple[InputCheck, ...] = (
    *_BASE_CHECKS,
    check_samples,
    check_trained_expansion,
    check_start,
)

# The checks of both stages, as far as they can be made before any stage has run.
_DRY_RUN_CHECKS: tuple[InputCheck, ...] = (
    check_heldout_texts,
    *_BASE_CHECKS,
    check_open_rows,
    check_samples_or_folder,
    check_texts,
    check_exported_tokenizer,
    check_run_folder,
    check_initial_expansion,
    check_trained_expansion,
    check_newest_checkpoint,
)

_CORE_CHECKS: dict[CheckedStage, tuple[InputCheck, ...]] = {
    "every stage": _CONFIG_CHECKS,
    "tokenize": _TOKENIZE_CHECKS,
    "train": _TRAIN_CHECKS,
    "dry run": _DRY_RUN_CHECKS,
}

PREFLIGHT_CHECKS: tuple[RankCheck, ...] = (
    check_tensor_parallel_all_reduce,
    check_data_parallel_all_reduce,
    check_matrix_products,
    check_same_files,
    check_corpora,
    check_memory,
    check_disk,
)


def check_stage(
    config: RunConfig, world_size: int, stage: Literal["tokenize", "train"]
) -> RunInputs:
    """Makes the checks of a stage before it begins; returns the inputs that they opened.

    Rank 0 of training makes them and broadcasts the inputs, so that other ranks do not read them
    again.

    Raises:
        UserError: the first fault that a check finds.
    """
    inputs = RunInputs(config, world_size)
    for check in input_checks(stage):
        check(inputs)
    return inputs


def input_checks(stage: CheckedStage) -> list[InputCheck]:
    """The checks that are made for a stage, each once: those of every stage, then its own.

    Of both the core's come first, then those of the extensions.
    """
    checks: list[InputCheck] = []
    made_for: tuple[CheckedStage, ...] = ("every stage", stage)
    for asked in made_for:
        checks += _CORE_CHECKS[asked]
        for extension in extensions():
            checks += extension.input_checks(asked)
    return list(dict.fromkeys(checks))


def faults_of(inputs: RunInputs) -> list[UserError]:
    """The faults that the checks of a dry run find, each once."""
    faults: dict[str, UserError] = {}
    for check in input_checks("dry run"):
        try:
            found = check(inputs) or []
        except UserError as error:
            found = [error]
        for fault in found:
            faults.setdefault(str(fault), fault)
    return list(faults.values())


def check_allocation(inputs: RunInputs, groups: ProcessGroups, device: torch.device) -> None:
    """The preflight; every rank must call it, before it allocates anything.

    Raises:
        PreflightError: With all faults, on rank 0; another attempt may succeed if all of them are
            transient.
        SystemExit: On the other ranks.
    """
    if not inputs.config.preflight.enabled:
        return
    started = time.perf_counter()
    allocation = Allocation(inputs, groups, device, all_gathered(log.node()))
    counts = [f"{count} on {node}" for node, count in Counter(allocation.nodes).items()]
    _logger.info("preflight: %d rank(s): %s", len(allocation.nodes), ", ".join(counts))
    findings: list[Finding] = []
    for check in PREFLIGHT_CHECKS:
        finding = check(allocation)
        _logger.info("preflight: %s", finding.measured)
        findings.append(finding)
    run_on_all_ranks(lambda: refuse_faults(findings))
    _logger.info("preflight: passed after %.1f s", time.perf_counter() - started)


def refuse_faults(findings: list[Finding]) -> None:
    """Refuses an allocation in which a check of the preflight found a fault.

    Raises:
        PreflightError: with every fault, and the Slurm option that excludes broken nodes.
    """
    texts: list[str] = []
    broken_nodes: set[str] = set()
    all_transient = True
    for finding in findings:
        for fault in finding.faults:
            texts.append(fault.text)
            all_transient = all_transient and fault.transient
            if fault.node is not None:
                broken_nodes.add(fault.node)
    if not texts:
        return
    message = f"preflight: {len(texts)} fault(s): {'; '.join(texts)}"
    if broken_nodes:
        option = f"--exclude={','.join(sorted(broken_nodes))}"
        message += f"; to exclude the broken nodes from the job: {option}"
    # The exit code of a transient fault requeues the job, which helps only if all faults may pass.
    raise PreflightError(message, TRANSIENT_FAULT if all_transient else None)
