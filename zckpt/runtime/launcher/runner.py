"""`deepspeed.launcher.runner`: the name that `accelerate launch` imports before it starts torchrun's processes.

Source: DeepSpeed 0.19.8, launcher/runner.py.
"""

import os

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
