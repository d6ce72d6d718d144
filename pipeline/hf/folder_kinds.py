"""The kinds of folders for transformers that this package writes, each by its record."""

from __future__ import annotations

from pipeline.files.folders import FolderKind

EXPORT = FolderKind("an export", "conversion.json", "scale-cpt export 1")
COMBINATION = FolderKind("a combination", "combination.json", "scale-cpt combination 1")
