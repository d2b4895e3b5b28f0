"""What a run has learned as a file, for jobs that run without Ray and without a channel."""
