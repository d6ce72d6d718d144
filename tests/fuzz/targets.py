"""All that is fuzzed."""

from __future__ import annotations

from tests.fuzz import corpora, models, runs
from tests.fuzz.subject import Subject

SUBJECTS: list[Subject] = [*corpora.SUBJECTS, *models.SUBJECTS, *runs.SUBJECTS]
TARGETS = list(dict.fromkeys(subject.target for subject in SUBJECTS))
"""The rows of the table."""
