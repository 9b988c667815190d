"""Problems to train and evaluate on: from files, from Hugging Face data sets, or made up."""

from fisher_lit.problems.arithmetic import ArithmeticProblems
from fisher_lit.problems.files import FileProblems
from fisher_lit.problems.hub import HubProblems
from fisher_lit.problems.source import Problem, ProblemSource
from fisher_lit.problems.table import TableProblems

__all__ = ["ArithmeticProblems", "FileProblems", "HubProblems", "Problem", "ProblemSource", "TableProblems"]
