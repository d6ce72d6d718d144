"""All checks of an allocation, one after the other, and one verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.estimation.cluster import Cluster
from pipeline.estimation.disk import checkpoints_bytes
from pipeline.estimation.estimate import Estimator
from pipeline.model.base_folder import BaseFolder
from pipeline.parallel.topology import ProcessGroups
from pipeline.training.preflight.disk import check_disk
from pipeline.training.preflight.finding import Finding, refuse_faults
from pipeline.training.preflight.memory import Need, check_memory
from pipeline.training.preflight.messages import check_messages
from pipeline.training.preflight.products import check_products
from pipeline.training.preflight.ranks import Ranks, describe, gather_ranks
from pipeline.training.preflight.same_files import check_same_files
from pipeline.training.unison import from_first_rank, in_unison

_logger = log.get_logger(__name__)


def check_allocation(
    config: RunConfig,
    deepspeed_config: DeepSpeedConfig,
    base: BaseFolder,
    groups: ProcessGroups,
    device: torch.device,
) -> None:
    """Measures what the run was given; every rank must call it, before it holds anything.

    Raises:
        PreflightError: on the first rank, with all that is wrong; the others leave without a word.
    """
    if not config.preflight.enabled:
        return
    started = time.perf_counter()
    findings = []
    for finding in _findings(config, deepspeed_config, base, groups, device):
        _logger.info("preflight: %s", finding.measured)
        findings.append(finding)
    in_unison(lambda: refuse_faults(findings))
    _logger.info("preflight: all is well, after %.1f s", time.perf_counter() - started)


def _findings(
    config: RunConfig,
    deepspeed_config: DeepSpeedConfig,
    base: BaseFolder,
    groups: ProcessGroups,
    device: torch.device,
) -> Iterator[Finding]:
    settings, layout = config.preflight, groups.layout
    ranks = gather_ranks()
    yield describe(ranks)
    floor = settings.min_gb_per_s_on(device.type)
    tp_group, dp_group = groups.get_model_parallel_group(), groups.get_data_parallel_group()
    yield check_messages("tensor-parallel", tp_group, layout.tp_groups(), ranks, device, floor)
    yield check_messages("data-parallel", dp_group, layout.dp_groups(), ranks, device, floor)
    yield check_products(ranks, deepspeed_config.dtype, device, settings.slow_factor_on(device.type))
    yield check_same_files(config, base, ranks)
    need, disk_bytes = from_first_rank(lambda: _needs(config, deepspeed_config, base, ranks))
    yield check_memory(need, ranks, device)
    yield check_disk(config.folder / "checkpoints", disk_bytes, ranks)


def _needs(config: RunConfig, deepspeed_config: DeepSpeedConfig, base: BaseFolder, ranks: Ranks) -> tuple[Need, int]:
    """What the estimate says: bytes of memory a rank, and of disk for the run's checkpoints."""
    cluster = Cluster(len(ranks.nodes), gpus_per_node=ranks.on_this_node)
    estimator = Estimator(config, base.spec, deepspeed_config, cluster)
    memory, host_bytes = estimator.memory(estimator.own_choice)
    disk_bytes = checkpoints_bytes(config, estimator.parameters)
    return Need(memory.total, host_bytes), disk_bytes
