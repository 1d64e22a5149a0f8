"""What files of tests may cost, in seconds of processors: those that cost much, by which workers share them (`shares.py`).

Measured on a machine that was busy with other work, where they are up to twice those of an idle one. A file that has come to cost
more than twice as much is told of at the end of a run (`costs.py`).
"""

from __future__ import annotations

BUDGET: dict[str, float] = {
    "tests/checks/test_early.py": 11,
    "tests/checks/test_verify.py": 22,
    "tests/cli/test_cli.py": 10,
    "tests/cli/test_front_door.py": 13,
    "tests/cli/test_train.py": 15,
    "tests/distributed/test_api.py": 11,
    "tests/distributed/test_checkpoints.py": 100,
    "tests/distributed/test_engine.py": 55,
    "tests/distributed/test_live_ranks.py": 32,
    "tests/distributed/test_matrix.py": 16,
    "tests/distributed/test_pretrained.py": 12,
    "tests/distributed/test_swap.py": 22,
    "tests/distributed/test_train.py": 14,
    "tests/engine/test_confirm.py": 10,
    "tests/engine/test_move.py": 9,
    "tests/estimation/test_measured.py": 11,
    "tests/hostile/test_fuzz.py": 11,
    "tests/hostile/test_hostile.py": 19,
    "tests/hostile/test_objects.py": 36,
    "tests/hub/test_interrupted.py": 12,
    "tests/hub/test_load.py": 8,
    "tests/hub/test_push.py": 14,
    "tests/interop/test_bridge.py": 25,
    "tests/interop/test_dcp.py": 25,
    "tests/interop/test_engines.py": 20,
    "tests/interop/test_fixtures.py": 25,
    "tests/interop/test_resume.py": 20,
    "tests/interop/test_to_mcore.py": 53,
    "tests/interop/test_trainer.py": 44,
    "tests/interop/test_universal.py": 18,
    "tests/jobs/test_open.py": 14,
    "tests/jobs/test_quantize.py": 9,
    "tests/jobs/test_reshard.py": 25,
    "tests/layouts/test_moe.py": 9,
    "tests/layouts/test_mutations.py": 12,
    "tests/live/test_live.py": 12,
    "tests/output/test_commit.py": 28,
    "tests/output/test_destinations.py": 18,
    "tests/output/test_power.py": 35,
    "tests/output/test_resume.py": 15,
    "tests/remote/test_addresses.py": 25,
    "tests/remote/test_commit.py": 18,
    "tests/remote/test_commit_at_s3.py": 20,
    "tests/remote/test_computed.py": 9,
    "tests/remote/test_verify.py": 16,
    "tests/team/test_together.py": 26,
    "tests/test_drop_in.py": 16,
    "tests/test_pages.py": 79,
}
"""File -> its seconds in `make test`, from 8 on."""
