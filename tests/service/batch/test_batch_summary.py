from jaxspec import AcceptanceStats
from jaxspec.service.batch import Summary


def summary(**changes):
    stats = AcceptanceStats()
    for drafted, accepted in [(2, 2), (2, 0), (2, 1), (2, 2), (0, 0)]:
        stats.add_step(drafted, accepted)
    values = {
        "rows": 7,
        "answered": 3,
        "skipped": 2,
        "failures": ("in.jsonl line 2: bad",),
        "seed": 5,
        "prompt_tokens": 12,
        "tokens": 30,
        "load_seconds": 7.0,
        "seconds": 1.5,
        "stats": stats,
    }
    return Summary(**{**values, **changes})


def test_a_row_without_an_answer_has_failed():
    """Also one that nobody reported."""
    assert summary().failed == 2
    assert summary(answered=5).failed == 0


def test_speed_leaves_loading_out():
    assert summary().tokens_per_second == 20.0
    assert summary(tokens=0, seconds=0.0).tokens_per_second == 0.0


def test_the_dict_holds_counts_speed_and_acceptance():
    values = summary().to_dict()
    assert values["tokens_per_second"] == 20.0
    assert [values[name] for name in ("rows", "answered", "failed", "skipped")] == [7, 3, 2, 2]
    assert values["failures"] == ["in.jsonl line 2: bad"]
    assert values["seed"] == 5
    assert values["acceptance_length"] == 2.25
    assert values["acceptance_per_position"] == [0.75, 0.5]
    assert values["conditional_acceptance"] == [0.75, 2 / 3]


def test_the_table():
    assert summary().table().splitlines() == [
        "rows                    7: 3 answered, 2 failed, 2 answered before",
        "seed                    5",
        "tokens                  30 in 1.5 s, after 7.0 s of loading",
        "tokens/s                20.0",
        "target passes           5 (4 of them with drafts to verify)",
        "mean acceptance length  2.25",
        "acceptance at token 0   0.750   (0.750 of those reached)",
        "acceptance at token 1   0.500   (0.667 of those reached)",
    ]
