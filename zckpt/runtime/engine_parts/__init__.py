"""What scripts call of an engine beside forward, backward and step: DeepSpeed's methods and attributes."""
