"""The project's own extensions: a package each, with everything of one optional feature.

The core imports none of them; `pipeline.extension` finds them by these names.
"""

NAMES = (
    "hosted",
    "cleaning",
    "self_generated",
    "gate",
    "combination",
    "full_difference",
    "report",
    "first_config",
    "tasks",
    "chats",
    "compatibility",
)
"""In the order in which the core asks them."""
