"""Names of saves: what is refused, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt.base.errors import OutputError, UsageError
from zckpt.runtime.saves.publication import check_places, check_tag

REFUSED = {
    "empty": [""],
    "a path": ["../x", "a/b", "a\\b", "/x", "x/"],
    "a dot": [".", "..", ".x"],
    "white space": [" x", "x ", "x\n", "\u3000x"],
    "cannot be printed": ["a\0b", "a\nb", "a\tb", "a\u200bb"],
    "something else": [
        "latest", "Latest", "latest_universal", "zero", "zero_to_fp32.py", "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "layer_01-model_00-model_states.pt", "__0_0.distcp",
        "x.distcp", "pytorch_model_fsdp_0", "model.safetensors", "pytorch_model.bin",
    ],
    "256 bytes": ["x" * 256, "\u00e4" * 128],
}  # fmt: skip


@pytest.mark.parametrize(("why", "tag"), [(why, tag) for why, tags in REFUSED.items() for tag in tags])
def test_refused_names(why: str, tag: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_tag(tag)
    assert why in caught.value.found and repr(tag)[:9] in caught.value.found


def test_names_that_a_save_may_have() -> None:
    for tag in ("global_step1", "x" * 255, "checkpoint-5", "a b", "best (2)", "\u00e9tape 3", "-1", "zero1", "latest2"):
        check_tag(tag)


def test_names_that_are_taken(tmp_path: Path) -> None:
    check_places(str(tmp_path), "tag")
    (tmp_path / "tag").mkdir()
    check_places(str(tmp_path), "tag")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "tag")
    for tag in ("file", "link"):
        with pytest.raises(OutputError, match=f"/{tag}: exists"):
            check_places(str(tmp_path), tag)
    (tmp_path / "latest").mkdir()
    with pytest.raises(OutputError, match="/latest: exists"):
        check_places(str(tmp_path), "tag")
