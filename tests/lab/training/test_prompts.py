"""Prompts: held-out ones left out, and a target that writes its own."""

import json

import pytest
from tiny_run import SPECIAL, TEMPLATE, write_run, write_target

from jaxspec.files import open_checkpoint
from jaxspec.lab.training.config import PromptsConfig, load_training_run
from jaxspec.lab.training.held_out import HeldOut, normalise
from jaxspec.lab.training.pipeline import Pipeline
from jaxspec.lab.training.prompt_files import PromptRow, encode_answer, encode_prompts, read_rows
from jaxspec.lab.training.prompts import user_turn_prefix
from jaxspec.lab.training.token_rows import TokenRows

LONG = "the quick brown fox jumps over the lazy dog and then goes home to sleep"
CHINESE = "小明有十二个苹果、给了小红五个、他还剩下多少个苹果"
JAPANESE = "春はあけぼのやうやう白くなりゆく山ぎは少し明かりて"
THAI = "วันนี้อากาศดีมากเราไปเที่ยวทะเลกันเถอะ"
HINDI = "राम के पास बारह सेब थे और उसने पाँच सेब सीता को दे दिए अब कितने बचे"


def user(text):
    return ({"role": "user", "content": text},)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("what is BLUE", True),
        ("what is blue and green", False),
        (f"Translate: {LONG.upper()}!", True),
        (f"Translate: {LONG[:40]}", False),
        (" ?! ", True),
        ("...", False),
        ("请翻译。" + CHINESE.replace("、", ""), True),
        (f"{CHINESE[:12]}吗。", False),
        ("次の文を英語に。" + JAPANESE[3:18] + "。", True),
        (f"{JAPANESE[:11]}ですか。", False),
        (f"แปล {THAI}", True),
        (HINDI.replace(" ", ", "), True),
        (" ".join(HINDI.split()[:12]), False),
        ("".join(chr(ord(c) + 0xFEE0) if c > " " else c for c in "WHAT is blue?"), True),
        ("Was ist blau, Cafe\u0301?", True),
    ],
)
def test_held_out_prompts_are_found(text, held):
    texts = ["What is blue?", LONG, "?!", CHINESE, JAPANESE, THAI, HINDI, "Was ist blau, Caf\u00e9?"]
    assert (text in HeldOut(texts)) is held


def test_words_of_every_script():
    assert normalise("Ab-cd 你好ab かな ไทย") == ("ab", "cd", "你", "好", "ab", "か", "な", "ไ", "ท", "ย")
    assert len(normalise(HINDI)) == len(HINDI.split())
    assert normalise("한국어 텍스트") == ("한국어", "텍스트")


def test_repeated_held_out_and_long_prompts_are_dropped(tmp_path):
    config = write_run(tmp_path)
    rows = ["What is blue?", "and what is NOT", "red one", "Red, one!", "x" * 200, "sun"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    run = Pipeline(load_training_run(config), tmp_path / "out", data=tmp_path)
    report = run.run_stage("prompts")
    assert report == {
        "from_files": 6,
        "synthetic": 0,
        "repeated": 1,
        "held_out": 2,
        "too_long": 1,
        "set_aside": 0,
        "answered": 0,
        "prompts": 2,
    }
    kept = TokenRows.load(tmp_path / "out" / "prompts" / "prompts.npz").sequences()
    rows = [PromptRow(user("Red, one!")), PromptRow(user("sun"))]
    wanted = [ids for _, ids in encode_prompts(run.tokenizer, rows, 128)]
    assert sorted(ids.tolist() for ids in kept) == sorted(wanted)


def prompts_stage(tmp_path, rows, held_out=({"prompt": "green"},)):
    """The report of the stage for these rows."""
    config = write_run(tmp_path, prompts={"held_out": ["held_out.jsonl"]})
    for name, lines in (("prompts", rows), ("held_out", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return Pipeline(load_training_run(config), tmp_path / "out", data=tmp_path).run_stage("prompts")


def test_only_what_a_user_says_repeats_a_held_out_prompt(tmp_path):
    def chat(text):
        return {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": text}]}

    turns = [{"role": "user", "content": "moon"}, {"role": "assistant", "content": "yes"}]
    long = {"messages": [*turns, {"role": "user", "content": "two"}]}
    report = prompts_stage(tmp_path, [chat("sun"), chat("moon"), chat("red one"), long], [chat("moon")])
    assert (report["held_out"], report["prompts"]) == (2, 2)


def test_prompts_that_differ_in_signs_are_different_and_an_answer_is_kept(tmp_path):
    answered = {"prompt": "red", "response": "blue"}
    rows = [*({"prompt": text} for text in ("2+2", "2-2", "2*2")), {"prompt": "red"}, answered]
    report = prompts_stage(tmp_path, [*rows, {"prompt": "Red!"}])
    assert (report["repeated"], report["prompts"], report["answered"]) == (2, 4, 1)


def test_given_answers_stay_with_their_prompts(tmp_path):
    report = prompts_stage(tmp_path, [{"prompt": f"sun {i}", "response": f"moon {i}"} for i in range(7)])
    assert report["answered"] == 7
    decode = open_checkpoint(tmp_path / "target").tokenizer.decode
    read = [TokenRows.load(tmp_path / "out" / "prompts" / f"{name}.npz") for name in ("prompts", "answers")]
    prompts, answers = read[0].sequences(), read[1].rows()
    pairs = [(decode(prompts[index].tolist()), decode(ids.tolist())) for index, ids, _ in answers]
    assert all(f"sun {answer.strip()[-1]}" in prompt for prompt, answer in pairs)
    assert [int(answer.strip()[-1]) for _, answer in pairs] != list(range(7))  # in a random order


def test_prompts_that_differ_in_signs_are_held_out_in_any_order(tmp_path):
    config = write_run(tmp_path, prompts={"held_out_share": 0.1})
    lines = [json.dumps({"prompt": "2" + sign * i + "2"}) + "\n" for sign in "+-*/" for i in range(1, 12)]
    apart = []
    for name, order in (("one", lines), ("other", reversed(lines))):
        (tmp_path / "prompts.jsonl").write_text("".join(order))
        Pipeline(load_training_run(config), tmp_path / name, data=tmp_path).run_stage("prompts")
        rows = TokenRows.load(tmp_path / name / "prompts" / "held_out.npz")
        apart.append({tuple(ids) for ids in rows.sequences()})
    assert len(apart[0]) == 11
    assert apart[0] == apart[1]


def test_a_prompt_of_a_thousand_tokens_is_trained_on_by_default():
    """It was 256, and heads knew nothing of longer ones."""
    assert PromptsConfig().max_tokens == 2048


def test_rows_with_answers(tmp_path):
    tokenizer = open_checkpoint(write_target(tmp_path / "target")).tokenizer
    turns = [("system", "be kind"), ("user", "sun"), ("assistant", "moon"), ("user", "red")]
    messages = [{"role": role, "content": content} for role, content in turns]
    answered = [*messages, {"role": "assistant", "content": "blue"}]
    rows = [
        {"messages": answered},
        {"messages": messages},
        {"prompt": "red", "response": "blue"},
        {"turns": ["red"]},
        {"id": "a", "prompt": "red", "completion": "blue", "category": "colours"},
        {"id": "a", "messages": [{"role": "user", "content": "red"}], "answer": "blue"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows))
    read = read_rows(path)
    assert [row.answer for row in read] == ["blue", None, "blue", None, "blue", "blue"]
    assert read[0].messages == read[1].messages == tuple(messages)
    assert all(row.messages == user("red") for row in read[2:])
    assert read[0].place == read[1].place != read[2].place
    assert tokenizer.decode(encode_answer(tokenizer, read[0], 128), skip_special_tokens=False) == "blue</s>"
    whole = tokenizer.apply_chat_template(answered, add_generation_prompt=False)
    ((_, prompt),) = encode_prompts(tokenizer, read[:1], 128)
    joined = [*prompt, *encode_answer(tokenizer, read[0], 128)]
    assert tokenizer.decode(joined, skip_special_tokens=False) == whole


def test_a_given_answer_ends_where_the_target_would_end_it(tmp_path):
    """At a token that only the generation config names, as Gemma's <end_of_turn>; its template goes on."""
    write_target(tmp_path / "target", template=TEMPLATE.replace("'</s>'", "'</s>!'"))
    (tmp_path / "target" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<unk>", "chat_template": TEMPLATE.replace("'</s>'", "'</s>!'")})
    )
    config = write_run(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "red", "response": "blue"}\n')
    run = Pipeline(load_training_run(config), tmp_path / "out", data=tmp_path)
    run.run_stage("prompts")
    (answer,) = TokenRows.load(tmp_path / "out" / "prompts" / "answers.npz").sequences()
    assert run.tokenizer.decode(answer.tolist(), skip_special_tokens=False) == "blue</s>"


def test_a_given_answer_ends_where_only_the_generation_config_names_an_end(tmp_path):
    template = TEMPLATE.replace("</s>", "")
    write_target(tmp_path / "target", template=template)
    (tmp_path / "target" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = write_run(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "red", "response": "blue"}\n')
    run = Pipeline(load_training_run(config), tmp_path / "out", data=tmp_path)
    assert run.tokenizer.eos_token_ids == ()
    run.run_stage("prompts")
    (answer,) = TokenRows.load(tmp_path / "out" / "prompts" / "answers.npz").sequences()
    assert run.tokenizer.decode(answer.tolist(), skip_special_tokens=False) == "blue</s>"


def test_the_users_turn_starts_where_the_template_puts_it(tmp_path):
    tokenizer = open_checkpoint(write_target(tmp_path / "target")).tokenizer
    prefix = user_turn_prefix(tokenizer)
    assert tokenizer.decode(prefix, skip_special_tokens=False) == f"{SPECIAL[1]}u "
    ((_, ids),) = encode_prompts(tokenizer, [PromptRow(user("sun"))], 128)
    assert ids[: len(prefix)] == prefix


def test_arguments_of_the_template_are_honoured(tmp_path):
    template = TEMPLATE.replace("{% for", "{% if think %}{{ '<s>t</s>' }}{% endif %}{% for", 1)
    tokenizer = open_checkpoint(write_target(tmp_path / "target", template=template)).tokenizer
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "sun", "response": "moon"}
    lines = [row, {**row, "chat_template_kwargs": {"think": True}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain, thinking = read_rows(path)
    assert plain.key != thinking.key
    (_, one), (_, two) = encode_prompts(tokenizer, [plain, thinking], 128)
    assert tokenizer.decode(two, skip_special_tokens=False) == "<s>t</s>" + tokenizer.decode(
        one, skip_special_tokens=False
    )
    assert encode_answer(tokenizer, thinking, 128) == encode_answer(tokenizer, plain, 128)


def test_an_empty_system_turn_is_one(tmp_path):
    tokenizer = open_checkpoint(write_target(tmp_path / "target")).tokenizer
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "sun"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    ((_, ids),) = encode_prompts(tokenizer, read_rows(path), 128)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>s </s><s>u sun</s><s>a "


def test_what_is_far_too_long_is_never_encoded_whole(tmp_path, monkeypatch):
    tokenizer = open_checkpoint(write_target(tmp_path / "target")).tokenizer
    longest = 0
    encode, encode_all = tokenizer.encode, tokenizer.encode_all

    def counted(texts, of):
        nonlocal longest
        longest = max([longest, *map(len, texts)])
        return of(texts)

    monkeypatch.setattr(tokenizer, "encode", lambda t, **o: counted([t], lambda ts: encode(ts[0], **o)))
    monkeypatch.setattr(tokenizer, "encode_all", lambda t, **o: counted(t, lambda ts: encode_all(ts, **o)))
    rows = [PromptRow(user("sun " * 100_000)), PromptRow(user("sun"), "moon " * 100_000)]
    ((row, _),) = encode_prompts(tokenizer, rows, 128)
    assert len(encode_answer(tokenizer, row, 128)) > 128
    assert longest < 10_000
