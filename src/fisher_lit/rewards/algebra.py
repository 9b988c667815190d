"""Equality of mathematics: numbers exactly, expressions at sample points, the rest by math-verify.

math-verify itself compares with an absolute tolerance, which calls 2^-69 and 2^-70 equal, and ignores the case of
letters; nothing here rounds, and `R` is not `r`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from random import Random

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, verify
from math_verify import parse as parse_latex
from mpmath.libmp import NoConvergence
from sympy import Basic, Expr, I, MatrixBase, S, Symbol
from sympy.polys.polyerrors import BasePolynomialError

from fisher_lit.rewards.extract import brace_pairs

_NUM_POINTS = 8
_MIN_POINTS = 3
_DIGITS = 50
_TOLERANCE = sympy.Float("1e-40", _DIGITS)
_CONFIG = LatexExtractionConfig(
    try_extract_without_anchor=False,
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="last", equations=False
    ),
)
# What SymPy raises on expressions that it cannot evaluate.
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    BasePolynomialError,
    NoConvergence,
)

_REPETEND = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_DOTTED = re.compile(r"(\d*)\.(\d*?)(\d+?)\3+\\ldots")
_DECIMAL = re.compile(r"(?<![\d.])\d*\.\d+(?![\d.]|\\ldots)")
_MIXED = re.compile(r"(?<![\d.}])(\d+) (\d+)/(\d+)(?![\d.])")
_DEGREES = re.compile(r"(\d+|\([^()]*\))\^\{\\circ\}")
_NUMERAL = re.compile(r"(\d[\dA-Za-z]*)_(?:\{(\d+)\}|(\d))")
# What the parser would drop or read otherwise: a prime, dots, a stray point, and numbers side by side, which it adds.
_MISREAD = re.compile(r"'|\\ldots|\.|\d_|(?<![_^\d])\d+ \d|(?<![\w^\\])\d+\{")
_BRACES = re.compile(r"(?<!\\)[{}]")
_CAPITAL = re.compile(r"(\\mathbb\{\w\}|\\text\{[^{}]*\}|\\[A-Za-z]+)|([A-Z])(?:_(\w)|_\{([^{}]*)\})?")


class Unreadable(ValueError):
    """The text is no mathematics that can be compared."""


@contextmanager
def reading(*texts: str) -> Iterator[None]:
    """Turn what SymPy raises on nonsense into `Unreadable`."""
    try:
        yield
    except _FAILURES as error:
        raise Unreadable(texts) from error


def _repeating(match: re.Match[str]) -> str:
    whole, prefix, block = match.groups()
    value = int((whole or "0") + prefix) + Fraction(int(block), 10 ** len(block) - 1)
    return _fraction(value / 10 ** len(prefix))


def _fraction(value: Fraction) -> str:
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _capital(match: re.Match[str]) -> str:
    command, letter, index, group = match.groups()
    return command or rf"{letter.lower()}_{{Z{index or group or ''}}}"


def exact_latex(text: str) -> str:
    """Decimals, repeating decimals, mixed numbers, degrees and numerals in another base as exact LaTeX."""
    if match := _NUMERAL.fullmatch(text):
        return str(int(match[1], int(match[2] or match[3])))
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _REPETEND.sub(_repeating, text)
    text = _DOTTED.sub(_repeating, text)
    text = _DECIMAL.sub(lambda m: _fraction(Fraction(m.group())), text)
    return _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)


@lru_cache(maxsize=64)
def parse(text: str) -> Basic | MatrixBase:
    r"""Read normalised LaTeX as a SymPy object. All letters are real, `i` is the imaginary unit, `e` Euler's number.

    Raises:
        Unreadable: for anything that is not mathematics.
    """
    with reading(text):
        latex = _CAPITAL.sub(_capital, exact_latex(text))
        if _MISREAD.search(latex) or 2 * len(brace_pairs(latex)) != len(_BRACES.findall(latex)):
            raise Unreadable(text)
        parsed = parse_latex(
            rf"\boxed{{{latex}}}",
            [_CONFIG],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        if not parsed:
            raise Unreadable(text)
        values = {s: {"i": I, "e": S.Exp1}.get(s.name, Symbol(s.name, real=True)) for s in parsed[0].free_symbols}
        return parsed[0].subs(values).doit()


def same_math(answer: str, gold: str) -> bool:
    """Whether two normalised texts without top-level commas or relations denote the same value.

    Raises:
        Unreadable: where either is not mathematics.
    """
    with reading(answer, gold):
        return same_value(parse(answer), parse(gold))


def roughly_equal(a: str, b: str) -> bool:
    """Whether two normalised texts are numbers that differ by at most one percent.

    Raises:
        Unreadable: where either is not mathematics.
    """
    with reading(a, b):
        x, y = parse(a), parse(b)
        return bool(sympy.Abs(x - y).evalf() <= sympy.Max(sympy.Abs(x), sympy.Abs(y)).evalf() / 100)


def same_value(answer: Basic | MatrixBase, gold: Basic | MatrixBase) -> bool:
    """Whether two SymPy objects are equal for all real values of their letters."""
    if isinstance(answer, MatrixBase) and isinstance(gold, MatrixBase):
        return answer.shape == gold.shape and all(map(same_value, answer.flat(), gold.flat()))
    if isinstance(answer, Expr) and isinstance(gold, Expr):
        symbols = answer.free_symbols | gold.free_symbols
        decided = _same_at_points(answer, gold, symbols) if symbols else _same_constant(answer, gold)
        if decided is not None:
            return decided
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)


def _same_constant(a: Expr, b: Expr) -> bool | None:
    if a.is_Rational and b.is_Rational:
        return a == b
    if False in (a.is_finite, b.is_finite):
        return a == b and a is not S.NaN
    close = _close(a.evalf(_DIGITS), b.evalf(_DIGITS))
    # Fifty digits cannot tell 10^100 + sqrt(2) from 10^100 + sqrt(3): the difference can.
    return (a - b).equals(0) is not False if close else close


def _close(x: Expr, y: Expr) -> bool | None:
    """Equality of two evaluated numbers to 40 digits; None where one was not evaluated to a number."""
    if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
        return None
    parts = [part for z in (x, y, x - y) for part in z.as_real_imag()]
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    *_, real, imaginary = parts
    size = max(abs(part) for part in parts[:4])
    return bool(max(abs(real), abs(imaginary)) <= _TOLERANCE * size)


def _points(symbols: set[Basic]) -> Iterator[dict[Basic, sympy.Rational]]:
    """Fixed rational points: positive first, then of either sign, none of them special."""
    random = Random(0)
    names = sorted(symbols, key=str)
    for index in range(_NUM_POINTS):
        signs = (1,) if index < _NUM_POINTS // 2 else (-1, 1)
        yield {s: random.choice(signs) * sympy.Rational(random.randint(101, 3989), 997) for s in names}


def _same_at_points(a: Expr, b: Expr, symbols: set[Basic]) -> bool | None:
    """Compare at sample points; None where too few of them can be evaluated.

    Where no imaginary unit is written, a point at which both are not real lies outside the domain; one at which only
    one of them is not real tells them apart.
    """
    complex_valued = a.has(I) or b.has(I)
    num_equal = 0
    for point in _points(symbols):
        try:
            x, y = a.subs(point).evalf(_DIGITS), b.subs(point).evalf(_DIGITS)
        except _FAILURES:
            continue
        if not complex_valued and _is_complex(x) and _is_complex(y):
            continue
        close = _close(x, y)
        if close is False:
            return False
        num_equal += close is True
    return True if num_equal >= _MIN_POINTS else None


def _is_complex(x: Expr) -> bool:
    return bool(x.is_number and abs(sympy.im(x)) > _TOLERANCE * abs(x))


def same_equation(answer: Sequence[str], gold: Sequence[str]) -> bool:
    """Whether two equations, each given as (left, right), have the same solutions.

    Equations whose sides differ by a constant factor do; others are left to math-verify.

    Raises:
        Unreadable: where a side is not mathematics.
    """
    with reading(*answer, *gold):
        left, right = _difference(*answer), _difference(*gold)
        if not left.free_symbols or left.free_symbols != right.free_symbols:
            return False
        if _factor(left, right) is not None:
            return True
        equations = [sympy.Eq(*map(parse, sides), evaluate=False) for sides in (gold, answer)]
        return verify(*equations, timeout_seconds=None)


def same_inequality(answer: Sequence[str], gold: Sequence[str], *, both_ways: bool = False) -> bool:
    r"""Whether left - right > 0 means the same for both (left, right): they differ by a positive constant factor.

    Args:
        answer: left and right side.
        gold: left and right side.
        both_ways: accept a negative factor too, as for `\ne`.

    Raises:
        Unreadable: where a side is not mathematics.
    """
    with reading(*answer, *gold):
        factor = _factor(_difference(*answer), _difference(*gold))
        return factor is not None and (both_ways or bool(factor.is_positive))


def _difference(left: str, right: str) -> Expr:
    sides = parse(left), parse(right)
    if not all(isinstance(side, Expr) for side in sides):
        raise Unreadable(f"{left}, {right}")
    return sides[0] - sides[1]


def _factor(a: Expr, b: Expr) -> Expr | None:
    """The constant c != 0 with a = c b everywhere, or None. One point fixes it, the others test it."""
    symbols = a.free_symbols | b.free_symbols
    first = next(_points(symbols))
    factor = a.subs(first) / b.subs(first)
    return factor if factor.is_finite and factor != 0 and _same_at_points(a, factor * b, symbols) else None
