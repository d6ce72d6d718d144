"""What a gate does to each kind of text that it was not fitted on: how much opens, and the cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED
from pipeline.extensions.gate.effect import measure_windows
from pipeline.extensions.gate.new_text import Models
from pipeline.extensions.gate.windows import NO_KIND, Windows
from pipeline.gating.folder import KindFigures
from pipeline.gating.gate import FittedGate

_MOST_NATS = 50.0
"""Where a new token follows a closed one its probability is zero, which no mean can hold."""


def kind_figures(
    models: Models,
    gate: FittedGate,
    windows: Windows,
    is_open: Tensor,
    names: Sequence[str],
    config: RunConfig,
    left_out: Sequence[int] = (),
) -> dict[str, KindFigures]:
    """The figures of each kind in `windows`, by its name.

    The whole model runs only where a kind opens that was to stay closed: elsewhere the gate costs
    nothing, exactly.

    Args:
        models: the trained model and the base.
        gate: with its threshold.
        windows: N windows of S tokens. New tokens in them are to be open.
        is_open: bool [N, S], the tokens that the gate opens.
        names: of the kinds; the number of a kind is its place here.
        config: the run.
        left_out: the numbers of the kinds that were left out of fitting.
    """
    costs, may_cost = _costs(models, gate, windows, is_open, config, left_out)
    figures: dict[str, KindFigures] = {}
    for kind, name in enumerate(names):
        is_kind = windows.present & (windows.kinds == kind)
        if not is_kind.any():
            continue
        is_predicted = is_kind & (windows.targets != IGNORED)
        figures[name] = KindFigures(
            tokens=int(is_kind.sum()),
            open_tokens=int((is_kind & is_open).sum()),
            cost=_mean_cost(costs, is_predicted, may_cost),
            left_out=kind in left_out,
            is_new=bool(windows.is_new[is_kind].all()),
        )
    return figures


def _mean_cost(costs: Tensor, is_predicted: Tensor, may_cost: Tensor) -> float | None:
    """The mean cost of some tokens; None if there are none, or none was measured.

    Windows of which only some were measured count as these do. The others cost nothing.
    """
    needed = is_predicted & may_cost
    measured = needed & costs.isfinite()
    if not is_predicted.any() or (needed.any() and not measured.any()):
        return None
    if not needed.any():
        return 0.0
    return float(costs[measured].mean()) * int(needed.sum()) / int(is_predicted.sum())


def _costs(
    models: Models,
    gate: FittedGate,
    windows: Windows,
    is_open: Tensor,
    config: RunConfig,
    left_out: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """By how many nats the gate raises the loss of each token.

    It is compared with the model that the token should have: the one without a gate for new text,
    the base for other text. Where all tokens of other text are closed, that is 0. Kinds that were
    left out are not measured, nor more windows than in validation.

    Returns:
        The costs: [N, S] in fp64; NaN: not measured.
        Which tokens may have any: bool [N, S].
    """
    of_kind = windows.present & (windows.kinds != NO_KIND)
    is_left_out = torch.isin(windows.kinds, torch.tensor(left_out, dtype=torch.long))
    acts = windows.present & (is_open | windows.is_new)
    to_run = acts.any(dim=1) & (of_kind & ~is_left_out).any(dim=1)
    rows = to_run.nonzero().flatten()[: config.validation.max_sequences]

    costs = torch.full(windows.tokens.shape, torch.nan, dtype=torch.double)
    if len(rows):
        measured = measure_windows(*models, gate, windows.rows(rows), config)
        base_nll, ungated_nll, gated_nll = measured.clamp(max=_MOST_NATS)
        wanted_nll = torch.where(windows.is_new[rows], ungated_nll, base_nll)
        costs[rows] = gated_nll - wanted_nll
    costs[is_left_out] = torch.nan
    return costs, to_run.unsqueeze(1) | is_left_out
