"""What an estimate is made of: the run's configuration, the base's architecture, DeepSpeed's settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.errors import BaseModelError, ConfigError
from pipeline.estimation.cluster import Cluster
from pipeline.estimation.estimate import Estimator
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout


def open_estimator(
    config: RunConfig, cluster: Cluster, *, tp_size: int | None = None, base_config: Path | None = None
) -> Estimator:
    """Reads what the run names; `tp_size` overrides the configuration's, `base_config` is the base's config.json.

    Raises:
        ConfigError: a figure of the cluster cannot be, or DeepSpeed's JSON is not fit for the layout.
        BaseModelError: neither the base's folder nor `base_config` is there.
        LayoutError: the GPUs do not divide by the tensor-parallel size.
    """
    check_cluster(cluster)
    if tp_size is not None:
        if tp_size <= 0:
            raise ConfigError(f"--tp: expected a number above 0, found {tp_size}")
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp_size": tp_size})})
    layout = Layout(cluster.gpus, config.parallel.tp_size)
    spec = read_architecture(config, base_config)
    return Estimator(config, spec, load_deepspeed_config(config.deepspeed, layout), cluster)


def read_architecture(config: RunConfig, base_config: Path | None = None) -> DecoderSpec:
    """The architecture of the run's base, from its folder or from the file `base_config`.

    Raises:
        BaseModelError: neither is there.
    """
    source = base_config or config.base
    if not source.exists():
        raise BaseModelError(
            f"{source}: not here; the base's config.json is all that is needed: name one with --base-config"
        )
    return read_spec(source)


def check_cluster(cluster: Cluster) -> None:
    """Raises ConfigError where a figure cannot be."""
    for setting in fields(cluster):
        value = getattr(cluster, setting.name)
        if value <= 0:
            raise ConfigError(f"--{setting.name.replace('_', '-')}: expected a number above 0, found {value}")
    if cluster.mfu > 1:
        raise ConfigError(f"--mfu: expected a share of the peak, 0 to 1, found {cluster.mfu}")
