"""The decoder layers of a tiny copy and their blocks, found by experiments.

In this order: branch or residual, mixer or FFN, keys shared with another layer, what reads what,
additivity.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import faults_of_library
from pipeline.extensions.hosted.discovery import probes
from pipeline.extensions.hosted.discovery.blocks import BATCH, FoundBlock, find_blocks, same_blocks
from pipeline.extensions.hosted.discovery.continued_text import Recording, record_continuations
from pipeline.extensions.hosted.discovery.maps_and_norms import (
    find_linear_maps,
    find_norms,
    last_norms,
    names_within,
)
from pipeline.extensions.hosted.discovery.recorded_calls import Call, Calls, matrices, record
from pipeline.extensions.hosted.discovery.tiny_copy import FIRST_SPECIAL_TOKEN
from pipeline.extensions.hosted.structure import (
    HIDDEN_STATES,
    HostedBlock,
    HostedLayer,
    UnsupportedStructureError,
)

SMALLEST_SHARE = 0.6
"""The least part of the layers' matrices that must be within blocks: otherwise something that was
not recognised does most of the work."""
SMALLEST_ADDITIVITY = 0.2
"""The least additivity of a block. Below it, an addition to the block's output goes through a map
of the base before it reaches the stream."""


class FoundLayers(NamedTuple):
    """The decoder layers of a model: the fields of `HostedStructure` of the same names."""

    layer_list: str
    layers: tuple[HostedLayer, ...]
    last_norms: tuple[str, ...]
    has_one_stream: bool


def find_layers(tiny: PreTrainedModel) -> FoundLayers:
    """Finds the list of layers, and the layers with their blocks.

    Raises:
        UnsupportedStructureError: they cannot be hosted.
    """
    ids = torch.arange(BATCH.tokens).view(BATCH.rows, BATCH.length) * 5
    inputs = {"input_ids": ids % (FIRST_SPECIAL_TOKEN - 20) + 20, "use_cache": False}
    what = f"{type(tiny).__name__} does not run on text alone"
    with faults_of_library(what, UnsupportedStructureError):
        calls = record(tiny, inputs)
    layer_list, called = _layer_list(tiny, calls)
    names = {module: name for name, module in tiny.named_modules()}
    stream = calls[next(iter(called.values()))][0].output
    _check_positions(tiny, stream)
    width = int(tiny.config.get_text_config().hidden_size)

    found: list[list[FoundBlock]] = []
    first_of_kind: dict[Hashable, int] = {}
    for index, layer in enumerate(called.values()):
        first = first_of_kind.setdefault(_layer_kind(layer), index)
        if first == index:
            found.append(find_blocks(layer, calls, width, names))
        else:
            found.append(same_blocks(found[first], list(called.values())[first], layer, calls))
    _find_shared_keys(tiny, inputs, calls, found)
    for index, (layer, blocks) in enumerate(zip(called.values(), found, strict=True)):
        _find_reach(calls[layer][0], blocks, names)
        found[index] = _without_gates(blocks)
    _check_blocks(tiny, calls, found, names)

    tokens = inputs["input_ids"]
    assert isinstance(tokens, Tensor), "every input of the tiny copy is one"
    recordings = [Recording(BATCH, calls), *record_continuations(tiny, tokens)]
    layers: list[HostedLayer] = []
    for (index, layer), blocks in zip(called.items(), found, strict=True):
        prefix = f"{layer_list}.{index}."
        layers.append(
            HostedLayer(
                index=index,
                module_class=type(layer).__name__,
                blocks=tuple(_record(block, names, prefix) for block in blocks),
                linear_maps=names_within(find_linear_maps(blocks, recordings), names, prefix),
                norms=names_within(find_norms(layer.modules(), recordings), names, prefix),
            )
        )
    after_layers = last_norms(tiny, recordings, list(called.values()))
    return FoundLayers(
        layer_list=layer_list,
        layers=_with_least_additivity(layers),
        last_norms=names_within(after_layers, names, ""),
        has_one_stream=tuple(stream.shape) == (BATCH.rows, BATCH.length, width),
    )


def _with_least_additivity(layers: list[HostedLayer]) -> tuple[HostedLayer, ...]:
    """Gives layers that differ in additivity alone the lowest of theirs, so that they are equal.

    The measured correlation differs a little from layer to layer, by their random weights.
    """
    least: dict[HostedLayer, list[float]] = {}
    for layer in layers:
        found = [block.additivity for block in layer.blocks]
        kind = _without_additivity(layer)
        before = least.setdefault(kind, found)
        least[kind] = [min(pair) for pair in zip(before, found, strict=True)]
    equal: list[HostedLayer] = []
    for layer in layers:
        blocks: list[HostedBlock] = []
        for block, additivity in zip(layer.blocks, least[_without_additivity(layer)], strict=True):
            blocks.append(replace(block, additivity=additivity))
        equal.append(replace(layer, blocks=tuple(blocks)))
    return tuple(equal)


def _without_additivity(layer: HostedLayer) -> HostedLayer:
    """What layers of one kind have in common."""
    blocks = tuple(replace(block, additivity=0.0) for block in layer.blocks)
    return replace(layer, index=0, blocks=blocks)


def _layer_list(tiny: nn.Module, calls: Calls) -> tuple[str, dict[int, nn.Module]]:
    """The name of the list that holds the decoder's layers, and its called layers by index.

    Its modules give what they get, in shape; of several such lists it is the one with most
    parameters.

    Raises:
        UnsupportedStructureError: there is none, or a layer is called several times.
    """
    best: tuple[str, dict[int, nn.Module]] | None = None
    most = 0
    for name, modules in tiny.named_modules():
        if not isinstance(modules, nn.ModuleList):
            continue
        called = {index: layer for index, layer in enumerate(modules) if layer in calls}
        if not called or 2 * len(called) <= len(modules):
            continue
        size = sum(parameter.numel() for parameter in modules.parameters())
        if size > most and all(_keeps_shape(calls[layer][0]) for layer in called.values()):
            best = (name, called)
            most = size
    if best is None:
        raise UnsupportedStructureError(
            f"{type(tiny).__name__}: no list of decoder layers, each of which gives a tensor of "
            "the shape that it gets"
        )
    times = max(len(calls[layer]) for layer in best[1].values())
    if times > 1:
        raise UnsupportedStructureError(
            f"{type(tiny).__name__}: its layers are called {times} times in one forward pass"
        )
    return best


def _keeps_shape(call: Call) -> bool:
    hidden: Any = call.args[0] if call.args else call.kwargs.get(HIDDEN_STATES)
    output = call.output
    if not isinstance(hidden, Tensor) or not isinstance(output, Tensor):
        return False
    return hidden.shape == output.shape and output.dim() >= 3


def _check_positions(tiny: PreTrainedModel, stream: Tensor) -> None:
    """Checks that the residual stream, or each of several, has the text's positions.

    Raises:
        UnsupportedStructureError: layers run on other positions than the text's.
    """
    text = (BATCH.rows, BATCH.length)
    shapes = [tuple(stream.shape[at : at + 2]) for at in range(stream.dim() - 2)]
    if text not in shapes:
        raise UnsupportedStructureError(
            f"{type(tiny).__name__}: its layers run on {list(stream.shape)} for a text of "
            f"{list(text)}: on other positions than the text's"
        )


def _layer_kind(layer: nn.Module) -> Hashable:
    """What layers have in common that were built alike: classes, shapes and plain attributes."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        attributes: list[tuple[str, Any]] = []
        for attribute, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str)) and attribute != "layer_idx":
                attributes.append((attribute, value))
        shapes = tuple(parameter.shape for parameter in module.parameters(recurse=False))
        parts.append((name, type(module), tuple(attributes), shapes))
    return tuple(parts)


def _find_shared_keys(
    tiny: PreTrainedModel, inputs: Mapping[str, Any], calls: Calls, found: list[list[FoundBlock]]
) -> None:
    """Corrects blocks that seem to treat each token alone but attend to another layer's keys."""
    local: list[FoundBlock] = []
    for blocks in found:
        local += [block for block in blocks if block.kind == "ffn" and block.entry is block.end]
    modules = [block.end.module for block in local]
    mixing = probes.mixing_through_others(tiny, inputs, modules, calls)
    for block, mixes in zip(local, mixing, strict=True):
        if mixes:
            block.kind = "mixer"
            block.shares_keys = True


def _find_reach(layer: Call, blocks: list[FoundBlock], names: Mapping[nn.Module, str]) -> None:
    """Fills in what the blocks of a layer read, and their additivity.

    Raises:
        UnsupportedStructureError: a block's output does not reach the layer's.
    """
    arrivals = probes.reach(layer, [(block.entry, block.end) for block in blocks])
    for index, (block, arrival) in enumerate(zip(blocks, arrivals, strict=True)):
        if not arrival.output:
            raise UnsupportedStructureError(
                f"{names[block.end.module]}: its output does not reach the output of its layer"
            )
        block.additivity = arrival.additivity
        for later in arrival.inputs:
            blocks[later].reads = (*blocks[later].reads, index)


def _without_gates(blocks: list[FoundBlock]) -> list[FoundBlock]:
    """The blocks but for gates: "FFNs" within a module with a residual, which do not add to the
    stream but scale it."""
    kept: dict[int, int] = {}
    for index, block in enumerate(blocks):
        is_gate = block.kind == "ffn" and block.additivity < SMALLEST_ADDITIVITY
        if not (is_gate and block.within_residual):
            kept[index] = len(kept)
    for block in blocks:
        block.reads = tuple(kept[index] for index in block.reads if index in kept)
    return [blocks[index] for index in kept]


def _check_blocks(
    tiny: PreTrainedModel,
    calls: Calls,
    found: list[list[FoundBlock]],
    names: Mapping[nn.Module, str],
) -> None:
    """Checks that blocks are what the model mainly consists of, and that one can add to them.

    Raises:
        UnsupportedStructureError: it is not so.
    """
    blocks = [block for of_layer in found for block in of_layer]
    if not any(block.kind == "mixer" for block in blocks):
        raise UnsupportedStructureError(f"{type(tiny).__name__}: no token mixer found")
    for block in blocks:
        if block.additivity < SMALLEST_ADDITIVITY:
            raise UnsupportedStructureError(
                f"{names[block.end.module]}: an addition to its output does not arrive as one in "
                f"its layer's output (additivity {block.additivity:.2f}, at least "
                f"{SMALLEST_ADDITIVITY})"
            )
    share = _share(tiny, calls, blocks)
    if share < SMALLEST_SHARE:
        raise UnsupportedStructureError(
            f"{type(tiny).__name__}: the blocks found hold {share:.0%} of the layers' matrices, at "
            f"least {SMALLEST_SHARE:.0%}"
        )


def _share(tiny: PreTrainedModel, calls: Calls, blocks: list[FoundBlock]) -> float:
    """The share of the matrices that lie within blocks.

    Only matrices that run for text count; embedding and output do not.
    """
    apart: set[int] = set()
    for end in (tiny.get_input_embeddings(), tiny.get_output_embeddings()):
        if end is not None:
            apart.add(id(end.weight))
    sizes: dict[int, int] = {}
    for module in calls:
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= 2 and id(parameter) not in apart:
                sizes[id(parameter)] = parameter.numel()
    held: set[int] = set()
    for block in blocks:
        for call in (block.entry, block.end):
            held.update(id(matrix) for matrix in matrices(call.module))
    within = sum(size for key, size in sizes.items() if key in held)
    return within / max(sum(sizes.values()), 1)


def _record(block: FoundBlock, names: Mapping[nn.Module, str], layer: str) -> HostedBlock:
    """The record of a block, with names within its layer.

    Raises:
        UnsupportedStructureError: it stands outside of its layer.
    """
    end = names[block.end.module]
    entry = names[block.entry.module]
    for name in (end, entry):
        if not name.startswith(layer):
            raise UnsupportedStructureError(f"{name} runs within {layer[:-1]} but stands outside")
    assert block.entry.argument is not None, "a block's input has a row for each token"
    output_index = None
    if isinstance(block.end.result, (tuple, list)):
        output_index = 0
    return HostedBlock(
        name=end.removeprefix(layer),
        module_class=type(block.end.module).__name__,
        kind=block.kind,
        input_module=entry.removeprefix(layer),
        input_argument=block.entry.argument,
        output_index=output_index,
        reads=block.reads,
        additivity=min(1.0, round(block.additivity, 2)),
        output_changed_in_place=block.end.was_written_to,
        shares_keys=block.shares_keys,
    )
