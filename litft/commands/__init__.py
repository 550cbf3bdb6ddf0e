"""The commands, one file each: what `litft X` does begins in the file X."""
