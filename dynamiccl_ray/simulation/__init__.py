"""Many jobs at once on the model of the fabric: where the policy learns."""
