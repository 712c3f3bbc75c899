import json

import pytest

from jaxspec.batch import Row, RowError, read_rows


def read(tmp_path, *lines):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return list(read_rows(path))


def test_every_form_of_a_row(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "hi"},
        {"prompt": [1, 2], "id": "ids"},
        {"messages": messages, "id": 9},
        {"turns": ["a", "b"], "category": "writing"},
    ]
    assert read(tmp_path, *map(json.dumps, rows)) == [
        Row(0, 0, "hi"),
        Row(1, "ids", [1, 2]),
        Row(2, 9, messages),
        Row(3, 3, None, ("a", "b")),
    ]


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path):
    assert read(tmp_path, "", '{"prompt": "hi"}\r', "  ", "") == [Row(1, 1, "hi")]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    assert read(tmp_path, b'\xef\xbb\xbf{"prompt": "hi"}') == [Row(0, 0, "hi")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "cut', "not JSON: Unterminated string starting at column 12"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "recursion"),
        ("[1]", "must be an object, got list"),
        ("{}", "must have one of prompt, messages and turns, got none"),
        ('{"prompt": "a", "turns": ["b"]}', "got prompt and turns"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": 3}', "prompt must be text or a list of token ids"),
        ('{"prompt": [1, true]}', "prompt must be text or a list of token ids"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]\['content'\] must be a string"),
        ('{"turns": ["a", ""]}', "turns must be a list of texts, none of them empty"),
        ('{"turns": []}', "turns must be a list of texts"),
        ('{"prompt": "a", "id": 1.5}', "id must be text or a whole number, got 1.5"),
        ('{"prompt": "a", "id": null}', "id must be text or a whole number, got None"),
        ('{"prompt": "a", "id": "\\ud800"}', "id is not valid Unicode"),
    ],
)
def test_a_bad_row_is_reported_with_its_line_and_the_next_still_read(tmp_path, line, problem):
    first, bad, last = read(tmp_path, '{"prompt": "a"}', line, '{"prompt": "b"}')
    assert isinstance(bad, RowError)
    assert str(bad).startswith("line 2: ")
    assert "\n" not in str(bad)
    with pytest.raises(RowError, match=problem):
        raise bad
    assert (first, last) == (Row(0, 0, "a"), Row(2, 2, "b"))


def test_an_id_is_taken_once(tmp_path):
    rows = read(tmp_path, '{"prompt": "a", "id": 1}', '{"prompt": "b"}', '{"prompt": "c", "id": "1"}')
    assert str(rows[1]) == "line 2: id 1 is taken by line 1"
    assert rows[2] == Row(2, "1", "c")
