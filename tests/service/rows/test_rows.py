import dataclasses
import json
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sampling import SamplingParams
from jaxspec.service.rows import (
    STDIN,
    Form,
    InputError,
    Row,
    RowError,
    count_rows,
    input_files,
    may_sample,
    read_rows,
)
from jaxspec.service.rows import row as rows
from jaxspec.service.rows.row import FLAGS


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *lines: list(read_rows(write(tmp_path / "in.jsonl", *lines).name))


def row(line, row_id, prompt, *turns, file="in.jsonl"):
    return Row(f"{file} line {line}", row_id, prompt, turns)


def test_every_form_of_a_row(read):
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": "hi"},
        {"prompt": [1, 2], "id": "ids"},
        {"messages": messages, "id": 9},
        {"turns": ["a", "b"], "category": "writing"},
    ]
    assert read(*map(json.dumps, lines)) == [
        row(1, 0, "hi"),
        row(2, "ids", [1, 2]),
        row(3, 9, messages),
        row(4, 3, None, "a", "b"),
    ]


def test_a_row_may_set_every_sampling_parameter_and_the_templates_arguments(read):
    """Null sets nothing, as in a column of Parquet."""
    asked = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "max_new_tokens": 5}
    asked |= {"stop": ["a"], "stop_token_ids": [1], "ignore_eos": True}
    asked |= {"num_speculative_tokens": 1, "logprobs": 2, "logprobs_mode": "processed_logprobs"}
    asked |= {"repetition_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 2}
    asked |= {"logit_bias": {"7": 1.5}, "bad_words": ["a", [1, 2]], "no_repeat_ngram_size": 3}
    asked |= {"json_schema": {"type": "null"}}  # in place of a choice or a regex
    assert {*asked, "choice", "regex"} == {field.name for field in dataclasses.fields(SamplingParams)}
    line = {"prompt": "hi", **asked, "chat_template_kwargs": {"enable_thinking": False}, "source": ["any"]}
    nothing = {**dict.fromkeys([*asked, "chat_template_kwargs", "answer"]), "prompt": "hi"}
    found, plain = read(json.dumps(line), json.dumps(nothing))
    assert found.sampling == asked
    assert found.chat_template_kwargs == {"enable_thinking": False}
    assert plain == row(2, 1, "hi")


def test_a_row_may_ask_for_several_answers(read):
    several, one, turns, none = read(
        '{"prompt": "hi", "n": 3}', '{"prompt": "hi"}', '{"turns": ["a"], "n": 2}', '{"prompt": "hi", "n": 0}'
    )
    assert (several.n, one.n) == (3, None)
    assert several.digest != one.digest
    assert str(turns).endswith("n: a row with turns has one answer to each")
    assert str(none).endswith("n must be an integer, 1 or more, got 0")
    with pytest.raises(RowError, match="n: this program does not take it from a row"):
        _ = several.first_prompt


@pytest.mark.parametrize("flag", FLAGS)
def test_a_row_may_say_how_its_prompt_is_read(read, flag):
    on, off, wrong = read(*(f'{{"prompt": "hi", "{flag}": {value}}}' for value in ("true", "false", "1")))
    assert (on.flags, off.flags, off) == ({flag: True}, {}, row(2, 1, "hi"))
    assert on.digest != off.digest
    assert str(wrong).endswith(f"{flag} must be true or false, got 1")
    with pytest.raises(RowError, match=f"{flag}: this program does not take it from a row"):
        _ = on.first_prompt


def form_of(tmp_path, *lines, **form):
    return list(read_rows(write(tmp_path / "in.jsonl", *map(json.dumps, lines)), form=Form(**form)))


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("question", ["hi", [1, 2], MESSAGES])
def test_the_question_may_have_another_key(tmp_path, question):
    lines = [{"question": question, "seed": 3}, {"prompt": "hi"}, {"question": "", "id": 1}]
    found, other, empty = form_of(tmp_path, *lines, prompt_key="question")
    assert (found.prompt, found.sampling) == (question, {"seed": 3})
    assert "unknown key 'prompt'; known: id, question, response" in str(other)
    assert str(empty).endswith("question is empty")
    assert str(form_of(tmp_path, {"id": 1}, prompt_key="q")[0]).endswith("must have 'q', got none")


def test_columns_are_kept_as_they_are(tmp_path):
    line = {"prompt": "hi", "id": 4, "label": [1.5, None], "source": "é", "answer": "ho", "top_k": 2, "n": 1}
    (every,) = form_of(tmp_path, line, kept=True)
    assert every.kept == {"label": [1.5, None], "source": "é", "answer": "ho"}
    assert (every.sampling, every.answer) == ({"top_k": 2}, "ho")
    (some,) = form_of(tmp_path, line, kept=("label", "missing", "top_k"))
    assert some.kept == {"label": [1.5, None], "top_k": 2}
    assert every.digest == some.digest == form_of(tmp_path, {**line, "label": 2}, kept=True)[0].digest
    (unknown,) = form_of(tmp_path, line, kept=("source",))
    assert "unknown key 'label'" in str(unknown)
    for kept in (True, ("text",)):
        (clash,) = form_of(tmp_path, {"prompt": "hi", "text": "a"}, kept=kept)
        assert str(clash).endswith("'text' cannot be kept: it is a key of the output")
    (lone,) = form_of(tmp_path, {"prompt": "hi", "source": "\ud800"}, kept=True)
    assert str(lone).endswith("source is not valid Unicode")


def test_rows_take_what_they_do_not_say_from_the_form(tmp_path):
    form = {"chat_template_kwargs": {"a": 1}, "special_tokens_as_text": True}
    lines = [
        {"prompt": "hi"},
        {"prompt": "hi", "chat_template_kwargs": {"b": 2}, "special_tokens_as_text": False},
    ]
    first, second = form_of(tmp_path, *lines, defaults=form)
    assert (first.chat_template_kwargs, first.special_tokens_as_text) == ({"a": 1}, True)
    assert (second.chat_template_kwargs, second.special_tokens_as_text) == ({"a": 1, "b": 2}, False)
    (own,) = form_of(tmp_path, {"prompt": "hi", "chat_template_kwargs": {"a": 2}}, defaults=form)
    assert own.chat_template_kwargs == {"a": 2}
    assert first.digest != form_of(tmp_path, lines[0])[0].digest


def test_how_many_answers_is_not_for_rows_with_turns(tmp_path):
    lines = [{"prompt": "hi"}, {"turns": ["a", "b"]}, {"turns": ["a"], "n": None}, {"prompt": "hi", "n": 3}]
    assert [found.n for found in form_of(tmp_path, *lines, defaults={"n": 2})] == [2, None, None, 3]


def test_null_is_nothing_beside_another_form_and_as_an_id(tmp_path):
    """As in tables whose rows are of several forms."""
    every = dict.fromkeys(["prompt", "messages", "turns", "custom_id", "method", "url", "body", "n", "id"])
    lines = [{**every, "prompt": "hi"}, {**every, "messages": MESSAGES}, {**every, "turns": ["a"]}]
    found = form_of(tmp_path, *lines, openai=True)
    assert [each.prompt or each.turns for each in found] == ["hi", MESSAGES, ("a",)]
    assert [each.id for each in found] == [0, 1, 2]
    line = {**every, "custom_id": "c", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
    (asked,) = form_of(tmp_path, line, openai=True)
    assert (asked.id, asked.prompt) == ("c", "a")
    (kept,) = form_of(tmp_path, {"prompt": None, "turns": ["a"], "label": None}, kept=True)
    assert kept.kept == {"label": None}
    (own,) = form_of(
        tmp_path, {"prompt": "a", "chat_template_kwargs": {"a": None}, "logit_bias": {"5": None}}
    )
    assert (own.chat_template_kwargs, own.sampling) == ({}, {"logit_bias": {}})
    (none,) = form_of(tmp_path, dict.fromkeys(["prompt", "id"]))
    assert str(none).endswith("must have one of prompt, messages and turns, got none")
    (unknown,) = form_of(tmp_path, {"prompt": "a", "colour": None})
    assert "unknown key 'colour'" in str(unknown)


def test_a_whole_number_is_a_whole_number_however_it_is_written(read):
    """As JSON of languages without integers has them."""
    found, ids = read(
        '{"prompt": "a", "id": 7.0, "n": 2.0, "max_new_tokens": 5.0, "stop_token_ids": [3.0]}',
        '{"prompt": [1.0, 2]}',
    )
    assert (found.id, found.n, ids.prompt) == (7, 2, [1, 2])
    assert SamplingParams(**found.sampling) == SamplingParams(max_new_tokens=5, stop_token_ids=(3,))
    assert type(found.id) is type(found.n) is type(ids.prompt[0]) is int


@pytest.mark.parametrize("key", ["response", "completion", "answer"])
def test_a_row_may_bring_its_answer(read, key):
    (found,) = read(json.dumps({"prompt": "hi", key: "ho"}))
    assert found.answer == "ho"
    assert found.digest == row(1, 0, "hi").digest


def test_whether_rows_may_sample_is_known_before_they_are_read(tmp_path):
    greedy = write(tmp_path / "greedy", '{"prompt": "the \\"temperature\\" rises", "seed": 1}')
    assert not may_sample(greedy)
    for key in ("temperature", "top_k", "top_p"):
        assert may_sample(greedy, write(tmp_path / "other", '{"prompt": "a"}', f'{{"{key}": 1}}'))
    assert may_sample(STDIN)
    os.mkfifo(tmp_path / "pipe")
    assert may_sample(tmp_path / "pipe")


def test_blank_lines_count_as_lines_but_not_as_rows(read):
    assert read("", '{"prompt": "hi"}\r', "  ", "") == [row(2, 1, "hi")]
    assert count_rows("in.jsonl") == 1


def test_a_byte_order_mark_is_no_part_of_the_first_row(read):
    assert read(b'\xef\xbb\xbf{"prompt": "hi"}') == [row(1, 0, "hi")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "cut', "not JSON: Unterminated string starting at column 12"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "recursion"),
        ("[1]", "must be an object, got list"),
        ("{}", "must have one of prompt, messages and turns, got none"),
        ('{"prompt": "a", "turns": ["b"]}', "got prompt and turns"),
        (
            '{"prompt": "a", "temprature": 1}',
            "unknown key 'temprature'; did you mean 'temperature'. known: id, .*, temperature, ",
        ),
        ('{"prompt": "a", "' + "long " * 1000 + '": 1}', "unknown key 'long .*; known: id, .*, metadata"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature must be a number, 0 or more, got 'hot'"),
        ('{"prompt": "a", "logit_bias": {"5": "x"}}', "logit_bias of token 5 must be a number"),
        ('{"prompt": "a", "stop": [1]}', "stop must be a string or a list of strings"),
        ('{"prompt": "a", "chat_template_kwargs": [1]}', "chat_template_kwargs must be a mapping"),
        ('{"prompt": "a", "chat_template_kwargs": {"messages": 1}}', "'messages' cannot be set"),
        ('{"prompt": "a", "chat_template_kwargs": {"a": "\\ud800"}}', "kwargs is not valid Unicode"),
        ('{"prompt": "a", "answer": 1}', "answer must be a text that is not empty, or null"),
        ('{"prompt": "a", "answer": "b", "response": "c"}', "got response and answer"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": 3}', "prompt must be text or a list of token ids"),
        ('{"prompt": [1, true]}', "prompt must be text or a list of token ids"),
        ('{"prompt": "\\ud800"}', "prompt is not valid Unicode"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]\['content'\] must be a string"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "messages is not valid Unicode"),
        ('{"turns": ["a", ""]}', "turns must be a list of texts, none of them empty"),
        ('{"turns": []}', "turns must be a list of texts"),
        ('{"turns": ["a", "\\uD800b"]}', "turns is not valid Unicode"),
        ('{"prompt": "a", "id": 1.5}', "id must be text or a whole number, got 1.5"),
        ('{"prompt": "a", "custom_id": null}', "unknown key 'custom_id'"),
        ('{"prompt": "a", "id": "\\ud800"}', "id is not valid Unicode"),
        ('{"prompt": "a", "id": ' + "7" * 5000 + "}", "4300 digits"),
        ('{"prompt": {"a\\nb": 1}, "id": "' + "long " * 1000 + '"}', "prompt must be text"),
        ('{"messages": [{"role": "user", "content": ["' + "long " * 1000 + '"]}]}', "must be a part with"),
    ],
)
def test_a_bad_row_is_reported_with_its_line_and_the_next_still_read(read, line, problem):
    first, bad, last = read('{"prompt": "a"}', line, '{"prompt": "b"}')
    assert isinstance(bad, RowError)
    assert str(bad).startswith("in.jsonl line 2: ")
    assert "\n" not in str(bad)
    assert len(str(bad)) < 900
    with pytest.raises(RowError, match=problem):
        raise bad
    assert (first, last) == (row(1, 0, "a"), row(3, 2, "b"))


def test_an_id_is_taken_once(read):
    found = read('{"prompt": "a", "id": 1}', '{"prompt": "b"}', '{"prompt": "c", "id": "1"}')
    assert str(found[1]) == "in.jsonl line 2: id 1 is taken by in.jsonl line 1"
    assert found[2] == row(3, "1", "c")


def test_several_files_are_one_input(tmp_path, monkeypatch):
    """As if they came out of `cat`: lines without an id are counted through all of them."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", '{"prompt": "a"}', '{"prompt": "b", "id": "x"}')
    write(tmp_path / "b", "", '{"prompt": "c"}', '{"prompt": "d", "id": "x"}', '{"prompt": "e", "id": 0}')
    *found, x, zero = read_rows("a", "b")
    assert found == [
        row(1, 0, "a", file="a"),
        row(2, "x", "b", file="a"),
        row(2, 3, "c", file="b"),
    ]
    assert str(x) == "b line 3: id 'x' is taken by a line 2"
    assert str(zero) == "b line 4: id 0 is taken by a line 1"
    assert count_rows("a", "b") == 5


def test_a_line_that_is_too_long_is_passed_over_and_never_held(read, monkeypatch):
    monkeypatch.setattr(rows, "MAX_LINE", 40)
    short = '{"prompt": "' + "x" * (40 - 15) + '"}'
    first, error, last = read(short, '{"prompt": "' + "y" * 300 + '"}', '{"prompt": "b"}')
    assert (first.prompt, last) == ("x" * 25, row(3, 2, "b"))
    assert str(error) == "in.jsonl line 2: longer than 40 bytes"
    assert [str(error) for error in read("z" * 40)] == [
        "in.jsonl line 1: not JSON: Expecting value at column 1"
    ]
    for length in range(41, 140):
        error, last = read("z" * length, '{"prompt": "b"}')
        assert (str(error), last.id) == ("in.jsonl line 1: longer than 40 bytes", 1)


def test_a_pipe_is_read_once_row_by_row():
    reading, writing = os.pipe()
    found = read_rows(f"/dev/fd/{reading}")
    with open(writing, "w") as pipe:
        for i in range(3):
            pipe.write(f'{{"prompt": "w{i}"}}\n')
            pipe.flush()
            if i == 0:
                # Buffered reading takes what is there, and what is there is enough for a row.
                assert next(found).prompt == "w0"
    assert [row.prompt for row in found] == ["w1", "w2"]
    assert count_rows(f"/dev/fd/{reading}") is None
    os.close(reading)


def test_a_named_pipe_is_opened_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text('{"prompt": "a"}\n'))
    writer.start()
    assert count_rows(path) is None
    assert [row.prompt for row in read_rows(path)] == ["a"]
    writer.join()


def test_standard_input(tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", '{"prompt": "a"}', "{")
    saved = os.dup(0)
    with (tmp_path / "in.jsonl").open("rb") as file:
        os.dup2(file.fileno(), 0)
    try:
        assert count_rows(STDIN) is None
        found, error = read_rows(STDIN)
    finally:
        os.dup2(saved, 0)
        os.close(saved)
    assert found == row(1, 0, "a", file="stdin")
    assert str(error).startswith("stdin line 2: not JSON")


def test_what_cannot_be_read_is_named_before_anything_is_read(tmp_path):
    good = write(tmp_path / "in.jsonl", '{"prompt": "a"}')
    for path, problem in [(tmp_path / "missing", "No such file or directory"), (tmp_path, "Is a directory")]:
        with pytest.raises(InputError, match=f"^cannot read {path}: {problem}$"):
            read_rows(good, path)


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path):
    """However deep they lie, but for what programs write beside them; also at a URL."""
    folder = tmp_path / "a.rows"
    for name in "b.jsonl", "a/c.jsonl", "_SUCCESS", ".b.jsonl.crc", "_old/a.jsonl":
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        write(folder / name, json.dumps({"prompt": name}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "_SUCCESS").touch()
    assert input_files("-", str(folder), "in.jsonl") == [
        "-",
        str(folder / "a" / "c.jsonl"),
        str(folder / "b.jsonl"),
        "in.jsonl",
    ]
    files = input_files(f"file://{folder}/")
    assert files == [f"file://{folder}/a/c.jsonl", f"file://{folder}/b.jsonl"]
    assert [found.prompt for found in read_rows(*files)] == ["a/c.jsonl", "b.jsonl"]
    assert count_rows(*files) is None
    assert may_sample(*files)
    for source in str(tmp_path / "empty"), f"file://{tmp_path}/empty":
        with pytest.raises(InputError, match=f"^cannot read {source}: a folder without files$"):
            input_files(source)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("file:///missing.jsonl", "missing.jsonl"),
        ("file:///missing.parquet", "missing.parquet"),
        ("nobody://here", "Protocol not known: nobody"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_line(source, problem):
    with pytest.raises(InputError, match=f"^cannot read {source}: [^\n]*{problem}[^\n]*$"):
        list(read_rows(*input_files(source)))


def test_a_file_on_a_server_is_read(tmp_path):
    write(tmp_path / "in.jsonl", '{"prompt": "a"}', "", '{"prompt": "b"}')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/in.jsonl"
        assert [found.prompt for found in read_rows(*input_files(url))] == ["a", "b"]
        server.shutdown()


def test_a_file_that_vanishes_is_named_when_its_turn_comes(tmp_path):
    path = write(tmp_path / "in.jsonl", '{"prompt": "a"}')
    found = read_rows(path)
    path.unlink()
    with pytest.raises(InputError, match=f"^cannot read {path}: No such file or directory$"):
        next(found)


def test_a_digest_is_of_what_is_asked_and_of_nothing_else(read):
    digests = [
        found.digest
        for found in read(
            '{"prompt": "a"}',
            '{"prompt":"a",  "id": "x", "category": 3}',
            '{"prompt": "\\u0061"}',
            '{"prompt": "b"}',
            '{"prompt": [1, 2]}',
            '{"turns": ["a"]}',
            '{"turns": ["a", "b"]}',
            '{"messages": [{"role": "user", "content": "a"}]}',
            '{"messages": [{"content": "a", "role": "user"}]}',
            '{"prompt": "a", "seed": 1}',
            '{"prompt": "a", "seed": 2}',
            '{"prompt": "a", "chat_template_kwargs": {"seed": 1}}',
            '{"prompt": "a", "answer": "b", "source": "c"}',
        )
    ]
    assert digests[0] == digests[1] == digests[2] == digests[12]
    assert digests[7] == digests[8]
    assert len(set(digests)) == 9
    assert all(len(digest) == 16 for digest in digests)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None))),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([*rows.KEYS, "role", "content"])


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.dictionaries(KEYS, JSON, max_size=3).map(json.dumps)))
def test_whatever_a_line_holds_it_is_one_row_or_one_error(tmp_path_factory, line):
    line = line if isinstance(line, bytes) else line.encode()
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    write(path, line.replace(b"\n", b" "), '{"prompt": "b", "id": "the last"}')
    *found, last = read_rows(path)
    assert last.prompt == "b"
    assert len(found) == count_rows(path) - 1
    for item in found:
        assert isinstance(item, Row) or str(item).startswith(f"{path} line 1: ")
