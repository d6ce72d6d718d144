"""lm-eval's own tasks on documents of a folder: the same prompts and choices, without the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval.tasks.kobest.utils import copa_doc_to_text

from pipeline.errors import DataError
from pipeline.extensions.tasks.benchmarks import benchmark_model, load_tasks, task_results
from studies.smollm2.local_tasks import write_tasks
from tests.bases import STORIES

pytestmark = pytest.mark.full

RECORDS = {
    "kobest/copa/test.jsonl": {
        "premise": "바지의 허리가 컸다.",
        "question": "결과",
        "alternative_1": "바지의 밑단을 잘랐다.",
        "alternative_2": "벨트를 끼웠다.",
        "label": 1,
    },
    "arc_easy/test.jsonl": {
        "id": "1",
        "question": "What did Tim eat?",
        "choices": {"text": ["an apple", "the sky"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "blimp/passive_1.jsonl": {
        "sentence_good": "Tim is seen by Lily.",
        "sentence_bad": "Tim is been by Lily.",
    },
}


def write_records(folder: Path) -> Path:
    for name, record in RECORDS.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"{json.dumps(record)}\n" * 3, encoding="utf-8")
    return folder


def test_tasks_have_lm_evals_prompts_and_documents_of_the_folder(tmp_path):
    names = write_tasks(write_records(tmp_path / "data"), tmp_path / "tasks")
    assert names == ["local_kobest_copa", "local_arc_easy", "local_blimp_passive_1"]
    tasks = load_tasks(names, include=tmp_path / "tasks")
    copa, arc, blimp = (tasks.loaded["tasks"][name] for name in names)
    record = RECORDS["kobest/copa/test.jsonl"]
    assert copa.doc_to_text(record) == copa_doc_to_text(record)
    assert arc.doc_to_text(RECORDS["arc_easy/test.jsonl"]) == "Question: What did Tim eat?\nAnswer:"
    assert blimp.doc_to_target(RECORDS["blimp/passive_1.jsonl"]) == 0
    results = task_results(benchmark_model(STORIES), tasks)
    assert [(one.task, one.metric, one.documents) for one in results[:3]] == [
        (name, "acc", 3) for name in names
    ]


def test_a_folder_without_them_is_one_line(tmp_path):
    with pytest.raises(DataError, match="found none of them; give the folder"):
        write_tasks(tmp_path, tmp_path / "tasks")
    assert not (tmp_path / "tasks").exists()
