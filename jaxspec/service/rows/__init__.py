"""Files of prompts, as batch runs and training read them: one format, one reader."""

from jaxspec.service.rows.errors import InputError
from jaxspec.service.rows.files import (
    STDIN,
    count_rows,
    input_files,
    is_parquet,
    may_sample,
    parquet_columns,
    read_rows,
)
from jaxspec.service.rows.ids import IdTable, RowId, hash_json
from jaxspec.service.rows.openai_lines import RefusedLine, output_line
from jaxspec.service.rows.row import KEYS, MAX_LINE, NOTES, OUTPUT, Form, Row, RowError, make_row, parse_line

__all__ = [
    "KEYS",
    "MAX_LINE",
    "NOTES",
    "OUTPUT",
    "STDIN",
    "Form",
    "IdTable",
    "InputError",
    "RefusedLine",
    "Row",
    "RowError",
    "RowId",
    "count_rows",
    "hash_json",
    "input_files",
    "is_parquet",
    "make_row",
    "may_sample",
    "output_line",
    "parquet_columns",
    "parse_line",
    "read_rows",
]
