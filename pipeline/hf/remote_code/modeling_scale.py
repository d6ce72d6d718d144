"""A language model widened by SCALE, for `transformers`. It is shipped with the weights:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

A frozen base of width D has an expansion of width U: the residual stream is two tensors, `x` and `x_up`
(`scale_streams.py`). A routed model runs the layers above `l_fp` twice, with and without expansion_to_base blocks, and
takes per token the path that the router chooses (the paper's Eq. 5).

With a gate (`gate_layer` is not None) a probe on the base's own stream decides per token whether the text is new. A
closed token takes no expansion_to_base block and nothing of the expansion's logits; a routed model gives it the path
without those blocks, and an open one the other. Tokens that the base does not have (from `base_vocab_size` on) are
open, and none follows a closed token.

In inference the base runs alone until the gate first opens. Then the text for which it opens is computed anew, with the
expansion, which from there on runs for all texts of the batch. See `ScaleForCausalLM._from_open_on`.

Shapes: B batch, S sequence, D hidden, U expansion, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_scale import ScaleConfig
from .scale_attention import ScaleRotary
from .scale_cache import GateCache, TextCache, empty_like, lacks_expansion, layer_of, set_rows
from .scale_feed_forward import ExpertLinear
from .scale_gate import ScaleGate, texts_of
from .scale_layer import ScaleLayer
from .scale_streams import StreamPath, WidenedNorm
from .scale_vocabulary import ScaleEmbedding, ScaleOutput


class Inputs(NamedTuple):
    """Beside the embedded text, its tokens [B, S] if they are known, and what `forward` has been given."""

    tokens: Any
    attention_mask: Any
    positions: Tensor
    cache: Any
    options: dict[str, Any]
    """For the attention function, such as a server's own cache."""

    def of(self, rows: Tensor, cache: Any) -> Inputs:
        """Those of the sequences `rows`, with a `cache` of their own if there is one."""
        tokens, mask, positions = (None if part is None else part[rows] for part in self[:3])
        return Inputs(tokens, mask, positions, None if self.cache is None else cache, self.options)  # type: ignore[arg-type]


class ScaleBackbone(nn.Module):
    """The model without its output projection: what `base_model` is in other models of the library.

    Some trainers take hidden states from it, and `weight` of `get_output_embeddings()`, to make the logits of a few
    tokens at a time. It shares the model's modules, and is made anew where it is asked for.
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
        """`ScaleForCausalLM.forward` without logits: `last_hidden_state` is [x, x_up], [B, S, D + U].

        Raises ValueError: the logits are no product of one hidden state and one matrix.
        """
        [model] = self._models
        reason = model.config.why_no_single_head()
        if reason is not None:
            raise ValueError(
                f"this model has no backbone whose hidden states give its logits: {reason}; "
                "take the loss, or the logits, of model(input_ids, labels=labels), as transformers' Trainer does"
            )
        [path], cache, states = model.hidden_states(*args, **kwargs)
        x_up = path.x_up
        if len(x_up) == 0:  # the base ran alone
            x_up = x_up.new_zeros(*path.x.shape[:2], x_up.shape[-1])
        last = torch.cat([path.x, x_up], dim=-1)
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
        self.final_norm = WidenedNorm(config)
        self.output = ScaleOutput(config)
        self.token_gate = None if config.gate_layer is None else ScaleGate(config)
        self.post_init()

    @property
    def _supports_sdpa(self) -> bool:
        return self.config.attention_softcap is None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScaleRotary):
            module.fill()
        elif isinstance(
            module, (ScaleOutput, ExpertLinear, nn.ModuleDict)
        ):  # whose tensors are their own
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, std=0.02)

    def get_input_embeddings(self) -> nn.Module:
        """It gives `inputs_embeds`: both streams [B, S, D + U]."""
        return self.embedding

    @property
    def base_model(self) -> ScaleBackbone:
        """The model without its output projection."""
        return ScaleBackbone(self)

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection, whose `weight` is [V, D + U]; None where logits are no product of one matrix."""
        return self.output if self.config.why_no_single_head() is None else None

    def resize_token_embeddings(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("the vocabulary is extended before training, by scale-cpt vocabulary")

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """The library's, whose paged cache has the same heads in every layer."""
        reason = (
            "some layers have two sets of heads"
            if self.config.routed
            else self.config.why_not_packed()
        )
        if reason is not None:
            raise ValueError(f"continuous batching cannot run this model: {reason}")
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
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
        """input_ids, position_ids, labels: [B, S]. Logits come for the last `logits_to_keep` tokens (0: all), or those.

        inputs_embeds: both streams [B, S, D + U], in place of input_ids; a gate judges each by its score. Hidden states
        are such streams of the adapted path: before each layer, and after the last norm.
        """
        paths, past_key_values, states = self.hidden_states(
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
        logits = self.output(paths)
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
    ) -> tuple[list[StreamPath], Any, tuple[Tensor, ...] | None]:
        """What `output` reads (`streams`), the cache, and all hidden states if asked for. Arguments: `forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds")
        embedded = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if (self.config.use_cache if use_cache is None else use_cache) and past_key_values is None:
            past_key_values = DynamicCache()
        if type(past_key_values) is DynamicCache and not past_key_values.layers:
            past_key_values.layers = DynamicCache(
                config=self.config
            ).layers  # before those of a gate
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        layers = range(self.config.num_hidden_layers)
        recorded: dict[int, Any] | None = dict.fromkeys(layers) if output_hidden_states else None
        paths = self.streams(
            embedded,
            attention_mask,
            position_ids,
            past_key_values,
            logits_to_keep,
            recorded,
            input_ids,
            **kwargs,
        )
        states = (
            None
            if recorded is None
            else tuple(torch.cat(path[:2], dim=-1) for path in recorded.values())
        )
        return paths, past_key_values, states

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
    ) -> list[StreamPath]:
        """What `output` reads: one path or two, after the last norm and the gate.

        Arguments: `forward`. `recorded` receives the streams before the layers that it names, and the last; `tokens`
        [B, S] are those embedded, if known.
        """
        config = self.config
        start = self._start(embedded)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            # Added, not given to arange: a cache of fixed size counts on the device, and arange would wait for it.
            position_ids = (
                torch.arange(embedded.shape[1], device=embedded.device) + seen
            ).unsqueeze(0)
        inputs = Inputs(tokens, attention_mask, position_ids, past_key_values, options)
        if (
            tokens is not None
            and recorded is None
            and self._waits_for_open(attention_mask, past_key_values)
        ):
            paths, opens = self._from_open_on(start, inputs)
        elif lacks_expansion(past_key_values):
            raise ValueError(
                "past_key_values: of the base alone, as its gate was shut; give the text from its start"
            )
        else:
            paths, opens = self._run([start], inputs, recorded)
        if recorded is not None:
            recorded[config.num_hidden_layers] = paths[-1].normed(self.final_norm)
        kept = (
            slice(-logits_to_keep or None, None)
            if isinstance(logits_to_keep, int)
            else logits_to_keep
        )
        paths = [
            path._replace(x=path.x[:, kept], x_up=path.x_up[:, kept]).normed(self.final_norm)
            for path in paths
        ]
        if opens is None:
            return paths
        # Zeros in x_up add exactly nothing to the logits. One path is both.
        preserved, adapted, closed = paths[0], paths[-1], ~opens[:, kept].to(paths[0].x.device)
        up = adapted.x_up.masked_fill(closed, 0) if len(adapted.x_up) else adapted.x_up
        return [StreamPath(torch.where(closed, preserved.x, adapted.x), up)]

    def _run(
        self,
        paths: list[StreamPath],
        inputs: Inputs,
        recorded: dict[int, Any] | None = None,
        decided: Tensor | None = None,
    ) -> tuple[list[StreamPath], Tensor | None]:
        """The paths after the last layer, and for which tokens the gate opens [B, S, 1] if there is one, or `decided`.

        Ends at the gate where the base ran alone and it opens for all.
        """
        config = self.config
        _, masks, positions, cache, options = inputs
        if not isinstance(masks, dict):  # a server's batches have their own
            masks = create_masks_for_generate(config, paths[0].x, masks, cache, positions)
        tables = [make(positions, paths[0].x.dtype) for make in self.rotary]
        opens = None
        for index, layer in enumerate(self.layers):
            if recorded is not None and index in recorded:
                recorded[index] = paths[-1]
            if self.token_gate is not None and index == config.gate_layer:
                opens = self._opens(paths, inputs) if decided is None else decided
                if len(paths[0].x_up) == 0 and opens.any(1).all():
                    return paths, opens
                if not config.routed:
                    paths = [paths[0]._replace(masked=~opens)]
            if config.routed and index == config.l_fp:
                paths = [paths[0]._replace(masked=True), paths[0]]
            rotary = config.layer_rotary[index]
            streams = layer(
                *(stream for path in paths for stream in path[:2]),
                masked=[path.masked for path in paths],
                rotary=None if rotary is None else tables[rotary],
                mask=masks[config.layer_types[index]],
                past_key_values=cache,
                **options,
            )
            pairs = zip(paths, streams[::2], streams[1::2], strict=True)
            paths = [path._replace(x=x, x_up=x_up) for path, x, x_up in pairs]
        if self.token_gate is not None and opens is None:
            opens = self._opens(paths, inputs) if decided is None else decided
        return paths, opens

    def _waits_for_open(self, attention_mask: Any, cache: Any) -> bool:
        """Whether sequences may do without the expansion until the gate opens: where their text can be run again."""
        config = self.config
        if (
            config.gate_layer is None
            or config.routed
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or config._attn_implementation == "flex_attention"
            or len({part.base.weight.device for part in (self.embedding, self.final_norm)}) > 1
            or len(set(getattr(self, "hf_device_map", {}).values())) > 1
            or any(spec["context"] is not None for spec in config.rotary)
            or not (
                attention_mask is None
                or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2)
            )
        ):
            return False
        if cache is None:
            return True
        kinds = {type(layer) for layer in cache.layers}
        if (
            not kinds <= {DynamicLayer, DynamicSlidingWindowLayer, GateCache, TextCache}
            or cache.offloading
        ):
            return False
        length: int = sum(
            layer.get_seq_length() for layer in cache.layers if type(layer) is TextCache
        )
        return length == cache.get_seq_length()

    def _from_open_on(
        self, start: StreamPath, inputs: Inputs
    ) -> tuple[list[StreamPath], Tensor | None]:
        """`_run` of the base alone until the gate opens for a sequence of the batch, then with the expansion.

        A sequence for which it opens is computed again from its start, all closed but the end. The past of the others
        has zeros for the expansion: closed tokens do not read it.
        """
        inputs = inputs._replace(positions=inputs.positions.expand_as(inputs.tokens))
        tokens, _, positions, cache, _ = inputs
        text = TextCache() if cache is None else layer_of(TextCache, cache)
        before = text.opened(tokens)
        [path], opens = self._run(
            [start if text.has_expansion else start._replace(x_up=start.x_up[:0])], inputs
        )
        assert opens is not None, "`_waits_for_open` has seen a gate"
        new = (torch.stack([tokens, positions], dim=-1), opens)
        whole, decided = (part[:, 0] for part in text.update(*(part.unsqueeze(1) for part in new)))
        rows = text.opened(tokens) & ~before
        if not rows.any():
            return [path], opens
        own, text.has_expansion = empty_like(cache, self.config), True
        again = inputs._replace(tokens=whole[..., 0], positions=whole[..., 1]).of(rows, own)
        [opened], _ = self._run(
            [self._start(self.embedding(again.tokens))], again, decided=decided[rows].bool()
        )
        x, x_up = (stream[:, -opens.shape[1] :] for stream in opened[:2])
        if cache is not None:
            set_rows(cache, rows, own)
        if rows.all():
            return [StreamPath(x, x_up)], opens
        path = path if len(path.x_up) else path._replace(x_up=torch.zeros_like(start.x_up))
        path.x[rows], path.x_up[rows] = x, x_up
        return [path], opens

    def _start(self, embedded: Tensor) -> StreamPath:
        """The streams before the first layer, of embedded tokens [B, S, D + U]."""
        return StreamPath(
            *embedded.split([self.config.hidden_size, self.config.expansion_hidden_size], dim=-1)
        )

    def _opens(self, paths: list[StreamPath], inputs: Inputs) -> Tensor:
        """For which tokens the gate opens [B, S, 1], on the path that no expansion_to_base block has changed."""
        assert self.token_gate is not None, "`_run` has seen a gate"
        x, (tokens, attention_mask, positions, cache, _) = paths[0].x, inputs
        is_text, documents = texts_of(x, attention_mask, positions, cache)
        stored = (
            layer_of(GateCache, cache) if cache is not None and self.token_gate.has_mean else None
        )
        opens: Tensor = self.token_gate(x, is_text, documents, stored)
        if is_text is not None:
            opens = opens & is_text.unsqueeze(-1).to(opens.device)
        if tokens is not None and self.output.only_base_after_closed:
            opens = opens | (tokens >= self.output.of_base).unsqueeze(-1).to(opens.device)
        return opens

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """A text that outgrows a context with other frequencies beyond it (longrope) is computed from its start."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        contexts = [
            spec["context"] for spec in self.config.rotary if spec["long_frequencies"] is not None
        ]
        if any(0 < seen <= context < input_ids.shape[1] for context in contexts):
            past_key_values = kwargs["next_sequence_length"] = None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The padding itself, which the gate reads too: `forward` makes the masks."""
        return attention_mask
