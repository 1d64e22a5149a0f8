"""Models split over tensor- and pipeline-parallel ranks: the files of each rank are a save of slices."""
