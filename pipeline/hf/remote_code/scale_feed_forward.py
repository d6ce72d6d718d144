"""Feed-forward networks of both streams: dense, and a base's mixture of experts with the expansion's own beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration_scale import ScaleConfig
from .scale_streams import StreamPath, WidenedLinear, widened


class ScaleFeedForward(nn.Module):
    """The feed-forward network: gated (Llama) or plain (GPT-NeoX)."""

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        hidden = (config.hidden_size, config.expansion_hidden_size)
        inner = (config.intermediate_size, config.expansion_intermediate_size)
        bias, collaborative = config.ffn_bias, config.is_collaborative(layer, "ffn")
        self.activation = ACT2FN[config.hidden_act]
        self.gate = WidenedLinear(hidden, inner, bias, collaborative) if config.gated_ffn else None
        self.up = WidenedLinear(hidden, inner, bias, collaborative)
        self.down = WidenedLinear(inner, hidden, bias, collaborative)

    def forward(self, path: StreamPath) -> tuple[Tensor, Tensor]:
        inner, inner_up = self.up(*path)
        if self.gate is None:
            inner, inner_up = self.activation(inner), self.activation(inner_up)
        else:
            gate, gate_up = self.gate(*path)
            inner, inner_up = self.activation(gate) * inner, self.activation(gate_up) * inner_up
        fed: tuple[Tensor, Tensor] = self.down(inner, inner_up, path.masked)
        return fed


class ExpertLinear(nn.Module):
    """A linear map of every expert: rows x [N, in], sorted by expert, which end at `ends` [experts] -> [N, out]."""

    def __init__(self, experts: int, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, size_out, size_in))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if x.is_meta:
            return F.linear(x, self.weight[0])
        aligned = all(size * x.element_size() % 16 == 0 for size in self.weight.shape[1:])
        if (
            x.is_cuda
            and aligned
            and hasattr(F, "grouped_mm")
            and torch.cuda.get_device_capability(x.device) >= (8, 0)
        ):
            grouped: Tensor = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
            return grouped
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        pairs = zip(x.split(counts), self.weight, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pairs if len(rows)])


class ScaleMixture(nn.Module):
    """A mixture of experts: the base's router and experts on x alone; the expansion's FFN on both streams beside them.

    Of the down map, base_to_expansion reads the sum of the experts, not the inner activations of those that ran.
    """

    def __init__(self, config: ScaleConfig, layer: int) -> None:
        super().__init__()
        mixture: dict[str, Any] = config.mixture or {}
        size, up, inner = (
            config.hidden_size,
            config.expansion_hidden_size,
            config.expansion_intermediate_size,
        )
        self.mixture, width, shared = mixture, mixture["intermediate_size"], mixture["shared_size"]
        self.experts, self.top_k = mixture["experts"], mixture["top_k"]
        self.activation = ACT2FN[config.hidden_act]

        def maps(**sizes: tuple[int, int]) -> nn.ModuleDict:
            return nn.ModuleDict(
                {name: nn.Linear(*pair, bias=False) for name, pair in sizes.items()}
            )

        sizes = {"gate": (size, width), "up": (size, width), "down": (width, size)}
        experts = nn.ModuleDict(
            {name: ExpertLinear(self.experts, *pair) for name, pair in sizes.items()}
        )
        self.base = nn.ModuleDict(
            {"router": nn.Linear(size, self.experts, bias=False), "experts": experts}
        )
        if mixture["sigmoid"]:  # the sum of three numbers of 16 bits
            self.base["router"].bias = nn.Parameter(torch.empty(3, self.experts))
        if shared:
            sizes = {"gate": (size, shared), "up": (size, shared), "down": (shared, size)}
            self.base["shared"] = nn.ModuleDict(
                {name: maps(base=pair) for name, pair in sizes.items()}
            )
            if mixture["gated"]:
                self.base["shared"].weight = nn.Parameter(torch.empty(1, size))
        self.gate = maps(base_to_expansion=(size, inner), expansion_to_expansion=(up, inner))
        self.up = maps(base_to_expansion=(size, inner), expansion_to_expansion=(up, inner))
        collaborative = (
            {"expansion_to_base": (inner, size)} if config.is_collaborative(layer, "ffn") else {}
        )
        self.down = maps(
            base_to_expansion=(size, up), expansion_to_expansion=(inner, up), **collaborative
        )

    def forward(self, path: StreamPath) -> tuple[Tensor, Tensor]:
        x, x_up, masked = path
        y = self._mixed(x.flatten(0, 1)).view_as(x)
        if len(x_up) == 0:
            return y, x_up
        gate, inner = (
            pair["base_to_expansion"](x) + pair["expansion_to_expansion"](x_up)
            for pair in (self.gate, self.up)
        )
        inner = self.activation(gate) * inner
        if "expansion_to_base" in self.down and masked is not True:
            y = widened(y, self.down["expansion_to_base"](inner), masked)
        return y, self.down["base_to_expansion"](y) + self.down["expansion_to_expansion"](inner)

    def _mixed(self, x: Tensor) -> Tensor:
        """x [N, D] -> the sum over the experts that each token takes."""
        weights, chosen = self._routed(x)
        taken, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(
            taken, torch.arange(self.experts, device=x.device), right=True, out_int32=True
        )
        maps: Any = self.base["experts"]
        tokens = x[order // self.top_k]
        inner = self.activation(maps["gate"](tokens, ends)) * maps["up"](tokens, ends)
        found = maps["down"](inner * weights.to(x.dtype).flatten()[order].unsqueeze(-1), ends)
        by_token = torch.empty_like(found).index_copy(0, order, found)
        y = by_token.unflatten(0, (-1, self.top_k)).sum(1)
        if "shared" not in self.base:
            return y
        shared: Any = self.base["shared"]
        gate, up, down = (shared[name]["base"] for name in ("gate", "up", "down"))
        every = down(self.activation(gate(x)) * up(x))
        return y + (
            F.linear(x, shared.weight).sigmoid() * every if self.mixture["gated"] else every
        )

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> the weights of the experts that each token takes, and their numbers, both [N, k]."""
        mixture = self.mixture
        router: Any = self.base["router"]
        if mixture["sigmoid"]:
            scores = F.linear(x.float(), router.weight.float()).sigmoid()
            choice = scores + router.bias.float().sum(0)
            chosen = choice.topk(self.top_k, dim=-1).indices
            weights = scores.gather(1, chosen)
        else:
            weights, chosen = (
                F.linear(x, router.weight).float().softmax(-1).topk(self.top_k, dim=-1)
            )
        if mixture["normalised"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all may be 0
        return weights * mixture["scale"], chosen
