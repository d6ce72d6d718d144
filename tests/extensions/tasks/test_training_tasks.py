"""The questions that lm-eval's tasks ask a model in training."""

from __future__ import annotations

import pytest

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import DataError
from pipeline.extensions.tasks.training_tasks import Answer, Question, task_model
from tests.bases import STORIES


def test_a_question_is_cut_to_what_the_model_reads_and_has_an_answer():
    asked: list[Question] = []

    def score(questions: list[Question]) -> list[Answer]:
        asked.extend(questions)
        return [(0.0, True) for _ in questions]

    model = task_model(load_tokenizer(STORIES), score, write=list, max_length=4)
    requests = [(None, [1, 2], [3]), (None, [1, 2, 3], [4, 5]), (None, [1], [2, 3, 4, 5])]
    model._loglikelihood_tokens(requests)
    assert asked == [([1, 2], [3]), ([2, 3], [4, 5]), ([2], [3, 4, 5])]
    with pytest.raises(DataError, match="expected an answer of at least one token"):
        model._loglikelihood_tokens([(None, [1, 2], [])])
