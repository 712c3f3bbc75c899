"""The training and held-out prompts of `scripts/broad_prompts.py`, made of tiny sources."""

import json
import random
import tomllib
from pathlib import Path

import broad_prompts
import pytest
from prompt_readers import READERS, Asked, Code, Dialogue, Document, Exchange, sentences, words

from jaxspec.lab.training.held_out import WORDS_IN_A_ROW, normalise

TEMPLATES = tomllib.loads((broad_prompts.DATA / "prompt_templates.toml").read_text("utf-8"))
SOURCES = tomllib.loads((broad_prompts.DATA / "prompt_sources.toml").read_text("utf-8"))


def prose(seed: int, paragraphs: int = 40) -> str:
    """Made-up paragraphs of short sentences."""
    draws = random.Random(seed)
    names = [f"word{number}" for number in range(400)]
    lines = [
        " ".join(
            f"The {' '.join(draws.choices(names, k=draws.randint(5, 12)))} of the sea was old."
            for _ in range(5)
        )
        for _ in range(paragraphs)
    ]
    return "\n\n".join(lines)


def source(name: str, rows: dict[str, int], reader: str = "markdown", **more) -> dict:
    return {"origin": name, "licence": "MIT", "reader": reader, "files": [f"{name}/*"], "rows": rows, **more}


@pytest.fixture
def folder(tmp_path):
    """Three sources to train on, of which one repeats a paragraph of a fourth, which is held out."""
    texts = {"trained": prose(1), "leaky": prose(2), "apart": prose(3)}
    texts["leaky"] += "\n\n" + texts["apart"].split("\n\n")[0]
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.md").write_text(text)
    said = [{"speaker": ("USER", "SYSTEM")[at % 2], "text": f"Line {at} of the talk."} for at in range(12)]
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "a.json").write_text(json.dumps([{"turns": said[start:]} for start in range(6)]))
    return tmp_path


FIELDS = {"user": "USER", "text": "text", "speaker": "speaker", "turns": "turns"}
TINY = {
    "trained": source("trained", {"summaries": 30, "passages": 20, "rewriting": 20, "turns": 10}),
    "leaky": source("leaky", {"extraction": 40}),
    "talks": source("talks", {"turns": 15}, "dialogues", options=FIELDS),
    "apart": source("apart", {"summaries": 40}, held_out=True),
}


def build(
    folder: Path, output: Path, seed: int = 0, sources: dict = TINY, apart: tuple[str, ...] = ()
) -> str:
    return broad_prompts.build(
        sources,
        folder,
        TEMPLATES,
        output,
        apart=list(apart),
        tokens=lambda messages: sum(3 * len(message["content"].split()) for message in messages),
        seed=seed,
    )


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs(row: dict) -> set[tuple[str, ...]]:
    """All 13 words in a row in what was said."""
    found = set()
    for text in broad_prompts.texts_of(row):
        said = normalise(text)
        found |= {said[at : at + WORDS_IN_A_ROW] for at in range(len(said) - WORDS_IN_A_ROW + 1)}
    return found


def test_training_shares_no_source_and_no_13_words_with_held_out(folder):
    report = build(folder, folder / "out")
    trained, held_out = (
        rows(folder / "out" / "train.jsonl"),
        rows(folder / "out" / "heldout" / "summaries.jsonl"),
    )
    assert len(trained) > 60
    assert len(held_out) > 10
    assert not {row["source"] for row in trained} & {row["source"] for row in held_out}
    apart = set().union(*map(runs, held_out))
    assert not any(runs(row) & apart for row in trained)
    assert "13 words in a row" in report.split("rows held out")[0]


def test_files_apart_are_in_neither(folder):
    told = prose(1).split("\n\n")[0], prose(3).split("\n\n")[3]
    build(folder, folder / "out", apart=told)
    apart = set().union(*(runs({"prompt": text}) for text in told))
    made = rows(folder / "out" / "train.jsonl") + rows(folder / "out" / "heldout" / "summaries.jsonl")
    assert made
    assert not any(runs(row) & apart for row in made)


def test_no_prompt_is_over_the_limit(folder, monkeypatch):
    monkeypatch.setattr(broad_prompts, "LIMIT", 600)
    report = build(folder, folder / "out")
    made = rows(folder / "out" / "train.jsonl")
    assert "more than 600 tokens" in report
    assert max(3 * sum(len(text.split()) for text in broad_prompts.texts_of(row)) for row in made) <= 600


def test_several_turns_end_with_the_user(folder):
    build(folder, folder / "out")
    talks = [row["messages"] for row in rows(folder / "out" / "train.jsonl") if row["task"] == "turns"]
    assert {len(talk) for talk in talks} > {3, 5}
    for talk in talks:
        assert [message["role"] for message in talk] == ["user", "assistant"] * (len(talk) // 2) + ["user"]


def test_a_dialogue_begins_with_what_the_user_said(folder):
    build(folder, folder / "out")
    talks = [row["messages"] for row in rows(folder / "out" / "train.jsonl") if row["source"] == "talks"]
    even = [f"Line {at} of the talk." for at in range(0, 12, 2)]
    assert talks
    assert all(message["content"] in even for talk in talks for message in talk[::2])


def test_same_seed_same_rows_another_seed_others(folder):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build(folder, folder / name, seed)
    a, b, c = ((folder / name / "train.jsonl").read_bytes() for name in "abc")
    assert a == b
    assert sorted(a.splitlines()) != sorted(c.splitlines())


def test_a_source_cannot_be_trained_on_and_held_out(folder):
    both = {**TINY, "again": source("trained", {"summaries": 2}, held_out=True)}
    with pytest.raises(ValueError, match="both trained on and held out: trained"):
        build(folder, folder / "out", sources=both)


def test_passages_are_cut_at_the_ends_of_sentences():
    document = Document(tuple(prose(4).split("\n\n")))
    whole = document.sentences
    cut = list(document.passages(random.Random(0), 30, 90))
    assert len(cut) > 10
    for passage in cut:
        assert set(passage.sentences) <= set(whole)
        assert 30 <= words(passage.text) <= 90


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Grey left. He ran!", ["Dr. Grey left.", "He ran!"]),
        ("“Is it?” she said. “No.” Then 3 came.", ["“Is it?” she said.", "“No.”", "Then 3 came."]),
        ("It is 3.5 m, i.e. long. Yes.", ["It is 3.5 m, i.e. long.", "Yes."]),
        ("他走了。我没有走。", ["他走了。", "我没有走。"]),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


def test_markup_and_what_is_no_prose_are_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "---\ntitle: A\n---\n# Head\n\nThe [old](http://x) *house* is by `the` sea, not for sale.\n\n"
        "- A list of things that are to be left out of the text.\n\n"
        "```\nThe code of the house is not prose, but ends like it.\n```\n\n"
        "This paragraph is not whole and ends with a colon, so it is to be left out:\n"
    )
    (document,) = READERS["markdown"]([page])
    assert document.paragraphs == ("The old house is by the sea, not for sale.",)


def test_foreign_paragraphs_that_were_left_in_english_are_dropped(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<p class="x">Das alte Haus am Meer wurde im letzten Jahr verkauft.</p>'
        "<p>The old house by the sea was sold to her.</p>"
    )
    (document,) = READERS["markup"]([page], language="de")
    assert document.paragraphs == ("Das alte Haus am Meer wurde im letzten Jahr verkauft.",)


@pytest.mark.parametrize("part", ["train", "held_out"])
@pytest.mark.parametrize("task", list(broad_prompts.MAKERS))
def test_every_template_can_be_filled(part, task):
    text = "The Old House of the {sea} was sold to Mary Grey in May. It is by the sea."
    every = [
        Document((text, text)),
        Asked(text, (("Who?", "Mary"), ("When?", "May"))),
        Dialogue(tuple(("User", text) for _ in range(9))),
        broad_prompts.Text(text, "de"),
        broad_prompts.Text(text, "en", "a_label"),
        Code("Go", text),
        Exchange(text, text),
        Exchange(text, text, code=True),
    ]
    draws = random.Random(0)
    made = [broad_prompts.MAKERS[task](draws, item, every, TEMPLATES[part]) for item in every * 60]
    said = [str(each) for each in made if each]
    assert said
    assert all("{sea}" in each for each in said if "Old House" in each)
    assert not any(
        slot in each for each in said for slot in ("{text}", "{ask}", "{label", "{name}", "{question}")
    )


def test_wordings_for_training_and_for_held_out_prompts_differ():
    def wordings(value) -> set[str]:
        if isinstance(value, dict):
            return set().union(*map(wordings, value.values()))
        return {text for text in value if len(text.split()) > 2} - set(TEMPLATES["train"]["layouts"])

    assert not wordings(TEMPLATES["train"]) & wordings(TEMPLATES["held_out"])


def test_every_source_names_a_reader_tasks_and_a_free_licence():
    for name, each in SOURCES.items():
        assert each["reader"] in {*READERS, "own"}, name
        assert set(each["rows"]) <= set(broad_prompts.MAKERS), name
        assert each["licence"], name
        assert not {"NC", "ND"} & set(each["licence"].replace("-", " ").split()), name
