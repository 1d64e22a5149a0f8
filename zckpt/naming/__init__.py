"""Names and rows as somebody else wants them: transformers, PEFT, a pipeline's own layer names."""
