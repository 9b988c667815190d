r"""Subsets of the reals: intervals, unions, inequalities in one letter, `\mathbb{R}` and what is taken away from it."""

import re

import sympy
from sympy import Expr, S, Set
from sympy.core.relational import Relational

from fisher_lit.rewards.algebra import Unreadable, parse, reading, same_inequality
from fisher_lit.rewards.structure import Group, expand_signs, split_at, split_group, split_relation

_INEQUALITIES: dict[str, type[Relational]] = {
    "<": sympy.StrictLessThan,
    ">": sympy.StrictGreaterThan,
    r"\le": sympy.LessThan,
    r"\ge": sympy.GreaterThan,
    r"\ne": sympy.Unequality,
}
_REVERSED = {"<": ">", r"\le": r"\ge"}
_SET = re.compile(r"\\(?:cup|setminus|mathbb|emptyset)(?![A-Za-z])|[\[(].*[\])]|\\\{")
_CONSTANTS = {r"\mathbb{R}": S.Reals, r"\emptyset": S.EmptySet}


def is_inequality(text: str) -> bool:
    """Whether the text compares at its top level, other than by an equals sign."""
    return any(sign in _INEQUALITIES for sign in split_relation(text)[1])


def _value(text: str) -> Expr:
    value = parse(text)
    if not isinstance(value, Expr):
        raise Unreadable(text)
    return value


def _interval(group: Group) -> Set:
    start, end = (_value(item) for item in group.items)
    if not (start.is_extended_real and end.is_extended_real):
        raise Unreadable(str(group))
    return sympy.Interval(start, end, left_open=group.opener == "(", right_open=group.closer == ")")


def _inequality(text: str) -> tuple[Set, str]:
    sides, signs = split_relation(text)
    if not signs or not all(sign in _INEQUALITIES for sign in signs):
        raise Unreadable(text)
    values = [_value(side) for side in sides]
    letters = set().union(*(value.free_symbols for value in values))
    if len(letters) != 1:
        raise Unreadable(text)
    parts = [
        _INEQUALITIES[sign](left, right).as_set() for sign, left, right in zip(signs, values, values[1:], strict=False)
    ]
    return sympy.Intersection(*parts), str(letters.pop())


def parse_set(text: str) -> tuple[Set, str | None]:
    """Read normalised LaTeX as a subset of the reals.

    Args:
        text: an interval, a union or difference of sets, or inequalities; "or" between these is a union, a comma or
            "and" an intersection.

    Returns:
        The set, and the letter of the inequalities or None.

    Raises:
        Unreadable: for anything else.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text], None
    pieces, _ = split_at(text, {r"\cup"})
    if len(pieces) > 1:
        return sympy.Union(*(parse_set(piece)[0] for piece in pieces)), None
    pieces, _ = split_at(text, {r"\setminus"})
    if len(pieces) == 2:
        return sympy.Complement(parse_set(pieces[0])[0], parse_set(pieces[1])[0]), None
    group = split_group(text)
    if group is None:
        return _inequality(text)
    if group.opener == r"\{":
        return sympy.FiniteSet(*(_value(v) for item in group.items for v in expand_signs(item))), None
    if group.opener and len(group.items) == 2:
        return _interval(group), None
    if group.opener or not all(map(is_inequality, group.items)):
        raise Unreadable(text)
    sets, letters = zip(*map(_inequality, group.items), strict=True)
    if len(set(letters)) > 1:
        raise Unreadable(text)
    return (sympy.Union if group.disjunction else sympy.Intersection)(*sets), letters[0]


def compare_sets(answer: str, gold: str) -> bool | None:
    """Whether two normalised texts describe the same subset of the reals, in the same letter where both name one.

    Returns:
        The verdict, or None where one of them is no such set.
    """
    if not (_looks_like_set(answer) or _looks_like_set(gold)):
        return None
    try:
        with reading(answer, gold):
            (left, letter), (right, gold_letter) = parse_set(answer), parse_set(gold)
            if None not in (letter, gold_letter) and letter != gold_letter:
                return False
            return left == right or left.symmetric_difference(right).is_empty is True
    except Unreadable:
        return None


def _looks_like_set(text: str) -> bool:
    items = (split_group(text) or Group("", "", (text,))).items
    return _SET.search(text) is not None or any(map(is_inequality, items))


def same_inequalities(answer: str, gold: str) -> bool:
    """Whether two texts, at least one of them an inequality, have the same solutions; there may be several letters."""
    verdict = compare_sets(answer, gold)
    if verdict is not None:
        return verdict
    try:
        (sides, sign), (gold_sides, gold_sign) = _directed(answer), _directed(gold)
        return sign == gold_sign and same_inequality(sides, gold_sides, both_ways=sign == r"\ne")
    except Unreadable:
        return False


def _directed(text: str) -> tuple[list[str], str]:
    """Sides and sign of one inequality, the larger side first."""
    sides, signs = split_relation(text)
    if len(signs) != 1:
        raise Unreadable(text)
    return (sides[::-1], _REVERSED[signs[0]]) if signs[0] in _REVERSED else (sides, signs[0])
