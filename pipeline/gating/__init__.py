"""A fitted gate: `gate.py` decides which tokens are open, `folder.py` keeps it on disk.

Its arithmetic is `pipeline.scale_math.gate_scores`; `pipeline.model.decoder` applies it, and
exports carry it. The extension `pipeline.extensions.gate` fits one.
"""
