"""A base and the full difference of a model that was trained from it, for `transformers`. It is
shipped with the weights:

    load = AutoModelForCausalLM.from_pretrained
    load(folder, trust_remote_code=True)
    load(folder, trust_remote_code=True, unpacked="by_layer")  # less memory, slower where open

W are the base's weights, D is the packed difference. A gate on the base's own stream decides for
each token whether the text is new: a closed token gets the logits that the base gives, an open one
those of the model with W + D. Both are models of the base's class in `transformers`. Each reads the
whole text with its own keys and values, and never those of the other.

Each reads only when it is needed. The base's layers below the gate read every token. A whole model
reads the text up to a token that takes its logits: the model with W + D reads a text from its start
when it first opens, the base reads what was open when it closes again. So the base's layers above
the gate do not run while all texts of a batch stay open, and W + D is not made while all are
closed.

Shapes: B batch, S sequence, T the text so far, K tokens whose logits are kept, V vocabulary.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_difference import DifferenceConfig
from .difference_readers import Kept, Readers, TextInputs
from .packed_difference import PackedMatrix, PackedRows, PackedVector
from .scale_gate import ScaleGate, texts_of
from .scale_longrope import RereadsOutgrown, longrope_contexts
from .scale_quantization import quantised_by
from .scale_vocabulary_size import FixedVocabulary


class DifferenceForCausalLM(
    FixedVocabulary,
    RereadsOutgrown,
    PreTrainedModel,  # type: ignore[misc]
    GenerationMixin,  # type: ignore[misc]
):
    """A base, and W + D for the tokens that a gate opens. For inference: D does not train."""

    config_class = DifferenceConfig
    vocabulary_reason = "a difference belongs to the vocabulary of its base"
    frequencies_by_row = False
    base_model_prefix = ""
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ("token_gate",)

    def __init__(self, config: DifferenceConfig) -> None:
        super().__init__(config)
        # In the type in which this model is made, whatever the configuration says of its files.
        dtype = torch.get_default_dtype()
        self.base: Any = AutoModelForCausalLM.from_config(config.text_config, dtype=dtype)
        self.difference = packed_modules(self.base, config)
        self.token_gate = ScaleGate(config)
        self.frequency_contexts = longrope_contexts(config.text_config)
        self._made: list[Any] = []
        self.post_init()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """The library's.

        Raises:
            ValueError: it quantised the base, to whose weights the difference is added.
        """
        found = super().from_pretrained(name, *args, **kwargs)
        quantised = quantised_by(found)
        if quantised is not None:
            raise ValueError(
                "quantization_config: expected none, as a difference is added to the weights of "
                f"its base as they are stored, found {quantised}; load the model without it"
            )
        return found

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.base.get_input_embeddings()
        return embedding

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "continuous batching cannot run this model: a text has keys and values of two models"
        )

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The padding itself: both models make their masks. For a static cache `generate` would
        make them before `forward` can refuse it.
        """
        return attention_mask

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # W + D is no parameter of this model: after W moves or is cast, it is made again.
        self._made.clear()
        return super()._apply(fn, recurse)

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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids, labels: [B, S]; attention_mask: [B, T], 0 for padding. Logits
        come for the last `logits_to_keep` tokens (0: all), or those.

        Raises ValueError: what is given or asked for is not a text's tokens and their logits.
        """
        if input_ids is None or kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("give input_ids: base and trained model embed a token in two ways")
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(name, None) or getattr(self.config, name):
                raise ValueError("two models run: only logits are given, no states of layers")
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise ValueError("a trace cannot hold that each text is read by the models it needs")
        is_padding = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        if attention_mask is not None and not is_padding:
            raise ValueError("attention_mask: expected the padding of each text, [B, T]")
        if use_cache is None:
            use_cache = self.config.text_config.use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config.text_config)

        length = input_ids.shape[1]
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0) + seen
        inputs = TextInputs(input_ids, position_ids.expand_as(input_ids), attention_mask)
        readers = Readers(self.base, self.config.gate_layer, inputs, past_key_values)
        kept: Kept = logits_to_keep
        if isinstance(kept, int):
            kept = kept or length
        else:
            # Places from the end become places from the start.
            kept = torch.arange(length, device=input_ids.device)[kept]
        logits = self._chosen_logits(readers, kept)

        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _chosen_logits(self, readers: Readers, kept: Kept) -> Tensor:
        """The logits of the new tokens that are kept, each by the model that the gate chooses:
        [B, K, V].
        """
        of_base, stream = readers.read_by_base(kept)
        is_text, opens = self._opens(stream, readers)
        readers.remember(opens)

        places: Any = kept
        if isinstance(kept, int):
            places = slice(-kept, None)
        opens = opens[:, places]
        closes = ~opens & is_text[:, places]  # what padding gets is of no consequence
        if of_base is None and (closes.any() or not opens.any()):
            of_base = readers.base_logits(kept)
        if not opens.any():
            assert of_base is not None, "it was read above"
            return of_base
        of_trained = readers.trained_logits(self.trained(), kept)
        if of_base is None or not closes.any():
            return of_trained
        return torch.where(opens, of_trained, of_base)

    def _opens(self, stream: Tensor, readers: Readers) -> tuple[Tensor, Tensor]:
        """Which of the new tokens are no padding, and for which of them the gate opens:
        bool [B, S, 1] both.
        """
        tokens, positions, mask = readers.inputs
        is_text, documents = texts_of(stream, mask, positions, readers.cache)
        layers = None if readers.cache is None else readers.cache.layers
        by_id = self.token_gate.opens_id(tokens, is_text)
        opens: Tensor = self.token_gate.decide(stream, is_text, documents, layers, by_id)
        if is_text is None:
            return torch.ones_like(opens), opens
        return is_text.unsqueeze(-1), opens

    def trained(self) -> Any:
        """The model with W + D, of the base's class; made when a text first opens.

        It is no submodule: its parameters are neither saved nor moved with this model.
        """
        if not self._made:
            self._made.append(self._base_with_difference())
        return self._made[0]

    @torch.no_grad()
    def _base_with_difference(self) -> Any:
        # A copy of the base's modules that shares all tensors and the configuration, until `add`.
        shared: dict[int, Any] = {id(self.base.config): self.base.config}
        for tensor in (*self.base.parameters(), *self.base.buffers()):
            shared[id(tensor)] = tensor
        model = copy.deepcopy(self.base, shared)

        layers = f"{self.base.base_model_prefix}.layers."
        by_layer: dict[int, list[ChangedWeight]] = {}
        for path, parameter in self.base.named_parameters():
            owner, _, name = path.rpartition(".")
            difference: Any = self.difference[escaped(path)]
            weight = ChangedWeight(model.get_submodule(owner), name, parameter, difference)
            if self.config.unpacked == "by_layer" and path.startswith(layers):
                index, _, _ = path.removeprefix(layers).partition(".")
                by_layer.setdefault(int(index), []).append(weight)
            else:
                weight.add()
        output = model.get_output_embeddings()
        if self.config.tie_word_embeddings:
            output.weight = model.get_input_embeddings().weight
        for index, weights in by_layer.items():
            layer = model.base_model.layers[index]
            layer.register_forward_pre_hook(partial(_add_all, weights))
            layer.register_forward_hook(partial(_drop_all, weights))
        return model


class ChangedWeight(NamedTuple):
    """A parameter of the model with W + D: its module and name, the base's W, and D."""

    module: nn.Module
    name: str
    base: nn.Parameter
    difference: PackedMatrix | PackedRows | PackedVector

    @torch.no_grad()
    def add(self) -> None:
        """Makes it W + D, added in fp32 and rounded once."""
        change = self.difference.unpacked().to(self.base.device)
        changed = (self.base.float() + change).to(self.base.dtype)
        self.module._parameters[self.name] = nn.Parameter(changed, requires_grad=False)

    def drop(self) -> None:
        """Makes it W, so that the memory of W + D is free."""
        self.module._parameters[self.name] = self.base


def _add_all(weights: list[ChangedWeight], *_: Any) -> None:
    for weight in weights:
        weight.add()


def _drop_all(weights: list[ChangedWeight], *_: Any) -> None:
    for weight in weights:
        weight.drop()


def escaped(path: str) -> str:
    """The path of a parameter as the name of a module, in which no dot may be."""
    return path.replace(".", "/")


def packed_modules(base: Any, config: DifferenceConfig) -> nn.ModuleDict:
    """The packed difference of every parameter of `base`, without values."""
    layers = f"{base.base_model_prefix}.layers."
    output = base.get_output_embeddings()
    modules = nn.ModuleDict()
    for path, parameter in base.named_parameters():
        owner, _, _ = path.rpartition(".")
        if config.tie_word_embeddings and base.get_submodule(owner) is output:
            continue  # it is the embedding, which may not be tied yet
        packed: nn.Module
        if parameter.dim() == 1:
            packed = PackedVector(len(parameter))
        elif path.startswith(layers):
            rows, columns = parameter.shape
            packed = PackedMatrix(rows, columns, config.bits)
        else:
            vocab_size, columns = parameter.shape
            packed = PackedRows(config.own_rows, columns, vocab_size)
        modules[escaped(path)] = packed
    return modules
