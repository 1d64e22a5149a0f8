"""What a model and a config of the trainer need: `zckpt.estimation` for models that exist and for configs that are read."""
