"""The directory of a run with its saves: what lies where, and which saves may go."""
