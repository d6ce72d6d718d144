"""The dry run: the plan of a run on its own layout, and the faults that would stop it.

The function `make_plan` of the module of that name makes it. `run_plan` is the plan's form, for
users and for programs; each of the other modules makes some of its rows.
"""
