"""The code that folders in the formats `scale` and `difference` carry beside their weights, for
`transformers`.

An exported folder has `modeling_scale.py` and what it imports from here, a combination
`modeling_scale_combined.py`, a difference `modeling_difference.py`, a model on a hosted base
`modeling_scale_hosted.py`, and what they import; the package in `serving/` has all of them. They
need torch, transformers and what these bring alone, and import each other by `from .name import`,
which transformers follows.
"""
