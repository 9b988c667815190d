"""What a problem is, and when two problems are the same."""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A question with its gold answer.

    Attributes:
        id: unique within its source and the same in every run; random numbers of its responses derive from it.
        question: the bare question, without instructions to the model.
        answer: the gold answer.
    """

    id: str
    question: str
    answer: str


class ProblemSource(ABC):
    """Where problems come from."""

    # Settings are checked by `load`, since jsonargparse turns errors of an optional object's constructor into a report
    # about types.

    @abstractmethod
    def load(self) -> list[Problem]:
        """The problems, in the same order every time.

        Raises:
            UserError: if the source cannot be read or has no problem.
        """


def question_key(question: str) -> str:
    """The text by which questions are compared: Unicode NFC, every run of whitespace as one space."""
    return " ".join(unicodedata.normalize("NFC", question).split())


def question_keys(sources: Sequence[ProblemSource]) -> frozenset[str]:
    """The keys of all questions of some sources."""
    return frozenset(question_key(problem.question) for source in sources for problem in source.load())
