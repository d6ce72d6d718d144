"""Small tasks in lm-eval's format on local files, like COPA, ARC, BLiMP and GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

_NAMES = ("Lily", "Tom", "Sue", "Ben", "Mia", "Tim")
COPA = [
    {
        "premise": f"{name} was hungry. {connector}",
        "alternatives": [f"{name} ate a red apple.", f"{name} sang to the big sun."],
        "label": number % 2,
    }
    for number, name in enumerate(_NAMES)
    for connector in ("왜냐하면", "그래서")
]
ARC = [
    {
        "question": f"What did {name} do?",
        "choices": ["played with a ball", "ate the sky", "was a number"],
        "answer": n % 3,
    }
    for n, name in enumerate(_NAMES)
]
BLIMP = [{"pair": [f"{name} has a cat.", f"{name} have a cat."]} for name in _NAMES]
TASKS = {
    "copa": (
        COPA,
        {"doc_to_text": "premise", "doc_to_choice": "alternatives", "doc_to_target": "label"},
    ),
    "arc": (
        ARC,
        {
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
    "passive_1": (
        BLIMP,
        {"doc_to_text": "", "doc_to_choice": "pair", "doc_to_target": 0, "num_fewshot": 0},
    ),
    "passive_2": (
        BLIMP[:3],
        {"doc_to_text": "", "doc_to_choice": "pair", "doc_to_target": 0, "num_fewshot": 0},
    ),
}


def write_task_files(folder: Path) -> Path:
    """One file and its documents for each task, and a group `passive` of two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (records, settings) in TASKS.items():
        documents = folder / f"{name}.jsonl"
        documents.write_text("\n".join(json.dumps(record) for record in records))
        files = {
            "test": str(documents),
            **({"validation": str(documents)} if name == "copa" else {}),
        }
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            **{f"{split}_split": split for split in files},
            "output_type": "multiple_choice",
            "metric_list": [{"metric": "acc"}],
            **settings,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    aggregate = [{"metric": "acc", "weight_by_size": True}]
    group = {
        "group": "passive",
        "task": ["passive_1", "passive_2"],
        "aggregate_metric_list": aggregate,
    }
    (folder / "passive.yaml").write_text(yaml.safe_dump(group))
    return folder


def write_written_task(folder: Path, answers: dict[str, str], **options: object) -> None:
    """A task `written` in `folder` whose questions take a text; `options` are of generation."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = folder / "written.jsonl"
    lines = [json.dumps({"question": key, "answer": value}) for key, value in answers.items()]
    documents.write_text("\n".join(lines))
    task = {
        "task": "written",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(documents)},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "do_sample": False, "max_gen_toks": 12, **options},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [
            {"name": "strict", "filter": [{"function": "take_first"}]},
            {"name": "again", "filter": [{"function": "take_first"}]},
        ],
    }
    (folder / "written.yaml").write_text(yaml.safe_dump(task))
