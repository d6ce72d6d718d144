"""When the expansion runs: from the first token on for which a gate opens.

In inference the base runs alone until then. A text for which the gate opens is computed again, with
the expansion, which from there on runs for all texts of the batch.

What a text leaves behind for this, its tokens and the gate's decisions, is a layer of its cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .configuration_scale import ScaleConfig
from .open_tokens import NONE_OPEN, OpenTokens
from .scale_caches import GateCache, TextCache, empty_like, lacks_expansion, layer_of, set_rows
from .scale_streams import StreamPath


class PassInputs(NamedTuple):
    """What a pass reads beside the embedded text."""

    tokens: Any
    """The tokens [B, S], or None where they are not known."""
    attention_mask: Any
    positions: Tensor
    cache: Any
    options: dict[str, Any]
    """For the attention function, such as a server's own cache."""
    may_wait: bool = False
    """Whether the host may read what the gate decided. A captured or compiled step must not."""

    def of(self, rows: Tensor, cache: Any) -> PassInputs:
        """The inputs of the sequences `rows`, with a `cache` of their own if there is one."""
        tokens = None if self.tokens is None else self.tokens[rows]
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        if self.cache is None:
            cache = None
        return PassInputs(tokens, mask, self.positions[rows], cache, self.options, self.may_wait)


class PathModel(Protocol):
    """What a ScaleForCausalLM has for this; its module imports this one."""

    config: ScaleConfig
    base_runs_alone: bool
    """Whether the base alone computes less than the model does of closed text."""

    def is_on_one_device(self) -> bool:
        """Whether all layers are on the same device."""

    def embedded(self, tokens: Tensor) -> StreamPath:
        """The streams of tokens [B, S] before the first layer."""

    def opens_by_id(self, tokens: Tensor | None, is_text: Tensor | None) -> Tensor | None:
        """For which tokens the gate opens whatever their score, [B, S, 1]; None: for none."""

    def run_paths(
        self,
        paths: list[StreamPath],
        inputs: PassInputs,
        recorded: dict[int, Any] | None = None,
        decided: Tensor | None = None,
    ) -> tuple[list[StreamPath], Tensor | None]:
        """The paths after the last layer, and for which tokens the gate opens, or `decided`."""


def run_from_open_on(
    model: PathModel, start: StreamPath, inputs: PassInputs, recorded: dict[int, Any] | None
) -> tuple[list[StreamPath], Tensor | None]:
    """`model.run_paths` of a pass, with the expansion or until then without.

    Raises:
        ValueError: the cache is of the base alone, and its text cannot be read again.
    """
    cache = inputs.cache
    can_read_again = recorded is None and _can_read_again(model, inputs)
    # A pass for gradients is the same whatever the gate decides.
    may_wait = can_read_again and not torch.is_grad_enabled()
    inputs = inputs._replace(may_wait=may_wait)
    # A cache that was filled without gradients may be of the base alone.
    lacks = lacks_expansion(cache)
    if can_read_again and (may_wait or lacks) and _waits_for_open(model, cache):
        return _from_open_on(model, start, inputs)
    if lacks:
        raise ValueError(
            "past_key_values: of the base alone, as its gate was shut; give the text from its start"
        )
    return model.run_paths([start], inputs, recorded)


def _can_read_again(model: PathModel, inputs: PassInputs) -> bool:
    """Whether the host may read what the gate decides, and a text can be run again: on one
    device, with a cache that grows, in no compiled or traced pass.
    """
    config = model.config
    if config.gate_layer is None or config.routed or inputs.tokens is None:
        return False
    # A server's own paged cache (`cache`, of continuous batching) has the heads of the whole
    # model, and holds texts that end before these tokens or go on behind them. Where attention
    # needs no mask (paged FlashAttention), nothing else tells that there is one.
    if "cache" in inputs.options:
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if config._attn_implementation == "flex_attention" or not model.is_on_one_device():
        return False
    mask = inputs.attention_mask
    is_padding = isinstance(mask, Tensor) and mask.dim() == 2
    if mask is not None and not is_padding:
        return False
    cache = inputs.cache
    if cache is None:
        return True
    known = {DynamicLayer, DynamicSlidingWindowLayer, GateCache, TextCache}
    is_known: bool = {type(layer) for layer in cache.layers} <= known and not cache.offloading
    return is_known


def _waits_for_open(model: PathModel, cache: Any) -> bool:
    """Whether sequences do without the expansion until the gate opens: where that saves
    anything, and their text can be run again.
    """
    if not model.base_runs_alone:
        return False
    # A longer text may have other frequencies: what is cached of it would be of the others.
    if any(spec["context"] is not None for spec in model.config.rotary):
        return False
    if cache is None:
        return True
    # A text of which some was read before its tokens were kept cannot be run again.
    length = 0
    for layer in cache.layers:
        if type(layer) is TextCache:
            length += layer.get_seq_length()
    is_whole: bool = length == cache.get_seq_length()
    return is_whole


def _from_open_on(
    model: PathModel, start: StreamPath, inputs: PassInputs
) -> tuple[list[StreamPath], Tensor | None]:
    """`run_paths` of the base alone until the gate opens for a sequence of the batch, then with the
    expansion.

    A sequence for which it opens is computed again from its start, all closed but the end. The
    past of the others has zeros for the expansion: closed tokens do not read it. Texts that are
    known to open by their ids run with the expansion at once.
    """
    inputs = inputs._replace(positions=inputs.positions.expand_as(inputs.tokens))
    cache = inputs.cache
    text = TextCache() if cache is None else layer_of(TextCache, cache.layers)
    before = text.opened(inputs.tokens)
    if text.get_seq_length() == 0 and _all_open_by_id(model, inputs):
        text.has_expansion = True
        before = torch.ones_like(before)
    if not text.has_expansion:
        start = StreamPath(start.x, None, open_tokens=NONE_OPEN)
    [path], opens = model.run_paths([start], inputs)
    assert opens is not None, "`_waits_for_open` has seen a gate"

    new_text = torch.stack([inputs.tokens, inputs.positions], dim=-1)
    whole, decided = text.update(new_text.unsqueeze(1), opens.unsqueeze(1))
    rows = opens.flatten(1).any(1) & ~before
    if not rows.any():
        return [path], opens

    # The sequences `rows` are computed again from their start, with the decisions that were
    # taken.
    own = empty_like(cache, model.config)
    text.has_expansion = True
    again = inputs._replace(tokens=whole[:, 0, :, 0], positions=whole[:, 0, :, 1])
    again = again.of(rows, own)
    again_start = model.embedded(again.tokens)
    [opened], _ = model.run_paths([again_start], again, decided=decided[rows, 0].bool())
    new = inputs.tokens.shape[1]
    opened = opened.at(slice(-new, None))
    if cache is not None:
        set_rows(cache, rows, own)
    if rows.all():
        return [opened._replace(open_tokens=OpenTokens(closed=~opens))], opens
    path.x[rows] = opened.x
    whole_up = path.x_up
    if opened.x_up is not None:
        if whole_up is None:
            whole_up = path.x.new_zeros(*path.x.shape[:2], model.config.expansion_hidden_size)
        whole_up[rows] = opened.x_up
    return [StreamPath(path.x, whole_up, open_tokens=OpenTokens(closed=~opens))], opens


def _all_open_by_id(model: PathModel, inputs: PassInputs) -> bool:
    """Whether each sequence has a token that is open whatever its score."""
    is_text = None
    if inputs.attention_mask is not None:
        is_text = inputs.attention_mask[:, -inputs.tokens.shape[1] :].bool()
    by_id = model.opens_by_id(inputs.tokens, is_text)
    return by_id is not None and bool(by_id.any(1).all())
