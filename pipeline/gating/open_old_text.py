"""The warning that a gate opens on more of the old text than it was asked to."""

from __future__ import annotations

import math

from pipeline import log
from pipeline.gating.folder import GateRecord, HeldoutText

_TOLERATED = 3
"""How many times gate.max_open_fraction may be open of a held-out corpus without a warning.

The threshold is set on other text, and a held-out part is a small sample.
"""
_logger = log.get_logger(__name__)


def warn_of_open_old_text(record: GateRecord, max_open_fraction: float) -> None:
    """Warns of each held-out corpus that is not new, and on which the gate opens too often."""
    for name, text in record.heldout.items():
        if text.role == "new" or text.open_fraction <= _TOLERATED * max_open_fraction:
            continue
        _logger.warning(
            "%s (%s): the gate opens on %.2f %% of it, and gate.max_open_fraction asks for %.2g %%;"
            "%s %d of %d held-out samples keep every logit of the base. Name a corpus of such text "
            "among gate.negatives, and fit the gate again",
            name,
            text.role,
            100 * text.open_fraction,
            100 * max_open_fraction,
            _growth(text),
            text.closed_sequences,
            text.sequences,
        )


def _growth(text: HeldoutText) -> str:
    """How far the perplexity with the gate is from the base's, as text."""
    if text.base_perplexity is None:
        return ""
    gated = text.gated_perplexity or math.inf
    return f" its perplexity is {gated / text.base_perplexity - 1:+.1%} from the base's;"
