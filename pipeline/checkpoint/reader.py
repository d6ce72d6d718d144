"""Reads DeepSpeed checkpoints of any ZeRO stage, data- and tensor-parallel size, one whole tensor at a time.

Neither DeepSpeed nor a process group is needed, and nothing in the files is executed. Files are mapped into memory:
what is held at a time is one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path

from torch import Tensor, nn

from pipeline.checkpoint.zero_files import Moment, SavedShards, saved_shards
from pipeline.checkpoint.zero_layout import Span
from pipeline.errors import CheckpointError
from pipeline.parallel.parameter import full_shape_of, partition_of
from pipeline.parallel.sharding import merge, split

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class CheckpointReader:
    """The parameters and Adam moments in a DeepSpeed checkpoint folder, merged over all ranks.

    `model` gives each parameter's whole shape and how it is split (it may lie on the meta device, and be of any
    tensor-parallel size).

    Raises:
        CheckpointError: a file is missing or damaged, is not what DeepSpeed writes, or does not fit `model`.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._parameters = dict(model.named_parameters())
        files = self._optimizer_files()
        self.dp_size, self.tp_size = _grid(files)
        self._ranks = [
            saved_shards(folder, tp_rank, [files[dp_rank, tp_rank] for dp_rank in range(self.dp_size)])
            for tp_rank in range(self.tp_size)
        ]
        unknown = sorted(set(self.names) - set(self._parameters))
        if unknown:
            raise CheckpointError(
                f"{folder}: holds {unknown[0]} and {len(unknown) - 1} more that the model of its manifest has not; "
                "use the checkpoint with the method and base it was trained with"
            )

    @property
    def names(self) -> list[str]:
        """The parameters that trained."""
        return list(self._ranks[0].shapes)

    @property
    def frozen_names(self) -> list[str]:
        """Frozen parameters that the checkpoint holds all the same; usually none."""
        return [name for name in self._parameters if name in self._ranks[0].frozen_names]

    def read(self, name: str) -> Tensor:
        """The whole parameter `name`; trained ones in fp32, as the optimizer holds them."""
        if name in self._ranks[0].frozen_names:
            return self._merged(name, [rank.read_frozen(name) for rank in self._holders(name)])
        return self._trained(name, None)

    def read_moment(self, name: str, moment: Moment) -> Tensor:
        """Adam's first or second moment of the parameter `name`, whole, in fp32."""
        return self._trained(name, moment)

    def read_span(self, name: str, moment: Moment | None, tp_rank: int, tp_size: int, span: Span) -> Tensor:
        """A run of the flattened shard that `tp_rank` of `tp_size` holds of a trained parameter, or of its moment.

        Where the checkpoint is of the same tensor-parallel size, nothing else is read.
        """
        self._check_trained(name)
        if tp_size == self.tp_size:
            return self._ranks[tp_rank].read_span(name, moment, span)
        whole = self._trained(name, moment)
        return split(whole, partition_of(self._parameters[name]), tp_rank, tp_size).flatten()[slice(*span)]

    @property
    def adam_step(self) -> Tensor:
        """How many steps Adam has counted: a scalar, of the type that the optimizer counts in."""
        try:
            return self._ranks[0].adam_step
        except (KeyError, StopIteration, TypeError):
            raise CheckpointError(f"{self.folder}: holds no state of Adam; use another checkpoint") from None

    def _check_trained(self, name: str) -> None:
        if name not in self._ranks[0].shapes:
            raise CheckpointError(f"{self.folder}: does not hold {name}; it was trained with another method or base")

    def _trained(self, name: str, moment: Moment | None) -> Tensor:
        self._check_trained(name)
        return self._merged(name, [rank.read(name, moment) for rank in self._holders(name)])

    def _holders(self, name: str) -> list[SavedShards]:
        """The ranks whose shards make the whole: all, or one where each holds it all."""
        return self._ranks if partition_of(self._parameters[name]).dim is not None else self._ranks[:1]

    def _merged(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        parameter = self._parameters[name]
        partition, shape = partition_of(parameter), full_shape_of(parameter)
        whole = merge(shards, partition, shape[partition.dim or 0])
        if tuple(whole.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {tuple(whole.shape)}, expected {shape}; "
                "use the checkpoint with the method and base it was trained with"
            )
        return whole

    def _optimizer_files(self) -> dict[tuple[int, int], Path]:
        """The optimizer files by data- and tensor-parallel rank; a full grid of them."""
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such checkpoint folder")
        matches = ((_OPTIMIZER_FILE.fullmatch(file.name), file) for file in self.folder.iterdir())
        files = {(int(match[1]), int(match[2])): file for match, file in matches if match}
        if not files:
            raise CheckpointError(f"{self.folder}: holds no *_optim_states.pt; expected a ZeRO checkpoint of DeepSpeed")
        dp_size, tp_size = _grid(files)
        if missing := sorted(set(product(range(dp_size), range(tp_size))) - set(files)):
            dp_rank, tp_rank = missing[0]
            raise CheckpointError(
                f"{self.folder}: lacks the optimizer file of data-parallel rank {dp_rank}, tensor-parallel rank "
                f"{tp_rank} ({len(missing)} missing); copy the whole folder, from every node"
            )
        return files


def _grid(ranks: Collection[tuple[int, int]]) -> tuple[int, int]:
    """How many data-parallel and tensor-parallel ranks there are."""
    return 1 + max(dp_rank for dp_rank, _ in ranks), 1 + max(tp_rank for _, tp_rank in ranks)
