"""Which decode program a dispatch runs, and that a request's tokens do not tell."""

import pytest
from jaxspec_kernels.process_logits import process_logits
from programs_when_run import compile_ahead
from tiny_engines import SIZES, tokens_of

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine.device.programs import Programs
from jaxspec.sampling import SamplingMode, mode

PLAIN = {"temperature": 1.0, "min_p": 0.02, "seed": 3}
TRUNCATED = {"temperature": 1.0, "top_k": 4, "top_p": 0.8, "seed": 3}


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def drafter(request):
    return request.param


@pytest.fixture(scope="module")
def engine(tiny_engines, drafter):
    """An engine with the programs that one on a GPU has: a search in them always runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mode, "can_branch", lambda: False)
        patch.setattr(Programs, "compile", compile_ahead)
        patch.setitem(process_logits._kernels, "numba", None)
        engine = jaxspec.load(
            tiny_engines.folders["target"],
            drafter={
                "kind": drafter,
                "source": str(tiny_engines.folders[drafter]),
                "num_speculative_tokens": 3,
            },
            progress=False,
            **SIZES,
        )
        engine.programs.wait_compiled()
        return engine


@pytest.fixture
def dispatched(engine, monkeypatch):
    """The modes of the decode programs run."""
    modes = []
    enqueue = engine.programs.enqueue

    def recorded(*args, size):
        if size.width:
            modes.append(size.mode)
        return enqueue(*args, size=size)

    monkeypatch.setattr(engine.programs, "enqueue", recorded)
    return modes


def together(engine, prompt, *ways):
    """The answers to one prompt, in one batch; the first request outlasts the others."""
    lengths = (40, 8, 4)
    params = [
        SamplingParams(max_new_tokens=length, ignore_eos=True, **way)
        for way, length in zip(ways, lengths, strict=False)
    ]
    done = dict(engine.run([engine.make_request(prompt, each) for each in params]))
    return [done[i].token_ids for i in range(len(ways))]


@pytest.mark.parametrize(
    ("ways", "first", "last"),
    [
        ([{}, {"top_k": 4}], SamplingMode.GREEDY, SamplingMode.GREEDY),
        ([PLAIN, {}], SamplingMode.TEMPERATURE, SamplingMode.TEMPERATURE),
        ([TRUNCATED, PLAIN, {}], SamplingMode.TRUNCATED, SamplingMode.TRUNCATED),
        ([PLAIN, {}, TRUNCATED], SamplingMode.TRUNCATED, SamplingMode.TEMPERATURE),
        ([{}, PLAIN, TRUNCATED], SamplingMode.TRUNCATED, SamplingMode.GREEDY),
    ],
)
def test_a_dispatch_runs_the_least_program_that_serves_every_slot(
    engine, dispatched, prompts, ways, first, last
):
    together(engine, prompts[1], *ways)
    assert (dispatched[0], dispatched[-1]) == (first, last)
    assert dispatched == sorted(dispatched, reverse=True)  # lesser ones as neighbours end


def test_a_request_does_not_tell_which_program_its_neighbours_ask_for(engine, dispatched, prompts):
    for prompt in prompts[:4]:
        alone = [together(engine, prompt, way)[0] for way in ({}, PLAIN, TRUNCATED)]
        assert len({tuple(tokens) for tokens in alone}) == 3
        for first, *others in [({}, PLAIN), ({}, TRUNCATED), (PLAIN, TRUNCATED), (PLAIN, {}, TRUNCATED)]:
            dispatched.clear()
            expected = alone[[{}, PLAIN].index(first)]
            assert together(engine, prompt, first, *others)[0] == expected
            assert max(dispatched) == (
                SamplingMode.TRUNCATED if TRUNCATED in others else SamplingMode.TEMPERATURE
            )


@pytest.mark.parametrize("least", SamplingMode)
def test_every_program_that_serves_gives_the_same(engine, prompts, monkeypatch, least):
    for way in ({}, PLAIN):
        expected = tokens_of(engine.generate(prompts, max_new_tokens=30, **way))
        with monkeypatch.context() as patch:
            patch.setattr(
                engine.core.preparation, "modes", tuple(mode for mode in SamplingMode if mode >= least)
            )
            assert tokens_of(engine.generate(prompts, max_new_tokens=30, **way)) == expected


@pytest.mark.cpu
def test_a_cpus_engine_has_one_program_for_all_that_sample_and_gives_the_same(
    tiny_engines, drafter, engine, prompts
):
    on_cpu = tiny_engines.load(drafter)
    assert on_cpu.core.preparation.modes == (SamplingMode.GREEDY, SamplingMode.TRUNCATED)
    assert engine.core.preparation.modes == tuple(SamplingMode)
    for way in ({}, PLAIN, TRUNCATED):
        expected = tokens_of(on_cpu.generate(prompts, max_new_tokens=30, **way))
        assert tokens_of(engine.generate(prompts, max_new_tokens=30, **way)) == expected


@pytest.mark.cpu
def test_only_the_greatest_program_searches(engine):
    greedy, plain, truncated = (
        engine.programs.compiled_decode(mode=mode).as_text().count(" while(") for mode in SamplingMode
    )
    assert greedy == plain == truncated - 2  # for top-k and for top-p


def test_an_engine_for_greedy_decoding_refuses_every_other(tiny_engines, prompts):
    engine = tiny_engines.load("ngram", sampling_modes=("greedy",))
    for way in (PLAIN, TRUNCATED):
        with pytest.raises(ValueError, match="this engine was loaded for greedy decoding only"):
            engine.generate(prompts[0], **way)


def test_an_engine_without_searches_refuses_what_needs_them(tiny_engines, prompts):
    engine = tiny_engines.load("ngram", sampling_modes=(SamplingMode.TEMPERATURE,))
    engine.generate(prompts[0], **PLAIN)
    with pytest.raises(ValueError, match="top_k, top_p: this engine was loaded for sampling without them"):
        engine.generate(prompts[0], **TRUNCATED)
