"""llama.cpp over the same file, for comparison."""

import os
from pathlib import Path
from typing import Any

from jaxspec.checkpoints import Checkpoint


class LlamaCpp:
    """Greedy decoding by llama.cpp, one prompt at a time, with the package xllamacpp.

    Args:
      path: a GGUF.
      context: the most tokens of prompt and answer together.

    Raises:
      ValueError: the package is not installed.
    """

    def __init__(self, path: Path, *, context: int = 2048):
        try:
            import xllamacpp
        except ImportError as error:
            raise ValueError(f"--peer llamacpp needs the package xllamacpp (extra bench): {error}") from None
        self.threads = len(os.sched_getaffinity(0))
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.n_ctx, params.n_parallel = context, 1
        params.cache_ram_mib = params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def generate(self, prompt: list[int], max_new_tokens: int) -> None:
        """Answers a prompt of token ids; ignores end-of-sequence tokens and caches nothing.

        Raises:
          RuntimeError: llama.cpp computed another number of tokens.
        """
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
