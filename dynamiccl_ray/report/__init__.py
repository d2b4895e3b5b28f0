"""Reports: one HTML page that needs nothing else."""
