"""An output appears whole or not at all: one protocol for everything that zckpt writes on a local file system.

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
 4. Clean. Only what was replaced is deleted: files that the old `zckpt.json` lists, or that have new versions.
 5. Recover. Whoever takes the work directory next first finishes what is sealed. What is still to be done follows from what
    still lies there, never from sizes or checksums. A work directory with a seal is never removed.
"""
