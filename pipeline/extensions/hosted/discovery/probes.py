"""Experiments that tell what a module of a decoder does, whatever its name is.

Each changes something in a recorded call and looks at what moves. They run on a tiny copy: they set
weights to zero for a moment, and call modules many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.extensions.hosted.discovery.recorded_calls import (
    Call,
    Calls,
    differs,
    has_token_rows,
    hooks,
    main_tensor,
    matrices,
    with_main_tensor,
)

Behaviour = Literal["residual", "mixer", "local", "not causal"]
# Other positions differ by rounding where experts multiply other groups of tokens.
_MIXING_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Batch:
    """The size of the probes' batch, and the position at which they change something."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.rows * self.length

    @property
    def changed(self) -> int:
        """The position at which a probe changes something."""
        return self.length // 2

    def by_token(self, values: Tensor) -> Tensor:
        """values: [B, S, E] or [B * S, E] -> [B, S, E]."""
        return values.view(self.rows, self.length, -1)

    def moved(self, found: Tensor, expected: Tensor) -> Tensor:
        """[S]: at which positions two outputs differ in any row."""
        at = differs(found, expected, _MIXING_TOLERANCE)
        return self.by_token(at).any(-1).any(0)


def behaviour(call: Call, batch: Batch) -> Behaviour:
    """What the module of `call` does with its input.

    - residual: with all its matrices at zero its output still depends on its input, because a
      connection leads past them. Such a module is no block; its blocks are inside.
    - mixer: a change at one token moves later tokens.
    - not causal: a change at one token moves earlier tokens.
    - local: a change at one token moves no other token.
    """
    torch.manual_seed(0)

    def changed_everywhere(values: Tensor) -> Tensor:
        return values + torch.randn_like(values)

    def changed_at_one_token(values: Tensor) -> Tensor:
        rows = batch.by_token(values)
        rows[:, batch.changed] += torch.randn_like(rows[:, batch.changed])
        return values

    with _zeroed(call.module):
        unchanged = call.again(_same, batch.tokens)
        if differs(call.again(changed_everywhere, batch.tokens), unchanged).any():
            return "residual"
    # Every argument with a row for each token is changed: keys may come from a second one, and a
    # residual that is handed in (Bloom) must not look like mixing.
    unchanged = call.again(_same, batch.tokens)
    changed = call.again(changed_at_one_token, batch.tokens, every_argument=True)
    moved = batch.moved(changed, unchanged)
    if moved[: batch.changed].any():
        return "not causal"
    if moved[batch.changed + 1 :].any():
        return "mixer"
    return "local"


@torch.no_grad()
def mixing_through_others(
    model: PreTrainedModel, inputs: Mapping[str, Any], modules: Sequence[nn.Module], calls: Calls
) -> list[bool]:
    """For each of `modules`, whether it mixes tokens through something other than its input.

    Attention to keys of another layer looks local: a change of its input moves no other position.
    Here the model runs with another embedding at one token, while each module is given its old
    arguments. An output that still moves elsewhere reads what is not among them.
    """
    batch = Batch(*inputs["input_ids"].shape)
    outputs: dict[nn.Module, Tensor] = {}

    def give_old_arguments(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A residual, and a router's choice of experts, are arguments too.
        old = calls[module][0]
        old_args = list(args)
        for index, value in enumerate(old.args):
            if has_token_rows(value, batch.tokens, integers=True):
                old_args[index] = value
        old_kwargs = dict(kwargs)
        for name, value in old.kwargs.items():
            if has_token_rows(value, batch.tokens, integers=True):
                old_kwargs[name] = value
        return tuple(old_args), old_kwargs

    def keep_output(module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        outputs[module] = main_tensor(result).clone()

    def change_one_token(_module: nn.Module, _args: tuple[Any, ...], embedded: Tensor) -> Tensor:
        torch.manual_seed(2)
        changed = embedded.clone()
        noise = torch.randn_like(changed[:, batch.changed])
        changed[:, batch.changed] += embedded.std() * noise
        return changed

    with hooks() as handles:
        for module in modules:
            handles.append(module.register_forward_pre_hook(give_old_arguments, with_kwargs=True))
            handles.append(module.register_forward_hook(keep_output))
        handles.append(model.get_input_embeddings().register_forward_hook(change_one_token))
        model(**inputs)
    found: list[bool] = []
    for module in modules:
        moved = batch.moved(outputs[module], calls[module][0].output)
        moved[batch.changed] = False
        found.append(bool(moved.any()))
    return found


@dataclass(frozen=True)
class Reach:
    """Where an addition to a block's output arrives.

    Attributes:
        inputs: the indices of the later blocks whose inputs change.
        output: whether the layer's output changes.
        additivity: the correlation of the addition with what arrives in the layer's output.
    """

    inputs: tuple[int, ...]
    output: bool
    additivity: float


@torch.no_grad()
def reach(layer: Call, blocks: Sequence[tuple[Call, Call]]) -> list[Reach]:
    """Adds noise to the output of each block within its layer, and looks at where it arrives.

    `blocks` are calls: of the module whose input is read, and of the one whose output is added to.
    """
    inputs: dict[int, Tensor] = {}

    def run(bumped: int | None) -> tuple[Tensor, dict[int, Tensor]]:
        inputs.clear()
        with hooks() as handles:
            for index, (entry, _) in enumerate(blocks):
                keep = _input_keeper(inputs, index, entry)
                handles.append(entry.module.register_forward_pre_hook(keep, with_kwargs=True))
            if bumped is not None:
                handles.append(blocks[bumped][1].module.register_forward_hook(_bump))
            args = [_clone(value) for value in layer.args]
            kwargs = {name: _clone(value) for name, value in layer.kwargs.items()}
            output = main_tensor(layer.module(*args, **kwargs))
        return output, dict(inputs)

    found: list[Reach] = []
    plain_output, plain_inputs = run(None)
    for index, (_, end) in enumerate(blocks):
        output, bumped_inputs = run(index)
        reached: list[int] = []
        for later in range(index + 1, len(blocks)):
            if differs(bumped_inputs[later], plain_inputs[later]).any():
                reached.append(later)
        arrived = output - plain_output
        found.append(
            Reach(
                inputs=tuple(reached),
                output=bool(differs(output, plain_output).any()),
                additivity=_likeness(_noise_like(end.output), arrived),
            )
        )
    return found


def _input_keeper(inputs: dict[int, Tensor], index: int, entry: Call) -> Any:  # a hook
    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(entry.argument, int):
            inputs[index] = args[entry.argument].clone()
        elif entry.argument is not None:
            inputs[index] = kwargs[entry.argument].clone()

    return keep


def _bump(_module: nn.Module, _args: tuple[Any, ...], result: Any) -> Any:
    tensor = main_tensor(result)
    return with_main_tensor(result, tensor + _noise_like(tensor))


def _noise_like(tensor: Tensor) -> Tensor:
    """The same noise for the same shape."""
    torch.manual_seed(1)
    return torch.randn_like(tensor)


def _likeness(added: Tensor, arrived: Tensor) -> float:
    """The correlation of what was added to a block's output with what arrived in the layer's.

    A layer may carry several streams: [n, B, S, D], [B, S, n, D] or [B, S, n * D]. The one with
    most of it counts.
    """
    added = added.flatten().float()
    arrived = torch.nan_to_num(arrived.float())
    best = 0.0
    for stream in _streams(arrived, added.numel()):
        if stream.numel() != added.numel():
            continue
        correlation = torch.corrcoef(torch.stack([added, stream.flatten()]))[0, 1].abs()
        best = max(best, float(torch.nan_to_num(correlation)))
    return best


def _streams(arrived: Tensor, size: int) -> Sequence[Tensor]:
    """The streams, of `size` elements each, of a layer's output."""
    count = arrived.numel() // size
    if count <= 1:
        return [arrived]
    if arrived.shape[0] == count:
        return arrived.unbind(0)
    if arrived.dim() == 3:
        arrived = arrived.unflatten(-1, (count, -1))
    return arrived.unbind(-2)


@contextmanager
def _zeroed(module: nn.Module) -> Iterator[None]:
    """Every matrix of the module is zero within the block."""
    kept = [(parameter, parameter.data.clone()) for parameter in matrices(module)]
    try:
        for parameter, _ in kept:
            parameter.data.zero_()
        yield
    finally:
        for parameter, values in kept:
            parameter.data.copy_(values)


def _same(values: Tensor) -> Tensor:
    return values


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
