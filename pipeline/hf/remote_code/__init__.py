"""The code that folders in the format `scale` carry beside their weights, for `transformers`.

An exported folder has `modeling_scale.py` and what it imports from here, a combination
`modeling_scale_combined.py` and what it imports; the package in `serving/` has all of them. They
need torch, transformers and what these bring alone, and import each other by `from .name import`,
which transformers follows.
"""
