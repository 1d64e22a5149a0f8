"""DeepSpeed's names: which there are, where what they mean is built, and what those that are not built say."""
