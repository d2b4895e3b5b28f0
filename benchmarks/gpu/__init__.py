"""The plugin and the loop on real GPUs; see README.md."""
