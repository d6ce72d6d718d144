"""Which linear maps and norms of a hosted base can have weights that open tokens alone read.

They are found in the calls that were recorded for the structure. A module counts if its input and
its output have a row for each token, so that the rows of closed tokens can stay as they are. In a
call that continues a cached text these are the tokens of that call alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.extensions.hosted.discovery.blocks import FoundBlock
from pipeline.extensions.hosted.discovery.continued_text import Recording
from pipeline.extensions.hosted.discovery.probes import Batch
from pipeline.extensions.hosted.discovery.recorded_calls import Call
from pipeline.extensions.hosted.transformers_model import linear_sizes


def find_linear_maps(
    blocks: Sequence[FoundBlock], recordings: Sequence[Recording]
) -> list[nn.Module]:
    """The linear maps within the blocks of a layer that take every token, in the order of their
    calls in the first recording.

    Left out are:

    - the maps of experts, which take some of the tokens;
    - routers, whose outputs are the experts' scores;
    - gates of one number for each token;
    - maps whose weights the base's code reads without calling them;
    - maps of cached states (Doge's `dt_proj`), which take the tokens of earlier calls too.
    """
    calls = recordings[0].calls
    found: dict[nn.Module, int] = {}
    for block in blocks:
        for entry in (block.entry.module, block.end.module):
            experts = _expert_counts(entry)
            for module in _outside_lists(entry):
                sizes = linear_sizes(module)
                if sizes is None or module not in calls:
                    continue
                is_router = min(sizes) == 1 or sizes[1] in experts
                if not is_router and _takes_every_token(module, recordings):
                    found[module] = calls[module][0].place
    return sorted(found, key=lambda module: found[module])


def find_norms(modules: Iterable[nn.Module], recordings: Sequence[Recording]) -> list[nn.Module]:
    """The norms with a gain among `modules`, in the order of their calls in the first recording.

    A norm is a module without parts, all of whose parameters are as wide as its input, and which
    gives what it gets in shape.
    """
    calls = recordings[0].calls
    found: dict[nn.Module, int] = {}
    for module in modules:
        if module not in calls or any(True for _ in module.children()):
            continue
        if isinstance(module, (nn.Linear, Conv1D)) or not _takes_every_token(module, recordings):
            continue
        call = calls[module][0]
        x = call.args[0]
        parameters = list(module.parameters())
        is_norm = call.output.shape == x.shape and len(parameters) > 0
        for parameter in parameters:
            is_norm = is_norm and 1 <= parameter.dim() <= 2
            is_norm = is_norm and parameter.shape == x.shape[x.dim() - parameter.dim() :]
        if is_norm:
            found[module] = call.place
    return sorted(found, key=lambda module: found[module])


def last_norms(
    tiny: nn.Module, recordings: Sequence[Recording], layers: Sequence[nn.Module]
) -> list[nn.Module]:
    """The norms that run after the last layer, in the order of their calls."""
    calls = recordings[0].calls
    within = {module for layer in layers for module in layer.modules()}
    end = max(calls[module][0].place for module in layers[-1].modules() if module in calls)
    later: list[nn.Module] = []
    for module in tiny.modules():
        if module in calls and module not in within and calls[module][0].place > end:
            later.append(module)
    return find_norms(later, recordings)


def names_within(
    modules: Iterable[nn.Module], names: Mapping[nn.Module, str], layer: str
) -> tuple[str, ...]:
    """The names of `modules` within a layer; `layer` is the layer's own name, with a dot."""
    return tuple(names[module].removeprefix(layer) for module in modules)


def _takes_every_token(module: nn.Module, recordings: Sequence[Recording]) -> bool:
    """Whether a module has a row for each token of the call, in every recording."""
    for recording in recordings:
        calls = recording.calls.get(module, [])
        if len(calls) != 1 or not _has_rows_at_both_ends(calls[0], recording.batch):
            return False
    return True


def _has_rows_at_both_ends(call: Call, batch: Batch) -> bool:
    """Whether a module takes one tensor and gives one, both with a row for each token.

    Rows are [B, S, ...] or [B * S, ...], in the order of the text.
    """
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) != 1 or not call.args or call.args[0] is not tensors[0]:
        return False
    if not isinstance(call.result, Tensor):
        return False
    return _has_rows(tensors[0], batch) and _has_rows(call.result, batch)


def _has_rows(tensor: Tensor, batch: Batch) -> bool:
    if not torch.is_floating_point(tensor):
        return False
    by_rows = tuple(tensor.shape[:2]) == (batch.rows, batch.length)
    return (by_rows and tensor.dim() >= 3) or (tensor.dim() == 2 and len(tensor) == batch.tokens)


def _expert_counts(block: nn.Module) -> set[int]:
    """How many experts each mixture within a block has; empty for a dense block."""
    counts: set[int] = set()
    for parameter in block.parameters():
        # Experts are stacked, [experts, out, in]. A depthwise convolution is [channels, 1, width].
        if parameter.dim() == 3 and min(parameter.shape) > 1:
            counts.add(len(parameter))
    for module in block.modules():
        if isinstance(module, nn.ModuleList):
            counts.add(len(module))
    return counts


def _outside_lists(module: nn.Module) -> Iterable[nn.Module]:
    """The module and its parts, without lists: they hold experts, of which a token takes some."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outside_lists(child)
