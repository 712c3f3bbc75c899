"""Batch runs: files of prompts in, files of answers out, resumable."""

from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.devices import HostDevices
from jaxspec.service.batch.output import Output, OutputError, OutputFile, Unanswered
from jaxspec.service.batch.processes import ProcessReplica
from jaxspec.service.batch.record import record_path
from jaxspec.service.batch.replica import Engines
from jaxspec.service.batch.replicas import ReplicaError, ReplicaRun
from jaxspec.service.batch.run import BatchRun, row_seed
from jaxspec.service.batch.settings import run_settings
from jaxspec.service.batch.summary import MAX_FAILURES, Summary
from jaxspec.service.rows import STDIN, InputError, Row, RowError, RowId, count_rows, read_rows

__all__ = [
    "MAX_FAILURES",
    "STDIN",
    "Answer",
    "BatchRun",
    "Engines",
    "HostDevices",
    "InputError",
    "Output",
    "OutputError",
    "OutputFile",
    "ProcessReplica",
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
