"""What training beside a job and training in the model share."""
