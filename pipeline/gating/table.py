"""A fitted gate's figures for a terminal."""

from __future__ import annotations

from pipeline.evaluation.table import cell, readable, table
from pipeline.scale.gate_folder import FIRST_TOKENS, GateRecord


def as_text(record: GateRecord) -> str:
    """How much of each held-out corpus opens, its perplexities, and how well the gate separates unused text."""

    def shown(perplexity: float | None) -> str:
        return "" if perplexity is None else readable(perplexity)

    rows = [
        [
            f"{name} ({text.role})",
            f"{text.open_fraction:.2%}",
            f"{text.undecided_fraction:.2%}",
            shown(text.base_perplexity),
            shown(text.ungated_perplexity),
            shown(text.gated_perplexity),
            cell(text.cost_of_first_tokens, "+.3f"),
            cell(text.cost_of_later_tokens, "+.4f"),
        ]
        for name, text in record.heldout.items()
    ]
    difference = record.closed_max_abs_logit_difference
    exact = "none" if difference is None else f"{difference:g}"
    where = f"{record.features}, before layer {record.layer}"
    facts = {
        "reads": where,
        "AUC": f"{record.auc:.5f}",
        "closed, of new text": f"{record.closed_fraction_of_new:.2%}",
        "open, of other text": f"{record.open_fraction_of_negatives:.2%}",
        "left out, of the base's own text, as of the new kind": f"{record.left_out_of_own_text:.2%}",
        "largest logit difference from the base where it never opens": exact,
    }
    header = ["held-out corpus", "open", "undecided", "perplexity: base", "ungated", "gated"]
    header += [f"nats lost: first {FIRST_TOKENS}", "later"]
    return "\n".join([table(header, rows), "", *(f"{name}: {value}" for name, value in facts.items())])
