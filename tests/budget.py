"""What files of tests may cost, in seconds of processors: those that cost much, by which workers share them (`shares.py`).

Measured on a machine that was busy with other work, where they are up to twice those of an idle one. A file that has come to cost
more than twice as much is told of at the end of a run (`costs.py`).
"""

from __future__ import annotations

BUDGET: dict[str, float] = {
    "tests/checks/test_verify.py": 50,
    "tests/cli/test_bad_input.py": 40,
    "tests/cli/test_cli.py": 40,
    "tests/cli/test_run.py": 10,
    "tests/cli/test_train.py": 25,
    "tests/distributed/test_api.py": 12,
    "tests/distributed/test_checkpoints.py": 120,
    "tests/distributed/test_engine.py": 60,
    "tests/distributed/test_live_ranks.py": 20,
    "tests/distributed/test_matrix.py": 60,
    "tests/distributed/test_swap.py": 45,
    "tests/distributed/test_train.py": 20,
    "tests/estimation/test_measured.py": 12,
    "tests/hostile/test_hostile.py": 60,
    "tests/hub/test_push.py": 15,
    "tests/interop/test_architectures.py": 20,
    "tests/interop/test_callbacks.py": 12,
    "tests/interop/test_config_keys.py": 20,
    "tests/interop/test_dcp.py": 40,
    "tests/interop/test_expert_families.py": 15,
    "tests/interop/test_families.py": 20,
    "tests/interop/test_fp8.py": 15,
    "tests/interop/test_live_deepspeed.py": 10,
    "tests/interop/test_merge_lora.py": 20,
    "tests/interop/test_peft.py": 15,
    "tests/interop/test_resume.py": 65,
    "tests/interop/test_slim.py": 8,
    "tests/interop/test_styles.py": 8,
    "tests/interop/test_to_mcore.py": 45,
    "tests/interop/test_trainer.py": 50,
    "tests/interop/test_universal.py": 16,
    "tests/layouts/test_agreement.py": 16,
    "tests/layouts/test_megatron_core.py": 12,
    "tests/layouts/test_moe.py": 23,
    "tests/layouts/test_mutations.py": 25,
    "tests/layouts/test_second.py": 10,
    "tests/layouts/test_tied.py": 12,
    "tests/output/test_commit.py": 35,
    "tests/output/test_destinations.py": 30,
    "tests/output/test_power.py": 80,
    "tests/output/test_replacing.py": 10,
    "tests/output/test_resume.py": 30,
    "tests/remote/test_commit_at_s3.py": 30,
    "tests/team/test_together.py": 35,
    "tests/test_pages.py": 70,
    "tests/test_public.py": 12,
}
"""File -> its seconds in `make test`; some round numbers from 40 on are guesses, where none was measured."""
