"""Text of the fields of a row: nested paths, exact numbers, patterns."""

import re
from decimal import Decimal
from typing import Any

# Far past every float64. The plain decimal text of a number grows with its exponent.
MAX_EXPONENT = 400


class FieldError(Exception):
    """A row has no usable text in a field. The message names the field, not the row."""


def field_text(row: dict, field: str, pattern: re.Pattern[str] | None = None) -> str:
    """The text of a field, or the first group of a pattern in it, without surrounding whitespace.

    Args:
        row: the row.
        field: path to the value; steps are keys of objects or positions in lists, joined by dots.
        pattern: searched in the text.

    Raises:
        FieldError: if the field is missing, is empty, is not text or a number, or if the pattern does not occur.
    """
    try:
        text = as_text(lookup(row, field))
    except TypeError as error:
        raise FieldError(f"field '{field}' is {error}") from error
    if pattern is not None:
        match = pattern.search(text)
        if match is None:
            raise FieldError(f"field '{field}' does not match its pattern {pattern.pattern!r}")
        text = (match[1] or "").strip()
    if not text:
        raise FieldError(f"field '{field}' is empty")
    return text


def lookup(row: Any, field: str) -> Any:
    """The value at a path such as `reward_model.ground_truth` or `prompt.0.content`.

    Raises:
        FieldError: if there is no such path, naming what is there.
    """
    value, path = row, "the row"
    for step in field.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and re.fullmatch(r"-?[0-9]+", step) and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        else:
            raise FieldError(f"there is no field '{field}'; {path} holds {_contents(value)}")
        path = f"'{step}'"
    return value


def _contents(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(map(str, value)) or "no field"
    if isinstance(value, list):
        return f"a list of length {len(value)}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def as_text(value: Any) -> str:
    """Text of a value, without surrounding whitespace.

    A number is written out in full with all of its digits, without an exponent and without trailing zeros after the
    decimal point: 18.0 gives `18`, 0.50 gives `0.5`. A float has the digits of its shortest exact representation.
    Truth values are `true` and `false`, a missing value is empty.

    Raises:
        TypeError: if the value is a list, an object or not a finite number; the message describes it.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        value = Decimal(repr(value))
    if not isinstance(value, Decimal):
        raise TypeError(f"a {type(value).__name__}, neither text nor a number; name an element of it")
    if not value.is_finite() or abs(value.adjusted()) > MAX_EXPONENT:
        raise TypeError(f"no usable number ({value})")
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
