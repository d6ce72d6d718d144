"""Small benchmark files in the layout of `--data`: our own sentences in the fields of the real ones."""

from __future__ import annotations

import json
from pathlib import Path

_NAMES = ("Lily", "Tom", "Sue", "Ben", "Mia", "Tim")
COPA = [
    {
        "premise": f"{name} was hungry.",
        "question": question,
        "alternative_1": f"{name} ate a red apple.",
        "alternative_2": f"{name} sang to the big sun.",
        "label": number % 2,
    }
    for number, name in enumerate(_NAMES)
    for question in ("원인", "결과")
]
ARC = [
    {
        "id": name,
        "question": f"What did {name} do in the park?",
        "choices": {"text": ["played with a ball", "ate the sky", "was a number"], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[number % 3],
    }
    for number, name in enumerate(_NAMES)
]
BOOLQ = [{"paragraph": f"{name} has a dog.", "question": "개가 있는가?", "label": 1} for name in _NAMES]
HELLASWAG = [
    {"context": f"{name} went out.", **{f"ending_{n}": f"{name} saw {n} birds." for n in (1, 2, 3, 4)}, "label": 2}
    for name in _NAMES
]
BLIMP = [{"sentence_good": f"{name} has a cat.", "sentence_bad": f"{name} have a cat."} for name in _NAMES]


def write_task_files(folder: Path) -> Path:
    """One small file for each task."""
    files = {
        "kobest/boolq/test": BOOLQ,
        "kobest/copa/test": COPA,
        "kobest/copa/validation": COPA[:4],
        "kobest/hellaswag/test": HELLASWAG,
        "arc_easy/test": ARC,
        "blimp/passive_1": BLIMP,
        "blimp/passive_2": BLIMP[:3],
    }
    for name, records in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8")
    return folder
