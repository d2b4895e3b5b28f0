"""The plugin and the loop on one GPU that all ranks share, threads of one process; see README.md."""
