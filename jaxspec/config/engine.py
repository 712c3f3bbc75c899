"""Sizes of the compiled programs and of the cache."""

from dataclasses import dataclass, replace
from typing import TypedDict

from jaxspec.config.errors import ConfigError, at_least, use_plain_values


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the compiled programs and of the cache.

    Attributes:
      batch_size: B, the number of slots; further requests wait in a queue.
      max_model_len: the most tokens of a request, prompt and answer together; None takes the model's
        limit, at most 2048 on a CPU and 8192 elsewhere.
      page_size: positions per cache page, a power of two.
      num_pages: pages of the cache, not counting page 0; None takes enough for max_model_len in every slot.
      prefix_caching: keep full pages of prompts and answers until their space is needed. A prompt that begins
        with the same tokens reuses them and is read from there on.
      prefill_chunk: C, tokens per chunk of a prompt. None takes 16 on a CPU and 64 on a GPU, but 32 there for
        weights of 4 GiB or more. A padding row then costs more than handling a chunk does, as it always does
        on a CPU.
      prefill_batch_size: the most chunks of C tokens, of one prompt or several, in a prefill dispatch, which
        only reads prompts. Programs for fewer chunks are compiled, too. None takes chunks of 64 tokens in
        total on a CPU, where more rows are no cheaper together, and of 2048 elsewhere.
      mixed_prefill_tokens: the most prompt tokens that a decoding step reads along with its drafts, so that
        decoding does not stop while a prompt is read; 0 reads prompts between dispatches. None takes 0 on a
        CPU and 1024 elsewhere.
      slot_sizes: numbers of slots below batch_size to compile decode programs for, too. A smaller program
        computes fewer rows when fewer requests run. None takes the powers of two, and above 32 the numbers
        halfway between them.
      steps_per_dispatch: S, engine steps run on the device per host round trip. Slots that finish are idle
        until it ends. None takes 4 on a GPU, and at most 8 on a CPU: fewer the more slots decode (4 for
        eight, 1 from 26 on), and 1 while prompts are read. For weights of 4 GiB or more (512 MiB on a CPU) it
        takes 1, as their steps take longer than the host's work between them.
      dtype: "float32" or "bfloat16", of weights and activations; None takes float32 on a CPU and bfloat16
        elsewhere.
      exact: give every token the same logits, to the last bit, whatever the number of drafts, the batch, the
        chunks of its prompt and the other requests. True asks for it on a GPU in 16 bits, and where a CPU
        rounds activations to 8 bits, which always does so. None takes False on a GPU.
      packed: keep weights in their checkpoint's quantized format where a kernel reads it. False dequantizes
        them, so that they can be updated (`Engine.update_weights`); weights from memory are never packed.
        None dequantizes FP8, INT4 and GGUFs on a GPU, where True makes steps faster and the prefill of long
        prompts slower.
      output_dtype: "float8_e4m3fn" or "int4" rounds the target's output rows when they are loaded, as
        `jaxspec convert --quantize` rounds matrices of layers, and keeps them packed on a GPU. A step reads
        fewer bytes, and the target's answers are those of the rounded rows. None leaves them as they are.
      gpu_activations: "float8_e4m3fn" rounds activations, row by row, for products of more than 32 rows with
        packed matrices in FP8 on a GPU, whose FP8 products are faster. It changes answers, and what an answer
        is then depends on the requests beside it. None rounds none.
      cpu_activations: rounding of activations for products with packed weights on a CPU. "int8" makes integer
        formats (Q8_0, Q4_0, Q4_1, …) several times faster, and rounds the weights of a head to Q4_1;
        "float32" does not round. None takes "int8" where it is supported.
      cache_dtype: dtype of cached keys and values: `dtype`; "float16" on a CPU where `dtype` is "float32",
        which halves what attention reads; or "float8_e4m3fn", which takes 8 bits a number and one more byte
        for the scale of every head's key and value, so that the same memory holds nearly twice the tokens,
        and changes answers slightly. None takes "float16" where activations are rounded to "int8", and
        `dtype` elsewhere. Latent caches and those with compressed entries always have `dtype`.
      synthetic_acceptance_length: benchmarks only: accepts so many tokens per step on average, whatever the
        drafts are, so the text is meaningless; None turns this off.
      tensor_parallel: devices over which weights and cache are split. It should divide the number of
        key/value heads; otherwise every device computes all of attention.
    """

    batch_size: int = 8
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefix_caching: bool = True
    prefill_chunk: int | None = None
    prefill_batch_size: int | None = None
    mixed_prefill_tokens: int | None = None
    slot_sizes: tuple | list | None = None
    steps_per_dispatch: int | None = None
    dtype: str | None = None
    exact: bool | None = None
    packed: bool | None = None
    output_dtype: str | None = None
    gpu_activations: str | None = None
    cpu_activations: str | None = None
    cache_dtype: str | None = None
    synthetic_acceptance_length: float | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        use_plain_values(self)
        for name in ("batch_size", "page_size", "tensor_parallel"):
            at_least(f"engine.{name}", getattr(self, name), 1)
        for name in (
            "max_model_len",
            "num_pages",
            "prefill_chunk",
            "prefill_batch_size",
            "steps_per_dispatch",
        ):
            if getattr(self, name) is not None:
                at_least(f"engine.{name}", getattr(self, name), 1)
        if self.mixed_prefill_tokens is not None:
            at_least("engine.mixed_prefill_tokens", self.mixed_prefill_tokens, 0)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"engine.prefix_caching must be true or false, not {self.prefix_caching!r}")
        for name in ("exact", "packed"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"engine.{name} must be true or false, not {getattr(self, name)!r}")
        for size in self.slot_sizes or ():
            at_least("engine.slot_sizes", size, 1)
            if size > self.batch_size:
                raise ConfigError(
                    f"engine.slot_sizes: {size} is more than the {self.batch_size} of engine.batch_size"
                )
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"engine.page_size must be a power of two, not {self.page_size}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(f"engine.dtype must be 'float32' or 'bfloat16', not {self.dtype!r}")
        if self.output_dtype not in (None, "float8_e4m3fn", "int4"):
            raise ConfigError(
                f"engine.output_dtype must be 'float8_e4m3fn' or 'int4', not {self.output_dtype!r}"
            )
        if self.gpu_activations not in (None, "float8_e4m3fn"):
            raise ConfigError(f"engine.gpu_activations must be 'float8_e4m3fn', not {self.gpu_activations!r}")
        if self.gpu_activations and self.exact:
            raise ConfigError("engine.gpu_activations has no effect with engine.exact")
        if self.gpu_activations and not self.packed:
            raise ConfigError("engine.gpu_activations has no effect without engine.packed = true")
        if self.cpu_activations not in (None, "int8", "float32"):
            raise ConfigError(
                f"engine.cpu_activations must be 'int8' or 'float32', not {self.cpu_activations!r}"
            )
        if self.cache_dtype not in (None, "float16", "float32", "bfloat16", "float8_e4m3fn"):
            raise ConfigError(
                "engine.cache_dtype must be 'float16', 'float32', 'bfloat16' or 'float8_e4m3fn', not "
                f"{self.cache_dtype!r}"
            )
        length = self.synthetic_acceptance_length
        if length is not None and not length >= 1.0:
            raise ConfigError(f"engine.synthetic_acceptance_length must be at least 1, not {length}")

    def with_batch_size(self, batch_size: int) -> "EngineConfig":
        """A copy with another batch size, without the `slot_sizes` above it."""
        sizes = self.slot_sizes
        fitting = None if sizes is None else tuple(size for size in sizes if size <= batch_size)
        return replace(self, batch_size=batch_size, slot_sizes=fitting)

    def dtype_on(self, backend: str) -> str:
        """The dtype of weights and activations on a "cpu" or a "gpu"."""
        # On a CPU, XLA's bfloat16 products are twenty times slower than those in float32.
        return self.dtype or ("float32" if backend == "cpu" else "bfloat16")

    def max_model_len_on(self, backend: str, model_limit: int | None = None) -> int:
        """The most tokens of a request to a model of so many positions; None if their number is not known."""
        usual = 2048 if backend == "cpu" else 8192
        return self.max_model_len or min(usual, model_limit or usual)

    def check_fits(self, *, backend: str, model_limit: int) -> None:
        """Checks what can be checked before weights are read; arguments as of `resolve`.

        Raises:
          ConfigError: max_model_len is past the model's limit, or the cache cannot have its dtype here.
        """
        dtypes = [*self._cache_dtypes(backend), "float8_e4m3fn"]
        if self.exact and backend != "cpu" and dtypes[0] == "float32":
            raise ConfigError("engine.exact needs engine.dtype 'bfloat16' on a GPU, not 'float32'")
        if self.cache_dtype not in (None, *dtypes):
            raise ConfigError(
                f"engine.cache_dtype is {self.cache_dtype!r}; on a {backend}, with engine.dtype "
                f"{dtypes[0]!r}, it can be {' or '.join(map(repr, dtypes))}"
            )
        if (self.max_model_len or 0) > model_limit:
            raise ConfigError(
                f"engine.max_model_len {self.max_model_len} is past the model's limit of {model_limit}"
            )

    def _cache_dtypes(self, backend: str) -> list[str]:
        """The dtypes of 16 bits or more that the cache may have: `dtype`, then others."""
        dtype = self.dtype_on(backend)
        return [dtype, "float16"] if backend == "cpu" and dtype == "float32" else [dtype]

    def resolve(
        self,
        *,
        backend: str,
        model_limit: int,
        weight_bytes: int = 0,
        rounds_activations: bool = False,
        has_states: bool = False,
    ) -> "ResolvedEngineConfig":
        """Fills in the fields that are None, once the weights are there to decide by.

        Args:
          backend: "cpu" or "gpu".
          model_limit: the most positions that the model supports.
          weight_bytes: size of the weights on a device.
          rounds_activations: whether products with the target's weights round activations to 8 bits.
          has_states: whether the target has recurrent layers.

        Raises:
          ConfigError: see `check_fits`.
        """
        self.check_fits(backend=backend, model_limit=model_limit)
        on_cpu = backend == "cpu"
        if self.exact and on_cpu and not rounds_activations:
            raise ConfigError("engine.exact on a CPU needs packed weights and engine.cpu_activations 'int8'")
        max_model_len = self.max_model_len_on(backend, model_limit)
        pages_per_slot = -(-max_model_len // self.page_size)
        is_large = weight_bytes >= 1 << (29 if on_cpu else 32)
        mixed = self.mixed_prefill_tokens
        chunk = self.prefill_chunk or (16 if on_cpu else 32 if is_large else 64)
        powers = [1 << i for i in range(self.batch_size.bit_length())]
        halfway = [3 * power // 2 for power in powers if 32 <= power < self.batch_size]
        return ResolvedEngineConfig(
            batch_size=self.batch_size,
            max_model_len=max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages or pages_per_slot * self.batch_size,
            prefix_caching=self.prefix_caching,
            prefill_chunk=chunk,
            prefill_batch_size=self.prefill_batch_size or max((64 if on_cpu else 2048) // chunk, 1),
            mixed_prefill_tokens=(0 if on_cpu else 1024) if mixed is None else mixed,
            slot_sizes=tuple(sorted(powers + halfway) if self.slot_sizes is None else self.slot_sizes),
            steps_per_dispatch=self.steps_per_dispatch or (1 if is_large else 8 if on_cpu else 4),
            adapts_steps=on_cpu and self.steps_per_dispatch is None,
            dtype=self.dtype_on(backend),
            exact=bool(self.exact),
            output_dtype=self.output_dtype,
            cache_dtype=self.cache_dtype or self._cache_dtypes(backend)[-1 if rounds_activations else 0],
            synthetic_acceptance_length=self.synthetic_acceptance_length,
            has_states=has_states,
            state_copies=max(2 * self.batch_size, 8) if has_states and self.prefix_caching else 0,
        )


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` as keywords, for type checkers."""

    batch_size: int
    max_model_len: int | None
    page_size: int
    num_pages: int | None
    prefix_caching: bool
    exact: bool | None
    packed: bool | None
    output_dtype: str | None
    gpu_activations: str | None
    prefill_chunk: int | None
    prefill_batch_size: int | None
    mixed_prefill_tokens: int | None
    slot_sizes: tuple | list | None
    steps_per_dispatch: int | None
    dtype: str | None
    cpu_activations: str | None
    cache_dtype: str | None
    synthetic_acceptance_length: float | None
    tensor_parallel: int


@dataclass(frozen=True)
class ResolvedEngineConfig:
    """`EngineConfig` with every default filled in; the fields are the same, and three are added.

    Attributes:
      adapts_steps: whether a dispatch may have fewer steps than `steps_per_dispatch`.
      has_states: whether the target has recurrent layers, with a state for every slot.
      state_copies: states that are kept for prompts which begin alike. A state is as large as the cached keys
        and values of a thousand tokens or more, so these are few.
    """

    batch_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefix_caching: bool
    prefill_chunk: int
    prefill_batch_size: int
    mixed_prefill_tokens: int
    slot_sizes: tuple[int, ...]
    steps_per_dispatch: int
    adapts_steps: bool
    dtype: str
    exact: bool
    output_dtype: str | None
    cache_dtype: str
    synthetic_acceptance_length: float | None
    has_states: bool = False
    state_copies: int = 0

    @property
    def table_width(self) -> int:
        """T, the pages that hold `max_model_len` positions of one slot: the width of the page table."""
        return -(-self.max_model_len // self.page_size)
