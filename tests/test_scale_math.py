"""The file of formulas that training and exports share."""

from __future__ import annotations

import ast
from pathlib import Path

from pipeline import scale_math
from pipeline.hf.remote_code import scale_math as exported_math


def test_the_code_of_exports_has_the_same_file():
    link = Path(exported_math.__file__)
    assert link.is_symlink()
    assert link.resolve() == Path(scale_math.__file__)


def test_it_needs_torch_alone():
    tree = ast.parse(Path(scale_math.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported == {"__future__", "torch"}
