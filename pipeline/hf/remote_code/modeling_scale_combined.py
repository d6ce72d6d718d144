"""One base with several expansions beside each other, for `transformers`. It is shipped with the weights:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)                      # all expansions
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, active=["korean"])   # only this one

Each expansion was trained alone on the frozen base, and has a gate. All gates read the base's exact stream. Of several,
the expansion whose margins (its score, the log odds of its text, less its threshold) were largest over the last tokens
is in use; where its gate is open, it gives the probabilities that it would give alone. Where it is closed, the one that
was open last gives those that it would give of a closed token alone, and before the first the base its own. So no
expansion changes what another, or the base, says of a token.

A text pays for an expansion from the first token on which it is used: then the text so far is computed with it, once.
One without expansion_to_base blocks (Preserve) computes the base's stream too, in the same pass; beside one with such
blocks (Adapt) the base runs on, as the gates and closed tokens need its stream.

Shapes: B batch, R some of its sequences, S sequence, T the text so far, D hidden, U expansion, V vocabulary,
E expansions, P = 1 + E paths.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
from .modeling_scale import Inputs, ScaleForCausalLM
from .scale_cache import BASE, State, empty_like
from .scale_gate import texts_of
from .scale_streams import StreamPath
from .scale_vocabulary import NEVER

EXPANSIONS = "expansions"
"""The folder of expansions, each in a folder with its name."""
NEW_ROWS = ("new_rows.embedding", "new_rows.output")
"""Tensors of an expansion with an extended vocabulary: rows that follow the base's in two of its matrices."""
RECENT = 128
"""How many tokens' margins are compared where several gates are open."""
LARGEST_MARGIN = 64.0
"""What a larger margin counts as for the tokens after it, such as a new piece's."""


class CombinedForCausalLM(ScaleForCausalLM):
    """A base, as a ScaleForCausalLM without an expansion, and models of its expansions, which share its weights.

    `pieces` are the ids of each expansion's own vocabulary, behind those of the base and of expansions before it.
    """

    config_class = CombinedConfig
    _keys_to_ignore_on_load_missing = (r"expansion",)

    def __init__(self, config: CombinedConfig) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            super().__init__(config)
        self.names: list[str] = []
        self.expansions = nn.ModuleList()
        self.pieces: list[range] = []
        self.active: list[str] = []

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """The library's, which loads the base; then its expansions, or those that the argument `active` names.

        The model is for inference.

        Raises ValueError: `active` names one that is not there, or the base would be quantised or on several devices.
        """
        found = super().from_pretrained(name, *args, **kwargs)
        model: CombinedForCausalLM = found[0] if isinstance(found, tuple) else found
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1 or hasattr(
            model, "hf_quantizer"
        ):
            raise ValueError(
                "a model with several expansions runs on one device, with its weights as they are stored"
            )
        folder, part = Path(name), Path(kwargs.get("subfolder") or "")
        if not folder.is_dir():
            asked = ("revision", "cache_dir", "token", "local_files_only")
            of_hub = {key: kwargs[key] for key in asked if key in kwargs}
            wanted = [f"{part / EXPANSIONS / expansion}/*" for expansion in model.config.names()]
            folder = Path(snapshot_download(name, allow_patterns=wanted, **of_hub))
        for expansion in model.config.names():
            model.load_expansion(expansion, folder / part / EXPANSIONS / expansion)
        model.share_base()
        model.requires_grad_(False).eval()
        model.set_active(model.names if model.config.active is None else model.config.active)
        return found

    @property
    def _models(self) -> list[ScaleForCausalLM]:
        return list(self.expansions)  # type: ignore[arg-type]

    def load_expansion(self, name: str, folder: Path) -> None:
        """Adds the expansion `name`, an entry of the config, from its `folder`, without its base: see `share_base`."""
        config = ScaleConfig(**self.config.expansions[name])
        config._attn_implementation = self.config._attn_implementation
        with no_init_weights(), torch.device("meta"):
            model = ScaleForCausalLM(config)
        model.rotary = self.rotary
        tensors = {
            key: tensor.to(
                self.device, torch.float32 if key.startswith("token_gate.") else self.dtype
            )
            for file in sorted(folder.glob("*.safetensors"))
            for key, tensor in load_file(file).items()
        }
        new_rows = [tensors.pop(key) for key in NEW_ROWS if key in tensors]
        first = self.config.vocab_size
        self.pieces.append(range(first, first + len(new_rows[0]) if new_rows else first))
        model.load_state_dict(tensors, strict=False, assign=True)
        if new_rows:  # behind the pieces of the expansions before it, of which it knows nothing
            old, own = model.embedding.expansion.weight.split(
                [config.base_vocab_size, len(new_rows[0])]
            )
            others = old.new_zeros(first - len(old), old.shape[1])
            model.embedding.expansion.weight = nn.Parameter(
                torch.cat([old, others, own]), requires_grad=False
            )
            self.config.base_vocab_size = self.config.base_vocab_size or first
            self.config.vocab_size += len(own)
            self.config.tie_word_embeddings = False
            self.embedding.base.weight, self.output.base = (
                nn.Parameter(torch.cat([rows, added]), requires_grad=False)
                for rows, added in zip(
                    (self.embedding.base.weight, self.output.base), new_rows, strict=True
                )
            )
            self.output.set_vocabulary(self.config)
        self.names.append(name)
        self.expansions.append(model)

    def share_base(self) -> None:
        """Gives the expansions the base's parameters.

        An expansion's embedding has a row of zeros for a piece of another's vocabulary.

        Raises ValueError: an expansion lacks a tensor.
        """
        of_base = {
            key: value for key, value in self.named_parameters() if not key.startswith(EXPANSIONS)
        }
        of_base["output.base"] = self.output.base  # not named where it is tied
        for model in (self, *self._models):
            for key, parameter in (*model.named_parameters(), ("output.base", model.output.base)):
                path, _, leaf = key.rpartition(".")
                if path.startswith(EXPANSIONS):
                    continue
                shared = of_base[key] if is_of_base(key) else parameter
                if key == "embedding.expansion.weight" and (
                    rows := self.config.vocab_size - len(parameter)
                ):
                    shared = nn.Parameter(F.pad(parameter, (0, 0, 0, rows)), requires_grad=False)
                setattr(model.get_submodule(path), leaf, shared)
        for name, model in zip(self.names, self._models, strict=True):
            missing = [key for key, parameter in model.named_parameters() if parameter.is_meta]
            if missing:
                raise ValueError(
                    f"expansion {name}: lacks {missing[0]} and {len(missing) - 1} more; combine it again"
                )

    def set_active(self, names: Iterable[str]) -> None:
        """From now on only these expansions open; none: the model is the base. Raises ValueError: one is not loaded."""
        self.active = chosen(names, self.names)

    def allowed(self, requests: Sequence[Iterable[str]]) -> Tensor:
        """For each sequence of a batch, which expansions may open: the argument `active` [B, E] of `generate`.

        Raises ValueError: one is not loaded.
        """
        rows = [chosen(names, self.names) for names in requests]
        table = [[name in names for name in self.names] for names in rows]
        return torch.tensor(table, dtype=torch.bool, device=self.device).view(
            len(rows), len(self.names)
        )

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        active: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids, labels: [B, S]; attention_mask: [B, T]; active: [B, E], as `allowed` makes it.

        Logits come for the last `logits_to_keep` tokens (0: all), or those.

        Raises ValueError: a cache, or an argument, that this model does not take.
        """
        hidden_states = kwargs.pop("output_hidden_states", self.config.output_hidden_states)
        if kwargs.pop("inputs_embeds", None) is not None or hidden_states:
            raise ValueError(
                "a model with several expansions takes input_ids, and gives no hidden states"
            )
        if attention_mask is not None and (
            not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2
        ):
            raise ValueError(
                "attention_mask: expected a tensor [B, T]: a text may be computed again from its start"
            )
        if active is not None and (
            not isinstance(active, Tensor) or active.shape != (len(input_ids), len(self.names))
        ):
            raise ValueError(
                "active: expected what model.allowed([[NAME, …], …]) makes, a row for each text"
            )
        if (self.config.use_cache if use_cache is None else use_cache) and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        state = State.of(
            past_key_values, input_ids, [self.config, *(model.config for model in self._models)]
        )
        if position_ids is None:
            seen = state.text.get_seq_length()
            position_ids = torch.arange(
                seen, seen + input_ids.shape[1], device=input_ids.device
            ).unsqueeze(0)
        if active is None:
            active = self.allowed([self.active]).expand(len(input_ids), -1)
        inputs = Inputs(
            input_ids, attention_mask, position_ids.expand_as(input_ids), past_key_values, kwargs
        )
        logits = self._logits(inputs, state, active, logits_to_keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _logits(
        self, inputs: Inputs, state: State, active: Tensor, logits_to_keep: int | Tensor
    ) -> Tensor:
        """The logits [B, S', V] of the tokens to keep. Brings `state` up to date."""
        kept = (
            slice(-logits_to_keep or None, None)
            if isinstance(logits_to_keep, int)
            else logits_to_keep
        )
        length = inputs.tokens.shape[1]
        read, streams = self._base_stream(inputs, state)
        margins = self._margins(read, inputs, state)
        totals = self._totals(margins, state)
        winner, used = self._choice(
            margins, totals, F.pad(active, (1, 0), value=True).unsqueeze(1), state
        )
        # Gates and totals are stored as if alone: a later token's request may allow another expansion.
        decided = torch.cat([used.unsqueeze(-1), margins[..., 1:] > 0, totals[:, RECENT:]], dim=-1)
        new = (torch.stack([inputs.tokens, inputs.positions], dim=-1), decided)
        text, stored = (
            part[:, 0] for part in state.text.update(*(part.unsqueeze(1) for part in new))
        )
        whole, opens = inputs._replace(tokens=text[..., 0], positions=text[..., 1]), stored.long()
        winner_kept, used_kept = winner[:, kept], used[:, kept]
        x = self.final_norm.base(read[self.config.num_hidden_layers][:, kept])
        added = list[tuple[Tensor, range, Tensor]]()
        for index, model in enumerate(self._models, start=1):
            path, own, parts = state.paths[index], opens[..., index : index + 1].bool(), []
            if index not in streams and path.runs_on.any():
                streams[index] = self._run_on(
                    index, path.runs_on, inputs, path.inner, own[:, -length:]
                )
            if index in streams:
                parts.append((path.runs_on, streams[index]))
            joining = (winner == index).any(1) & ~path.runs_on
            if joining.any():
                cache = empty_like(path.inner, model.config)
                parts.append((joining, self._run_on(index, joining, whole, cache, own)))
                path.join(joining, cache)
                if is_preserve(model):
                    state.paths[BASE].leave(joining & state.paths[BASE].runs_on)
            for rows, stream in parts:
                path_x, x_up = model.final_norm(
                    *(part[:, -length:][:, kept] for part in stream[:2])
                )
                x[rows] = torch.where(used_kept[rows].eq(index).unsqueeze(-1), path_x, x[rows])
                x_up = x_up.masked_fill(winner_kept[rows].ne(index).unsqueeze(-1), 0)
                added.append(
                    (rows, self.pieces[index - 1], F.linear(x_up, model.output.expansion).float())
                )
        # In products of their own, columns are the base's, or an expansion's alone, whatever others follow.
        old = self.output.of_base
        spans = [range(old), *filter(len, self.pieces)]
        z = torch.cat(
            [F.linear(x, self.output.base[span.start : span.stop]) for span in spans], -1
        ).float()
        for rows, own, of_rows in added:
            part = z[rows]
            part[..., :old] += of_rows[..., :old]
            part[..., own.start : own.stop] += of_rows[..., old:]
            z[rows] = part
        z = self.output._capped(z)
        for index, pieces in enumerate(
            self.pieces, start=1
        ):  # only the expansion that has a piece may give it
            z[..., pieces.start : pieces.stop].masked_fill_(
                winner_kept.ne(index).unsqueeze(-1), NEVER
            )
        return z

    def _totals(self, margins: Tensor, state: State) -> Tensor:
        """The sum of each gate's positive margins over the text up to each of the last tokens: [B, RECENT + S, E].

        margins: [B, S, P]. Summed one by one, so that a text read in parts has the totals of the whole.
        """
        past = margins.new_zeros(len(margins), RECENT, len(self.names), dtype=torch.double)
        if state.text.get_seq_length() > 0:
            past = torch.cat([past, state.text.values[:, 0, -RECENT:, -len(self.names) :]], dim=1)[
                :, -RECENT:
            ]
        own = margins[..., 1:].clamp(0, LARGEST_MARGIN).double()
        return torch.cat([past, torch.cat([past[:, -1:], own], dim=1).cumsum(1)[:, 1:]], dim=1)

    def _choice(
        self, margins: Tensor, totals: Tensor, allowed: Tensor, state: State
    ) -> tuple[Tensor, Tensor]:
        """For each token, the path whose gate opens it, BASE if none does, and the path that is used, both [B, S].

        Of the `allowed` [B, 1, P], the one whose margins [B, S, P] were largest lately wins, if its gate is open, and
        on a new piece the one that has it; of equal ones none. A closed token uses the path of the open one before it,
        if that is allowed now.
        """
        lately = F.pad(totals[:, RECENT:] - totals[:, :-RECENT], (1, 0))
        lately = lately.masked_fill(margins.isposinf(), torch.inf).masked_fill(~allowed, -1)
        best, first = lately.max(-1, keepdim=True)
        is_one = (lately == best).sum(-1, keepdim=True) == 1
        winner = first.masked_fill(~is_one | (margins.gather(-1, first) <= 0), BASE)[..., 0]
        before = winner.new_full((len(winner), 1), BASE)
        if state.text.get_seq_length() > 0:
            before = state.text.values[:, 0, -1:, 0].long()
        places = torch.arange(1, winner.shape[1] + 1, device=winner.device)
        last = (winner != BASE).long().mul(places).cummax(dim=1).values
        used = torch.cat([before, winner], dim=1).gather(1, last)
        return winner, used.masked_fill(
            ~allowed.expand(*used.shape, -1).gather(-1, used.unsqueeze(-1))[..., 0], BASE
        )

    def _base_stream(
        self, inputs: Inputs, state: State
    ) -> tuple[dict[int, Tensor], dict[int, StreamPath]]:
        """The base's stream [B, S, D] before each layer that a gate reads, and under their number after the last.

        It is that of the base's path and of all paths that leave it as it is. The second are the latter's streams.
        """
        layers = {model.config.gate_layer for model in self._models}
        size, last = self.config.hidden_size, self.config.num_hidden_layers
        empty = self.embedding.base.weight.new_empty
        read = {layer: empty(*inputs.tokens.shape, size) for layer in (*layers, last)}
        streams = {}
        for index, (path, model) in enumerate(zip(state.paths, (self, *self._models), strict=True)):
            if not path.runs_on.any() or (index != BASE and not is_preserve(model)):
                continue
            recorded: dict[int, Any] = dict.fromkeys(layers - {last})
            closed = torch.zeros_like(inputs.tokens, dtype=torch.bool).unsqueeze(-1)
            streams[index] = self._run_on(index, path.runs_on, inputs, path.inner, closed, recorded)
            for layer, stream in {**recorded, last: streams[index]}.items():
                read[layer][path.runs_on] = stream.x
        streams.pop(BASE, None)
        return read, streams

    def _margins(self, read: dict[int, Tensor], inputs: Inputs, state: State) -> Tensor:
        """By how much each gate's score is above its threshold: [B, S, P]; the base's is 0."""
        tokens, attention_mask, positions, cache, _ = inputs
        margins = [torch.zeros(*tokens.shape, 1, device=tokens.device)]
        is_text, documents = texts_of(
            read[self.config.num_hidden_layers], attention_mask, positions, cache
        )
        if documents is not None and documents.any():
            raise ValueError(
                "position_ids: a model with several expansions takes one text in a row, found several"
            )
        for model, stored, pieces in zip(self._models, state.gates, self.pieces, strict=True):
            gate = model.token_gate
            assert gate is not None  # an expansion without one is not added
            margin = (
                gate.scores(read[model.config.gate_layer], is_text, documents, stored)
                - gate.threshold
            )
            if is_text is not None:
                margin = margin.masked_fill(~is_text.unsqueeze(-1), -torch.inf)
            is_own = (tokens >= pieces.start) & (tokens < pieces.stop)
            margin = margin.masked_fill(is_own.unsqueeze(-1), torch.inf)
            margins.append(margin)
        return torch.cat(margins, dim=-1)

    def _run_on(
        self,
        index: int,
        rows: Tensor,
        inputs: Inputs,
        cache: DynamicCache,
        opens: Tensor,
        recorded: dict[int, Any] | None = None,
    ) -> StreamPath:
        """The path's streams [R, S, …] after its last layer, on the sequences `rows` [B]. opens: bool [B, S, 1]."""
        model, part = (self, *self._models)[index], inputs.of(rows, cache)
        start = model._start(model.embedding(part.tokens))
        if index == BASE:
            start = start._replace(x_up=start.x_up[:0])
        [path], _ = model._run([start], part, recorded, opens[rows])
        return path

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "a model with several expansions is not saved: copy the folder that scale-cpt combine wrote"
        )

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "continuous batching cannot run this model: it has a cache for each expansion"
        )


def is_of_base(name: str) -> bool:
    """Whether a tensor of a ScaleForCausalLM is its base's."""
    return "base" in name.split(".")


def is_preserve(model: ScaleForCausalLM) -> bool:
    """Whether a model leaves its base's stream as it is."""
    last: int = model.config.num_hidden_layers
    return last <= model.config.l_fp
