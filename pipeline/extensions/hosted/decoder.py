"""A decoder whose base transformers computes, frozen, with what a method adds beside its modules.

The base is a submodule, `base`, with transformers' own names and code; everything else is the
expansion. Without a forward pass of ours the base runs as it does alone: `path="base"` is
transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import BaseModelError, ConfigError
from pipeline.extensions.hosted import base_attention
from pipeline.extensions.hosted.added_blocks import AddedLayer
from pipeline.extensions.hosted.base_attention import BaseAttention
from pipeline.extensions.hosted.document_rows import DocumentRows
from pipeline.extensions.hosted.documents import base_inputs
from pipeline.extensions.hosted.forward_pass import ExpansionHooks, ForwardPass
from pipeline.extensions.hosted.output import HostedOutput
from pipeline.extensions.hosted.own_weights import own_gains
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.structure import HIDDEN_STATES
from pipeline.extensions.hosted.transformers_model import build_base
from pipeline.hf.remote_code.scale_own_calls import nested
from pipeline.model.attention import Documents, attention_kernel
from pipeline.model.causal_decoder import CausalDecoder, LogitsPath
from pipeline.model.chunked_loss import Losses
from pipeline.model.decoder_layer import Context
from pipeline.model.gated_paths import TokenGate
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.open_weights import OwnInputRows
from pipeline.model.paths import TokenBatch
from pipeline.model.rotary import RotaryEmbedding
from pipeline.open_tokens import ALL_OPEN, NONE_OPEN, OpenTokens, choose_path
from pipeline.parallel.layers import RMSNorm, VocabularyParallelEmbedding
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import ExpansionPlan, added_widths


class HostedEmbedding(nn.Module):
    """tokens: [B, S] -> the first x_up: [B, S, U]. The base looks up its own rows itself."""

    def __init__(self, vocab_size: int, expansion_size: int) -> None:
        super().__init__()
        self.expansion = VocabularyParallelEmbedding(vocab_size, expansion_size, tp=SINGLE)

    def forward(self, tokens: Tensor) -> Tensor:
        x_up: Tensor = self.expansion(tokens)
        return x_up


class HostedDecoder(CausalDecoder):
    """A hosted base and its expansion.

    Attributes:
        base: the model that transformers builds, always in evaluation mode.
        layers: the added blocks of each layer, and the open weights of the layer's
            maps and norms.
        own: the differences of the gains of the norms after the last layer.
    """

    spec: HostedSpec
    plan: ExpansionPlan

    def __init__(self, spec: HostedSpec, plan: ExpansionPlan) -> None:
        super().__init__(spec, plan, SINGLE)
        added = added_widths(plan)
        expansion_size = None if added is None else added.hidden_size
        # First, so that a weight which `output` shares with it has its name from here.
        self.base = build_base(spec)
        self.embedding: HostedEmbedding | None = None
        self.final_norm: RMSNorm | None = None
        if expansion_size is not None:
            self.embedding = HostedEmbedding(spec.vocab_size, expansion_size)
            self.final_norm = RMSNorm(expansion_size, spec.norm_eps, SINGLE)
        structure = spec.structure
        self.layers = nn.ModuleList()
        for index, layer in enumerate(structure.layers):
            of_base = self.base.get_submodule(structure.layer_name(layer))
            self.layers.append(AddedLayer(spec, plan, index, layer, of_base))
        base_map = self.base.get_submodule(structure.output)
        own_row_of = self.own_row_of()
        self.output = HostedOutput(spec, expansion_size, base_map, own_row_of)
        if own_row_of is not None:
            self.own_input = OwnInputRows(own_row_of, spec.widths.hidden_size, tp=SINGLE)
        last_norms = structure.last_norms if plan.has_own_gains(spec.num_layers) else ()
        last_gains = own_gains(self.base, last_norms)
        self.own = nested(last_gains)
        self._rotary = RotaryEmbedding()
        self._base_attention = BaseAttention(self.base)
        layers = [layer for layer in self.layers if isinstance(layer, AddedLayer)]
        self._hooks = ExpansionHooks(self.base, structure, layers, last_gains)

    def __deepcopy__(self, memo: object) -> HostedDecoder:
        raise TypeError("a hosted decoder cannot be copied: its hooks would run the original")

    @property
    def keeps_base(self) -> bool:
        return True

    def train(self, mode: bool = True) -> HostedDecoder:
        """Training mode for the expansion; the frozen base has no dropout."""
        super().train(mode)
        self.base.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostedDecoder:
        """Applies `fn`, such as a move or a cast, but for a cast of the base's buffers.

        transformers keeps buffers in fp32, the rotary frequencies of every base among them. A cast
        of the whole module (`Module.to`, `bfloat16`) would shift all angles. DeepSpeed casts
        parameters only.
        """
        before = dict(self.base.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            parent, _, leaf = name.rpartition(".")
            module = self.base.get_submodule(parent)
            now = module.get_buffer(leaf)
            if now.dtype != buffer.dtype:
                # From the values before the cast, which has rounded them.
                module._buffers[leaf] = buffer.to(now.device)
        return self

    def modules_gathered_whole(self) -> Iterator[nn.Module]:
        structure = self.spec.structure
        for layer in structure.layers:
            for block in layer.blocks:
                yield self.base.get_submodule(f"{structure.layer_name(layer)}.{block.name}")

    def recomputed_layers(self) -> Iterator[nn.Module]:
        structure = self.spec.structure
        for layer, added in zip(structure.layers, self.layers, strict=True):
            assert isinstance(added, AddedLayer)
            if self._is_recomputed(added):
                yield self.base.get_submodule(structure.layer_name(layer))

    def compile_layers(self, backend: str = "inductor") -> None:
        raise ConfigError("compile: expected false beside a hosted base (base_code: transformers)")

    def add_reference(self) -> None:
        raise AssertionError("a hosted base is frozen: it is its own reference")

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        kl_sequences: int = 0,
        reference_sequences: int = 0,
    ) -> Losses:
        batch = TokenBatch(tokens, positions, documents)
        hidden = self.hidden_states(*batch)
        if reference_sequences:
            reference = self._reference_states(hidden, batch.first_sequences(reference_sequences))
            hidden = replace(hidden, reference=reference)
        losses: Losses = self.output(hidden, targets.flatten(), kl_sequences * tokens.shape[1])
        return losses.reshaped(targets.shape)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        path: LogitsPath = "model",
    ) -> HiddenStates:
        batch = TokenBatch(tokens, positions, documents)
        rows = DocumentRows.of(batch, self.spec.structure.documents)
        if path == "base":
            hidden = HiddenStates(self._run(rows.batch, None), open_tokens=NONE_OPEN)
        elif path == "preserved" or self.gate is None:
            open_tokens = NONE_OPEN if path == "preserved" else ALL_OPEN
            hidden = self._widened_states(rows.batch, open_tokens)
        else:
            hidden = self._gated_states(self.gate, rows.batch)
        return rows.restored(hidden.one_token_a_row())

    @torch.no_grad()
    def base_stream(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        layer: int,
    ) -> Tensor:
        rows = DocumentRows.of(
            TokenBatch(tokens, positions, documents), self.spec.structure.documents
        )
        streams: list[Tensor] = []
        with self._stream_shown_to(streams.append, layer):
            self._run(rows.batch, None)
        hidden = rows.restored(HiddenStates(streams[0]).one_token_a_row())
        return hidden.x.view(*tokens.shape, -1)

    def _run(self, batch: TokenBatch, forward_pass: ForwardPass | None) -> Tensor:
        """The base's last hidden states, after its last norm: [B, S, D]."""
        body = self.base.get_submodule(self.spec.body)
        separation = self.spec.structure.documents
        device = batch.tokens.device
        inputs = base_inputs(
            batch,
            separation,
            self.base.config,
            self.dtype,
            by_kernels=self._attends_by_kernels(device),
        )
        with self._hooks.run(forward_pass), self._attending(device):
            output = body(input_ids=batch.tokens, **inputs)
        states: Tensor = output.last_hidden_state
        return states

    def _attends_by_kernels(self, device: torch.device) -> bool:
        """Whether the base attends by the kernels of native bases, without masks."""
        if self.spec.kernels_unsupported_reason is not None:
            return False
        return device.type in base_attention.KERNEL_DEVICES

    def _attending(self, device: torch.device) -> AbstractContextManager[None]:
        """Within it, layers of the base call the attention of passes on `device`."""
        if self._attends_by_kernels(device):
            return self._base_attention.by_kernels()
        return nullcontext()

    def _new_forward_pass(self, batch: TokenBatch, open_tokens: OpenTokens) -> ForwardPass:
        """What a forward of the base on `batch` needs on the side of the expansion."""
        tokens, positions, documents = batch
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotary = self.spec.layers[0].rotary
        table = None
        if rotary is not None:
            table = self._rotary.table(rotary, positions, documents, self.dtype)
        attend = attention_kernel(documents, tokens.device, self.dtype, self.spec.head_dim)
        return ForwardPass(
            None if self.embedding is None else self.embedding(tokens),
            Context(table, attend),
            open_tokens,
            is_recomputed=self._is_recomputed,
            attending=partial(self._attending, tokens.device),
            own_input=self.own_input_of(tokens),
        )

    def _is_recomputed(self, layer: AddedLayer) -> bool:
        if self.activation_checkpointing == "collaborative":
            return layer.collaborative
        return self.activation_checkpointing == "all"

    def _widened_states(self, batch: TokenBatch, open_tokens: OpenTokens) -> HiddenStates:
        """The last hidden states of both streams, [B, S, ...]."""
        forward_pass = self._new_forward_pass(batch, open_tokens)
        x = self._run(batch, forward_pass)
        return HiddenStates(x, self._last_x_up(forward_pass), open_tokens=open_tokens)

    def _last_x_up(self, forward_pass: ForwardPass) -> Tensor | None:
        """The normalised x_up after the last layer; None without an expansion."""
        if self.final_norm is None or forward_pass.x_up is None:
            return None
        x_up: Tensor = self.final_norm(forward_pass.x_up)
        return x_up

    def _gated_states(self, gate: TokenGate, batch: TokenBatch) -> HiddenStates:
        """The last hidden states where closed tokens have neither W12 nor added logits."""
        if gate.layer > self.plan.last_exact_layer:
            raise ValueError("a gate needs the exact base stream of a widened model")
        forward_pass = self._new_forward_pass(batch, ALL_OPEN)
        found: list[OpenTokens] = []

        def decide(x: Tensor) -> None:
            # Below the gate's layer nothing is added to x: the decision counts from here on.
            forward_pass.open_tokens = self.gate_opens(gate, x, batch)
            found.append(forward_pass.open_tokens)

        with self._stream_shown_to(decide, gate.layer):
            x = self._run(batch, forward_pass)
        (open_tokens,) = found  # the gate's layer runs once
        last = (x, self._last_x_up(forward_pass))
        # Both paths are this one forward, in which x is the base's own where the gate is closed.
        # What is left to choose is x_up: zeros for closed tokens.
        x, x_up = choose_path(open_tokens, last, last)
        return HiddenStates(x, x_up, open_tokens=open_tokens)

    @torch.no_grad()
    def _reference_states(self, hidden: HiddenStates, of_base: TokenBatch) -> Tensor:
        """The base's own last hidden states of the first sequences: [R, D]."""
        if self.equals_base or self.plan.last_exact_layer == self.plan.num_layers:
            # The second is Preserve, whose base stream is always the base's.
            return hidden.x[: of_base.tokens.numel()].detach()
        return self.hidden_states(*of_base, path="base").x

    @contextmanager
    def _stream_shown_to(self, use: Callable[[Tensor], object], layer: int) -> Iterator[None]:
        """Shows `use` the residual stream before `layer` of a forward within, or after the last.

        Raises:
            BaseModelError: within, where the base has several residual streams.
        """
        structure = self.spec.structure
        last = len(structure.layers) - 1
        module = self.base.get_submodule(structure.layer_name(structure.layers[min(layer, last)]))

        def show(stream: Tensor) -> None:
            if stream.dim() != 3 or stream.shape[-1] != structure.hidden_size:
                raise BaseModelError(
                    f"a hosted base (model_type {self.spec.family}) has a residual stream of "
                    f"{list(stream.shape)}: expected [B, S, {structure.hidden_size}] for a gate; "
                    "take another base"
                )
            use(stream)

        def before(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            show(arguments[0] if arguments else options[HIDDEN_STATES])

        def after(_: nn.Module, __: Any, output: Any) -> None:
            show(output[0] if isinstance(output, (tuple, list)) else output)

        if layer > last:
            # After the last layer there is no input to look at, only the last layer's output.
            handle = module.register_forward_hook(after)
        else:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
