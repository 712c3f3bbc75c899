"""Sizes of the compiled programs and of the cache."""

from dataclasses import dataclass

from jaxspec.config.errors import ConfigError, at_least


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the compiled programs and of the cache.

    Attributes:
      batch_size: slots B; requests beyond them wait in a queue.
      max_model_len: positions a request may use, prompt and answer together; None takes the model's
        limit, at most 2048 on the CPU and 8192 elsewhere.
      page_size: positions per cache page, a power of two.
      num_pages: pages of the cache without page 0; None takes enough for every slot at max_model_len.
      prefix_caching: keep full pages of prompts and answers until their room is needed; a prompt that begins
        with the same tokens is read from there on.
      prefill_chunk: C, the tokens that a prompt is cut into; None takes 64, and 32 on a GPU for weights of
        4 GiB or more, where a row costs more than keeping account of it.
      prefill_rows: the most pieces of C tokens that one program for prompts reads, of one prompt or of
        several; there are programs for fewer, too. None takes 1 on the CPU, where rows cost what they cost in
        any company, and 2048 rows elsewhere.
      rows_beside: prompt rows that a decoding step reads at most beside its drafts, so that nobody waits
        while a prompt is read; 0 reads prompts between dispatches. None takes 0 on the CPU and 1024
        elsewhere.
      slot_sizes: numbers of slots that there are decode programs for, beside batch_size: with fewer requests
        running than that, fewer rows are computed. None takes the powers of two.
      steps_per_dispatch: S, engine steps run on the device per host round trip; None takes 1 on the CPU and
        for weights of 4 GiB or more, whose steps take longer than what the host does between them, and 4
        elsewhere. Finished slots idle until the round trip ends.
      dtype: "float32" or "bfloat16" for weights, activations and cache; None takes float32 on the CPU
        and bfloat16 elsewhere.
      cpu_activations: what rows are rounded to on a CPU for products with packed weights: "int8", which
        formats of integers (Q8_0, Q4_0, Q4_1, …) are several times faster with, or "float32", not at all.
        With "int8" the weights of a head are rounded to Q4_1. None takes "int8" where it works.
      draft_loop: "compiled", or "host" to drive the same functions step by step from Python.
      synthetic_acceptance_length: a benchmark mode that ignores the drafts' quality and accepts so
        many tokens per step on average, the emitted text being worthless; None is off.
      tensor_parallel: devices that weights and cache are split over. Its divisors should be those of the
        key/value heads: where it does not divide them, every device keeps all of attention.
    """

    batch_size: int = 8
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefix_caching: bool = True
    prefill_chunk: int | None = None
    prefill_rows: int | None = None
    rows_beside: int | None = None
    slot_sizes: tuple | list | None = None
    steps_per_dispatch: int | None = None
    dtype: str | None = None
    cpu_activations: str | None = None
    draft_loop: str = "compiled"
    synthetic_acceptance_length: float | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "page_size", "tensor_parallel"):
            at_least(f"engine.{name}", getattr(self, name), 1)
        for name in ("max_model_len", "num_pages", "prefill_chunk", "prefill_rows", "steps_per_dispatch"):
            if getattr(self, name) is not None:
                at_least(f"engine.{name}", getattr(self, name), 1)
        if self.rows_beside is not None:
            at_least("engine.rows_beside", self.rows_beside, 0)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"engine.prefix_caching must be true or false, not {self.prefix_caching!r}")
        for size in self.slot_sizes or ():
            at_least("engine.slot_sizes", size, 1)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"engine.page_size must be a power of two, not {self.page_size}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(f"engine.dtype must be 'float32' or 'bfloat16', not {self.dtype!r}")
        if self.cpu_activations not in (None, "int8", "float32"):
            raise ConfigError(
                f"engine.cpu_activations must be 'int8' or 'float32', not {self.cpu_activations!r}"
            )
        if self.draft_loop not in ("compiled", "host"):
            raise ConfigError(f"engine.draft_loop must be 'compiled' or 'host', not {self.draft_loop!r}")
        length = self.synthetic_acceptance_length
        if length is not None and not length >= 1.0:
            raise ConfigError(f"engine.synthetic_acceptance_length must be at least 1, not {length}")

    def resolve(self, *, backend: str, model_limit: int, weight_bytes: int = 0) -> "ResolvedEngineConfig":
        """Fills what was left open, for a backend ("cpu", "gpu") and a model of so many positions and bytes.

        Raises:
          ConfigError: max_model_len is past the model's limit.
        """
        on_cpu = backend == "cpu"
        max_model_len = self.max_model_len or min(model_limit, 2048 if on_cpu else 8192)
        if max_model_len > model_limit:
            raise ConfigError(
                f"engine.max_model_len {max_model_len} is past the model's limit of {model_limit}"
            )
        pages_per_slot = -(-max_model_len // self.page_size)
        is_large = not on_cpu and weight_bytes >= 1 << 32
        chunk = self.prefill_chunk or (32 if is_large else 64)
        powers = tuple(1 << i for i in range(self.batch_size.bit_length()))
        return ResolvedEngineConfig(
            batch_size=self.batch_size,
            max_model_len=max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages or pages_per_slot * self.batch_size,
            prefix_caching=self.prefix_caching,
            prefill_chunk=chunk,
            prefill_rows=self.prefill_rows or (1 if on_cpu else max(2048 // chunk, 1)),
            rows_beside=(0 if on_cpu else 1024) if self.rows_beside is None else self.rows_beside,
            slot_sizes=powers if self.slot_sizes is None else tuple(self.slot_sizes),
            steps_per_dispatch=self.steps_per_dispatch or (1 if on_cpu or is_large else 4),
            # XLA's bfloat16 products run at a twentieth of float32's speed on the CPU.
            dtype=self.dtype or ("float32" if on_cpu else "bfloat16"),
            draft_loop=self.draft_loop,
            synthetic_acceptance_length=self.synthetic_acceptance_length,
        )


@dataclass(frozen=True)
class ResolvedEngineConfig:
    """`EngineConfig` with nothing left open; fields as there."""

    batch_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefix_caching: bool
    prefill_chunk: int
    prefill_rows: int
    rows_beside: int
    slot_sizes: tuple[int, ...]
    steps_per_dispatch: int
    dtype: str
    draft_loop: str
    synthetic_acceptance_length: float | None
