"""The files of formulas, and of open tokens, that training and exports share."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pipeline import open_tokens, scale_math
from pipeline.hf.remote_code import scale_math as exported_math


def test_the_code_of_exports_has_the_same_file():
    link = Path(exported_math.__file__)
    assert link.is_symlink()
    assert link.resolve() == Path(scale_math.__file__)


@pytest.mark.parametrize(
    ("module", "of_python"), [(scale_math, set()), (open_tokens, {"collections", "typing"})]
)
def test_it_needs_torch_alone(module, of_python):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported == {"__future__", "torch", *of_python}
