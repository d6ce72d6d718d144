"""Building a run's model, so that no rank ever holds more of it than it will train with."""

from __future__ import annotations

from contextlib import ExitStack

import deepspeed
from torch import nn

from pipeline import methods
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.parallel.parameter import default_dtype
from pipeline.parallel.topology import ProcessGroups


def build_model(
    config: RunConfig, base: BaseFolder, deepspeed_config: DeepSpeedConfig, groups: ProcessGroups
) -> Decoder:
    """The run's model, its values not yet set; every rank must call it.

    Under ZeRO-3 each parameter is partitioned as soon as it is made, so that a rank never holds a whole shard.
    """
    with ExitStack() as contexts:
        contexts.enter_context(default_dtype(deepspeed_config.dtype))
        if deepspeed_config.partitions_at_once:
            partitioned = _PartitionedUnset(
                data_parallel_group=groups.get_data_parallel_group(),
                config_dict_or_path=deepspeed_config.merged(config.schedule, groups.layout),
                mpu=groups,
                mem_efficient_linear=False,  # else it would replace torch's linear map for good
            )
            contexts.enter_context(partitioned)
        return methods.build_model(config, base, groups.tensor_parallel)


class _PartitionedUnset(deepspeed.zero.Init):  # type: ignore[misc]
    """Partitions parameters as they are made, and sends nothing: DeepSpeed would have one rank tell the others their
    values, of which there are none yet. So the whole tensor's memory is never touched either."""

    def _zero_init_param(self, param: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]
