"""Finds the structure of a hosted base by experiments on a tiny copy of it.

`find_structure.find_structure` is the entry. In the order in which it uses them: `tiny_copy` builds
the small model, `recorded_calls` records one forward pass of it, `layers` and `blocks` find the
decoder layers, their token mixers and FFNs by the experiments in `probes`, `maps_and_norms` finds
what can have open weights, and `document_separation` tries how documents of a row are kept apart.
`output_formula` finds what becomes of the output map's products.
"""
