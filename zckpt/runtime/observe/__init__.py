"""What a step costs: times, memory, operations."""
