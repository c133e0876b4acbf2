"""Defects on GPUs that were found without one: how each was found, and the test that holds it."""

from __future__ import annotations

from typing import NamedTuple

READ = "reading"
SIMULATED = "the simulated device"
COUNTED = "counting kernels"
ON_ACCELERATOR = "tests/distributed/test_accelerator.py"
ON_TRANSFORMER_ENGINE = "tests/distributed/test_transformer_engine.py"
INTERNALS = "tests/unit/internals"


class Defect(NamedTuple):
    """A defect that was mended.

    Attributes:
        what: the defect.
        source: how it was found.
        test: the file and the name of the test that notices it.
    """

    what: str
    source: str
    test: str


DEFECTS = (
    Defect(
        "The capture of a gathered edit made its rank wait for the device inside the pass",
        SIMULATED,
        f"{ON_ACCELERATOR}::test_host_waits",
    ),
    Defect(
        "Skipped edits, `dot` and edits with an index waited for a copy in each pass",
        f"{SIMULATED}, {READ}",
        f"{ON_ACCELERATOR}::test_host_waits",
    ),
    Defect(
        "One rank added the partial sums of all ranks on the CPU",
        READ,
        f"{ON_ACCELERATOR}::test_host_waits",
    ),
    Defect(
        "Each capture began its own copy to the host",
        READ,
        f"{INTERNALS}/test_device_copies.py::test_small_copies_begin_together",
    ),
    Defect(
        "Shared memory that was given back stayed registered with the driver",
        READ,
        f"{ON_ACCELERATOR}::test_registered_memory_is_what_is_shared",
    ),
    Defect(
        "A `cudaHostRegister` that the driver refused raised at the model's next kernel",
        READ,
        f"{INTERNALS}/test_device_copies.py::test_refused_memory_is_warned_of_once_and_leaves_no_error",
    ),
    Defect(
        "Copies of the first step's captures stayed on the device for the session",
        READ,
        f"{INTERNALS}/test_shared.py::test_every_layout_with_no_collective",
    ),
    Defect(
        "Captures of later pipeline stages passed through the memory of GPUs, all at once",
        READ,
        f"{ON_ACCELERATOR}::test_stages_whose_hosts_cannot_connect",
    ),
    Defect(
        "Hosts that could not connect were waited for as long as a collective, 30 minutes",
        READ,
        f"{INTERNALS}/test_collectives.py"
        "::test_a_host_that_does_not_connect_is_not_waited_for_as_long_as_a_collective",
    ),
    Defect(
        "Statistics took 54 kernels, and 333 bytes of traffic a value",
        COUNTED,
        f"{INTERNALS}/test_moments.py::test_kernels_and_traffic_of_a_device",
    ),
    Defect(
        "Histograms failed with `torch.use_deterministic_algorithms(True)`",
        READ,
        f"{INTERNALS}/test_moments.py::test_a_device_with_deterministic_algorithms",
    ),
    Defect(
        "The all-reduce of statistics stood in the device's queue before the next step's kernels",
        READ,
        f"{ON_ACCELERATOR}::test_results_are_those_of_the_cpu",
    ),
    Defect(
        "Writer threads waited for copies with the first device of the machine as their own",
        READ,
        f"{INTERNALS}/test_dump_writer.py::test_copies_from_a_device_wait_for_the_model_and_are_waited_for",
    ),
    Defect(
        "On each GPU the bytes of opening a dump, reading parameters and verifying grew with the job",
        READ,
        "tests/unit/test_scale.py::test_nothing_grows_with_the_ranks",
    ),
    Defect(
        "Comparisons of hooks left keys in the rendezvous store, and each step asked it",
        READ,
        "tests/unit/test_scale.py::test_keys_of_comparisons_are_deleted_and_steps_ask_nothing",
    ),
    Defect(
        "A rank waited 60 s for the others, less than the first step of a large job may take",
        READ,
        f"{INTERNALS}/test_agreement.py::test_ranks_wait_as_long_as_collectives_and_ten_minutes_at_least",
    ),
    Defect(
        "A dump's new folder had to be visible on all nodes within 5 s",
        READ,
        f"{INTERNALS}/test_dump_opening.py::test_a_folder_that_appears_late_is_waited_for",
    ),
    Defect(
        "Ranks that are a part of a job waited for the others, if the job is bound to a device "
        "(`init_process_group(device_id=...)`)",
        READ,
        f"{ON_ACCELERATOR}::test_members_alone_make_a_group_in_a_job_that_is_bound_to_a_device",
    ),
    Defect(
        "A backend named `cuda:nccl` was taken for one of the host",
        READ,
        f"{INTERNALS}/test_collectives.py::test_the_device_of_a_groups_tensors_whatever_its_backend_is_called",
    ),
    Defect(
        "Hooks inside a captured CUDA graph failed in the driver, and were silent in replays",
        READ,
        "tests/unit/test_captured_graphs.py::test_a_hook_in_a_captured_graph_is_an_error_at_once",
    ),
    Defect(
        "With `--fused-residual-rmsnorm` an edit before the norm changed the residual stream",
        READ,
        f"{ON_TRANSFORMER_ENGINE}::test_fused_operations",
    ),
    Defect(
        "Fused operations called copies of a session's hooks without tensors, after `restore()` too",
        READ,
        f"{ON_TRANSFORMER_ENGINE}::test_fused_operations_get_no_copy_of_a_sessions_hooks",
    ),
    Defect(
        "Tensors of 8 bits were taken for the dtype that they show",
        READ,
        f"{ON_TRANSFORMER_ENGINE}::test_tensors_of_8_bits_are_read_and_left_as_they_are",
    ),
    Defect(
        "The one weight of all experts (`--moe-single-grouped-weight`) had the layout of a dense one",
        READ,
        f"{ON_TRANSFORMER_ENGINE}::test_one_weight_of_all_experts_is_listed_and_not_read",
    ),
)
DECIDED = (
    "Ranks that wait at different places raise on all ranks, and NCCL keeps the collective that one of them "
    "had begun. The error of that rank says to restart the job.",
    "Backward passes run in a thread of the device. Layouts are followed in the call of the model alone, "
    "which has ended by then; `test_results_are_those_of_the_cpu` follows them in a recomputed model.",
    "With `--reuse-grad-buf-for-mxfp8-param-ag` parameters are gathered into the memory of gradients after "
    "the optimizer's step: read gradients before it, as everywhere.",
    "The host waits for the lengths of packed sequences once for each microbatch, and for the numbers of "
    "rows of experts: shapes on the host depend on them. `test_host_waits` counts these waits.",
    "Each rank of a stage that dumps anything writes one file or more for an iteration, so that the names of "
    "files say which iterations are complete. Ranks of other stages write none.",
    "Earlier runs of a dump are searched at its end, by one rank and after its last exchange.",
    "Where shared memory is small, as in a container, captures that do not fit are gathered. One warning "
    "names the size to give: `test_no_room_is_one_warning_and_right`.",
)
