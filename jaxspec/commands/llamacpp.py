"""llama.cpp over the same file, for comparison: built on this machine, or a wheel."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from jaxspec.files import Checkpoint
from jaxspec.installation import install_command


class Peer(Protocol):
    """llama.cpp with one prompt at a time.

    Attributes:
      name: the package and its version.
    """

    name: str

    def generate(self, prompt: list[int], max_new_tokens: int) -> None:
        """Answers a prompt of token ids greedily; ignores end-of-sequence tokens and caches nothing.

        Raises:
          RuntimeError: llama.cpp computed another number of tokens.
        """
        ...


def load_peer(path: Path, *, context: int = 2048) -> Peer:
    """llama.cpp by the package llama-cpp-python, which is compiled where it is installed, else by xllamacpp.

    Args:
      path: a GGUF.
      context: the most tokens of prompt and answer together.

    Raises:
      ValueError: neither package is installed.
    """
    threads = len(os.sched_getaffinity(0))
    if find_spec("llama_cpp") is not None:
        return _Built(path, context, threads)
    if find_spec("xllamacpp") is not None:
        return _Wheel(path, context, threads)
    raise ValueError(f"--peer llamacpp needs llama-cpp-python or xllamacpp: {install_command('bench')}")


class _Built:
    def __init__(self, path: Path, context: int, threads: int):
        from llama_cpp import Llama

        self.name = f"llama-cpp-python {version('llama-cpp-python')}"
        self._llama = Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, prompt: list[int], max_new_tokens: int) -> None:
        self._llama.reset()
        tokens = self._llama.generate(prompt, temp=0.0, top_k=1)
        if (count := sum(1 for _ in islice(tokens, max_new_tokens))) != max_new_tokens:
            raise RuntimeError(f"llama.cpp wrote {count} tokens")


class _Wheel:
    def __init__(self, path: Path, context: int, threads: int):
        import xllamacpp

        self.name = f"xllamacpp {version('xllamacpp')}"
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_ctx, params.n_parallel = context, 1
        params.cache_ram_mib = params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def generate(self, prompt: list[int], max_new_tokens: int) -> None:
        request: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        timings = self._server.handle_completions(request)["timings"]
        counts = timings["prompt_n"], timings["predicted_n"]
        if counts != (len(prompt), max_new_tokens):
            raise RuntimeError(f"llama.cpp read and wrote {counts} tokens")


def gguf_of(checkpoint: Checkpoint) -> Path:
    """The GGUF from which a checkpoint was read.

    Raises:
      ValueError: it was read from another format.
    """
    header = getattr(next(iter(checkpoint.tensors.values())), "header", None)
    if header is None:
        raise ValueError(f"--peer llamacpp: {checkpoint.name} is not a GGUF")
    return header.path
