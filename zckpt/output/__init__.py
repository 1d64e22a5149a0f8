"""Writes outputs so that a reader sees all of an output or nothing of it: one protocol for all files on a local file system.

For every job that writes files, and for the trainer's saves.

[Note: the protocol]
 1. Stage. All files are written into `files/` of the work directory (`.OUT.zckpt` beside the output, or `.zckpt` in it
    where OUT is a mount point), complete and durable. No reader looks there. A lock in the directory keeps a second run out.
 2. Seal. A line in the work directory's journal says that the output is complete, with every file and checksum, and what it
    replaces: the old files, by inode number. The line is durable before anything gets or loses a name.
 3. Commit. The staged directory gets the output's name in one step, by rename or RENAME_EXCHANGE; files of the old directory
    that stay are hard links in the new one. Where that cannot be done (no exchange, a mount point, directories that are not
    zckpt's to move), the order makes every moment safe: what is replaced is moved into the work directory, indexes first;
    then the new files are moved in, indexes and manifest last. A reader sees the old output, the new one, or no index.
    Each of these four steps is durable before the next begins, so this holds after a power failure too.
 4. Clean. Only what was replaced is deleted: files that the old `zckpt.json` lists, or that have new versions.
 5. Recover. The next run that takes the work directory first finishes a sealed commit. It finds the remaining steps by
    looking at which files have not been moved yet, never by sizes or checksums. A work directory with a seal is never removed.
"""
