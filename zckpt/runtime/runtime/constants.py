"""`deepspeed.runtime.constants`: the names that scripts use."""

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
ROUTE_ENCODE = "encode"

__all__ = ["ROUTE_ENCODE", "ROUTE_EVAL", "ROUTE_PREDICT", "ROUTE_TRAIN"]
