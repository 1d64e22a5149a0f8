"""Which files make one save, what each is called, and what they say of themselves; for every layout."""
