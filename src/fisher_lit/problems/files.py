"""Problems in a JSONL or Parquet file."""

import json
import os
from collections.abc import Iterator
from decimal import Decimal
from json import JSONDecodeError
from pathlib import Path

from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems.table import TableProblems, check_columns


class FileProblems(TableProblems):
    """Problems in a file with one problem per line (`.jsonl`) or row (`.parquet`).

    Ids are `<file name without suffix>:<row>`, with rows counted from 1.

    Args:
        path: the file.
        **kwargs: how rows become problems.
    """

    def __init__(self, path: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.path = path
        self._file = Path(path).expanduser()

    @property
    @override
    def label(self) -> str:
        return self.path

    @property
    @override
    def id_prefix(self) -> str:
        return self._file.stem

    @override
    def rows(self, columns: frozenset[str]) -> Iterator[tuple[int, dict]]:
        if self._file.suffix not in (".jsonl", ".parquet"):
            raise UserError(f"problems: `path` '{self.path}' ends neither in .jsonl nor in .parquet")
        if not self._file.is_file() or not os.access(self._file, os.R_OK):
            raise UserError(f"problems: there is no readable file '{self.path}'; correct `path`")
        return self._jsonl_rows() if self._file.suffix == ".jsonl" else self._parquet_rows(columns)

    def _jsonl_rows(self) -> Iterator[tuple[int, dict]]:
        with self._file.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line, parse_float=Decimal, parse_constant=_no_number)
                # ArithmeticError: an exponent that no Decimal can hold.
                except (ValueError, ArithmeticError) as error:
                    raise UserError(f"{self.path}, row {number}: not valid JSON ({_json_fault(error)})") from error
                if not isinstance(row, dict):
                    raise UserError(f"{self.path}, row {number}: a {type(row).__name__} instead of a JSON object")
                yield number, row

    def _parquet_rows(self, columns: frozenset[str]) -> Iterator[tuple[int, dict]]:
        # Most runs read no Parquet file, and the import takes a quarter of a second.
        import pyarrow
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(self._file)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{self.path}: not a Parquet file ({error})") from error
        with file:
            check_columns(self.path, columns, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(columns=sorted(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row


def _json_fault(error: Exception) -> str:
    # The line that json counts is one of this row, always the first.
    return f"{error.msg} at character {error.pos + 1}" if isinstance(error, JSONDecodeError) else str(error)


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
