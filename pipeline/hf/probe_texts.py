"""Two texts that every probe of a model or a tokenizer begins with, where nothing else is
at hand."""

from __future__ import annotations

# Article 1 and the preamble's first sentence of the Universal Declaration of Human Rights.
PROBE_TEXTS = {
    "english": (
        "All human beings are born free and equal in dignity and rights. They are endowed with "
        "reason and conscience "
        "and should act towards one another in a spirit of brotherhood. Whereas recognition of the "
        "inherent dignity "
        "and of the equal and inalienable rights of all members of the human family is the "
        "foundation of freedom, "
        "justice and peace in the world."
    ),
    "korean": (
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. "
        "인간은 천부적으로 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다. "
        "모든 인류 구성원의 천부의 존엄성과 동등하고 양도할 수 없는 권리를 인정하는 것이 "
        "세계의 자유, 정의 및 평화의 기초이다."
    ),
}
