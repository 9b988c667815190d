"""Problems in a Hugging Face data set."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems.table import TableProblems, check_columns


class HubProblems(TableProblems):
    """Problems in a data set that `datasets.load_dataset` finds: on the Hugging Face Hub or in a local directory.

    Ids are `<last part of the name>:<row>`, with rows counted from 1.

    Args:
        name: data set, such as `HuggingFaceH4/MATH-500`, or a directory.
        split: split of it.
        subset: configuration of the data set; null takes its default.
        data_files: file or files of the data set to read; null leaves it to the data set. Files named so are all in
            the split `train`.
        revision: branch, tag or commit; null takes the newest.
        **kwargs: how rows become problems.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        subset: str | None = None,
        data_files: str | list[str] | None = None,
        revision: str | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.name = name
        self.split = split
        self.subset = subset
        self.data_files = data_files
        self.revision = revision
        # A directory is named the same on every machine, however the path to it is written.
        self._id_prefix = Path(name).resolve().name

    @property
    @override
    def label(self) -> str:
        return f"{self.name} ({self.split})"

    @property
    @override
    def id_prefix(self) -> str:
        return self._id_prefix

    @override
    def rows(self, columns: frozenset[str]) -> Iterator[tuple[int, dict]]:
        # Most runs read no data set, and the import takes half a second.
        from datasets import Dataset, load_dataset
        from datasets.exceptions import DatasetGenerationError, DatasetsError

        try:
            table = load_dataset(
                self.name, self.subset, split=self.split, data_files=self.data_files, revision=self.revision
            )
        # OSError covers the network, ValueError an unknown split or subset.
        except (DatasetsError, OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, DatasetGenerationError) else None
            reason = shorten(str(cause or error), 200)
            raise UserError(f"problems: {self.label} cannot be loaded: {reason}") from error
        assert isinstance(table, Dataset)
        check_columns(self.label, columns, table.column_names)
        number = 0
        for batch in table.select_columns(sorted(columns)).with_format("arrow").iter(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
