"""Checkpoints: `manifest.py` has the JSON, `rank_files.py` the tensors (docs/checkpoints.md)."""
