"""The gate: `gate.py` decides, `fit_run.py` fits it, `effect.py` measures it.

Its arithmetic is `pipeline.scale_math.gate_scores`; `pipeline.model.decoder` applies it.
"""
