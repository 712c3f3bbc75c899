from contextlib import closing

import pytest
from output_rows import record, write

from jaxspec.service.batch import OutputError, OutputFile, Row, RowError, Unanswered


def test_what_the_output_answers_is_skipped_and_counted(tmp_path):
    path = tmp_path / "out.jsonl"
    rows = [Row(f"line {i}", i, f"w{i}") for i in range(5)]
    write(path, *(record(row.id, digest=row.digest) for row in rows[1:3]))
    with closing(OutputFile(path, resume=True)) as file:
        assert file.num_finished == 2
        source = [rows[0], RowError("line 9", "bad"), *rows[1:]]
        left = Unanswered(source, file)
        assert list(left) == [rows[0], source[1], *rows[3:]]
        assert (left.num_rows, left.num_skipped) == (6, 2)


def test_a_row_that_has_changed_is_refused_unless_forced(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, record("x", digest=Row("line 1", "x", "w6").digest))
    changed = Row("in.jsonl line 7", "x", "w7")
    with closing(OutputFile(path, resume=True)) as file:
        with pytest.raises(OutputError) as refused:
            list(Unanswered([changed], file))
        assert str(refused.value) == (
            f"cannot resume {path}: in.jsonl line 7 is not what was answered as 'x'; "
            "--resume=force keeps that answer"
        )
        forced = Unanswered([changed], file, force=True)
        assert list(forced) == []
        assert forced.num_skipped == 1
