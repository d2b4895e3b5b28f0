"""One run of the loop beside a job."""
