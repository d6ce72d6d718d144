"""A base that transformers computes, widened by SCALE: the base's own class, and beside its blocks
the expansion, in forward hooks.

`forward` and `generate` are the base's own, with its caches, beams and masks.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedModel

from .configuration_scale_hosted import HostedScaleConfig
from .open_tokens import ALL_OPEN, OpenTokens
from .scale_caches import layer_of
from .scale_gate import ScaleGate, texts_of
from .scale_hosted_blocks import (
    HostedAttention,
    HostedFeedForward,
    HostedInputs,
    HostedNorm,
)
from .scale_hosted_cache import AddedKeys, AddedText, given_back, given_cache, taken_from
from .scale_hosted_own import low_rank_differences, own_gains
from .scale_math import own_row_logits
from .scale_open_weights import ScaleOwnInput, own_row_table
from .scale_quantization import with_skips
from .scale_rotary import ScaleRotary
from .scale_vocabulary_size import FixedVocabulary

# Arguments of `from_pretrained` that say where the files of a model are.
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class HostedEmbedding(nn.Module):
    """The first x_up of each token, [V, U]."""

    def __init__(self, config: HostedScaleConfig) -> None:
        super().__init__()
        self.expansion = nn.Embedding(config.vocab_size, config.expansion_hidden_size)


class HostedOutput(nn.Module):
    """W_out^up, [V, U], and the own output rows of open tokens, [r, D], each if there is one."""

    row_of_token: Tensor

    def __init__(self, config: HostedScaleConfig) -> None:
        super().__init__()
        self.expansion: nn.Parameter | None = None
        if config.expansion_hidden_size:
            shape = (config.vocab_size, config.expansion_hidden_size)
            self.expansion = nn.Parameter(torch.zeros(shape))
        self.own_rows: nn.Parameter | None = None
        if config.own_rows:
            self.own_rows = nn.Parameter(torch.zeros(config.own_rows, config.hidden_size))
            self.register_buffer("row_of_token", own_row_table(config))

    def added_to(self, logits: Tensor, x: Tensor, x_up: Tensor | None) -> Tensor:
        """The logits of open tokens, [B, n, V]: x: [B, n, D], x_up: [B, n, U]."""
        if x_up is not None and self.expansion is not None:
            logits = logits + F.linear(x_up, self.expansion).to(logits.dtype)
        if self.own_rows is not None:
            change = own_row_logits(x, self.own_rows, self.row_of_token)
            logits = logits + change.to(logits.dtype)
        return logits


class HostedLayer(nn.Module):
    """The added blocks of a layer, by the names in its structure, and what its maps and norms have
    that only open tokens read: `adapter` and `own`, by the names in the base's layer."""

    def __init__(
        self, config: HostedScaleConfig, index: int, layer: dict[str, Any], of_base: nn.Module
    ) -> None:
        super().__init__()
        for block in layer["blocks"]:
            kind = HostedAttention if block["kind"] == "mixer" else HostedFeedForward
            self.add_module(block["added"], kind(config, index))
        self.adapter = low_rank_differences(config, of_base, layer.get("linear_maps", []))
        self.own = own_gains(of_base, layer.get("norms", []))


class HostedPass:
    """The expansion's side of one forward of the base.

    Attributes:
        x_up: [B, S, U], the stream at the entry of the running layer; None without an expansion.
        changes: y_up of the blocks of this layer that have run, by index.
        kept_inputs: the inputs of blocks whose output comes from another module, by index.
        open_tokens: the tokens for which anything is added to the base; all, until the gate has
            decided.
        cache: the base's cache, as this forward got it; None: it got none.
        added: the added layers of that cache, which are out of it while the base runs; None: this
            forward caches nothing.
    """

    def __init__(
        self,
        x_up: Tensor | None,
        inputs: HostedInputs,
        call: dict[str, Any],
        cache: Any,
        added: list[Any] | None,
    ) -> None:
        self.x_up = x_up
        self.inputs = inputs
        self.call = call
        self.changes: dict[int, Tensor] = {}
        self.kept_inputs: dict[int, Tensor] = {}
        self.open_tokens = ALL_OPEN
        self.cache = cache
        self.added = added

    def keys_of(self, place: tuple[int, int]) -> AddedKeys | None:
        """The cached keys and values of an added attention."""
        if self.added is None:
            return None
        for layer in self.added:
            if isinstance(layer, AddedKeys) and layer.place == place:
                return layer
        keys = AddedKeys()
        keys.place = place
        self.added.append(keys)
        return keys


def _rotary_of(config: HostedScaleConfig) -> dict[str, Any]:
    """The rotary embedding of the added heads, as a ScaleRotary reads it."""
    return {
        "frequencies": config.frequencies,
        "long_frequencies": None,
        "context": None,
        "attention_factor": 1.0,
    }


def padding_itself(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """In place of the library's `create_masks_for_generate`: the base's forward makes its masks."""
    return attention_mask


def check_padding(attention_mask: Any) -> None:
    """Raises ValueError: an attention mask that does not just say which tokens are padding."""
    if attention_mask is None:
        return
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return
    raise ValueError(
        "attention_mask: expected [B, T], 1 for text and 0 for padding, found a mask of pairs of "
        "tokens, from which added attention cannot tell padding; documents in a row are told by "
        "position_ids that begin again"
    )


class NoBackbone(nn.Module):
    """In place of the model without its output projection, for trainers that ask for hidden
    states."""

    # The library asks the backbone of any model for them.
    _tp_plan = _pp_plan = None

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ValueError: the base's own code makes the logits."""
        raise ValueError(
            "this model has no backbone whose hidden states give its logits: they are made by the "
            "code of its base in transformers; take the loss, or the logits, of "
            "model(input_ids, labels=labels), as transformers' Trainer does"
        )


class HostedScaleForCausalLM(FixedVocabulary, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A base of transformers with SCALE's expansion or LoRA's adapters; `base` is the former."""

    config_class = HostedScaleConfig
    vocabulary_reason = "what was added belongs to the vocabulary of its base"
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _skip_keys_device_placement = ("past_key_values",)
    _keep_in_fp32_modules_strict = ("token_gate",)

    def __init__(self, config: HostedScaleConfig) -> None:
        # What was asked for: `super` puts its default in the place of None.
        attention = config._attn_implementation
        super().__init__(config)
        self.base = self._base_of(config, attention)
        # The base may lack the default, which this configuration would ask for when used again.
        config._attn_implementation = self.base.config._attn_implementation
        # Added attention reads which tokens are padding. Masks of all pairs, which `generate` makes
        # for a static cache, do not tell it where they are those of sliding windows.
        self.base.create_masks_for_generate = padding_itself
        self.rotary = ScaleRotary(_rotary_of(config))
        self.embedding = None
        self.final_norm = None
        if config.expansion_hidden_size:
            self.embedding = HostedEmbedding(config)
            self.final_norm = HostedNorm(config.expansion_hidden_size, config.norm_eps)
        self.layers = nn.ModuleList()
        for index, layer in enumerate(config.structure["layers"]):
            of_base = self.base.get_submodule(layer["name"])
            self.layers.append(HostedLayer(config, index, layer, of_base))
        self.output = HostedOutput(config)
        self.own = own_gains(self.base, config.structure.get("last_norms", []))
        self.own_input = ScaleOwnInput(config) if config.own_rows else None
        self.token_gate = None if config.gate_layer is None else ScaleGate(config)
        self._running: HostedPass | None = None
        self._base_arguments = tuple(inspect.signature(self.base.forward).parameters)
        self._add_hooks()
        self.post_init()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """The library's, which may quantise: by default all linear maps but that of the logits.

        It would know the latter by `get_output_embeddings`, or where it is tied.
        """
        if kwargs.get("quantization_config") is not None:
            config = kwargs.get("config")
            if not isinstance(config, HostedScaleConfig):
                options = {key: kwargs[key] for key in _OF_FILES if key in kwargs}
                config = HostedScaleConfig.from_pretrained(config or name, **options)
            kwargs = with_skips(kwargs, (f"base.{config.structure['output']}",))
        return super().from_pretrained(name, *args, **kwargs)

    @staticmethod
    def _base_of(config: HostedScaleConfig, attention: str | None) -> PreTrainedModel:
        """The base without values; it refuses an `attention` that it lacks, None: its default."""
        values = dict(config.base_config)
        base_class = getattr(transformers, config.base_class)
        base_config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        # As training chose it. A class may name another configuration than it takes (GLM-4.6V's),
        # and is then no class of the text part.
        if base_config.sub_configs.get("text_config") == base_class.config_class:
            base_config = base_config.get_text_config()
        options = {}
        if attention is not None:
            options["attn_implementation"] = attention
        return base_class._from_config(base_config, dtype=torch.get_default_dtype(), **options)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScaleRotary):
            module.fill()

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    @property
    def base_model(self) -> NoBackbone:
        """What refuses to give hidden states."""
        return NoBackbone()

    def get_output_embeddings(self) -> None:
        """None: logits are no product of one matrix."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the base's own forward; `labels` get the library's loss of causal models.

        With `return_dict=False` the outputs come as a tuple, the loss first.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            # The hooks read the base's output by name.
            "return_dict": True,
            **kwargs,
        }
        call = {name: value for name, value in given.items() if value is not None}
        # Trainer's count of the labels in all micro-batches: the loss alone divides by it.
        call.pop("num_items_in_batch", None)
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            call["logits_to_keep"] = logits_to_keep
        output = self.base(**call)
        of_base = output.to_tuple()
        if labels is not None:
            output.loss = self.loss_function(
                logits=output.logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
            # A field that was None stands last otherwise, and `output[0]` would be the logits.
            output.move_to_end("loss", last=False)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        if return_dict:
            return output
        return of_base if labels is None else (output.loss, *of_base)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The base's own `generate`, whose forward runs the expansion."""
        self.base.generation_config = self.generation_config
        return self.base.generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.prepare_inputs_for_generation(*args, **kwargs)

    # Hooks are bound methods and partials of them, which a copy of the model makes its own.

    def _add_hooks(self) -> None:
        structure = self.config.structure
        self.base.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.base.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        output = self.base.get_submodule(structure["output"])
        output.register_forward_hook(self._add_logits)
        for index, layer in enumerate(structure["layers"]):
            module = self.base.get_submodule(layer["name"])
            module.register_forward_pre_hook(partial(self._enter_layer, index), with_kwargs=True)
            module.register_forward_hook(partial(self._leave_layer, index))
            # Before the hooks of blocks: a block may be a linear map, and W12 adds to its result.
            for name in layer.get("linear_maps", []):
                linear = module.get_submodule(name)
                linear.register_forward_hook(partial(self._add_difference, index, name))
            for name in layer.get("norms", []):
                norm = module.get_submodule(name)
                norm.register_forward_hook(partial(self._change_gain, index, name))
            for number, block in enumerate(layer["blocks"]):
                place = (index, number)
                if block["input_module"] != block["name"]:
                    entry = module.get_submodule(block["input_module"])
                    entry.register_forward_pre_hook(
                        partial(self._keep_input, place), with_kwargs=True
                    )
                module.get_submodule(block["name"]).register_forward_hook(
                    partial(self._run_block, place), with_kwargs=True
                )
        for name in structure.get("last_norms", []):
            norm = self.base.get_submodule(name)
            norm.register_forward_hook(partial(self._change_gain, None, name))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = dict(kwargs)
        if args:
            call["input_ids"] = args[0]
        tokens = call.get("input_ids")
        if tokens is None:
            raise ValueError("give input_ids: what was added has an embedding of its own")
        mask = call.get("attention_mask")
        check_padding(mask)
        if call.get("use_cache") is None:
            call["use_cache"] = getattr(self.base.config, "use_cache", True)
        x_up = None if self.embedding is None else self.embedding.expansion(tokens)
        # Of the arguments that the base's forward names: another is not read (OpenAI's first GPT).
        cache = given_cache(call.get(name) for name in self._base_arguments)
        added: list[Any] | None = None
        past = 0
        known = None if mask is None else mask[:, : tokens.shape[1]].bool()
        if cache is not None or call["use_cache"]:
            added = taken_from(cache)
            text: AddedText = layer_of(AddedText, added)
            past = text.get_seq_length()
            known = text.seen(tokens, mask)
        inputs = HostedInputs(
            tokens,
            past,
            known,
            call.get("position_ids"),
            self.rotary,
            self.dtype if x_up is None else x_up.dtype,
        )
        self._running = HostedPass(x_up, inputs, call, cache, added)
        kept = call.get("logits_to_keep", 0)
        length = tokens.shape[1]
        if self.config.structure["shares_keys"] and isinstance(kept, int) and 0 < kept < length:
            # Layers that share keys run on the last positions alone if this is a number.
            places = torch.arange(length - kept, length, device=tokens.device)
            return args, {**kwargs, "logits_to_keep": places}
        return None

    def _end(self, _: nn.Module, __: Any, ___: Any, output: Any) -> None:
        current = self._running
        self._running = None
        if current is None or current.added is None:
            return
        if output is not None:  # else the base raised
            # What a forward gives and the next one takes, whatever a type calls it.
            for name in self._base_arguments:
                made = output.get(name)
                if made is not None and not isinstance(made, Tensor):
                    output[name] = given_back(made, current.added)
                    return
        if current.cache is not None:
            given_back(current.cache, current.added)

    def _enter_layer(
        self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        current = self._running
        if current is None:
            return None
        current.changes = {}
        x = args[0] if args else kwargs["hidden_states"]
        if index == self.config.gate_layer:
            self._close(current, x)
        if self.own_input is None or index != self.config.own_first_layer:
            return None
        x = current.open_tokens.add(x, self.own_input, current.call["input_ids"])
        if args:
            return (x, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": x}

    def _leave_layer(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        current = self._running
        if current is None:
            return
        for change in current.changes.values():
            assert current.x_up is not None, "its blocks gave the changes"
            current.x_up = current.x_up + change
        is_last = index + 1 == self.config.num_hidden_layers
        if is_last and self.config.gate_layer == self.config.num_hidden_layers:
            self._close(current, output[0] if isinstance(output, tuple) else output)

    def _close(self, current: HostedPass, x: Tensor) -> None:
        """Lets the gate decide, by the base's stream x [B, S, D]."""
        positions = current.call.get("position_ids")
        documents = None
        if positions is not None and positions.dim() == 2:
            mask = current.call.get("attention_mask")
            _, documents = texts_of(x, mask, positions, current.added)
        assert self.token_gate is not None, "a layer is named for it"
        is_text = current.inputs.is_text
        by_id = self.token_gate.opens_id(current.call["input_ids"], is_text)
        opens = self.token_gate.decide(x, is_text, documents, current.added, by_id)
        for token in self.config.media_token_ids:
            # Here stands what the base makes of a picture or a sound, and no text was like it.
            is_other = (current.call["input_ids"] != token).unsqueeze(-1)
            opens = opens & is_other.to(opens.device)
        current.open_tokens = OpenTokens(closed=~opens)

    def _add_difference(
        self, index: int, name: str, _: nn.Module, args: tuple[Any, ...], y: Tensor
    ) -> Tensor | None:
        """Adds the low-rank difference of a linear map of layer `index`, for open tokens."""
        current = self._running
        if current is None:
            return None
        difference = self.layers.get_submodule(f"{index}.adapter.{name}")
        return current.open_tokens.like(y).add(y, difference, args[0])

    def _change_gain(
        self, index: int | None, name: str, norm: nn.Module, args: tuple[Any, ...], y: Tensor
    ) -> Tensor | None:
        """What a norm of layer `index`, or None: after the layers, gives open tokens."""
        current = self._running
        if current is None:
            return None
        path = f"own.{name}" if index is None else f"layers.{index}.own.{name}"
        changed: Tensor = self.get_submodule(path)(norm, args)
        return current.open_tokens.like(y).choose(y, changed)

    def _keep_input(
        self, place: tuple[int, int], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._running is not None:
            self._running.kept_inputs[place[1]] = self._argument(place, args, kwargs)

    def _argument(
        self, place: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        key = self._block(place)["input_argument"]
        return args[key] if isinstance(key, int) else kwargs[key]

    def _block(self, place: tuple[int, int]) -> dict[str, Any]:
        layer, block = place
        return self.config.structure["layers"][layer]["blocks"][block]

    def _run_block(
        self,
        place: tuple[int, int],
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        current = self._running
        if current is None:
            return None
        layer, number = place
        block = self._block(place)
        if number in current.kept_inputs:
            x = current.kept_inputs.pop(number)
        else:
            x = self._argument(place, args, kwargs)
        at = block["output_index"]
        y = output if at is None else output[at]
        if block["output_changed_in_place"]:
            y = y.clone()
        x_up = current.x_up
        assert x_up is not None, "blocks are the expansion's"
        for earlier in block["reads"]:
            x_up = x_up + current.changes[earlier]
        rows = x_up.shape[:2]
        for tensor in (x, y):
            if tensor.shape[:-1].numel() != rows.numel():
                # RWKV's own code does so to several texts at once, after their first call.
                raise ValueError(
                    f"{block['name']}: the base has {tensor.shape[:-1].numel()} positions for "
                    f"{rows.numel()} tokens; call with one text at a time, or with use_cache=False"
                )
        y_rows = y.reshape(*rows, -1)
        keys = current.keys_of(place) if block["kind"] == "mixer" else None
        changed, y_up = self.layers[layer].get_submodule(block["added"])(
            x.reshape(*rows, -1).to(x_up.dtype),
            x_up,
            y_rows,
            current.inputs,
            keys,
            current.open_tokens,
        )
        current.changes[number] = y_up
        if changed is y_rows:
            return None
        new = changed.view(y.shape)
        if at is None:
            return new
        items = list(output)
        items[at] = new
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)

    def _add_logits(self, _: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor | None:
        """logits: [B, n, V] of the base's output map, for the tokens that are kept."""
        current = self._running
        if current is None:
            return None
        kept = current.call.get("logits_to_keep", 0)
        rows = slice(-kept, None) if isinstance(kept, int) else kept
        x_up = None
        if self.final_norm is not None and current.x_up is not None:
            x_up = self.final_norm(current.x_up[:, rows])
        changed = self.output.added_to(logits, args[0], x_up)
        return current.open_tokens.at(rows).choose(logits, changed)
