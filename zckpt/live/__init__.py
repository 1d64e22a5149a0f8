"""Models that live in memory: a checkpoint loaded into one, and its weights taken out, whole, while it trains.

For scripts that train: `save_pretrained` and `consolidate`; for `drop_in` and whoever has a catalog and a module: `load_into`.
The only rooms with torch at module level, beside `drop_in` and `runtime`.
"""

from zckpt.live.export import consolidate, save_pretrained, small_files
from zckpt.live.loading import LoadReport, load_into, move

__all__ = ["LoadReport", "consolidate", "load_into", "move", "save_pretrained", "small_files"]
