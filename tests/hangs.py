"""How long a test waits for what ought to come: only so that a hang ends; no machine is so busy that it takes as long."""

HANG_S = 1800
