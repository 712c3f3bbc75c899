from datetime import datetime

import pytest

from jaxspec.checkpoints import CheckpointError
from jaxspec.checkpoints.chat_template import render_chat

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
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] must be a string, got 3"),
    ],
)
def test_messages_of_another_form_are_named(messages, message):
    with pytest.raises(CheckpointError, match=message):
        render("x", messages)
