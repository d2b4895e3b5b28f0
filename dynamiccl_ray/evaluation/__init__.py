"""What methods are worth: regret on held-out scenarios, by the same measures for all."""
