"""Reading rows from Parquet files; needs the extra parquet."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxspec.errors import one_line
from jaxspec.service.rows.errors import InputError
from jaxspec.service.rows.row import ASKED, NOTES, Form
from jaxspec.service.rows.urls import open_url
from jaxspec.spelling import known_names

_ROWS_AT_ONCE = 256


def output_columns(paths: Sequence[str | Path], form: Form) -> pa.Schema:
    """The types of "id" and of the columns that are kept, of files with the same columns.

    Raises:
      InputError: the files have different columns, or one that rows cannot have.
    """
    schemas = [_opened(path, form).schema_arrow for path in paths]
    try:
        schema = pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise InputError(one_line(f"{', '.join(map(str, paths))}: other columns in each: {error}")) from None
    ids = schema.field("id").type if "id" in schema.names else pa.int64()
    if not (pa.types.is_integer(ids) or pa.types.is_string(ids) or pa.types.is_large_string(ids)):
        raise InputError(f"{paths[0]}: id must be a column of texts or whole numbers, not of {ids}")
    kept = _kept(paths[0], schema, form)
    return pa.schema([pa.field("id", ids), *(schema.field(name) for name in kept)])


def check_json(columns: pa.Schema) -> None:
    """Checks that JSON lines can hold columns that are kept.

    Raises:
      InputError: a column is of a type that JSON does not have, such as a time.
    """
    for field in columns:
        if not _is_json(field.type):
            raise InputError(f"{field.name}: JSON lines cannot keep a column of {field.type}; Parquet can")


def _is_json(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_struct(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind):
        return _is_json(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return is_text or is_number or types.is_null(kind)


def count(path: str | Path) -> int:
    """The number of rows.

    Raises:
      InputError: the file cannot be read.
    """
    return _opened(path, None).metadata.num_rows


def column_names(path: str | Path) -> list[str]:
    """The names of the columns; errors as of `count`."""
    return _opened(path, None).schema_arrow.names


def read(path: str | Path, form: Form) -> Iterator[dict[str, Any]]:
    """The values of each row, without those that are null and not kept.

    Raises:
      InputError: the file cannot be read, or has a column that rows cannot have.
    """
    file = _opened(path, form)
    schema = file.schema_arrow
    kept = _kept(path, schema, form)
    # Of columns that nobody looks at, Python may be unable to hold the values.
    names = [name for name in schema.names if name in kept or name not in NOTES]
    try:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names):
            for row in batch.to_pylist():
                yield without_nulls(row, kept, (*ASKED, *form.questions))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _cannot_read(path, error) from None


def _opened(path: str | Path, form: Form | None) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(open_url(str(path)) if "://" in str(path) else path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _cannot_read(path, error) from None
    if form is not None:
        kept = _kept(path, file.schema_arrow, form)
        unknown = [name for name in file.schema_arrow.names if name not in form.known and name not in kept]
        if unknown:
            raise InputError(f"{path}: unknown column {unknown[0]!r}; {known_names(unknown[0], form.known)}")
    return file


def _kept(path: str | Path, schema: pa.Schema, form: Form) -> list[str]:
    try:
        return list(form.keeps(dict.fromkeys(schema.names)))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def without_nulls(
    row: Mapping[str, Any], kept: Sequence[str] = (), asking: Sequence[str] = ASKED
) -> dict[str, Any]:
    """The columns of a row that are not null, and those that are kept.

    Of values that ask for something, no part is null either: structs of one column have the keys of all rows,
    and those of other rows are null. Other values that are kept are as they are.
    """
    return {
        name: value if name in kept and name not in asking else _own_keys(value)
        for name, value in row.items()
        if value is not None or name in kept
    }


def _own_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _own_keys(item) for key, item in value.items() if item is not None}
    return [*map(_own_keys, value)] if isinstance(value, list) else value


def _cannot_read(path: str | Path, error: Exception) -> InputError:
    return InputError(one_line(f"cannot read {path}: {getattr(error, 'strerror', None) or error}"))
