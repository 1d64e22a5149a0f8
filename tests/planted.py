"""Faults that are planted in zckpt, one in each room and in each family of layouts, and the tests of that room that must find it.

    python planted.py [ROOM ..]

Imports torch once, and forks for each fault: there the module is made of changed text, and only the tests beside the fault run.
All of these tests run once without a fault, too. Says a JSON object: fault -> what pytest ended with.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from temporary import use_memory

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A text of a module, which is there once, what it becomes, and the tests that find it.

    Attributes:
        room: a package of zckpt.
        module: its file, below the room.
        tests: below `tests`, separated by spaces.
    """

    room: str
    module: str
    right: str
    wrong: str
    tests: str

    @property
    def path(self) -> Path:
        """Where the text is."""
        return ROOT / "zckpt" / self.room / self.module

    @property
    def text(self) -> str:
        """The module's text with the fault."""
        return self.path.read_text().replace(self.right, self.wrong)


FAULTS = (
    Fault("base", "words.py", "noun if number == 1", "noun if number <= 1", "base/test_words.py"),
    Fault(
        "core", "overlaps.py", "low = max(shift, neighbour * a.pitch)", "low = max(0, neighbour * a.pitch)",
        "core/test_plan.py",
    ),
    Fault("storage", "fsync_queue.py", '"F_FULLFSYNC"', '"F_FULLSYNC"', "storage/test_fsync_queue.py"),
    Fault(
        "engine", "rounding.py", "((rest == half) & (whole % 2 == 1))", "(rest == half)",
        "engine/test_casts.py::test_every_double_beside_every_half",
    ),
    Fault(
        "team", "together.py", '"SLURM_STEP_NUM_TASKS" in environ', '"SLURM_STEP_ID" not in environ',
        "team/test_together.py::test_ranks_that_launchers_give",
    ),
    Fault("output", "manifest.py", "int(crc, 16)", "int(crc, 16) + 1", "output/test_manifest.py::test_round_trip"),
    Fault(
        "containers", "safetensors_file.py", "if end < file.size:", "if end > file.size:",
        "containers/test_safetensors_file.py::test_as_strict_as_the_reference",
    ),
    Fault(
        "layouts/dcp", "chunks.py", "numbers[:dims], numbers[dims:]", "numbers[dims:], numbers[:dims]",
        "layouts/test_dcp.py::test_roles_and_steps",
    ),
    Fault(
        "layouts/fairscale", "read.py", "rank.tensor(key).numel - rank.params[key].padding", "rank.tensor(key).numel",
        "layouts/test_fairscale.py::test_weights_roles_and_states",
    ),
    Fault(
        "layouts/fsdp", "read.py", "(*box, refs[number][1])", "(*box, refs[0][1])",
        "layouts/test_ranks.py::test_copies_that_differ_are_found",
    ),
    Fault(
        "layouts/gguf", "read.py", "range(1, counts.pop() + 1)", "range(3, counts.pop() + 1)",
        "jobs/test_to_gguf.py::test_parts_are_as_gguf_split_makes_them",
    ),
    Fault(
        "layouts/joining", "slices.py", "Block(before * inner,", "Block(offset * inner,",
        "layouts/test_model_parallel.py::test_stacked_parts_of_any_width_are_where_torch_puts_them",
    ),
    Fault(
        "layouts/megatron_core", "read.py", "offsets.insert(0, index * extent)", "offsets.insert(0, 0)",
        "layouts/test_megatron_core.py::test_weights_are_the_live_models",
    ),
    Fault(
        "layouts/megatron_legacy", "files.py", "number // (world // split.pp)", "number % (world // split.pp)",
        "layouts/test_megatron_legacy.py::test_every_bit",
    ),
    Fault(
        "layouts/moe", "experts.py", "range(rank, world_size, ep)", "range(rank, world_size, size)",
        "layouts/test_moe.py::test_ranks_that_share_experts_are_those_of_deepspeed",
    ),
    Fault(
        "layouts/weights_alone", "nanotron.py", "one.ref.box([start for start, _ in own]", "one.ref.box([0 for _ in own]",
        "layouts/test_nanotron.py::test_every_element",
    ),
    Fault(
        "layouts/weights_alone", "zarr.py", "-(-extent // own)", "extent // own",
        "layouts/test_orbax.py::test_chunks_in_chunks",
    ),
    Fault(
        "layouts/weights_alone", "sliced.py", "0 if shapes[0][1] == params.dim else 1", "0 if shapes[0][0] == params.dim else 1",
        "layouts/test_sliced.py",
    ),
    Fault("containers", "ocdbt.py", "node.prefix + key[:begin]", "key[:begin]", "layouts/test_orbax.py::test_keys_of_deep_trees"),
    Fault(
        "layouts/numbered", "read.py", "key=lambda at: -math.prod(shapes[at])", "key=lambda at: math.prod(shapes[at])",
        "layouts/test_numbered.py::test_states_have_names",
    ),
    Fault(
        "layouts/parallel", "read.py", "tp_rank = rank % self.topology.tp", "tp_rank = rank // self.topology.tp",
        "layouts/test_model_parallel.py::test_down_to_plain_data_parallelism",
    ),
    Fault(
        "layouts/plain", "files.py", "if file not in named]", "if file in named[1:]]",
        "layouts/test_parts.py::test_an_index_that_leaves_out_a_shard_beside_it",
    ),
    Fault(
        "layouts/run", "agreement.py", 'step_of(place.get("step"))) is not None', 'step_of(place.get("step"))) is None',
        "layouts/test_agreement.py::test_slices_of_different_steps",
    ),
    Fault(
        "layouts/save", "cut_tensors.py", "-(-local[dim] // extents[mesh_dim])", "local[dim] // extents[mesh_dim]",
        "layouts/test_ranks.py::test_boxes_are_torchs",
    ),
    Fault(
        "layouts/torch_checkpointing", "read.py", "max((rank + 1 for places", "max((rank for places",
        "layouts/test_torch_checkpointing.py::test_missing_files_are_named",
    ),
    Fault(
        "layouts/weights_alone", "sliced.py", "before += 1 + max(", "before += max(",
        "layouts/test_sliced.py::test_archives_of_nemo_are_read_in_place",
    ),
    Fault(
        "layouts/weights_alone", "xla.py", "(low - number * size) * part", "(low - number) * part",
        "layouts/test_torch_xla.py::test_every_element",
    ),
    Fault(
        "layouts/universal", "read.py", "own[1:] != shape[1:]", "own[2:] != shape[2:]",
        "jobs/test_to_universal.py::test_a_tensor_of_another_shape_is_refused",
    ),
    Fault(
        "layouts/zero", "partition.py", "range(min(rank * size, numel)", "range(min(rank * size + 1, numel)",
        "layouts/test_zero.py::test_partitions_cover_a_parameter_once",
    ),
    Fault(
        "naming", "rows.py", "(head * 2 + second) * half * width,", "(head + 2 * second) * half * width,",
        "naming/test_schemes.py::test_each_word_of_a_rule",
    ),
    Fault(
        "quantized", "forms.py", "return shapes[0] == (*shapes[1], 16)", "return shapes[0] == (*shapes[1], 8)",
        "quantized/test_packed.py::test_forms_without_a_config",
    ),
    Fault(
        "deltas", "encode.py", "(found + self._at).astype", "(found + 1).astype",
        "deltas/test_delta.py::test_a_delta_holds_what_changed",
    ),
    Fault("jobs", "selection.py", 'return f"{part}."', "return part", "jobs/test_selection.py::test_what_wraps_all_names"),
    Fault("checks", "verdict.py", "return not self.problems", "return True", "checks/test_verdicts.py"),
    Fault(
        "live", "assignment.py", "(load + offer.part.numel * offer.part.dtype.itemsize, busy[0][1])", "(load, busy[0][1])",
        "live/test_assignment.py",
    ),
    Fault(
        "hub", "privacy.py", "found := re.search(pattern, data)", "found := re.match(pattern, data)",
        "hub/test_privacy.py::test_secrets_are_found_in_files_of_every_kind",
    ),
    Fault(
        "upkeep", "keep_rules.py", "save.step % rules.every == 0", "save.step % rules.every == 1",
        "upkeep/test_prune.py::test_rules",
    ),
    Fault(
        "pictures", "histogram.py", "distance(low + self.step)", "distance(low)",
        "pictures/test_differences.py",
    ),
    Fault(
        "estimation", "sizes.py", "for one in self.parameters if one.trained)", "for one in self.parameters)",
        "estimation/test_sizes.py::test_a_checkpoint_says_what_is_frozen",
    ),
    Fault("cli", "desk.py", 'f"note: {note}"', "note", "cli/test_cli.py::test_notes_follow_an_error_and_secrets_do_not_show"),
    Fault("runtime", "saves/publication.py", "_MOST_BYTES = 255", "_MOST_BYTES = 256", "runtime/test_tags.py"),
)  # fmt: skip


class Planted(SourceFileLoader):
    """Makes one module of another text than its file has."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec")


class Planter:
    """Finds the module with the fault before anything else does."""

    def __init__(self, fault: Fault) -> None:
        parts = fault.path.relative_to(ROOT).with_suffix("").parts
        self._name, self._fault = ".".join(parts), fault

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        loader = Planted(name, str(self._fault.path), self._fault.text)
        return importlib.util.spec_from_file_location(name, self._fault.path, loader=loader)


def run(fault: Fault | None, tests: list[str]) -> int:
    """Runs tests in a process of their own; what pytest ends with: 0 if all pass, 1 if one does not."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    import pytest

    if fault is not None:
        planter: Any = Planter(fault)
        sys.meta_path.insert(0, planter)
    status = 70
    try:
        with contextlib.redirect_stdout(sys.stderr):
            status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests]))
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
    asked = [fault for fault in FAULTS if fault.room in sys.argv[1:] or not sys.argv[1:]]
    os.chdir(ROOT)
    use_memory()
    for name in ("torch", "numpy", "pytest", "safetensors.torch"):
        importlib.import_module(name)
    every = {fault: [f"tests/{test}" for test in fault.tests.split()] for fault in asked}
    ended = {"none": run(None, list(dict.fromkeys(test for tests in every.values() for test in tests)))}
    ended |= {f"{fault.room}/{fault.module}": run(fault, tests) for fault, tests in every.items()}
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
