"""One forward of a hosted base with the expansion beside it.

The base's modules pass x to each other as ever. The expansion stream x_up is no argument of theirs:
it lives in the `ForwardPass`, and the blocks of the expansion run in forward hooks of the base's
blocks:

    x_up of a block = x_up at the entry of the layer + y_up of the earlier blocks that it reads
    x_up of the next layer = x_up at the entry + y_up of all blocks of the layer

So a block depends on its own layer's entry alone, and a layer that the backward pass computes again
gets the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import BaseModelError
from pipeline.hosted.added_blocks import AddedLayer
from pipeline.hosted.structure import HostedBlock, HostedStructure
from pipeline.model.decoder_layer import Context


class LayerRun:
    """What the blocks of a layer share while it runs.

    Attributes:
        x_up: [B, S, U], the expansion stream at the entry of the layer.
        changes: y_up of the blocks that have run, by index.
        inputs: the input of blocks whose output comes from another module, by index.
    """

    def __init__(self, x_up: Tensor) -> None:
        self.x_up = x_up
        self.changes: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}

    def stream(self, blocks: Sequence[int]) -> Tensor:
        """x_up after the blocks of these indices."""
        x_up = self.x_up
        for block in blocks:
            x_up = x_up + self.changes[block]
        return x_up


class ForwardPass:
    """The expansion's side of one forward of the base.

    Attributes:
        x_up: [B, S, U], the stream that enters the next layer; at the end, that of the last layer.
        context: the rotary table and the attention kernel of the added heads.
        masked: whether W12 is skipped; as a mask [B, S, 1], for some of the tokens. A gate sets it
            while the pass runs.
        is_recomputed: whether the backward pass computes a layer again.
        layer: what the blocks of the running layer share.
    """

    def __init__(
        self,
        x_up: Tensor,
        context: Context,
        *,
        masked: bool,
        is_recomputed: Callable[[AddedLayer], bool],
    ) -> None:
        self.x_up = x_up
        self.context = context
        self.masked: bool | Tensor = masked
        self.is_recomputed = is_recomputed
        self.layer: LayerRun | None = None


class ExpansionHooks:
    """The hooks of a hosted base that run the expansion; without a running pass they do nothing.

    Attributes:
        running: the pass that runs. It is a plain attribute, because dynamo cannot trace a
            `ContextVar`.
    """

    def __init__(
        self, base: nn.Module, structure: HostedStructure, layers: Sequence[AddedLayer]
    ) -> None:
        self.running: ForwardPass | None = None
        for layer, added in zip(structure.layers, layers, strict=True):
            module = base.get_submodule(structure.layer_name(layer))
            self._replace_forward(module, added)
            for index, block in enumerate(layer.blocks):
                self._add_block_hooks(module, block, index, added)

    @contextmanager
    def run(self, forward_pass: ForwardPass | None) -> Iterator[None]:
        """Within it, the base's forward is that of `forward_pass`; None: the base runs alone."""
        before = self.running
        self.running = forward_pass
        try:
            yield
        finally:
            self.running = before

    def _replace_forward(self, module: nn.Module, added: AddedLayer) -> None:
        """Makes the forward of a layer of the base open and close its `LayerRun`.

        Not by hooks: recomputation needs a function around the layer's forward. Not by
        `gradient_checkpointing_enable` of transformers either: it works in training mode alone,
        which turns on dropout.
        """
        plain = module.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            current = self.running
            if current is None:
                return plain(*arguments, **options)

            def run(x_up: Tensor, *arguments: Any) -> tuple[Any, Tensor]:
                # Bound again where the backward pass recomputes: by then this pass is over, and
                # another one may be running.
                with self.run(current):
                    outer = current.layer
                    current.layer = LayerRun(x_up)
                    try:
                        output = plain(*arguments, **options)
                        return output, current.layer.stream(range(len(added.names)))
                    finally:
                        current.layer = outer

            if torch.is_grad_enabled() and current.is_recomputed(added):
                result = checkpoint(run, current.x_up, *arguments, use_reentrant=False)
            else:
                result = run(current.x_up, *arguments)
            output, current.x_up = result
            return output

        module.forward = forward

    def _add_block_hooks(
        self, layer: nn.Module, block: HostedBlock, index: int, added: AddedLayer
    ) -> None:
        is_span = block.input_module != block.name

        def keep_input(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if self.running is not None and self.running.layer is not None:
                self.running.layer.inputs[index] = argument_of(block, arguments, options)

        def after(
            _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
        ) -> Any:
            current = self.running
            if current is None or current.layer is None:
                return None
            if is_span:
                x = current.layer.inputs.pop(index)
            else:
                x = argument_of(block, arguments, options)
            y = output_of(block, output)
            if block.output_changed_in_place:
                # The layer later adds to this very tensor, which autograd keeps for W21.
                y = y.clone()
            changed = self._run_block(current, added, block, index, x, y)
            if changed is y and not block.output_changed_in_place:
                return None
            return with_output(block, output, changed)

        if is_span:
            entry = layer.get_submodule(block.input_module)
            entry.register_forward_pre_hook(keep_input, with_kwargs=True)
        layer.get_submodule(block.name).register_forward_hook(after, with_kwargs=True)

    def _run_block(
        self,
        current: ForwardPass,
        added: AddedLayer,
        block: HostedBlock,
        index: int,
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Runs the added block `index` of the running layer; returns the changed y."""
        layer = current.layer
        assert layer is not None, "a block runs within its layer"
        x_up = layer.stream(block.reads)
        rows = x_up.shape[:2]
        if x.shape[:-1].numel() != rows.numel():
            raise BaseModelError(
                f"{block.name}: ran on {x.shape[:-1].numel()} tokens, expected {rows.numel()}: the "
                "base skips positions, which a hosted base may not; use another base"
            )
        # Mixtures flatten the tokens to [B·S, D]; the added blocks take rows of text.
        y_rows = y.reshape(*rows, -1)
        new_y, y_up = added.block(index)(
            x.reshape(*rows, -1).to(x_up.dtype), x_up, y_rows, current.context, current.masked
        )
        layer.changes[index] = y_up
        if new_y is y_rows:
            return y  # without W12
        changed: Tensor = new_y.view(y.shape)
        return changed


def argument_of(block: HostedBlock, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The input of a block among the arguments of its module."""
    key = block.input_argument
    found: Tensor = arguments[key] if isinstance(key, int) else options[key]
    return found


def output_of(block: HostedBlock, output: Any) -> Tensor:
    """The tensor of a block's output that reaches the stream."""
    found: Tensor = output if block.output_index is None else output[block.output_index]
    return found


def with_output(block: HostedBlock, output: Any, changed: Tensor) -> Any:
    """`output` with `changed` in place of that tensor."""
    if block.output_index is None:
        return changed
    items = list(output)
    items[block.output_index] = changed
    if hasattr(output, "_fields"):  # a NamedTuple
        return type(output)(*items)
    return type(output)(items)
