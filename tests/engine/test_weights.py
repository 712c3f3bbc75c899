"""An engine with new weights is one that was loaded with them, while it runs and with nothing compiled."""

import json
import threading
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from programs_when_run import share_programs
from safetensors.numpy import load_file, save_file
from several_devices import OWN, run_apart
from tiny_engines import SIZES, assert_idle, assert_scored, limit_pages, tokens_of
from tiny_gguf import write_packed_gguf
from tiny_models import changed, on_device, write_eagle3, write_folder, write_target
from tiny_mtp import LATENT, write_with_mtp

import jaxspec
from jaxspec import CheckpointError, EngineError
from jaxspec.engine.rounds.weights import plan_weight_update
from jaxspec.lab.integrations.tunix_names import tunix_names
from jaxspec.weights import packed_weights
from jaxspec.weights.loading import export_tensors

ASK = {"max_new_tokens": 20}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, and a head whose output rows are those of its target."""
    root = tmp_path_factory.mktemp("weights")
    target = write_target(root / "target")
    head = write_eagle3(root / "head", target)
    tensors = load_file(head / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    return root


def load(folder, head, of=None, **options):
    """An engine, with the programs of one that was loaded before if that one is given."""
    drafter = {"kind": "eagle3", "source": str(head), "num_speculative_tokens": 3}
    engine = jaxspec.load(folder, drafter=drafter, progress=False, **{**SIZES, **options})
    if of is not None:
        share_programs(engine.programs, of.programs)
    return engine


@pytest.fixture(scope="module")
def engine(files):
    """One that every test updates before it asks."""
    with load(files / "target", files / "head") as engine:
        yield engine
        assert_idle(engine)


def config_of(folder):
    return json.loads((folder / "config.json").read_text("utf-8"))


def answers(engine, prompts):
    """Tokens, acceptance and log-probabilities, greedy and sampled."""
    engine.forget_prefixes()
    ways = ({}, {"temperature": 1.0, "seed": 3})
    given = [answer for way in ways for answer in engine.generate(prompts, **ASK, **way, logprobs=0)]
    assert_scored(engine, given)
    return [(answer.token_ids, answer.stats) for answer in given]


def test_after_twenty_updates_it_is_a_fresh_engine(engine, files, prompts, tmp_path, compiled):
    head = load_file(files / "head" / "model.safetensors")
    rng = np.random.default_rng(0)
    sizes, version = [], engine.weights_version
    for i in range(20):
        target = changed(files / "target", i)
        head["fc.weight"] = rng.permutation(head["fc.weight"])
        given = on_device(target), on_device(head)
        if i == 2:
            before = len(compiled)
        assert engine.update_weights(*given) == version + i + 1
        answer = engine.generate(prompts[1], max_new_tokens=4)
        assert answer.weights_version == version + i + 1
        assert engine.score(prompts, top=2, hidden=1).weights_version == version + i + 1
        assert engine.sample([prompts[1]] * 2, max_new_tokens=4).weights_version == version + i + 1
        del given, answer
        assert engine.wait_idle(timeout=60)
        sizes.append(sum(array.nbytes for array in jax.live_arrays()))
    assert compiled[before:] == []
    assert max(sizes[10:]) <= max(sizes[2:10])
    fresh = write_folder(tmp_path / "target", config_of(files / "target"), target)
    fresh_head = write_folder(tmp_path / "head", config_of(files / "head"), head)
    answered = answers(engine, prompts)
    with load(fresh, fresh_head) as loaded:
        assert answers(loaded, prompts) == answered
        found, expected = (each.score(prompts, top=2, hidden=1) for each in (engine, loaded))
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5)
        np.testing.assert_allclose(found.hidden[1], expected.hidden[1], atol=1e-5)
        assert loaded.generate(prompts[1]).weights_version == 0


def test_a_copy_of_the_targets_rows_follows_the_target(engine, files, prompts, tmp_path):
    target = changed(files / "target", 30)
    head = load_file(files / "head" / "model.safetensors")
    engine.update_weights(on_device(target), on_device(head))
    target = changed(files / "target", 31)
    own = nnx.to_pure_dict(nnx.state(engine.drafter))
    engine.update_weights(on_device(target))
    engine.update_weights(drafter=own)  # with a copy that has followed since
    fresh = write_folder(tmp_path / "target", config_of(files / "target"), target)
    expected = answers(engine, prompts)
    with load(fresh, files / "head", engine) as loaded:
        assert answers(loaded, prompts) == expected


def test_requests_run_while_weights_change(engine, files, prompts):
    """Eight streams at a time and a hundred updates; every answer is made of one version."""
    weights = [on_device(changed(files / "target", seed)) for seed in (0, 1)]
    prompts = [*prompts, prompts[1] + prompts[2]]
    expected = []
    for each in weights:
        first = engine.update_weights(each)
        expected.append(tokens_of(engine.generate(prompts, **ASK)))
    assert expected[0] != expected[1]
    ended, seen, is_over = [], [], threading.Event()

    def ask(i):
        while not is_over.is_set():
            *_, last = engine.stream(prompts[i], **ASK)
            ended.append((i, last.generation))

    streams = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for stream in streams:
        stream.start()
    for i in range(100):
        in_flight = "abort" if i % 3 == 2 else "finish"
        seen.append(engine.update_weights(weights[i % 2], in_flight=in_flight))
    is_over.set()
    for stream in streams:
        stream.join()
    assert seen == list(range(first + 1, first + 101))
    for i, answer in ended:
        if answer.weights_version is None:
            assert answer.token_ids == []
            continue
        whole = expected[(answer.weights_version - first - 1) % 2][i]
        if answer.finish_reason == "aborted":
            assert answer.error == "the weights were replaced"
            assert answer.token_ids == whole[: len(answer.token_ids)]
        else:
            assert answer.token_ids == whole
    assert {answer.finish_reason for _, answer in ended} >= {"length"}
    assert_idle(engine)


def test_updates_of_several_threads_queue(engine, files, prompts, tmp_path):
    """Of the target and the head at once, also by the head's own arrays, some of which follow the target."""
    tensors = changed(files / "target", 40)
    target, head = on_device(tensors), on_device(load_file(files / "head" / "model.safetensors"))
    first, problems, versions = engine.weights_version, [], []

    def update(make):
        for _ in range(30):
            try:
                versions.append(engine.update_weights(**make()))
            except Exception as error:
                problems.append(error)

    of_target, of_head = (lambda: {"weights": target}), (lambda: {"drafter": head})
    for makers in (
        [of_target, of_target, of_head, of_head],
        [of_target, lambda: {"drafter": nnx.to_pure_dict(nnx.state(engine.drafter))}],
    ):
        threads = [threading.Thread(target=update, args=(make,)) for make in makers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    assert sorted(versions) == list(range(first + 1, first + 181))
    fresh = write_folder(tmp_path / "target", config_of(files / "target"), tensors)
    expected = answers(engine, prompts)
    with load(fresh, files / "head", engine) as loaded:
        assert answers(loaded, prompts) == expected


def test_requests_in_flight_finish_or_are_aborted(engine, files, prompts):
    for in_flight, reason in (("finish", "length"), ("abort", "aborted")):
        weights = changed(files / "target", 2)
        update = plan_weight_update(
            engine.target, engine.drafter, weights, None, in_flight=in_flight, names=None
        )
        request, ended = engine.make_request(prompts[1], jaxspec.SamplingParams(**ASK)), SimpleQueue()
        request.listener = ended.put
        begin_and_update(engine, request, update)
        version, generation = update.done.result(), ended.get().generation
        assert generation.finish_reason == reason
        assert generation.weights_version == version - 1


@pytest.mark.parametrize(("in_flight", "reason"), [("finish", "length"), ("abort", "aborted")])
def test_requests_that_were_put_back_are_of_the_old_weights(
    engine, files, prompts, monkeypatch, in_flight, reason
):
    """They wait in the queue when the update comes, and are as the others that have begun."""
    engine.update_weights(changed(files / "target", 2))
    asked = prompts[1:3]
    expected = tokens_of(engine.generate(asked, ignore_eos=True, **ASK))
    limit_pages(engine, 10, monkeypatch)  # one is admitted beside the other, but cannot end beside it
    update = plan_weight_update(
        engine.target, engine.drafter, changed(files / "target", 3), None, in_flight=in_flight, names=None
    )
    requests = [engine.make_request(each, jaxspec.SamplingParams(ignore_eos=True, **ASK)) for each in asked]
    ended = SimpleQueue()

    def update_when_one_is_back(core):
        core.add(requests)
        before = core.scheduler.num_preempted
        while core.scheduler.num_preempted == before and core.scheduler:
            core.step()
        core.update(update)

    for request in requests:
        request.listener = lambda piece: ended.put(piece.generation)
    engine._thread.put(update_when_one_is_back)
    version, answers = update.done.result(60), [ended.get(timeout=60) for _ in requests]
    assert {answer.weights_version for answer in answers} == {version - 1}
    assert [answer.finish_reason for answer in answers] == [reason] * 2
    for request, tokens in zip(requests, expected, strict=True):
        assert request.token_ids == tokens[: len(request.token_ids)]
    assert_idle(engine)


def test_results_in_flight_do_not_count_for_new_weights(files, prompts):
    drafter = {"kind": "ngram", "num_speculative_tokens": "auto"}
    with jaxspec.load(files / "target", drafter=drafter, progress=False, **SIZES) as auto:
        update = plan_weight_update(
            auto.target, auto.drafter, changed(files / "target", 3), None, in_flight="abort", names=None
        )
        request = auto.make_request(prompts[1], jaxspec.SamplingParams(ignore_eos=True, **ASK))

        def update_while_it_decodes(core):
            core.add([request])
            while not any(dispatch.decodes for dispatch, *_ in core._in_flight):
                core.step()
            core.update(update)

        auto._thread.put(update_while_it_decodes)
        update.done.result(60)
        assert auto.wait_idle(60)
        assert request.finish_reason == "aborted"
        assert not auto.core.adaptive_k.choice.counts.any()


def begin_and_update(engine, request, update):
    """In one command, so that the request has begun, and has not ended, when the update comes."""
    engine._thread.put(lambda core: (core.add([request]), core.step(), core.update(update)))


def test_those_that_have_not_begun_wait_for_it(engine, files, prompts):
    engine.update_weights(changed(files / "target", 2))
    weights = changed(files / "target", 3)
    update = plan_weight_update(engine.target, engine.drafter, weights, None, in_flight="finish", names=None)
    first, second = (engine.make_request(prompt, jaxspec.SamplingParams(**ASK)) for prompt in prompts[:2])
    first_ended, second_ended = SimpleQueue(), SimpleQueue()
    first.listener, second.listener = first_ended.put, second_ended.put
    begin_and_update(engine, first, update)
    engine._thread.put(lambda core: core.add([second]))
    version = update.done.result()
    versions = [ended.get().generation.weights_version for ended in (first_ended, second_ended)]
    assert versions == [version - 1, version]


def test_a_parameter_takes_the_place_of_the_old_one(engine, files):
    engine.update_weights(on_device(changed(files / "target", 2)))
    old = jax.tree.leaves(engine.weights)
    places = [leaf.unsafe_buffer_pointer() for leaf in old]
    engine.update_weights(on_device(changed(files / "target", 3)))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.weights)] == places
    assert all(leaf.is_deleted() for leaf in old)


def test_the_engines_own_arrays_in_other_places_must_be_copies(engine, files, prompts):
    engine.update_weights(changed(files / "target", 4))
    before = answers(engine, prompts)
    tree = nnx.to_pure_dict(engine.weights)
    tree["layers"][0], tree["layers"][1] = tree["layers"][1], tree["layers"][0]
    with pytest.raises(CheckpointError, match="is the engine's own of"):
        engine.update_weights(tree)
    assert answers(engine, prompts) == before
    engine.update_weights(jax.tree.map(jnp.copy, tree))
    assert answers(engine, prompts) != before


def test_what_depends_on_weights_is_forgotten(engine, files, prompts):
    prompt = prompts[2]
    with load(files / "target", files / "head", engine) as fixed:
        fixed.generate(prompt, **ASK)
        before = jaxspec.inspect_steps(fixed, prompt, **ASK)
        head = load_file(files / "head" / "model.safetensors")
        fixed.update_weights(changed(files / "target", 3), head)
        answer = fixed.generate(prompt, **ASK)
        inspected = jaxspec.inspect_steps(fixed, prompt, **ASK).generation
        assert before.generation.token_ids != answer.token_ids
        assert (answer.cached_tokens, answer.weights_version) == (0, 1)
        assert (inspected.token_ids, inspected.weights_version) == (answer.token_ids, 1)
    drafter = {"kind": "ngram", "num_speculative_tokens": "auto"}
    with jaxspec.load(files / "target", drafter=drafter, progress=False, **SIZES) as auto:
        auto.core.adaptive_k.choice.counts += 5
        auto.update_weights(changed(files / "target", 3))
        assert not auto.core.adaptive_k.choice.counts.any()


WRONG = {
    "missing": (lambda w: w.pop("model.norm.weight"), r"'model\.norm\.weight' is missing"),
    "spare": (lambda w: w.update(other=w["lm_head.weight"]), "spare tensor 'other'"),
    "shape": (
        lambda w: w.update({"lm_head.weight": w["lm_head.weight"][1:]}),
        r"'lm_head\.weight' has shape",
    ),
    "nan": (lambda w: w.update({"lm_head.weight": w["lm_head.weight"] * np.nan}), "holds NaN"),
    "dtype": (lambda w: w.update({"lm_head.weight": w["lm_head.weight"].astype(int)}), "is int"),
    "no array": (lambda w: w.update({"lm_head.weight": "text"}), "is not an array but str"),
    "empty": (lambda w: w.clear(), "expected a tree of arrays"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("convert", [dict, on_device])
def test_what_does_not_fit_is_one_line_and_changes_nothing(engine, files, prompts, name, convert):
    engine.update_weights(changed(files / "target", 4))
    version, expected = engine.weights_version, tokens_of(engine.generate(prompts, **ASK))
    break_it, message = WRONG[name]
    wrong = convert(changed(files / "target", 5))
    break_it(wrong)
    with pytest.raises(CheckpointError, match=message) as error:
        engine.update_weights(wrong)
    assert "\n" not in str(error.value)
    engine.forget_prefixes()
    assert tokens_of(engine.generate(prompts, **ASK)) == expected
    assert engine.weights_version == version


def test_other_arguments_that_do_not_fit(engine, files):
    weights = on_device(changed(files / "target", 6))
    for arguments, message in (
        ({"weights": weights, "in_flight": "wait"}, "in_flight must be"),
        ({}, "there are no weights"),
        ({"weights": {"layers.0.other": weights["lm_head.weight"]}}, "missing"),
        ({"drafter": weights}, "missing"),
        ({"weights": weights, "names": lambda name: "one"}, "'one' is given twice"),
        ({"weights": weights, "names": lambda name: (name, (0, 0))}, "has . axes"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(**arguments)
    version = engine.weights_version
    gone = on_device(changed(files / "target", 6))
    stream = engine.stream([1, 2, 3], max_new_tokens=80)
    next(stream)
    gone["model.norm.weight"].delete()
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has been donated or deleted"):
        engine.update_weights(gone)
    assert list(stream)[-1].generation.finish_reason == "length"
    assert engine.weights_version == version
    with load(files / "target", files / "head") as closed:
        pass
    with pytest.raises(EngineError, match="closed"):
        closed.update_weights(weights)
    with pytest.raises(EngineError, match="closed"):
        _ = closed.weights


def test_the_engines_own_tree_loads_and_updates(engine, files, prompts, tmp_path):
    engine.update_weights(changed(files / "target", 7))
    expected = answers(engine, prompts)
    config = config_of(files / "target")
    # A flax state, also in part the engine's own arrays, and as orbax restores it.
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", engine.weights)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "saved")
    head = files / "head"
    for tree in (engine.weights, restored, engine.target):
        with load(config, head, engine, weights=tree) as loaded:
            assert answers(loaded, prompts) == expected
            assert loaded.tokenizer is None
    engine.update_weights(changed(files / "target", 8), nnx.state(engine.drafter))
    engine.update_weights(restored)
    assert answers(engine, prompts) == expected
    own = engine.weights
    own["norm"]["scale"].set_value(2 * own["norm"]["scale"][...])
    assert answers(engine, prompts) == expected
    engine.update_weights(own)
    assert answers(engine, prompts) != expected
    for tree, message in (
        ({"norm": {"scale": own["norm"]["scale"][...]}}, "is missing"),
        (nnx.to_pure_dict(own) | {"more": np.zeros(3)}, "spare 'more'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            engine.update_weights(tree)


def test_another_librarys_tree(engine, files, prompts):
    """That of Tunix's Llama, whose projections have an axis of heads."""
    tensors = changed(files / "target", 9)
    tree = {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "final_norm": {"w": tensors["model.norm.weight"]},
        "lm_head": {"w": tensors["lm_head.weight"].T},
        "layers": [],
    }
    heads = {"q_proj": (32, 4, 8), "k_proj": (32, 2, 8), "v_proj": (32, 2, 8), "o_proj": (4, 8, 32)}
    for i in range(2):
        layer, prefix = {"attn": {}, "mlp": {}}, f"model.layers.{i}."
        for name, shape in heads.items():
            weight = tensors[f"{prefix}self_attn.{name}.weight"]
            layer["attn"][name] = {"w": jnp.asarray(weight.T.reshape(shape))}
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer["mlp"][name] = {"kernel": jnp.asarray(tensors[f"{prefix}mlp.{name}.weight"].T)}
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[name] = {"w": jnp.asarray(tensors[f"{prefix}{name}.weight"])}
        tree["layers"].append(layer)
    engine.update_weights(tensors)
    expected = answers(engine, prompts)
    engine.update_weights(changed(files / "target", 8))
    engine.update_weights(tree, names=tunix_names)
    assert answers(engine, prompts) == expected
    with load(files / "target", files / "head", engine, weights=tree, names=tunix_names) as loaded:
        assert answers(loaded, prompts) == expected
    tree["extra"] = np.zeros(3)
    engine.update_weights(tree, names=lambda path: None if path == "extra" else tunix_names(path))
    assert answers(engine, prompts) == expected


def test_names_are_also_those_of_a_drafters_arrays(engine, files, prompts):
    head = load_file(files / "head" / "model.safetensors")
    engine.update_weights(drafter=head)
    expected = answers(engine, prompts)
    engine.update_weights(drafter={**head, "fc.weight": -head["fc.weight"]})
    assert answers(engine, prompts) != expected
    other = {f"eagle.{name}": tensor for name, tensor in head.items()}
    engine.update_weights(drafter=other, names=lambda path: path.removeprefix("eagle."))
    assert answers(engine, prompts) == expected


def test_the_caller_keeps_its_arrays_and_may_donate_them(engine, files, prompts):
    weights = on_device(changed(files / "target", 10))
    tree = jax.tree.map(jnp.copy, nnx.to_pure_dict(engine.weights))
    for given in (weights, tree):
        engine.update_weights(given)
        expected = tokens_of(engine.generate(prompts, **ASK))
        assert not any(array.is_deleted() for array in jax.tree.leaves(given))
        for array in jax.tree.leaves(given):
            array.delete()
        engine.forget_prefixes()
        assert tokens_of(engine.generate(prompts, **ASK)) == expected


def test_a_mtp_layer_comes_with_the_target(prompts, tmp_path):
    base = write_target(tmp_path / "base", **LATENT)
    folder = write_with_mtp(tmp_path / "mtp", base)
    config, tensors = config_of(folder), changed(folder, 11)
    fresh = write_folder(tmp_path / "fresh", config, tensors)
    drafter = {"kind": "mtp", "num_speculative_tokens": 3}
    # One program for greedy requests and for sampled ones.
    options = {"drafter": drafter, "sampling_modes": ("sampled",), "progress": False, **SIZES}
    with jaxspec.load(fresh, **options) as loaded:
        expected = answers(loaded, prompts)
    with jaxspec.load(folder, **options) as engine:
        share_programs(engine.programs, loaded.programs)
        engine.update_weights(on_device(tensors))
        assert answers(engine, prompts) == expected
    own = {f"policy.{name}": tensor for name, tensor in on_device(tensors).items()}
    names = lambda path: path.removeprefix("policy.")  # noqa: E731
    with jaxspec.load(folder, weights=own, names=names, **options) as engine:
        share_programs(engine.programs, loaded.programs)
        assert answers(engine, prompts) == expected
        engine.update_weights(on_device(changed(folder, 12)))
        engine.update_weights(own, names=names)
        assert answers(engine, prompts) == expected


def test_packed_weights_are_updated_if_they_were_dequantized(tmp_path, monkeypatch, prompts):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
    path = write_packed_gguf(tmp_path / "packed.gguf")
    options = {"drafter": "none", "progress": False, **SIZES}
    with jaxspec.load(path, packed=False, **options) as engine:
        dense = export_tensors(engine.target)
        weights = {name: -tensor for name, tensor in dense.items()}
        before = engine.generate([1, 2, 3], **ASK).token_ids
        engine.update_weights(weights)
        after = engine.generate([1, 2, 3], **ASK).token_ids
        engine.update_weights(dense)
        assert engine.generate([1, 2, 3], **ASK).token_ids == before
    with jaxspec.load(path, weights=on_device(weights), **options) as loaded:
        assert loaded.generate([1, 2, 3], **ASK).token_ids == after
    if packed_weights.matmul.why_not("numba") is None:
        with (
            jaxspec.load(path, **options) as packed,
            pytest.raises(CheckpointError, match=r"is packed .* engine\.packed = false"),
        ):
            packed.update_weights(weights)


def test_several_devices():
    """Arrays on one device, split otherwise, of NumPy and of the engine; then its own, in other places."""
    own = [f"own, {place}" for place in OWN]
    forms = ("numpy", "one device", "split", "explicit", "tree", *own)
    assert run_apart("weights") == dict.fromkeys(forms, True)
