"""Which tests are in which tier.

- `scripts/test` (pytest --quick): every kind of claim, and every module of the package executed.
- `scripts/test --all`: everything but what is marked `product`.
- `scripts/dev/coverage_matrix` (pytest --product): the full product of configurations and edits besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# The tests that a run has collected, before any option narrowed them.
COLLECTED = pytest.StashKey[list[pytest.Item]]()

# Tests of --product alone, by file: minutes for which a shorter test beside them stands (200 kills of
# Megatron's own ranks).
PRODUCT = {
    "test_dump_crash.py": ("test_killed_ranks_leave_no_torn_iteration_and_lose_none",),
    "test_analyses.py": ("test_analyses_of_a_model_that_they_train",),
    "test_memory.py": ("test_memory_is_flat_over_many_forwards[1000]",),
}

# Of tests/unit, what takes longer than others: the site of the documents, damaged dumps, tools of ours.
NOT_QUICK = (
    "test_site.py",
    "test_dump_damage.py",
    "test_dump_bombs.py",
    "test_mutate.py",
    "test_gpu_command.py",
    "test_design.py",
)

# Of all folders but tests/unit and its internals, which are quick but for these files. A file with no names
# is quick as a whole too; a name without brackets stands for all its parameters.
QUICK: dict[str, tuple[str, ...]] = {
    # Facts about the frameworks.
    "test_flags.py": (),
    "test_argument_census.py": (),
    "test_models.py": (  # in tests/contract and in tests/distributed
        *("test_scans_pack_their_projections_rank_by_rank", "test_mamba[M*|-M tp2 pp2]"),
        *("test_bert[bert tp2 pp2]", "test_families[mimo tp2 sp]", "test_families[t5 tp2 sp]"),
    ),
    "test_holders.py": (),
    "test_wrappers.py": (),
    "test_megatron_core.py": (),
    "test_megatron_moe.py": (),
    "test_cpu_megatron.py": ("test_what_is_imported_meanwhile_is_put_right",),
    # Every site kind of a TP2 x PP2 x SP model, of experts and of the other layers: values, gradients, edits.
    "test_matrix.py": ("test_gpt_on_every_version[tp2 sp pp2]", "test_gpt_on_every_version[cp2 tp2 sp]"),
    "test_moe.py": ("test_experts_on_every_version", "test_collectives_of_a_hook"),
    "test_gpt_names.py": ("test_a_name_that_a_gpt_model_would_not_have",),
    "test_latent.py": ("test_latent_attention[mla tp2, up projections recomputed]",),
    "test_random_cases.py": ("test_what_is_raised_is_a_failure", "test_nothing_compared_is_no_pass"),
    # Hooks, edits and what they share.
    "test_pool.py": (),
    "test_accelerator.py": (
        *("test_the_rules_of_nccl", "test_host_waits[gathered edit]", "test_host_waits[read]"),
        *("test_results_are_those_of_the_cpu[gathered edit]", "test_results_are_those_of_the_cpu[read]"),
    ),
    "test_hooks.py": (
        *("test_restore_leaves_nothing[tp2 sp]", "test_what_each_hook_sends"),
        *("test_gathering_is_bitwise", "test_names_do_not_show_wrappers_and_their_state_dicts_load"),
        "test_several_hooks_one_stream_of_random_numbers_and_edited_gradients",
    ),
    "test_idle.py": ("test_modules_are_as_they_were_but_where_a_hook_is[tp2 sp]",),
    "test_groups.py": (),
    "test_cuts.py": (
        "test_gradients_upstream_of_a_cut_are_zero[tp2 pp2-decoder.layers.2-replicated]",
        *("test_one_rank_that_cuts_does_not_leave_others_waiting", "test_plain_modules"),
        "test_a_function_of_the_models_own_that_gives_no_gradient",
    ),
    "test_skipped_steps.py": (
        "test_unequal_numbers_of_steps[plain-read-leaves one out]",
        "test_parts_of_different_shapes",
    ),
    "internals/test_rank_agreement.py": (
        *("test_exchanges_that_do_not_fit", "test_a_rank_that_does_not_come"),
    ),
    "test_direct_calls.py": ("test_an_inference_wrapper", "test_a_backward_pass_after_its_step"),
    "test_errors.py": ("test_what_goes_wrong_in_a_step_is_raised_by_all_ranks_at_its_end",),
    "test_tap_order.py": (
        *("test_sites_of_a_dense_model[tp2 sp-backwards]", "test_a_tensor_counted_from_both_ends"),
    ),
    "internals/test_kept_errors.py": ("test_one_kind_on_some_ranks[a rule of one rank]",),
    "test_packed.py": (
        *("test_packed_sequences[packed mla tp2]", "test_sequences_one_by_one[packed cp2 tp2 sp]"),
        "test_a_packed_dump_reads_as_an_unpacked_one[packed pp2]",
    ),
    "test_edits.py": (
        "test_presets_equal_their_formulas_on_one_process[tp2 sp-False-replicated]",
        "test_presets_on_plain_modules",
    ),
    "test_local.py": ("test_edits_on_parts_equal_their_formulas_on_one_process",),
    "test_linear_edits.py": ("test_as_on_one_process[tp2 sp]",),
    "test_function_agreement.py": ("test_which_ranks_differ",),
    "test_run_once.py": ("test_an_edit_that_would_differ_between_ranks",),
    "test_context.py": ("test_shared_values_are_those_of_one_process[pp2]",),
    "internals/test_context_relay.py": ("test_a_message_left_behind_is_not_taken_for_another",),
    "test_skipping.py": ("test_rows_of_an_expert", "test_values_of_on_error"),
    "test_selecting.py": ("test_every_kind_is_what_one_process_has[tp2 sp]",),
    "test_gradients.py": ("test_gradients_on_the_scale_of_the_loss[tp2 sp, scaled-1024.0-pair]",),
    "test_trainable.py": (
        *("test_training_equals_one_process[tp2 sp pp2, once-how8]", "test_what_is_refused"),
        "test_freezing_under_megatrons_wrappers[dp2, overlapped-ddp1]",
    ),
    "test_parameters.py": (
        *("test_every_weight_on_every_version[tp2 sp pp2]", "test_a_parameter_that_some_ranks_own"),
    ),
    "test_huggingface_weights.py": (
        *("test_logits_and_bits[tp2 pp2-gpt2]", "test_models_in_memory[leader]", "test_the_page_runs"),
        "test_bad_input_is_named_on_all_ranks_and_changes_nothing",
    ),
    "test_verify.py": (
        "test_a_tap_that_fires_twice",
        "test_a_shard_that_drifted_apart_over_data_parallel_ranks",
        "test_a_sound_run_of_another_model_has_no_findings[prediction tp2 pp2]",
    ),
    "test_verify_copies.py": (
        *(
            "test_copies_over_data_parallel_ranks[plain-all]",
            "test_copies_over_data_parallel_ranks[plain-own]",
        ),
    ),
    "test_understanding.py": (
        *("test_edits_in_place_are_edits_like_others[replicated]", "test_what_is_said_at_registration"),
    ),
    "test_debugging.py": ("test_a_line_for_each_firing_on_each_rank",),
    "internals/test_gather_plans.py": ("test_what_is_sent_is_what_was_planned[tp2 sp-once-forward]",),
    "internals/test_collectives.py": (),
    "internals/test_routes.py": (),
    "internals/test_shards.py": ("test_on_shards_as_on_the_whole[2-2]",),
    "internals/test_coalescing.py": (),
    "internals/test_shared.py": ("test_every_layout_with_no_collective", "test_two_nodes"),
    "test_data_parallel.py": ("test_replicas_may_have_different_numbers_of_samples",),
    "test_vocabulary.py": ("test_padding_is_kept_aside[the whole]",),
    # Dumps, comparison, statistics, figures, pages.
    "test_dumps.py": (
        *("test_a_dump_is_what_one_process_has[tp2 sp pp2 dp2]", "test_dumping_changes_no_bit[tp2 sp]"),
    ),
    "test_dump_experts.py": ("test_what_is_kept_of_experts[moe dp2 ep2, some of it]",),
    "test_dump_parameters.py": ("test_parameters_and_their_gradients[split experts, distributed]",),
    "test_dump_taking.py": ("test_nothing_is_communicated[tp2 pp2]", "test_the_life_of_dumps"),
    "test_dump_selection.py": ("test_only_what_is_selected_is_written[tp2 sp]",),
    "test_compare_bugs.py": (
        *("test_bug_is_found_and_localised[wrong zigzag order]", "test_right_run_raises_no_alarm[tp2 sp]"),
    ),
    "test_statistics.py": ("test_of_many_ranks_maxima_go_by_themselves",),
    "test_figures.py": ("test_norms", "test_heat"),
    "test_page.py": ("test_one_replica_writes",),
    "test_show.py": (),
    "test_hook_estimate.py": (
        *("test_counted_is_what_the_estimate_says[tp2 sp]", "test_a_live_model_says_what_its_dump_writes"),
    ),
    "test_dump_estimate.py": ("test_estimate_of_gpt[tp2 sp pp2 dp2]", "test_estimate_of_experts[ep2 dp2]"),
    "test_lens.py": (
        "test_a_cache_has_what_one_process_has[tp2 sp pp2]",
        "test_decompositions_sum_to_what_one_process_has[tp2 sp pp2]",
    ),
    "test_lens_use.py": ("test_names_choose_what_is_kept",),
    "test_huggingface_lens.py": (
        "test_the_cache_is_transformer_lens_cache[llama]",
        "test_an_edit_at_each_name_does_the_same[llama]",
    ),
    "test_transformer_lens.py": ("test_what_is_computed_from_the_cache_is_the_same[gpt2]",),
    "test_switching.py": ("test_a_file_that_changes_while_a_model_trains",),
    # Each framework once, and the predecessor's interface.
    "test_same_hooks.py": (),
    "test_accelerate.py": ("test_prepared[DDP]",),
    "test_ddp.py": (
        "test_a_wrapper_over_some_ranks",
        "test_gradients_that_a_communication_hook_reduces[averages in subgroups-1e-05-False]",
    ),
    "test_fsdp.py": ("test_replicas_gathered",),
    "test_dtensor_inside.py": ("test_inside_of_linears[True]", "test_placements", "test_uneven_parts"),
    "test_device_mesh.py": (),
    "test_device_map.py": (),
    "test_pipelining.py": (
        "test_schedules[pp2 1F1B-2-1F1B-2-1]",
        "test_what_edits_share_goes_from_stage_to_stage[GPipe-1-False]",
    ),
    "test_deepspeed.py": ("test_zero[3]", "test_pipeline[2-0]"),
    "test_fairscale.py": ("test_matrix[mp2 dp2, DDP]", "test_inside[False]"),
    "test_fairscale_pipe.py": ("test_matrix[True-never]",),
    "test_fairscale_sharded_ddp.py": (
        *("test_matrix[ShardedDataParallel dp2, without buckets]", "test_gradients_that_are_not_averaged"),
        "test_wrappers_that_do_not_fit",
    ),
    "test_refusals.py": (),
    "test_transformers_tp.py": ("test_plan[sdpa]",),
    "test_following.py": ("test_the_model[2]", "test_inside_attention"),
    "test_plain.py": (
        "test_tensors_cut_by_hand_equal_those_of_one_process[2-2]",
        "test_wrapping_often_makes_groups_once",
    ),
    "test_unknown_layers.py": (
        *("test_a_shard_without_a_shape_is_an_error_on_all_ranks[2-2]", "test_zeros_prove_nothing"),
        "test_parallel_modules_in_a_model_that_is_not_known[block]",
    ),
    "test_bridge.py": (),
    "test_compat.py": (
        "test_registered_hooks_read_the_whole[register_forward_hook-tp2 sp pp2]",
        "test_registered_hooks_read_the_whole[register_full_backward_hook-tp2 sp]",
        "test_registered_hooks_edit_the_whole[register_forward_hook-tp2 sp]",
    ),
    "test_compat_groups.py": (),
    "test_compat_distributed.py": ("test_initialize_distributed_state", "test_all_gather"),
    "test_compat_demos.py": (),
    # Alignment with a Hugging Face model.
    "test_align.py": (
        *("test_planted_faults_are_found_and_named", "test_a_difference_in_the_loss_shows_in_gradients"),
        "test_bad_input_is_one_line_on_all_ranks",
    ),
    "test_isolated_step.py": ("test_the_recipe_of_the_page",),
    # As people run it.
    "test_docs.py": ("test_the_page_on_features_runs", "test_the_page_on_dumps_runs"),
    "test_examples.py": ("test_wrong_examples_are_noticed",),
    "test_runner.py": (
        "test_sites_and_plans",
        "test_install_and_uninstall",
        "test_bad_input_that_the_model_shows",
    ),
    "test_quickstart.py": (
        *("test_training_is_dumped", "test_a_page_is_written_and_named", "test_every_site_and_loss_agrees"),
        *("test_a_site_a_rank_and_a_layer_of_its_page_are_shown", "test_loss_falls_and_edits_change_it"),
    ),
    "test_pages.py": ("test_a_page_opens_quietly_and_can_be_read[quick-light]",),
}

# Files that take more than a minute and a half on two cores that others use too: they begin first.
LONG: tuple[str, ...] = (
    *("test_compare_bugs.py", "test_matrix.py", "test_moe.py", "test_models.py", "test_align.py"),
    *("test_packed.py", "test_random_cases.py", "test_dump_experts.py", "test_accelerator.py"),
    *("test_hook_estimate.py", "test_align_dumps.py", "test_dumps.py", "test_context.py", "test_docs.py"),
    *("test_runner.py", "test_quickstart.py", "test_pretrain_tiny.py", "test_patched.py"),
    *("test_fairscale.py", "test_parameters.py", "test_cpu_megatron.py"),
)


def is_product(file: str, name: str) -> bool:
    """Whether a test is run in the full product only."""
    return name in PRODUCT.get(file, ())


def is_quick(item: Any) -> bool:
    """Whether a test is in the selection of scripts/test."""
    key, folder = _key(item.path), item.path.parent
    if "unit" in (folder.name, folder.parent.name) and key not in QUICK:
        return item.path.name not in NOT_QUICK
    names = QUICK.get(key)
    return names is not None and (not names or item.name in names or item.name.partition("[")[0] in names)


def _key(path: Path) -> str:
    """The name of a file in `QUICK`: files of internals have the names of others."""
    return f"internals/{path.name}" if path.parent.name == "internals" else path.name


def unknown(items: Iterable[Any]) -> list[str]:
    """What `QUICK` says of the files of these tests, and is not a test of theirs.

    Files of tests/unit do not count; of files of one name in several folders all must be there.
    """
    names: dict[str, set[str]] = {}
    paths: dict[str, set[Path]] = {}
    for item in items:
        if item.path.parent.name != "unit":
            names.setdefault(_key(item.path), set()).update((item.name, item.name.partition("[")[0]))
            paths.setdefault(_key(item.path), set()).add(item.path)
    unknown = []
    for file, quick in QUICK.items():
        collected = paths.get(file, set())
        siblings = {p for c in collected for p in c.parents[1].glob(f"*/{file}") if p.parent.name != "unit"}
        if collected and siblings <= collected:
            unknown += [f"{file}: {name}" for name in set(quick) - names[file]]
    return unknown
