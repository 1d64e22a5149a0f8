"""What a model and a config of the trainer need: `zckpt.estimate` for models that exist and for configs that are read."""
