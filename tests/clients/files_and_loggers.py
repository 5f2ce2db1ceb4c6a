"""The table of files and loggers: what tests show of each, and what is refused.

docs/files-and-loggers.md shows it. Each claim names the test that shows it, and the words of it
that are code stand in that test.
"""

from __future__ import annotations

from typing import NamedTuple

from tables import tried

CHROMIUM = "156.0"
"""The version that was tried; Debian has newer ones from time to time."""


class Claim(NamedTuple):
    """Some words, and the test that shows it: file::name, from the folder tests."""

    words: str
    test: str


class FileOrLogger(NamedTuple):
    """A kind of files, or a program that reads and writes them."""

    name: str
    package: str  # its version is in constraints.txt; "" for what is no package
    how: str
    works: tuple[Claim, ...]
    refused: tuple[Claim, ...]


SCALARS = "ops/test_scalars.py::test_"
METRICS = "ops/observe/test_metrics.py::test_"
LOGGERS = "clients/test_scalar_loggers.py::test_"
CLIENTS = "clients/test_metrics_clients.py::test_"
MODELS = "clients/test_hugging_face_checkpoints.py::test_"
PAGES = "clients/test_pages.py::test_"
EXPORT = "ops/interop/test_export_hugging_face.py::test_"
PRETRAINED = "checkpoint/test_pretrained.py::test_"
DCP = "ops/interop/test_dcp.py::test_"
TARGETS = f"{SCALARS}what_is_no_target_is_refused_before_training"

FILES_AND_LOGGERS = (
    FileOrLogger(
        "JSON lines: Python's `json`",
        "",
        '`Scalars(backend, ["jsonl:runs/a.jsonl"])`',
        (
            Claim(
                "each step once, however often a run resumes",
                f"{SCALARS}no_step_is_there_twice_however_often_a_run_resumes",
            ),
            Claim("`NaN`, `Infinity`", f"{SCALARS}nan_and_infinity_are_written_as_such"),
            Claim(
                "a full disk: a warning, and later records if there is room again",
                f"{SCALARS}a_full_disk_is_a_warning_once_and_training_goes_on",
            ),
        ),
        (
            Claim(
                "a file of anything else, which stays as it is: `cannot write`, with the line",
                f"{SCALARS}a_half_written_line_goes_and_a_foreign_file_stays",
            ),
        ),
    ),
    FileOrLogger(
        "TensorBoard",
        "tensorboard",
        '`Scalars(backend, ["tensorboard:runs/a"])`',
        (
            Claim(
                "`EventAccumulator` reads each step once, also of a run that resumed; NaN",
                f"{LOGGERS}tensorboards_event_accumulator_reads_each_step_once",
            ),
        ),
        (
            Claim(
                "a folder that cannot be made: a warning, and training goes on",
                f"{LOGGERS}what_cannot_be_written_is_a_warning_and_training_goes_on",
            ),
        ),
    ),
    FileOrLogger(
        "MLflow",
        "mlflow",
        '`Scalars(backend, ["mlflow:sqlite:///runs.db"])`',
        (
            Claim(
                "`MlflowClient` reads each step once, also of a run that resumed, in one run that "
                "is `FINISHED`; NaN",
                f"{LOGGERS}mlflows_client_reads_each_step_once_in_one_run",
            ),
        ),
        (Claim("`mlflow:` without a tracking URI", TARGETS),),
    ),
    FileOrLogger(
        "Weights & Biases",
        "wandb",
        '`Scalars(backend, ["wandb:offline"])`',
        (
            Claim(
                "the records in its `.wandb` files: a run for each start, all of one group; NaN",
                f"{LOGGERS}wandbs_files_have_a_run_for_each_start",
            ),
        ),
        (Claim("`wandb:somewhere`, which is neither offline nor online", TARGETS),),
    ),
    FileOrLogger(
        "Trackio",
        "trackio",
        '`Scalars(backend, ["trackio"])`',
        (
            Claim(
                "its database in `TRACKIO_DIR` has each step once, also of a run that resumed, in "
                "one run; NaN",
                f"{LOGGERS}trackios_database_has_each_step_once_in_one_run",
            ),
        ),
        (Claim("`trackio:here`: it takes no target", TARGETS),),
    ),
    FileOrLogger(
        "Prometheus",
        "prometheus-client",
        "`PHALANX_METRICS=9400`",
        (
            Claim(
                "`text_string_to_metric_families` reads each metric with its type, help and labels",
                f"{CLIENTS}prometheus_reads_the_text_as_it_was_meant",
            ),
            Claim(
                "scraped during a run, bytes sent by all are bytes received by all",
                f"{METRICS}bytes_sent_by_all_ranks_are_bytes_received_by_all",
            ),
        ),
        (
            Claim(
                "all but `GET` and `HEAD` of `/metrics`: 404, 405",
                f"{METRICS}only_metrics_can_be_read",
            ),
            Claim(
                "a taken port: a warning, and the rank trains",
                f"{METRICS}a_taken_port_is_a_warning_and_the_rank_goes_on",
            ),
        ),
    ),
    FileOrLogger(
        "OpenTelemetry",
        "opentelemetry-sdk",
        "`PHALANX_METRICS=otel`",
        (
            Claim(
                "a provider that the program sets up `before` it is a rank, or `after`; the "
                "numbers of a rank that has closed are not lost",
                f"{CLIENTS}opentelemetry_collects_the_numbers_of_the_moment",
            ),
        ),
        (Claim("another word, before a rank starts", f"{METRICS}a_wrong_value_is_refused"),),
    ),
    FileOrLogger(
        "safetensors",
        "safetensors",
        "`save_checkpoint`, `phalanx checkpoint export`",
        (
            Claim(
                "its tools read whole tensors under their names from a checkpoint of DDP",
                "checkpoint/test_checkpoint_files.py::"
                "test_plain_safetensors_tools_read_whole_tensors_under_their_names",
            ),
            Claim(
                "an export is the file that `save_file` writes, byte for byte",
                f"{EXPORT}the_file_is_the_one_that_the_library_writes",
            ),
        ),
        (
            Claim(
                "to export `complex128`, which the format lacks",
                f"{EXPORT}a_dtype_that_the_format_does_not_have_is_named",
            ),
            Claim(
                "headers that are not true, such as a tensor that `lies over another`",
                f"{PRETRAINED}a_hostile_header_is_refused",
            ),
        ),
    ),
    FileOrLogger(
        "Hugging Face",
        "transformers",
        '`phalanx checkpoint export runs/a out --format hf`, `load_pretrained("out", model)`',
        (
            Claim(
                "`AutoModelForCausalLM` `.from_pretrained` of what FSDP has saved gives the same "
                "logits, bit for bit: `gpt2`, `llama`, `tied_llama`, one file or shards",
                f"{MODELS}from_pretrained_gives_the_same_logits_bit_for_bit",
            ),
            Claim(
                "the tensors that `save_pretrained` writes, under their names",
                f"{MODELS}the_files_have_what_save_pretrained_writes",
            ),
            Claim(
                "what `save_pretrained` wrote, into FSDP on two ranks",
                f"{MODELS}what_save_pretrained_wrote_loads_into_fsdp_on_two_ranks",
            ),
        ),
        (
            Claim(
                "tensors that are missing, additional or of another shape: named, and nothing is "
                "changed on any rank",
                f"{PRETRAINED}what_does_not_fit_is_named_and_nothing_is_changed_on_any_rank",
            ),
        ),
    ),
    FileOrLogger(
        "torch's DCP",
        "torch",
        "`phalanx checkpoint export runs/a out --format dcp`, "
        "`phalanx checkpoint import x.dcp runs/b --trust-pickle`",
        (
            Claim(
                "torch reads model and optimizer of an export, bit for bit",
                f"{DCP}torch_loads_what_was_exported_bit_for_bit",
            ),
            Claim(
                "also on two ranks, and what these save is imported",
                "ops/interop/test_dcp_ranks.py::"
                "test_ranks_of_torch_read_an_export_and_an_import_reads_what_they_save",
            ),
            Claim(
                "an import loads on any number of ranks",
                f"{DCP}an_import_loads_on_any_number_of_ranks",
            ),
            Claim(
                "`SGD`, `Adam`, `AdamW`, `NAdam`, `Adafactor`, `RMSprop` are known by options",
                f"{DCP}the_optimizers_class_is_known_by_its_options",
            ),
        ),
        (
            Claim(
                "to read a pickle without `--trust-pickle`",
                f"{DCP}a_pickle_is_not_read_without_trust_and_the_error_says_why",
            ),
            Claim(
                "an optimizer's state that belongs to shards",
                f"{DCP}state_that_belongs_to_shards_is_named",
            ),
        ),
    ),
    FileOrLogger(
        "torchdata's StatefulDataLoader",
        "torchdata",
        "`save_checkpoint(..., own=loader.state_dict())`",
        (
            Claim(
                "two workers a rank, killed in the middle of an epoch: no sample is lost or seen "
                "twice",
                "clients/test_stateful_data_loader.py::"
                "test_an_epoch_that_is_killed_goes_on_without_a_sample_lost_or_seen_twice",
            ),
            Claim(
                "`BatchSampler`: an epoch goes on by its own state on another number of ranks",
                "clients/test_stateful_data_loader.py::"
                "test_a_batch_sampler_goes_on_in_it_on_another_number_of_ranks",
            ),
        ),
        (
            Claim(
                "values that are no data, such as a `set`: named with rank and place",
                "checkpoint/test_checkpoint_own.py::"
                "test_a_value_that_cannot_be_kept_names_rank_and_part_and_nothing_is_written",
            ),
        ),
    ),
    FileOrLogger(
        f"Chromium {CHROMIUM} (Debian), driven by Playwright",
        "playwright",
        "`phalanx watch --web`, `phalanx trace --html`",
        (
            Claim(
                "the page of a job at `2` and at `64` ranks",
                f"{PAGES}the_page_says_what_each_rank_does_and_which_is_slowest",
            ),
            Claim(
                "a rank that is slow, then stopped, then killed",
                f"{PAGES}a_rank_that_is_slow_then_stopped_then_killed_is_on_the_page",
            ),
            Claim("the keyboard", f"{PAGES}a_keyboard_reaches_and_does_everything"),
            Claim(
                "the keyboard, in a trace",
                f"{PAGES}a_keyboard_sorts_the_tables_of_a_trace_and_moves_through_its_picture",
            ),
            Claim(
                "contrast of at least `4.5`, `light` and `dark`",
                f"{PAGES}every_text_of_the_page_stands_out",
            ),
            Claim(
                "the page of a trace names the culprit, `light` and `dark`",
                f"{PAGES}the_page_of_its_trace_names_the_culprit_and_stands_out",
            ),
        ),
        (
            Claim(
                "an address without its word: `403`",
                "ops/observe/test_watch_web.py::test_without_the_word_everything_is_forbidden",
            ),
            Claim(
                "names of ranks, lines and errors that are HTML: they are shown as text",
                f"{PAGES}names_lines_and_reasons_are_text_whatever_is_in_them",
            ),
        ),
    ),
)


def cells(row: FileOrLogger) -> tuple[str, ...]:
    """Its row of the table."""
    name = tried(row.name, row.package) if row.package else row.name
    works, refused = (
        "; ".join(claim.words for claim in claims) for claims in (row.works, row.refused)
    )
    return name, row.how, works, refused
