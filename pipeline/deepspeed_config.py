"""DeepSpeed's configuration: the run's JSON file sets memory and communication, the run the rest.

Refused are keys that the run configuration sets, the value "auto", and settings that DeepSpeed
silently gets wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.config.run import RunConfig
from pipeline.config.schedule import Schedule
from pipeline.errors import ConfigError, LayoutError
from pipeline.files.json_files import read_object
from pipeline.installation import shipped
from pipeline.parallel.topology import Layout

_OWNED = {
    "train_batch_size": "schedule.global_batch_size",
    "train_micro_batch_size_per_gpu": "schedule.micro_batch_size",
    "gradient_accumulation_steps": "schedule.global_batch_size and schedule.micro_batch_size",
    "gradient_clipping": "schedule.gradient_clipping",
    "optimizer": "schedule",
    "scheduler": "schedule",
    "tensor_parallel": "parallel.tp_size",
    "activation_checkpointing": "activation_checkpointing",
    "tensorboard": "the trainer itself",
}
_ALLOWED = {
    "zero_optimization",
    "bf16",
    "data_types",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "aio",
    "comms_logger",
    "wall_clock_breakdown",
    "dump_state",
    "steps_per_print",
}
# Settings that DeepSpeed accepts and gets wrong; each was reproduced.
_BROKEN = {
    "zero_optimization.zero_quantized_nontrainable_weights": "it destroys a base that is frozen",
    "zero_optimization.leaf_module": "with a frozen base the backward pass fails",
    # It makes modules leaves, too.
    "zero_optimization.stage3_module_granularity_threshold": (
        "with a frozen base the backward pass fails"
    ),
    # It tells where a parameter lies by an order in which the parameters do not lie.
    "zero_optimization.round_robin_gradients": (
        "checkpoints would hold parameters under each other's names"
    ),
    "bf16.bf16_master_weights_and_grads": "checkpoints hold weights and moments in fp32",
    "bf16.bf16_optimizer_states": "checkpoints hold weights and moments in fp32",
}
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
}
_ELEMENTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""DeepSpeed's defaults."""
_SWITCHES = {
    "bf16.enabled",
    "prescale_gradients",
    "wall_clock_breakdown",
    "dump_state",
    "zero_optimization.allgather_partitions",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_scatter",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.offload_optimizer.pin_memory",
}
_WHOLE_NUMBERS = {
    "steps_per_print",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    *(f"zero_optimization.{name}" for name in _ELEMENTS),
}
_OBJECTS = {
    "bf16",
    "data_types",
    "aio",
    "comms_logger",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
}
_CHOICES = {
    "data_types.grad_accum_dtype": tuple(_DTYPES),
    "communication_data_type": ("fp32", "fp16", "bf16"),
    "seq_parallel_communication_data_type": ("fp32", "fp16", "bf16"),
    "zero_optimization.offload_param.device": ("none", "cpu", "nvme"),
    "zero_optimization.offload_optimizer.device": ("none", "cpu", "nvme"),
}
"""These four list the types of settings that are often set, or that this project reads.

DeepSpeed itself checks the types of all others.
"""
_UNSCALED = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
"""The defaults of averaging gradients, the only ones that work with `reduce_scatter`."""
_GUARDS = ("bf16.check_grad_overflow", "zero_optimization.compute_grad_norm")
"""The checks for gradients that are not finite."""


@dataclass(frozen=True)
class DeepSpeedConfig:
    """The checked contents of a JSON file of `ds_configs/`."""

    path: Path
    values: dict[str, Any]

    @property
    def zero(self) -> dict[str, Any]:
        zero: dict[str, Any] = self.values["zero_optimization"]
        return zero

    @property
    def zero_stage(self) -> int:
        """1 and 2 replicate the base over the data-parallel ranks, 3 shards it."""
        return int(self.zero["stage"])

    @property
    def partitions_at_once(self) -> bool:
        """Whether parameters are partitioned while the model is built.

        Copies within a node (hpZ) and on NVMe are made from whole values, which do not exist yet at
        that point.
        """
        if self.zero_stage != 3:
            return False
        has_node_copies = (
            self.zero.get("zero_hpz_partition_size", 1) > 1
            or self.zero.get("mics_shard_size", 0) > 0
        )
        on_nvme = self.zero.get("offload_param", {}).get("device") == "nvme"
        return not has_node_copies and not on_nvme

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and matrix products."""
        if self.values.get("bf16", {}).get("enabled"):
            return torch.bfloat16
        return torch.float32

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of the gradients that are accumulated over micro-batches."""
        name = self.values.get("data_types", {}).get("grad_accum_dtype")
        return _DTYPES.get(name, self.dtype)

    @property
    def communication_dtype(self) -> torch.dtype:
        """The dtype of the gradients in messages between ranks."""
        return _DTYPES.get(self.values.get("communication_data_type", ""), self.dtype)

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps with computation."""
        return bool(self.zero.get("overlap_comm", self.zero_stage == 3))

    def offloads(self, part: Literal["optimizer", "param"]) -> bool:
        """Whether the optimizer, or the parameters, are offloaded to the host."""
        return bool(self.zero.get(f"offload_{part}", {}).get("device", "none") != "none")

    def elements(self, name: str) -> int:
        """A size in `zero_optimization`, in elements."""
        return int(self.zero.get(name, _ELEMENTS[name]))

    def at_stage(self, stage: int) -> DeepSpeedConfig:
        """The same configuration at another ZeRO stage; there without offloading."""
        if stage == self.zero_stage:
            return self
        # Which parts may be offloaded depends on the stage.
        zero = {name: value for name, value in self.zero.items() if not name.startswith("offload_")}
        return replace(self, values={**self.values, "zero_optimization": {**zero, "stage": stage}})

    def merged(self, schedule: Schedule, layout: Layout) -> dict[str, Any]:
        """The whole configuration, as `deepspeed.initialize` takes it."""
        return {
            # Never: the trainer logs its own metrics.
            "steps_per_print": 2**31,
            **self.values,
            "train_micro_batch_size_per_gpu": schedule.micro_batch_size,
            "gradient_accumulation_steps": accumulation_steps(schedule, layout.dp_size),
            "gradient_clipping": schedule.gradient_clipping,
            # The optimizer is torch's AdamW; DeepSpeed's own for offloading would be compiled at
            # the first start.
            "zero_force_ds_cpu_optimizer": False,
            # Optimizers other than AdamW are unknown to DeepSpeed.
            "zero_allow_untested_optimizer": True,
        }


def accumulation_steps(schedule: Schedule, dp_size: int, *, setting: str = "schedule") -> int:
    """How many micro-batches each rank accumulates for one optimizer step.

    `setting` is where `schedule` comes from.

    Raises:
        LayoutError: the global batch does not consist of whole micro-batches. It names the nearest
            sizes that do.
    """
    batch_size = schedule.global_batch_size
    at_once = schedule.micro_batch_size * dp_size
    if batch_size % at_once != 0:
        below = batch_size // at_once * at_once
        nearest = f"{below + at_once}"
        if below > 0:
            nearest = f"{below}, {below + at_once}"
        raise LayoutError(
            f"{setting}.global_batch_size: {batch_size} does not divide by micro_batch_size "
            f"{schedule.micro_batch_size} x {dp_size} data-parallel ranks = {at_once}; nearest "
            f"that do: {nearest}{_smaller_micro_batch(schedule, dp_size)}"
        )
    return batch_size // at_once


def _smaller_micro_batch(schedule: Schedule, dp_size: int) -> str:
    """The largest smaller micro-batch with which the global batch divides, as an alternative."""
    for size in range(schedule.micro_batch_size - 1, 0, -1):
        if schedule.global_batch_size % (size * dp_size) == 0:
            return f"; or set micro_batch_size to {size}"
    return ""


def load_deepspeed_config(path: Path, layout: Layout) -> DeepSpeedConfig:
    """Reads and checks the JSON file at `path` for a run on `layout`.

    Outside a checkout, `path` may also name one of the files that the package holds.

    Raises:
        ConfigError: it is missing, is not JSON, sets what the run configuration sets, or has
            settings that do not work.
    """
    file = path
    if not file.exists():
        file = shipped() / path
    try:
        values = read_object(file, ConfigError, "name a JSON file of DeepSpeed in `deepspeed`")
    except FileNotFoundError:
        raise ConfigError(
            f"deepspeed: {path}: no such file; the project's own are in ds_configs/"
        ) from None
    faults = list(_faults(values, layout))
    if faults:
        raise ConfigError(f"{path}: {len(faults)} fault(s): {'; '.join(faults)}")
    return DeepSpeedConfig(path, values)


def deepspeed_config_of(config: RunConfig, layout: Layout) -> DeepSpeedConfig:
    """The DeepSpeed configuration of a run.

    Raises:
        ConfigError: as `load_deepspeed_config`, and where a setting of the run excludes it.
    """
    opened = load_deepspeed_config(config.deepspeed, layout)
    if opened.zero_stage == 3:
        unsupported = zero3_unsupported_reason(config)
        if unsupported is not None:
            setting, reason = unsupported
            raise ConfigError(
                f"{setting}: expected ZeRO-1 or 2, found ZeRO-3 in {config.deepspeed}: {reason}; "
                "remove the setting, or name another deepspeed file"
            )
    return opened


def _faults(values: dict[str, Any], layout: Layout) -> Iterator[str]:  # noqa: C901, PLR0912  # one fault after another
    zero = values.get("zero_optimization")
    if not isinstance(zero, dict):
        yield "expected an object with zero_optimization"
        return
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        yield f"zero_optimization.stage: expected 1, 2 or 3, found {zero.get('stage')!r:.80}"
    settings = dict(_flat(values))
    yield from _wrong_types(settings)
    if stage in (2, 3) and settings.get("zero_optimization.reduce_scatter", True):
        for name, default in _UNSCALED.items():
            if settings.get(name, default) != default:
                yield (
                    f"{name}: expected {default} under ZeRO-{stage}, which averages otherwise; "
                    "remove it"
                )
    for name in ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"):
        size = settings.get(name, 0)
        if not _is_whole(size):
            yield f"{name}: expected a whole number, found {size!r:.80}"
        # DeepSpeed takes consecutive ranks of the world for a node's replicas, but these are
        # tensor-parallel neighbours, which hold different shards.
        elif layout.tp_size > 1 and size > 1:
            yield (
                f"{name}: with parallel.tp_size {layout.tp_size} it mixes different shards of the "
                "weights silently; remove it, or use tp_size 1"
            )
    offload_device = settings.get("zero_optimization.offload_optimizer.device", "none")
    accumulates_apart = (
        settings.get("bf16.enabled") and settings.get("data_types.grad_accum_dtype") == "fp32"
    )
    if stage in (1, 2) and offload_device != "none" and accumulates_apart:
        # DeepSpeed clears only a part of the gradients where it skips a step.
        yield (
            "zero_optimization.offload_optimizer: with data_types.grad_accum_dtype fp32 under "
            f"ZeRO-{stage} a gradient that is not finite would stay in all later steps; remove one "
            "of the two, or take ZeRO-3"
        )
    if offload_device == "nvme":
        yield (
            "zero_optimization.offload_optimizer.device: checkpoints cannot hold state on NVMe; "
            "use cpu"
        )
    for name in values:
        if name in _OWNED:
            yield f"{name}: remove it, the run configuration sets it ({_OWNED[name]})"
        elif name not in _ALLOWED:
            yield f"{name}: not among {', '.join(sorted(_ALLOWED))}"
    for name, value in settings.items():
        if value == "auto":
            yield f'{name}: "auto" means nothing here, DeepSpeed would drop it; give a value'
        # A NaN is found in the gradient norm, before the update, and the step is skipped; without
        # the norm it would be in every weight.
        elif name in _GUARDS and value is False:
            yield f"{name}: a gradient that is not finite would reach the weights; remove it"
        elif name in _BROKEN and value:
            yield f"{name}: {_BROKEN[name]}; remove it"


def _wrong_types(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if value == "auto":
            continue  # `_faults` has a message of its own for it
        found = f"found {value!r:.80}"
        if name in _OBJECTS and not isinstance(value, dict):
            yield f"{name}: expected an object"
        elif name in _SWITCHES and not isinstance(value, bool):
            yield f"{name}: expected true or false, {found}"
        elif name in _WHOLE_NUMBERS and not (_is_whole(value) and value >= 0):
            yield f"{name}: expected a whole number of at least 0, {found}"
        elif name in _CHOICES and value not in _CHOICES[name]:
            yield f"{name}: expected one of {', '.join(_CHOICES[name])}, {found}"
        elif name == "gradient_predivide_factor" and not (_is_number(value) and value > 0):
            yield f"{name}: expected a number above 0, {found}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    """Whether a JSON number is whole, as 5e8 is."""
    return _is_number(value) and float(value).is_integer()  # type: ignore[arg-type]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by their dotted names."""
    for name, value in values.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")


def zero3_unsupported_reason(config: RunConfig) -> tuple[str, str] | None:
    """The setting that excludes ZeRO-3, and the reason; None where none does."""
    if config.compile:
        return "compile", "a layer that gathers its parameters cannot be compiled"
    if config.base_precision != "bf16":
        return "base_precision", f"a base in {config.base_precision} is held whole by every rank"
    return None
