"""What a run costs that grows with ranks, shards, files and steps (docs/scale.md)."""
