"""What open tokens have of their own beside the weights of a hosted base.

As `pipeline.model.open_weights`, but beside modules of transformers, in forward hooks:

    a linear map        y += s B A x
    a norm              y  = its own code with the gain w + Δw (and the bias b + Δb)
    the first layer     x += the own row of each token, as x enters it
    the output map      its rows + own rows (`pipeline.extensions.hosted.output`)

No family's formula of a norm is repeated here: some multiply by 1 + w, some subtract a mean.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipeline.extensions.hosted.transformers_model import linear_sizes
from pipeline.hf.remote_code.scale_own_calls import call_with_own_gain
from pipeline.open_weights import OpenWeights
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.parameters import full_shape_of, sharded_parameter
from pipeline.parallel.sharding import REPLICATED
from pipeline.parallel.topology import SINGLE


class OwnGains(nn.Module):
    """The trained differences of a norm's gain and bias, by the names of the norm's parameters."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters():
            own = sharded_parameter(full_shape_of(parameter), REPLICATED, SINGLE)
            self.register_parameter(name, own)

    def forward(self, norm: nn.Module, arguments: tuple[Any, ...]) -> Tensor:
        """What `norm` gives with its gain and bias changed.

        It must be called from a forward hook of `norm`, while ZeRO-3 has its weights gathered.
        """
        return call_with_own_gain(norm, self, arguments)


def low_rank_differences(
    layer: nn.Module, names: tuple[str, ...], own: OpenWeights | None
) -> dict[str, LowRankAdapter]:
    """The differences s B A of the linear maps `names` of a layer of the base.

    Empty where `own` is None, or has no low-rank differences.
    """
    differences: dict[str, LowRankAdapter] = {}
    if own is None or own.low_rank is None:
        return differences
    for name in names:
        sizes = linear_sizes(layer.get_submodule(name))
        assert sizes is not None, "only linear maps were found"
        size_in, size_out = sizes
        differences[name] = LowRankAdapter(
            (size_out, size_in), own.low_rank, scale=own.low_rank_scale, tp=SINGLE
        )
    return differences


def own_gains(layer: nn.Module, names: tuple[str, ...]) -> dict[str, OwnGains]:
    """The differences of the gains of the norms `names` within `layer`."""
    return {name: OwnGains(layer.get_submodule(name)) for name in names}
