"""Where bytes lie: paths and addresses, descriptors, syncing, small JSON files."""
