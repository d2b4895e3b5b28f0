"""Sweeps over experiments and curricula, on Ray Tune."""
