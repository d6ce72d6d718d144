"""The texts on which every gate learns to stay closed, `pipeline/extensions/gate/negatives.jsonl.zst`: many
languages and scripts, code, formulas, symbols and tables. `python -m studies.gate_negatives` makes
them from sources of free licences.
"""
