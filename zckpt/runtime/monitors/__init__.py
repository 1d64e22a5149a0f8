"""Where a run's numbers are sent while it trains: TensorBoard, Weights & Biases, CSV files, Comet."""
