"""Output rows as columns of Arrow and Parquet."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pyarrow as pa

from jaxspec.engine import AcceptanceStats

_COUNTS = {
    each.name: pa.int64() if each.type is int else pa.list_(pa.int64()) for each in fields(AcceptanceStats)
}
_RATES = {"acceptance_per_position": pa.list_(pa.float64()), "conditional_acceptance": pa.list_(pa.float64())}
_GENERATION = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "prompt_tokens": pa.int64(),
    "finish_reason": pa.string(),
    "seed": pa.uint64(),
    "stats": pa.struct({**_COUNTS, "acceptance_length": pa.float64(), **_RATES}),
    "logprobs": pa.list_(pa.float64()),
    "top_logprobs": pa.list_(pa.map_(pa.string(), pa.float64())),
}
_SEVERAL = ("turns", "samples")
ANSWER_COLUMNS = {
    "input_digest": pa.string(),
    **_GENERATION,
    **{name: pa.list_(pa.struct(_GENERATION)) for name in _SEVERAL},
}
"""The keys of an output row but for its id: what a row does not have is null."""


def as_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """An output row as Arrow takes it: mappings as lists of pairs."""
    columns = dict(record)
    if record.get("top_logprobs") is not None:
        columns["top_logprobs"] = [list(top.items()) for top in record["top_logprobs"]]
    for name in _SEVERAL:
        if record.get(name) is not None:
            columns[name] = [as_columns(each) for each in record[name]]
    return columns
