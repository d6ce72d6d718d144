"""The tables of a gate: by corpus, by kind of text, and by rule of the threshold."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.gate import GateSettings
from pipeline.extensions.report.formats import MINUS, NOTHING, listed, number, percent
from pipeline.extensions.report.gate_record import GateFigures
from pipeline.extensions.report.html_page import TableSection
from pipeline.extensions.report.recorded_run import RecordedRun
from pipeline.extensions.report.tables import Cell, Table, TableRow
from pipeline.gating.folder import FIRST_TOKENS, HeldoutText, KindFigures

_NAMED = 8
"""So many kinds of text are named in a sentence."""


def gate_sections(run: RecordedRun) -> list[TableSection]:
    """The sections of the run's gate; none where it has none."""
    gate = run.gate
    if gate is None:
        return []
    sections = [
        TableSection(
            "gate",
            "The gate, by corpus",
            _corpora(gate),
            "Of held-out text. Where a token is closed, the model is the base to the bit. "
            f"The nats are what the gate adds to the loss of a token: of the first {FIRST_TOKENS} "
            "of a document, and of all later ones.",
            after=_facts(gate),
        )
    ]
    if gate.kinds:
        sections.append(
            TableSection(
                "kinds",
                "The gate, by language and kind of text",
                _kinds(gate.kinds),
                "Of text that was not used for fitting, the most open kinds first. The nats are "
                "what the gate adds to the loss of a token, over the base's.",
                after=_closed_kinds(gate.kinds),
            )
        )
    if gate.changes:
        sections.append(
            TableSection(
                "changes",
                "The gate, where text changes within a document",
                _table_of_kinds(gate.changes),
            )
        )
    if gate.thresholds:
        sections.append(
            TableSection(
                "thresholds",
                "The gate's threshold",
                _thresholds(gate),
                "What each rule for the threshold would give. A higher one closes more text.",
            )
        )
    return sections


def opened_kinds(run: RecordedRun) -> str | None:
    """A sentence on the kinds of other text that open beyond the run's bound; None: no kind."""
    if run.gate is None:
        return None
    bound = _bound(run)
    names: list[str] = []
    for name, kind in _by_share(run.gate.kinds).items():
        if kind.open_fraction > bound and not kind.left_out:
            names.append(f"{name} ({percent(kind.open_fraction)})")
    if not names:
        return None
    if len(names) > _NAMED:
        names[_NAMED:] = [f"{len(names) - _NAMED} more"]
    return f"The gate opens on more than {percent(bound)} of {listed(names)}."


def _bound(run: RecordedRun) -> float:
    """`gate.max_open_fraction` of the run."""
    settings = run.settings.get("gate")
    value = settings.get("max_open_fraction") if isinstance(settings, dict) else None
    if isinstance(value, int | float):
        return float(value)
    return float(GateSettings.model_fields["max_open_fraction"].default)


def _corpora(gate: GateFigures) -> Table:
    header = ["open", "base", "without gate", "with gate"]
    header += [f"first {FIRST_TOKENS}", "later", "sequences as the base's"]
    rows: list[TableRow] = []
    for name, text in gate.heldout.items():
        cells = [Cell(_share(text.open_fraction), f"of {text.tokens:,} tokens")]
        cells.append(_perplexity(text.base_perplexity))
        cells.append(_perplexity(text.ungated_perplexity))
        cells.append(_gated(text))
        cells.append(_nats(text.cost_of_first_tokens))
        cells.append(_nats(text.cost_of_later_tokens))
        cells.append(Cell(f"{text.closed_sequences:,} of {text.sequences:,}"))
        rows.append(TableRow(f"{name} ({text.role})", cells))
    return Table(header, rows, [("", 1), ("perplexity", 3), ("nats added", 2), ("", 1)])


def _gated(text: HeldoutText) -> Cell:
    """The gated perplexity, and how many tokens it does not count as they are impossible."""
    cell = _perplexity(text.gated_perplexity)
    if text.impossible_fraction:
        return Cell(cell.text, f"{_share(text.impossible_fraction)} impossible")
    return cell


def _perplexity(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else number(value))


def _nats(value: float | None) -> Cell:
    if value is None:
        return Cell(NOTHING)
    return Cell(f"{value:+.4f}".replace("-", MINUS))


def _share(fraction: float) -> str:
    """A share with two decimals, as the bounds of gates are small."""
    return f"{100 * fraction:.2f}\N{NARROW NO-BREAK SPACE}%"


def _kinds(kinds: Mapping[str, KindFigures]) -> Table:
    """A row for each kind of which something opens, or which was left out of fitting."""
    shown: dict[str, KindFigures] = {}
    for name, kind in _by_share(kinds).items():
        if kind.open_tokens or kind.left_out:
            shown[name] = kind
    return _table_of_kinds(shown or kinds)


def _table_of_kinds(kinds: Mapping[str, KindFigures]) -> Table:
    rows: list[TableRow] = []
    for name, kind in kinds.items():
        label = f"{name} (left out of fitting)" if kind.left_out else name
        cells = [Cell(_share(kind.open_fraction)), Cell(f"{kind.open_tokens:,}")]
        cells += [Cell(f"{kind.tokens:,}"), _nats(kind.cost)]
        rows.append(TableRow(label, cells))
    return Table(["open", "open tokens", "tokens", "nats added"], rows)


def _by_share(kinds: Mapping[str, KindFigures]) -> dict[str, KindFigures]:
    return dict(sorted(kinds.items(), key=lambda item: -item[1].open_fraction))


def _closed_kinds(kinds: Mapping[str, KindFigures]) -> str:
    """Which kinds stay closed, in a sentence; they have no row of their own."""
    closed = [name for name, kind in kinds.items() if not kind.open_tokens and not kind.left_out]
    if not closed:
        return ""
    tokens = sum(kinds[name].tokens for name in closed)
    return f"Closed on all {tokens:,} tokens of {len(closed)} kinds: {', '.join(closed)}."


def _thresholds(gate: GateFigures) -> Table:
    rows: list[TableRow] = []
    for rule, figures in gate.thresholds.items():
        label = rule.replace("_", " ")
        if rule == gate.threshold_rule:
            label += " (taken)"
        cells = [Cell(number(figures.threshold)), Cell(percent(figures.cost, "+"))]
        cells += [
            Cell(_share(figures.closed_fraction_of_new)),
            Cell(_share(figures.open_fraction_of_negatives)),
        ]
        rows.append(TableRow(label, cells))
    return Table(["threshold", "new text costs", "new text closed", "other text open"], rows)


def _facts(gate: GateFigures) -> str:
    """What else is known of the gate, in a sentence each."""
    facts = [
        f"The gate reads the input of layer {gate.layer}; a token is open above a score of "
        f"{number(gate.threshold)}. AUC {gate.auc:.5f}, on text that was not used for fitting."
    ]
    if gate.open_fraction_of_negatives is not None:
        facts.append(f"Of other text {_share(gate.open_fraction_of_negatives)} is open.")
    if gate.closed_fraction_of_new is not None:
        facts.append(f"Of new text {_share(gate.closed_fraction_of_new)} is closed.")
    if gate.open_ids:
        facts.append(f"{gate.open_ids:,} ids are open whatever their score.")
    difference = gate.closed_max_abs_logit_difference
    if difference is not None:
        facts.append(
            f"Where the gate never opened, logits were at most {difference:g} from the base's."
        )
    return " ".join(facts)
