"""One base with several expansions beside each other, for `transformers`. It is shipped with the
weights:

    load = AutoModelForCausalLM.from_pretrained
    load(folder, trust_remote_code=True)                        # all expansions
    load(folder, trust_remote_code=True, active=["korean"])     # only this one

Each expansion was trained alone on the frozen base, and has a gate. All gates read the base's exact
stream. Each token gets the logits of one model, which are those that it gives alone:

- The leader is the expansion whose margins (its score, the log odds of its text, less its
  threshold) were largest over the last tokens; of equal ones the first by name.
- Where the leader's gate is open, the leader is used from that token on.
- Where it is closed, the expansion that was used before goes on, whether its own gate is open there
  or not. Before the first the base is used.

A text pays for an expansion from the first token on which it is used: then the text so far is
computed with it, once. One that leaves x as it is (Preserve) computes the base's stream too, in the
same pass; beside one that changes x (Adapt, or weights that open tokens have of their own) the base
runs on, as the gates and closed tokens need its stream.

Shapes: B batch, R some of its sequences, S sequence, T the text so far, D hidden, U expansion, V
vocabulary, E expansions, P = 1 + E paths.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_scale import ScaleConfig
from .configuration_scale_combined import CombinedConfig, chosen
from .modeling_scale import ScaleForCausalLM, kept_tokens
from .open_tokens import NONE_OPEN
from .scale_caches import empty_like
from .scale_combined_cache import BASE, CombinedState
from .scale_from_open_on import PassInputs
from .scale_gate import texts_of
from .scale_math import NEVER, own_row_logits, separate_products, soft_capped
from .scale_quantization import quantised_by
from .scale_streams import ScaleOutput, StreamPath

EXPANSIONS = "expansions"
"""The folder of expansions, each in a folder with its name."""
NEW_ROWS = ("new_rows.embedding", "new_rows.output")
"""Tensors of an expansion with an extended vocabulary: rows that follow the base's in two of its
matrices.
"""
RECENT = 128
"""How many tokens' margins are compared where several gates are open."""
LARGEST_MARGIN = 64.0
"""What a larger margin counts as for the tokens after it, such as that of a new token."""


class AddedLogits(NamedTuple):
    """What an expansion adds to the logits of the sequences `rows` [B]."""

    rows: Tensor
    new_tokens: range
    """The ids of the expansion's own tokens."""
    logits: Tensor
    """[R, S', V']: of the base's tokens and of the expansion's own."""


class CombinedForCausalLM(ScaleForCausalLM):
    """A base, as a ScaleForCausalLM without an expansion, and models of its expansions, which share
    its weights.

    Attributes:
        names: the expansions that are loaded, in the order of the paths.
        expansions: their models.
        new_tokens: the ids of each expansion's own vocabulary, behind those of the base and of
            expansions before it.
        active: the names of those that may open.
    """

    config_class = CombinedConfig
    _keys_to_ignore_on_load_missing = (r"expansion",)

    def __init__(self, config: CombinedConfig) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            super().__init__(config)
        self.names: list[str] = []
        self.expansions = nn.ModuleList()
        self.new_tokens: list[range] = []
        self.active: list[str] = []

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """The library's, which loads the base; then its expansions, or those that the argument
        `active` names.

        The model is for inference.

        Raises:
            ValueError: `active` names one that is not there, or the base would be quantised or on
                several devices.
        """
        found = super().from_pretrained(name, *args, **kwargs)
        model: CombinedForCausalLM = found[0] if isinstance(found, tuple) else found
        is_on_several = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        if is_on_several or quantised_by(found) is not None:
            raise ValueError(
                "a model with several expansions runs on one device, with its weights as they are "
                "stored"
            )
        folder = Path(name)
        part = Path(kwargs.get("subfolder") or "")
        if not folder.is_dir():
            wanted = [f"{part / EXPANSIONS / expansion}/*" for expansion in model.config.names()]
            options = {}
            for key in ("revision", "cache_dir", "token", "local_files_only"):
                if key in kwargs:
                    options[key] = kwargs[key]
            folder = Path(snapshot_download(name, allow_patterns=wanted, **options))
        for expansion in model.config.names():
            model.load_expansion(expansion, folder / part / EXPANSIONS / expansion)
        model.share_base()
        model.requires_grad_(False).eval()
        model.set_active(model.names if model.config.active is None else model.config.active)
        return found

    @property
    def _expansion_models(self) -> list[ScaleForCausalLM]:
        return list(self.expansions)  # type: ignore[arg-type]

    @property
    def _path_models(self) -> list[ScaleForCausalLM]:
        """The model of each path: the base, then the expansions."""
        return [self, *self._expansion_models]

    def load_expansion(self, name: str, folder: Path) -> None:
        """Adds the expansion `name`, an entry of the config, from its `folder`, without its base:
        see `share_base`.

        Raises:
            ValueError: the folder lacks the rows of the expansion's new tokens.
        """
        entries = self.config.expansions[name]
        config = ScaleConfig(**entries)
        config._attn_implementation = self.config._attn_implementation
        with no_init_weights(), torch.device("meta"):
            model = ScaleForCausalLM(config)
        model.rotary = self.rotary
        # Asked once: the library finds them by a walk over all parameters.
        device = self.device
        base_dtype = self.dtype
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for key, tensor in load_file(file).items():
                dtype = base_dtype
                if not tensor.is_floating_point() or key.startswith("token_gate."):
                    # A gate stays in fp32: 16 bits would change decisions. Tables of ids stay too.
                    dtype = tensor.dtype
                tensors[key] = tensor.to(device, dtype)
        new_rows: list[Tensor] = []
        if entries["vocab_size"] > entries["base_vocab_size"]:
            check_complete(name, [key for key in NEW_ROWS if key not in tensors])
            new_rows = [tensors.pop(key) for key in NEW_ROWS]
        model.load_state_dict(tensors, strict=False, assign=True)
        first = self.config.vocab_size
        if new_rows:
            self._add_new_tokens(*new_rows)
        self.new_tokens.append(range(first, self.config.vocab_size))
        self.names.append(name)
        self.expansions.append(model)

    def _add_new_tokens(self, embedding_rows: Tensor, output_rows: Tensor) -> None:
        """Adds the rows [n, D] of an expansion's new tokens, which get the next ids, to the
        base's.
        """
        if self.config.base_vocab_size is None:
            self.config.base_vocab_size = self.config.vocab_size
        self.config.vocab_size += len(embedding_rows)
        self.config.tie_word_embeddings = False
        embedding = self.embedding.base
        embedding.weight = _frozen(torch.cat([embedding.weight, embedding_rows]))
        self.output.base = _frozen(torch.cat([self.output.base, output_rows]))
        self.output.set_vocabulary(self.config)

    def share_base(self) -> None:
        """Gives the expansions the base's parameters, and entries for the tokens of all
        vocabularies.

        Raises:
            ValueError: an expansion lacks a tensor.
        """
        of_base: dict[str, nn.Parameter] = {}
        for path, module in _modules_of(self):
            for leaf, parameter in module.named_parameters(recurse=False):
                of_base[f"{path}.{leaf}"] = parameter
        for name, model, own in zip(
            self.names, self._expansion_models, self.new_tokens, strict=True
        ):
            missing: list[str] = []
            for path, module in _modules_of(model):
                # A list: the loop replaces parameters.
                for leaf, parameter in list(module.named_parameters(recurse=False)):
                    key = f"{path}.{leaf}"
                    if is_of_base(key):
                        setattr(module, leaf, of_base[key])
                    elif parameter.is_meta:
                        missing.append(key)
                for leaf, buffer in module.named_buffers(recurse=False):
                    # No file holds the others: rotary frequencies, which are the base's.
                    is_stored = leaf not in module._non_persistent_buffers_set
                    if is_stored and buffer.is_meta:
                        missing.append(f"{path}.{leaf}")
            check_complete(name, missing)
            add_other_tokens(model, own, self.config.vocab_size)

    def set_active(self, names: Iterable[str]) -> None:
        """From now on only these expansions open; none: the model is the base.

        Raises:
            ValueError: one is not loaded.
        """
        self.active = self._loaded(names)

    def allowed(self, requests: Sequence[Iterable[str]]) -> Tensor:
        """For each sequence of a batch, which expansions may open: the argument `active` [B, E] of
        `generate`.

        Raises:
            ValueError: one is not loaded.
        """
        table = torch.zeros(len(requests), len(self.names), dtype=torch.bool)
        for row, names in enumerate(requests):
            for name in self._loaded(names):
                table[row, self.names.index(name)] = True
        return table.to(self.device)

    def _loaded(self, names: Iterable[str]) -> list[str]:
        """The `names`, or one name, as a list. Raises ValueError: one is not loaded."""
        return chosen(names, self.names, self.config.expansions)

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
        active: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids, labels: [B, S]; attention_mask: [B, T]; active: [B, E], as
        `allowed` makes it.

        Logits come for the last `logits_to_keep` tokens (0: all), or those.

        Raises:
            ValueError: this model does not take the cache or an argument.
        """
        hidden_states = kwargs.pop("output_hidden_states", self.config.output_hidden_states)
        attentions = kwargs.pop("output_attentions", self.config.output_attentions)
        embedded = kwargs.pop("inputs_embeds", None)
        if input_ids is None or embedded is not None or hidden_states or attentions:
            raise ValueError(
                "a model with several expansions takes input_ids, and gives no hidden states and "
                "no attentions"
            )
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise ValueError("a trace cannot hold that each text is read by the models it needs")
        self._check_arguments(input_ids, attention_mask, active)
        if use_cache is None:
            use_cache = self.config.use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        configs = [model.config for model in self._path_models]
        state = CombinedState.of(past_key_values, input_ids, configs)
        if position_ids is None:
            seen = state.text.get_seq_length()
            positions = torch.arange(seen, seen + input_ids.shape[1], device=input_ids.device)
            position_ids = positions.unsqueeze(0)
        if active is None:
            active = self.allowed([self.active]).expand(len(input_ids), -1)
        positions = position_ids.expand_as(input_ids)
        inputs = PassInputs(
            input_ids, attention_mask, positions, past_key_values, kwargs, may_wait=True
        )
        logits = self._logits(inputs, state, active, logits_to_keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _check_arguments(self, input_ids: Tensor, attention_mask: Any, active: Any) -> None:
        """Raises ValueError: an argument has a form that this model does not take."""
        is_padding = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        if attention_mask is not None and not is_padding:
            raise ValueError(
                "attention_mask: expected a tensor [B, T]: a text may be computed again from its "
                "start"
            )
        if active is not None:
            shape = (len(input_ids), len(self.names))
            if not isinstance(active, Tensor) or active.shape != shape:
                example = [self.names[0]] if self.names else []
                raise ValueError(
                    "active: expected what model.allowed makes, a row for each text, such as "
                    f"active=model.allowed([{example}] * {len(input_ids)})"
                )

    def _logits(
        self, inputs: PassInputs, state: CombinedState, active: Tensor, logits_to_keep: int | Tensor
    ) -> Tensor:
        """The logits [B, S', V] of the tokens to keep. Brings `state` up to date."""
        kept = kept_tokens(logits_to_keep)
        length = inputs.tokens.shape[1]
        read, streams = self._base_stream(inputs, state)
        margins = self._margins(read, inputs, state)
        totals = self._totals(margins, state)
        allowed = F.pad(active, (1, 0), value=True).unsqueeze(1)
        winner, used = self._choice(margins, totals, allowed, state)
        is_open = margins.gather(-1, used.unsqueeze(-1))[..., 0] > 0
        opened = used.masked_fill(~is_open, BASE)

        # Gates and totals are stored as if alone: a later token's request may allow another
        # expansion.
        decided = torch.cat([used.unsqueeze(-1), margins[..., 1:] > 0, totals[:, RECENT:]], dim=-1)
        new_text = torch.stack([inputs.tokens, inputs.positions], dim=-1)
        text, stored = state.text.update(new_text.unsqueeze(1), decided.unsqueeze(1))
        whole = inputs._replace(tokens=text[:, 0, :, 0], positions=text[:, 0, :, 1])
        opens = stored[:, 0].long()

        opened_kept = opened[:, kept]
        used_kept = used[:, kept]
        x = self.final_norm.base(read[self.config.num_hidden_layers][:, kept])
        added: list[AddedLogits] = []
        for index, model in enumerate(self._expansion_models, start=1):
            wins = winner == index
            for rows, stream in self._expansion_streams(
                index, inputs, whole, state, opens, wins, streams
            ):
                last = stream.at(slice(-length, None)).at(kept).normed(model.final_norm)
                is_used = used_kept[rows].eq(index).unsqueeze(-1)
                x[rows] = torch.where(is_used, last.x, x[rows])
                is_another = opened_kept[rows].ne(index).unsqueeze(-1)
                for logits in added_logits(model.output, last, is_another):
                    added.append(AddedLogits(rows, self.new_tokens[index - 1], logits))
        return self._with_added(x, added, opened_kept)

    def _expansion_streams(
        self,
        index: int,
        inputs: PassInputs,
        whole: PassInputs,
        state: CombinedState,
        opens: Tensor,
        wins: Tensor,
        streams: dict[int, StreamPath],
    ) -> list[tuple[Tensor, StreamPath]]:
        """The streams after the last layer of the expansion `index`, with the sequences [B] that
        they are of. Brings `state` up to date.

        Args:
            index: the expansion's place among the paths.
            inputs: the tokens of this pass.
            whole: the text from its start.
            state: what the text has left behind.
            opens: [B, T, 1 + 2 E], of which column `index` says where the expansion's gate is open.
            wins: [B, S], on which of the tokens of this pass the expansion is used by its gate.
            streams: of expansions that have computed these tokens already.
        """
        model = self._path_models[index]
        path = state.paths[index]
        own_opens = opens[..., index : index + 1].bool()
        parts: list[tuple[Tensor, StreamPath]] = []
        if index in streams:
            parts.append((path.runs_on, streams[index]))
        elif path.runs_on.any():
            new_opens = own_opens[:, -inputs.tokens.shape[1] :]
            stream = self._run_on(index, path.runs_on, inputs, path.inner, new_opens)
            parts.append((path.runs_on, stream))
        joining = wins.any(1) & ~path.runs_on
        if joining.any():
            # The text so far is computed with the expansion, once.
            cache = empty_like(path.inner, model.config)
            parts.append((joining, self._run_on(index, joining, whole, cache, own_opens)))
            path.join(joining, cache)
            if keeps_base_stream(model):
                state.paths[BASE].leave(joining & state.paths[BASE].runs_on)
        return parts

    def _with_added(self, x: Tensor, added: list[AddedLogits], opened: Tensor) -> Tensor:
        """The logits [B, S', V] of the streams x [B, S', D], with what expansions add.

        opened [B, S']: the path that is used where its own gate is open, else BASE.
        """
        # In products of their own, columns are the base's, or an expansion's alone, whatever others
        # follow.
        base_columns = self.output.base_columns
        rows = [base_columns, *(len(tokens) for tokens in self.new_tokens if len(tokens))]
        z = separate_products(x, self.output.base, rows).float()
        for one in added:
            part = z[one.rows]
            part[..., :base_columns] += one.logits[..., :base_columns]
            own = slice(one.new_tokens.start, one.new_tokens.stop)
            part[..., own] += one.logits[..., base_columns:]
            z[one.rows] = part
        z = soft_capped(z, self.output.softcap)
        # Only the expansion that has a token may give it.
        for index, tokens in enumerate(self.new_tokens, start=1):
            is_another = opened.ne(index).unsqueeze(-1)
            z[..., tokens.start : tokens.stop].masked_fill_(is_another, NEVER)
        return z

    def _totals(self, margins: Tensor, state: CombinedState) -> Tensor:
        """The sum of each gate's positive margins over the text up to each of the last tokens:
        [B, RECENT + S, E].

        margins: [B, S, P]. Summed one by one, so that a text read in parts has the totals of the
        whole.
        """
        expansions = len(self.names)
        past = margins.new_zeros(len(margins), RECENT, expansions, dtype=torch.double)
        if state.text.get_seq_length() > 0:
            stored = state.text.values[:, 0, -RECENT:, -expansions:]
            past = torch.cat([past, stored], dim=1)[:, -RECENT:]
        own = margins[..., 1:].clamp(0, LARGEST_MARGIN).double()
        sums = torch.cat([past[:, -1:], own], dim=1).cumsum(1)[:, 1:]
        return torch.cat([past, sums], dim=1)

    def _choice(
        self, margins: Tensor, totals: Tensor, allowed: Tensor, state: CombinedState
    ) -> tuple[Tensor, Tensor]:
        """For each token, the path that is used from it on because its gate is open (the winner),
        or BASE, and the path that is used, both [B, S].

        Of the `allowed` [B, 1, P], the one whose margins [B, S, P] were largest over the last
        tokens wins, if its gate is open, and on a new token the one that has it; of equal ones the
        first. Without a winner the path before goes on, if that is allowed now.
        """
        recent = F.pad(totals[:, RECENT:] - totals[:, :-RECENT], (1, 0))
        recent = recent.masked_fill(margins.isposinf(), torch.inf).masked_fill(~allowed, -1)
        # The first of equal ones: BASE where no margin was above 0.
        leader = recent.argmax(-1, keepdim=True)
        is_closed = margins.gather(-1, leader) <= 0
        winner = leader.masked_fill(is_closed, BASE)[..., 0]

        before = winner.new_full((len(winner), 1), BASE)
        if state.text.get_seq_length() > 0:
            before = state.text.values[:, 0, -1:, 0].long()
        # The place of the last token with a winner up to each; 0 is that of `before`.
        places = torch.arange(1, winner.shape[1] + 1, device=winner.device)
        last = (winner != BASE).long().mul(places).cummax(dim=1).values
        used = torch.cat([before, winner], dim=1).gather(1, last)
        is_allowed = allowed.expand(*used.shape, -1).gather(-1, used.unsqueeze(-1))[..., 0]
        return winner, used.masked_fill(~is_allowed, BASE)

    def _base_stream(
        self, inputs: PassInputs, state: CombinedState
    ) -> tuple[dict[int, Tensor], dict[int, StreamPath]]:
        """The base's stream [B, S, D] before each layer that a gate reads, and under their number
        after the last.

        It is that of the base's path and of all paths that leave it as it is. The second are the
        latter's streams.
        """
        last = self.config.num_hidden_layers
        layers = {model.config.gate_layer for model in self._expansion_models}
        read: dict[int, Tensor] = {}
        for layer in (*layers, last):
            shape = (*inputs.tokens.shape, self.config.hidden_size)
            read[layer] = self.embedding.base.weight.new_empty(shape)
        closed = torch.zeros_like(inputs.tokens, dtype=torch.bool).unsqueeze(-1)
        streams: dict[int, StreamPath] = {}
        for index, model in enumerate(self._path_models):
            path = state.paths[index]
            keeps_base = index == BASE or keeps_base_stream(model)
            if not keeps_base or not path.runs_on.any():
                continue
            recorded: dict[int, Any] = dict.fromkeys(layers - {last})
            stream = self._run_on(index, path.runs_on, inputs, path.inner, closed, recorded)
            recorded[last] = stream
            for layer, before in recorded.items():
                read[layer][path.runs_on] = before.x
            if index != BASE:
                streams[index] = stream
        return read, streams

    def _margins(self, read: dict[int, Tensor], inputs: PassInputs, state: CombinedState) -> Tensor:
        """By how much each gate's score is above its threshold: [B, S, P]; the base's is 0."""
        tokens = inputs.tokens
        last = read[self.config.num_hidden_layers]
        is_text, documents = texts_of(last, inputs.attention_mask, inputs.positions, inputs.cache)
        if documents is not None and documents.any():
            raise ValueError(
                "position_ids: a model with several expansions takes one text in a row, found "
                "several"
            )
        margins = [torch.zeros(*tokens.shape, 1, device=tokens.device)]
        for model, stored, own in zip(
            self._expansion_models, state.gates, self.new_tokens, strict=True
        ):
            gate = model.token_gate
            assert gate is not None, "an expansion without one is not added"
            scores = gate.scores(read[model.config.gate_layer], is_text, documents, stored)
            margin = scores - gate.threshold
            by_id = gate.opens_id(tokens)
            if by_id is not None:
                margin = torch.where(by_id, opened_margin(margin), margin)
            if is_text is not None:
                margin = margin.masked_fill(~is_text.unsqueeze(-1), -torch.inf)
            is_own = (tokens >= own.start) & (tokens < own.stop)
            margins.append(margin.masked_fill(is_own.unsqueeze(-1), torch.inf))
        return torch.cat(margins, dim=-1)

    def _run_on(
        self,
        index: int,
        rows: Tensor,
        inputs: PassInputs,
        cache: DynamicCache,
        opens: Tensor,
        recorded: dict[int, Any] | None = None,
    ) -> StreamPath:
        """The path's streams [R, S, …] after its last layer, on the sequences `rows` [B]. opens:
        bool [B, S, 1].
        """
        model = self._path_models[index]
        part = inputs.of(rows, cache)
        start = model.embedded(part.tokens)
        if index == BASE:
            start = start._replace(x_up=None, open_tokens=NONE_OPEN)
        [path], _ = model.run_paths([start], part, recorded, opens[rows])
        return path

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "a model with several expansions is not saved: copy the folder that scale-cpt combine "
            "wrote"
        )

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "continuous batching cannot run this model: it has a cache for each expansion"
        )


def check_complete(name: str, missing: list[str]) -> None:
    """Raises ValueError: the expansion `name` lacks the tensors `missing`."""
    if not missing:
        return
    more = ""
    if len(missing) > 1:
        more = f" and {len(missing) - 1} more"
    raise ValueError(f"expansion {name}: lacks {missing[0]}{more}; combine it again")


def opened_margin(margin: Tensor) -> Tensor:
    """The margin of a token that a gate opens by its id: above 0, and in the order of the scores.

    So of several expansions that claim an id, the one whose score is highest has it. A large margin
    stays as it is.
    """
    # exp(-64) is still far above the least fp32 number: no margin becomes 0, which would be closed.
    return F.softplus(margin.clamp(min=-LARGEST_MARGIN))


def is_of_base(name: str) -> bool:
    """Whether a tensor of a ScaleForCausalLM is its base's."""
    parts = name.split(".")
    # Open tokens' differences of a shared expert's maps stand within the base's mixture.
    return "base" in parts and "adapter" not in parts


def keeps_base_stream(model: ScaleForCausalLM) -> bool:
    """Whether a model leaves its base's x as it is in all layers."""
    last: int = model.config.num_hidden_layers
    return last <= model.config.first_changed_layer


def added_logits(output: ScaleOutput, last: StreamPath, is_another: Tensor) -> list[Tensor]:
    """What a model adds to its base's logits, [R, S', V'] each, in the order in which it adds them.

    It is 0 for the tokens `is_another` [R, S', 1], which are not open for it.
    """
    added: list[Tensor] = []
    if output.expansion is not None:
        assert last.x_up is not None, "a model that is wider has its stream"
        x_up = last.x_up.masked_fill(is_another, 0)
        added.append(F.linear(x_up, output.expansion).float())
    if output.own_rows is not None and not last.open_tokens.none:
        of_rows = own_row_logits(last.x, output.own_rows, output.row_of_token)
        added.append(of_rows.masked_fill(is_another, 0))
    return added


def add_other_tokens(model: ScaleForCausalLM, own: range, vocab_size: int) -> None:
    """Gives what a model has for each input token entries for other models' new tokens.

    It knows nothing of them: their columns of x_up, and their own rows, are zeros. Its own new
    tokens, which follow the base's in its export, have the ids `own` of `vocab_size`.
    """
    columns = model.embedding.expansion
    if columns is not None:
        columns.weight = _frozen(_by_id(columns.weight, own, vocab_size, rest=0))
    if model.own_input is not None and len(model.own_input.row_of_token) < vocab_size:
        rows = model.own_input.rows
        row_of_zeros = len(rows.weight)
        rows.weight = _frozen(F.pad(rows.weight, (0, 0, 0, 1)))
        table = model.own_input.row_of_token
        model.own_input.row_of_token = _by_id(table, own, vocab_size, rest=row_of_zeros)


def _by_id(of_export: Tensor, own: range, vocab_size: int, *, rest: int) -> Tensor:
    """Entries of the base's tokens and of `own` behind them, [V', ...] -> [vocab_size, ...] by id;
    those of all other tokens are `rest`.
    """
    if len(of_export) == vocab_size:
        return of_export
    base_tokens = len(of_export) - len(own)
    found = of_export.new_full((vocab_size, *of_export.shape[1:]), rest)
    found[:base_tokens] = of_export[:base_tokens]
    found[own.start : own.stop] = of_export[base_tokens:]
    return found


def _modules_of(model: ScaleForCausalLM) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by their paths, without those of expansions beside it."""
    for name, child in model.named_children():
        if name != EXPANSIONS:
            yield from child.named_modules(prefix=name)


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
