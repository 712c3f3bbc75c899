"""Every line of a JSONL file that somebody broke gives a row, or an error of one line that names it."""

import json

import pytest
from fuzzing import VALUES, changed, damaged, refused_or
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.service.rows import KEYS as ROW_KEYS
from jaxspec.service.rows import Form, Row, RowError, read_rows

ROWS = (
    {"prompt": "hi", "id": "a"},
    {"prompt": [1, 2], "id": 7},
    {"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]},
    {"turns": ["a", "b"], "category": "writing", "temperature": 0.5, "stop": "é"},
    {"prompt": "hi", "answer": "ho", "chat_template_kwargs": {"a": [1]}, "max_new_tokens": 3},
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": ["a"]},
    },
)
LINES = b"\n".join(json.dumps(row).encode() for row in ROWS)
KEYS = (*ROW_KEYS, "role", "content", "custom_id", "body", "tool_calls", "response_format", "logit_bias")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "in.jsonl"


def check(path, content):
    """Reads a file of this content; what it yields is counted by its lines, and can be asked and printed."""
    path.write_bytes(content)
    rows = refused_or(lambda: list(read_rows(path, form=Form(openai=True))))
    assert rows is not None
    assert len(rows) == sum(1 for line in content.split(b"\n") if line.strip())
    ids = [row.id for row in rows if isinstance(row, Row)]
    assert len(ids) == len(set(ids))
    for row in rows:
        if isinstance(row, RowError):
            assert str(row).isprintable()
            json.dumps(row.record, ensure_ascii=False).encode("utf-8")
            continue
        assert len(row.digest) == 16
        asked = [row.id, row.prompt, row.turns, row.sampling, row.chat_template_kwargs, row.answer]
        json.dumps(asked, ensure_ascii=False).encode("utf-8")


@given(content=damaged(LINES) | st.binary(max_size=64))
def test_other_bytes(path, content):
    check(path, content)


@given(rows=st.lists(st.sampled_from(ROWS).flatmap(lambda row: changed(row, KEYS)) | VALUES, max_size=4))
def test_other_values(path, rows):
    check(path, b"\n".join(json.dumps(row).encode() for row in rows))


@pytest.mark.parametrize(
    "line", [b"[" * 200_000, b'{"prompt": ' + b"9" * 5000 + b"}", b'{"a":' * 10**5, b"\xff" * 10**6]
)
def test_lines_past_every_bound(path, line):
    check(path, line + b'\n{"prompt": "hi"}\n')
