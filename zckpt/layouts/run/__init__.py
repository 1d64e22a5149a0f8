"""What a run needs beside its weights to resume: states, parameter groups, settings; and whether the files agree on it."""
