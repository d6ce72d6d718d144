"""A language model widened by SCALE, for `transformers`. It is shipped with the weights:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

A frozen base of width D has an expansion of width U: the residual stream is two tensors, `x` and
`x_up` (`scale_streams.py`). A routed model runs the layers above `l_fp` twice, with and without
expansion_to_base blocks, and takes per token the path that the router chooses (the paper's Eq. 5).

With a gate (`gate_layer` is not None) a probe on the base's own stream decides per token whether
the text is new. A closed token takes no expansion_to_base block and nothing of the expansion's
logits; a routed model gives it the path without those blocks, and an open one the other. Tokens
that the base does not have (from `base_vocab_size` on) are open, and none follows a closed token.
Ids that old text never has may be open too, whatever the probe says.

Open tokens may have weights of their own beside the base's, from layer `own_first_layer` on: see
`scale_streams.py`. Closed tokens and the base alone do not read them. A model trained by LoRA has
these alone, and no x_up.

Where the gate reads above the layer in which x may first differ from the base's, the layers between
run twice: the base alone, whose x the gate and closed tokens read, and beside it the model as if
all tokens were open. Each has heads of its own in the cache.

In inference the base runs alone until the gate first opens. Then the text for which it opens is
computed anew, with the expansion, which from there on runs for all texts of the batch. See
`ScaleForCausalLM._from_open_on`.

Shapes: B batch, S sequence, D hidden, U expansion, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import can_return_tuple

from .configuration_scale import ScaleConfig
from .open_tokens import ALL_OPEN, NONE_OPEN, OpenTokens, choose_path
from .scale_gate import (
    GateCache,
    ScaleGate,
    TextCache,
    empty_like,
    lacks_expansion,
    layer_of,
    set_rows,
    texts_of,
)
from .scale_layer import ScaleExpertLinear, ScaleLayer
from .scale_rotary import RotaryAngles, ScaleRotary
from .scale_streams import (
    ScaleEmbedding,
    ScaleLowRank,
    ScaleNorm,
    ScaleOutput,
    ScaleOwnInput,
    StreamPath,
)


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


class LastStreams(NamedTuple):
    """What the output projection reads, normalised."""

    paths: list[StreamPath]
    """One path; of a routed model without a gate the preserved and the adapted one."""
    closed: Tensor | None
    """Which tokens the gate has closed, bool [B, S, 1]; None: there is no gate."""


class ScaleBackbone(nn.Module):
    """The model without its output projection: what `base_model` is in other models of the library.

    Some trainers take hidden states from it, and `weight` of `get_output_embeddings()`, to make the
    logits of a few tokens at a time. It shares the model's modules, and is made anew where it is
    asked for.
    """

    # The library asks the backbone of any model for them.
    _tp_plan = _pp_plan = None

    def __init__(self, model: ScaleForCausalLM) -> None:
        super().__init__()
        for name, module in model.named_children():
            if module is not model.output:
                self.add_module(name, module)
        self.config = model.config
        # In a tuple, as the model is no part of its backbone.
        self._models = (model,)

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """`ScaleForCausalLM.forward` without logits: `last_hidden_state` [B, S, C] is what
        `ScaleOutput.hidden_states` makes of both streams.

        Raises ValueError: the logits are no product of one hidden state and one matrix.
        """
        [model] = self._models
        reason = model.config.backbone_unsupported_reason()
        if reason is not None:
            raise ValueError(
                f"this model has no backbone whose hidden states give its logits: {reason}; "
                "take the loss, or the logits, of model(input_ids, labels=labels), as "
                "transformers' Trainer does"
            )
        streams, cache, states = model.hidden_states(*args, **kwargs)
        last = model.output.hidden_states(streams.paths, streams.closed)
        return BaseModelOutputWithPast(
            last_hidden_state=last, past_key_values=cache, hidden_states=states
        )


class ScaleForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder-only language model widened by SCALE."""

    config_class = ScaleConfig
    base_model_prefix = ""
    _no_split_modules = ("ScaleLayer",)
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement = ("past_key_values",)
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ("token_gate",)
    _tied_weights_keys = {"output.base": "embedding.base.weight"}  # noqa: RUF012  # where the config ties them

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__(config)
        self.rotary = nn.ModuleList(ScaleRotary(spec) for spec in config.rotary)
        self.embedding = ScaleEmbedding(config)
        self.layers = nn.ModuleList(
            ScaleLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.final_norm = ScaleNorm(config, config.num_hidden_layers)
        self.output = ScaleOutput(config)
        self.own_input = ScaleOwnInput(config) if config.own_rows else None
        self.token_gate = None if config.gate_layer is None else ScaleGate(config)
        # Read once: an attribute of the library's configurations takes as long as a small kernel.
        self.stream_sizes = [config.hidden_size, config.expansion_hidden_size]
        self.embeds_base_alone = self.embedding.is_of_base_alone
        self.gate_layer = config.gate_layer
        self.own_first_layer = config.own_first_layer if config.own_rows else None
        self.first_routed = config.l_fp if config.routed else None
        self.first_twice = config.first_changed_layer if config.runs_twice_below_gate else None
        # Without an x_up, and with a gate below all that open tokens have of their own, the base
        # alone is what the model computes of closed text anyway.
        self.base_runs_alone = config.expansion_hidden_size > 0 or self.first_twice is not None
        self.post_init()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """The library's, which may quantise: by default all linear maps of the layers.

        It would also leave out all maps whose names end as that of a tied output (`output.base`).
        """
        quantization = kwargs.get("quantization_config")
        if quantization is not None:
            if isinstance(quantization, dict):
                quantization = AutoQuantizationConfig.from_dict(quantization)
            kwargs["quantization_config"] = with_own_skips(quantization)
        return super().from_pretrained(name, *args, **kwargs)

    @property
    def _supports_sdpa(self) -> bool:
        return self.config.attention_softcap is None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScaleRotary):
            module.fill()
        elif isinstance(module, (ScaleOutput, ScaleExpertLinear, ScaleLowRank, nn.ModuleDict)):
            # Their tensors are no modules of the library's, which it would initialise.
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, std=0.02)

    def get_input_embeddings(self) -> nn.Module:
        """It gives `inputs_embeds`: both streams [B, S, D + U].

        Where that is the base's embedding itself, it is the library's own module, which others know
        how to train.
        """
        if self.embeds_base_alone:
            return self.embedding.base
        return self.embedding

    @property
    def base_model(self) -> ScaleBackbone:
        """The model without its output projection."""
        return ScaleBackbone(self)

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection, whose `weight` is [V, C]; None where logits are no product of one
        matrix.
        """
        if self.config.backbone_unsupported_reason() is not None:
            return None
        return self.output

    def resize_token_embeddings(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("the vocabulary is extended before training, by scale-cpt vocabulary")

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """The library's, whose paged cache has the same heads in every layer."""
        reason = self.config.packing_unsupported_reason()
        if self.config.routed or self.config.runs_twice_below_gate:
            reason = "some layers have two sets of heads"
        if reason is not None:
            raise ValueError(f"continuous batching cannot run this model: {reason}")
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(  # noqa: PLR0913  # transformers calls it with these
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids, labels: [B, S]. Logits come for the last `logits_to_keep` tokens
        (0: all), or those.

        inputs_embeds: both streams [B, S, D + U], in place of input_ids; a gate judges each by its
        score. A model whose open tokens have rows of their own takes input_ids alone.

        Hidden states are such streams of the adapted path: before each layer, and after the last
        norm.
        """
        streams, past_key_values, states = self.hidden_states(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            logits_to_keep,
            inputs_embeds,
            output_hidden_states,
            **kwargs,
        )
        logits = self.output(streams.paths, streams.closed)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=states
        )

    def hidden_states(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple[LastStreams, Any, tuple[Tensor, ...] | None]:
        """What `output` reads (`streams`), the cache, and all hidden states if asked for.
        Arguments: `forward`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds")
        if kwargs.pop("output_attentions", None) or self.config.output_attentions:
            raise ValueError(
                "output_attentions: the weights of attention are not given, as base and expansion "
                "have heads side by side; leave it out"
            )
        if inputs_embeds is not None and self.own_input is not None:
            raise ValueError(
                "give input_ids: tokens that the gate opens have rows of their own, which "
                "inputs_embeds do not name"
            )
        embedded = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if type(past_key_values) is DynamicCache and not past_key_values.layers:
            # The layers of the model come before those of a gate.
            past_key_values.layers = DynamicCache(config=self.config).layers

        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        recorded: dict[int, Any] | None = None
        if output_hidden_states:
            recorded = dict.fromkeys(range(self.config.num_hidden_layers))
        streams = self.streams(
            embedded,
            attention_mask,
            position_ids,
            past_key_values,
            logits_to_keep,
            recorded,
            input_ids,
            **kwargs,
        )
        states = None
        if recorded is not None:
            states = tuple(_joined(path) for path in recorded.values())
        return streams, past_key_values, states

    def streams(
        self,
        embedded: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        recorded: dict[int, Any] | None = None,
        tokens: Tensor | None = None,
        **options: Any,
    ) -> LastStreams:
        """What `output` reads: one path or two, after the last norm and the gate.

        Arguments: `forward`. `recorded` receives the streams before the layers that it names, and
        the last; `tokens` [B, S] are those embedded, if known.
        """
        start = self._start(embedded)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            # Added, not given to arange: a cache of fixed size counts on the device, and arange
            # would wait for it.
            positions = torch.arange(embedded.shape[1], device=embedded.device) + seen
            position_ids = positions.unsqueeze(0)
        can_read_again = False
        # A server's own paged cache (`cache`, of continuous batching) has the heads of the whole
        # model, and holds texts that end before these tokens or go on behind them. Where attention
        # needs no mask (paged FlashAttention), nothing else tells that there is one.
        has_servers_cache = "cache" in options
        if tokens is not None and recorded is None and not has_servers_cache:
            can_read_again = self._can_read_again(attention_mask, past_key_values)
        # A pass for gradients is the same whatever the gate decides.
        may_wait = can_read_again and not torch.is_grad_enabled()
        inputs = PassInputs(
            tokens, attention_mask, position_ids, past_key_values, options, may_wait
        )

        # A cache that was filled without gradients may be of the base alone.
        lacks = lacks_expansion(past_key_values)
        if can_read_again and (may_wait or lacks) and self._waits_for_open(past_key_values):
            paths, opens = self._from_open_on(start, inputs)
        elif lacks:
            raise ValueError(
                "past_key_values: of the base alone, as its gate was shut; give the text from its "
                "start"
            )
        else:
            paths, opens = self._run([start], inputs, recorded)
        if recorded is not None:
            recorded[self.config.num_hidden_layers] = paths[-1].normed(self.final_norm)

        kept = kept_tokens(logits_to_keep)
        normed = []
        for path in paths:
            normed.append(path.at(kept).normed(self.final_norm))
        if opens is None:
            return LastStreams(normed, None)
        # A model without a router has one path, which is both.
        preserved = normed[0]
        adapted = normed[-1]
        closed = ~opens[:, kept].to(preserved.x.device)
        open_tokens = OpenTokens(closed=closed)
        x, x_up = choose_path(open_tokens, preserved[:2], adapted[:2])
        return LastStreams([adapted._replace(x=x, x_up=x_up)], closed)

    def _run(
        self,
        paths: list[StreamPath],
        inputs: PassInputs,
        recorded: dict[int, Any] | None = None,
        decided: Tensor | None = None,
    ) -> tuple[list[StreamPath], Tensor | None]:
        """The paths after the last layer, and for which tokens the gate opens [B, S, 1] if there is
        one, or `decided`.

        Ends at the gate where the base ran alone and it opens for all.
        """
        masks = inputs.attention_mask
        if not isinstance(masks, dict):  # a server's batches have their own
            masks = create_masks_for_generate(
                self.config, paths[0].x, masks, inputs.cache, inputs.positions
            )
        tables = [make_table(inputs.positions, paths[0].x.dtype) for make_table in self.rotary]
        # One path without open tokens: the base alone.
        is_base_alone = paths[0].open_tokens.none
        opens = None
        for index, layer in enumerate(self.layers):
            if recorded is not None and index in recorded:
                recorded[index] = paths[-1]
            if index == self.gate_layer:
                opens = self._opens(paths, inputs) if decided is None else decided
                if is_base_alone and opens.any(1).all():
                    return paths, opens
                paths = self._behind_gate(paths, opens, inputs.may_wait)
            if index == self.first_twice and not is_base_alone:
                paths = [StreamPath(paths[0].x, None, open_tokens=NONE_OPEN), paths[0]]
            if index == self.own_first_layer:
                paths[-1] = self._with_own_input(paths[-1], inputs.tokens)
            if index == self.first_routed:
                paths = [paths[0]._replace(open_tokens=NONE_OPEN), paths[0]]
            paths = self._layer_on_paths(layer, paths, tables, masks, inputs)
        if self.token_gate is not None and opens is None:
            opens = self._opens(paths, inputs) if decided is None else decided
            paths = self._behind_gate(paths, opens, inputs.may_wait)
        return paths, opens

    def _behind_gate(
        self, paths: list[StreamPath], opens: Tensor, may_wait: bool
    ) -> list[StreamPath]:
        """The paths from the gate on, of which closed tokens keep the base's x."""
        base = paths[0]
        model = paths[-1]
        is_base_alone = model.open_tokens.none
        if self.first_routed is not None or is_base_alone:
            return paths
        open_tokens = OpenTokens(closed=~opens)
        if may_wait:
            # Read once: each read makes the host wait for a GPU.
            opened = int(opens.count_nonzero())
            if opened == opens.numel():
                open_tokens = ALL_OPEN
            elif opened == 0:
                # What open tokens have of their own is not computed at all.
                open_tokens = NONE_OPEN
        if base is model:
            return [model._replace(open_tokens=open_tokens)]
        # The base and the model, which both ran below the gate, are joined. Closed tokens go on
        # without an x_up: beside the base's x, by which it would be normalised, it may be far too
        # large.
        x = torch.where(opens, model.x, base.x)
        x_up = model.x_up
        if x_up is not None:
            x_up = x_up.masked_fill(~opens, 0)
        return [StreamPath(x, x_up, open_tokens)]

    def _with_own_input(self, path: StreamPath, tokens: Tensor) -> StreamPath:
        """The path, in whose x open tokens [B, S] have added rows of their own; not where none is
        open, as where the base runs alone.
        """
        if path.open_tokens.none:
            return path
        assert self.own_input is not None, "`_run` has seen it"
        difference = self.own_input(tokens)
        # Over several devices, the rows may be on another than the layer before.
        x = path.x.to(difference.device)
        open_tokens = path.open_tokens.to(difference.device)
        return path._replace(x=open_tokens.choose(x, x + difference))

    def _layer_on_paths(
        self,
        layer: Any,
        paths: list[StreamPath],
        tables: list[RotaryAngles],
        masks: dict[str, Any],
        inputs: PassInputs,
    ) -> list[StreamPath]:
        """The paths after a layer."""
        streams: list[Tensor | None] = []
        for path in paths:
            streams += [path.x, path.x_up]
        table = layer.rotary_table
        results = layer(
            *streams,
            open_tokens=[path.open_tokens for path in paths],
            rotary=None if table is None else tables[table],
            mask=masks[layer.layer_type],
            past_key_values=inputs.cache,
            **inputs.options,
        )
        changed = []
        for path, x, x_up in zip(paths, results[::2], results[1::2], strict=True):
            changed.append(StreamPath(x, x_up, path.open_tokens))
        return changed

    def _can_read_again(self, attention_mask: Any, cache: Any) -> bool:
        """Whether the host may read what the gate decides, and a text can be run again: on one
        device, with a cache that grows, in no compiled or traced pass.
        """
        if self.gate_layer is None or self.first_routed is not None:
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return False
        if self.config._attn_implementation == "flex_attention":
            return False
        ends = {self.embedding.base.weight.device, self.final_norm.base.weight.device}
        places = set(getattr(self, "hf_device_map", {}).values())
        if len(ends) > 1 or len(places) > 1:
            return False
        is_padding = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        if attention_mask is not None and not is_padding:
            return False
        if cache is None:
            return True
        known = {DynamicLayer, DynamicSlidingWindowLayer, GateCache, TextCache}
        is_known: bool = {type(layer) for layer in cache.layers} <= known and not cache.offloading
        return is_known

    def _waits_for_open(self, cache: Any) -> bool:
        """Whether sequences do without the expansion until the gate opens: where that saves
        anything, and their text can be run again.
        """
        if not self.base_runs_alone:
            return False
        # A longer text may have other frequencies: what is cached of it would be of the others.
        if any(spec["context"] is not None for spec in self.config.rotary):
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
        self, start: StreamPath, inputs: PassInputs
    ) -> tuple[list[StreamPath], Tensor | None]:
        """`_run` of the base alone until the gate opens for a sequence of the batch, then with the
        expansion.

        A sequence for which it opens is computed again from its start, all closed but the end. The
        past of the others has zeros for the expansion: closed tokens do not read it. Texts that are
        known to open by their ids run with the expansion at once.
        """
        inputs = inputs._replace(positions=inputs.positions.expand_as(inputs.tokens))
        cache = inputs.cache
        text = TextCache() if cache is None else layer_of(TextCache, cache)
        before = text.opened(inputs.tokens)
        if text.get_seq_length() == 0 and self._all_open_by_id(inputs):
            text.has_expansion = True
            before = torch.ones_like(before)
        if not text.has_expansion:
            start = StreamPath(start.x, None, open_tokens=NONE_OPEN)
        [path], opens = self._run([start], inputs)
        assert opens is not None, "`_waits_for_open` has seen a gate"

        new_text = torch.stack([inputs.tokens, inputs.positions], dim=-1)
        whole, decided = text.update(new_text.unsqueeze(1), opens.unsqueeze(1))
        rows = opens.flatten(1).any(1) & ~before
        if not rows.any():
            return [path], opens

        # The sequences `rows` are computed again from their start, with the decisions that were
        # taken.
        own = empty_like(cache, self.config)
        text.has_expansion = True
        again = inputs._replace(tokens=whole[:, 0, :, 0], positions=whole[:, 0, :, 1])
        again = again.of(rows, own)
        again_start = self._start(self.embedding(again.tokens))
        [opened], _ = self._run([again_start], again, decided=decided[rows, 0].bool())
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
                whole_up = path.x.new_zeros(*path.x.shape[:2], self.config.expansion_hidden_size)
            whole_up[rows] = opened.x_up
        return [StreamPath(path.x, whole_up, open_tokens=OpenTokens(closed=~opens))], opens

    def _start(self, embedded: Tensor) -> StreamPath:
        """The streams before the first layer, of embedded tokens [B, S, D + U]."""
        x, x_up = embedded.split(self.stream_sizes, dim=-1)
        if x_up.shape[-1] == 0:
            return StreamPath(x, None)
        return StreamPath(x, x_up)

    def _opens(self, paths: list[StreamPath], inputs: PassInputs) -> Tensor:
        """For which tokens the gate opens [B, S, 1], on the path that no expansion_to_base block
        has changed.
        """
        assert self.token_gate is not None, "`_run` has seen a gate"
        x = paths[0].x
        is_text, documents = texts_of(x, inputs.attention_mask, inputs.positions, inputs.cache)
        stored: GateCache | None = None
        if inputs.cache is not None and self.token_gate.has_mean:
            stored = layer_of(GateCache, inputs.cache)
        opens: Tensor = self.token_gate(x, is_text, documents, stored)
        if is_text is not None:
            opens = opens & is_text.unsqueeze(-1).to(opens.device)
        by_id = self._opens_by_id(inputs.tokens, is_text)
        if by_id is not None:
            opens = opens | by_id.to(opens.device)
        return opens

    def _opens_by_id(self, tokens: Tensor | None, is_text: Tensor | None) -> Tensor | None:
        """For which tokens the gate opens whatever their score, [B, S, 1]: new tokens, and ids that
        are open by definition; None: for none.
        """
        assert self.token_gate is not None, "`_run` has seen a gate"
        if tokens is None:
            return None
        by_id = self.token_gate.opens_id(tokens)
        if by_id is not None and is_text is not None:
            by_id = by_id & is_text.unsqueeze(-1).to(by_id.device)
        if self.output.is_gated_vocabulary:
            is_new = (tokens >= self.output.base_columns).unsqueeze(-1)
            by_id = is_new if by_id is None else by_id.to(is_new.device) | is_new
        return by_id

    def _all_open_by_id(self, inputs: PassInputs) -> bool:
        """Whether each sequence has a token that is open whatever its score."""
        is_text = None
        if inputs.attention_mask is not None:
            is_text = inputs.attention_mask[:, -inputs.tokens.shape[1] :].bool()
        by_id = self._opens_by_id(inputs.tokens, is_text)
        return by_id is not None and bool(by_id.any(1).all())

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """A text that outgrows a context with other frequencies beyond it (longrope) is computed
        from its start.
        """
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        for spec in self.config.rotary:
            has_outgrown = (
                spec["long_frequencies"] is not None
                and 0 < seen <= spec["context"] < input_ids.shape[1]
            )
            if has_outgrown:
                past_key_values = None
                kwargs["next_sequence_length"] = None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The padding itself, which the gate reads too: `forward` makes the masks."""
        return attention_mask


def with_own_skips(quantization: Any) -> Any:
    """A quantisation of the library that leaves embedding and output as they are, and no other
    map, unless it names maps itself.
    """
    changed = copy.copy(quantization)
    for name in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if getattr(changed, name, ()) is None:
            # Patterns, as these names are ends of others.
            setattr(changed, name, ["^embedding", "^output"])
    return changed


def _joined(path: StreamPath) -> Tensor:
    """Both streams of a path side by side."""
    if path.x_up is None:
        return path.x
    return torch.cat([path.x, path.x_up], dim=-1)


def kept_tokens(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The argument `logits_to_keep` as an index: the last so many tokens (0: all), or the tokens
    that it names.
    """
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep or None, None)
    return logits_to_keep
