"""Batch runs: files of prompts in, files of answers out, resumable."""

from jaxspec.batch.answer import Answer
from jaxspec.batch.devices import HostDevices
from jaxspec.batch.output import OutputError, OutputFile, Unanswered
from jaxspec.batch.record import record_path
from jaxspec.batch.replicas import ReplicaError, ReplicaRun
from jaxspec.batch.run import BatchRun, row_seed
from jaxspec.batch.settings import run_settings
from jaxspec.batch.summary import MAX_FAILURES, Summary
from jaxspec.rows import STDIN, InputError, Row, RowError, RowId, count_rows, read_rows

__all__ = [
    "MAX_FAILURES",
    "STDIN",
    "Answer",
    "BatchRun",
    "HostDevices",
    "InputError",
    "OutputError",
    "OutputFile",
    "ReplicaError",
    "ReplicaRun",
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
