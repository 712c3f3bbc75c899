"""Which tests are `whole`, that is, left to `.ci/run`; every other one is part of the README's command."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COLLECTED = pytest.StashKey[dict[tuple[str, str], bool]]()
"""Where the configuration of a run has `whole` of its tests by their file and name."""

WHOLE = {
    "attention/test_packed.py": r"own_keys|refused|of_another_dtype",
    # Processes that are killed or wait for one another.
    "service/batch/test_batch_kill.py": "",
    "service/batch/test_batch_ray.py": "",
    "service/batch/test_batch_replicas.py": "",
    "files/test_chat_template.py": r"loops_or_grows.*\[(?!\{\{ lipsum)",
    "scripts/test_generate_batch_replicas.py": "",
    "wiring/test_batch_options.py": r"^test_replicas_ask",
    # Fuzzing at length.
    "files/test_fuzz_folder.py": r"other_values\[(?!config)",
    "files/test_fuzz_gguf.py": r"metadata|\[(?!llama)",
    "files/test_fuzz_tokenizer.py": r"\[(?!byte-level)",
    "test_fuzz_config.py": r"of_other_values$|\[(?!llama-tied|eagle3-safeailab\])",
    # Downloads that break off, and conversions.
    "files/test_convert_checkpoint.py": r"writes_orbax",
    "files/test_wheel.py": r"missing_is_noticed|interrupted|damaged|are_joined|no_write_access",
    "drafters/test_checks.py": r"^test_drafts_that_are_no_tokens",
    # Networks of full size, and those that are downloaded.
    "drafters/test_full_size_heads.py": "",
    "drafters/test_eagle.py": r"\[deepseek-v4-odd",
    "drafters/test_dflash.py": r"past_its_pages",
    "engine/test_company.py": "",
    "test_default_configuration.py": "",
    "engine/test_real_greedy_equality.py": "",
    "lab/integrations/test_lm_eval.py": r"^test_(?!a_missing_package)",
    "lab/integrations/test_tunix.py": r"^test_rewards|^test_an_answer",
    "models/test_full_size.py": "",
    "models/test_qwen3_next.py": r"nine_billion|one_after_another\[(?!1\])",
    "models/test_nemotron_h.py": r"leave_every_state|one_after_another\[(?!1\])",
    "models/test_deepseek_v4.py": (
        r"pieces.*\[(?!deepseek-v4-odd-ratios\])|one_pass|greedy|in_the_goldens|other_offsets"
        r"|without_a_cache"
    ),
    "weights/test_packed_experts.py": r"full_size|an_engine",
    "models/test_real_gemma3.py": "",
    "models/test_real_target.py": "",
    # Engines of every drafter, kind of attention, K or size. Quick are drafters over full attention, and
    # EAGLE-3 over each.
    "attention/test_row_blocks.py": r"last_layer.*\[(?!full)",
    "engine/test_adaptive_k.py": r"\[(?!(full-)?eagle3)|that_run_out|whatever_k_comes_next",
    "engine/test_cache_dtype.py": "",
    "engine/test_constraints.py": (
        r"^test_drafters\[(?!ngram-greedy)|reported|several_steps|inspection_shows|of_their_own"
    ),
    "engine/test_clients.py": r"closes_what_it_was_given",
    "engine/test_choice.py": r"never_much.*\[(?!1-)",
    "engine/test_compiling.py": r"interrupted_program|interrupted_command.*first",
    "engine/test_meshes.py": r"two_devices|enter_under.*\[(?!explicit)|loaded_with.*\[(?!explicit)",
    "engine/test_compiled_programs.py": r"the_last_layer|every_cache.*\[(near|ngram|dspark)",
    "engine/test_distribution.py": r"\[(?!random eagle3)",
    "engine/test_exact_answers.py": r"^test_sampled_answers|chunks_and_being",
    "engine/test_drafter_state.py": r"\[(?!full)\w+(?<!-eagle3)\]$|\[(latent|compressed)",
    "engine/test_fresh_metadata.py": r"stays_behind_alone|\[(?!full)",
    "engine/test_greedy_equality.py": (
        r"test_drafting.*\[(?!.*-5)|sizes.*\[page_size|goldens|noise.*\[(?!.*eagle3)"
    ),
    "engine/test_grammars.py": (
        r"^test_drafters\[(?!ngram-greedy)|masked_logits|wait_until|host_drives|inspection_|of_their_own"
        r"|no_alternative|device_failed"
    ),
    "engine/test_heads_on_targets.py": "",
    "engine/test_compressed_engine.py": "",
    "engine/test_hybrids.py": r"plain_decoding|preempted.*\[(?!lfm2)",
    "engine/test_inspection.py": (
        r"at_the_end|every_step_leaves|those_of_the_compiled_loop|how_a_step_looks|from.*near|\[(ngram|dflash)"
    ),
    "engine/test_invariance.py": r"several_steps|\[(near|ngram)",
    "engine/test_lifecycle.py": r"waits_for_the_thread|holds_no_array",
    "engine/test_logprobs.py": (r"forward_pass\[recurrent|compiled_when_first|are_drawn|prompts_beside"),
    "engine/test_memory_mappings.py": r"a_full_process",
    "engine/test_locks.py": r"never_there|first_time",
    "engine/test_odd_grammars.py": "",
    "engine/test_pairs.py": (
        r"device|in_8_bits|exchange|on_shards|loop.*\[(?!full-eagle3)|\[(?!full|.*-eagle3\])"
    ),
    "engine/test_prefixes.py": r"true_or_false",
    "engine/test_program_sizes.py": r"every_size|\[(?!eagle3)|before_the_smaller|that_run_out_cost.*sampled",
    "engine/test_soak.py": "",
    "engine/test_states.py": (
        r"transformers\[(?!qwen3-5\])|whatever_k|how_work_is_cut|hardly.*\[(?!1-recurrent-mtp)"
        r"|copies_it\[(?!recurrent-mtp)|changes_nothing\[.*mamba|after_decoding.*\[mamba|draft_model_without"
        r"|refused\[recurrent|there_are_no_copies"
    ),
    "engine/test_scores.py": (
        r"transformers\[(?!llama-tied)|forward_pass\[(?!full|own)|no_update_comes|stream_meanwhile"
    ),
    "engine/test_waits.py": "",
    "grammar/test_grammar_texts.py": r"\b(smollm2|llama)\]$|explodes",
    # Several devices, each time in a process of their own.
    "engine/test_several_devices.py": "",
    "engine/test_weights.py": (
        r"^test_several_devices|twenty_updates|is_forgotten|while_weights_change|a_copy_of_the_targets|^test_a_mtp_layer|if_they_were_dequantized"
        r"|^test_names_are|in_flight_do_not"
    ),
    "models/test_model_loading.py": r"^test_heads_copied",
    "lab/test_bitwise.py": r"rounds_activations|paged_attention",
    "test_devices.py": r"runs_where_it_is_told|platform_that_is_not_there|every_process",
    "lab/training/test_trainer.py": "",
    "sampling/test_losslessness.py": r"joint.*(truncated|smaller|one-hot)|narrow|would_be_seen",
    "sampling/test_token_logprobs.py": r"rows_beside",
    "sampling/test_constrained_rows.py": r"parts_of_a_vocabulary|that_is_banned|saw_those_before",
    # Kernels: each once in quick, and all formats, paths and shapes here.
    "kernels/": r"any_company|any_layout|is_no_number",
    "kernels/test_coded_cache.py": r"codes_stand_for\[numba-K",
    "kernels/test_linear_recurrence.py": r"in_place\[numba-(Mamba-2, )?a wide",
    "kernels/test_gumbel_sample.py": r"heavy_tail",
    "kernels/test_expert_matmul_numba.py": r"every_path|mxfp4_of_a",
    "kernels/test_int8_matmul.py": r"those_beside_it|every_path.*\[(?!Q4_1)",
    "kernels/test_numba_call.py": r"where_it_is_told_not_to",
    "kernels/test_packed_attention.py": r"Gradients::test_equals.*\[(?!.*-odd sizes\])",
    "kernels/test_paged_attention_mosaic.py": r"lowered.*\[(?!8B)",
    "kernels/test_paged_attention_numba.py": r"out_of_the_cache",
    "weights/test_packed_cpu_experts.py": r"drafts_change|not_reach|of_their_own|beside_it|bfloat16|mxfp4",
    "weights/test_packed_weights.py": r"an_engine_gives|drafts_change",
    "models/test_quantized_targets.py": r"drafts_change",
    "wiring/test_serve_options.py": r"reaches_the_answer\[(?!max_new_tokens)",
    "wiring/test_request_options.py": r"that_was_asked_for\[(?!generate)|\[.*,|^test_every_sampling",
    "wiring/test_command_options.py": r"^test_every_sampling_option_of_(the_command|a_chat|a_batch)",
    # Whole programs, pages and notebooks.
    "notebooks/test_notebooks.py": "",
    "faults/test_faults.py": r"no_success",
    "scripts/test_example.py": "",
    "scripts/test_bench_acceptance.py": r"whatever_drafter|every_set",
    "scripts/test_bench_adaptive_k.py": "",
    "scripts/test_bench_extraction.py": r"what_it_times",
    "scripts/test_bench_load.py": r"^test_times|cannot_be_timed",
    "scripts/test_bench_shapes.py": "",
    "scripts/test_bench_logprobs.py": "",
    "scripts/test_bench_step.py": r"^test_times",
    "scripts/test_bench_training.py": r"throughput|a_profile",
    "scripts/test_compare_greedy.py": "",
    "scripts/test_compare_modes.py": "",
    "service/serve/test_http_answers.py": r"^test_(?!a_chat|a_stream$|several)",
    "service/serve/test_browser.py": "",
    "service/serve/test_gone.py": r"\[(?!1-True)|while_it_waits|while_programs|half_a_body|two_hundred|fifty",
    "service/serve/test_http_metrics.py": r"refused|is_seen",
    "service/serve/test_page.py": r"client_of|program_of|curl_of",
    "service/serve/test_process.py": r"come_to_their_end|without_time|not_waited_for",
    "service/serve/test_refusals.py": (
        r"bad_input.*\[(?!chat/completions-body0)|not_json|mistake|nested|web_pages|bodies"
    ),
    "service/serve/test_schema.py": r"is_a_500",
    "test_api.py": r"by_prompt_lookup|shorter_texts|large_parameters",
    "test_core.py": r"^test_(loading|a_grammar)",
    "test_docs.py": r"code_runs|site_builds",
    "test_extending.py": r"the_pages_run|its_own_chunk",
    "test_import_time.py": r"^test_registries_are_filled",
    "test_jax_settings.py": r"in_context|training|environment|compile_later|loaded_before|losslessness",
    "lab/test_lossless.py": r"never_rejected|\[600-different|prompt_is_checked|that_failed_are|without_room",
    "test_main.py": r"^test_a_reader_that_goes_away",
    "test_packaging.py": r"installation|distribution|environment",
    "test_types.py": r"sees_mistakes",
    # Training to the end.
    "lab/training/test_adapter.py": r"recovers|add_up|meanwhile|what_others|cannot_be_done|a_second_call",
    "lab/training/test_command.py": r"^(?!test_a_gain|test_options|test_sizes)",
    "lab/training/test_every_family.py": r"a_head_learns|\[(?!llama)",
    "lab/training/test_export.py": r"same_head|flags_survive|only_shared_leaves.*\[spec",
    "lab/training/test_hybrid_acceptance.py": "",
    "lab/training/test_loss.py": r"equal_those_of_whole_logits",
    "lab/training/test_pipeline.py": "",
    "lab/training/test_unroll.py": r"\[(?!safeailab)",
}
"""By file, or by folder for all files in it, what the names of its `whole` tests contain, as a regular
expression; "" for all of them."""


MANY_CASES = ("attention", "drafters", "engine", "kernels", "models", "sampling", "weights")
"""Folders of whose tests quick runs the first and the last case only."""
ALL_CASES = (
    "engine/test_distribution.py",
    "engine/test_pairs.py",
    "sampling/test_losslessness.py",
    "weights/test_finite.py",
)
"""Files in them of which quick runs every case, apart from those in `WHOLE`."""


def whole(tests: Iterable[tuple[str, str]]) -> Iterator[bool]:
    """For each test, by its file below this folder and its name with parameters, whether it is `whole`."""
    tests = list(tests)
    named = [
        any(key in WHOLE and re.search(WHOLE[key], name) for key in (file, file.partition("/")[0] + "/"))
        for file, name in tests
    ]
    last = {(file, name.split("[")[0]): i for i, (file, name) in enumerate(tests) if not named[i]}
    begun = set()
    for i, (file, name) in enumerate(tests):
        test = file, name.split("[")[0]
        is_between = test in begun and last.get(test) != i
        has_many_cases = file.partition("/")[0] in MANY_CASES and file not in ALL_CASES
        yield named[i] or (has_many_cases and is_between)
        if not named[i]:
            begun.add(test)
