import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from jaxspec.files import CheckpointError
from jaxspec.files.text import chat_template
from jaxspec.files.text.chat_template import render_chat
from jaxspec.files.text.template_process import CPU_SECONDS, MEMORY

USER = [{"role": "user", "content": "<b>&é"}]


def render(template, messages=USER, **special):
    return render_chat(template, messages, special, add_generation_prompt=True)


def test_variables():
    template = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ tools is none }}{{ x }}"
    assert render(template, bos_token="<s>") == "<s><b>&éTrueTrue"


def test_blocks_leave_no_blank_lines():
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_loop_controls_and_generation_tag():
    body = "{% if i == 2 %}{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}"
    assert render("{% for i in range(9) %}" + body + "{% endfor %}") == "01"


def test_tojson_keeps_characters():
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<b>&é"}]'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_date():
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "the chat template failed"),
        ("{{ 1 + 'a' }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed"),
    ],
)
def test_failing_or_escaping_template_is_an_error(template, message):
    with pytest.raises(CheckpointError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list of role and content, got str"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] must be a dict, got str"),
        ([*USER, {"content": "x"}], r"messages\[1\]\['role'\] must be a string, got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] must be a string or a list"),
    ],
)
def test_messages_of_another_form_are_named(messages, message):
    with pytest.raises(CheckpointError, match=message):
        render("x", messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s * 2 %}{% endfor %}{{ n.s }}",
        "{% set a = ['x'] * 99 %}" + "{% set a = [a] * 99 %}" * 9 + "{{ a }}",
        "{{ 'x' * 10**10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ lipsum(n=10**9) }}",
    ],
)
def test_a_template_that_loops_or_grows_without_end_is_ended(template):
    with pytest.raises(CheckpointError, match="the chat template failed: "):
        render(template)
    assert render("{{ messages[0].content }}") == USER[0]["content"]


@pytest.mark.parametrize(
    ("template", "argument"),
    [
        ("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}", 99_999),
        ("{{ n * 10**10 }}", "x"),
        ("{{ n | indent(10**9) }}", "x"),
        ("{{ n | tojson | length }}", ["x" * 2**20] * 60),
        ("{{ 7 ** (7 ** n) }}", 9),
        ("{{ n % (1,) }}", "%9999999999d"),
    ],
)
def test_an_argument_that_makes_a_template_loop_or_grow_is_refused_in_a_second_and_200_mb(template, argument):
    """As memory counts what the process may have at all, with Python and the request."""
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"template failed: |written as JSON") as raised:
        render_chat(template, USER, {}, add_generation_prompt=True, arguments={"n": argument})
    assert time.perf_counter() - began < 4  # of wall time, on a machine that does more
    assert "\n" not in str(raised.value)
    assert (CPU_SECONDS, MEMORY) == (1.0, 200e6)
    assert render("{{ messages[0].content }}") == USER[0]["content"]


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_template_that_names_no_developer_knows_it_as_the_system():
    messages = [{"role": "developer", "content": "Be brief."}, *USER]
    assert render(TURNS, messages) == "[system]Be brief.[user]<b>&é"
    assert render(TURNS + "{{ 'developer' }}", messages).startswith("[developer]")


CALL = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": '{"a": "é"}'}}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("read", "text"),
    [("arguments", '{"a": "é"}'), ("arguments|tojson", '{"a": "é"}'), ("arguments.a", "é")],
)
def test_arguments_of_a_call_are_an_object_or_the_text_that_a_template_adds_to_others(read, text):
    call = (
        "{% for c in messages[0].tool_calls %}{{ c.function.name + ':' + c.function."
        + read
        + " }}{% endfor %}"
    )
    assert render(call, CALLED) == f"sum:{text}"


def test_calls_that_no_template_reads_are_refused():
    with pytest.raises(
        CheckpointError, match=r"messages\[1\]\['tool_calls'\]: the chat template reads no tool"
    ):
        render(TURNS, [*USER, *CALLED])


def test_an_argument_that_is_not_read_is_told_those_that_are_expected():
    """And not what the template sets itself, in a branch."""
    template = (
        "{% if x %}{% set text = 1 %}{% else %}{% set text = 2 %}{% endif %}{{ text }}{{ documents }}"
        "{% if not date is defined %}{% set date = 1 %}{% endif %}{{ date }}"
        "{% if x %}{% set thinking = thinking | default(false) %}{% endif %}{{ thinking }}"
    )
    with pytest.raises(
        CheckpointError, match=r"does not read 'y'; its arguments are: date, documents, thinking, x$"
    ):
        render_chat(template, USER, {}, add_generation_prompt=True, arguments={"y": 1})
    arguments = {"x": 0, "date": "May ", "thinking": "yes", "documents": "two "}
    text = render_chat(template, USER, {}, add_generation_prompt=True, arguments=arguments)
    assert text == "2two May yes"


def test_what_json_cannot_say_is_an_error():
    with pytest.raises(CheckpointError, match="messages cannot be written as JSON"):
        render("x", [{**USER[0], "tools": {1, 2}}])


@pytest.mark.timeout(30, func_only=True)
def test_every_thread_gets_its_own_answer():
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: render(f"{i} {{{{ messages[0].content }}}}"), range(64)))
    assert texts == [f"{i} {USER[0]['content']}" for i in range(64)]


def test_an_interrupted_request_is_not_the_answer_to_the_next(monkeypatch):
    exchange = chat_template._exchange

    def interrupted(process, line):
        process.stdin.write(line)
        process.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_template, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("first")
    monkeypatch.setattr(chat_template, "_exchange", exchange)
    assert render("second") == "second"


def test_a_forked_process_starts_one_of_its_own():
    assert render("before") == "before"
    own = chat_template._process
    mine, forked = own._process, chat_template._TemplateProcess()
    forked._process = mine
    forked._lock.acquire()  # as a thread of the parent may have
    forked.forget()
    assert not forked._lock.locked()
    mine.returncode = None  # only the forked copy is to forget it
    assert forked.ask('{"template": "forked", "variables": {}, "arguments": {}}') == {"text": "forked"}
    assert forked._process is not mine
    forked.close()
    assert render("after") == "after"
    assert own._process is mine


def test_a_process_that_was_killed_while_it_waited_is_started_again():
    assert render("before") == "before"
    chat_template._process._process.kill()
    chat_template._process._process.wait()
    assert render("after") == "after"


@pytest.mark.parametrize(("number", "hint"), [(signal.SIGKILL, "ran out of memory"), (signal.SIGTERM, "try")])
def test_a_process_that_is_killed_at_work_is_no_fault_of_the_template(monkeypatch, number, hint):
    def killed(process, line):
        process.send_signal(number)
        return process.stdout.readline()

    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "_exchange", killed)
        with pytest.raises(CheckpointError, match=f"was ended by {number.name}.*{hint}"):
            render("x")
    assert render("after") == "after"


def test_a_program_that_is_no_python_is_named(monkeypatch):
    monkeypatch.setattr(chat_template, "python_interpreter", lambda: "/bin/true")
    process = chat_template._TemplateProcess()
    with pytest.raises(CheckpointError, match="need a Python process with jinja2, which /bin/true cannot"):
        process.ask('{"template": "x", "variables": {}}')
