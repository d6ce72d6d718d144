"""What a search proposes: the table of all candidates, and the settings of the best that keeps within the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import BudgetError
from pipeline.estimation.matching import section_of
from pipeline.evaluation.table import readable, table
from pipeline.files import write_json
from pipeline.search.judgement import Judged, ranked

PROPOSAL = "proposal.json"
_HEADER = ["", "learning rate", "trained", "steps", "new: perplexity", "replay: perplexity", "increase", "expected", ""]


@dataclass(frozen=True)
class Proposal:
    """The judged candidates of a search, those of the last round first: only among these one is chosen."""

    judged: Sequence[Judged]

    @cached_property
    def finalists(self) -> list[Judged]:
        """Those that came to the last round, the best first."""
        rounds = max(len(one.probes) for one in self.judged)
        return ranked([one for one in self.judged if one.probes and len(one.probes) == rounds])

    @property
    def choice(self) -> Judged:
        """The best.

        Raises:
            BudgetError: no candidate keeps within the budget.
        """
        first = self.judged[0]
        if not self.finalists:
            raise BudgetError(f"every candidate diverged, {len(self.judged)} in all; try lower --learning-rates")
        best = self.finalists[0]
        if not best.feasible:
            raise BudgetError(
                f"no candidate is expected to keep within the budget of {first.budget:+.1%} after {first.whole_steps} "
                f"steps: {best.candidate} forgets least, {best.expected_increase:+.1%}; raise data.replay_fraction, or "
                "try lower --learning-rates, variant preserve, or a larger --max-increase"
            )
        return best

    def as_text(self) -> str:
        """A row a candidate, as its last probe left it; the best first."""
        finalists = self.finalists
        others = ranked([one for one in self.judged if one not in finalists])
        whole = self.judged[0].whole_steps
        header = [f"at {whole} steps" if cell == "expected" else cell for cell in _HEADER]
        return table(header, [_line(one) for one in [*finalists, *others]])

    def as_yaml(self) -> str:
        """The settings for the run's configuration, under a line that says what they are expected to do.

        Raises:
            BudgetError: no candidate keeps within the budget.
        """
        choice = self.choice
        last = choice.probes[-1]
        settings = {
            "method": section_of(choice.candidate.method),
            "schedule": {"learning_rate": choice.candidate.learning_rate},
            "forgetting": {"max_increase": choice.budget},
        }
        return (
            f"# {choice.candidate.trained:,} trained parameters; after {last.steps} steps new perplexity "
            f"{readable(last.new_perplexity)}, replay {last.increase:+.1%};\n"
            f"# expected after {choice.whole_steps} steps: replay {choice.expected_increase:+.1%} "
            f"of a budget of {choice.budget:+.1%}\n"
        ) + yaml.safe_dump(settings, sort_keys=False)

    def write(self, folder: Path) -> None:
        """Puts all of it into `folder`, for a program."""
        best = self.finalists[0] if self.finalists and self.finalists[0].feasible else None
        first = self.judged[0]
        values = {
            "max_increase": first.budget,
            "steps": first.whole_steps,
            "choice": None if best is None else _values(best),
            "candidates": [_values(one) for one in self.judged],
        }
        write_json(folder / PROPOSAL, values)


def _line(one: Judged) -> list[str]:
    candidate = one.candidate
    cells = [candidate.shape, f"{candidate.learning_rate:g}", f"{candidate.trained:,}"]
    if not one.probes:
        return [*cells, "", "", "", "", "", "diverged"]
    last = one.probes[-1]
    figures = [readable(last.new_perplexity), readable(last.replay_perplexity)]
    mark = "within" if one.feasible else "beyond"
    return [*cells, str(last.steps), *figures, f"{last.increase:+.1%}", f"{one.expected_increase:+.1%}", mark]


def _values(one: Judged) -> dict[str, Any]:
    candidate = one.candidate
    return {
        "shape": candidate.shape,
        "method": section_of(candidate.method),
        "learning_rate": candidate.learning_rate,
        "trainable_parameters": candidate.trained,
        "probes": [asdict(probe) for probe in one.probes],
        "expected_increase": one.expected_increase if math.isfinite(one.expected_increase) else None,
        "feasible": one.feasible,
    }
