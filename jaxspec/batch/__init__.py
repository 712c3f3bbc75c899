"""Files of prompts: rows in, answers out, resumable."""

from jaxspec.batch.output import OutputError, OutputFile
from jaxspec.batch.rows import Row, RowError, RowId, read_rows
from jaxspec.batch.run import Answer, BatchRun
from jaxspec.batch.summary import Summary

__all__ = [
    "Answer",
    "BatchRun",
    "OutputError",
    "OutputFile",
    "Row",
    "RowError",
    "RowId",
    "Summary",
    "read_rows",
]
