"""The optimizers that a run may choose as `schedule.optimizer`, a module each.

`optimizer` says what one is. A new one is a module here and a line in
`pipeline.config.schedule.CORE_OPTIMIZERS`, or an extension's.
"""
