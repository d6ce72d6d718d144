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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.added_blocks import AddedLayer
from pipeline.extensions.hosted.own_weights import OwnGains
from pipeline.extensions.hosted.structure import HIDDEN_STATES, HostedBlock, HostedStructure
from pipeline.model.decoder_layer import Context
from pipeline.model.open_weights import OwnInput
from pipeline.open_tokens import OpenTokens
from pipeline.parallel.layers import LowRankAdapter


class LayerRun:
    """What the blocks of a layer share while it runs.

    Attributes:
        x_up: [B, S, U], the expansion stream at the entry of the layer; None without an expansion.
        changes: y_up of the blocks that have run, by index.
        inputs: the input of blocks whose output comes from another module, by index.
        own: the names of the maps and norms that have run with open weights.
    """

    def __init__(self, x_up: Tensor | None) -> None:
        self.x_up = x_up
        self.changes: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.own: set[str] = set()

    def stream(self, blocks: Sequence[int]) -> Tensor | None:
        """x_up after the blocks of these indices."""
        x_up = self.x_up
        if x_up is None:
            return None
        for block in blocks:
            x_up = x_up + self.changes[block]
        return x_up


class ForwardPass:
    """The expansion's side of one forward of the base.

    Attributes:
        x_up: [B, S, U], the stream that enters the next layer; at the end, that of the last layer;
            None without an expansion.
        context: the rotary table and the attention kernel of the added heads.
        open_tokens: the tokens that read what is added. A gate sets it while the pass runs.
        is_recomputed: whether the backward pass computes a layer again.
        attending: within what it returns, layers of the base call the pass's attention.
        own_input: what open tokens add to x where weights of their own begin; None: nothing.
        layer: what the blocks of the running layer share.
    """

    def __init__(
        self,
        x_up: Tensor | None,
        context: Context,
        open_tokens: OpenTokens,
        *,
        is_recomputed: Callable[[AddedLayer], bool],
        attending: Callable[[], AbstractContextManager[None]],
        own_input: OwnInput | None = None,
    ) -> None:
        self.x_up = x_up
        self.context = context
        self.open_tokens = open_tokens
        self.is_recomputed = is_recomputed
        self.attending = attending
        self.own_input = own_input
        self.layer: LayerRun | None = None

    def own_has_run(self, name: str) -> None:
        """Notes that a map or norm of the running layer has run with weights of its own."""
        if self.layer is not None:  # else it is a norm after the last layer
            self.layer.own.add(name)


class ExpansionHooks:
    """The hooks of a hosted base that run the expansion; without a running pass they do nothing.

    Attributes:
        running: the pass that runs. It is a plain attribute, because dynamo cannot trace a
            `ContextVar`.
    """

    def __init__(
        self,
        base: nn.Module,
        structure: HostedStructure,
        layers: Sequence[AddedLayer],
        last_gains: Mapping[str, OwnGains],
    ) -> None:
        """`last_gains` are of norms after the last layer, by their names in `base`."""
        self.running: ForwardPass | None = None
        for layer, added in zip(structure.layers, layers, strict=True):
            module = base.get_submodule(structure.layer_name(layer))
            self._replace_forward(module, added)
            # Before the hooks of blocks: a block may be a linear map, and W12 adds to its result.
            for name, difference in added.low_rank.items():
                self._add_low_rank_hook(module.get_submodule(name), name, difference)
            for name, gains in added.gains.items():
                self._add_gain_hook(module.get_submodule(name), name, gains)
            for index, block in enumerate(layer.blocks[: len(added.names)]):
                self._add_block_hooks(module, block, index, added)
        for name, gains in last_gains.items():
            self._add_gain_hook(base.get_submodule(name), name, gains)

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
            arguments, options = _with_own_input(current, added, arguments, options)

            def run(x_up: Tensor | None, *arguments: Any) -> tuple[Any, Tensor | None]:
                # Bound again where the backward pass recomputes: by then this pass is over, and
                # another one may be running.
                with self.run(current), current.attending():
                    outer = current.layer
                    current.layer = LayerRun(x_up)
                    try:
                        output = plain(*arguments, **options)
                        _check_own(current, current.layer, added)
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

    def _add_low_rank_hook(self, module: nn.Module, name: str, difference: LowRankAdapter) -> None:
        """Makes a linear map of the base add the low-rank difference for open tokens."""

        def after(_: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor | None:
            current = self.running
            if current is None or current.open_tokens.none:
                return None
            current.own_has_run(name)
            return current.open_tokens.like(y).add(y, difference, arguments[0])

        module.register_forward_hook(after)

    def _add_gain_hook(self, norm: nn.Module, name: str, gains: OwnGains) -> None:
        """Makes a norm of the base use its changed gain for open tokens."""

        def after(_: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor | None:
            current = self.running
            if current is None or current.open_tokens.none:
                return None
            current.own_has_run(name)
            return current.open_tokens.like(y).choose(y, gains(norm, arguments))

        norm.register_forward_hook(after)

    def _add_block_hooks(
        self, layer: nn.Module, block: HostedBlock, index: int, added: AddedLayer
    ) -> None:
        # An FFN that is two linear maps without a module around them: x is the input of the first,
        # y the output of the second.
        is_two_maps = block.input_module != block.name

        def keep_input(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if self.running is not None and self.running.layer is not None:
                self.running.layer.inputs[index] = argument_of(block, arguments, options)

        def after(
            _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
        ) -> Any:
            current = self.running
            if current is None or current.layer is None:
                return None
            if is_two_maps:
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

        if is_two_maps:
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
        assert x_up is not None, "blocks are the expansion's"
        rows = x_up.shape[:2]
        if x.shape[:-1].numel() != rows.numel():
            raise BaseModelError(
                f"{block.name}: ran on {x.shape[:-1].numel()} tokens, expected {rows.numel()}: the "
                "base skips positions, which a hosted base may not; use another base"
            )
        # Mixtures flatten the tokens to [B·S, D]; the added blocks take rows of text.
        y_rows = y.reshape(*rows, -1)
        new_y, y_up = added.block(index)(
            x.reshape(*rows, -1).to(x_up.dtype), x_up, y_rows, current.context, current.open_tokens
        )
        layer.changes[index] = y_up
        if new_y is y_rows:
            return y  # without W12
        changed: Tensor = new_y.view(y.shape)
        return changed


def _with_own_input(
    current: ForwardPass, added: AddedLayer, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer of the base, with own rows in x where the layer is their first."""
    own = current.own_input
    if own is None or own.layer is not added or current.open_tokens.none:
        return arguments, options
    if arguments:
        return (own.added_to(arguments[0], current.open_tokens), *arguments[1:]), options
    x = own.added_to(options[HIDDEN_STATES], current.open_tokens)
    return arguments, {**options, HIDDEN_STATES: x}


def _check_own(current: ForwardPass, layer: LayerRun, added: AddedLayer) -> None:
    """Checks that every map and norm with open weights has run, with them, in a layer.

    Raises:
        BaseModelError: the base's code went another way than when its structure was found.
    """
    missing = {*added.low_rank, *added.gains} - layer.own
    if missing and not current.open_tokens.none:
        raise BaseModelError(
            f"layer {added.index}: {min(missing)} has open weights and was not called, as it was "
            "when the structure was found; another kernel of transformers reads its weights: "
            "remove that kernel's package, or method.low_rank and open_gains"
        )


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
