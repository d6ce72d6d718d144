"""The preflight: whether the ranks of an allocation compute right, fast enough, on the same files.

Every rank calls each `check_...`, at the same time as the others, and gets the same finding. The
functions `measure_...` measure this rank; the functions `judge_...` are pure, and judge what all
ranks have measured. `pipeline.checks.checklist` makes the checks and refuses their faults.
"""
