"""Where shipped configurations, scripts and pages lie, in a checkout or an installed package."""

from __future__ import annotations

import re
from pathlib import Path

SHIPPED = ("configs", "ds_configs", "slurm", "examples")
"""What a folder to work in holds: configurations, batch scripts, and the demo's model and texts."""

_PAGE = re.compile(r"\bdocs/[\w/.-]+?\.md(#[\w-]+)?")


def shipped() -> Path:
    """The folder that holds `SHIPPED`: inside an installed package, or else the checkout.

    setup.py copies them into the package.
    """
    package = Path(__file__).resolve().parent
    inside = package / "shipped"
    if inside.is_dir():
        return inside
    return package.parent


def locate_docs(text: str) -> str:
    """`text`, in which each page of docs/ is named as this user can find it.

    In the project's folder `docs/gate.md` stays. Elsewhere it becomes its whole path in the
    checkout, or, without a checkout, "docs/gate.md in the source of scale-cpt". In place of
    docs/configuration.md stands the command that prints the same settings.
    """
    if Path("docs/configuration.md").exists():
        return text
    root = Path(__file__).resolve().parent.parent

    def place_of(page: re.Match[str]) -> str:
        path, _, _ = page[0].partition("#")
        if path == "docs/configuration.md":
            return "scale-cpt describe-config"
        if (root / path).exists():
            return str(root / page[0])
        return f"{page[0]} in the source of scale-cpt"

    return _PAGE.sub(place_of, text)
