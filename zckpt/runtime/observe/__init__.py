"""Shows a run's progress: events for monitors, times, memory, operations."""
