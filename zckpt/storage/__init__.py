"""Access to files: paths and addresses, descriptors, syncing, small JSON files."""
