"""Training on the model of the fabric."""
