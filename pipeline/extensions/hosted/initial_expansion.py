"""The initial expansion of a hosted base: which of its matrices each added map starts from.

The added maps are those of ordinary attention and FFNs, and the base's blocks may be anything. So
an added map starts from the base's matrix of that name where there is one (`q_proj` for the query),
and else from all matrices of the block that read its input, one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.config.method import Initialisers
from pipeline.extensions.hosted.added_blocks import block_names
from pipeline.extensions.hosted.decoder import HostedDecoder
from pipeline.extensions.hosted.input_scales import LAST, input_scales
from pipeline.extensions.hosted.structure import HostedBlock
from pipeline.model.dense_expansion import AddedColumnLinear, AddedRowLinear, stacked
from pipeline.model.initial_expansion import BlockSource, blocks_of_module, linear_blocks
from pipeline.parallel.layers import LowRankAdapter
from pipeline.scale.initialisers import leading_columns

# Smaller matrices than this part of a block's largest are routers and gates, not maps of the block.
_LEAST_PART = 1 / 8


@dataclass(frozen=True)
class BlockMatrices:
    """The matrices of a block of the base as linear maps, [out, in] in fp32.

    Attributes:
        reading: the matrices that read the block's input, by name, in the order of definition.
        writing: the matrix that gives the block's output.
    """

    reading: dict[str, Tensor]
    writing: Tensor

    def map_for(self, name: str) -> Tensor:
        """The matrix from which the added map `name` (query, key, value, gate or up) starts."""
        for full_name, matrix in self.reading.items():
            if _has_the_role(full_name, name):
                return matrix
        everything = torch.cat(list(self.reading.values()))
        # n matrices below each other have singular values √n times as large as one of them, if they
        # are alike: without the factor the added map would start that much larger.
        return everything / len(self.reading) ** 0.5


def _has_the_role(full_name: str, role: str) -> bool:
    """Whether a parameter's name says that it is the map `role`."""
    # The parameter is called `weight`, its module says what it is; of experts it is the parameter.
    parts = full_name.removesuffix(".weight").split(".")
    leaf = parts[-1]
    if role in {"query", "key", "value"}:
        # `query_key_value` and `qkv_proj` are all three, and no letter of one.
        is_fused = "qkv" in leaf or "key_value" in leaf
        return leaf.startswith(role[0]) and not is_fused
    other = {"gate": "up", "up": "gate"}[role]
    return role in leaf and other not in leaf


def matrices_of(module: nn.Module, input_size: int, output_size: int) -> BlockMatrices:
    """The matrices of a block that reads `input_size` channels and writes `output_size`."""
    # Each matrix twice: as it reads the input, [out, in], and as it writes the output, [out, in].
    # They differ for experts, which are put below each other in the one and side by side in the
    # other.
    maps: dict[str, tuple[Tensor, Tensor]] = {}
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        matrix = parameter.detach().float()
        if isinstance(owner, Conv1D) and matrix.dim() == 2:
            matrix = matrix.T  # GPT-2's linear map, stored [in, out]
        if matrix.dim() == 3:
            # Experts, [experts, out, in]; some types have [experts, in, out].
            if matrix.shape[2] != input_size and matrix.shape[1] == input_size:
                maps[name] = (stacked(matrix.transpose(1, 2), by_columns=False), matrix)
                continue
            if matrix.shape[1] != output_size and matrix.shape[2] == output_size:
                matrix = matrix.transpose(1, 2)
            maps[name] = (stacked(matrix, by_columns=False), stacked(matrix, by_columns=True))
        elif matrix.dim() == 2:
            maps[name] = (matrix, matrix)

    largest = max(as_input.numel() for as_input, _ in maps.values())
    writing_name = ""
    for name, (as_input, as_output) in maps.items():
        is_large = as_input.numel() >= _LEAST_PART * largest
        if is_large and as_output.dim() == 2 and as_output.shape[0] == output_size:
            writing_name = name  # the last in the order of definition
    reading: dict[str, Tensor] = {}
    for name, (as_input, _) in maps.items():
        is_large = as_input.numel() >= _LEAST_PART * largest
        if is_large and name != writing_name and as_input.shape[1] == input_size:
            reading[name] = as_input
    if not reading or not writing_name:
        # A block with maps of other shapes: random directions are as good a start as any.
        random = torch.eye(output_size, input_size)
        return BlockMatrices(reading or {"": random}, random)
    return BlockMatrices(reading, maps[writing_name][1])


def initial_hosted_expansion(
    model: HostedDecoder,
    whole_base: nn.Module,
    expansion_names: set[str],
    initialisers: Initialisers,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    """Each of `expansion_names` with its initial value in fp32.

    `model` gives the structure only (it may be on the meta device); `whole_base` has the values.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def read_base(name: str) -> Tensor:
        raise AssertionError(f"{name}: a hosted base has no names of ours")

    source = BlockSource(shapes, read_base, initialisers, seed)
    done: set[str] = set()
    if model.embedding is not None:
        for name, block in _blocks(model, whole_base, source):
            done.add(name)
            yield name, block
    for path, module in model.named_modules():
        if isinstance(module, LowRankAdapter):
            for name, block in blocks_of_module(path, module, source):
                done.add(name)
                yield name, block
    # All other blocks start at zero: W12, W_out^up, and what open tokens have of their own.
    for name in sorted(expansion_names - done):
        yield name, torch.zeros(shapes[name])


def _blocks(
    model: HostedDecoder, whole_base: nn.Module, source: BlockSource
) -> Iterator[tuple[str, Tensor]]:
    structure = model.spec.structure
    name = "embedding.expansion.weight"
    _, columns = source.shapes[name]
    embedding = whole_base.get_submodule(structure.embedding).get_parameter("weight").float()
    yield name, leading_columns(embedding, columns, seed=source.seed, name=name)

    for index, layer in enumerate(structure.layers):
        of_base = whole_base.get_submodule(structure.layer_name(layer))
        added = model.layers[index]
        for block_name, block in zip(block_names(layer.blocks), layer.blocks, strict=True):
            matrices = _matrices_of_block(of_base, block, structure.hidden_size)
            path = f"layers.{index}.{block_name}"
            for leaf, module in added.get_submodule(block_name).named_children():
                if isinstance(module, AddedColumnLinear):
                    base = matrices.map_for(leaf)
                elif isinstance(module, AddedRowLinear):
                    base = matrices.writing
                else:
                    continue
                yield from linear_blocks(f"{path}.{leaf}", module, base, source)

    yield from _gains(model, whole_base, source)


def _gains(
    model: HostedDecoder, whole_base: nn.Module, source: BlockSource
) -> Iterator[tuple[str, Tensor]]:
    """The gains of x_up's norms: x̂_up is as large as the x beside it, so that the maps of both
    streams, and W_out^up, see values on one scale."""
    scales = input_scales(whole_base, model.spec)
    for index, layer in enumerate(model.spec.structure.layers):
        for number, block_name in enumerate(block_names(layer.blocks)):
            name = f"layers.{index}.{block_name}.stream_norm.weight"
            yield name, torch.full(source.shapes[name], scales[index, number])
    name = "final_norm.weight"
    yield name, torch.full(source.shapes[name], scales[LAST])


def _matrices_of_block(layer: nn.Module, block: HostedBlock, size: int) -> BlockMatrices:
    module = layer.get_submodule(block.name)
    if block.input_module == block.name:
        return matrices_of(module, size, size)
    # Two linear maps without a module around them.
    both = nn.ModuleList([layer.get_submodule(block.input_module), module])
    return matrices_of(both, size, size)
