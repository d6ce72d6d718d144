"""Where the architecture of a run's base is described. This module waits for no library."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.errors import BaseModelError


def described_base(config: RunConfig, base_config: Path | None) -> Path:
    """The base's folder, or `base_config`: its config.json, if the folder is missing.

    Raises:
        BaseModelError: neither exists.
    """
    source = base_config or config.base
    if not source.exists():
        raise BaseModelError(
            f"{source}: no such file or folder; the base's config.json is enough: "
            f"name it with --base-config{_shipped_example(config.base)}"
        )
    return source


def _shipped_example(base: Path) -> str:
    """The project's own config.json of the model `base`, as an example for a message."""
    name = base.name.lower().removesuffix("-base").removesuffix("-instruct")
    shipped = Path("configs/bases") / f"{name}.json"
    return f", such as {shipped}" if shipped.exists() else ""
