r"""Magnitude and unit of an answer such as `5\text{ cm}^2`, `\$12.50`, `30^\circ` or `28\%`. Strings only."""

import re
from dataclasses import dataclass
from fractions import Fraction

# Names and sizes of units of one kind, in the first of them; a name may also stand in the plural.
_KINDS = [
    {
        "m meter metre": "1",
        "km kilometer kilometre": "1000",
        "dm decimeter decimetre": "1/10",
        "cm centimeter centimetre": "1/100",
        "mm millimeter millimetre": "1/1000",
        "in inch inches": "0.0254",
        "ft foot feet": "0.3048",
        "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    {"g gram": "1", "kg kilogram": "1000", "mg milligram": "1/1000", "lb pound": "453.59237"},
    {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800"},
    {"l liter litre": "1", "ml milliliter millilitre": "1/1000"},
    {"dollar usd": "1", "cent ¢": "1/100"},
]
_KNOWN = {
    name: (next(iter(kind)).split()[0], Fraction(size))
    for kind in _KINDS
    for names, size in kind.items()
    for name in names.split()
}
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "sq": "square", "cu": "cubic"}
_FILLERS = {"of", "the", "a", "an", "and"}

# No function: the angle in \cos 60^\circ is its argument's.
_PLAIN_VALUE = r"(?:[^\\]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z]))"
_NUMERIC = rf"(?P<magnitude>(?:(?![A-Za-z]){_PLAIN_VALUE})*(?:[\d}})]|\\pi))"
_DEGREES = r"\^\{\\circ\}|\\text\{degrees?\}| ?degrees?"
_NOUNS = r"(?:(?!\b(?:or|and|not|but|if|to|mod)\b)(?:[A-Za-z¢ ./()'-]|\^\{?-?\d\}?))*"
_QUANTITY = re.compile(
    rf"\\\$(?P<money>.*)"
    rf"|(?P<percentage>.*?)(?:\\%| ?(?:percent|pct)|\\text\{{(?:percent|pct|\\%)\}})"
    rf"|(?P<angle>{_PLAIN_VALUE}*?)(?:{_DEGREES})(?:\\text)?\{{?[CF]?\}}?"
    rf"|(?P<value>.*?)\\text\{{(?P<unit>{_NOUNS})\}}(?:\^\{{?(?P<power>\d)\}}?)?(?:/(?:\\text)?\{{?(?P<per>[A-Za-z]+)\}}?)?",
    re.DOTALL,
)
_PLAIN = re.compile(_NUMERIC + r"(?P<unit>(?: ?[A-Za-z]+(?:\^\{?\d\}?)?/?)+)")


@dataclass(frozen=True)
class Unit:
    """A unit as a multiple of powers of base units. Percent and degree are units of their own.

    Attributes:
        scale: size in base units.
        powers: sorted (base unit or counted noun, exponent) pairs.
    """

    scale: Fraction
    powers: tuple[tuple[str, int], ...]


PERCENT = Unit(Fraction(1), (("%", 1),))
DEGREE = Unit(Fraction(1), (("degree", 1),))


def _singular(word: str) -> str:
    if word in _KNOWN or len(word) < 3:
        return word
    for ending, stem in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("s", "")):
        if word.endswith(ending) and not word.endswith("ss"):
            return word.removesuffix(ending) + stem
    return word


def parse_unit(text: str) -> Unit:
    """The unit written as `text`, for example "km/h", "square feet", "cm^2" or "red apples"."""
    words = re.sub(r"\bper\b", "/", text.lower().replace(".", " "))
    words = re.sub(r"[a-z]+", lambda m: _COMPOUND.get(m.group(), m.group()), words)
    scale, powers = Fraction(1), dict[str, int]()
    sign, pending = 1, 1
    for word, exponent, slash in re.findall(r"([a-z¢]+)(?:\s*\^\s*\{?(-?\d)\}?)?|(/)", words):
        if slash:
            sign = -1
        elif word in ("square", "cubic"):
            pending = 2 if word == "square" else 3
        elif word not in _FILLERS:
            power = sign * pending * int(exponent or 1)
            base, size = _KNOWN.get(_singular(word), (_singular(word), Fraction(1)))
            powers[base] = powers.get(base, 0) + power
            scale *= size**power
            pending = 1
    return Unit(scale, tuple(sorted((base, power) for base, power in powers.items() if power)))


def _is_plain_unit(words: str, single_letters: bool) -> bool:
    names = re.findall(r"[A-Za-z]+", words)
    if not re.fullmatch(_NOUNS, words):
        return False
    if words.startswith(" "):
        # Behind a space any word of three letters is a noun that is counted; shorter ones may be products.
        return all(
            len(n) >= 3 or (n.lower() in _KNOWN and (len(n) > 1 or single_letters or "/" in words)) for n in names
        )
    return all(len(n) > 1 and n.lower() in _KNOWN | _COMPOUND for n in names)


def split_unit(text: str, *, single_letters: bool = False) -> tuple[str, Unit | None]:
    r"""Separate the unit from an answer.

    Args:
        text: normalised answer.
        single_letters: read a plain letter behind a number and a space as a unit ("5 m"); otherwise only upright
            letters (`5\text{ m}`) are, since `5 m` may be a product.

    Returns:
        The magnitude, and the unit or None where the answer has none.
    """
    if match := _QUANTITY.fullmatch(text):
        groups = match.groupdict()
        if groups["money"]:
            return split_unit(groups["money"])[0], parse_unit("dollar")
        if groups["percentage"]:
            return groups["percentage"].strip(), PERCENT
        if groups["angle"]:
            return groups["angle"].strip(), DEGREE
        if groups["value"]:
            unit = f"{groups['unit']}^{groups['power'] or 1}/{groups['per'] or ''}"
            return groups["value"].strip(), parse_unit(unit)
    if (match := _PLAIN.fullmatch(text)) and _is_plain_unit(match["unit"], single_letters):
        return match["magnitude"].strip(), parse_unit(match["unit"])
    return text, None
