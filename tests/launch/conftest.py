"""What costs a start of Python and torch on several ranks, and says little more than its neighbour."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

# Run with --long only; the first of each kind stays.
LONG = (
    "test_bench.py::test_a_program_that_cannot_be_measured_is_named_with_the_end_of_its_output[[]program0-*",
    "test_bench.py::test_fusion_is_measured_beside_one_call_each",
    "test_bench.py::test_mistakes_are_said_before_anything_is_measured[[]args[1-5]*",
    "test_bench.py::test_overlap_wants_several_hosts",
    "test_bench.py::test_strategies_are_compared_by_the_loss_on_text_and_keep_what_they_have",
    "test_elastic.py::*[[]own copies]",
    "test_elastic.py::test_lost_ranks_are_replaced[[]shared parameters]",
    "test_elastic.py::test_new_ranks_that_come_too_late_are_gone_on_without_and_end",
    "test_elastic.py::test_two_losses_leave_the_curve_of_the_remaining_ranks[[]shared parameters]",
    "test_gpu_check.py::test_a_check_fails_with_its_fault[[]group-timeout]",
    "test_horovod_jobs.py::test_who_waits_for_a_rank_at_its_end_is_told[[]2]",
    "test_horovod_programs.py::*[[]changed]",
    "test_horovod_programs.py::test_benchmark_says_its_rates_once[[]unchanged]",
    "test_info.py::test_one_report_covers_the_job[[]None]",
    "test_info.py::test_without_an_mpi_library_it_says_so_and_how_to_get_one[[]2]",
    "test_job_end.py::test_a_clean_end_is_silent[[]1-mpisgd.shutdown()]",
    "test_job_end.py::test_a_clean_end_is_silent[[]2-]",
    "test_job_end.py::test_a_clean_end_is_silent[[]None-]",
    "test_job_end.py::test_a_group_whose_rank_did_not_come_refuses_from_then_on",
    "test_job_end.py::test_a_job_error_in_a_world_of_one[[]1]",
    "test_job_end.py::test_a_job_error_is_one_line[[]True]",
    "test_job_end.py::test_a_rank_that_exits_early_ends_the_others_with_an_error_that_says_so[[]0-None]",
    "test_job_end.py::test_an_exception_on_one_rank_ends_the_job_with_its_traceback_once[[]2]",
    "test_left_memory.py::test_nobody_writes_into_the_memory_of_a_rank_that_has_left",
    "test_others_suites.py::test_the_short_form_passes[[]accelerate]",
    "test_program.py::test_a_program_runs[[]None]",
    "test_program.py::test_help_appears_once[[]None]",
    "test_program.py::test_what_every_rank_meets_is_said_once[[]args[12]*",
    "test_program.py::test_what_one_rank_meets_ends_the_job_and_is_said_once[[]2]",
    "test_rpc.py::test_a_long_call_is_reported_and_no_deadlock_is_seen_in_it",
    "test_rpc.py::test_ranks_that_wait_for_each_other_are_told_so",
    "test_rpc.py::test_the_split_rnn_learns",
    "test_rpc.py::test_too_few_ranks_are_one_line[[]rpc_parameter_server]",
    "test_run.py::test_usage_errors_and_preemption_are_final_and_so_is_the_last_failure[[]85*",
    "test_run.py::test_users_mistakes_are_one_line[[]args[123]*",
    "test_sharded_memory.py::test_a_rank_takes_what_was_predicted[[]Sharded(stage=1)]",
    "test_thread_levels.py::*[[]single]",
    "test_torch_backend.py::test_a_group_that_timed_out_and_was_destroyed_ends_cleanly[[]1]",
    "test_train.py::test_a_damaged_checkpoint_is_passed_over",
    "test_train.py::test_a_folder_that_cannot_be_written_is_refused",
    "test_train.py::test_batch_larger_than_the_data_is_refused",
    "test_train.py::test_batch_smaller_than_the_rank_count_is_refused",
    "test_train.py::test_batch_that_does_not_divide_is_refused",
    "test_train.py::test_damaged_data_is_refused",
    "test_train.py::test_every_number_of_ranks_gives_the_same_curve[[]float32-*-[23]]",
    "test_train.py::test_every_number_of_ranks_gives_the_same_curve[[]float64-*-4]",
    "test_train.py::test_every_number_of_ranks_gives_the_same_curve[[]float64-*-[23]]",
    "test_train.py::test_mistyped_option_is_refused_once[[]2]",
    "test_train.py::test_mistyped_option_is_refused_once[[]None]",
    "test_train.py::test_unknown_kind_of_plot_is_refused_before_training",
    "test_train.py::test_without_communication_the_curves_differ[[]?]",
    "test_train_text.py::test_a_layer_dropping_that_cannot_be_is_refused",
    "test_train_text.py::test_a_part_of_a_rank_that_is_missing_is_refused",
    "test_train_text.py::test_a_strategy_for_a_divided_model_is_refused_once",
    "test_train_text.py::test_bf16_is_used_and_learns[[]bf16 alone]",
    "test_train_text.py::test_bf16_is_used_and_learns[[]bf16 dp=2]",
    "test_train_text.py::test_bf16_is_used_and_learns[[]bf16 layout]",
    "test_train_text.py::test_bf16_is_used_and_learns[[]bf16 tp=2]",
    "test_train_text.py::test_bf16_is_used_and_learns[[]bf16 zero 3]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]*to alone]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]*to zero 1]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]?p=2]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]accumulation]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]activation checkpointing]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]dp=2,pp=2]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]dp=2,tp=2 zero 3]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]gpipe]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]layout]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]pp=2 with*",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]tp=2,pp=2]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]zero 1 to gpipe]",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]zero 3 with*",
    "test_train_text.py::test_every_layout_gives_the_curve_of_one_process[[]zero [13]]",
    "test_train_text.py::test_older_weights_give_a_curve_of_their_own[[]2bw]",
    "test_train_text.py::test_others_go_on_from_the_common_model[[]LocalSGD to DiLoCo]",
    "test_train_text.py::test_the_same_layers_are_dropped_in_every_layout_and_after_a_restart",
    "test_tune.py::test_a_named_profile_that_is_not_there_ends_the_job",
    "test_tune.py::test_mistakes_are_said_once_and_in_one_line[[]args[12]*",
    "test_tutorial.py::test_training_programs_learn[[]parameter_server]",
    "test_waiting_ranks.py::test_the_making_of_a_group_has_the_limit_too",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, where they are among what was collected."""
    for item in items:
        name = item.nodeid.rpartition("tests/launch/")[2]
        if any(fnmatchcase(name, pattern) for pattern in LONG):
            item.add_marker(pytest.mark.long)
