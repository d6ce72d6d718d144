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

In inference the base runs alone until the gate first opens: see `scale_from_open_on.py`.

Shapes: B batch, S sequence, D hidden, U expansion, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_scale import ScaleConfig
from .open_tokens import ALL_OPEN, NONE_OPEN, OpenTokens, choose_path
from .scale_from_open_on import PassInputs, run_from_open_on
from .scale_gate import ScaleGate, texts_of
from .scale_layer import ScaleExpertLinear, ScaleLayer
from .scale_longrope import RereadsOutgrown, longrope_contexts
from .scale_open_weights import ScaleLowRank, ScaleOwnInput
from .scale_quantization import with_skips
from .scale_rotary import RotaryAngles, ScaleRotary
from .scale_streams import ScaleEmbedding, ScaleNorm, ScaleOutput, StreamPath
from .scale_vocabulary_size import FixedVocabulary


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


class ScaleForCausalLM(
    FixedVocabulary,
    RereadsOutgrown,
    PreTrainedModel,  # type: ignore[misc]
    GenerationMixin,  # type: ignore[misc]
):
    """A decoder-only language model widened by SCALE."""

    config_class = ScaleConfig
    vocabulary_reason = "the vocabulary is extended before training, by scale-cpt vocabulary"
    frequencies_by_row = True
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
        self.frequency_contexts = longrope_contexts(config)
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
        kwargs = with_skips(kwargs, ("embedding", "output"))
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

    def needs_ids_reason(self) -> str | None:
        """Why a text's ids are read beside its embedding; None: they are not."""
        if self.own_input is not None:
            return "tokens that the gate opens have rows of their own"
        if self.token_gate is not None and self.token_gate.is_open_id is not None:
            return "the gate opens some tokens by their ids"
        if self.output.is_gated_vocabulary:
            return "the gate opens the tokens of an extended vocabulary by their ids"
        return None

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
        score. A model that reads ids too takes input_ids alone: see `needs_ids_reason`.

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
        if inputs_embeds is not None:
            reason = self.needs_ids_reason()
            if reason is not None:
                raise ValueError(f"give input_ids: {reason}, which inputs_embeds do not name")
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
        start = self.start(embedded)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            # Added, not given to arange: a cache of fixed size counts on the device, and arange
            # would wait for it.
            positions = torch.arange(embedded.shape[1], device=embedded.device) + seen
            position_ids = positions.unsqueeze(0)
        inputs = PassInputs(tokens, attention_mask, position_ids, past_key_values, options)
        paths, opens = run_from_open_on(self, start, inputs, recorded)
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

    def run_paths(
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
        dtype = torch.float32 if self.config.rounds_once else paths[0].x.dtype
        tables = [make_table(inputs.positions, dtype) for make_table in self.rotary]
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
        assert self.own_input is not None, "`run_paths` has seen it"
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

    def is_on_one_device(self) -> bool:
        """Whether all layers are on the same device."""
        ends = {self.embedding.base.weight.device, self.final_norm.base.weight.device}
        places = set(getattr(self, "hf_device_map", {}).values())
        return len(ends) == 1 and len(places) <= 1

    def embedded(self, tokens: Tensor) -> StreamPath:
        """The streams of tokens [B, S] before the first layer."""
        return self.start(self.embedding(tokens))

    def start(self, embedded: Tensor) -> StreamPath:
        """The streams before the first layer, of embedded tokens [B, S, D + U]."""
        x, x_up = embedded.split(self.stream_sizes, dim=-1)
        if x_up.shape[-1] == 0:
            return StreamPath(x, None)
        return StreamPath(x, x_up)

    def _opens(self, paths: list[StreamPath], inputs: PassInputs) -> Tensor:
        """For which tokens the gate opens [B, S, 1], on the path that no expansion_to_base block
        has changed.
        """
        assert self.token_gate is not None, "`run_paths` has seen a gate"
        x = paths[0].x
        is_text, documents = texts_of(x, inputs.attention_mask, inputs.positions, inputs.cache)
        layers = None if inputs.cache is None else inputs.cache.layers
        by_id = self.opens_by_id(inputs.tokens, is_text)
        opens: Tensor = self.token_gate.decide(x, is_text, documents, layers, by_id)
        return opens

    def opens_by_id(self, tokens: Tensor | None, is_text: Tensor | None) -> Tensor | None:
        """For which tokens the gate opens whatever their score, [B, S, 1]: new tokens, and ids that
        are open by definition; None: for none.
        """
        assert self.token_gate is not None, "`run_paths` has seen a gate"
        if tokens is None:
            return None
        by_id: Tensor | None = self.token_gate.opens_id(tokens, is_text)
        if self.output.is_gated_vocabulary:
            is_new = (tokens >= self.output.base_columns).unsqueeze(-1)
            by_id = is_new if by_id is None else by_id.to(is_new.device) | is_new
        return by_id

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The padding itself, which the gate reads too: `forward` makes the masks."""
        return attention_mask


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
