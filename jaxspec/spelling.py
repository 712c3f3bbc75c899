"""What somebody may have meant by a name that is not known."""

import re
from collections.abc import Iterable

_SAME = (
    ("max_new_tokens", "max_completion_tokens", "max_tokens", "max_length", "n_predict", "num_predict"),
    ("min_tokens", "min_new_tokens", "min_length"),
    ("temperature", "temp", "do_sample"),
    ("repetition_penalty", "repeat_penalty"),
    ("stop", "stop_sequences", "stop_strings", "stop_words"),
    ("stop_token_ids", "eos_token_id", "eos_token_ids"),
    ("seed", "random_seed"),
    ("n", "num_return_sequences", "num_samples"),
    ("logprobs", "top_logprobs", "output_scores", "return_logprobs"),
    ("bad_words", "bad_words_ids"),
    ("choice", "guided_choice"),
    ("regex", "guided_regex"),
    ("json_schema", "guided_json", "response_format"),
    ("num_speculative_tokens", "num_assistant_tokens", "num_draft_tokens", "draft_max", "speculate"),
    ("batch_size", "max_num_seqs", "max_running_requests", "n_parallel"),
    ("max_model_len", "max_seq_len", "context_length", "ctx_size", "n_ctx"),
    ("page_size", "block_size"),
    ("num_pages", "num_gpu_blocks_override"),
    ("prefill_chunk", "chunked_prefill_size"),
    ("cache_dtype", "kv_cache_dtype"),
    ("tensor_parallel", "tensor_parallel_size", "tp_size"),
    ("prefix_caching", "enable_prefix_caching"),
    ("kind", "type", "method"),
    ("source", "model", "model_name_or_path"),
    ("drafter", "speculative_model", "draft_model", "assistant_model", "speculative_config"),
)
"""Names for the same thing: ours first, then those of OpenAI, transformers, vLLM, SGLang and llama.cpp."""


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.7) -> str | None:
    """The known name that was probably meant: another library's name for it, or a misspelt one.

    Args:
      likeness: of two spellings, from 0 to 1; the least that is taken for a mistake.
    """
    from difflib import get_close_matches  # an error is seldom

    plain = {_plain(each): each for each in known}
    asked = _plain(str(name)[:100])
    for group in _SAME:
        if asked in group:
            same = next((each for each in group if each in plain), None)
            if same is not None:
                return plain[same]
    if asked in plain:
        return plain[asked]
    close = get_close_matches(asked, plain, n=5, cutoff=likeness)
    begun = [each for each in close if each.startswith(asked)]  # eagle is eagle3 rather than peagle
    return next((plain[each] for each in begun + close), None)


def known_names(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known ones, and which of them was probably meant."""
    names = list(known)
    meant = nearest(name, names)
    question = "" if meant is None else f"did you mean {meant!r}? "
    return f"{question}known: {', '.join(names)}"


def _plain(name: str) -> str:
    """The name as it would be in Python: --max-tokens, maxTokens and max_tokens are alike."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lstrip("-").replace("-", "_").lower()
