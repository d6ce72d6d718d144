"""The blocks of one decoder layer: its token mixers and FFNs, and how they are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from pipeline.extensions.hosted.discovery import probes
from pipeline.extensions.hosted.discovery.probes import Batch
from pipeline.extensions.hosted.discovery.recorded_calls import (
    Call,
    Calls,
    called_children,
    matrices,
)
from pipeline.extensions.hosted.structure import BlockKind, UnsupportedStructureError

BATCH = Batch(rows=2, length=12)
"""The size of the text on which the structure is found."""


@dataclass
class FoundBlock:
    """A block while it is being found.

    The fields without a description are fields of `HostedBlock`.

    Attributes:
        entry: the call whose input the added block reads.
        end: the call whose output is added to. It is `entry`, but for an FFN that is two linear
            maps without a module around them.
        within_residual: whether the block is inside a module with a residual connection of its own.
    """

    entry: Call
    end: Call
    kind: BlockKind
    within_residual: bool = False
    shares_keys: bool = False
    reads: tuple[int, ...] = ()
    additivity: float = 1.0


@dataclass
class _Collected:
    """What a walk through the modules of a layer collects: blocks, and linear maps outside them."""

    blocks: list[FoundBlock] = field(default_factory=list)
    linear_maps: list[Call] = field(default_factory=list)


def find_blocks(
    layer: nn.Module, calls: Calls, width: int, names: Mapping[nn.Module, str]
) -> list[FoundBlock]:
    """The blocks of a layer, in the order in which they run.

    Raises:
        UnsupportedStructureError: there are none, or one cannot be hosted.
    """
    collected = _Collected()
    _collect(layer, calls, width, names, collected)
    _add_bare_ffn(collected, width)
    if not collected.blocks:
        raise UnsupportedStructureError(
            f"{names[layer]} ({type(layer).__name__}): neither a token mixer nor an FFN found"
        )
    for block in collected.blocks:
        read = block.entry.hidden.shape[-1]
        if read != width:
            raise UnsupportedStructureError(
                f"{names[block.entry.module]}: reads {read} channels of a small model whose hidden "
                f"size is {width}; the expansion reads the hidden size"
            )
    return sorted(collected.blocks, key=lambda block: block.entry.place)


def same_blocks(
    blocks: list[FoundBlock], layer: nn.Module, other: nn.Module, calls: Calls
) -> list[FoundBlock]:
    """The blocks of the layer `other`, which is of the kind of `layer` with these `blocks`."""
    names = {module: name for name, module in layer.named_modules()}
    same: list[FoundBlock] = []
    for block in blocks:
        entry = calls[other.get_submodule(names[block.entry.module])][0]
        end = calls[other.get_submodule(names[block.end.module])][0]
        same.append(FoundBlock(entry, end, block.kind, block.within_residual))
    return same


def _collect(
    module: nn.Module,
    calls: Calls,
    width: int,
    names: Mapping[nn.Module, str],
    collected: _Collected,
    within_residual: bool = False,
) -> None:
    """Collects the blocks within `module`.

    A module is a block if it has a row for each token at both ends, at least two matrices, and the
    stream's width at its output. A module with a residual connection inside is no block: its blocks
    are inside, too.

    Raises:
        UnsupportedStructureError: a block is called several times, or is not causal.
    """
    for child in called_children(module, calls):
        if not matrices(child):
            continue
        call = calls[child][0]
        if not _treats_tokens(call):
            _collect(child, calls, width, names, collected, within_residual)
            continue
        if len(matrices(child)) >= 2 and call.output.shape[-1] == width:
            kind = _kind(child, calls, names)
            if kind is None:
                _collect(child, calls, width, names, collected, within_residual=True)
            else:
                collected.blocks.append(FoundBlock(call, call, kind, within_residual))
        elif any(True for _ in child.children()):
            _collect(child, calls, width, names, collected, within_residual)
        else:
            collected.linear_maps.append(call)


def _treats_tokens(call: Call) -> bool:
    """Whether a module has a row for each token in its input and in its output."""
    output = call.output
    if call.argument is None or not isinstance(output, Tensor):
        return False
    return output.is_floating_point() and output.shape[:-1].numel() == BATCH.tokens


def _kind(module: nn.Module, calls: Calls, names: Mapping[nn.Module, str]) -> BlockKind | None:
    """What kind of block a module is; None: it holds a residual connection.

    Raises:
        UnsupportedStructureError: it is called several times, or is not causal.
    """
    if len(calls[module]) != 1:
        raise UnsupportedStructureError(
            f"{names[module]} is called {len(calls[module])} times in one forward pass"
        )
    behaviour = probes.behaviour(calls[module][0], BATCH)
    if behaviour == "not causal":
        raise UnsupportedStructureError(
            f"{names[module]} is not causal: a change at token {BATCH.changed} moved an earlier one"
        )
    if behaviour == "residual":
        return None
    return "mixer" if behaviour == "mixer" else "ffn"


def _add_bare_ffn(collected: _Collected, width: int) -> None:
    """Adds an FFN that is two linear maps in the layer's own code, as in BART and OPT."""
    if any(block.kind == "ffn" for block in collected.blocks):
        return
    for first, second in zip(collected.linear_maps, collected.linear_maps[1:], strict=False):
        inner = first.output.shape[-1]
        is_of_stream = first.hidden.shape[-1] == width and second.output.shape[-1] == width
        are_joined = second.hidden.shape[-1] == inner
        if is_of_stream and are_joined and inner != width:
            collected.blocks.append(FoundBlock(first, second, "ffn"))
