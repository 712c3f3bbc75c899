"""What an answer says of its tokens: where each is from, and how it looks in a notebook and in a table."""

import json
import pickle
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import tokenizers
from tokenizers import models

import jaxspec
from jaxspec import AcceptanceStats
from jaxspec.engine import Generation
from jaxspec.files import Tokenizer

WORDS = ["<b>&\"'", "plain", "\n"]


def answer(verified, token_ids, **fields):
    stats = AcceptanceStats()
    for step in verified:
        stats.add_step(*step)
    return Generation("", token_ids, "length", [1], stats, verified=verified, **fields)


@pytest.fixture
def shown():
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    return answer([(2, 1), (2, 2)], [0, 1, 2, 0, 1, 1], tokenizer=Tokenizer(backend), error="<i>")


class Text(HTMLParser):
    """The text of a page, and the tags that it has."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags, self.open = "", set(), []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_every_token_has_a_source_and_a_step():
    whole = answer([(3, 3), (3, 1), (3, 0), (0, 0)], list(range(9)))
    assert whole.token_sources == [
        *("first", "accepted", "accepted", "accepted", "bonus", "accepted", "recovered", "recovered", "plain")
    ]
    assert whole.token_steps == [0, 1, 1, 1, 1, 2, 2, 3, 4]
    # A stop token may end an answer within a block.
    assert answer([(3, 3)], [1, 2, 3]).token_sources == ["first", "accepted", "accepted"]
    assert answer([], []).token_sources == answer([], []).token_steps == []


@pytest.mark.parametrize("name", ["near", "ngram", "none"])
def test_the_sources_of_an_engines_answers(tiny_engines, prompts, name):
    """Counted as statistics count them; greedy answers are the target's tokens either way."""
    engine = tiny_engines.load(name, 3)
    for each in engine.generate(prompts[:3], max_new_tokens=25):
        assert [sum(column) for column in zip(*each.verified, strict=True)] == [
            each.stats.drafted,
            each.stats.accepted,
        ]
        assert len(each.verified) == each.stats.steps
        sources = each.token_sources
        assert len(sources) == len(each.token_steps) == 25
        own = sum(source in ("recovered", "bonus", "plain") for source in sources)
        # The last block may have been cut.
        cut = sum(accepted + 1 for _, accepted in each.verified) + 1 - 25
        assert own == each.stats.steps - (cut > 0)
        assert sources.count("accepted") == each.stats.accepted - max(cut - 1, 0)
        assert name == "ngram" or ("accepted" in sources) == (name == "near")


def test_an_answer_that_was_put_back_keeps_its_steps(tiny_engines, prompts):
    """Its tokens so far are read again and come out of no step a second time."""
    alone = tiny_engines.load("near", 3).generate(prompts[:3], max_new_tokens=40)
    crowded = tiny_engines.load("near", 3, num_pages=12)
    before = crowded.core.scheduler.num_preempted
    together = crowded.generate(prompts[:3], max_new_tokens=40)
    assert crowded.core.scheduler.num_preempted > before
    for one, two in zip(alone, together, strict=True):
        assert one.token_ids == two.token_ids
        assert len(two.token_sources) == len(two.token_ids)
        assert two.token_sources[0] == "first"
        assert "first" not in two.token_sources[1:]


def test_texts_of_tokens_are_the_text(tiny_config):
    with jaxspec.load(tiny_config, progress=False) as engine:
        generated = engine.generate("w6 w7", max_new_tokens=8, ignore_eos=True)
        assert len(generated.token_texts) == 8
        assert "".join(generated.token_texts).split() == engine.tokenizer.decode(generated.token_ids).split()
    assert answer([], [7]).token_texts == ["7"]


def test_it_converts_to_json_and_back(shown):
    read = json.loads(json.dumps(shown.to_dict()))
    assert read["verified"] == [[2, 1], [2, 2]]
    assert read["stats"]["accepted"] == 3
    fields = set(Generation.__dataclass_fields__) - {"tokenizer"}
    assert set(read) == fields


def test_it_converts_to_pandas(shown):
    frame = shown.to_pandas()
    assert list(frame.columns) == ["token_id", "text", "source", "step"]
    assert list(frame["step"]) == [0, 1, 1, 2, 2, 2]
    rates = shown.stats.to_pandas()
    assert list(rates["accepted_at"]) == [2, 1]
    assert list(rates["conditional_acceptance"]) == [1.0, 0.5]


def test_without_pandas_the_extra_is_named(shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for convert in (shown.to_pandas, shown.stats.to_pandas):
        with pytest.raises(ModuleNotFoundError, match=r"needs pandas.*pip install .*\[notebooks\]\"$"):
            convert()


def test_a_notebook_shows_it_escaped(shown):
    page = Text(shown._repr_html_())
    assert page.tags == {"div", "span", "br"}
    assert WORDS[0] in page.text
    assert "6 tokens in 2 steps, 2.50 a step with drafts · length · <i>" in page.text
    assert "accepted 3" in page.text
    assert "recovered 1" in page.text
    assert Text(answer([], [])._repr_html_()).text.startswith("0 tokens in 0 steps")


def test_a_notebook_shows_statistics(shown):
    page = Text(shown.stats._repr_html_())
    assert "2.50 tokens a step · 2 steps, 2 with drafts · 3 of 4 drafts accepted" in page.text
    assert "01.001.00" in page.text
    assert "10.500.50" in page.text
    assert Text(AcceptanceStats()._repr_html_()).tags == {"div", "b"}


def test_another_process_gets_it_without_the_tokenizer(shown):
    """Replicas send their answers through a socket."""
    assert shown.tokenizer is not None
    sent = pickle.loads(pickle.dumps(shown))
    assert sent == shown
    assert sent.tokenizer is None
    assert sent.token_texts == [str(token) for token in shown.token_ids]


def test_equal_answers_are_equal_whatever_reads_them(shown):
    assert replace(shown, tokenizer=None) == shown
    assert "tokenizer" not in repr(shown)
