"""`scripts/example.py` on the tiny model."""

import example


def test_the_example_runs_and_fits_on_a_screen(tiny_config, capsys):
    example.run(str(tiny_config))
    assert "same without drafts: True" in capsys.readouterr().out
    with open(example.__file__, encoding="utf-8") as source:
        assert len(source.readlines()) <= 40
