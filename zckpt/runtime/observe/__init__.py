"""What a run shows of itself: events for monitors, times, memory, operations."""
