"""Files of prompts: rows in, answers out, resumable."""

from jaxspec.batch.ids import RowId
from jaxspec.batch.output import OutputError, OutputFile, Unanswered
from jaxspec.batch.record import record_path
from jaxspec.batch.rows import STDIN, InputError, Row, RowError, count_rows, read_rows
from jaxspec.batch.run import Answer, BatchRun, row_seed
from jaxspec.batch.settings import run_settings
from jaxspec.batch.summary import MAX_FAILURES, Summary

__all__ = [
    "MAX_FAILURES",
    "STDIN",
    "Answer",
    "BatchRun",
    "InputError",
    "OutputError",
    "OutputFile",
    "Row",
    "RowError",
    "RowId",
    "Summary",
    "Unanswered",
    "count_rows",
    "read_rows",
    "record_path",
    "row_seed",
    "run_settings",
]
