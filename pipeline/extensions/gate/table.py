"""What `scale-cpt gate` prints of a gate, and what it warns of."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline import log
from pipeline.config.gate import GateSettings
from pipeline.evaluation.table import cell, table
from pipeline.gating.folder import FIRST_TOKENS, GateRecord, KindFigures
from pipeline.run_folder.metrics import readable

MOST_COST = 0.02
"""By what share the gate may raise the perplexity of new text without a warning."""
_NAMED = 8
"""So many kinds of text are named in a warning."""
_logger = log.get_logger(__name__)


def as_text(record: GateRecord) -> str:
    """The tables of a gate: held-out corpora, kinds of text, changes of text, and thresholds."""
    parts = [_corpora(record)]
    if record.kinds:
        parts.append(_kinds(record.kinds))
    if record.changes:
        parts.append(_figures("where text changes", record.changes))
    parts.append(_facts(record))
    if record.thresholds:
        parts.append(_thresholds(record))
    return "\n\n".join(parts)


def _corpora(record: GateRecord) -> str:
    header = ["held-out corpus", "open", "perplexity: base", "ungated", "gated"]
    header += [f"nats lost: first {FIRST_TOKENS}", "later"]
    rows = []
    for name, text in record.heldout.items():
        row = [f"{name} ({text.role})", f"{text.open_fraction:.2%}"]
        for value in (text.base_perplexity, text.ungated_perplexity, text.gated_perplexity):
            row.append("" if value is None else readable(value))
        row.append(cell(text.cost_of_first_tokens, "+.3f"))
        row.append(cell(text.cost_of_later_tokens, "+.4f"))
        rows.append(row)
    return table(header, rows)


def _kinds(kinds: Mapping[str, KindFigures]) -> str:
    """A row for each kind of which something opens; the kinds that stay closed are a list."""
    opens: dict[str, KindFigures] = {}
    closed: list[str] = []
    tokens = 0
    for name, figures in kinds.items():
        if figures.open_tokens or figures.left_out:
            opens[name] = figures
        else:
            closed.append(name)
            tokens += figures.tokens
    by_share = dict(sorted(opens.items(), key=lambda kind: -kind[1].open_fraction))
    text = ""
    if by_share:
        text = _figures("kind of text", by_share) + "\n"
    return f"{text}closed on all {tokens:,} tokens of {len(closed)} kinds: {', '.join(closed)}"


def _figures(title: str, kinds: Mapping[str, KindFigures]) -> str:
    rows = []
    for name, figures in kinds.items():
        label = f"{name} (left out)" if figures.left_out else name
        share = f"{figures.open_fraction:.2%}"
        rows.append([label, f"{figures.tokens:,}", share, cell(figures.cost, "+.4f")])
    return table([title, "tokens", "open", "nats lost"], rows)


def _facts(record: GateRecord) -> str:
    impossible = max(text.impossible_fraction for text in record.heldout.values())
    return (
        f"the gate reads {record.features} before layer {record.layer}; on text not used for "
        f"fitting, without an extended vocabulary's new tokens, which are open: AUC "
        f"{record.auc:.5f}, {record.closed_fraction_of_new:.2%} of the tokens of new text closed, "
        f"{record.open_fraction_of_negatives:.2%} of other tokens open; "
        f"{record.left_out_of_own_text:.2%} of the self-generated text left out; "
        f"{record.open_ids} ids are open, {record.open_ids_of_new:.2%} of the tokens of new text; "
        f"at most {impossible:.2%} of a corpus's tokens are impossible: new tokens after a closed "
        "token"
    )


def _thresholds(record: GateRecord) -> str:
    """What each rule gives: how far the threshold could move."""
    rows = []
    for rule, figures in record.thresholds.items():
        label = f"{rule} (taken)" if rule == record.threshold_rule else rule
        rows.append(
            [
                label,
                f"{figures.threshold:.2f}",
                f"{figures.cost:+.2%}",
                f"{figures.closed_fraction_of_new:.2%}",
                f"{figures.open_fraction_of_negatives:.3%}",
            ]
        )
    return table(["threshold by", "threshold", "new text costs", "new closed", "other open"], rows)


def warn(record: GateRecord, settings: GateSettings) -> None:
    """Warns of what a user should know before the gate is used."""
    warn_of_cost(record)
    warn_of_open_text(record, settings)


def warn_of_open_text(record: GateRecord, settings: GateSettings) -> None:
    """Warns where more other text, or of a kind of text, opens than gate.max_open_fraction."""
    bound = settings.max_open_fraction
    if record.open_fraction_of_negatives > bound:
        _logger.warning(
            "%.3f %% of the other text is open, more than gate.max_open_fraction (%g): new and "
            "other text look alike here; gate.threshold_rule: max_open_fraction keeps the bound "
            "and closes more new text",
            100 * record.open_fraction_of_negatives,
            bound,
        )
    opened: list[str] = []
    for name, figures in record.kinds.items():
        if figures.open_fraction > bound and not figures.left_out:
            opened.append(f"{name} {figures.open_fraction:.1%}")
    if opened:
        more = f" and {len(opened) - _NAMED} more" if len(opened) > _NAMED else ""
        _logger.warning(
            "the gate opens on more than %g of %s%s: those texts are not the base's there",
            bound,
            ", ".join(opened[:_NAMED]),
            more,
        )


def warn_of_cost(record: GateRecord) -> None:
    """Warns where the gate raises the perplexity of new text by more than MOST_COST."""
    for name, text in record.heldout.items():
        if text.role == "new" and text.cost > MOST_COST:
            _logger.warning(
                "%s: its perplexity is %.1f %% higher with the gate than without: the first %d "
                "tokens cost %.2f nats each, later ones %.4f",
                name,
                100 * text.cost,
                FIRST_TOKENS,
                text.cost_of_first_tokens or 0.0,
                text.cost_of_later_tokens or 0.0,
            )
        if text.impossible_fraction > MOST_COST:
            _logger.warning(
                "%s: %.1f %% of its tokens are new tokens after a closed token: the gated model "
                "cannot write them",
                name,
                100 * text.impossible_fraction,
            )
