"""Runs programs over several CPU devices, in a separate process.

    pairs KIND WAY DRAFTER@DEVICES ...
    families NAME@DEVICES ...
    logprobs DEVICES
    constraints DRAFTER@DEVICES ...
    loading FORMAT ...
    weights
    meshes DEVICES

JAX fixes the number of devices when it starts. `python tests/several_devices.py` reads such lines, each a
list in JSON, and answers with one each; the tests do so through `run`.
"""

import atexit
import gc
import json
import re
import subprocess
import sys
import tempfile
import tracemalloc
from contextlib import redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from converted_gguf import write_converted
from flax import nnx
from golden_files import golden_folder, golden_outputs
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxspec_kernels.op import _WHY_NOT, Op
from memory import collect_seldom, give_back, is_large, live_bytes
from programs_when_run import compile_only_what_runs
from tiny_engines import DRAFTERS, SIZES, TinyEngines
from tiny_grammars import END, tiny_tokenizer
from tiny_models import write_target

import jaxspec
from jaxspec.config import MESH_AXIS
from jaxspec.drafters.kinds import draft_model
from jaxspec.drafters.kinds.draft_model import SPLIT_FROM
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import bytes_by_device, make_mesh
from jaxspec.weights.array_weights import Batch
from jaxspec.weights.loading import export_tensors

DEVICES = 4
PROMPTS = [np.random.default_rng(0).integers(48, size=length).tolist() for length in (3, 17, 30, 9, 1)]
WAYS: dict[str, list[dict]] = {
    "greedy": [{}],
    "sampled": [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 3},
    ],
}
EVERY_KIND = {"presence_penalty": 0.1, "min_tokens": 2, "bad_words": [[47]], "regex": "[a-l0-9 ]*"}
CONSTRAINTS: list[dict] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"logit_bias": {3: 4.0, 40: 3.0}, "presence_penalty": 1.0},
    {},
    {"min_tokens": 20, "stop_token_ids": list(range(0, 48, 5)), "no_repeat_ngram_size": 2},
    {"bad_words": [[10], [17, 17], [2, 18], [46, 10]], "regex": "([a-h]kl[0-9]){2,9}"},
]
"""One for each of the prompts, beside `EVERY_KIND`, so that a single program serves all."""
CONSTRAINED: dict[str, dict] = {"eagle3": {}, "dflash": {"temperature": 0.9, "top_p": 0.9, "seed": 3}}
"""Drafters, each with one way to sample: what constraints change lies before both."""
INNER_WIDTH = {
    "model_type": "gpt_oss",
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 6,
}
"""Experts with biases. Their inner width splits over two devices in blocks of 32. Three rows choose only some
of them, so that decoding reads the chosen ones and prompts run through all."""
MOVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


class Process:
    """A process that runs these programs one after another."""

    def __init__(self):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen([sys.executable, __file__], **pipes, text=True)
        atexit.register(self.close)

    def ask(self, *arguments):
        """What a program finds."""
        with suppress(BrokenPipeError):  # it has ended
            print(json.dumps(arguments), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
        assert line, self.errors.read()
        return json.loads(line)

    def close(self):
        atexit.unregister(self.close)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


RUNNING = []
"""The process that `run` asks; starting one takes as long as a program of these."""


@cache
def run(*arguments):
    """What a program finds."""
    while RUNNING and RUNNING[0].process.poll() is not None:
        RUNNING.pop().close()
    if not RUNNING:
        RUNNING.append(Process())
    return RUNNING[0].ask(*arguments)


def run_apart(*arguments):
    """The same, in a process where nothing ran before."""
    process = Process()
    try:
        return process.ask(*arguments)
    finally:
        process.close()


def answers(engine, way):
    """Tokens and acceptance of every answer; acceptance reveals a drafter that computes something else."""
    given = [engine.generate(PROMPTS, max_new_tokens=24, **params) for params in WAYS[way]]
    return [[answer.token_ids, list(answer.stats.accepted_at)] for each in given for answer in each]


def observed(load, devices, ask):
    """Answers of an engine over several devices to `ask`, and what its program moves; `load` takes their
    number."""
    kernels, call = {}, Op.__call__

    def watched(op, *args, **kwargs):
        kernels[op.name] = jax.lax.axis_size(MESH_AXIS)  # fails outside of `on_shards`
        return call(op, *args, **kwargs)

    with patch.object(Op, "__call__", watched):
        engine = load(devices)
        answered = ask(engine)  # compiles what it runs
    weights = engine.programs.leaves
    result = {
        "answers": answered,
        "moves": moves(engine),
        "kernels": kernels,
        "split": sum(w.nbytes for w in weights if bytes_by_device(w) < w.nbytes)
        / sum(w.nbytes for w in weights),
    }
    engine.close()
    return result


def moves(engine):
    """[operation, shape] of everything that moves between devices in the largest decode program."""
    mode = max(size.mode for size in engine.programs.compiled if size.width)
    text = engine.programs.compiled_decode(mode=SamplingMode(mode)).as_text()
    found = re.findall(rf"= (.*?) ({'|'.join(MOVES)})(?:-start)?\(", text)
    return [
        [operation, [[int(n) for n in shape.split(",") if n] for shape in re.findall(r"\[([\d,]*)\]", made)]]
        for made, operation in found
    ]


def named(text):
    """The name and the number of devices of "name@devices"."""
    name, devices = text.split("@")
    return name, int(devices)


def pairs(kind, way, *texts):
    """Runs drafters over a kind of attention; "split" splits the draft model even if it is small,
    "reference" runs the reference kernels, and "coded" has caches in 8 bits."""
    result = {}
    with tempfile.TemporaryDirectory() as folder, patch.object(draft_model, "SPLIT_FROM", SPLIT_FROM):
        engines = TinyEngines(Path(folder), kind)
        for text in texts:
            name, devices = named(text)
            drafter, *how = name.split()
            draft_model.SPLIT_FROM = 0 if "split" in how else SPLIT_FROM

            cache = {"cache_dtype": "float8_e4m3fn"} if "coded" in how else {}

            def load(devices, drafter=drafter, cache=cache):
                k = DRAFTERS.get(drafter, 0)
                return engines.load(drafter, k, sampling_modes=(way,), tensor_parallel=devices, **cache)

            with patch.dict(_WHY_NOT, {"numba": lambda: "is left out"} if "reference" in how else {}):
                result[text] = observed(load, devices, partial(answers, way=way))
            engines.loaded.clear()  # another split has the same arguments
    return result


def families(*texts):
    """Compares greedy answers of golden checkpoints with those of transformers, or of one device where a
    golden has none."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        inner = write_target(Path(folder, "target"), **INNER_WIDTH)

        def load(name, devices):
            model = inner if name == "inner width" else golden_folder(name)
            sizes = {**SIZES, "sampling_modes": ("greedy",), "progress": False, "cpu_activations": "float32"}
            return jaxspec.load(model, tensor_parallel=devices, **sizes)

        @cache
        def expected(name):
            known = {} if name == "inner width" else golden_outputs(name)
            if "greedy" in known:
                ids, lengths = known["input_ids"].tolist(), known["greedy_lengths"]
                prompts = [row[:length] for row in ids for length in lengths]
                return prompts, known["greedy"].reshape(len(prompts), -1)[:, :24].tolist()
            if "answers" in known:
                return known["prompts"].tolist(), known["answers"][:, :24].tolist()
            with load(name, 1) as engine:
                return PROMPTS, greedy(engine, PROMPTS)

        for text in texts:
            name, devices = named(text)
            prompts, tokens = expected(name)
            result[text] = observed(partial(load, name), devices, partial(greedy, prompts=prompts))
            result[text]["same"] = result[text].pop("answers") == tokens
    return result


def greedy(engine, prompts):
    """The tokens of greedy answers, whatever they are."""
    answered = engine.generate(prompts, max_new_tokens=24, ignore_eos=True)
    return [answer.token_ids for answer in answered]


def logprobs(*counts):
    """For each number of devices, answers with log-probabilities: [tokens, of each token, of the top 20], and
    scores of the same texts, with a sum of their hidden states."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = TinyEngines(Path(folder))
        for count in counts:
            engine = engines.load("ngram", sampling_modes=("greedy",), tensor_parallel=int(count))
            answers = engine.generate(PROMPTS, max_new_tokens=24, logprobs=20)
            result[count] = [
                [answer.token_ids, answer.logprobs, [list(top.items()) for top in answer.top_logprobs]]
                for answer in answers
            ]
            texts = [answer.prompt_token_ids + answer.token_ids for answer in answers]
            scores = engine.score(texts, top=20, hidden="last")
            told = scores.logprobs, scores.top_logprobs, scores.hidden["last"].sum(axis=-1)
            samples = engine.sample([PROMPTS[0]] * 2, max_new_tokens=4)
            result[f"{count} scores"] = [values.tolist() for values in told]
            result[f"{count} samples"] = [len(samples.tokens.devices()), samples.logprobs.tolist()]
    return result


def constraints(*texts):
    """The tokens of constrained answers."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = TinyEngines(Path(folder))
        for text in texts:
            name, devices = named(text)
            engine = engines.load(name, DRAFTERS.get(name, 0), tensor_parallel=devices)
            engine.core.grammars._tokenizer, engine.core.grammars._ends = tiny_tokenizer(), (END,)
            asked = {"max_new_tokens": 24, "ignore_eos": True, **EVERY_KIND, **CONSTRAINED[name]}
            answered = engine.generate(PROMPTS, [asked | way for way in CONSTRAINTS])
            result[text] = [answer.token_ids for answer in answered]
    return result


def loading(*formats):
    """For each format of a checkpoint: [bytes, largest part, peak on the host] of every parameter, and
    whether all were read correctly.

    CPU devices hold their parts on the host, too.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 4096, "num_attention_heads": 8}
    with tempfile.TemporaryDirectory() as folder:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        written = open_checkpoint(write_target(Path(folder, "safetensors"), rope_parameters=rope, **sizes))
        write_converted(Path(folder, "gguf"), written)
        return {name: loaded_parts(Path(folder, name), written) for name in formats}


def loaded_parts(path, written):
    """See `loading`; `written` is the checkpoint that the one at `path` was made from."""
    checkpoint = open_checkpoint(path)
    # Tables of Python's that grow meanwhile count as well, but hardly ever three times at the same parameter.
    times = zip(*(peaks_of_loading(checkpoint) for _ in range(3)), strict=True)
    target = load_target(checkpoint, dtype=jnp.dtype(jnp.float32), mesh=make_mesh(2))
    exported = export_tensors(target)
    same = all(np.array_equal(exported[name], t.read()) for name, t in written.tensors.items())
    return {"peaks": list(map(min, times)), "same": same and exported.keys() == written.tensors.keys()}


def peaks_of_loading(checkpoint):
    """[bytes, largest part, peak on the host] of every parameter."""
    peaks, make = [], jax.make_array_from_callback

    def counted(shape, sharding, part):
        parts = []

        def counting(index):
            array = part(index)
            parts.append(array.nbytes)
            return array

        array = make(shape, sharding, counting)
        held, peak = tracemalloc.get_traced_memory()
        peaks.append([array.nbytes, max(parts), peak - counted.held])
        # What was read for this parameter is still held, and should be gone when the next one is read.
        counted.held = min(held, counted.held + array.nbytes)
        tracemalloc.reset_peak()
        return array

    with patch.object(jax, "make_array_from_callback", counted):
        tracemalloc.start()
        counted.held, _ = tracemalloc.get_traced_memory()
        load_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16), mesh=make_mesh(2))
        tracemalloc.stop()
    return peaks


def weights():
    """For each form of new weights, whether an engine over two devices answers as one loaded with them."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        old, new = (write_target(Path(folder, name), seed=seed) for seed, name in enumerate(("old", "new")))
        options = {"tensor_parallel": 2, "progress": False, "sampling_modes": ("greedy",), **SIZES}
        options["drafter"] = {"kind": "draft_model", "source": str(old), "num_speculative_tokens": 3}
        tensors = {name: tensor.read() for name, tensor in open_checkpoint(new).tensors.items()}
        with jaxspec.load(new, **options) as engine:
            expected = answers(engine, "greedy")
            tree = jax.tree.map(jnp.copy, nnx.to_pure_dict(engine.weights))
        forms = {
            "numpy": lambda: tensors,
            "one device": lambda: {name: jax.device_put(t, jax.devices()[3]) for name, t in tensors.items()},
            "split": lambda: split_otherwise(tensors, AxisType.Auto),
            "explicit": lambda: split_otherwise(tensors, AxisType.Explicit),
            "tree": lambda: tree,
        }
        other = {name: tensor.read() for name, tensor in open_checkpoint(old).tensors.items()}
        with jaxspec.load(old, **options) as engine:
            for name, make in forms.items():
                engine.update_weights(other)
                assert answers(engine, "greedy") != expected
                places = [leaf.sharding for leaf in engine.programs.leaves]
                engine.update_weights(make())
                engine.update_weights(make())
                same = places == [leaf.sharding for leaf in engine.programs.leaves]
                result[name] = same and answers(engine, "greedy") == expected
            for name, moved in OWN.items():
                result[f"own, {name}"] = takes_its_own(engine, moved)
    return result


def renamed(array):
    """The same memory, over a mesh whose axis has another name."""
    mesh = Mesh(array.sharding.mesh.devices, ("other",))
    axes = [name and "other" for name in array.sharding.spec]
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


OWN = {
    "in another mesh": partial(jax.tree.map, renamed),
    "on the first device": lambda tree: jax.device_put(tree, jax.devices()[0]),
    "whole": lambda tree: jax.device_put(tree, NamedSharding(make_mesh(2), PartitionSpec())),
}
"""Where the engine's own arrays are put before they come back; those that do not move share its memory."""


def takes_its_own(engine, moved):
    """Whether new weights that share memory with the old ones are right, and never all copied."""
    tree = nnx.to_pure_dict(engine.weights)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(tree))
    tree = moved(tree)
    expected = jax.tree.map(lambda array: np.array(array, copy=True), tree)
    peaks, read = [], Batch.read

    def watched(batch, into):
        peaks.append(live_bytes())
        return read(batch, into)

    gc.collect()
    before = live_bytes()
    with patch.object(Batch, "read", watched):
        engine.update_weights(tree)
    found = jax.tree.leaves(nnx.to_pure_dict(engine.weights))
    same = all(map(np.array_equal, found, jax.tree.leaves(expected)))
    # A copy on each of the two devices.
    return same and max(peaks) - before <= 2 * largest


def split_otherwise(tensors, axis_type):
    """Tensors that are split by their last axis over a mesh of another name."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("other",), axis_types=(axis_type,))
    return {
        name: jax.device_put(t, NamedSharding(mesh, PartitionSpec(*(None,) * (t.ndim - 1), "other")))
        for name, t in tensors.items()
    }


def meshes(devices):
    """What fails, of all that a program with a mesh of two devices does with an engine over so many."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(Path(folder, "target"))
        with jaxspec.load(
            target, tensor_parallel=int(devices), progress=False, sampling_modes=("greedy",), **SIZES
        ) as engine:
            for axis_type in (AxisType.Auto, AxisType.Explicit):
                mesh = jax.make_mesh((2,), ("dp",), axis_types=(axis_type,), devices=jax.devices()[:2])
                with jax.set_mesh(mesh):
                    failed += [[str(axis_type), *each] for each in _fails_under(mesh, engine)]
    return {devices: failed}


def _fails_under(mesh, engine):
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("dp"))
    samples = engine.sample([PROMPTS[0]] * 2, max_new_tokens=4)
    theirs = jax.tree.map(
        lambda array: jax.device_put(np.array(array), split if array.shape[0] % 2 == 0 else whole),
        engine.weights,
    )
    expected = engine.generate(PROMPTS[0], max_new_tokens=4).token_ids

    def answers_as_before():
        assert engine.generate(jnp.asarray(PROMPTS[0]), max_new_tokens=4).token_ids == expected

    does = {
        "sum": lambda: samples.logprobs.sum(),
        "jit": lambda: jax.jit(lambda x, mask: jnp.where(mask, x, 0).sum())(samples.logprobs, samples.mask),
        "grad": lambda: jax.grad(lambda x: (x * x).sum())(samples.logprobs),
        "group": lambda: samples.tokens.reshape(1, 2, -1)[0],
        "beside": lambda: samples.logprobs * jax.device_put(np.ones((2, 1), np.float32), split),
        "put": lambda: jax.tree.map(jnp.sum, jax.device_put(engine.weights, whole)),
        "score": lambda: engine.score(samples.tokens, lengths=samples.lengths),
        "update": lambda: (engine.update_weights(theirs), answers_as_before()),
        "update with its own": lambda: (engine.update_weights(engine.weights), answers_as_before()),
    }
    for name, do in does.items():
        try:
            do()
        except Exception as error:
            yield name, repr(error)[:300]


PROGRAMS = {
    program.__name__: program
    for program in (pairs, families, logprobs, constraints, loading, weights, meshes)
}

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    compile_only_what_runs()
    collect_seldom()
    for line in sys.stdin:
        what, *texts = json.loads(line)
        with redirect_stdout(sys.stderr):  # what a program might print
            result = PROGRAMS[what](*texts)
        print(json.dumps(result), flush=True)
        if is_large():
            jax.clear_caches()
            give_back()
