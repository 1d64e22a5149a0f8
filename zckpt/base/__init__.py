"""What can go wrong, as one tree of errors; what a stranger's file may cost; how hard to work."""
